"""The records still to be sent to a shared book: marked on disk beside the book, so that a mark outlives its process.

<root>/v1/outbox/<digest of the address>/<id>.<random>    one mark: the problem of a record that is in the local book
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from tunebook._base.errors import CodecError, StoreError
from tunebook._base.record_format import blake2b
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


class Outbox:
    """Marks of records to be sent. Each put has a name of its own, so that nobody removes the mark of another put.

    `root` is the local book's, None if it is in memory. `where` is the shared book's address without secrets, so that
    waiting records are still sent after the password was changed.
    """

    def __init__(self, root: Path | None, where: str) -> None:
        name = blake2b(where.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        self._directory = None if root is None else root.absolute() / "v1" / "outbox" / name
        self._ours: dict[str, Record] = {}

    def add(self, record: Record) -> str:
        """Mark a record, before it is put into the local book: a mark without record does no harm. Return its token."""
        token = f"{problem_id(record.problem)}.{os.urandom(6).hex()}"
        if self._directory is None or len(self._ours) < _LIMIT_IN_MEMORY:
            self._ours[token] = record
        if self._directory is not None:
            # Nothing is synced: a power loss may cost the sharing of this record, and not the record.
            with suppress(OSError):
                if not self._directory.is_dir():
                    make_directory(self._directory, lambda _descriptor: None)
                write_file(self._directory / token, encode_problem(record.problem), sync=None, mode=0o600)
        return token

    def done(self, token: str) -> None:
        self._ours.pop(token, None)
        if self._directory is not None:
            with suppress(OSError):
                (self._directory / token).unlink()

    def room(self) -> int:
        """Return how many marks may be added; negative if the outbox is overfull."""
        if self._directory is None:
            return _LIMIT_IN_MEMORY - len(self._ours)
        return _LIMIT - len(self._tokens())

    def marks(self) -> Iterator[tuple[str, Problem, Record | None]]:
        """Yield token, problem and record of our marks, then of other processes' marks, which have no record here."""
        for token in dict.fromkeys((*self._ours, *self._tokens())):
            record = self._ours.get(token)
            problem = self._problem(token) if record is None else record.problem
            if problem is not None:
                yield token, problem, record

    def __bool__(self) -> bool:
        return bool(self._ours or self._tokens())

    def _tokens(self) -> list[str]:
        try:
            return [] if self._directory is None else os.listdir(self._directory)  # noqa: PTH208 - names, not objects
        except OSError:
            return []

    def _problem(self, token: str) -> Problem | None:
        if self._directory is None:
            return None
        try:
            content = read_file(str(self._directory / token), _MARK_BYTES)
        except (CodecError, StoreError, OSError):
            content = b""
        if content is None:
            return None  # another process has sent it meanwhile
        problem = decode_problem(content)
        if problem is None or not token.startswith(problem_id(problem)):
            self.done(token)  # it is damaged
            return None
        return problem


def encode_problem(problem: Problem) -> bytes:
    """Return the content of a mark: lengths first, as in the ids, because a name may hold any character."""
    parts = [part.encode("utf-8", "surrogatepass") for part in problem]
    return b" ".join(b"%d" % len(part) for part in parts) + b"\n" + b"".join(parts)


def decode_problem(content: bytes) -> Problem | None:
    """Return the problem that a mark names, or None if it is not exactly the content of a mark."""
    lengths, _, rest = content.partition(b"\n")
    parts = []
    try:
        for size in map(int, lengths.split(b" ")):
            parts.append(rest[:size].decode("utf-8", "surrogatepass"))
            rest = rest[size:]
    except ValueError:
        return None
    problem = Problem(*parts) if len(parts) == 3 else None
    return problem if problem is not None and encode_problem(problem) == content else None
