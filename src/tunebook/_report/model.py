"""The values that a report shows: computed once, drawn as a page or as a picture.

A book may have any number of records, so each record is read once and only a line of it is kept. The few records that
are shown in detail are chosen by their lines.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from tunebook._base.vocabulary import INTERRUPTED
from tunebook._report.detail import Detail, detail_of
from tunebook._report.entry import PINNED, ReportEntry, config_text, entry_of, facts_of
from tunebook._report.sizes import lines_of
from tunebook._selection.recorded_decision import names_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json
    from tunebook._report.comparison import BookComparison
    from tunebook._report.entry import MeasuredRecord
    from tunebook._report.sizes import SizeLine

DETAILS: Final = 12
FAILURES: Final = 200  # different failures that are listed
READ_FAILURES: Final = 2000  # entries whose messages are read: messages are in the large part of a record
# Also 0x7f3c and 1.5e-07, but not the digits of float32.
_NUMBER: Final = re.compile(r"(?<!\w)(?:0x[0-9a-f]+|\d+(?:\.\d+)?(?:e[+-]?\d+)?)")
_MESSAGES: Final = 20_000  # different messages that are counted: each may name an address of its own

# Interest, order of reading, kernel and device, record.
_Ranked: TypeAlias = "tuple[tuple[float, int, float], int, tuple[str, str], Record]"


class KernelGroup(NamedTuple):
    """The entries of a kernel on a device, summed. `speedups` and `reached` are sorted.

    `shown_device` is the short name of the device, or empty if the report has only one.
    """

    op: str
    device: str
    shown_device: str
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
        """The geometric mean of the speedups over the heuristic."""
        return statistics.geometric_mean(self.speedups) if self.speedups else None


class ReportModel(NamedTuple):
    """Everything that a report shows. `details` has at most `DETAILS` entries, chosen by their gain over the heuristic.

    `failure_kinds` counts all failed candidates by kind, in the words of explanations. `failures` has the kernel, kind,
    message, count and an example of failures of at most `READ_FAILURES` entries: messages that differ only in numbers
    are one cause, and the first is shown. `with_failures` is the number of entries that have failed candidates.
    `undecided` has the entries without a winner, because all candidates failed, with a message of their candidates.
    `devices` has the short name of each device by its fingerprint.
    """

    title: str
    where: str
    made: float
    entries: tuple[ReportEntry, ...]
    groups: tuple[KernelGroup, ...]
    failures: tuple[tuple[str, str, str, int, str], ...]
    failure_kinds: tuple[tuple[str, int], ...]
    with_failures: int
    details: tuple[Detail, ...]
    undecided: tuple[tuple[ReportEntry, str], ...]
    devices: Mapping[str, str]
    by_size: tuple[SizeLine, ...]
    comparison: BookComparison | None = None

    @property
    def speedups(self) -> list[float]:
        """How many times faster than its heuristic each entry is, where both times are known."""
        return [speedup for group in self.groups for speedup in group.speedups]

    @property
    def interrupted(self) -> list[ReportEntry]:
        """The entries whose tuning was interrupted before it could choose."""
        return [entry for entry in self.entries if entry.origin == INTERRUPTED]

    @property
    def remarks(self) -> list[str]:
        """What the sums leave out: interrupted tunings, and entries that were pinned by hand."""
        interrupted, pinned = len(self.interrupted), sum(entry.origin == PINNED for entry in self.entries)
        one, many = "1 entry has", f"{interrupted:,} entries have"
        said = "no decision yet: a tuning was interrupted, and the next one goes on."
        found = [f"{one if interrupted == 1 else many} {said}"] if interrupted else []
        if pinned:
            left_out = "1 entry is" if pinned == 1 else f"{pinned:,} entries are"
            found.append(f"{left_out} pinned by hand, and left out of the gains: no tuning chose the configuration.")
        return found


def model_of(records: Iterable[Record], *, title: str, where: str, made: float) -> ReportModel:
    """Return the values of a report; reads the records once."""
    entries: list[ReportEntry] = []
    failures: dict[tuple[str, str, str], FailureCause] = {}
    undecided: list[tuple[ReportEntry, str]] = []
    ranked: list[_Ranked] = []
    kinds: Counter[str] = Counter()
    with_failures = 0
    for record in records:
        entry = entry_of(record)
        entries.append(entry)
        if entry.measured:
            # The gain over the heuristic, then the number of candidates.
            interest = (abs(math.log(entry.speedup or 1.0)), entry.measured, entry.when)
            ranked.append((interest, -len(entries), (entry.problem.op, entry.problem.device), record))
        if len(ranked) > 8 * DETAILS:
            ranked = _most_interesting(ranked)  # a record may be large: few are kept
        if entry.failed:
            kinds.update({_word(kind): count for kind, count in entry.failed.items()})
            with_failures += 1
            if with_failures <= READ_FAILURES:
                _count(facts_of(record), failures)
        if not entry.decided and entry.origin != INTERRUPTED:
            undecided.append((entry, _first_failure(record) if len(undecided) < FAILURES else ""))
    entries.sort(key=lambda entry: entry.problem)
    listed = sorted(failures.items(), key=lambda item: -item[1].count)[:FAILURES]
    devices = short_names({entry.problem.device for entry in entries})
    return ReportModel(
        title=title,
        where=where,
        made=made,
        entries=tuple(entries),
        groups=tuple(_groups(entries, devices)),
        failures=tuple((op, kind, c.message, c.count, config_text(c.example, c.names)) for (op, kind, _), c in listed),
        failure_kinds=tuple(kinds.most_common()),
        with_failures=with_failures,
        details=tuple(detail_of(facts_of(record)) for *_, record in _most_interesting(ranked)[:DETAILS]),
        undecided=tuple(undecided),
        devices=devices,
        by_size=lines_of(entries),
    )


class FailureCause:
    """Failures of one cause: the first message, how many candidates failed with it, and the first of them."""

    __slots__ = ("count", "example", "message", "names")

    def __init__(self, message: str, example: Json, names: Sequence[str]) -> None:
        self.message, self.example, self.names, self.count = message, example, names, 0


def _count(facts: MeasuredRecord, failures: dict[tuple[str, str, str], FailureCause]) -> None:
    names = names_in(facts.record)
    for m in facts.current:
        if m.failure is not None:
            message = next(iter(m.failure.message.strip().splitlines()), "")[:300]
            key = (facts.record.problem.op, _word(m.failure.kind), cause_of(message))
            if key not in failures and len(failures) >= _MESSAGES:
                key, message = (*key[:2], "other messages"), "other messages"
            failures.setdefault(key, FailureCause(message, m.config, names)).count += 1


def _word(kind: str) -> str:
    """Return the word of explanations for a kind of failure."""
    return "raised" if kind == "launch" else kind


def cause_of(message: str) -> str:
    """Return a message without its numbers: one cause is told with many numbers. Digits of names stay.

    >>> cause_of("off by up to 3.5e-07 in 12 of 64 values of float32")
    'off by up to # in # of # values of float32'
    """
    return _NUMBER.sub("#", message)


def _first_failure(record: Record) -> str:
    failures = (m.failure for m in facts_of(record).current if m.failure is not None)
    return next((failure.said[:300] for failure in failures), "")


def short_names(devices: Iterable[str]) -> dict[str, str]:
    """Return a short name of each device; two devices never share one.

    >>> short_names(["cpu:AuthenticAMD AMD EPYC 25/17/1 x86_64 2 cores isa-0edc9f61"]).popitem()[1]
    'AMD EPYC, 2 cores'
    """
    shown = {device: _short_name(device) for device in sorted(devices)}
    many = Counter(shown.values())
    return {device: name if many[name] == 1 else device for device, name in shown.items()}


def _short_name(device: str) -> str:
    found = re.fullmatch(r"cpu:\S+ (.+?) \d+/\d+/\d+ \S+ (\d+ cores?).*", device)
    if found is not None:
        return f"{found[1]}, {found[2]}"
    parts = device.split(":")
    return parts[1] if len(parts) == 3 and parts[1] else device


def _most_interesting(ranked: list[_Ranked]) -> list[_Ranked]:
    """Return the best record of each kernel and device, then the best of the rest; at most `DETAILS` of both."""
    # No dropped record could return to the first `DETAILS` later: better records can only push it further back.
    firsts: dict[tuple[str, str], _Ranked] = {}
    ordered = sorted(ranked, key=lambda each: each[:2], reverse=True)
    rest = [each for each in ordered if firsts.setdefault(each[2], each) is not each]
    return [*list(firsts.values())[:DETAILS], *rest[:DETAILS]]


def _groups(entries: Sequence[ReportEntry], devices: Mapping[str, str]) -> Iterable[KernelGroup]:
    members: dict[tuple[str, str], list[ReportEntry]] = defaultdict(list)
    for entry in entries:
        members[entry.problem.op, entry.problem.device].append(entry)
    for (op, device), each in members.items():
        yield KernelGroup(
            op=op,
            device=device,
            shown_device=devices[device] if len(devices) > 1 else "",
            entries=len(each),
            measured=sum(entry.measured for entry in each),
            failed=sum(sum(entry.failed.values()) for entry in each if entry.failed),
            speedups=tuple(sorted(entry.speedup for entry in each if entry.speedup is not None)),
            reached=tuple(sorted(entry.reached for entry in each if entry.reached is not None)),
            seconds=math.fsum(entry.seconds for entry in each),
            waiting_s=math.fsum(entry.waiting_s for entry in each),
            compile_s=math.fsum(entry.compile_s for entry in each),
        )
