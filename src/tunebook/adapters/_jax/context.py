"""How overlays and policies meet jit's cache: a user context of jax, whose value stands for the scopes in force.

`jax.jit` compares this value before it uses a trace again. The user context is made once, when this module is imported,
because making one re-traces every jitted function of the process. Its value is a digest of the scopes' content: equal
overlays share a trace. The identity of an object would not do, since it can come back for another object (a peer runs
stale configurations in 6 of 20 overlays). jax keeps the value per thread, while scopes belong to a thread or task:
`_follow_tasks` bridges that.
"""

from __future__ import annotations

import itertools
import sys
import threading
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar

import jax

from tunebook._base.config_codec import encode
from tunebook._base.errors import CodecError, warn_once
from tunebook._base.locks import InterruptSafeLock
from tunebook._base.record_format import blake2b, canonical_json
from tunebook._memo.answer_memo import MEMO
from tunebook._memo.context_stack import INNERMOST, Scope, scoped, when_scopes_change
from tunebook._selection.recording import Recording
from tunebook._selection.recording import record as record_calls
from tunebook.adapters._jax.programs import forget_tuned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

CONTEXT: Final = jax.make_user_context(0)  # its global value counts how often all functions had to be traced again
_adopted: Final = [0]  # the newest epoch that `refresh` has seen
_refreshing: Final = InterruptSafeLock()  # re-entrant: the garbage collector may announce an epoch
_serials: Final = itertools.count()
_REMEMBERED: Final = 1024  # digests, each of which keeps its value alive
_digests: Final[dict[int, tuple[object, str]]] = {}
_switching: Final = InterruptSafeLock()
_IDLE_CALLBACKS: Final = 1000  # without an overlay in any context: then asyncio gets its own method back
_following: Final[list[Any]] = []  # the original `Handle._run` while ours is in its place


class _ThreadContext(threading.local):
    """The value of the user context in this thread, and the context manager that sets it back."""

    token: tuple[int, str] | None = None
    manager: Any = None


_here: Final = _ThreadContext()


class FreshTraces:
    """Marks a block in which jit finds no earlier trace: its content is never the same twice."""

    def __init__(self) -> None:
        self._number = next(_serials)

    def content(self) -> list[Any]:
        """Return a value that no other block has."""
        return ["fresh", self._number]


def sync() -> None:
    """Set the user context of this thread to the scopes in force in this thread or task."""
    token = None
    if INNERMOST.get() is not None:
        token = CONTEXT.get_global(), " ".join(map(_digest, scoped(object)))
    if token == _here.token:
        return
    if _here.manager is not None:
        _here.manager.__exit__(None, None, None)
    _here.token, _here.manager = token, None if token is None else CONTEXT(token)
    if _here.manager is not None:
        _here.manager.__enter__()


def _follow_tasks() -> None:
    """Make the user context follow the tasks of an event loop, while any of them has an overlay.

    A task that waits inside an overlay would leave its value to the thread's next task, which would get the wrong
    traces. asyncio has no hook for task switches, so this wraps `Handle._run`, through which every callback goes. (A
    task factory sees new tasks only, and a loop has one, the user's.) Other event loops are not followed; our `jit` is
    exact there too.
    """
    asyncio: Any = sys.modules.get("asyncio")
    try:
        loop = asyncio and asyncio.get_running_loop()
    except RuntimeError:
        loop = None
    if loop is None:
        return  # this thread runs no event loop
    others = None if isinstance(loop, asyncio.BaseEventLoop) else type(loop).__module__
    if "eager_task" in getattr(loop.get_task_factory(), "__qualname__", ""):
        others = "an eager task factory"  # a task begins inside the task that makes it, and may wait there
    if others is not None:
        warn_once(
            "tasks",
            others,
            f"an overlay was entered in a task of {others}, whose task switches jax.jit cannot see: other tasks may "
            "get its configurations. Use tunebook.adapters.jax.jit in place of jax.jit",
        )
        return
    with _switching:
        if not _following:
            _wrap_run(asyncio.Handle)


def _wrap_run(handle_class: Any) -> None:
    """Wrap `Handle._run`, for half a microsecond per callback, until 1000 callbacks have seen no overlay anywhere.

    Not put back at once, because a changed class loses Python's method caches: an overlay per request would take three
    times as long. If another library has wrapped `Handle._run` on top of ours by then, ours stays.
    """
    run = handle_class._run  # noqa: SLF001 - asyncio has no public hook, see `_follow_tasks`
    idle = 0

    def run_in_step(handle: Any) -> Any:
        nonlocal idle
        try:
            handle._context.run(sync)  # noqa: SLF001 - no public hook
            return run(handle)
        finally:
            sync()
            idle = 0 if MEMO.suspended else idle + 1
            if idle >= _IDLE_CALLBACKS:
                idle = 0
                with _switching:
                    # Again under the lock: a scope that begins meanwhile suspends the memo first, then takes the lock.
                    if not MEMO.suspended and handle_class._run is run_in_step:  # noqa: SLF001 - no public hook
                        handle_class._run = run  # noqa: SLF001 - no public hook
                        _following.clear()

    handle_class._run = run_in_step  # noqa: SLF001 - no public hook
    _following.append(run)


def _digest(value: object) -> str:
    known = _digests.get(id(value))
    if known is not None:
        return known[1]
    if len(_digests) >= _REMEMBERED:
        _digests.clear()
    content = getattr(value, "content", None)
    try:
        text = canonical_json(encode(content()))  # type: ignore[misc] # a TypeError if it has none
        digest = blake2b(text.encode(), digest_size=12).hexdigest()
    except (CodecError, TypeError):
        digest = f"#{next(_serials)}"  # its content cannot be compared: equal to itself alone
    _digests[id(value)] = value, digest  # with the value: if it were freed, another object could get its identity
    return digest


@contextmanager
def apply_scopes() -> Iterator[None]:
    """Tell jax about the scopes of this thread's context, for a block."""
    before = _here.token, _here.manager
    _here.token, _here.manager = None, None
    try:
        sync()
        yield
    finally:
        if _here.manager is not None:
            _here.manager.__exit__(None, None, None)
        _here.token, _here.manager = before


def refresh(epoch: int | None = None, *, everything: bool = False) -> None:
    """Make jitted functions with tunable calls look up their configurations again, each at its next call.

    A trace keeps the configurations that it was made with. Call this after tuning behind a running program, or when
    another process has written to the book. The functions are traced and compiled again, so do not call it in every
    step. `tunebook.on_epoch(refresh)` calls it when an answer has changed; each epoch is adopted once.

    Functions without tunable calls are left alone. `everything=True` traces them again too. It is needed if a program
    depends on a configuration by which no tunable function made an equation, if a trace is being made at the moment in
    any thread, and with releases of jax that keep their programs in unknown ways.
    """
    with _refreshing:
        if epoch is not None and epoch <= _adopted[0]:
            return
        _adopted[0] = _adopted[0] if epoch is None else epoch
        MEMO.invalidate()  # first: programs traced from now on need not be traced again
        if everything or not forget_tuned():
            CONTEXT.set_global(CONTEXT.get_global() + 1)
    sync()


def jit(function: Callable[..., T], /, **options: Any) -> Callable[..., T]:
    """Return `jax.jit(function, **options)` that looks at the overlays of its caller at every call.

    Plain `jax.jit` is as exact in threads and in asyncio's tasks. Use this one with other event loops, whose task
    switches cannot be seen: there, a task would get the trace of another task that waits inside an overlay.
    """
    jitted = jax.jit(function, **options)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> T:
        sync()
        return jitted(*args, **kwargs)  # type: ignore[no-any-return]

    return call


def record(function: Callable[..., Any], /, *specs: Any, **named: Any) -> Recording:
    """Return every tunable call that a program makes, through jit, scan, vmap, remat, shard_map and grad.

    Nothing runs and nothing is tuned. Arguments are arrays or `jax.ShapeDtypeStruct`s, of which only the shapes are
    read. `tunebook.tune_all` tunes the calls; programs that were traced before use the results after `refresh()`. The
    seconds in the recording are times of tracing.
    """
    with record_calls() as found, Scope(FreshTraces()):
        jax.eval_shape(function, *specs, **named)
    return found


when_scopes_change(_follow_tasks)
# In a trace, everything is a tracer. A program is kept under the content that the overlays had when its trace began.
when_scopes_change(sync, fixed=lambda: isinstance(jax.numpy.zeros(()), jax.core.Tracer))
