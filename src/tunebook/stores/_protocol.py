"""What a store is: the contract that every engine keeps, and that `tunebook.testing.StoreContract` checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Problem


class LeaseBoard(Protocol):
    """The one primitive that single flight needs: create a named slip of bytes only if it does not exist yet.

    Names are `<id>.<generation>`. Every method may raise `StoreError`.
    """

    def create(self, name: str, content: bytes) -> bool:
        """Make the slip, atomically; False if one of this name is there already."""

    def read(self, name: str) -> bytes | None:
        """Return the slip's content, or None if there is none."""

    def rewrite(self, name: str, content: bytes) -> bool:
        """Replace the content of an existing slip; False, without making one, if it is gone."""

    def remove(self, name: str) -> None:
        """Take the slip away; no error if it is gone already."""

    def generations(self, lease_id: str) -> list[int]:
        """Return the generations present for an id, ascending."""


class Store(Protocol):
    """A place for records, one per problem.

    An implementation must be safe to share between threads, and between processes if it outlives one. Two openings
    that write different problems must both keep their entry. `get` returns a record equal to the one `put` was given
    for exactly that problem, or None; never another problem's record and never a damaged one: what cannot be read is
    set aside where the store can, warned about once, and is None. A `put` that returned is durable. A store that
    cannot be read or written raises `StoreError`; nothing is half done.
    """

    @property
    def where(self) -> str:
        """Where the records are, as a person would name it: a path, a URL, or "memory"."""

    def get(self, problem: Problem) -> Record | None:
        """Return the record of a problem, or None."""

    def put(self, record: Record) -> None:
        """Keep a record, in place of an earlier one of the same problem unless that has a higher generation.

        `CodecError` if the record itself cannot be written: it is too large, or holds what JSON cannot.
        """

    def put_many(self, records: Iterable[Record]) -> None:
        """Keep many records; durable together when this returns."""

    def delete(self, problem: Problem) -> bool:
        """Remove a record; False if there was none."""

    def items(self, op: str | None = None) -> Iterator[Record]:
        """Yield every readable record, or those of one operation, in no promised order."""

    def leases(self) -> LeaseBoard | None:
        """Return the board for single flight among processes, or None where there can be none."""
