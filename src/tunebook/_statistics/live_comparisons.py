"""Comparisons of a live race: which candidate is surely faster, which ones are finalists, and when they leave."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from tunebook._statistics.race import RaceStage, median_s, typical_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# A candidate leads if it is faster by so many standard errors, and by this fraction in all but this part of its rounds.
_SURELY, FASTER, _DISTURBED = 2.5, 0.02, 0.2
# Finalists: all this close to the best, because a tie is decided by rule and not by the luck of the screening...
_ALIKE: Final = 1.03
# ...and so many in all, if they are this close.
_FINALISTS, _CLOSE = 6, 1.08
FINAL: Final = (
    RaceStage(8, 1.06),
    RaceStage(16, 1.04),
    RaceStage(24, 1.03),
    RaceStage(32, 1.025),
    RaceStage(48, 1.02),
    RaceStage(96, 1.02),
    RaceStage(192, 1.015),
)


def surely_below(samples: Sequence[float], bound: float) -> float | None:
    """Return a time that these samples are surely not above, if it is surely below a bound, and else None.

    By the range of samples without the most disturbed ones: where the leader was disturbed in three of five rounds, a
    slower candidate seemed to take a third of its time.
    """
    ordered = sorted(samples)
    most = ordered[-1 - int(_DISTURBED * len(ordered))]
    at_most = median_s(ordered) + _SURELY * (most - ordered[0]) / (2 * math.sqrt(len(ordered)))
    return at_most if max(most, at_most) < (1 - FASTER) * bound else None


def finalists_of(known: Mapping[str, float], always: Iterable[str]) -> list[str]:
    """Return the names of the finalists by their times so far; the second fastest even if it is far behind.

    The winner is watched beside the second fastest.
    """
    best = min(known.values())
    ranked = sorted(known, key=lambda name: (known[name], name))
    few = ranked[:2] + [name for name in ranked[2:_FINALISTS] if known[name] <= _CLOSE * best]
    alike = (name for name in ranked if known[name] <= _ALIKE * best)
    return list(dict.fromkeys([*few, *alike, *always]))


def times_as_long(ours_s: Sequence[float], theirs_s: Sequence[float]) -> float | None:
    """Return how many times as long one finalist takes as another, by the rounds that both were in; None without any.

    Rounds of one alone are left out: meanwhile the device may have become slower.
    """
    both = min(len(ours_s), len(theirs_s))
    return typical_s(ours_s[:both]) / typical_s(theirs_s[:both]) if both else None
