"""Makes jax forget the programs in which a tunable call chose a configuration, and no others.

Why: a traced program keeps the configuration that it was made with. jax has no public way to drop single programs from
its caches; a new value of a user context makes it trace *every* function of the process again.

How: an equation knows the Python frames that it was made in. A program with a frame of ours in an equation has a
tunable call in it, however deep the call is nested. So nothing has to be noted while a program is traced, where 30 ns
would be an eighth of a known call. jax's caches do not list their values, but they must show them to the garbage
collector: `gc.get_referents` reads them there, 10 ms for a thousand equations.

When jax changes: `_can_forget` tries all of this on four small programs, once per process, before anything is dropped.
If they are not forgotten as expected, `refresh` makes jax trace every function again, which takes time but is right. A
test fails then too (`test_this_jax_keeps_its_programs_as_expected`).
"""

from __future__ import annotations

import gc
import sys
import threading
import traceback
import weakref
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from tunebook._api.executor import Executor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_GENERATED: Final = "<tunebook "  # the dispatcher's generated code has no file
_EXECUTOR: Final = Executor.__call__.__code__.co_filename
# In these modules, jax calls functions with rules of their own, to differentiate or batch them. Equations made by a
# rule have the frames of the call that the rule is for, not of the rule. So any rule may have made a tunable call.
_RULES: Final = tuple(
    f"jax._src.{name}" for name in ("custom_derivatives", "custom_batching", "custom_transpose", "custom_dce", "hijax")
)
# In these modules a function is being traced or compiled, or its program is looked up.
_TRACING: Final = ("jax._src.pjit", "jax._src.interpreters.partial_eval")


def forget_tuned() -> bool:
    """Make jax forget the programs with tunable calls; False if some may be left, and all have to be traced again."""
    if is_tracing() or not _can_forget():
        return False
    _forget()
    # A thread that read a cache before it was cleared may put the program back: it is inside jax now, or already has.
    busy = is_tracing()
    _forget()
    return not busy


def is_tracing() -> bool:
    """Return whether jax is making a program in any thread."""
    files = _files_of(_TRACING)
    stacks = map(traceback.walk_stack, sys._current_frames().values())  # noqa: SLF001 - its documented name
    return any(frame.f_code.co_filename in files for stack in stacks for frame, _ in stack)


def _files_of(modules: Iterable[str]) -> frozenset[str | None]:
    return frozenset(getattr(sys.modules.get(name), "__file__", None) for name in modules)


def _forget() -> None:
    every = sys.modules["jax._src.util"]._caches  # noqa: SLF001 - no public way, see above
    caches = [each for each in list(every) if type(each).__name__ == "WeakrefLRUCache"]
    search = _ProgramSearch()
    tuned = {id(key): key for each in caches for key, value in _entries(each) if search.finds_call_in(value)}
    for each in caches:
        # This also drops other values kept for the same function. Only keys that this cache has are evicted: a lookup
        # of another key would compare functions, programs and MLIR modules with each other, which fails.
        for key in [key for weak, *_ in each.cache_keys() if id(key := weak()) in tuned]:
            each.evict_weakref(key)
    # By these jit finds compiled programs. Programs whose traces are still there are found again in 0.3 ms.
    for name in ("_cpp_pjit_cache_fun_only", "_cpp_pjit_cache_explicit_attributes"):
        getattr(sys.modules["jax._src.pjit"], name).clear()
    sys.modules["jaxlib._jax"].PjitFunctionCache.clear_all()


def _entries(jax_cache: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the function or program, and the value, of each entry: the garbage collector gets key and value in turn."""
    starts = {id(weak) for weak, *_ in jax_cache.cache_keys()}
    key = None
    for part in gc.get_referents(jax_cache):
        if isinstance(part, weakref.ref) and id(part) in starts:
            key = part()
        elif key is not None:
            yield key, part


class _ProgramSearch:
    """Finds programs that may have a tunable call in them; looks at each program and each traceback once."""

    def __init__(self) -> None:
        self._rules = _files_of(_RULES)
        self._programs: dict[int, bool] = {}
        self._tracebacks: dict[Any, bool] = {}

    def finds_call_in(self, value: Any) -> bool:
        """Return whether a tunable call may be in a value of jax's caches."""
        if isinstance(value, ClosedJaxpr):
            value = value.jaxpr
        if not isinstance(value, Jaxpr):
            return isinstance(value, (tuple, list)) and any(map(self.finds_call_in, value))
        known = self._programs.get(id(value))
        if known is None:
            known = self._programs[id(value)] = any(map(self._may_be_from_call, value.eqns))
        return known

    def _may_be_from_call(self, equation: Any) -> bool:
        made_in = equation.source_info.traceback
        known = False if made_in is None else self._tracebacks.get(made_in)
        if known is None:
            known = self._tracebacks[made_in] = any(
                (code.co_name == "__call__" and code.co_filename in self._rules)
                or code.co_filename == _EXECUTOR
                or code.co_filename.startswith(_GENERATED)
                for code in made_in.raw_frames()[0]
            )
        return known or any(map(self.finds_call_in, equation.params.values()))


@cache
def _can_forget() -> bool:
    """Return whether this jax keeps its programs in the way that `_forget` expects; tried once, in 0.2 s."""
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(_try_to_forget()))  # a new thread has no trace and no mesh
    thread.start()
    thread.join()
    return found == [True]


def _try_to_forget() -> bool:
    traces: list[str] = []

    def jit_noting(name: str, function: Callable[[Any], Any], **options: Any) -> Callable[[Any], Any]:
        def note(x: Any) -> Any:
            traces.append(name)
            return function(x)

        return jax.jit(note, **options)  # type: ignore[no-any-return] # jax is not seen by mypy

    names: dict[str, Any] = {}
    exec(compile("def tuned(x): return x + x", f"{_GENERATED}trial>", "exec"), names)  # noqa: S102 - as the dispatcher
    ruled = jax.custom_vjp(lambda x: x)
    ruled.defvjp(lambda x: (x, None), lambda _, dy: (names["tuned"](dy),))
    inner = jit_noting("inner", names["tuned"])
    outer = jit_noting("outer", inner, keep_unused=True)
    programs = inner, outer, jit_noting("ruled", jax.grad(ruled)), jit_noting("other", lambda x: x * x)
    try:
        for program in programs:
            program(np.float32(1))
        before = len(traces)
        _forget()
        for program in programs:
            program(np.float32(1))
    except (AttributeError, TypeError, LookupError):
        return False  # a jax with other caches
    return sorted(traces[before:]) == ["inner", "outer", "ruled"]
