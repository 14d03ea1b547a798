"""The listeners to the events of every selector of a process."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from tunebook._memo.answer_memo import MEMO

if TYPE_CHECKING:
    from collections.abc import Callable


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
