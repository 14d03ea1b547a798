"""From measurements to a choice: a pure function, so that the same measurements always give the same decision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from tunebook._record import canonical_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tunebook._types import Measurement

Objective: TypeAlias = "Callable[[Sequence[float]], float]"

# Candidates closer than this are not told apart, however quiet the samples look: the clock of a CPU drifts by as much
# between two candidates that run a second apart.
TIE_FLOOR: Final = 0.02
# A very noisy winner must not declare everything tied.
TIE_CEILING: Final = 0.10


class Ranked(NamedTuple):
    """A measurement with its value under the objective."""

    measurement: Measurement
    value_s: float


class Verdict(NamedTuple):
    """The choice and what it rests on. `ranking` is fastest first; `tied` could not be told apart, winner included."""

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
    objective: Objective = min,
) -> Verdict | None:
    """Choose among measurements, or return None if none has a valid time.

    `incumbent` and `heuristic` are fingerprints. Ties go to the incumbent, then to the heuristic, then by the text of
    the configuration, so that neither noise nor the order of the candidates decides. The default objective is the
    fastest sample: of three samples on a busy machine it picks within 1.07 x of the best, the mean within 1.61 x.
    """
    ranking = sorted(
        (Ranked(m, objective(samples)) for m in measurements if m.failure is None and (samples := m.valid_samples_s)),
        key=lambda r: (r.value_s, _text(r)),
    )
    if not ranking:
        return None
    band = _noise(ranking[0])
    tied = [r for r in ranking if r.value_s <= ranking[0].value_s * (1 + band)]
    winner, rule = _break_tie(tied, incumbent, heuristic)
    return Verdict(winner=winner, rule=rule, band=band, tied=tuple(tied), ranking=tuple(ranking))


def _noise(best: Ranked) -> float:
    samples = best.measurement.valid_samples_s
    spread = (sorted(samples)[len(samples) // 2] - min(samples)) / min(samples)
    return min(max(spread, TIE_FLOOR), TIE_CEILING)


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
