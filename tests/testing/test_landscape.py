"""The pretend kernels themselves: an engine's statistics are only as good as the noise they were tested on."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels import job_of

import tunebook as tb
from tunebook._measure.stopwatch import Stopwatch
from tunebook.testing import Landscape

MS = 1e-3
EVERYTHING = {"cv": 0.1, "tail": 0.1, "spikes": 0.1, "drift": 0.1, "ramp": 0.5, "bursts": 0.2, "first_run": 3.0}
EVERYTHING["levels"] = (0.8, 1.0)


def times_s(land, config, count):
    """The seconds of runs one after the other, as a stopwatch reads them."""
    run, read = land.make_fn(config), []
    for _ in range(count):
        start = land.clock_ns()
        run()
        read.append((land.clock_ns() - start) * 1e-9)
    return read


def one(**options):
    return Landscape({"a": MS}, **options)


def job(land, **options):
    return job_of(land.make_fn, list(land.configs), **options)


def tuner(land, **options):
    return tb.Tuner(stopwatch=Stopwatch(clock_ns=land.clock_ns), clock_s=lambda: land.clock_ns() * 1e-9, **options)


class TestNoise:
    def test_without_noise_every_run_takes_its_true_time(self):
        land = Landscape({"a": 1 * MS, "b": 2 * MS})
        assert times_s(land, "b", 3) == pytest.approx([2 * MS] * 3)
        assert times_s(land, "a", 1) == pytest.approx([1 * MS])
        assert land.elapsed_s == pytest.approx(7 * MS)

    @given(st.floats(0.001, 0.3), st.integers(0, 2**32))
    def test_medians_are_the_true_time_and_runs_vary_as_asked(self, cv, seed):
        seen = times_s(one(cv=cv, seed=seed), "a", 2000)
        # Of 2000 runs the median varies by 0.02 cv; the standard deviation, of a skewed distribution, by a tenth.
        assert statistics.median(seen) == pytest.approx(MS, rel=0.15 * cv)
        assert statistics.stdev(seen) / MS == pytest.approx(cv, rel=0.5)

    @given(st.integers(0, 2**32))
    def test_noise_makes_runs_slower_rather_than_faster(self, seed):
        seen = times_s(one(cv=0.1, seed=seed), "a", 2000)
        assert MS - min(seen) < 0.13 * MS < 2 * 0.13 * MS < max(seen) - MS
        assert statistics.mean(seen) > statistics.median(seen)

    @pytest.mark.parametrize("rate", [0.0, 0.01, 0.1, 0.5])
    def test_spikes_come_at_their_rate_and_height(self, rate):
        seen = times_s(one(cv=0.05, spikes=rate, spike_factor=4.0), "a", 10_000)
        high = [t for t in seen if t > 2.5 * MS]
        assert len(high) / len(seen) == pytest.approx(rate, rel=0.2)
        assert not high or statistics.median(high) == pytest.approx(4 * MS, rel=0.02)

    def test_a_heavy_tail_leaves_the_median_and_has_runs_that_no_variance_explains(self):
        light, heavy = (times_s(one(cv=0.05, tail=tail), "a", 5000) for tail in (0.0, 0.1))
        assert statistics.median(heavy) == pytest.approx(MS, rel=0.02)
        assert max(light) < 2 * MS < 3 * MS < max(heavy)


class TestTime:
    def test_drift_is_linear_up_to_the_horizon_and_stays(self):
        seen = times_s(one(drift=0.05, horizon_s=1.0), "a", 2000)
        assert seen[0] == pytest.approx(MS)
        assert seen[488] == pytest.approx(1.025 * MS, rel=1e-3)  # 0.5 s have passed by then
        assert seen[-1] == pytest.approx(1.05 * MS)
        assert seen == sorted(seen)

    def test_drift_reaches_its_full_size_within_ten_runs_of_everything_by_default(self):
        land = Landscape(64, drift=0.05)
        for _ in range(10):
            for config in land.configs:
                land.make_fn(config)()
        assert times_s(land, land.best, 1) == pytest.approx([1.05 * land.true_s(land.best)], rel=1e-4)

    def test_the_ramp_fades(self):
        seen = times_s(one(ramp=0.5, ramp_s=0.1), "a", 1000)
        assert seen[0] == pytest.approx(1.5 * MS)
        after_one_ramp = next(t for t, passed in zip(seen, cumulative(seen), strict=True) if passed >= 0.1)
        assert after_one_ramp == pytest.approx((1 + 0.5 / math.e) * MS, rel=0.01)
        assert seen[-1] == pytest.approx(MS, rel=1e-3)

    def test_only_the_first_run_of_a_candidate_is_a_first_run(self):
        land = Landscape({"a": MS, "b": MS}, first_run=3.0)
        for config in ("a", "b"):
            assert times_s(land, config, 3) == pytest.approx([3 * MS, MS, MS])

    @pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 1.0])
    def test_bursts_take_their_part_of_the_time_in_one_piece_each(self, part):
        seen = times_s(one(bursts=part, burst_factor=2.0, burst_s=0.02), "a", 50_000)
        slow = [t > 1.5 * MS for t in seen]
        assert sum(t for t, s in zip(seen, slow, strict=True) if s) / sum(seen) == pytest.approx(part, abs=0.05)
        assert sum(a != b for a, b in pairwise(slow)) < len(seen) / 10

    def test_levels_are_factors_on_everything_for_a_stretch_of_runs_each(self):
        land = Landscape({"a": MS, "b": 2 * MS}, levels=(0.8, 1.0, 1.25))
        seen = [t / true for _ in range(1000) for c, true in land.costs.items() for t in times_s(land, c, 1)]
        assert {round(factor, 6) for factor in seen} == {0.8, 1.0, 1.25}
        # Ten runs of the fastest are seven of these two in turn, and every third choice is the same level again.
        assert len(seen) / sum(a != b for a, b in pairwise(seen)) == pytest.approx(10, rel=0.3)

    def test_the_levels_of_a_seed_do_not_depend_on_the_other_noise(self):
        plain, spiky = (times_s(one(levels=(0.5, 1.0), level_s=1.0, spikes=s), "a", 400) for s in (0.0, 1e-9))
        assert plain == spiky

    def test_overhead_is_in_every_run_and_compiling_in_none(self):
        land = one(overhead_s=0.5 * MS, compile_s=1.0)
        assert times_s(land, "a", 2) == pytest.approx([1.5 * MS] * 2)
        assert land.elapsed_s == pytest.approx(1.003)
        land.make_fn("a")
        assert land.elapsed_s == pytest.approx(1.003), "it is compiled once"


class TestSeeds:
    @given(st.integers(0, 2**32))
    def test_the_same_seed_gives_the_same_runs_and_another_one_others(self, seed):
        first, again, other = (
            times_s(Landscape({"a": MS}, seed=s, **EVERYTHING), "a", 50) for s in (seed, seed, seed + 1)
        )
        assert first == again
        assert first != other

    def test_noise_can_be_changed_and_the_costs_kept(self):
        first = Landscape(16, seed=3, cv=0.1)
        other = Landscape(first.costs, seed=4, cv=0.1)
        assert (other.configs, other.best) == (first.configs, first.best)
        assert times_s(other, other.best, 5) != times_s(first, first.best, 5)


class TestMadeUpCosts:
    @given(st.integers(1, 300), st.integers(0, 2**32))
    def test_there_is_one_best_and_nothing_within_two_percent_of_it(self, count, seed):
        land = Landscape(count, seed=seed)
        assert land.configs == tuple(range(count))
        regrets = sorted(map(land.regret, land.configs))
        assert regrets[0] == 0.0
        assert all(regret >= 0.02 - 1e-9 for regret in regrets[1:])

    @given(st.integers(0, 2**32))
    def test_a_few_are_close_and_most_are_far_off(self, seed):
        land = Landscape(64, seed=seed)
        regrets = list(map(land.regret, land.configs))
        assert sum(0 < regret <= 0.05 for regret in regrets) == 4
        assert sum(0.2 < regret <= 7 for regret in regrets) > 40

    def test_the_best_is_anywhere_in_the_list(self):
        assert len({Landscape(8, seed=seed).best for seed in range(100)}) == 8


class TestCounting:
    def test_runs_are_counted_by_configuration(self):
        land = Landscape({"a": MS, "b": 2 * MS})
        times_s(land, "a", 3)
        times_s(land, "b", 1)
        assert land.runs == {"a": 3, "b": 1}
        assert land.samples == 4

    def test_regret_is_measured_against_the_best_that_works(self):
        land = Landscape({"a": MS, "b": 2 * MS, "c": 3 * MS}, failures={"a": RuntimeError("broken")})
        assert land.best == "b"
        assert land.regret("c") == pytest.approx(0.5)

    def test_a_failure_is_raised_when_it_runs_and_costs_nothing(self):
        land = one(failures={"a": RuntimeError("broken")})
        run = land.make_fn("a")
        with pytest.raises(RuntimeError, match="broken"):
            run()
        assert (land.samples, land.elapsed_s) == (1, 0.0)

    def test_a_compile_error_is_raised_when_the_function_is_made(self):
        land = one(compile_s=1.0, failures={"a": tb.CompileError("no such block")})
        with pytest.raises(tb.CompileError, match="no such block"):
            land.make_fn("a")
        assert (land.samples, land.elapsed_s) == (0, 1.0)


class TestRefusals:
    @pytest.mark.parametrize("costs", [0, -1, {}, {"a": 0.0}, {"a": math.nan}, {"a": math.inf}, {"a": -1.0}])
    def test_costs_must_be_times(self, costs):
        with pytest.raises(tb.DefinitionError, match="at least one configuration"):
            Landscape(costs)

    @pytest.mark.parametrize("name", ["spikes", "tail", "bursts"])
    def test_a_probability_is_at_most_one(self, name):
        with pytest.raises(tb.DefinitionError, match=f"{name}=10 is not a probability"):
            one(**{name: 10})

    @pytest.mark.parametrize("level", [0.0, -1.0, math.inf, math.nan])
    def test_a_level_is_a_factor(self, level):
        with pytest.raises(tb.DefinitionError, match="each is a factor > 0"):
            one(levels=(1.0, level))

    def test_failures_belong_to_configurations(self):
        with pytest.raises(tb.DefinitionError, match="not in costs: \\['b'\\]"):
            one(failures={"b": RuntimeError("broken")})


class TestWithTheTuner:
    def test_a_quiet_landscape_is_tuned_to_its_best(self):
        land = Landscape(32, seed=5)
        tuned = tuner(land).tune(job(land))
        assert tuned.config == land.best
        assert tuned.seconds == pytest.approx(land.elapsed_s)

    def test_failing_candidates_are_passed_over(self):
        best = Landscape(8).best
        land = Landscape(8, failures={best: RuntimeError("broken"), (best + 1) % 8: tb.CompileError("no such block")})
        tuned = tuner(land).tune(job(land))
        assert tuned.config == land.best
        assert {m.failure.kind for m in tuned.measurements if m.failure is not None} == {"launch", "compile"}


def cumulative(seen):
    total = 0.0
    for t in seen:
        yield total
        total += t
