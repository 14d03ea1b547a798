"""How long a tuning will still take, as people see it while candidates are tried: a high estimate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from tunebook._statistics.race import LEAST_FINAL_S, LEAST_SAMPLES, QUALIFYING, SAMPLES_PER_CANDIDATE

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of the times of candidates, relative to their mean: after two or three tries, likeness may be chance.
LEAST_SPREAD: Final = 0.3


def time_left_s(spent_s: float, tried: int, total: int, first_s: Sequence[float]) -> float:
    """Return the seconds that the candidates left to try will take, and the race of all of them.

    `first_s` are the first runs of the candidates that race; without any, no race is counted.
    """
    if not first_s:
        return spent_s / tried * (total - tried)
    mean_s = math.fsum(first_s) / len(first_s)
    deviation_s = math.sqrt(math.fsum((s - mean_s) ** 2 for s in first_s) / len(first_s))
    # The others may be slower on the whole than the tried ones: by two standard errors.
    caution = 1 + 2 * max(deviation_s / (mean_s or 1.0), LEAST_SPREAD) / math.sqrt(tried)
    to_try_s = spent_s / tried * (total - tried) * caution
    lanes = len(first_s) * total / tried
    rounds_s = QUALIFYING[-1].samples * (math.fsum(first_s) + mean_s * (lanes - len(first_s)) * caution)
    # After these rounds only fast candidates run, for no longer than everything before.
    samples = max(SAMPLES_PER_CANDIDATE * lanes, LEAST_SAMPLES) - QUALIFYING[-1].samples * lanes
    final_s = min(samples * min(first_s), max(spent_s + to_try_s + rounds_s, LEAST_FINAL_S))
    return to_try_s + rounds_s + final_s


def finals_s(fastest_s: Sequence[float], finalists: int) -> float:
    """Return the seconds that a search will race its finalists for, by the fastest candidates so far."""
    if not fastest_s:
        return 0.0
    rounds_s = (1 + QUALIFYING[-1].samples) * math.fsum(fastest_s) / len(fastest_s) * finalists
    return rounds_s + min(LEAST_SAMPLES * min(fastest_s), max(rounds_s, LEAST_FINAL_S))
