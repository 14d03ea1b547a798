"""Settings for the length of a with-block, in this thread or task only: one mechanism for all of them."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, TypeVar

from tunebook._arrays.library import load_adapters
from tunebook._memo.answer_memo import MEMO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

T = TypeVar("T")


class _Layer:
    """One setting, and the layer that it was put on.

    It holds the gate while *any* context refers to it: a task that was started inside the block keeps its copy of the
    context, and so the setting, after the block has ended.
    """

    __slots__ = ("outer", "value")

    def __init__(self, value: object, outer: _Layer | None) -> None:
        self.value: Final = value
        self.outer: Final = outer
        MEMO.suspend()

    def __del__(self, release: Callable[[], None] = MEMO.resume) -> None:
        release()


# None means that nothing is scoped here: one read tells the hot path's second level that memoised answers apply.
INNERMOST: Final[ContextVar[_Layer | None]] = ContextVar("tunebook_scope", default=None)


class Scope:
    """A with-block that sets one value; re-entrant, and may be entered by several threads at once."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __enter__(self) -> None:
        load_adapters()
        INNERMOST.set(_Layer(self._value, INNERMOST.get()))
        for told in _listeners:
            told()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The layer itself remembers what is below: a token kept on this object would be shared by all threads that
        # entered it.
        layer = INNERMOST.get()
        INNERMOST.set(None if layer is None else layer.outer)
        for told in _listeners:
            told()


_listeners: Final[list[Callable[[], None]]] = []


def when_scopes_change(told: Callable[[], None]) -> None:
    """Have a function called after every begin and end of a block, in its thread: for caches that are not ours."""
    _listeners.append(told)


def scoped(kind: type[T]) -> Iterator[T]:
    """Yield the values of a kind that are set in this thread or task, innermost first."""
    layer = INNERMOST.get()
    while layer is not None:
        if isinstance(layer.value, kind):
            yield layer.value
        layer = layer.outer
