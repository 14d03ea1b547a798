"""Lists a book without reading all of it: 100,000 records are listed by name, and a screenful of them read.

A store lists itself if it has `groups` (see `groups_of`). Of any other store every record is read.
"""

from __future__ import annotations

from heapq import nlargest
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias

from tunebook.stores._files import problem_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tunebook._base.record_format import Record
    from tunebook.stores._protocol import Store

    Wanted: TypeAlias = Callable[[str, str], bool]  # of a kernel and a device


class EntryFacts(NamedTuple):
    """The facts that are known of an entry without its record; times are 0 where the store does not know them."""

    id: str
    written_s: float = 0.0
    used_s: float = 0.0
    size_bytes: int = 0


class EntrySource(Protocol):
    """Looks up the entries of a group by their ids."""

    def facts(self, ids: Iterable[str]) -> Iterator[EntryFacts]:
        """Yield the facts of each entry that still exists."""

    def read(self, identifier: str) -> Record | None:
        """Return the record of an entry, or None if it is missing or unreadable by now."""


class Listed(NamedTuple):
    """One entry of a listing: everything that is known without its record."""

    id: str
    written_s: float
    used_s: float
    size_bytes: int
    op: str
    device: str
    where: str
    source: EntrySource

    def record(self) -> Record | None:
        """Return the record, or None if it is gone or unreadable by now, or belongs elsewhere."""
        record = self.source.read(self.id)
        return record if record is not None and problem_id(record.problem) == self.id else None


class EntryGroup(NamedTuple):
    """The entries of a kernel on a device in one place. No entry is newer than `changed_s`."""

    op: str
    device: str
    where: str
    changed_s: float
    ids: Sequence[str]
    source: EntrySource

    def entries(self, ids: Iterable[str] | None = None) -> Iterator[Listed]:
        for facts in self.source.facts(self.ids if ids is None else ids):
            yield Listed(*facts, self.op, self.device, self.where, self.source)


def groups_of(store: Store, wanted: Wanted, prefix: str = "", at_most: int | None = None) -> Iterator[EntryGroup]:
    """Yield the wanted kernels and devices of any store, with the ids that begin with `prefix`.

    A store that lists itself yields the same from its `groups`, and reads no records for it, or `at_most` so many.
    """
    if (list_itself := getattr(store, "groups", None)) is not None:
        yield from list_itself(wanted, prefix, at_most)
        return
    groups: dict[tuple[str, str], dict[str, Record]] = {}
    for record in store.items():
        names, identifier = (record.problem.op, record.problem.device), problem_id(record.problem)
        if identifier.startswith(prefix) and wanted(*names):
            groups.setdefault(names, {})[identifier] = record
    for names, records in groups.items():
        changed_s = max(map(measured_s, records.values()))
        yield EntryGroup(*names, store.where, changed_s, list(records), _RecordsRead(records))


class _RecordsRead(NamedTuple):
    """Records that were read to list them. Their times say when they were measured."""

    records: Mapping[str, Record]

    def facts(self, ids: Iterable[str]) -> Iterator[EntryFacts]:
        for identifier in ids:
            record = self.records[identifier]
            yield EntryFacts(identifier, measured_s(record), measured_s(record), len(record.to_bytes()))

    def read(self, identifier: str) -> Record | None:
        return self.records[identifier]


class Catalogue:
    """Lists a store. Of a book with packs, each problem is listed once, in the layer that answers a call."""

    def __init__(self, store: Store) -> None:
        self.store: Final = store

    def groups(self, wanted: Wanted) -> list[EntryGroup]:
        return list(groups_of(self.store, wanted))

    def entries(self, wanted: Wanted) -> Iterator[Listed]:
        return (listed for group in self.groups(wanted) for listed in group.entries())

    def some(self, op: str, count: int) -> Iterator[Listed]:
        """Yield at most `count` entries of a kernel, from as little of the book as possible."""
        # A pack has no index by kernel: so many of its records are searched.
        groups = groups_of(self.store, lambda name, _device: name == op, at_most=20_000)
        return islice((listed for group in groups for listed in group.entries()), count)

    def find(self, prefix: str) -> list[Listed]:
        """Return the entries whose id begins with `prefix`."""
        groups = groups_of(self.store, lambda _op, _device: True, prefix)
        return [listed for group in groups for listed in group.entries()]


def newest(groups: Iterable[EntryGroup], count: int) -> list[Listed]:
    """Return the last written entries, the newest first; directories in which nothing changed since are not read."""
    best: list[tuple[float, str, int]] = []
    ordered = sorted(groups, key=lambda group: -group.changed_s)
    for at, group in enumerate(ordered):
        if len(best) >= count and best[-1][0] >= group.changed_s:
            break
        found = ((facts.written_s, facts.id, at) for facts in group.source.facts(group.ids))
        best = nlargest(count, [*best, *nlargest(count, found)])
    listed = [entry for _, identifier, at in best for entry in ordered[at].entries([identifier])]
    return sorted(listed, key=lambda entry: (-entry.written_s, entry.op, entry.device, entry.id))


def measured_s(record: Record) -> float:
    """Return when the decision of a record was made, as a Unix time; 0 if the record does not say."""
    when = record.body.provenance.get("when")
    return float(when) if isinstance(when, (int, float)) else 0.0
