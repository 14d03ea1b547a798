"""Kernels that take less time than reading the clock: if candidates are alike, the heuristic's configuration wins."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from itertools import count

import pytest
from kernels import job_of

import tunebook as tb
from tunebook._base.vocabulary import Measurement
from tunebook._measure.stopwatch import LONGEST_BATCH_S, SHORTEST_SAMPLE_S, Batches, Stopwatch, Trial
from tunebook._statistics.decide import PLACEMENT_S, TICKS_S, decide
from tunebook._statistics.race import SOONEST, Lane, Race
from tunebook._tuning.job import Part


class CostlyClock:
    """A pretend clock: a sample takes `overhead_s` longer than its runs, and the first runs of a kernel are cold.

    The kernel that ran before all others has the coldest first sample.
    """

    def __init__(self, costs, overhead_s, seed=0):
        self.costs, self.overhead_s, self.now_s = costs, overhead_s, 0.0
        self.runs, self._random = Counter(), random.Random(f"{overhead_s} {seed}")

    def ns(self):
        self.now_s += self.overhead_s  # two readings are one overhead apart
        return round(self.now_s * 1e9)

    def make_fn(self, config):
        def run():
            self.runs[config] += 1
            own = self.runs[config]
            cold = 1 + (20 if config == next(iter(self.runs)) else 9) / own**4
            noise = 0.01 * self._random.lognormvariate(0.0, 0.6)
            spike = 3 if self._random.random() < 0.05 else 1
            self.now_s += self.costs[config] * (1 + noise) * cold * spike

        return run

    def tune(self, **options):
        tuner = tb.Tuner(stopwatch=Stopwatch(clock_ns=self.ns), clock_s=lambda: self.now_s, probes=lambda _: ())
        return tuner.tune(job_of(self.make_fn, list(self.costs), **options))


@pytest.mark.promise("heuristic-wins-ties")
@pytest.mark.parametrize("overhead_s", [50e-9, 500e-9, 5e-6, 20e-6])
@pytest.mark.parametrize("candidates", [2, 5])
def test_the_heuristic_wins_over_candidates_that_are_alike(overhead_s, candidates):
    lengths_s, kept = random.Random(overhead_s), 0
    for seed in range(80):
        length_s = 10 ** lengths_s.uniform(-6.7, -2)  # 0.2 us to 10 ms
        clock = CostlyClock(dict.fromkeys(range(candidates), length_s), overhead_s, seed)
        kept += clock.tune(heuristic=seed % candidates).config == seed % candidates
    assert kept >= 79


@pytest.mark.parametrize("length_s", [0.2e-6, 2e-6, 30e-6])
@pytest.mark.parametrize("overhead_s", [50e-9, 500e-9, 5e-6])
def test_a_tenth_more_speed_beats_the_heuristic_whatever_the_overhead(length_s, overhead_s):
    for seed in range(5):
        clock = CostlyClock({"guess": 1.2 * length_s, "best": length_s, "slow": 40 * length_s}, overhead_s, seed)
        assert clock.tune(heuristic="guess").config == "best"


def test_a_candidate_that_is_a_thousand_times_slower_is_not_timed_in_batches():
    clock = CostlyClock({"short": 1e-6, "long": 1e-3}, 50e-9)
    assert clock.tune().config == "short"
    assert clock.runs["short"] > 100
    assert clock.runs["long"] <= 2 + SOONEST / 2


def test_a_long_problem_beside_a_short_one_that_weighs_more_is_run_once_per_sample():
    clock = CostlyClock({(problem, n): s for problem, s in (("short", 1e-6), ("long", 0.1)) for n in range(2)}, 50e-9)
    others = [Part(lambda n: clock.make_fn(("long", n)), weight=1.0)]
    tuner = tb.Tuner(stopwatch=Stopwatch(clock_ns=clock.ns), clock_s=lambda: clock.now_s, probes=lambda _: ())
    job = job_of(lambda n: clock.make_fn(("short", n)), [0, 1], weight=1e6, others=others)
    samples = max(len(m.samples_s) for m in tuner.tune(job).measurements)
    assert clock.runs["long", 0] <= samples + 2


# ------------------------------------------------------------------------------------------------- runs per sample


def take(batches, times, rounds=10):
    """Take samples of kernels with known times until no more are void; return the runs of each sample."""
    asked = {name: [] for name in times}

    def sample(name, runs):
        asked[name].append(runs)
        overhead_s, seconds, more_s = times[name]
        return Trial(sample_s=overhead_s / runs + seconds, more_s=more_s)

    for _ in range(rounds):
        for name in times:
            batches.take(name, partial(sample, name))
        batches.renew(times)
    return asked


@pytest.mark.parametrize("seconds", [20e-9, 0.2e-6, 1e-6, 9e-6, 19e-6, 1e-3])
@pytest.mark.parametrize("overhead_s", [0.0, 50e-9, 4e-6, 1e-3])
def test_all_samples_get_as_many_runs_and_enough_of_them(seconds, overhead_s):
    asked = take(Batches(SHORTEST_SAMPLE_S), dict.fromkeys(range(3), (overhead_s, seconds, seconds)))
    runs = asked[0][-1]
    assert asked[0] == asked[1] == asked[2]
    assert overhead_s + runs * seconds >= SHORTEST_SAMPLE_S / 2
    assert runs == 1 or runs * seconds <= 2 * SHORTEST_SAMPLE_S


def test_one_reading_that_is_far_too_short_makes_a_sample_ten_times_longer_at_most():
    batches = Batches(SHORTEST_SAMPLE_S)
    batches.take("a", lambda _runs: Trial(1e-9, 1e-9))
    assert batches.renew("a") == {"a"}
    assert take(batches, {"a": (0.0, 15e-6, 15e-6)})["a"] == [10] * 10


@pytest.mark.parametrize("more_s", [float("inf"), LONGEST_BATCH_S])
def test_samples_that_cannot_have_more_runs_stay_as_they_are(more_s):
    assert take(Batches(SHORTEST_SAMPLE_S), {"a": (0.0, 1e-6, more_s)})["a"] == [1] * 10


def test_a_clock_that_needs_no_batches_gets_none():
    assert take(Batches(0.0), {"a": (0.0, 1e-9, 1e-9)})["a"] == [1] * 10


# ------------------------------------------------------------------------------------------ the race and the decision


def test_no_candidate_leaves_a_race_of_short_samples_after_a_few_disturbed_ones():
    ticks, rng = count(), random.Random(0)

    def lane(name, disturbed):
        samples = count()
        return Lane(name, lambda: (9.0 if next(samples) < disturbed else 1.0) + rng.random() / 1000)

    race = Race([lane("a", 20), lane("b", 0)], rng, lambda: next(ticks) * SHORTEST_SAMPLE_S)
    race.run()
    assert {lane.name for lane in race.finalists} == {"a", "b"}


@pytest.mark.parametrize(
    ("best_s", "behind_s", "policy", "kept"),
    [
        (1e-6, 0.9 * PLACEMENT_S, "host-clock", True),
        (1e-6, 2 * PLACEMENT_S, "host-clock", False),
        (10e-6, 0.9 * TICKS_S, "device-events", True),
        (10e-6, 2 * TICKS_S, "device-events", False),
        (0.1e-6, 0.9 * PLACEMENT_S, "host-clock", False),  # 18 % slower
        (100e-6, 1e-6, "host-clock", False),  # 1 %, and clearly so
    ],
)
def test_a_difference_by_the_place_in_memory_or_a_tick_of_the_clock_is_a_tie(best_s, behind_s, policy, kept):
    rng = random.Random(1)
    times = {"best": best_s, "guess": best_s + behind_s}
    measured = [
        Measurement(name, name, "", policy, "", tuple(s * (1 + rng.random() / 1000) for _ in range(48)))
        for name, s in times.items()
    ]
    verdict = decide(measured, heuristic="guess")
    assert (verdict.rule == "tie, kept the heuristic") is kept
