"""Racing candidates: few samples for the many that cannot win, many for the few that might.

Samples are taken in rounds, every candidate once per round and in a new order each time, so that a machine that gets
slower, or a clock that ramps up, hits all alike. After some rounds those that are clearly behind leave; the margin is
wide at first, because one run can be three times its own median, and never narrower than the noise that is seen.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Sequence


class Stage(NamedTuple):
    """After this many samples each, those leave that are slower than `keep` times the best, or not among the first few.

    `share` is of all candidates, `few` the number that is always kept.
    """

    samples: int
    keep: float
    share: float = 1.0
    few: int = 1


# A candidate whose fastest of two runs is this many times slower than the best candidate's is not sampled further. All
# are single runs under the same clock, so like is compared with like. Two, and four times, because a disturbed run
# takes three times as long now and then.
HOPELESS: Final = 4.0
# Few samples for all, many for few: of 64 candidates 16 go on after three rounds, and two share the last hundred
# samples.
QUALIFYING: Final = (Stage(2, HOPELESS, few=10**6), Stage(3, 1.5, share=1 / 4, few=8))
STAGES: Final = (
    Stage(8, 1.25, share=1 / 8, few=6),
    Stage(18, 1.12, few=5),
    Stage(36, 1.06, few=3),
    Stage(60, 1.04, few=2),
)
# How long finalists may be sampled, if everything before took no longer.
LEAST_FINAL_S: Final = 0.5
# Beyond the last stage, rounds go on while candidates cannot be told apart; all samples together stay below this many
# per candidate.
SAMPLES_PER_CANDIDATE: Final = 9
# When the best candidate's time is known this well, more samples change nothing that matters.
SETTLED: Final = 0.002
# With fewer samples, agreement may be chance and no gap is clear.
ENOUGH: Final = 12
# A sample this much faster than every other one of its candidate is a slip of the clock until it happens again.
SUSPICIOUS: Final = 0.8


def typical_s(samples: Iterable[float]) -> float:
    """Return the time that a candidate takes when little disturbs it: the mean of its faster half.

    Noise on real devices makes runs slower and hardly ever faster, so the fast half tells candidates apart with fewer
    samples than medians need. Of three samples on a busy machine, the fastest picks within 1.07 x of the best, the mean
    of all within 1.61 x.

    >>> typical_s([1.0, 1.1, 3.0])
    1.0
    """
    ordered = sorted(samples)
    if len(ordered) >= 8 and ordered[0] < SUSPICIOUS * ordered[1]:
        ordered = ordered[1:]
    fastest = ordered[: max(1, len(ordered) // 2)]
    return math.fsum(fastest) / len(fastest)


def uncertainty(samples: Sequence[float]) -> float:
    """Return how far off `typical_s` may be, relative to it.

    It is what four parts of the samples, taken in turn, say differently; of fewer than eight samples, their spread.
    """
    typical = typical_s(samples)
    if len(samples) < 8:
        middle = sorted(samples)[len(samples) // 2]
        return (middle - typical) / typical
    parts = [typical_s(samples[i::4]) for i in range(4)]
    mean = math.fsum(parts) / 4
    spread = math.sqrt(math.fsum((part - mean) ** 2 for part in parts) / 3)
    return spread / 2 / typical


class Lane:
    """One candidate in the race. `take` runs it and returns seconds, or None if it failed."""

    __slots__ = ("_take", "name", "samples_s")

    def __init__(self, name: str, take: Callable[[], float | None]) -> None:
        self.name: Final = name
        self._take = take
        self.samples_s: list[float] = []

    @property
    def value_s(self) -> float:
        """The time that it is ranked by."""
        return typical_s(self.samples_s)

    def run_once(self) -> bool:
        """Take one more sample; False if the candidate failed."""
        seconds = self._take()
        # A NaN or a zero is no time, and a candidate whose clock stands still cannot be ranked.
        if seconds is None or not (math.isfinite(seconds) and seconds > 0):
            return False
        self.samples_s.append(seconds)
        return True


class Race:
    """Samples lanes until one has won, or those left cannot be told apart, or the time is up."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        rng: random.Random,
        clock_s: Callable[[], float],
        *,
        ends_s: float = math.inf,
        on_round: Callable[[float], None] = lambda _done: None,
    ) -> None:
        """`ends_s` is when the time is up, by the clock; it is looked at before every run.

        `on_round` is told after each round how much of the samples that a race may take have been taken, at most 1.
        """
        self._lanes = list(lanes)
        self._candidates = len(lanes)
        self._left = SAMPLES_PER_CANDIDATE * len(lanes)
        self._rng = rng
        self._clock_s = clock_s
        self._started_s = clock_s()
        self._ends_s = ends_s
        self._on_round = on_round

    @property
    def finalists(self) -> list[Lane]:
        """The lanes that are still in it."""
        return self._lanes

    def run(self, spent_s: float = 0.0) -> bool:
        """Race to the end; False if the time was up first. `spent_s` is what was spent before on the same candidates.

        Those who wait should not wait longer for the last percent than for everything before it.
        """
        if not self._stages(QUALIFYING):
            return False
        spent_s += self._clock_s() - self._started_s
        cut_s = self._clock_s() + max(spent_s, LEAST_FINAL_S)
        ends_s, self._ends_s = self._ends_s, min(self._ends_s, cut_s)
        finished = self._is_settled() or self._stages(STAGES)
        while finished and not self._is_settled() and self._left >= len(self._lanes):
            finished = self._round()
            self._drop(STAGES[-1])
        return finished or cut_s < ends_s

    def _stages(self, stages: Iterable[Stage]) -> bool:
        for stage in stages:
            if not self._rounds_until(stage.samples):
                return False
            self._drop(stage)
            if stage not in QUALIFYING and self._is_settled():
                break
        return True

    def _rounds_until(self, samples: int) -> bool:
        while any(len(lane.samples_s) < samples for lane in self._lanes):
            if not self._round(samples):
                return False
        return True

    def _round(self, up_to: int | None = None) -> bool:
        """Run every lane that has fewer than `up_to` samples once, in a new order; False if there was no time."""
        lanes = [lane for lane in self._lanes if up_to is None or len(lane.samples_s) < up_to]
        self._rng.shuffle(lanes)
        for lane in lanes:
            if self._clock_s() >= self._ends_s:
                return False
            self._left -= 1
            if not lane.run_once():
                self._lanes.remove(lane)
        self._on_round(1 - max(self._left, 0) / (SAMPLES_PER_CANDIDATE * self._candidates))
        return bool(self._lanes)

    def _drop(self, stage: Stage) -> None:
        self._lanes = [lane for lane in self._lanes if lane.samples_s]
        if not self._lanes:
            return
        best = min(self._lanes, key=lambda lane: lane.value_s)
        limit_s = best.value_s * max(stage.keep, 1 + 4 * uncertainty(best.samples_s))
        within = sorted((lane for lane in self._lanes if lane.value_s <= limit_s), key=lambda lane: lane.value_s)
        self._lanes = within[: max(stage.few, math.ceil(stage.share * self._candidates) if stage.share < 1 else 0)]

    def _is_settled(self) -> bool:
        if len(self._lanes) <= 1:
            return True
        best = min(self._lanes, key=lambda lane: lane.value_s)
        # Three samples can agree by chance; only a clock that shows no noise at all is believed at once.
        return uncertainty(best.samples_s) <= (SETTLED if len(best.samples_s) >= ENOUGH else 0.0)
