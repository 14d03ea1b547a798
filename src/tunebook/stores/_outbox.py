"""What is still to be sent to a shared book: kept on disk beside the book, so that it outlives the process.

<root>/v1/outbox/<digest of the address>/<id>.<random>    one mark: the problem of a record that is in the local book
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from tunebook._base.errors import CodecError, StoreError
from tunebook._base.hashing import blake2b
from tunebook._base.vocabulary import Problem
from tunebook.stores._files import make_directory, read_file, write_file
from tunebook.stores._ids import problem_id

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tunebook._base.record_format import Record

_LIMIT: Final = 10_000  # a machine that is cut off for weeks keeps its book, and sends this much of it
_LIMIT_IN_MEMORY: Final = 1000
_MARK_BYTES: Final = 1 << 20


class Mark(NamedTuple):
    """Something to be sent. `record` is there if this process put it; else it is in the local book."""

    token: str
    problem: Problem
    record: Record | None = None


class Outbox:
    """Marks of what is to be sent. A name per put, so that nobody takes another's mark for its own.

    `directory` is None where the local book is in memory only.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._ours: dict[str, Record] = {}

    @classmethod
    def beside(cls, root: Path | None, where: str) -> Outbox:
        """Return the outbox of the book at a root for a shared book, by its address without secrets.

        Without, so that what waits is still sent after the password was changed.
        """
        name = blake2b(where.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        return cls(None if root is None else root.absolute() / "v1" / "outbox" / name)

    def add(self, record: Record) -> str:
        """Mark a record as one to be sent, before it is put into the local book: a mark without record does no harm."""
        token = f"{problem_id(record.problem)}.{os.urandom(6).hex()}"
        if self._directory is None or len(self._ours) < _LIMIT_IN_MEMORY:
            self._ours[token] = record
        if self._directory is not None:
            # Nothing is synced: a power loss may cost the sharing of this record, and not the record.
            with suppress(OSError):
                if not self._directory.is_dir():
                    make_directory(self._directory, _no_sync)
                write_file(self._directory / token, _text(record.problem), sync=None, mode=0o600)
        return token

    def done(self, token: str) -> None:
        """Forget a mark."""
        self._ours.pop(token, None)
        if self._directory is not None:
            with suppress(OSError):
                (self._directory / token).unlink()

    def room(self) -> int:
        """Return how many marks may be added; less than none if there are too many."""
        if self._directory is None:
            return _LIMIT_IN_MEMORY - len(self._ours)
        return _LIMIT - len(self._tokens())

    def marks(self) -> Iterator[Mark]:
        """Yield what is to be sent, ours and what processes left that ended; a mark that is not whole is removed."""
        for token in dict.fromkeys((*self._ours, *self._tokens())):
            record = self._ours.get(token)
            problem = self._problem(token) if record is None else record.problem
            if problem is not None:
                yield Mark(token, problem, record)

    def __bool__(self) -> bool:
        return bool(self._ours or self._tokens())

    def _tokens(self) -> list[str]:
        if self._directory is None:
            return []
        try:
            return os.listdir(self._directory)  # noqa: PTH208 - names, and no objects
        except OSError:
            return []

    def _problem(self, token: str) -> Problem | None:
        if self._directory is None:
            return None
        try:
            content = read_file(str(self._directory / token), _MARK_BYTES)
            if content is None:
                return None  # another process has sent it meanwhile
            problem = _parsed(content)
        except (CodecError, StoreError, OSError):
            problem = None
        if problem is None or not token.startswith(problem_id(problem)):
            self.done(token)
            return None
        return problem


def _no_sync(_descriptor: int) -> None:
    """Leave it to the system when a directory of marks gets to the disk."""


def _text(problem: Problem) -> bytes:
    # Lengths first, as in the ids: a name may hold any character.
    parts = [part.encode("utf-8", "surrogatepass") for part in problem]
    return b" ".join(b"%d" % len(part) for part in parts) + b"\n" + b"".join(parts)


def _parsed(content: bytes) -> Problem | None:
    lengths, _, rest = content.partition(b"\n")
    try:
        sizes = [int(size) for size in lengths.split(b" ")]
        ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
        parts = [rest[end - size : end].decode("utf-8", "surrogatepass") for size, end in zip(sizes, ends, strict=True)]
    except ValueError:
        return None
    return Problem(*parts) if len(parts) == 3 and ends[-1] == len(rest) else None
