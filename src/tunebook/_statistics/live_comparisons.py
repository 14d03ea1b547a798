"""Comparisons of a live race: which candidate is surely faster, which ones are finalists, and when they leave."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, TypeAlias

from tunebook._statistics.live_rounds import MOST_SIZES
from tunebook._statistics.race import (
    Lane,
    RaceStage,
    median_s,
    no_pause,
    paired,
    pooled_uncertainty,
    survivors,
    typical_s,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from tunebook._statistics.live_rounds import Conditions
    from tunebook._statistics.race import Pause

# Does a piece of work, now or beside the program; the work takes a `Pause`.
Aside: TypeAlias = "Callable[[Callable[..., object]], object]"

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
# Samples of finalists cost the program next to nothing, so there are more of them than in a race that it waits for:
# with 24 rounds, noise chose between equal candidates in 4 of 80 races, and with these in none or one.
_LEAST_ROUNDS, _MOST_ROUNDS, _FINAL_SAMPLES = 96, 240, 720
_MOST_SAMPLES: Final = 1152  # so that 36 candidates that are alike are decided within 2,000 calls, and not 4,100

# With the times of more launches, a comparison takes longer than handing it to a thread (0.1 ms), and is made beside
# the program.
_MANY: Final = 64
# With 0.001, a race took 15 to 25 % more timed launches, and the winners were no better.
_SETTLED, _SETTLED_AFTER = 0.002, 48
_RECENT: Final = 32  # rounds
_LOOK_EVERY: Final = 16  # rounds: working out the uncertainty takes as long as several launches


def rounds_of_final(finalists: int) -> int:
    """Return the rounds after which a final of so many candidates ends at the latest."""
    count = max(finalists, 1)
    return min(max(_FINAL_SAMPLES // count, _LEAST_ROUNDS), _MOST_SAMPLES // count, _MOST_ROUNDS)


class FinalComparison:
    """The comparison of finalists after some rounds, by copies of their samples: another thread may `run` it.

    `left` has the names of the finalists that stay, the fastest first; `is_settled`: more rounds would change nothing
    that matters. Neither is known until it `is_done`.
    """

    def __init__(
        self, runs: Sequence[tuple[Hashable, float]], lanes: Sequence[Lane], stage: RaceStage | None, entrants: int
    ) -> None:
        """After a `stage`, slow ones leave; None: nobody does. `entrants`: how many began the final."""
        self._runs, self._stage, self._entrants = list(runs), stage, entrants
        self._lanes = [lane.copy() for lane in lanes]
        self.is_done = self.is_settled = False
        self.left: list[str] | None = None

    def run(self, pause: Pause = no_pause) -> None:
        """Compare; `pause` is called after each candidate's share."""
        lanes = self._lanes
        if self._stage is not None:
            found = paired(self._runs, [lane.name for lane in lanes], pause)
            relative = None if found is None else found.times
            lanes = survivors(lanes, self._stage, self._entrants, times=relative, pause=pause)
            self.left = [lane.name for lane in lanes]
        if _is_look(min(len(lane.samples_s) for lane in lanes)):
            self.is_settled = pooled_uncertainty((lane.samples_s for lane in lanes), pause=pause) <= _SETTLED
        self.is_done = True


class FinalComparisons:
    """The launches of a final, and its comparisons, one at a time; `aside` does long ones."""

    def __init__(self, aside: Aside) -> None:
        self._aside = aside
        self.clear()

    def clear(self) -> None:
        """Begin with another final; a comparison that is under way counts no more."""
        self._runs: list[tuple[Hashable, float]] = []
        self._latest: dict[Conditions, Mapping[str, float]] = {}
        self._compared = 0  # rounds
        self._under_way: FinalComparison | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether a comparison is under way, or has not been taken yet."""
        return self._under_way is not None

    def add(self, conditions: Conditions, times: Mapping[str, float]) -> None:
        """Note the times of a round."""
        self._runs += times.items()
        if len(self._latest) >= MOST_SIZES:
            self._latest.clear()
        self._latest[conditions] = times

    def latest_of(self, name: str) -> dict[Conditions, float]:
        """Return the time of a finalist in the last round under each condition."""
        return {conditions: times[name] for conditions, times in self._latest.items() if name in times}

    def compare(self, lanes: Sequence[Lane], rounds: int, entrants: int) -> None:
        """Compare the finalists, if it is time for it after so many rounds, and no comparison is under way."""
        stage = next((stage for stage in reversed(FINAL) if self._compared < stage.samples <= rounds), None)
        if self.is_under_way or (stage is None and not _is_look(rounds)):
            return
        self._compared = rounds
        self._under_way = begun = FinalComparison(self._runs, lanes, stage, entrants)
        if len(self._runs) > _MANY:
            self._aside(begun.run)
        else:
            begun.run()

    def take(self) -> FinalComparison | None:
        """Return a comparison that is done, once."""
        if self._under_way is None or not self._under_way.is_done:
            return None
        done, self._under_way = self._under_way, None
        return done


def _is_look(rounds: int) -> bool:
    """Whether it is asked after so many final rounds if the times are settled."""
    return rounds >= _SETTLED_AFTER and rounds % _LOOK_EVERY == 0


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


def varies_by_itself(ours_s: Sequence[float], theirs_s: Sequence[float]) -> float:
    """Return how far the times of a finalist vary, as a fraction, where sizes and the load of the device are equal.

    By its last rounds with another finalist, whose times vary as much.
    """
    both = min(len(ours_s), len(theirs_s))
    ratios = [ours / theirs for ours, theirs in zip(ours_s[:both], theirs_s[:both], strict=True)][-_RECENT:]
    if not ratios:
        return 0.0
    middle = median_s(ratios)
    return median_s(abs(ratio / middle - 1) for ratio in ratios)  # about the mean of one of the two
