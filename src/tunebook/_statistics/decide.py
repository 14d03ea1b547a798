"""Objectives, and the choice among measurements: pure functions, so equal measurements always give equal decisions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from tunebook._base.durations import seconds_text
from tunebook._base.errors import DefinitionError, not_among
from tunebook._base.record_format import canonical_json
from tunebook._code.checksum import code_checksum
from tunebook._statistics.race import (
    ENOUGH,
    Objective,
    Pause,
    median_s,
    no_pause,
    paired,
    pooled_uncertainty,
    typical_s,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tunebook._base.vocabulary import Json, Measurement

# Candidates closer than this to the best one may be tied, however quiet the samples look: the next process would
# measure differences as large.
TIE: Final = 0.015
# No rule but the incumbent's may choose a candidate that could be slower than the best by more than this...
REGRET: Final = 0.02
# ...or by this, if a device's own clock took the times, because they repeat better (0.5 % on an H200)...
REGRET_BY_DEVICE: Final = 0.01
# ...by so many standard errors of the difference.
SURE: Final = 3.5
# A gap as wide as this between neighbours is seen in the next tuning too.
CLEAR: Final = 0.004
# Times by the host's clock that differ by less are as good as equal: one function in two places of the memory differs
# by up to 17 ns, and in the next process the other way round.
PLACEMENT_S: Final = 20e-9
# The same for a device's clock: four ticks of an H200's events. With samples that differ by 2 %, fifty of a kernel of
# 10 us tell no smaller difference apart, and the noise would choose between kernels that are alike.
TICKS_S: Final = 128e-9
# Very noisy measurements must not declare everything tied.
TIE_CEILING: Final = 0.10
# So many rounds at the start of a race are not compared with each other: a machine that warms up is not in waves.
WARMING: Final = 3
# How the measurement policy begins if a device's own clock took the times. Stored records have the second one.
DEVICE_CLOCKS: Final = ("device-", "opencl-events")


def p95_s(samples: Sequence[float]) -> float:
    """Return the sample that 95 of 100 do not exceed.

    >>> p95_s([float(n) for n in range(1, 101)])
    95.0
    """
    return sorted(samples)[math.ceil(0.95 * len(samples)) - 1]


OBJECTIVES: Final[dict[str, Objective]] = {
    "typical": typical_s,
    "median": median_s,
    "mean": lambda samples: math.fsum(samples) / len(samples),
    "p95": p95_s,
}


def objective_for(asked: str | Callable[[Sequence[float]], float]) -> Objective:
    """Return the objective of a name, or a user's own function of samples, whose NaN ranks last."""
    if callable(asked):
        function = asked

        def checked(samples: Sequence[float]) -> float:
            value = float(function(samples))
            return math.inf if math.isnan(value) else value

        checked.given = function  # type: ignore[attr-defined] # for `objective_name`
        return checked
    if asked not in OBJECTIVES:
        raise DefinitionError(not_among("objective", asked, OBJECTIVES, "a function of samples"))
    return OBJECTIVES[asked]


def objective_name(asked: str | Callable[[Sequence[float]], float]) -> str:
    """Return the name of an objective; of the author's own function, the checksum of its code."""
    if isinstance(asked, str):
        return asked
    names = (name for name, function in OBJECTIVES.items() if function is asked)
    return next(names, None) or code_checksum(getattr(asked, "given", asked))


class Ranked(NamedTuple):
    """A measurement with its value under the objective."""

    measurement: Measurement
    value_s: float


class Verdict(NamedTuple):
    """The choice and its grounds. `tied` are the candidates within `band` of the fastest: they cannot be told apart."""

    winner: Ranked
    rule: str
    band: float
    tied: tuple[Ranked, ...]
    ranking: tuple[Ranked, ...]  # fastest first, finalists before candidates that were dropped from the race
    objective: str = "typical"  # the name of the function that made the values

    def __repr__(self) -> str:
        tied = f", {len(self.tied)} tied" if len(self.tied) > 1 else ""
        ranked = f"{len(self.ranking)} ranked{tied}"
        return f"<Verdict {seconds_text(self.winner.value_s)}, {self.rule}, {ranked}: {self.winner.measurement!r}>"


def decide(
    measurements: Iterable[Measurement],
    *,
    incumbent: str | None = None,
    heuristic: str | None = None,
    objective: Objective = typical_s,
    pause: Pause = no_pause,
) -> Verdict | None:
    """Choose among measurements; return None if all failed.

    `incumbent` and `heuristic` are fingerprints. An incumbent that cannot be told apart from the fastest stays.
    Otherwise the heuristic wins, or the first candidate by the values of its configuration, among the candidates that
    are surely as good as the fastest: neither noise nor the order of the candidates decides.
    """
    valid = [
        Ranked(m, objective(samples)) for m in measurements if m.failure is None and (samples := m.valid_samples_s)
    ]
    places = {r.measurement.fingerprint: _place(r) for r in valid}
    pause()

    def place(ranked: Ranked) -> tuple[object, ...]:
        return places[ranked.measurement.fingerprint]

    ranking = sorted(valid, key=lambda r: (r.measurement.dropped, r.value_s, place(r)))
    if not ranking:
        return None
    finalists = [r for r in ranking if r.measurement.dropped is ranking[0].measurement.dropped]
    others = ranking[len(finalists) :]
    finalists, error = _compare(finalists, objective, place, pause)
    alike, as_good = _bands(finalists, objective, error, pause)
    tied = [r for r in finalists if _behind(r, finalists[0]) <= alike]
    good = [r for r in tied if _behind(r, finalists[0]) <= as_good]
    winner, rule = (good[0], "fastest") if len(good) == 1 else (min(good, key=place), "tie, first by its values")
    for kept, among, fingerprint in (("earlier choice", tied, incumbent), ("heuristic", good, heuristic)):
        found = next((r for r in among if r.measurement.fingerprint == fingerprint), None)
        if found is not None and len(among) > 1:
            winner, rule = found, f"tie, kept the {kept}"
            break
    return Verdict(winner, rule, alike, tuple(tied), (*finalists, *others), objective_name(objective))


def _compare(
    finalists: Sequence[Ranked], objective: Objective, place: Callable[[Ranked], object], pause: Pause
) -> tuple[list[Ranked], float | None]:
    """Return the finalists with times relative to their neighbours, and the error of these, if that is more certain."""
    # The race sampled in rounds: the i-th samples of all finalists are neighbours in time.
    # Candidates that compile to the same program share their samples, which say nothing about each other.
    distinct = list(dict.fromkeys(r.measurement.valid_samples_s for r in finalists))
    counts = set(map(len, distinct))
    found = None
    if objective is typical_s and len(counts) == 1 and min(counts) >= ENOUGH:
        rounds = list(zip(*distinct, strict=True))[WARMING:]
        found = paired([run for taken in rounds for run in enumerate(taken)], range(len(distinct)), pause)
    if found is None:
        return list(finalists), None
    # The finalist with the fastest samples keeps its time, and the others get times on its scale.
    scale = finalists[0].value_s / found.times[0]
    times = {samples: scale * found.times[name] for name, samples in enumerate(distinct)}
    compared = [r._replace(value_s=times[r.measurement.valid_samples_s]) for r in finalists]
    return sorted(compared, key=lambda r: (r.value_s, place(r))), found.error


def _bands(ranking: Sequence[Ranked], objective: Objective, error: float | None, pause: Pause) -> tuple[float, float]:
    """Return how far behind the fastest a candidate may be to be not told apart from it, and to be surely as good."""
    behind = [gap for r in ranking if (gap := _behind(r, ranking[0])) <= TIE_CEILING]
    samples = [r.measurement.valid_samples_s for r in ranking[: len(behind)]]
    by_device = ranking[0].measurement.policy.startswith(DEVICE_CLOCKS)
    equal = min((TICKS_S if by_device else PLACEMENT_S) / typical_s(samples[0]), TIE_CEILING)
    # Of a difference, hence the square root.
    error = math.sqrt(2) * (pooled_uncertainty(samples, objective, pause) if error is None else error)
    alike = min(max(TIE, 2 * error, equal), TIE_CEILING)
    if min(map(len, samples)) < ENOUGH:
        # Too few samples to tell noise: nearly as fast counts as equally good.
        return _edge(behind, alike, alike), _edge(behind, max(TIE, equal), max(TIE, equal))
    clear = max(CLEAR, 2 * error, equal)
    regret = REGRET_BY_DEVICE if by_device else REGRET
    as_good = max(min(regret - SURE * error, TIE), equal)
    return _edge(behind, alike, clear), _edge(behind, as_good, clear)


def _edge(behind: Sequence[float], limit: float, clear: float) -> float:
    """Return how far behind the last candidate is before the first clear gap between neighbours, or the limit."""
    # At a fixed edge, a candidate that happens to lie there would be tied in one tuning and not in the next.
    edge = 0.0
    for gap in behind:
        if gap > limit or gap - edge > clear:
            break
        edge = gap
    return edge


def _behind(ranked: Ranked, best: Ranked) -> float:
    """Return how much slower than the best a candidate is, as a fraction of the best time."""
    if ranked.value_s == best.value_s:
        return 0.0
    return (ranked.value_s - best.value_s) / abs(best.value_s) if best.value_s else math.inf


def _place(ranked: Ranked) -> tuple[object, ...]:
    """Return the place of a candidate among equals: numbers by size, texts by the alphabet, axes by their names."""
    config = ranked.measurement.config
    return _ordered(config), canonical_json(config)  # 1 and 1.0 are equal, and not the same configuration


def _ordered(value: Json) -> tuple[object, ...]:
    """Return a JSON value as a tuple that compares with the tuple of any other: its kind, and its content."""
    match value:
        case dict():
            return 4, tuple((name, _ordered(value[name])) for name in sorted(value))
        case list():
            return 3, tuple(map(_ordered, value))
        case str():
            return 2, value
        case None:
            return (0,)
        case _:
            return 1, value
