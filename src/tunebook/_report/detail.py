"""One tuning in detail: every candidate, how the best was found, and which parameters made it fast."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from tunebook._keys.call_key import spell_out
from tunebook._report.entry import MeasuredRecord, config_text, entry_of
from tunebook._report.importance import HeatMap, Importance, axes_of, heat_maps, importances
from tunebook._selection.trusted_entries import disturbances_of, environments_verified

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tunebook._report.entry import ReportEntry

FINALISTS: Final = 8
LATE: Final = 8  # a candidate with so many samples stayed in the race until late
HEAT_MAPS: Final = 6
SAMPLES: Final = 120  # drawn for each candidate; more overlap
CANDIDATES: Final = 500  # listed for each tuning, the fastest first


class CandidateRow(NamedTuple):
    """One candidate. `tried_s` counts from the beginning of the tuning; 0 if it was measured before."""

    config: str
    axes: dict[str, object]
    value_s: float | None
    samples_s: tuple[float, ...]
    compile_s: float | None
    tried_s: float
    failure: str
    role: str  # "chosen", "default", "finalist" or ""


class Detail(NamedTuple):
    """One tuning. `candidates` has the fastest first and failed candidates last; `left_out` more are not listed."""

    entry: ReportEntry
    call: tuple[str, ...]
    rule: str
    notes: tuple[str, ...]
    candidates: tuple[CandidateRow, ...]
    left_out: int
    importances: tuple[Importance, ...]
    heat_maps: tuple[HeatMap, ...]

    @property
    def finalists(self) -> list[CandidateRow]:
        """The candidates whose samples are shown: the chosen one, the default, and the last in the race."""
        shown = [c for c in self.candidates if c.role or len(c.samples_s) >= LATE]
        shown = [c for c in shown if c.samples_s and c.value_s is not None]
        others = [c for c in shown if c.role not in ("chosen", "default")]
        left_out = {id(c) for c in others[FINALISTS - (len(shown) - len(others)) :]}
        return [c for c in shown if id(c) not in left_out]

    @property
    def best_so_far(self) -> list[tuple[float, float]]:
        """The candidates that were faster than all before: when each was tried, and its time."""
        found: list[tuple[float, float]] = []
        for tried_s, value_s in sorted((c.tried_s, c.value_s) for c in self.candidates if c.value_s is not None):
            if not found or value_s < found[-1][1]:
                found.append((tried_s, value_s))
        return found


def detail_of(facts: MeasuredRecord) -> Detail:
    """Return a record in detail."""
    entry = entry_of(facts.record)
    candidates = sorted(
        _candidates(facts, entry), key=lambda c: (c.value_s is None, c.value_s or 0.0, c.failure, c.config)
    )
    valid = [c for c in candidates if c.value_s is not None]
    weights = importances([c.axes for c in valid], [c.value_s or math.nan for c in valid])
    order = [weight.axis for weight in weights]
    maps = heat_maps([c.axes for c in candidates], [c.value_s for c in candidates], order, HEAT_MAPS)
    rule = facts.body.provenance.get("rule")
    return Detail(
        entry=entry,
        call=tuple(spell_out(facts.record.problem.call_key)),
        rule=rule if isinstance(rule, str) else "",
        notes=tuple(_notes(facts)),
        candidates=tuple(candidates[:CANDIDATES]),
        left_out=max(len(candidates) - CANDIDATES, 0),
        importances=tuple(weights),
        heat_maps=tuple(maps),
    )


def _candidates(facts: MeasuredRecord, entry: ReportEntry) -> Iterable[CandidateRow]:
    began, values_s = _began(facts, entry), facts.values_s()
    for m in facts.current:
        failure = "" if m.failure is None else f"{m.failure.kind}: {m.failure.message.strip()}".splitlines()[0][:300]
        samples = () if failure else m.valid_samples_s
        finalist = "" if m.dropped or failure else "finalist"
        yield CandidateRow(
            config=config_text(m.config),
            axes=axes_of(m.config),
            value_s=values_s.get(m.fingerprint),
            samples_s=tuple(samples[:: max(math.ceil(len(samples) / SAMPLES), 1)]),
            compile_s=m.compile_s,
            tried_s=max(m.when - began, 0.0),
            failure=failure,
            role={facts.default: "default", facts.chosen: "chosen"}.get(m.fingerprint, finalist),
        )


def _began(facts: MeasuredRecord, entry: ReportEntry) -> float:
    """Return when the tuning began that made the decision; earlier measurements were known by then."""
    whens = [m.when for m in facts.current]
    ended = entry.when or max(whens, default=0.0)
    return ended - entry.seconds if entry.seconds else min(whens, default=0.0)


def _notes(facts: MeasuredRecord) -> Iterable[str]:
    others = len(facts.body.measurements) - len(facts.current)
    if facts.body.provenance.get("complete") is False:
        yield "The budget ended this tuning; the best candidate until then was chosen."
    for reason in disturbances_of(facts.body):
        yield f"Disturbed during measuring: {reason}."
    if environments_verified(facts.body):
        yield "Verified: the finalists were measured again under other versions, and the choice still holds."
    if others:
        yield f"{others} measurements under other versions, or of other code, are kept and not shown."
