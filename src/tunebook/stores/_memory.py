"""Records in this process only."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, final

from tunebook._base.record_format import Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tunebook._base.vocabulary import Problem


@final
class MemoryStore:
    """A dict of records behind a lock; gone with the process.

    It holds bytes, like every other engine: a record shares its configuration with whoever made it, and a change
    there must not reach what was stored.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[Problem, tuple[int, bytes]] = {}

    @property
    def where(self) -> str:
        """The word "memory"."""
        return "memory"

    def get(self, problem: Problem) -> Record | None:
        """Return the record of a problem, or None."""
        found = self._records.get(problem)
        return None if found is None else Record.from_bytes(found[1])

    def put(self, record: Record) -> None:
        """Keep a record, unless one of a higher generation is there."""
        self.put_many((record,))

    def put_many(self, records: Iterable[Record]) -> None:
        """Keep many records."""
        written = [(record.problem, record.head.generation, record.to_bytes()) for record in records]
        with self._lock:
            for problem, generation, data in written:
                if generation >= self._records.get(problem, (generation, b""))[0]:
                    self._records[problem] = generation, data

    def delete(self, problem: Problem) -> bool:
        """Remove a record; False if there was none."""
        with self._lock:
            return self._records.pop(problem, None) is not None

    def items(self, op: str | None = None) -> Iterator[Record]:
        """Yield every record, or one operation's, that was there when this was called."""
        with self._lock:
            written = [data for _, data in self._records.values()]
        return (record for record in map(Record.from_bytes, written) if op in {None, record.problem.op})

    def leases(self) -> None:
        """Return None: another process cannot wait for what it cannot see."""
        return
