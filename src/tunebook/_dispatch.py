"""The hot path: one function generated per kernel, in which a tuned call is a dict lookup and nothing else.

For `def scale(x, out, factor, causal, *, config)` the generated function is, once it has seen its arguments::

    def scale(x, out, factor, causal, *, config=None):
        if config is None:
            if (x.__class__ is _ndarray and x.flags.c_contiguous and ... and factor.__class__ is _int
                    and (causal is True or causal is False)):
                try:
                    key = x.shape, x.dtype, out.shape, out.dtype, factor, causal
                    found = _fast[key]
                except KeyError:
                    found = _known(key)
                else:
                    return _impl(x, out, factor, causal, found)
                if found is not None:
                    return _impl(x, out, factor, causal, found)
            return _miss(x, out, factor, causal)
        return _override(config, x, out, factor, causal)

Generated, because a class with `__call__`, a partial or an `*args` wrapper each adds 220 to 280 ns to a lookup of 450.
The guards make the short key exact: `True == 1 == 1.0` as dict keys, and a jax array has numpy's dtypes. There is no
one-entry inline cache: it makes calls of alternating shapes slow (a peer goes from 2 to 155 us).
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._gate import GATE, Answers
from tunebook._leaf import exact_leaf
from tunebook._registry import recordings
from tunebook._scope import INNERMOST
from tunebook._selection import event_data
from tunebook._signature import ANY, Leaf, Signature, leaf_for

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from tunebook._selection import ConfigSelectorChain, Selection


class Answer(NamedTuple):
    """A memoised answer, with the event that stands for giving it once more.

    The event's data are made once: made at every call, they would be a quarter of a call with a listener.
    """

    config: Any
    event: str
    data: dict[str, Any]


def _answer(selection: Selection[Any]) -> Answer:
    # Asked again, what was tuned or read from disk would be found in memory.
    in_memory = selection.remember or selection.event == "cache_hit"
    data = event_data(selection.problem, cfg=selection.config, level="memory" if in_memory else None)
    return Answer(selection.config, "cache_hit" if in_memory else selection.event, data)


class _Generated(NamedTuple):
    """The functions generated together; replaced together, so that their keys always have the same form."""

    call: Any  # functions; called Any, because a function in a class is a method to the type checker
    run: Any
    exact_key: Any
    fast_key: Any


class Dispatcher:
    """Owns a kernel's generated function, and answers the calls that it cannot."""

    def __init__(
        self,
        implementation: Callable[..., Any],
        *,
        names: Sequence[str],
        layout: bool,
        select: Callable[..., Selection[Any]],
        selector: ConfigSelectorChain[Any],
        observe: Callable[..., None],
        as_config: Callable[[object], object],
    ) -> None:
        """`names` are the parameters that count; the callables take one argument per parameter of the function."""
        self._implementation = implementation
        self._names = frozenset(names)
        self._layout = layout
        self._select, self._observe = select, observe
        self._selector = selector
        self._as_config = as_config
        self._answers = Answers()
        self._leaves: dict[str, Leaf] = {}
        self._classes: dict[str, type] = {}
        self._signature = Signature(implementation)
        self._lock = threading.Lock()
        self._generated = self._generate()
        self.function: Final = self._generated.call
        GATE.register(self._answers)

    def _generate(self) -> _Generated:
        namespace = {
            **self._signature.defaults,
            "_tb_fast": self._answers.fast,
            "_tb_known": self.known,
            "_tb_miss": self.miss,
            "_tb_override": self.override,
            "_tb_impl": self._signature.positional_twin or self._implementation,
            "_tb_leaf": exact_leaf,
            **self._seen_classes(),
        }
        source = self._signature.source(self._leaves, self._names)
        exec(compile(source, f"<tunebook {self._signature.name}>", "exec"), namespace)  # noqa: S102 - as dataclasses do
        return _Generated(*(namespace[name] for name in _Generated._fields))

    def _seen_classes(self) -> dict[str, type]:
        return {f"_tb_class_{name}": kind for name, kind in self._classes.items()}

    def _specialise(self, arguments: tuple[Any, ...]) -> None:
        """Generate the code anew for the kinds of arguments seen; the public function keeps its identity."""
        with self._lock:
            before = dict(self._leaves)
            for name, value in zip(self._signature.names, arguments, strict=True):
                if name in self._names:
                    self._note_kind(name, value)
            if before == self._leaves:
                return
            self._generated = self._generate()
            # Answers under keys of the old form could never be found again.
            GATE.forget(self._answers)
            self.function.__globals__.update(self._seen_classes())
            self.function.__code__ = self._generated.call.__code__

    def _note_kind(self, name: str, value: object) -> None:
        leaf = leaf_for(value, layout=self._layout)
        known = self._leaves.setdefault(name, leaf)
        if known is not leaf or self._classes.setdefault(name, type(value)) is not type(value):
            self._leaves[name] = ANY

    def miss(self, *arguments: Any) -> Any:
        """Answer a call that the hot path could not, and run it."""
        if recordings():
            return self._recorded(None, arguments)
        return self._generated.run(*arguments, self.config(arguments))

    def run(self, *arguments: Any) -> Any:
        """Run the author's function; the last argument is the configuration."""
        return self._generated.run(*arguments)

    def override(self, config: object, *arguments: Any) -> Any:
        """Run a call with the configuration that was given with it."""
        config = self._as_config(config)
        if recordings():
            return self._recorded(config, arguments)
        if self._selector.listeners:
            self._select(arguments, config, None)
        return self._generated.run(*arguments, config)

    def known(self, key: Hashable) -> Any:
        """Give a memoised answer where the hot path may not give it by itself; None if there is none."""
        # Only where nothing is scoped: an overlay or a policy of this thread or task may change the answer.
        answer = self._answers.known.get(key) if INNERMOST.get() is None else None
        if answer is None:
            return None
        listeners = self._selector.listeners
        for listener in listeners:
            listener(answer.event, **answer.data)
        if not listeners and not GATE.holds and key not in self._answers.fast:
            GATE.open_fast(self._answers, key, answer)
        return answer.config

    def config(self, arguments: tuple[Any, ...]) -> Any:
        """Return the configuration for a call."""
        epoch = GATE.epoch
        key = self._key(arguments)
        if key is not None and (found := self.known(key)) is not None:
            return found
        # Working out which problem a call is takes longest of all, and under an overlay every call comes here.
        problem = None if key is None else self._answers.problems.get(key)
        selection = self._select(arguments, None, problem)
        if INNERMOST.get() is None and not selection.transient and not recordings():
            self._memoise(arguments, selection, epoch)
        if key is not None and problem is None:
            GATE.note(self._answers, key, selection.problem)
        return selection.config

    def _key(self, arguments: tuple[Any, ...]) -> Hashable | None:
        """Return the hot path's key if its guards hold, else the exact one; None if an argument has no cheap key."""
        generated = self._generated
        try:
            key: Hashable = generated.fast_key(*arguments)
            if key is None:  # not "or": () is a key, that of a call whose arguments are all None
                key = generated.exact_key(*arguments)
            hash(key)
        except (TypeError, AttributeError):
            return None  # such calls always go the long way, and are still right
        return key

    def _memoise(self, arguments: tuple[Any, ...], selection: Selection[Any], epoch: int) -> None:
        self._specialise(arguments)
        key = self._key(arguments)
        if key is not None:
            answer = _answer(selection)
            GATE.remember(self._answers, selection.problem, key, answer, epoch=epoch)
            if not self._selector.listeners:
                GATE.open_fast(self._answers, key, answer)

    def _recorded(self, config: object | None, arguments: tuple[Any, ...]) -> Any:
        selection = self._select(arguments, config, self._answers.problems.get(self._key(arguments)))
        start = time.perf_counter()
        result = self._generated.run(*arguments, selection.config)
        self._observe(selection.problem, arguments, time.perf_counter() - start)
        return result
