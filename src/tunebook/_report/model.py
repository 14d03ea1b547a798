"""What a report shows, as values: made once, drawn as a page or as a picture.

A book may have any number of records, so they are gone through once, and of each only a line is kept. The few that are
worth a look in detail are chosen by what is in those lines.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from tunebook._report.detail import Detail, detail_of
from tunebook._report.entry import (
    KernelFailures,
    MeasuredRecord,
    ReportEntry,
    config_text,
    entry_of,
    facts_of,
    failures_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tunebook._base.record_format import Record

DETAILS: Final = 12
FAILURES: Final = 200  # different ones that are listed
READ_FAILURES: Final = 2000  # entries of which messages are read: they are in the large part of a record
_MESSAGES: Final = 20_000  # different ones that are counted: each may name an address of its own


class KernelGroup(NamedTuple):
    """The entries of one kernel on one device, summed up. `speedups` and `reached` are sorted."""

    op: str
    device: str
    entries: int
    measured: int
    failed: int
    speedups: tuple[float, ...]
    reached: tuple[float, ...]
    seconds: float
    waiting_s: float
    compile_s: float

    @property
    def typical_speedup(self) -> float | None:
        """The geometric mean of how many times faster than the default the entries are."""
        return statistics.geometric_mean(self.speedups) if self.speedups else None

    @property
    def measuring_s(self) -> float:
        """The seconds that were not spent waiting for compilers."""
        return max(self.seconds - self.waiting_s, 0.0)


class ReportModel(NamedTuple):
    """Everything that a report shows. `details` are of at most `DETAILS` entries, chosen as `interest` says.

    `failure_kinds` count all failed candidates; `failures` are what was said in the first `READ_FAILURES` entries of
    the `with_failures` that have any.
    """

    title: str
    where: str
    made: float
    entries: tuple[ReportEntry, ...]
    groups: tuple[KernelGroup, ...]
    failures: tuple[KernelFailures, ...]
    failure_kinds: tuple[tuple[str, int], ...]
    with_failures: int
    details: tuple[Detail, ...]

    @property
    def speedups(self) -> list[float]:
        """How many times faster than their default the entries are, of those where both times are known."""
        return [speedup for group in self.groups for speedup in group.speedups]

    @property
    def tuned(self) -> int:
        """How many entries have something to show in detail."""
        return sum(entry.measured > 0 for entry in self.entries)


def model_of(records: Iterable[Record], *, title: str, where: str, made: float) -> ReportModel:
    """Go through the records once."""
    entries: list[ReportEntry] = []
    failures: Counter[tuple[str, str, str]] = Counter()
    examples: dict[tuple[str, str, str], str] = {}
    best = _MostInteresting(DETAILS)
    kinds: Counter[str] = Counter()
    with_failures = 0
    for record in records:
        entry = entry_of(record)
        entries.append(entry)
        best.offer(entry, record)
        if entry.failed:
            for kind, count in entry.failed.items():
                kinds[kind] += count
            with_failures += 1
            if with_failures <= READ_FAILURES:
                _count(facts_of(record), failures, examples)
    entries.sort(key=lambda entry: entry.problem)
    listed = failures.most_common(FAILURES)
    return ReportModel(
        title=title,
        where=where,
        made=made,
        entries=tuple(entries),
        groups=tuple(_groups(entries)),
        failures=tuple(KernelFailures(*what, count, examples[what]) for what, count in listed),
        failure_kinds=tuple(kinds.most_common()),
        with_failures=with_failures,
        details=tuple(detail_of(facts_of(record)) for record in best.chosen()),
    )


def _count(
    facts: MeasuredRecord, failures: Counter[tuple[str, str, str]], examples: dict[tuple[str, str, str], str]
) -> None:
    for what, count in failures_of(facts).items():
        op, kind, _ = what
        known = what if what in failures or len(failures) < _MESSAGES else (op, kind, "other messages")
        failures[known] += count
        if known not in examples:
            failed = next(m for m in facts.current if m.failure is not None and m.failure.kind == kind)
            examples[known] = config_text(failed.config)


def interest(entry: ReportEntry) -> tuple[float, int, float]:
    """Order entries by how much there is to see: what was gained over the default, then how much was measured."""
    return abs(math.log(entry.speedup or 1.0)), entry.measured, entry.when


_Rank: TypeAlias = "tuple[tuple[float, int, float], int, Record | None]"


class _MostInteresting:
    """Keeps the records worth a look in detail: the best of each kernel and device, then the best of the rest.

    Never more than twice as many as are asked for: a record may be large, and a book may have any number of kernels.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._firsts: dict[tuple[str, str], _Rank] = {}
        self._rest: list[_Rank] = []
        self._least: _Rank = ((-1.0, 0, 0.0), 0, None)
        self._seen = 0

    def offer(self, entry: ReportEntry, record: Record) -> None:
        if not entry.measured:
            return
        self._seen += 1
        mine = (interest(entry), -self._seen, record)
        # With as many kernels as are wanted, nearly every record ends here.
        if len(self._firsts) == self._most and mine < self._least:
            return
        group = (entry.problem.op, entry.problem.device)
        first = self._firsts.get(group)
        if first is not None and first >= mine:
            self._keep(mine)
            return
        self._firsts[group] = mine
        if first is not None:
            self._keep(first)
        elif len(self._firsts) > self._most:
            # A kernel that leaves here comes back with a better entry, or has none that would be among the best.
            self._firsts.pop(min(self._firsts, key=self._firsts.__getitem__))
        self._least = min(self._firsts.values())

    def _keep(self, other: _Rank) -> None:
        if len(self._rest) < self._most:
            heapq.heappush(self._rest, other)
        elif other > self._rest[0]:
            heapq.heapreplace(self._rest, other)

    def chosen(self) -> list[Record]:
        firsts = sorted(self._firsts.values(), reverse=True)
        rest = sorted(self._rest, reverse=True)[: self._most - len(firsts)]
        return [record for _, _, record in [*firsts, *rest] if record is not None]


def _groups(entries: Sequence[ReportEntry]) -> Iterable[KernelGroup]:
    members: dict[tuple[str, str], list[ReportEntry]] = defaultdict(list)
    for entry in entries:
        members[entry.problem.op, entry.problem.device].append(entry)
    for (op, device), each in members.items():
        yield KernelGroup(
            op=op,
            device=device,
            entries=len(each),
            measured=sum(entry.measured for entry in each),
            failed=sum(sum(entry.failed.values()) for entry in each if entry.failed),
            speedups=tuple(sorted(entry.speedup for entry in each if entry.speedup is not None)),
            reached=tuple(sorted(entry.reached for entry in each if entry.reached is not None)),
            seconds=math.fsum(entry.seconds for entry in each),
            waiting_s=math.fsum(entry.waiting_s for entry in each),
            compile_s=math.fsum(entry.compile_s for entry in each),
        )
