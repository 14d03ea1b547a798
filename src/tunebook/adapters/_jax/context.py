"""How overlays and policies meet jit's cache: one user context of jax, whose value stands for what is in force here.

`jax.jit` looks at it before it uses a trace again. It is made once, when this module is imported, because making one
re-traces every jitted function of the process. Its value is a digest of the content: equal overlays share a trace, and
a value that is the identity of an object would come back for another one (a peer runs stale configurations in 6 of 20
overlays). It belongs to a thread, while scopes belong to a thread or task: see `_follow_tasks`.
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
from tunebook._base.record_format import blake2b, canonical_json
from tunebook._memo.answer_memo import MEMO
from tunebook._memo.context_stack import INNERMOST, scoped, when_scopes_change
from tunebook.adapters._jax.programs import forget_tuned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

# How often all functions had to be traced again.
CONTEXT: Final = jax.make_user_context(0)
_adopted: Final = [0]  # the newest epoch that `refresh` was told of
_refreshing: Final = threading.RLock()  # re-entrant: what tells of an epoch may be the garbage collector
_serials: Final = itertools.count()
_REMEMBERED: Final = 1024  # digests of values, each of which keeps one alive


class _ThreadContext(threading.local):
    """What the user context is set to in this thread, and what sets it back."""

    token: tuple[int, str] | None = None
    manager: Any = None


_here: Final = _ThreadContext()
_digests: Final[dict[int, tuple[object, str]]] = {}
_following: Final[list[bool]] = []


def sync() -> None:
    """Set the user context of this thread to what is in force in this thread or task."""
    layer = INNERMOST.get()
    token = None if layer is None else (CONTEXT.get_global(), _digest_of_scopes())
    if token == _here.token:
        return
    if _here.manager is not None:
        _here.manager.__exit__(None, None, None)
    _here.manager = None if token is None else CONTEXT(token)
    if _here.manager is not None:
        _here.manager.__enter__()
    _here.token = token


def _scopes_changed() -> None:
    if "asyncio" in sys.modules:
        _follow_tasks(sys.modules["asyncio"])
    sync()


def _follow_tasks(asyncio: Any) -> None:
    """Have the user context follow the tasks of an event loop, from the first overlay that one of them enters.

    A task that waits inside an overlay would leave its value to the next one of the thread, which would get the other's
    traces. Nothing tells when another task goes on but the one method by which asyncio calls anything, so it is that
    one which is replaced. A task factory would be asked for new tasks only, and there is one per loop, the user's. What
    takes turns in other ways does without; `jit` is exact there too.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return  # nobody takes turns here
    others = None if isinstance(loop, asyncio.BaseEventLoop) else type(loop).__module__
    if "eager_task" in getattr(loop.get_task_factory(), "__qualname__", ""):
        others = "an eager task factory"  # a task begins inside the one that makes it, and may wait there
    if others is not None:
        warn_once(
            "tasks",
            others,
            f"an overlay was entered in a task of {others}, of which jax.jit knows nothing: other tasks may get its "
            "configurations. Use tunebook.adapters.jax.jit in place of jax.jit",
        )
        return
    if _following:
        return
    _following.append(True)
    run = asyncio.Handle._run  # noqa: SLF001 - there is no public one, see above

    def run_in_step(handle: Any) -> Any:
        try:
            handle._context.run(sync)  # noqa: SLF001 - as above
            return run(handle)
        finally:
            sync()

    asyncio.Handle._run = run_in_step  # noqa: SLF001 - as above


def _digest_of_scopes() -> str:
    return " ".join(_digest(value) for value in scoped(object))


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
        digest = f"#{next(_serials)}"  # it has no content that can be compared: equal to nothing but itself
    _digests[id(value)] = value, digest  # with the value: were it freed, another one could get its identity
    return digest


@contextmanager
def entered() -> Iterator[None]:
    """Put in force for jax what this thread's context has, for a block."""
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
    another process has written to the book. Those functions are traced and compiled again, so it is not for every step.
    `tunebook.on_epoch(refresh)` does it when an answer has changed: an epoch that was adopted is not again.

    Functions without tunable calls are left alone. They are traced again with `everything`, which is needed if programs
    depend on a configuration that no tunable function made an equation by; if a trace is being made at the moment, in
    any thread; and by releases of jax that keep their programs in unknown ways.
    """
    with _refreshing:
        if epoch is not None and epoch <= _adopted[0]:
            return
        _adopted[0] = _adopted[0] if epoch is None else epoch
        MEMO.invalidate()  # before: what is traced from now on is not to be traced again
        if everything or not forget_tuned():
            CONTEXT.set_global(CONTEXT.get_global() + 1)
    sync()


def jit(function: Callable[..., T], /, **options: Any) -> Callable[..., T]:
    """Return `jax.jit(function, **options)` that looks at the overlays of its caller at every call.

    Plain `jax.jit` is as exact in threads and in asyncio's tasks. This is for tasks of other event loops, which take
    turns without a way to know: there, a task would get the trace of another one that waits inside an overlay.
    """
    jitted = jax.jit(function, **options)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> T:
        sync()
        return jitted(*args, **kwargs)  # type: ignore[no-any-return]

    return call


when_scopes_change(_scopes_changed)
