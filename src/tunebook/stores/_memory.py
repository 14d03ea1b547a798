"""Records in this process only."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar, final

from tunebook._base.locks import InterruptSafeLock
from tunebook._base.record_format import Record
from tunebook._base.vocabulary import ShownByPlace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tunebook._base.vocabulary import Problem


@final
class MemoryStore(ShownByPlace):
    """A dict of records behind a lock; gone with the process.

    It holds bytes, like every other engine: a record shares its configuration with the code that made it, and a change
    there must not reach the store. Other processes cannot see it, so it has no leases.
    """

    where = "memory"
    # One for all: stores in memory are few and quick. Re-entrant, because a finaliser may call a kernel meanwhile.
    _lock: ClassVar = InterruptSafeLock()

    def __init__(self) -> None:
        self._records: dict[Problem, tuple[int, bytes]] = {}

    def get(self, problem: Problem) -> Record | None:
        found = self._records.get(problem)
        return None if found is None else Record.from_bytes(found[1])

    def put(self, record: Record) -> None:
        self.put_many((record,))

    def put_many(self, records: Iterable[Record]) -> None:
        written = [(record.problem, record.head.generation, record.to_bytes()) for record in records]
        with self._lock:
            for problem, generation, data in written:
                if generation >= self._records.get(problem, (generation, b""))[0]:
                    self._records[problem] = generation, data

    def delete(self, problem: Problem) -> bool:
        with self._lock:
            return self._records.pop(problem, None) is not None

    def items(self, op: str | None = None) -> Iterator[Record]:
        """Yield the records, or the records of an operation, that were there when this was called."""
        with self._lock:
            written = [data for _, data in self._records.values()]
        return (record for record in map(Record.from_bytes, written) if op in {None, record.problem.op})

    def leases(self) -> None:
        return

    @classmethod
    def renew_lock(cls) -> None:
        """Take a new lock, in a forked child."""
        cls._lock = InterruptSafeLock()


os.register_at_fork(after_in_child=MemoryStore.renew_lock)
