"""The programs that jax keeps, and making it forget those in which a tunable call chose a configuration.

There is no public way to ask for them, and a new value of a user context makes every function of the process be traced
again. But an equation knows the Python frames that it was made in: a program with a frame of ours in it is one of
those, however deep it is nested, and whatever it was derived from. So nothing has to be noted while a program is
traced, where 30 ns would be an eighth of a known call. It takes 10 ms for a thousand equations.

Should another release of jax keep its programs in another way, that is found out by trying: the caller is told that
nothing could be forgotten.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from tunebook._api.executor import Executor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import CodeType

_GENERATED: Final = "<tunebook "  # what `_dispatch` generates has no file
_EXECUTOR: Final = Executor.__call__.__code__.co_filename
# In these, functions with rules of their own are called: to be differentiated by, or batched. What a rule makes does
# not have its own frames, but those of the call that it is a rule for, so that any rule may have made a tunable call.
_RULES: Final = tuple(
    f"jax._src.{name}" for name in ("custom_derivatives", "custom_batching", "custom_transpose", "custom_dce", "hijax")
)
# In these a function is being traced or compiled, or a program of one is looked for.
_TRACING: Final = ("jax._src.pjit", "jax._src.interpreters.partial_eval")


def forget_tuned() -> bool:
    """Make jax forget the programs with tunable calls; False if others may be left, and all have to be made again."""
    return not is_tracing() and _can_forget() and _forget_all()


def _forget_all() -> bool:
    _forget()
    # A thread that has read what was forgotten after it may put it back: it is inside of jax, or it has done so by now.
    busy = is_tracing()
    _forget()
    return not busy


def is_tracing() -> bool:
    """Return whether jax is making a program in any thread."""
    files = _files_of(_TRACING)
    return any(_is_in(files, frame) for frame in sys._current_frames().values())  # noqa: SLF001 - its documented name


def _files_of(modules: Iterable[str]) -> frozenset[str | None]:
    return frozenset(getattr(sys.modules.get(name), "__file__", None) for name in modules)


def _is_in(files: frozenset[str | None], frame: Any) -> bool:
    while frame is not None:
        if frame.f_code.co_filename in files:
            return True
        frame = frame.f_back
    return False


def _forget() -> None:
    every = sys.modules["jax._src.util"]._caches  # noqa: SLF001 - see above
    caches = [kept for kept in list(every) if type(kept).__name__ == "WeakrefLRUCache"]
    search = _ProgramSearch()
    tuned = {id(key): key for kept in caches for key, value in _entries(kept) if search.finds_one_in(value)}
    for kept in caches:
        # Also what else is kept for the same function. One that a cache does not have could not be compared with those
        # that it has: they are functions, programs, and modules of MLIR, which compare with nothing else.
        for key in [key for weak, *_ in kept.cache_keys() if id(key := weak()) in tuned]:
            kept.evict_weakref(key)
    # By these jit finds compiled programs. Those whose traces are still there are found again by them, in 0.3 ms.
    for name in ("_cpp_pjit_cache_fun_only", "_cpp_pjit_cache_explicit_attributes"):
        getattr(sys.modules["jax._src.pjit"], name).clear()
    sys.modules["jaxlib._jax"].PjitFunctionCache.clear_all()


def _entries(kept: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what a cache of jax's has, and for which function or program.

    Its values cannot be asked for, but the garbage collector is told: of each entry the key, then the value.
    """
    starts = {id(weak) for weak, *_ in kept.cache_keys()}
    key = None
    for part in gc.get_referents(kept):
        if isinstance(part, weakref.ref) and id(part) in starts:
            key = part()
        elif key is not None:
            yield key, part


def _programs_in(value: Any) -> Iterator[Jaxpr]:
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _programs_in(part)


class _ProgramSearch:
    """Which programs may have a tunable call in them; each is looked at once."""

    def __init__(self) -> None:
        self._rules = _files_of(_RULES)
        self._known: dict[int, bool] = {}
        self._tracebacks: dict[Any, bool] = {}

    def finds_one_in(self, value: Any) -> bool:
        """Return whether a tunable call may be in what jax has kept."""
        return any(map(self._has_one, _programs_in(value)))

    def _has_one(self, program: Jaxpr) -> bool:
        known = self._known.get(id(program))
        if known is None:
            known = self._known[id(program)] = any(map(self._is_of_one, program.eqns))
        return known

    def _is_of_one(self, equation: Any) -> bool:
        return self._was_made_in_one(equation.source_info.traceback) or any(
            map(self.finds_one_in, equation.params.values())
        )

    def _was_made_in_one(self, traceback: Any) -> bool:
        if traceback is None:
            return False
        known = self._tracebacks.get(traceback)
        if known is None:
            known = self._tracebacks[traceback] = any(map(self._may_be_one, traceback.raw_frames()[0]))
        return known

    def _may_be_one(self, code: CodeType) -> bool:
        file = code.co_filename
        is_rule = code.co_name == "__call__" and file in self._rules
        return is_rule or file == _EXECUTOR or file.startswith(_GENERATED)


@cache
def _can_forget() -> bool:
    """Return whether this jax keeps its programs in the way that is looked for, tried out once: 0.2 s."""
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(_try_to_forget()))  # one that no user's trace or mesh is in
    thread.start()
    thread.join()
    return found == [True]


def _try_to_forget() -> bool:
    traces: list[str] = []

    def traced(name: str, function: Callable[[Any], Any], **options: Any) -> Callable[[Any], Any]:
        def note(x: Any) -> Any:
            traces.append(name)
            return function(x)

        jitted: Callable[[Any], Any] = jax.jit(note, **options)
        return jitted

    names: dict[str, Any] = {}
    exec(compile("def tuned(x): return x + x", f"{_GENERATED}trial>", "exec"), names)  # noqa: S102 - as `_dispatch` does
    ruled = jax.custom_vjp(lambda x: x)
    ruled.defvjp(lambda x: (x, None), lambda _, dy: (names["tuned"](dy),))
    inner = traced("inner", names["tuned"])
    outer = traced("outer", inner, keep_unused=True)
    programs = inner, outer, traced("ruled", jax.grad(ruled)), traced("other", lambda x: x * x)
    try:
        _run_each(programs)
        before = len(traces)
        _forget()
        _run_each(programs)
    except (AttributeError, TypeError, LookupError):
        return False  # another jax
    return sorted(traces[before:]) == ["inner", "outer", "ruled"]


def _run_each(programs: Iterable[Callable[[Any], Any]]) -> None:
    for program in programs:
        program(np.float32(1))
