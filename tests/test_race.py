"""Racing, on pretend kernels: the right winner, few samples, and the same choice every time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tunebook as tb
from tunebook._measure import SHORTEST_SAMPLE_S, Stopwatch
from tunebook._race import Lane, Race, typical_s, uncertainty
from tunebook._tuner import Job
from tunebook.testing import Landscape


def tune(land, **options):
    tuner = tb.Tuner(stopwatch=Stopwatch(clock_ns=land.clock_ns), clock_s=lambda: land.clock_ns() * 1e-9)
    return tuner.tune(Job(make_fn=land.make_fn, args=(), kwargs={}, candidates=list(land.configs), **options))


def noisy(costs, seed, cv=0.02, **options):
    return Landscape(costs, seed=seed, cv=cv, spikes=0.1, drift=0.05, **options)


@pytest.mark.parametrize("problem", range(3))
def test_fresh_tunings_of_one_problem_agree_on_the_best(problem):
    costs = Landscape(64, seed=problem).costs
    chosen = [tune(land := noisy(costs, seed)).config for seed in range(10)]
    assert chosen.count(land.best) >= 9
    assert all(land.regret(config) <= 0.05 for config in chosen)


def test_a_tenth_of_the_samples_of_a_hundred_each_is_enough():
    costs = Landscape(64, seed=1).costs
    for cv in (0.01, 0.1):
        land = noisy(costs, 7, cv=cv)
        tune(land)
        assert land.samples <= 10 * 64


def test_clock_ramp_and_drift_do_not_favour_a_place_in_the_list():
    costs = dict.fromkeys(range(12), 1e-3) | {5: 0.93e-3}
    for order in (costs, dict(reversed(costs.items()))):
        land = Landscape(order, seed=3, cv=0.01, drift=0.3, ramp=0.5)
        assert tune(land).config == 5


def test_samples_that_agree_from_the_start_need_no_more_rounds():
    land = Landscape({"a": 0.1, "b": 0.2, "c": 0.15})
    assert {m.config: len(m.samples_s) for m in tune(land).measurements} == {"a": 3, "b": 3, "c": 3}


def test_finalists_are_sampled_more_than_the_rest():
    land = noisy({i: 1e-3 * (1 + i / 3) for i in range(20)}, 1, cv=0.03)
    counts = {m.config: len(m.samples_s) for m in tune(land).measurements}
    assert counts[0] > counts[19]


def test_a_candidate_that_fails_in_the_middle_of_the_race_leaves_it():
    land = noisy({"flaky": 1e-3, "steady": 1.05e-3, "slow": 1.1e-3}, 1)
    make_fn, left = land.make_fn, [6]

    def make(config):
        run = make_fn(config)

        def flaky():
            left[0] -= 1
            if left[0] < 0:
                raise OSError("device lost")
            run()

        return flaky if config == "flaky" else run

    land.make_fn = make
    tuned = tune(land)
    assert tuned.config == "steady"
    failures = {m.config: m.failure for m in tuned.measurements}
    assert failures["flaky"].message == "OSError: device lost"


def test_runs_too_short_for_the_clock_are_timed_several_at_once():
    short_s = SHORTEST_SAMPLE_S / 10
    land = Landscape({"a": short_s, "b": 2 * short_s})
    tuned = tune(land)
    assert tuned.config == "a"
    assert land.runs["a"] >= 3 * 10
    assert tuned.ranking[0][1] == pytest.approx(short_s, rel=0.01)


def test_the_budget_ends_the_race_and_the_best_so_far_stands():
    land = noisy(dict.fromkeys(range(8), 0.001), 1, cv=0.1)
    tuned = tune(land, budget_s=0.04)
    assert not tuned.complete
    assert land.elapsed_s <= 0.04 + 4 * 3e-3


def test_the_race_takes_at_most_as_long_again_as_qualifying():
    land = noisy(dict.fromkeys(range(6), 1.0), 1, cv=0.1)
    tuned = tune(land)
    qualifying = 6 * 4
    assert land.samples <= 2 * qualifying + 6
    assert tuned.complete


POSITIVE = st.floats(1e-6, 1e3)


@given(st.lists(POSITIVE, min_size=1, max_size=40))
def test_a_typical_time_lies_within_the_faster_half(samples):
    ordered = sorted(samples)
    assert ordered[0] * 0.999 <= typical_s(samples) <= ordered[len(ordered) // 2] * 1.001
    assert uncertainty(samples) >= -1e-9


@given(st.lists(POSITIVE, min_size=8, max_size=40), st.floats(1e-9, 0.5))
def test_one_sample_that_is_too_good_to_be_true_changes_little(samples, fraction):
    glitch = min(samples) * fraction
    assert typical_s([*samples, glitch]) >= min(samples) * 0.999


@given(st.lists(st.lists(POSITIVE, min_size=3, max_size=3), min_size=1, max_size=12), st.integers())
def test_a_race_always_ends_and_leaves_every_lane_with_samples(lanes, seed):
    rng = random.Random(seed)
    running = [Lane(str(i), lambda s=s: rng.choice(s)) for i, s in enumerate(lanes)]
    Race(running, random.Random(seed), lambda: 0.0).run()
    assert all(lane.samples_s for lane in running)
