"""The hot path: one function generated per kernel, in which a tuned call is a dict lookup and nothing else.

For `def scale(x, out, factor, causal, *, config)` the generated function is, once it has seen its arguments::

    def scale(x, out, factor, causal, *, config=None):
        if config is None:
            if (x.__class__ is _ndarray and x.flags.c_contiguous and ... and factor.__class__ is _int
                    and (causal is True or causal is False)):
                try:
                    found = _fast[x.shape, x.dtype, out.shape, out.dtype, factor, causal]
                except (KeyError, TypeError):
                    pass
                else:
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
from tunebook._registry import recordings
from tunebook._scope import INNERMOST
from tunebook._signature import ANY, Leaf, Signature, exact_leaf, leaf_for

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from tunebook._selection import ConfigSelectorChain, Selection
    from tunebook._types import Problem


class Answer(NamedTuple):
    """A memoised answer, with the event that stands for giving it once more."""

    config: Any
    event: str
    level: dict[str, str]


def _answer(selection: Selection[Any]) -> Answer:
    # Asked again, what was tuned or read from disk would be found in memory.
    if selection.remember or selection.event == "cache_hit":
        return Answer(selection.config, "cache_hit", {"level": "memory"})
    return Answer(selection.config, selection.event, {})


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
        problem: Callable[..., Problem],
        selector: ConfigSelectorChain[Any],
        observe: Callable[..., None],
        as_config: Callable[[object], object],
    ) -> None:
        """`names` are the parameters that count; the callables take one argument per parameter of the function."""
        self._implementation = implementation
        self._names = frozenset(names)
        self._layout = layout
        self._select, self._problem, self._observe = select, problem, observe
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
            "_fast": self._answers.fast,
            "_miss": self.miss,
            "_override": self.override,
            "_impl": self._signature.positional_twin or self._implementation,
            "_leaf": exact_leaf,
            **{f"_class_{name}": kind for name, kind in self._classes.items()},
        }
        source = self._signature.source(self._leaves, self._names)
        exec(compile(source, f"<tunebook {self._signature.name}>", "exec"), namespace)  # noqa: S102 - as dataclasses do
        return _Generated(*(namespace[name] for name in _Generated._fields))

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
            self.function.__globals__.update({f"_class_{name}": kind for name, kind in self._classes.items()})
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
            self._select(arguments, config)
        return self._generated.run(*arguments, config)

    def config(self, arguments: tuple[Any, ...]) -> Any:
        """Return the configuration for a call."""
        epoch = GATE.epoch
        try:
            key = self._generated.exact_key(*arguments)
            answer = self._answers.known.get(key)
        except (TypeError, AttributeError):
            key = answer = None
        # Only where nothing is scoped: an overlay or a policy of this thread or task may change the answer.
        plain = INNERMOST.get() is None
        if answer is None or not plain:
            selection = self._select(arguments, None)
            if plain and not selection.transient and not recordings():
                self._memoise(arguments, selection, epoch)
            return selection.config
        if self._selector.listeners:
            problem = self._problem(arguments)
            self._selector.tell(answer.event, problem, cfg=answer.config, **answer.level)
        elif not GATE.holds:
            self._open_fast(arguments, key, answer.config)
        return answer.config

    def _memoise(self, arguments: tuple[Any, ...], selection: Selection[Any], epoch: int) -> None:
        self._specialise(arguments)
        try:
            key, fast_key = self._generated.exact_key(*arguments), self._generated.fast_key(*arguments)
            hash((key, fast_key))
        except (TypeError, AttributeError):
            return  # an argument that has no cheap exact key: such calls always go the long way, and are still right
        GATE.remember(self._answers, selection.problem, key, fast_key, _answer(selection), epoch)
        if not self._selector.listeners:
            self._open_fast(arguments, key, selection.config)

    def _open_fast(self, arguments: tuple[Any, ...], key: Hashable, config: object) -> None:
        fast_key = self._generated.fast_key(*arguments)
        if fast_key is not None:
            GATE.open_fast(self._answers, key, fast_key, config)

    def _recorded(self, config: object | None, arguments: tuple[Any, ...]) -> Any:
        selection = self._select(arguments, config)
        start = time.perf_counter()
        result = self._generated.run(*arguments, selection.config)
        self._observe(selection.problem, arguments, time.perf_counter() - start)
        return result
