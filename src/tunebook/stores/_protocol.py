"""The contract of a store, which every engine keeps and `tunebook.testing.StoreContract` checks; names for problems."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Protocol

from tunebook._base.record_format import blake2b

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


# ----------------------------------------------------------------------------------------------- names for problems

_UNSAFE = re.compile(r"[^a-z0-9._-]+")

# The store's own directories beside the directories of devices. A device may be called "tmp" and then gets a digest.
RESERVED: Final = frozenset({"leases", "outbox", "packs", "quarantine", "tmp"})


def problem_id(problem: Problem) -> str:
    """Return 32 hex digits for a problem."""
    digest = blake2b(digest_size=16)
    # Every part goes in behind its length: without it, ("a|b", "c") and ("a", "b|c") would be one problem.
    for part in problem:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(encoded))
        digest.update(encoded)
    return digest.hexdigest()


# Every get asks for two components, and a process meets few devices and operations: 0.1 us against 3.
@lru_cache(maxsize=1024)
def path_component(name: str) -> str:
    """Return a device or an operation as a path component: the name where it is harmless, else a digest behind it."""
    # Upper case counts as harmful: names that differ only in case are one file on some file systems. 40 characters are
    # recognised in a listing, and stay far below the 255 bytes of any file system with the digest.
    slug = _UNSAFE.sub("-", name.lower()).strip(".-")[:40]
    if slug == name and slug and slug not in RESERVED:
        return slug
    return f"{slug or 'x'}-{blake2b(name.encode('utf-8', 'surrogatepass'), digest_size=5).hexdigest()}"
