"""The entry of a call, read once under its lease."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from tunebook._selection.tiers import Found, Request
from tunebook._selection.trusted_entries import Refused

if TYPE_CHECKING:
    from tunebook._selection.trusted_entries import EntryGuard

C = TypeVar("C")


class BookLookup(Generic[C]):
    """Reads the entry of a request, and keeps it: under the lease it stays as it is.

    It reads nothing if the book is in the state in which another tier has found the entry.
    """

    def __init__(self, book: EntryGuard[C], request: Request[C]) -> None:
        self._book, self._request = book, request
        unread: Refused[C] = Refused("not read yet")
        self._state, self.entry = request.looks[-1] if request.looks else (None, unread)

    def __call__(self) -> Found[C] | None:
        before, self._state = self._state, self._book.state(self._request.problem)
        if before is None or before != self._state:
            self.entry = self._book.find(self._request)
        if isinstance(self.entry, Refused):
            return None
        return Found(config=self.entry.config, event="cache_hit", level="persistent", remember=True)
