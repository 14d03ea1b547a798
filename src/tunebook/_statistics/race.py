"""Racing candidates: few samples for the many that cannot win, many for the few that might.

Samples are taken in rounds, every candidate once per round and in a new order each time, so that a machine that gets
slower, or a clock that ramps up, hits all alike. After some rounds those that are clearly behind leave; the margin is
wide at first, because one run can be three times its own median, and never narrower than the noise that is seen.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

Objective: TypeAlias = "Callable[[Sequence[float]], float]"


class RaceStage(NamedTuple):
    """After this many samples each, those leave that are slower than `keep` times the best, or not among the first few.

    `few` is of up to 64 candidates; of more of them more stay, by the square root. The margin is never below the noise.
    """

    samples: int
    keep: float
    few: int = 10**6

    def room(self, candidates: int) -> int:
        """Return how many stay at most, of so many candidates at the start."""
        return math.ceil(self.few * math.sqrt(max(candidates / 64, 1)))


# A candidate whose fastest run of the first few is this many times slower than the best candidate's is not sampled
# further. All are single runs under the same clock, so like is compared with like. Four times, because a disturbed run
# takes three times as long now and then.
HOPELESS: Final = 4.0
QUALIFYING: Final = (RaceStage(2, HOPELESS), RaceStage(3, 1.5, few=16))
# Few samples for all, many for few: of 64 candidates two share the last hundred samples. How many stay was searched
# for on made-up landscapes with 10 % noise, where 0.5 % of the tunings end with another than the best. Steps twice as
# long make that 1.5 times as many, and so does giving samples by the gaps that are seen (OCBA), which are noise at
# first; a duel of the two best at each moment makes it three times as many. Rounds of the three that may still be the
# best make it 0.3 %, but with times that lean on the very fastest runs, which scatter by a fifth more in what was
# recorded on GPUs, and with samples that are no longer taken in turn. The margins are wider than such noise needs: on
# real devices it comes in waves, and after eight samples two may stand 4 % apart the wrong way round.
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
# Who is further behind than this many standard errors of one time leaves: 3.5 of those of a difference.
BEHIND: Final = 5.0
# How long finalists may be sampled, if everything before took no longer.
LEAST_FINAL_S: Final = 0.5
# All samples of a race together are at most this many per candidate, and of a few candidates at most so many.
SAMPLES_PER_CANDIDATE: Final = 9
LEAST_SAMPLES: Final = 200
# When times are known this well, more samples change nothing that matters.
SETTLED: Final = 0.002
# With fewer samples agreement may be chance, and an objective such as a 95th percentile says nothing yet.
ENOUGH: Final = 12
# With fewer samples, a time is that of the fastest run, and how far off it may be is not asked of parts of them: every
# tenth run may take three times as long, and of five runs four of them in one race of two thousand.
_FEW: Final = 8
# A sample this much faster than every other one of its candidate is a slip of the clock until it happens again.
SUSPICIOUS: Final = 0.8
# How many runs before and after one tell how fast the device was then. On recorded GPUs, a level of the clock lasts for
# 5 to 15 runs.
NEAR: Final = 3
# Neighbours in time are alike by so many standard deviations more than by chance. It is chance in one race of 700.
WAVES: Final = 3.0
# How much more certain a comparison with neighbours must be: what is nearly as certain is chosen by noise.
CLEARLY: Final = 0.7


def typical_s(samples: Iterable[float]) -> float:
    """Return the time that a candidate takes when little disturbs it: a mean of its faster half, weighted to the fast.

    Noise on real devices makes runs slower and hardly ever faster, so the fast ones tell candidates apart with fewer
    samples than medians need. With log-normal noise and spikes, weights that fall off by the square from the fastest to
    the median need 4.2 times fewer than the median, and 1.4 times fewer than a plain mean of that half; on kernels in C
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


def uncertainty(samples: Sequence[float], objective: Objective = typical_s) -> float:
    """Return how far off a time may be, relative to it: its standard error.

    It is seen from what parts of the samples, taken in turn, say differently; of fewer than eight samples, it is how
    far the middle one is from the fast ones.
    """
    if len(samples) < _FEW:
        typical = typical_s(samples)
        return (sorted(samples)[len(samples) // 2] - typical) / typical
    count = min(max(len(samples) // _FEW, 4), 16)
    parts = [objective(samples[i::count]) for i in range(count)]
    mean = math.fsum(parts) / count
    spread = math.sqrt(math.fsum((part - mean) ** 2 for part in parts) / (count - 1))
    return spread / math.sqrt(count) / abs(mean) if mean else math.inf


def pooled_uncertainty(lanes: Iterable[Sequence[float]], objective: Objective = typical_s) -> float:
    """Return how far off times may be, from the samples of several: of one alone it is known too badly."""
    squares = [uncertainty(samples, objective) ** 2 for samples in lanes]
    return math.sqrt(math.fsum(squares) / len(squares))


class Paired(NamedTuple):
    """The times of candidates, relative to each other only, and how far off they may be."""

    times: Mapping[Hashable, float]
    error: float


def paired(runs: Sequence[tuple[Hashable, float]], names: Sequence[Hashable]) -> Paired | None:
    """Compare some candidates by what each run took beside its neighbours in time, or return None if that is no better.

    `runs` are those of all candidates, by name, in the order in which they were taken. When a device changes its clock
    for a stretch of runs, samples say when a candidate ran rather than how fast it is, and its neighbours changed
    alike. With noise of the usual kind this needs two to three times the samples: neighbours have noise of their own.

    On a pretend device with the clock levels of an A4000 (0.80 to 1.03), none of 2000 tunings ends with another than
    the best instead of 22, if runs vary by 0.1 % otherwise; 7 instead of 45 if by 1 %, and 56 instead of 88 if by 5 %.
    """
    places: dict[Hashable, list[int]] = {}
    for place, (name, _) in enumerate(runs):
        places.setdefault(name, []).append(place)
    samples = {name: [runs[place][1] for place in own] for name, own in places.items()}
    times = {name: _lower(own) for name, own in samples.items()}
    if len(names) < 2 or any(name not in times for name in names) or not _in_waves(runs, times):
        return None
    errors: dict[Hashable, float] = {}
    # One candidate after the other, each beside what is known of the others by then; twice, as at first that is little.
    for name, own in (*places.items(), *places.items()):
        beside = [runs[place][1] / pace for place in own if (pace := _pace(runs, place, times))] or samples[name]
        times[name] = _lower(beside)
        errors[name] = _standard_error(beside)
    # The middle ones: with few samples, a candidate that was disturbed twice in a row looks far too uncertain.
    error = _middle(errors[name] for name in names)
    by_samples = _middle(uncertainty(samples[name]) for name in names)
    # What is known so well is not given up for samples that agree: those of one may all miss the fastest clock.
    return Paired(times, error) if error < max(CLEARLY * by_samples, SETTLED) else None


def _in_waves(runs: Sequence[tuple[Hashable, float]], times: Mapping[Hashable, float]) -> bool:
    """Whether neighbours in time are slow together, or fast, more than by chance: Bartels' test, of ranks."""
    count = len(runs)
    ordered = sorted(range(count), key=lambda place: runs[place][1] / times[runs[place][0]])
    rank = {place: position for position, place in enumerate(ordered)}
    steps = sum((rank[place + 1] - rank[place]) ** 2 for place in range(count - 1))
    by_chance = count * (count**2 - 1) / 6  # with a standard deviation that is smaller by the square root of the count
    return steps < by_chance * (1 - WAVES / math.sqrt(count))


def _pace(runs: Sequence[tuple[Hashable, float]], place: int, times: Mapping[Hashable, float]) -> float | None:
    """Return how slow everything else was around a run, as a factor; None if nothing else ran."""
    own = runs[place][0]
    near = [seconds / times[name] for name, seconds in runs[max(place - NEAR, 0) : place + NEAR + 1] if name != own]
    return _lower(near) if near else None


def _lower(values: Iterable[float]) -> float:
    """Return the value a third of the way up: with every tenth run disturbed, half of eight are in one race of 200."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 3]


def _middle(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _standard_error(values: Sequence[float]) -> float:
    """Return that of the value a third of the way up, relative to it, from the median deviation.

    With a normal distribution these are 1.30 and 0.6745 standard deviations, the first over the root of the count.
    """
    middle = _middle(values)
    return 1.30 / 0.6745 * _middle(abs(value - middle) for value in values) / middle / math.sqrt(len(values))


class Lane:
    """One candidate in the race. `take` runs it and returns seconds, or None if it failed.

    `first_s` is what its very first run took, if it is known: no sample, since it may have compiled something, but if
    even that was fast, the candidate is not slow.
    """

    __slots__ = ("_take", "first_s", "name", "samples_s")

    def __init__(self, name: str, take: Callable[[], float | None], first_s: float = math.inf) -> None:
        self.name: Final = name
        self._take = take
        self.first_s: Final = first_s
        self.samples_s: list[float] = []

    @property
    def value_s(self) -> float:
        """Its typical time so far."""
        return typical_s(self.samples_s)

    def run_once(self) -> bool:
        """Take one more sample; False if the candidate failed."""
        seconds = self._take()
        # A NaN or a zero is no time, and a candidate whose clock stands still cannot be ranked.
        if seconds is None or not (math.isfinite(seconds) and seconds > 0):
            return False
        self.samples_s.append(seconds)
        return True


class Sampled(Protocol):
    """What the rules of the race look at in a candidate."""

    samples_s: list[float]

    @property
    def first_s(self) -> float:
        """What its very first run took; infinite if that is not known."""


S = TypeVar("S", bound=Sampled)


def survivors(
    lanes: Iterable[S],
    stage: RaceStage,
    candidates: int,
    objective: Objective = typical_s,
    value_of: Callable[[S], float] | None = None,
) -> list[S]:
    """Return who stays in the race after a stage, fastest first; `candidates` is how many there were at its start.

    `value_of` is what lanes are ranked by, if it is not what the objective says of their samples.
    """
    value_of = value_of or (lambda lane: _value(lane, objective))
    valued = [(value_of(lane), lane) for lane in lanes if lane.samples_s]
    if not valued:
        return []
    best = min(_confirmed(lane, value) for value, lane in valued)
    limit = best + abs(best) * max(stage.keep - 1, BEHIND * _noise([lane.samples_s for _, lane in valued], objective))
    within = sorted((pair for pair in valued if pair[0] <= limit), key=lambda pair: pair[0])
    return [lane for _, lane in within[: stage.room(candidates)]]


def _noise(lanes: Sequence[Sequence[float]], objective: Objective) -> float:
    """Return how far off times may be; nothing as long as a spike among a few samples would make it look huge."""
    return 0.0 if min(map(len, lanes)) < _FEW else pooled_uncertainty(lanes, objective)


def _value(lane: Sampled, objective: Objective) -> float:
    """Return what a lane is ranked by."""
    samples = lane.samples_s
    if len(samples) < _FEW:
        return min(*samples, lane.first_s)
    return objective(samples) if len(samples) >= ENOUGH else typical_s(samples)


def _confirmed(lane: Sampled, value: float) -> float:
    """Return a time that a lane has reached twice: one slip of the clock must not throw all others out."""
    samples = lane.samples_s
    return value if len(samples) >= _FEW else max(value, sorted((*samples, lane.first_s))[1])


def is_settled(lanes: Sequence[Sampled], objective: Objective = typical_s) -> bool:
    """Whether more samples would change nothing that matters."""
    if len(lanes) <= 1:
        return True
    error = pooled_uncertainty((lane.samples_s for lane in lanes), objective)
    # Three samples can agree by chance; only a clock that shows no noise at all is believed at once.
    return error <= (SETTLED if min(len(lane.samples_s) for lane in lanes) >= ENOUGH else 0.0)


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
        is_good: Callable[[Lane], bool] = lambda _lane: False,
        objective: Objective = typical_s,
    ) -> None:
        """`is_good` says that a lane cannot be beaten by much: then it has won.

        `ends_s` is when the time is up, by the clock; it is looked at before every run.

        `on_round` is told after each round how much of the samples that a race may take have been taken, at most 1.

        `objective` ranks lanes by their samples, once there are enough of them for it to mean something.
        """
        self._lanes = list(lanes)
        self._candidates = len(lanes)
        self._most = self._left = max(SAMPLES_PER_CANDIDATE * len(lanes), LEAST_SAMPLES)
        self._objective = objective
        self._rng = rng
        self._clock_s = clock_s
        self._started_s = clock_s()
        self._ends_s = ends_s
        self._on_round = on_round
        self._is_good = is_good
        self._runs: list[tuple[str, float]] = []

    @property
    def finalists(self) -> list[Lane]:
        """The lanes that are still in it."""
        return self._lanes

    def run(self, spent_s: float = 0.0) -> bool:
        """Race to the end; False if the time was up first. `spent_s` is what was spent before on the same candidates.

        Those who wait should not wait longer for the last percent than for everything before it.
        """
        if self._has_good_one():
            return True
        if not all(self._reach(stage) for stage in QUALIFYING):
            return False
        spent_s += self._clock_s() - self._started_s
        cut_s = self._clock_s() + max(spent_s, LEAST_FINAL_S)
        ends_s, self._ends_s = self._ends_s, min(self._ends_s, cut_s)
        for stage in _stages():
            if self._is_settled() or self._left < len(self._lanes):
                break
            if not self._reach(stage):
                return cut_s < ends_s
        return True

    def qualify(self) -> bool:
        """Take the first samples only, after which those that are clearly behind have left; False as for `run`."""
        return self._has_good_one() or all(self._reach(stage) for stage in QUALIFYING)

    def _reach(self, stage: RaceStage) -> bool:
        """Take rounds until a stage, or until no samples are left; False if the time was up first."""
        while lanes := [lane for lane in self._lanes if len(lane.samples_s) < stage.samples]:
            # A round is taken whole or not at all: times from different numbers of samples are not alike.
            if self._left < len(lanes):
                break
            if not self._round(lanes):
                return False
        self._lanes = survivors(self._lanes, stage, self._candidates, self._objective, self._paired())
        return True

    def _paired(self) -> Callable[[Lane], float] | None:
        """Return how lanes are ranked by their runs beside those of others, if that is better than by their samples."""
        # Another objective may ask for just what moves all alike.
        if self._objective is not typical_s or min((len(lane.samples_s) for lane in self._lanes), default=0) < _FEW:
            return None
        found = paired(self._runs, [lane.name for lane in self._lanes])
        return None if found is None else lambda lane: found.times[lane.name]

    def _round(self, lanes: list[Lane]) -> bool:
        """Run each lane once, in a new order; False if there was no time."""
        self._rng.shuffle(lanes)
        for lane in lanes:
            if self._clock_s() >= self._ends_s:
                return False
            self._left -= 1
            if lane.run_once():
                self._runs.append((lane.name, lane.samples_s[-1]))
            else:
                self._lanes.remove(lane)
        self._on_round(1 - self._left / self._most)
        return True

    def _has_good_one(self) -> bool:
        """Leave a lane that is good enough alone in the race, if there is one."""
        good = [lane for lane in self._lanes if self._is_good(lane)]
        if good:
            self._lanes = [min(good, key=lambda lane: lane.value_s)]
        return bool(good)

    def _is_settled(self) -> bool:
        return self._has_good_one() or is_settled(self._lanes, self._objective)


def _stages() -> Iterator[RaceStage]:
    yield from STAGES
    samples = STAGES[-1].samples
    while True:
        samples += samples // 4
        yield STAGES[-1]._replace(samples=samples)
