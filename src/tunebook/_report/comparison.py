"""Two books, or one book at two dates, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tunebook._base.record_format import from_whole_tuning
from tunebook._report.entry import config_text, entry_of
from tunebook._selection.recorded_decision import names_in, verdict_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Measurement, Problem
    from tunebook._report.entry import ReportEntry

SAME: Final = 0.03  # times within this part of each other count as the same


class Before(NamedTuple):
    """An entry as it was: its configuration and its time."""

    config: str
    best_s: float | None


class Change(NamedTuple):
    """An entry beside its earlier self. `factor` is how many times faster it is now; None without both times."""

    problem: Problem
    call: str
    kind: str  # "faster", "slower", "same time", "new", "gone" or "no times"
    before: Before | None
    now: Before | None
    factor: float | None


class BookComparison(NamedTuple):
    """What a report is compared with, the entries that differ, and how many have the same configuration and time."""

    label: str
    changes: tuple[Change, ...]
    same: int


def compared_with(entries: Iterable[ReportEntry], others: Iterable[Record], label: str) -> BookComparison:
    """Compare entries with the records of another book; books of other devices are matched by kernel and call."""
    here = list(entries)
    there = {other.problem: other for other in map(entry_of, others)}
    if not {p.device for p in there} & {e.problem.device for e in here}:
        by_call = {p._replace(device=""): other for p, other in there.items()}
        pairs = [(entry, by_call.pop(entry.problem._replace(device=""), None)) for entry in here]
        gone = list(by_call.values())
    else:
        pairs = [(entry, there.pop(entry.problem, None)) for entry in here]
        gone = list(there.values())
    found = [_change(entry, None if other is None else Before(other.config, other.best_s)) for entry, other in pairs]
    lost = [Change(e.problem, e.call, "gone", Before(e.config, e.best_s), None, None) for e in gone]
    return _comparison([*found, *lost], label)


def compared_since(
    entries: Iterable[ReportEntry], earlier: Mapping[Problem, Before | None], label: str
) -> BookComparison:
    """Compare entries with their earlier selves; an entry that is not in `earlier` did not change."""
    changes = [_change(entry, earlier[entry.problem]) for entry in entries if entry.problem in earlier]
    made = _comparison(changes, label)
    return made._replace(same=made.same + sum(entry.problem not in earlier for entry in entries))


def before_of(record: Record, since: float) -> Before | None:
    """Return the best of a record's measurements from before a time, under one set of conditions; None without any."""
    old = [m for m in record.body.measurements if m.when < since and m.failure is None and from_whole_tuning(m)]
    if not old:
        return None
    last = max(old, key=lambda m: m.when)
    conditions = _conditions(last)
    verdict = verdict_of(record, [m for m in old if _conditions(m) == conditions])
    if verdict is None:
        return None
    best = min(verdict.ranking, key=lambda ranked: (ranked.measurement.dropped, ranked.value_s))
    return Before(config_text(best.measurement.config, names_in(record)), best.value_s)


def _conditions(m: Measurement) -> tuple[str, str, str]:
    return m.code, m.policy, m.environment


def _change(entry: ReportEntry, before: Before | None) -> Change:
    now = Before(entry.config, entry.best_s)
    factor = before.best_s / now.best_s if before is not None and before.best_s and now.best_s else None
    kind = "new" if before is None else "no times" if factor is None else _kind(factor)
    return Change(entry.problem, entry.call, kind, before, now, factor)


def _kind(factor: float) -> str:
    return "faster" if factor > 1 + SAME else "slower" if factor < 1 / (1 + SAME) else "same time"


def _comparison(changes: Sequence[Change], label: str) -> BookComparison:
    def differs(change: Change) -> bool:
        alike = change.kind in ("same time", "no times")
        return not (
            alike and change.before is not None and change.now is not None and change.before[0] == change.now[0]
        )

    different = sorted(filter(differs, changes), key=lambda c: (c.factor is None, c.factor or 0.0, c.problem))
    return BookComparison(label, tuple(different), len(changes) - len(different))
