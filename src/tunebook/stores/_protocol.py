"""The contract of a store, which every engine keeps and `tunebook.testing.StoreContract` checks; names for problems."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Problem


class LeaseBoard(Protocol):
    """The primitive that single flight needs: create a named slip of bytes only if it does not exist yet.

    Names are `<id>.<generation>`. Every method may raise `StoreError`.
    """

    def create(self, name: str, content: bytes) -> bool:
        """Make the slip, atomically; False if a slip of this name exists."""

    def read(self, name: str) -> bytes | None:
        """Return the slip's content, or None if it is missing."""

    def rewrite(self, name: str, content: bytes) -> bool:
        """Replace the content of an existing slip; False, without making a slip, if it is gone."""

    def remove(self, name: str) -> None:
        """Remove the slip, if it exists."""

    def generations(self, lease_id: str) -> list[int]:
        """Return the generations present for an id, ascending."""


class Store(Protocol):
    """A place for records, one per problem.

    An implementation must be safe to share between threads, and between processes if it outlives a process. Two
    openings that write different problems must both keep their entry. `get` returns a record equal to the record that
    `put` was given for exactly that problem, or None; never another problem's record and never a damaged record. An
    unreadable record is set aside where the store can, warned about once, and counts as missing. A `put` that returned
    is durable. A store that cannot be read or written raises `StoreError`; nothing is half done.
    """

    @property
    def where(self) -> str:
        """The place of the records, as a person would name it: a path, a URL without secrets, or "memory"."""

    def get(self, problem: Problem) -> Record | None:
        """Return the record of a problem, or None."""

    def put(self, record: Record) -> None:
        """Store a record; it replaces an earlier record of its problem, unless that has a higher generation.

        `CodecError` if the record itself cannot be written: it is too large, or holds a value that JSON cannot hold.
        """

    def put_many(self, records: Iterable[Record]) -> None:
        """Store many records; durable together when this returns."""

    def delete(self, problem: Problem) -> bool:
        """Remove a record; False if it is missing."""

    def items(self, op: str | None = None) -> Iterator[Record]:
        """Yield every readable record, or the records of an operation, in any order."""

    def leases(self) -> LeaseBoard | None:
        """Return the board for single flight among processes; None for a store that cannot have a board."""
