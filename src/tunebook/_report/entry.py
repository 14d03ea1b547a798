"""One record as a line of a report: the few values that tables and sums over many records need."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._base.config_codec import fingerprint_of, readable
from tunebook._base.errors import CodecError
from tunebook._base.vocabulary import INTERRUPTED
from tunebook._keys.call_key import in_short
from tunebook._selection.recorded_decision import is_interrupted, names_in, of_candidates, verdict_of, winner_of
from tunebook._statistics.roofline import Peak, Roofline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tunebook._base.record_format import Body, Record
    from tunebook._base.vocabulary import Json, Measurement, Problem


NONE_WORKED: Final = "failed"
PINNED: Final = "pinned"
_LARGEST: Final = 1e30  # a larger number in a record is a mistake, and sums of larger numbers may overflow


class ReportEntry(NamedTuple):
    """One record. Times are None without measurements, `default_s` also if the heuristic was not measured.

    `failed` counts candidates by the kind of their failure, `speedup` compares with the heuristic, and `reached` is the
    reached part of the roofline. They are fields, not properties: 100,000 entries are asked several times each. With
    `drift` there is no speedup: the heuristic seems faster than the winner, because it left the race before the machine
    became slower. `disturbed`: other work ran meanwhile, so that the times may be wrong. `flops_per_s` and
    `bytes_per_s` are the rates of the stated work. A pinned entry has no speedup: no tuning chose its configuration.
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
    drift: bool
    disturbed: bool
    flops_per_s: float | None
    bytes_per_s: float | None

    @property
    def decided(self) -> bool:
        """Whether the entry has a configuration."""
        return self.origin not in (NONE_WORKED, INTERRUPTED)


class MeasuredRecord(NamedTuple):
    """A record with the measurements that were taken under the conditions of its decision.

    `chosen` is the choice of the tuning; `in_use` differs from it if the record was pinned by hand.
    """

    record: Record
    body: Body
    chosen: str
    in_use: str
    default: str | None
    current: Sequence[Measurement]

    def values_s(self) -> Mapping[str, float]:
        """Return the time of each candidate that worked, by its fingerprint and the record's objective."""
        verdict = verdict_of(self.record, self.current)
        ranking = () if verdict is None else verdict.ranking
        return {r.measurement.fingerprint: r.value_s for r in ranking if 0 < r.value_s < math.inf}


def facts_of(record: Record) -> MeasuredRecord:
    """Return the decision of a record and the measurements that it rests on."""
    body = record.body
    winner = winner_of(body)
    in_use, origin = fingerprint_of(record.head.config), record.head.origin
    # A configuration that was imported later need not be the winner; a pin leaves the tuning as it was.
    chosen = winner or "" if origin == PINNED else winner if winner and origin == "tuned" else in_use
    in_use = in_use if origin == PINNED else chosen
    default = body.provenance.get("default")
    current = _current(record, of_candidates(body), chosen)
    return MeasuredRecord(record, body, chosen, in_use, default if isinstance(default, str) else None, current)


def _current(record: Record, measured: Sequence[Measurement], chosen: str) -> Sequence[Measurement]:
    if all(m[2:5] == measured[0][2:5] for m in measured):  # code, policy, environment: a slice is faster
        return measured
    here = [m for m in measured if m.environment == record.head.environment] or measured
    values_from = record.body.provenance.get("values_from", "call")
    model = max(here, key=lambda m: (m.fingerprint == chosen, m.values_from == values_from, m.when))
    conditions = (model.code, model.policy, model.environment)
    return [m for m in measured if (m.code, m.policy, m.environment) == conditions]


def _numbers(record: Record, provenance: Mapping[str, Json]) -> dict[str, Any]:
    """Return the numbers of a tuning: the summary that it wrote, else computed from its measurements."""
    written = provenance.get("found") if record.head.origin == "tuned" else None
    if isinstance(written, dict):
        kinds = written.get("failed")
        return {
            "best_s": _positive(written, "best_s"),
            "default_s": _positive(written, "default_s"),
            "measured": int(_positive(written, "tried") or 0),
            "failed": {k: n for k, n in kinds.items() if isinstance(n, int)} if isinstance(kinds, dict) else {},
            "compile_s": _positive(written, "compile_s") or 0.0,
        }
    facts = facts_of(record)
    times = facts.values_s()
    return {
        "best_s": times.get(facts.in_use),
        "default_s": times.get(facts.default or ""),
        "measured": len(facts.current),
        "failed": Counter(m.failure.kind for m in facts.current if m.failure is not None),
        "compile_s": math.fsum(m.compile_s for m in facts.current if m.compile_s),
    }


def _positive(facts: Mapping[str, Json], name: str) -> float | None:
    """Return a positive number by its name; None if it is missing or not a positive number."""
    value = facts.get(name)
    return value if isinstance(value, (int, float)) and 0 < value < _LARGEST else None


def _ratio(over: float | None, under: float | None) -> float | None:
    ratio = over / under if over and under else 0.0
    return ratio if 0 < ratio < _LARGEST else None


def entry_of(record: Record) -> ReportEntry:
    """Return the line of a record. Most records have a summary, so that their measurements are not read."""
    head = record.head
    provenance = record.provenance
    numbers = _numbers(record, provenance)
    best_s, default_s = numbers["best_s"], numbers["default_s"]
    roofline, work = None, provenance.get("roofline")
    if isinstance(work, dict):
        amounts = {name: float(amount) for name in work if (amount := _positive(work, name))}
        peak = Peak(amounts.get("flops_per_s"), amounts.get("bytes_per_s"))
        roofline = Roofline(amounts.get("flops"), amounts.get("bytes"), peak)
    least_s = 0.0 if roofline is None else roofline.least_s
    speedup = None if head.origin == PINNED else _ratio(default_s, best_s)
    # No rule lets a slower candidate win a race: these two times are not of the same minutes.
    drift = speedup is not None and speedup < 1 and head.origin == "tuned"
    return ReportEntry(
        problem=head.problem,
        call=in_short(head.problem.call_key),
        config=config_text(head.config, names_in(record)) if head.decided else "",
        origin=head.origin if head.decided else INTERRUPTED if is_interrupted(record) else NONE_WORKED,
        # The time of a pin is not the time of the tuning.
        when=(head.origin == PINNED and _positive(provenance, "measured")) or _positive(provenance, "when") or 0.0,
        seconds=_positive(provenance, "seconds") or 0.0,
        waiting_s=_positive(provenance, "waiting_s") or 0.0,
        roofline=roofline,
        speedup=None if drift else speedup,
        drift=drift,
        disturbed=bool(provenance.get("disturbances")),
        flops_per_s=_ratio(roofline and roofline.flops, best_s),
        bytes_per_s=_ratio(roofline and roofline.bytes_moved, best_s),
        reached=_ratio(least_s, best_s),
        **numbers,
    )


def config_text(encoded: Json, names: Sequence[str] = ()) -> str:
    """Return a configuration as people write it, in the order of `names`, or the reason why it cannot be read."""
    try:
        return readable(encoded, names)
    except CodecError as error:
        return f"unreadable: {error}"
