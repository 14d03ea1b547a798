"""One record as a line of a report: what a table and the sums over many records need of it, and no more."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from tunebook._base.config_codec import fingerprint_of, readable
from tunebook._base.errors import CodecError
from tunebook._keys.call_key import spell_out
from tunebook._selection.trusted_entries import body_of, verdict_of, winner_of
from tunebook._statistics.roofline import Peak, Roofline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tunebook._base.record_format import Body, Record
    from tunebook._base.vocabulary import Json, Measurement, Problem


class KernelFailures(NamedTuple):
    """Candidates of one kernel that failed in the same way; `example` is one of their configurations."""

    op: str
    kind: str
    message: str
    candidates: int
    example: str


class ReportEntry(NamedTuple):
    """One record. Times are None where nothing was measured, `default_s` where the heuristic's time is not known.

    `failed` counts candidates by the kind of their failure. `speedup` is how many times faster than the default it is,
    `reached` the part of the roofline that it reaches: fields and not properties, because each is asked for several
    times of 100,000 entries.
    """

    problem: Problem
    call: str
    config: str
    origin: str
    best_s: float | None
    default_s: float | None
    measured: int
    failed: Mapping[str, int]
    when: float
    seconds: float
    waiting_s: float
    compile_s: float
    roofline: Roofline | None
    speedup: float | None
    reached: float | None


class UnderRoof(NamedTuple):
    """An entry's place under the roof of its device: operations per byte, and operations per second."""

    entry: ReportEntry
    intensity: float
    rate: float
    flops_per_s: float
    bytes_per_s: float


def under_roof(entry: ReportEntry) -> UnderRoof | None:
    """Return an entry's place under its roof; None unless both amounts, both rates and a time are known."""
    work = entry.roofline
    if work is None or not entry.best_s or not work.flops or not work.bytes_moved:
        return None
    flops_per_s, bytes_per_s = work.peak
    if not flops_per_s or not bytes_per_s:
        return None
    return UnderRoof(entry, work.flops / work.bytes_moved, work.flops / entry.best_s, flops_per_s, bytes_per_s)


class MeasuredRecord(NamedTuple):
    """A record with those of its measurements that were taken under the conditions of its choice."""

    record: Record
    body: Body
    chosen: str
    default: str | None
    current: Sequence[Measurement]

    def values_s(self) -> Mapping[str, float]:
        """Return the time of each candidate that worked, by its fingerprint and the record's objective."""
        verdict = verdict_of(self.record, self.current)
        return {} if verdict is None else {r.measurement.fingerprint: r.value_s for r in verdict.ranking}


def facts_of(record: Record) -> MeasuredRecord:
    """Return a record's choice and what it was made on."""
    body = body_of(record)
    winner = winner_of(body)
    # What was pinned or imported since need not be what won.
    chosen = winner if winner and record.head.origin == "tuned" else fingerprint_of(record.head.config)
    default = body.provenance.get("default")
    current = _current(record, body.measurements, chosen)
    return MeasuredRecord(record, body, chosen, default if isinstance(default, str) else None, current)


def _current(record: Record, measured: Sequence[Measurement], chosen: str) -> Sequence[Measurement]:
    if all(m[2:5] == measured[0][2:5] for m in measured):  # code, policy, environment: sliced, for it is done for all
        return measured
    here = [m for m in measured if m.environment == record.head.environment] or measured
    model = max(here, key=lambda m: (m.fingerprint == chosen, m.when))
    conditions = (model.code, model.policy, model.environment)
    return [m for m in measured if (m.code, m.policy, m.environment) == conditions]


class _TuningNumbers(NamedTuple):
    """A tuning in a few numbers."""

    best_s: float | None
    default_s: float | None
    tried: int
    failed: Mapping[str, int]
    compile_s: float


def _found(record: Record, provenance: Mapping[str, Json]) -> _TuningNumbers:
    """Return what a tuning found, as it was written down after it; else, by its measurements."""
    written = provenance.get("found") if record.head.origin == "tuned" else None
    if not isinstance(written, dict):
        return _found_in(facts_of(record))
    failed = written.get("failed")
    kinds = (
        {kind: count for kind, count in failed.items() if isinstance(count, int)} if isinstance(failed, dict) else {}
    )
    best_s, default_s = _number(written, "best_s"), _number(written, "default_s")
    tried = int(_number(written, "tried") or 0)
    return _TuningNumbers(best_s, default_s, tried, kinds, _number(written, "compile_s") or 0.0)


def _found_in(facts: MeasuredRecord) -> _TuningNumbers:
    times = facts.values_s()
    return _TuningNumbers(
        best_s=times.get(facts.chosen),
        default_s=times.get(facts.default or ""),
        tried=len(facts.current),
        failed=Counter(m.failure.kind for m in facts.current if m.failure is not None),
        compile_s=math.fsum(m.compile_s for m in facts.current if m.compile_s),
    )


def _number(facts: Mapping[str, Json], name: str) -> float | None:
    """Return a positive number of a record; None if there is none of this name."""
    value = facts.get(name)
    return value if isinstance(value, (int, float)) and value > 0 else None


def provenance_of(record: Record) -> Mapping[str, Json]:
    """Return a record's provenance, or nothing if it cannot be read."""
    try:
        return record.provenance
    except CodecError:
        return {}


def entry_of(record: Record) -> ReportEntry:
    """Return the line of a record; of most records, without reading its measurements."""
    head, provenance = record.head, provenance_of(record)
    found = _found(record, provenance)
    roofline = _roofline(provenance.get("roofline"))
    least_s = 0.0 if roofline is None else roofline.least_s
    return ReportEntry(
        problem=head.problem,
        call=" · ".join(spell_out(head.problem.call_key)),
        config=config_text(head.config) if head.decided else "",
        origin=head.origin if head.decided else "none worked",
        best_s=found.best_s,
        default_s=found.default_s,
        measured=found.tried,
        failed=found.failed,
        when=_number(provenance, "when") or 0.0,
        seconds=_number(provenance, "seconds") or 0.0,
        waiting_s=_number(provenance, "waiting_s") or 0.0,
        compile_s=found.compile_s,
        roofline=roofline,
        speedup=found.default_s / found.best_s if found.default_s and found.best_s else None,
        reached=least_s / found.best_s if least_s and found.best_s else None,
    )


def config_text(encoded: Json) -> str:
    """Return a configuration as people write it; one that cannot be read says so."""
    try:
        return readable(encoded)
    except CodecError as error:
        return f"unreadable: {error}"


def failures_of(facts: MeasuredRecord) -> Counter[tuple[str, str, str]]:
    """Return how many candidates failed, by operation, kind and the first line of what was said."""
    found: Counter[tuple[str, str, str]] = Counter()
    for m in facts.current:
        if m.failure is not None:
            message = next(iter(m.failure.message.strip().splitlines()), "")
            found[facts.record.problem.op, m.failure.kind, message[:300]] += 1
    return found


def _roofline(written: Json) -> Roofline | None:
    if not isinstance(written, dict):
        return None
    amounts: Mapping[str, float] = {n: float(v) for n, v in written.items() if isinstance(v, (int, float)) and v > 0}
    peak = Peak(amounts.get("flops_per_s"), amounts.get("bytes_per_s"))
    return Roofline(amounts.get("flops"), amounts.get("bytes"), peak)
