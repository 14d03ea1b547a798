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

Where the accelerator has been built (`_packed.c`) and knows every argument so far, the function is shorter::

            found = _find(x, out, factor, causal)
            if found is not None:
                return _impl(x, out, factor, causal, found)
            return _miss(x, out, factor, causal)

Generated, because a class with `__call__`, a partial or an `*args` wrapper each adds 220 to 280 ns to a lookup of 450.
The guards make the short key exact: `True == 1 == 1.0` as dict keys, and a jax array has numpy's dtypes. It has no
one-entry inline cache, which makes calls of alternating shapes slow (a peer goes from 2 to 155 us).
"""

from __future__ import annotations

import time
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._arrays.describe import is_compiling
from tunebook._arrays.library import hot_names
from tunebook._base.environment_variables import accelerator_wanted
from tunebook._base.errors import TunebookError, hide_own_frames, is_own_fault
from tunebook._hotpath.codegen import ANY, Signature, find_pack, finder_of, reader_for
from tunebook._keys.call_key import fast_key_of
from tunebook._memo.answer_memo import MEMO, Answers
from tunebook._memo.context_stack import INNERMOST
from tunebook._selection.listeners import listener_failed
from tunebook._selection.recording import recordings
from tunebook._selection.tiers import event_data

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence
    from types import TracebackType

    from tunebook._arrays.library import ArgumentReader
    from tunebook._base.vocabulary import Event
    from tunebook._hotpath.codegen import Pack
    from tunebook._selection.selector import ConfigSelectorChain, Selection
    from tunebook._selection.tiers import Session


MISSING: Final = object()  # an argument that a call left out, where a call is refused by `refuse` and not by Python


class MemoisedAnswer(NamedTuple):
    """A memoised answer. `tell` tells the listeners, if any; a new listener makes the memo forget all answers."""

    config: Any
    tell: Callable[[], object] | None


def memoised_answer(selection: Selection[Any], listeners: Sequence[Callable[..., object]]) -> MemoisedAnswer:
    """Return the answer that later calls of the same kind get, and the listeners to tell."""
    # Asked again, a configuration that was tuned or read from disk would be found in memory.
    in_memory = selection.remember or selection.event == "cache_hit"
    event: Event = "cache_hit" if in_memory else selection.event
    rung = {} if selection.trust is None else {"trust": selection.trust[0]}
    data = event_data(selection.problem, event, cfg=selection.config, level="memory" if in_memory else None, **rung)
    calls = [_call_maker(tuple(data))(listener, event, *data.values()) for listener in listeners]

    def tell_all() -> None:
        for call in calls:
            call()

    return MemoisedAnswer(selection.config, tell_all if len(calls) > 1 else next(iter(calls), None))


@cache
def _call_maker(names: tuple[str, ...]) -> Callable[..., Callable[[], object]]:
    """Return a function that makes the call which tells a listener an event, with data of these names."""
    # Generated, because `listener(event, **data)` takes 120 ns more than names that are written out: a fifth of a call.
    passed = ", ".join(f"{name}={name}" for name in names)
    source = _TELLING.format(names=", ".join(names), passed=passed)
    namespace: dict[str, Any] = {"failed": listener_failed}
    exec(compile(source, "<tunebook events>", "exec"), namespace)  # noqa: S102 - names of our own events
    made: Callable[..., Callable[[], object]] = namespace["make"]
    return made


# A listener may raise anything, which must not fail the call. A `try` costs nothing where nothing is raised.
_TELLING: Final = """
def make(listener, event, {names}):
    def tell():
        try:
            listener(event, {passed})
        except Exception as error:  # a listener may raise anything
            failed(error, listener)
    return tell
"""


def flatten(value: Any) -> list[Any]:
    """Return the leaves of nested containers, each container as its kind and size. Torch's compiler reads this code."""
    if isinstance(value, dict):
        return [dict, len(value), *(part for item in value.items() for part in flatten(item))]
    if isinstance(value, (tuple, list)):
        return [type(value), len(value), *(part for item in value for part in flatten(item))]
    return [None, value]


def unflatten(parts: Iterator[Any]) -> Any:
    """Return the value that `flatten` took apart."""
    kind, value = next(parts), next(parts)
    if kind is None:
        return value
    items = [unflatten(parts) for _ in range(value)]
    return kind(items) if kind in (dict, tuple, list) else kind(*items)


class _Generated(NamedTuple):
    """The functions generated together; replaced together, so that their keys always have the same form."""

    call: Any  # functions; called Any, because a function in a class is a method to the type checker
    run: Any
    exact_key: Any
    fast_key: Any


class ProgramsLines:
    """A block whose errors show the lines of the program alone, unless the fault is in this package."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, (TunebookError, KeyboardInterrupt)):  # about the program, whose lines tell where
            error.__suppress_context__ = True
        elif error is None or is_own_fault(trace):
            return
        hide_own_frames(error)  # Python adds no line to a traceback where a block ends


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
        observe: Callable[..., Callable[[float], None]],
        as_config: Callable[[object, tuple[Any, ...] | None], object],
        refuse: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        """`names` are the parameters that count; the callables take one argument per parameter of the function.

        With `refuse`, which gets unknown keyword arguments, calls return the configuration. An argument that is left
        out is `MISSING`.
        """
        self._implementation, self._names, self._layout = implementation, frozenset(names), layout
        self._select, self._observe, self._selector, self._as_config = select, observe, selector, as_config
        self._answers = Answers()
        self._readers: dict[str, ArgumentReader] = {}
        self._classes: dict[str, type] = {}
        self._packs = accelerator_wanted()  # until a call comes that cannot be packed
        self._pack: Pack | None = None
        self._refuse = refuse
        self._signature = Signature(implementation, returns_config=refuse is not None)
        self._constants = SimpleNamespace()
        self._generated = self._generate()
        self._generated_for = self._form()
        self.function: Final = self._generated.call
        MEMO.register(self._answers)

    def _generate(self) -> _Generated:
        namespace = {
            **self._signature.defaults,
            "_tb_fast": self._answers.fast,
            "_tb_known": self.known,
            "_tb_miss": self.miss,
            "_tb_override": self.override,
            "_tb_impl": self._signature.positional_twin or self._implementation,
            "_tb_leaf": fast_key_of,
            "_tb_refuse": self._refuse,
            "_tb_missing": MISSING,
            **self._seen(),
        }
        packed, compiled = self._pack is not None, "_tb_compiling" in namespace
        source = self._signature.source(self._readers, self._names, packed=packed, compiled=compiled)
        exec(compile(source, f"<tunebook {self._signature.name}>", "exec"), namespace)  # noqa: S102 - as dataclasses do
        return _Generated(*(namespace[name] for name in _Generated._fields))

    def _seen(self) -> dict[str, Any]:
        """Return the names of the generated code whose values change with the arguments seen.

        A thread that is inside the old code goes on loading them. So a name keeps the kind of its value for good: a
        kernel that leaves the packed way keeps its finder, whose keys are not found any more.
        """
        names = {f"_tb_class_{name}": kind for name, kind in self._classes.items()} | hot_names()
        if self._pack is not None:
            names |= {"_tb_pack": self._pack, "_tb_find": finder_of(self._pack, self._answers, self.known)}
        return names

    def _specialise(self, arguments: tuple[Any, ...]) -> None:
        """Generate the code anew for the kinds of arguments seen; the public function keeps its identity."""
        # The memo's lock is re-entrant, because a finaliser may call this kernel meanwhile, and open in a forked child.
        with MEMO.lock:
            used = {n: x for n, x in zip(self._signature.names, arguments, strict=True) if n in self._names}
            for name, value in used.items():
                reader = reader_for(value, layout=self._layout)
                known = self._readers.setdefault(name, reader)
                fixed = self._classes.setdefault(name, type(value)) if "{1}" in reader.guard else type(value)
                if known != reader or fixed is not type(value):
                    self._readers[name] = ANY
            pack = find_pack(layout=self._layout) if self._packs else None
            self._packs = pack is not None and pack(*used.values()) is not None
            self._pack = pack if self._packs else None
            form = self._form()
            if form == self._generated_for:
                return
            self._generated = self._generate()
            # Answers under keys of the old form could never be found again.
            MEMO.forget(self._answers)
            self.function.__globals__.update(self._seen())
            self.function.__code__ = self._generated.call.__code__
            self._generated_for = form  # last: after an interrupt, the next call generates the code

    def forget(self) -> None:
        """Select anew at the next call of each kind, because a change made the answers so far wrong."""
        MEMO.forget(self._answers, wrong=True)

    def _form(self) -> object:
        """Return the form of the keys: packed keys have one form for arguments of any kind."""
        return self._pack or dict(self._readers)

    def miss(self, *arguments: Any) -> Any:
        """Answer a call that the hot path could not, and run it."""
        if is_compiling():
            return self._generated.run(*arguments, getattr(self._constants, self.constant(*flatten(arguments))))
        with ProgramsLines():
            if MEMO.suspended and recordings():  # a recording suspends the memo
                return self._run_recorded(None, arguments)
            config, exploration = self.choose(arguments)
            return self._generated.run(*arguments, config) if exploration is None else exploration.run(arguments, {})

    def run(self, *arguments: Any) -> Any:
        """Run the author's function; the last argument is the configuration."""
        return self._generated.run(*arguments)

    def override(self, config: object, *arguments: Any) -> Any:
        """Run a call with the configuration that was given with it."""
        if is_compiling():
            return self._generated.run(*arguments, getattr(self._constants, self.given(config)))
        try:
            config = self._as_config(config, arguments)
        except TunebookError as error:  # not `ProgramsLines`, a tenth of such a call
            hide_own_frames(error)
            raise
        if recordings():
            return self._run_recorded(config, arguments)
        if self._selector.listeners:
            self._select(arguments, config, None)
        return self._generated.run(*arguments, config)

    def constant(self, *parts: Any) -> str:
        """Return the name of the configuration for a call that is being compiled, and does not ask again.

        Torch's compiler calls this with tensors that have values, and takes the result for a constant. A name, because
        the compiler cannot read an item of an object of unknown origin; and `flatten`, because it does not look for
        tensors in containers.
        """
        arguments: tuple[Any, ...] = unflatten(iter(parts))
        config, exploration = (None, None) if recordings() else self.choose(arguments)
        if config is not None and exploration is None:
            return self._keep(config)
        # A program has one configuration, so candidates cannot be tried in its calls.
        selection = self._select(arguments, None, None)
        if recordings():
            self._observe(selection.problem, arguments)(0.0)
        return self._keep(selection.config)

    def given(self, config: object) -> str:
        """Return the name of a configuration that was given with a call that is being compiled."""
        return self._keep(self._as_config(config, None))

    # As `torch.compiler.assume_constant_result` does, but torch is not imported here.
    constant._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001 - torch's mark
    given._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001 - torch's mark

    def _keep(self, config: object) -> str:
        kept = vars(self._constants)
        name = next((name for name, value in kept.items() if value is config), f"config{len(kept)}")
        kept[name] = config
        return name

    def known(self, key: Hashable) -> Any:
        """Return the memoised answer that the hot path may not give by itself, or None."""
        # Only where nothing is scoped: an overlay or a policy of this thread or task may change the answer.
        answer = self._answers.known.get(key) if INNERMOST.get() is None else None
        if answer is None:
            return None
        config, tell = answer
        if tell is not None:
            tell()
        elif not MEMO.suspended and key not in self._answers.fast:
            MEMO.open_fast(self._answers, key, answer)
        return config

    def choose(self, arguments: tuple[Any, ...]) -> tuple[Any, Session | None]:
        """Return the configuration for a call, or the session that is to run it."""
        epoch = MEMO.epoch
        key = self._key(arguments)
        if key is not None and (found := self.known(key)) is not None:
            return found, None
        explored = None if key is None or INNERMOST.get() is not None else self._answers.explored.get(key)
        if explored is not None:  # candidates are tried in calls of this kind for now
            if explored.tell is not None:
                explored.tell()
            return None, explored.config
        # Working out which problem a call is takes longest of all, and under an overlay every call comes here.
        problem = None if key is None else self._answers.problems.get(key)
        selection = self._select(arguments, None, problem)
        if INNERMOST.get() is None and not selection.transient and not (MEMO.suspended and recordings()):
            self._memoise(arguments, selection, epoch)
        if key is not None and problem is None:
            MEMO.note(self._answers, key, selection.problem)
        return selection.config, selection.exploration

    def _key(self, arguments: tuple[Any, ...]) -> Hashable | None:
        """Return the hot path's key if its guards hold, else the exact one; None if an argument has no cheap key."""
        generated = self._generated
        for make in (generated.fast_key, generated.exact_key):
            try:
                key: Hashable = make(*arguments)
                hash(key)
            except RuntimeError:
                continue  # a sparse tensor that was asked for its strides
            except (TypeError, AttributeError):
                return None  # the call always goes the long way, and is still right
            if key is not None:  # () is a key, that of a call whose arguments are all None
                return key
        return None

    def _memoise(self, arguments: tuple[Any, ...], selection: Selection[Any], epoch: int) -> None:
        self._specialise(arguments)
        key = self._key(arguments)
        if key is not None:
            answer, explored = memoised_answer(selection, self._selector.listeners), selection.exploration is not None
            answer = answer._replace(config=selection.exploration) if explored else answer
            MEMO.remember(self._answers, selection.problem, key, answer, epoch=epoch, explored=explored)
            if answer.tell is None and not explored:
                MEMO.open_fast(self._answers, key, answer)

    def _run_recorded(self, config: object | None, arguments: tuple[Any, ...]) -> Any:
        selection = self._select(arguments, config, self._answers.problems.get(self._key(arguments)))
        ran = self._observe(selection.problem, arguments)  # before the run, which may write to its arguments
        start = time.perf_counter()
        result = self._generated.run(*arguments, selection.config)
        ran(time.perf_counter() - start)
        return result
