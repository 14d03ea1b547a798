"""A writable store in front of read-only ones: what was tuned here, then what was shipped."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, final

from tunebook.stores._ids import problem_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Problem
    from tunebook.stores._protocol import LeaseBoard, Store


@final
class LayeredStore:
    """Writes go to `front`; a get that it cannot answer goes on to the shipped stores, in their order.

    `find_shipped` is called at the first miss and never again: looking through the installed packages takes
    milliseconds. A record deleted from the front lets a shipped one of the same problem be seen again, and so does
    one without a decision.
    """

    def __init__(self, front: Store, find_shipped: Callable[[], Sequence[Store]]) -> None:
        self._front = front
        self._find_shipped = find_shipped

    @cached_property
    def _shipped(self) -> Sequence[Store]:
        return self._find_shipped()

    @property
    def where(self) -> str:
        """Where the front is."""
        return self._front.where

    @property
    def layers(self) -> tuple[Store, ...]:
        """The front, then the shipped stores in their order."""
        return (self._front, *self._shipped)

    def get(self, problem: Problem) -> Record | None:
        """Return the front's record of a problem, else the first shipped one, or None."""
        front = self._front.get(problem)
        if front is not None and front.head.decided:
            return front
        for store in self._shipped:
            record = store.get(problem)
            if record is not None:
                return record
        return front

    def put(self, record: Record) -> None:
        """Keep a record in the front."""
        self._front.put(record)

    def put_many(self, records: Iterable[Record]) -> None:
        """Keep many records in the front."""
        self._front.put_many(records)

    def delete(self, problem: Problem) -> bool:
        """Remove a record from the front; False if there was none."""
        return self._front.delete(problem)

    def items(self, op: str | None = None) -> Iterator[Record]:
        """Yield every record, or one operation's, once: the one that `get` would return."""
        seen: set[str] = set()
        for store in self.layers:
            for record in store.items(op):
                identifier = problem_id(record.problem)
                if identifier not in seen:
                    seen.add(identifier)
                    yield record if record.head.decided else self.get(record.problem) or record

    def leases(self) -> LeaseBoard | None:
        """Return the front's board."""
        return self._front.leases()
