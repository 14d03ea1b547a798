"""From measurements to a choice: a pure function, so that the same measurements always give the same decision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from tunebook._race import ENOUGH, typical_s, uncertainty
from tunebook._record import canonical_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tunebook._types import Measurement

Objective: TypeAlias = "Callable[[Sequence[float]], float]"

# Candidates closer than this to the best one may be tied, however quiet the samples look: what the next process would
# measure differs by as much.
TIE: Final = 0.015
# A gap as wide as this between neighbours is seen in the next tuning too.
CLEAR: Final = 0.004
# Very noisy measurements must not declare everything tied.
TIE_CEILING: Final = 0.10


class Ranked(NamedTuple):
    """A measurement with its value under the objective."""

    measurement: Measurement
    value_s: float


class Verdict(NamedTuple):
    """The choice and what it rests on. `tied` could not be told apart, winner included.

    `ranking` is fastest first, finalists before those that were dropped from the race.
    """

    winner: Ranked
    rule: str
    band: float
    tied: tuple[Ranked, ...]
    ranking: tuple[Ranked, ...]


def decide(
    measurements: Iterable[Measurement],
    *,
    incumbent: str | None = None,
    heuristic: str | None = None,
    objective: Objective = typical_s,
) -> Verdict | None:
    """Choose among measurements, or return None if none has a valid time.

    `incumbent` and `heuristic` are fingerprints. Ties go to the incumbent, then to the heuristic, then by the text of
    the configuration, so that neither noise nor the order of the candidates decides.
    """
    ranking = sorted(
        (Ranked(m, objective(samples)) for m in measurements if m.failure is None and (samples := m.valid_samples_s)),
        key=lambda r: (r.measurement.dropped, r.value_s, _text(r)),
    )
    if not ranking:
        return None
    finalists = [r for r in ranking if r.measurement.dropped is ranking[0].measurement.dropped]
    band = _tie_band(finalists)
    tied = [r for r in finalists if r.value_s <= ranking[0].value_s * (1 + band)]
    winner, rule = _break_tie(tied, incumbent, heuristic)
    return Verdict(winner=winner, rule=rule, band=band, tied=tuple(tied), ranking=tuple(ranking))


def _tie_band(ranking: Sequence[Ranked]) -> float:
    """Return how much slower than the best a candidate may be and still be tied with it.

    The edge is put into the first clear gap between neighbours. At a fixed edge, a candidate that happens to lie there
    would be tied in one tuning and not in the next.
    """
    best = ranking[0]
    noise = 2 * uncertainty(best.measurement.valid_samples_s)
    limit = min(max(TIE, noise), TIE_CEILING)
    clear = max(CLEAR, noise) if len(best.measurement.valid_samples_s) >= ENOUGH else limit
    edge = 0.0
    for ranked in ranking[1:]:
        behind = ranked.value_s / best.value_s - 1
        if behind > limit or behind - edge > clear:
            break
        edge = behind
    return edge + 1e-12  # the last one before the gap is in, whatever the division rounds to


def _break_tie(tied: Sequence[Ranked], incumbent: str | None, heuristic: str | None) -> tuple[Ranked, str]:
    if len(tied) == 1:
        return tied[0], "fastest"
    for rule, fingerprint in (("tie, kept the incumbent", incumbent), ("tie, kept the heuristic", heuristic)):
        for ranked in tied:
            if ranked.measurement.fingerprint == fingerprint:
                return ranked, rule
    return min(tied, key=_text), "tie, first in canonical order"


def _text(ranked: Ranked) -> str:
    return canonical_json(ranked.measurement.config)
