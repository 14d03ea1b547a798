"""The listeners to the events of every selector of a process."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from tunebook._base.errors import hide_own_frames, text_of, warn_once
from tunebook._memo.answer_memo import MEMO

if TYPE_CHECKING:
    from collections.abc import Callable


def listener_failed(error: Exception, listener: Callable[..., object]) -> None:
    """Warn, once for each error, and name the listener: it never fails the user's call."""
    trace = hide_own_frames(error).__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = getattr(listener, "__qualname__", type(listener).__qualname__)
    code = getattr(listener, "__code__", None)  # the place of a listener that could not even be called
    place = "" if code is None else f", {code.co_filename}:{code.co_firstlineno}"
    if trace is not None:
        place = f", {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    said = f"{type(error).__name__}: {text_of(error)}"
    advice = "A listener is called as on_event(event, **data); docs/events.md lists the data of each event"
    where = f"{getattr(listener, '__module__', None) or 'builtins'}.{name}{place}"
    warn_once("listener", said, f"a listener to events failed: {said} ({where}). The call goes on. {advice}")


class Everywhere:
    """The listeners to the events of every selector of the process. One per process: `EVERYWHERE`."""

    def __init__(self) -> None:
        self.listeners: Final[list[Callable[..., None]]] = []  # append and remove are atomic
        self.rare: Final[list[Callable[..., None]]] = []

    def listen_rarely(self, listener: Callable[..., None]) -> None:
        """Tell one more listener, but not about the answers that warm calls get, which cost nothing that way."""
        self.rare.append(listener)

    def listen(self, listener: Callable[..., None]) -> None:
        """Tell one more listener from now on; a listener that is given twice is told once."""
        if listener not in self.listeners:
            self.listeners.append(listener)
        MEMO.invalidate()

    def unlisten(self, listener: Callable[..., None]) -> None:
        """Stop telling a listener."""
        for listeners in (self.listeners, self.rare):
            with suppress(ValueError):
                listeners.remove(listener)
        MEMO.invalidate()


EVERYWHERE: Final = Everywhere()
