"""Racing candidates: few samples for the many that cannot win, many for the few that might.

Samples are taken in rounds, every candidate once per round and in a new order each time, so that a machine that gets
slower, or a clock that ramps up, hits all candidates alike. After some rounds the candidates that are clearly behind
leave. The margin is wide at first, because one run can be three times its own median, and never below the noise seen.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, TypeVar

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence


Objective: TypeAlias = "Callable[[Sequence[float]], float]"
# Called after the share of each candidate in a long computation: a thread beside a program lets the program go on.
Pause: TypeAlias = "Callable[[], object]"


def no_pause() -> None:
    """Go on at once."""


class RaceStage(NamedTuple):
    """After `samples` samples each, candidates slower than `keep` times the best leave, and all but the first `few`."""

    samples: int
    keep: float  # the margin is never below the noise
    few: int = 10**6
    least_s: float = 0.0  # candidates that are faster than this stay

    def room(self, candidates: int) -> int:
        """Return how many stay: `few` of up to 64 candidates at the start, more of more by the square root."""
        return math.ceil(self.few * math.sqrt(max(candidates / 64, 1)))


# A candidate whose fastest run of the first few is this many times slower than the best candidate's is not sampled
# further. All are single runs under the same clock. Four times, because a disturbed run takes three times as long now
# and then.
HOPELESS: Final = 4.0
# The same for a candidate that ran once, which may have loaded or compiled something. In a race the faster of the first
# run and one sample counts: beside candidates of 60 us, a second sample of 3 s tells nothing new.
HOPELESS_AT_ONCE: Final = 10.0
# Only candidates that take so long leave then: a busy machine may stall two runs of 60 us, but hardly both for so long.
_LONG_S: Final = 0.05
QUALIFYING: Final = (
    RaceStage(1, HOPELESS_AT_ONCE, least_s=_LONG_S),
    RaceStage(2, HOPELESS),
    RaceStage(3, 1.5, few=16),
)
# Few samples for all, many for few: of 64 candidates two share the last hundred samples. The numbers were searched for
# on synthetic landscapes with 10 % noise, where 0.5 % of the tunings miss the best. Steps twice as long miss it 1.5
# times as often, and so does giving samples by the gaps seen so far (OCBA), which are noise at first; a duel of the two
# best at each moment misses it three times as often. Rounds of the three best miss it in 0.3 %, but with times that
# lean on the very fastest runs, which scatter by a fifth more in recordings of GPUs, and with samples that are no
# longer taken in turn. The margins are wider than this noise needs: on real devices noise comes in waves, and after
# eight samples two candidates may stand 4 % apart the wrong way round.
STAGES: Final = (
    RaceStage(5, 1.4, few=12),
    RaceStage(8, 1.25, few=9),
    RaceStage(12, 1.16, few=7),
    RaceStage(16, 1.12, few=6),
    RaceStage(24, 1.08, few=5),
    RaceStage(32, 1.06, few=4),
    RaceStage(48, 1.04, few=3),
    RaceStage(64, 1.03, few=2),
)
# Candidates further behind than this many standard errors leave: 3.5 standard errors of a difference.
BEHIND: Final = 5.0
# How long finalists may be sampled, if everything before took no longer.
LEAST_FINAL_S: Final = 0.5
# A race takes at most this many samples per candidate, or the second number if there are few candidates.
SAMPLES_PER_CANDIDATE: Final = 9
LEAST_SAMPLES: Final = 200
# It takes up to ten times as many if they take less time than this, which nobody notices. With two kernels of 2 us that
# are alike, on a busy machine, 200 samples leave one race in ten undecided.
SHORT_RACE_S: Final = 0.02
# No candidate leaves before all together took so many samples, or the samples so much time: few candidates would be
# judged within a moment. A busy machine slows runs by 1.7 times and more, several in a row, and these may be all three
# samples of one candidate.
SOONEST: Final = 64
SOONEST_S: Final = 0.05
# When times are known this well, more samples change nothing that matters.
SETTLED: Final = 0.002
# With fewer samples agreement may be chance, and an objective like a 95th percentile says nothing yet.
ENOUGH: Final = 12
# With fewer, of five candidates that are alike, one seems to be 0.5 % slower than the rest in one race of 40.
SETTLED_AFTER: Final = 24
# With fewer samples, the fastest run stands for the candidate, and parts of the samples say nothing about the error:
# every tenth run may take three times as long, and in one race of two thousand four of five runs do.
_FEW: Final = 8
# A sample this much faster than all others of its candidate counts as a slip of the clock until it happens again.
SUSPICIOUS: Final = 0.8
# How many runs before and after a run tell the speed of the device at that moment. On recorded GPUs, a level of the
# clock lasts for 5 to 15 runs.
NEAR: Final = 3
# Neighbours in time are alike by so many standard deviations more than by chance. It is chance in one race of 700.
WAVES: Final = 3.0
# How much more certain a comparison with neighbours must be: with less of a difference, noise picks the method.
CLEARLY: Final = 0.7


def typical_s(samples: Iterable[float]) -> float:
    """Return the time of a candidate when little disturbs it: a mean of its faster half, weighted to the fast samples.

    Noise on real devices makes runs slower and hardly ever faster, so fast samples tell candidates apart sooner than
    medians do. With log-normal noise and spikes, weights that fall off by the square from the fastest to the median
    need 4.2 times fewer samples than the median, and 1.4 times fewer than a plain mean of that half; on kernels in C
    they pick as well or better. Of three samples on a busy machine, the fastest picks within 1.07 x of the best, the
    mean of all within 1.61 x.

    >>> typical_s([1.0, 1.1, 3.0])
    1.0
    """
    ordered = sorted(samples)
    if len(ordered) < _FEW:
        return ordered[0]
    if ordered[0] < SUSPICIOUS * ordered[1]:
        ordered = ordered[1:]
    count = len(ordered)
    # The i-th of n samples stands for the quantile (i + 1/2) / n.
    weights = [(count - 2 * i - 1) ** 2 for i in range(count // 2)]
    return math.fsum(map(operator.mul, weights, ordered)) / sum(weights)


def is_time(seconds: float) -> bool:
    """Whether a time can be ranked: a NaN or a zero cannot."""
    return math.isfinite(seconds) and seconds > 0


def median_s(samples: Iterable[float]) -> float:
    """Return the middle sample, or the mean of the two in the middle.

    `statistics` has this too, for a tenth of the time of `import tunebook`.

    >>> median_s([3.0, 1.0, 2.0]), median_s([1.0, 2.0])
    (2.0, 1.5)
    """
    ordered = sorted(samples)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


# 1.2533 standard deviations are the error of a median; the median deviation of a normal distribution is at 0.6745.
OF_MEDIAN: Final = 1.2533 / 0.6745


def standard_error(values: Sequence[float], factor: float) -> float:
    """Return `factor` times the median deviation, relative to the median, over the root of the count."""
    middle = median_s(values)
    return factor * median_s(abs(value - middle) for value in values) / middle / math.sqrt(len(values))


def uncertainty(samples: Sequence[float], objective: Objective = typical_s) -> float:
    """Return the standard error of a time, relative to it, from the spread over parts of the samples, taken in turn."""
    if len(samples) < _FEW:  # the distance from the middle sample to the fast samples
        typical = typical_s(samples)
        return (sorted(samples)[len(samples) // 2] - typical) / typical
    count = min(max(len(samples) // _FEW, 4), 16)
    parts = [objective(samples[i::count]) for i in range(count)]
    mean = math.fsum(parts) / count
    spread = math.sqrt(math.fsum((part - mean) ** 2 for part in parts) / (count - 1))
    return spread / math.sqrt(count) / abs(mean) if mean else math.inf


def pooled_uncertainty(
    lanes: Iterable[Sequence[float]], objective: Objective = typical_s, pause: Pause = no_pause
) -> float:
    """Return the standard error of times, from the samples of several candidates: one alone tells too little."""
    squares = [_after(pause, uncertainty(samples, objective)) ** 2 for samples in lanes]
    return math.sqrt(math.fsum(squares) / len(squares))


class Paired(NamedTuple):
    """The times of candidates, relative to each other only, and their standard error."""

    times: Mapping[Hashable, float]
    error: float


def paired(runs: Sequence[tuple[Hashable, float]], names: Sequence[Hashable], pause: Pause = no_pause) -> Paired | None:
    """Compare candidates by each run's time relative to its neighbours in time; return None if that is less certain.

    `runs` has the runs of all candidates, by name, in the order in which they were taken. When a device changes its
    clock for a stretch of runs, a sample depends on the moment more than on the candidate, but its neighbours change
    alike. With ordinary noise this needs two to three times the samples, because neighbours have noise of their own.

    On a simulated device with the clock levels of an A4000 (0.80 to 1.03), 0 instead of 22 of 2000 tunings miss the
    best if runs vary by 0.1 % otherwise; 7 instead of 45 at 1 %, and 56 instead of 88 at 5 %.
    """
    places: dict[Hashable, list[int]] = {}
    for place, (name, _) in enumerate(runs):
        places.setdefault(name, []).append(place)
    samples = {name: [runs[place][1] for place in own] for name, own in places.items()}
    times = {name: _lower(own) for name, own in samples.items()}
    if len(names) < 2 or any(name not in times for name in names) or not _in_waves(runs, times, pause):
        return None
    pause()
    slowness = [(name, seconds / times[name]) for name, seconds in runs]
    besides: dict[Hashable, list[float]] = {}
    # One candidate after the other, relative to the estimates of the others so far; twice, as the first ones are rough.
    for name, own in (*places.items(), *places.items()):
        beside = [runs[place][1] / pace for place in own if (pace := _pace(slowness, place))] or samples[name]
        besides[name], times[name] = beside, _lower(beside)
        for place in own:
            slowness[place] = name, runs[place][1] / times[name]
        pause()
    # Medians: with few samples, a candidate that was disturbed twice in a row looks far too uncertain. The error is of
    # the value a third of the way up: 1.30 standard deviations of a normal distribution, which has its median deviation
    # at 0.6745.
    error = median_s(standard_error(besides[name], 1.30 / 0.6745) for name in names)
    pause()
    by_samples = median_s(_after(pause, uncertainty(samples[name])) for name in names)
    # Below SETTLED the pairing stays though samples agree better: one candidate's may all miss the fastest clock.
    return Paired(times, error) if error < max(CLEARLY * by_samples, SETTLED) else None


def _after(pause: Pause, value: float) -> float:
    pause()
    return value


def _in_waves(runs: Sequence[tuple[Hashable, float]], times: Mapping[Hashable, float], pause: Pause) -> bool:
    """Whether neighbours in time are slow together, or fast, more than by chance: Bartels' test, of ranks."""
    count = len(runs)
    pause()
    relative = [seconds / times[name] for name, seconds in runs]
    ordered = sorted(range(count), key=relative.__getitem__)
    pause()
    rank = {place: position for position, place in enumerate(ordered)}
    steps = sum((rank[place + 1] - rank[place]) ** 2 for place in range(count - 1))
    by_chance = count * (count**2 - 1) / 6  # with a standard deviation that is smaller by the square root of the count
    return steps < by_chance * (1 - WAVES / math.sqrt(count))


def _pace(slowness: Sequence[tuple[Hashable, float]], place: int) -> float | None:
    """Return how slow the other candidates were around a run, as a factor; None if no other ran."""
    own = slowness[place][0]
    near = [factor for name, factor in slowness[max(place - NEAR, 0) : place + NEAR + 1] if name != own]
    return _lower(near) if near else None


def _lower(values: Iterable[float]) -> float:
    """Return the value a third of the way up: with every tenth run disturbed, one in 200 races has 4 of 8 disturbed."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 3]


class Lane:
    """One candidate in the race. `take` runs it and returns seconds, or None if it failed.

    `first_s` is the time of its very first run, if it is known. That run may have compiled something, so it is not a
    sample; but if it was fast, the candidate is not slow. A lane that `wins_ties` leaves only if it is slower than the
    best: among many that are alike, noise ranks it.
    """

    __slots__ = ("_take", "first_s", "name", "samples_s", "wins_ties")

    def __init__(
        self, name: str, take: Callable[[], float | None], first_s: float = math.inf, *, wins_ties: bool = False
    ) -> None:
        self.name, self._take, self.first_s, self.wins_ties = name, take, first_s, wins_ties
        self.samples_s: list[float] = []

    def copy(self) -> Lane:
        """Return a lane with the samples so far."""
        other = Lane(self.name, self._take, self.first_s, wins_ties=self.wins_ties)
        other.samples_s = list(self.samples_s)
        return other

    @property
    def value_s(self) -> float:
        """Its typical time so far."""
        return typical_s(self.samples_s)

    def run_once(self) -> bool:
        """Take one more sample; False if the candidate failed."""
        seconds = self._take()
        if seconds is None or not is_time(seconds):
            return False
        self.samples_s.append(seconds)
        return True


L = TypeVar("L", bound=Lane)


def survivors(
    lanes: Iterable[L],
    stage: RaceStage,
    candidates: int,
    objective: Objective = typical_s,
    times: Mapping[Hashable, float] | None = None,
    pause: Pause = no_pause,
) -> list[L]:
    """Return the lanes that stay in the race after a stage, fastest first; `candidates` is their number at its start.

    `times`, by name, rank the lanes in place of the objective over their samples.
    """
    running = [lane for lane in lanes if lane.samples_s]
    if not running:
        return []
    value = {lane: _value(lane, objective) if times is None else times[lane.name] for lane in running}
    # While samples are few, a spike would make the noise look huge, and a slip of the clock throw all others out: then
    # the best time is one that its lane has reached twice.
    few = {lane: sorted((*lane.samples_s, lane.first_s)) for lane in running if len(lane.samples_s) < _FEW}
    best = min(max(value[lane], few[lane][1]) if lane in few else value[lane] for lane in running)
    noise = 0.0 if few else pooled_uncertainty((lane.samples_s for lane in running), objective, pause)
    limit = max(best + abs(best) * max(stage.keep - 1, BEHIND * noise), stage.least_s)
    close = sorted((lane for lane in running if value[lane] <= limit), key=value.__getitem__)
    room = stage.room(candidates)
    return close[:room] + [lane for lane in close[room:] if lane.wins_ties]


def _value(lane: Lane, objective: Objective) -> float:
    """Return the value that ranks a lane."""
    samples = lane.samples_s
    if len(samples) < _FEW:
        return min(*samples, lane.first_s)
    return objective(samples) if len(samples) >= ENOUGH else typical_s(samples)


def is_settled(lanes: Sequence[Lane], objective: Objective = typical_s) -> bool:
    """Whether more samples would change nothing that matters."""
    if len(lanes) <= 1:
        return True
    error = pooled_uncertainty((lane.samples_s for lane in lanes), objective)
    # Three samples can agree by chance; only a clock that shows no noise at all is believed at once.
    return error <= (SETTLED if min(len(lane.samples_s) for lane in lanes) >= SETTLED_AFTER else 0.0)


class Race:
    """Samples lanes until one has won, or the rest cannot be told apart, or the time is up.

    `ends_s` is the end of the race by the clock, checked before every run. `on_round` gets, after each round, the
    fraction of the allowed samples taken so far. A lane that `is_good` wins at once. `renew` may discard the samples of
    some lanes, until qualifying ends, and says whether it did. `finalists` are still in the race.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        rng: random.Random,
        clock_s: Callable[[], float],
        *,
        ends_s: float = math.inf,
        on_round: Callable[[float], None] = lambda _done: None,
        is_good: Callable[[Lane], bool] = lambda _lane: False,
        renew: Callable[[Sequence[Lane]], bool] = lambda _lanes: False,
        objective: Objective = typical_s,
    ) -> None:
        self.finalists, self._candidates = list(lanes), len(lanes)
        self._most = self._left = max(SAMPLES_PER_CANDIDATE * len(lanes), LEAST_SAMPLES)
        self._rng, self._objective, self._on_round, self._is_good, self._renew = (
            rng,
            objective,
            on_round,
            is_good,
            renew,
        )
        self._clock_s, self._started_s, self._ends_s = clock_s, clock_s(), ends_s
        self._pace_s = math.inf  # of a sample, in the fastest round so far
        self._lasted_s = 0.0
        self._runs: list[tuple[str, float]] = []

    def run(self, spent_s: float = 0.0) -> bool:
        """Race to the end; return False if the time was up first. `spent_s` is the time spent on trying candidates."""
        if not self.qualify():
            return False
        # The last percent must not take the caller longer than everything before it.
        spent_s += self._clock_s() - self._started_s
        cut_s = self._clock_s() + max(spent_s, LEAST_FINAL_S)
        ends_s, self._ends_s = self._ends_s, min(self._ends_s, cut_s)
        for stage in _stages():
            settled = self._has_good_one() or is_settled(self.finalists, self._objective)
            if settled or not self._may_take(len(self.finalists)):
                break
            if not self._reach(stage):
                return cut_s < ends_s
        return True

    def qualify(self) -> bool:
        """Take the first samples only, which drops the lanes that are clearly behind; returns as `run` does."""
        return self._has_good_one() or all(self._reach(stage) for stage in QUALIFYING)

    def _reach(self, stage: RaceStage) -> bool:
        """Take rounds until a stage, or until no samples are left; return False if the time was up first."""
        while lanes := self._short_of(stage):
            # A round is taken whole or not at all: times from different numbers of samples do not compare.
            if not self._may_take(len(lanes)):
                break
            self._rng.shuffle(lanes)
            began_s = self._clock_s()
            for lane in lanes:
                if self._clock_s() >= self._ends_s:
                    return False
                self._left -= 1
                if lane.run_once():
                    self._runs.append((lane.name, lane.samples_s[-1]))
                else:
                    self.finalists.remove(lane)
            self._pace_s = min(self._pace_s, (self._clock_s() - began_s) / len(lanes))
            # Not the time of the round: other processes may have had the CPU for a part of it.
            self._lasted_s += len(lanes) * self._pace_s
            self._on_round(min(1 - self._left / self._most, 1.0))
        found = None
        # Another objective, like a percentile, may ask about just the changes that move all lanes alike.
        if self._objective is typical_s and all(len(lane.samples_s) >= _FEW for lane in self.finalists):
            found = paired(self._runs, [lane.name for lane in self.finalists])
        times = None if found is None else found.times
        self.finalists = survivors(self.finalists, stage, self._candidates, self._objective, times)
        return True

    def _may_take(self, samples: int) -> bool:
        """Whether the race may take so many more samples."""
        return self._left >= samples or (self._left > -9 * self._most and self._lasted_s < SHORT_RACE_S)

    def _short_of(self, stage: RaceStage) -> list[Lane]:
        """Return the lanes that have too few samples for a stage."""
        if stage in QUALIFYING and self._renew(self.finalists):
            self._runs.clear()
            self._left, self._pace_s, self._lasted_s = self._most, math.inf, 0.0  # they were short, and are gone
        taken = self._most - self._left
        # At the pace of the fastest: rounds that one slow candidate makes long tell no more about the others.
        soon = taken < SOONEST and not (taken and taken * self._pace_s >= SOONEST_S)
        all_of_them = soon and len(self.finalists) > 1  # a lane alone is judged against none
        return [lane for lane in self.finalists if all_of_them or len(lane.samples_s) < stage.samples]

    def _has_good_one(self) -> bool:
        """Leave only the best lane in the race if one is good enough."""
        good = [lane for lane in self.finalists if self._is_good(lane)]
        if good:
            self.finalists = [min(good, key=lambda lane: lane.value_s)]
        return bool(good)


def _stages() -> Iterator[RaceStage]:
    yield from STAGES
    samples = STAGES[-1].samples
    while True:
        samples += samples // 4
        yield STAGES[-1]._replace(samples=samples)
