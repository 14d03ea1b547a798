"""Measuring and deciding, on a fake clock: traps 1, 2, 10, 15, 16 and 17."""

from __future__ import annotations

import itertools
import math
import pickle
import random
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels import FakeClock, fake_tuner, job

import tunebook as tb
from tunebook._base.config_codec import encode, fingerprint
from tunebook._base.vocabulary import Failure, Measurement
from tunebook._statistics.decide import TIE, decide
from tunebook._statistics.race import HOPELESS
from tunebook._tuning.job import Budget, parse_budget


def measured(config, *samples, failure=None, when=0.0):
    return Measurement(
        config=encode(config), fingerprint=fingerprint(config), code="c", policy="p", environment="e",
        samples_s=samples, failure=failure, when=when,
    )  # fmt: skip


def winner(measurements, **options):
    verdict = decide(measurements, **options)
    return None if verdict is None else verdict.winner.measurement.config


class TestDecide:
    @pytest.mark.promise("wrong-never-wins")
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -1.0])
    def test_an_invalid_time_never_wins(self, bad):
        for order in ([measured("bad", bad), measured("good", 1.0)], [measured("good", 1.0), measured("bad", bad)]):
            assert winner(order) == "good"
        assert decide([measured("bad", bad)]) is None

    def test_a_failure_never_wins_even_with_samples(self):
        failed = measured("x", 0.1, failure=Failure(kind="wrong-result", message="off"))
        assert winner([failed, measured("y", 1.0)]) == "y"

    @pytest.mark.promise("heuristic-wins-ties")
    def test_ties_go_to_the_incumbent_then_the_heuristic_then_canonical_order(self):
        tied = [measured("b", 1.0), measured("a", 1.0 + TIE / 2), measured("c", 1.0 + TIE / 3)]
        assert winner(tied, incumbent=fingerprint("c"), heuristic=fingerprint("b")) == "c"
        assert winner(tied, heuristic=fingerprint("b")) == "b"
        assert winner(tied) == "a"

    def test_of_tied_candidates_the_smallest_number_is_first(self):
        configs = [{"by": 128, "bx": 8}, {"by": 32, "bx": 16}, {"by": 32, "bx": 8}, {"by": 32.0, "bx": 8}]
        found = {repr(winner([measured(config, 1.0) for config in order])) for order in permutations(configs)}
        assert found == {repr(encode(configs[-1]))}, "equal numbers do not leave it to the order"
        values = [None, 0.5, 32, 128, "128", "32", [4, 8], [4, 16], {"x": 1}]  # of any kinds
        for n, value in enumerate(values):
            assert winner([measured({"by": each}, 1.0) for each in values[n:][::-1]]) == encode({"by": value})

    def test_the_winner_alone_is_not_tied(self):
        assert repr(decide([measured("a", 1.0), measured("b", 2.0)])).startswith("<Verdict 1 s, fastest, 2 ranked: ")
        tie = "<Verdict 1 s, tie, first by its values, 2 ranked, 2 tied: "
        assert repr(decide([measured("a", 1.0), measured("b", 1.0)])).startswith(tie)

    def test_an_incumbent_that_is_clearly_slower_loses(self):
        assert winner([measured("old", 2.0), measured("new", 1.0)], incumbent=fingerprint("old")) == "new"

    def test_of_times_that_are_known_badly_the_fastest_wins_unless_the_incumbent_is_as_likely(self):
        rng = random.Random(1)
        noise = [rng.lognormvariate(0, 0.1) for _ in range(96)]
        fast = measured("z", *noise)
        slow = measured("a", *(1.02 * s for s in rng.sample(noise, 96)))
        assert winner([fast, slow]) == "z"
        assert winner([fast, slow], heuristic=fingerprint("a")) == "z"
        assert winner([fast, slow], incumbent=fingerprint("a")) == "a"
        assert len(decide([fast, slow]).tied) == 2

    def test_of_times_that_are_known_well_a_small_difference_is_a_tie(self):
        quiet = [1 + n % 7 / 10_000 for n in range(96)]
        both = [measured("z", *quiet), measured("a", *(1.003 * s for s in quiet))]
        assert winner(both) == "a"
        assert winner(both, heuristic=fingerprint("z")) == "z"

    def test_a_gap_that_the_next_tuning_would_see_too_decides_the_race(self):
        quiet = [1 + n % 7 / 10_000 for n in range(96)]
        assert winner([measured("z", *quiet), measured("a", *(1.01 * s for s in quiet))]) == "z"

    @given(st.lists(st.lists(st.floats(1.0, 1.3), min_size=1, max_size=40), min_size=1, max_size=6))
    def test_without_an_incumbent_the_winner_is_never_measured_far_behind(self, data):
        verdict = decide([measured(config, *samples) for config, samples in enumerate(data)], heuristic=fingerprint(0))
        assert verdict.winner.value_s <= verdict.ranking[0].value_s * (1 + TIE) * 1.000001
        assert verdict.winner in verdict.tied

    @pytest.mark.parametrize(
        ("objective", "expected"), [(lambda s: -1 / min(s), "b"), (lambda _: 0.0, "a"), (lambda _: math.inf, "a")]
    )
    def test_an_objective_may_be_negative_or_zero_or_infinite(self, objective, expected):
        slow, fast = measured("a", *[2.0] * 20), measured("b", *[1.0] * 20)
        assert winner([slow, fast], objective=objective) == expected

    @given(st.lists(st.tuples(st.integers(0, 20), st.floats(1e-6, 1.0)), min_size=1, max_size=20), st.randoms())
    def test_the_same_measurements_give_the_same_decision_in_any_order(self, data, rng):
        measurements = [measured(config, value) for config, value in dict(data).items()]
        shuffled = rng.sample(measurements, len(measurements))
        assert decide(measurements) == decide(shuffled)

    @pytest.mark.promise("noise-is-not-speed")
    def test_noise_within_the_band_does_not_change_the_decision(self):
        rng = random.Random(7)
        choices = set()
        for _ in range(200):
            samples = {c: [1.0 + abs(rng.gauss(0, 0.004)) for _ in range(3)] for c in ("a", "b")}
            choices.add(winner([measured(c, *s) for c, s in samples.items()]))
        assert choices == {"a"}


class TestTuner:
    def test_the_fastest_candidate_wins(self):
        clock = FakeClock()
        work, _ = job(clock, {"a": 0.3, "b": 0.1, "c": 0.2})
        tuned = fake_tuner(clock).tune(work)
        assert tuned.config == "b"
        assert [config for config, _ in tuned.ranking] == ["b", "c", "a"]

    def test_measure_returns_the_mean_of_its_runs_in_seconds(self):
        clock, costs = FakeClock(), iter([9.0, 3.0, 1.0, 5.0])
        assert fake_tuner(clock).measure(lambda: clock.spend(next(costs))) == pytest.approx(3.0)

    def test_the_numbers_of_runs_can_be_read_and_set(self):
        clock, ran = FakeClock(), []
        tuner = fake_tuner(clock, warmup=2, iters=5)
        assert (tuner.warmup, tuner.iters) == (2, 5)
        assert (tb.Tuner().warmup, tb.Tuner().iters) == (1, 3)
        tuner.warmup, tuner.iters = 1, 2
        tuner.measure(lambda: ran.append(clock.spend(1.0)))
        assert len(ran) == 3
        with pytest.raises(tb.DefinitionError, match="iters >= 1"):
            tuner.iters = 0
        assert tuner.iters == 2

    def test_a_tuner_may_be_annotated_with_its_configurations(self):
        assert isinstance(tb.Tuner[dict](), tb.Tuner)

    def test_measure_raises_the_error_of_the_function(self):
        with pytest.raises(ZeroDivisionError, match="division"):
            tb.Tuner().measure(lambda: 1 / 0)

    @pytest.mark.parametrize("candidates", [[], [1, 2]], ids=["none", "all fail"])
    def test_a_failed_tuning_is_a_runtime_error_too(self, candidates):
        with pytest.raises(RuntimeError, match="candidates") as caught:
            tb.Tuner().autotune(lambda c: lambda: 1 / 0, (), {}, candidates)
        assert isinstance(caught.value, tb.TuningFailed)
        assert isinstance(pickle.loads(pickle.dumps(caught.value)), RuntimeError)
        matched, rest = caught.value.split(ZeroDivisionError if candidates else ValueError)
        assert (type(matched), rest) == (tb.TuningFailed, None)

    def test_arguments_are_passed_on(self):
        seen = []
        tb.Tuner().autotune(lambda c: lambda *a, **k: seen.append((c, a, k)), (1, 2), {"x": 3}, ["only"])
        assert set(map(repr, seen)) == {repr(("only", (1, 2), {"x": 3}))}

    def test_the_first_run_is_not_timed(self):
        clock = FakeClock()
        slow_start = iter([5.0, 0.1, 0.1, 0.1])
        work, _ = job(clock, {"compiles": lambda: next(slow_start), "steady": 0.2})
        assert fake_tuner(clock).tune(work).config == "compiles"

    def test_a_hopeless_candidate_is_dropped_after_two_samples_of_the_same_kind(self):
        clock = FakeClock()
        costs = {"good": 0.1, "hopeless": 0.1 * HOPELESS * 1.01, "slow": 0.1 * HOPELESS * 0.99}
        work, ran = job(clock, costs, heuristic="good")
        tuned = fake_tuner(clock).tune(work)
        assert [ran.count(c) for c in ("good", "hopeless", "slow")] == [4, 3, 4]
        assert {m.config: len(m.samples_s) for m in tuned.measurements} == {"good": 3, "hopeless": 2, "slow": 3}

    def test_a_long_candidate_that_is_ten_times_slower_is_not_sampled_twice(self):
        clock = FakeClock()
        work, ran = job(clock, {"good": 64e-6, "close": 80e-6, "hopeless": 3.0}, heuristic="good")
        tuned = fake_tuner(clock).tune(work)
        assert ran.count("hopeless") == 2, "its check, and one sample: its first run may have compiled something"
        assert tuned.config == "good"
        assert min(ran.count("good"), ran.count("close")) > 4, "the others race as if it had not been there"

    def test_neither_a_compiler_nor_a_stall_makes_a_candidate_hopeless_at_once(self):
        clock = FakeClock()
        compiles, stalls = itertools.chain([3.0], itertools.repeat(50e-6)), itertools.cycle([60e-6, 3.0])
        costs = {"steady": 64e-6, "compiles": lambda: next(compiles), "stalls": lambda: next(stalls)}
        work, ran = job(clock, costs, heuristic="steady")
        assert fake_tuner(clock).tune(work).config == "compiles"
        assert ran.count("stalls") > 2

    def test_a_short_candidate_gets_its_samples_however_slow_it_is(self):
        clock = FakeClock()
        work, ran = job(clock, {"good": 64e-6, "slow": 0.01}, heuristic="good")
        fake_tuner(clock).tune(work)
        assert ran.count("slow") > 2, "two stalls of a busy machine may be as long"

    def test_all_failures_are_named(self):
        clock = FakeClock()
        work, _ = job(clock, {"a": ValueError("bad tile"), "b": MemoryError("too big")})
        with pytest.raises(tb.TuningFailed, match="all 2 candidates failed") as caught:
            fake_tuner(clock).tune(work)
        assert "'a'" in str(caught.value)
        assert "MemoryError: too big" in str(caught.value)

    def test_failures_have_a_kind_and_an_expiry(self):
        clock = FakeClock()
        errors = {"a": 0.1, "b": MemoryError("m"), "c": tb.CompileError("c"), "d": TimeoutError("t"), "e": OSError("o")}
        work, _ = job(clock, errors)
        found = {m.config: m.failure for m in fake_tuner(clock, now_s=lambda: 100.0).tune(work).measurements}
        kinds = {config: failure.kind for config, failure in found.items() if failure}
        assert kinds == {"b": "memory", "c": "compile", "d": "timeout", "e": "launch"}
        assert found["b"].expires > 100.0

    def test_no_candidates_is_an_error(self):
        with pytest.raises(tb.TuningFailed, match="no candidate"):
            tb.Tuner().autotune(lambda c: c, (), {}, [])

    @pytest.mark.promise("wrong-never-wins")
    def test_a_wrong_output_never_wins(self):
        verdicts = iter(["off by one", None])
        clock = FakeClock()
        work, _ = job(clock, {"wrong": 0.1, "right": 0.2}, check=lambda _: next(verdicts))
        tuned = fake_tuner(clock).tune(work)
        assert tuned.config == "right"
        assert tuned.measurements[0].failure.kind == "wrong-result"

    def test_a_candidate_that_cannot_be_written_can_still_be_tuned(self):
        clock = FakeClock()
        fast, slow = object(), object()
        work, _ = job(clock, {slow: 0.2, fast: 0.1})
        assert fake_tuner(clock).tune(work).config is fast

    @pytest.mark.parametrize(("warmup", "iters"), [(0, 0), (-1, 3)])
    def test_a_tuner_that_measures_nothing_is_refused(self, warmup, iters):
        with pytest.raises(tb.DefinitionError, match="iters >= 1"):
            tb.Tuner(warmup, iters)


class TestKnownMeasurements:
    def first(self, costs):
        clock = FakeClock()
        work, _ = job(clock, costs)
        return fake_tuner(clock).tune(work)

    def again(self, costs, tuned, **options):
        clock = FakeClock()
        incumbent = None if tuned.verdict is None else tuned.verdict.winner.measurement.fingerprint
        work, ran = job(clock, costs, known=tuned.measurements, incumbent=incumbent, **options)
        return fake_tuner(clock, now_s=options.pop("now_s", lambda: 0.0)).tune(work), ran

    @pytest.mark.promise("added-candidate")
    def test_an_added_candidate_runs_with_the_incumbent_and_nothing_else(self):
        tuned, ran = self.again({"a": 0.3, "b": 0.2, "c": 0.1}, self.first({"a": 0.3, "b": 0.2}))
        assert (tuned.config, set(ran)) == ("c", {"b", "c"})

    def test_a_day_on_which_everything_is_slower_does_not_bring_back_a_loser(self):
        tuned, ran = self.again({"a": 0.6, "b": 0.4, "c": 0.5}, self.first({"a": 0.3, "b": 0.2}))
        assert (tuned.config, set(ran)) == ("b", {"b", "c"})

    def test_removing_a_loser_and_reordering_candidates_runs_nothing(self):
        tuned, ran = self.again({"c": 0.1, "b": 0.05}, self.first({"a": 0.3, "b": 0.05, "c": 0.1}))
        assert (tuned.config, ran) == ("b", [])

    @pytest.mark.promise("winner-gone")
    def test_without_their_winner_the_losers_race_each_other_but_for_the_hopeless(self):
        first = self.first({"winner": 0.1, "a": 0.4, "b": 0.43, "slow": 5.0})
        tuned, ran = self.again({"a": 0.4, "b": 0.43, "slow": 5.0}, first)
        assert (tuned.config, set(ran)) == ("a", {"a", "b"})

    @pytest.mark.promise("winner-gone")
    def test_an_added_candidate_does_not_win_because_the_winner_is_gone(self):
        first = self.first({"winner": 0.1, "a": 0.4, "b": 0.5, "slow": 5.0})
        tuned, ran = self.again({"a": 0.4, "b": 0.5, "new": 2.5, "slow": 5.0}, first)
        assert (tuned.config, set(ran)) == ("a", {"a", "b", "new"})

    @pytest.mark.promise("winner-gone")
    @pytest.mark.parametrize(
        ("spaces", "best", "ran_last"),
        [
            (["1234", "23", "123"], "1", {"1", "2"}),
            (["123", "3", "23"], "2", {"2", "3"}),
            (["123", "34", "123", "23"], "2", {"2", "3"}),
            (["1234", "123", "1234"], "4", set()),
            (["1234", "123", "1234x"], "4", {"1", "4", "x"}),
            (["x23", "x3", "23y"], "2", {"2", "3", "y"}),
        ],
    )
    def test_candidates_that_lost_to_one_that_is_gone_race_those_of_today(self, spaces, best, ran_last):
        costs = {"1": 0.2, "2": 0.6, "3": 2.0, "4": 0.05, "x": OSError("x"), "y": OSError("y")}
        clock, known, incumbent = FakeClock(), {}, None
        for space in spaces:
            work, ran = job(clock, {w: costs[w] for w in space}, known=tuple(known.values()), incumbent=incumbent)
            tuned = fake_tuner(clock, now_s=lambda: 0.0).tune(work)
            known |= {m.fingerprint: m for m in tuned.measurements}
            incumbent = tuned.verdict.winner.measurement.fingerprint
        assert (tuned.config, set(ran)) == (best, ran_last)
        again, ran = job(clock, {w: costs[w] for w in space}, known=tuple(known.values()), incumbent=incumbent)
        assert (fake_tuner(clock, now_s=lambda: 0.0).tune(again).config, ran) == (best, [])

    def test_nothing_runs_if_one_candidate_is_left_or_all_others_are_hopeless(self):
        first = self.first({"winner": 0.1, "a": 0.4, "slow": 5.0})
        for costs in ({"a": 0.4}, {"a": 0.4, "slow": 5.0}):
            tuned, ran = self.again(costs, first)
            assert (tuned.config, ran) == ("a", [])

    @pytest.mark.promise("winner-gone")
    def test_an_added_candidate_does_not_win_because_the_winner_fails_now(self):
        first = self.first({"winner": 0.1, "a": 0.4, "b": 0.5, "slow": 5.0})
        tuned, ran = self.again({"winner": OSError("gone"), "a": 0.4, "b": 0.5, "new": 2.5, "slow": 5.0}, first)
        assert (tuned.config, set(ran)) == ("a", {"winner", "a", "b", "new"})

    def test_a_winner_is_not_measured_alone_after_a_disturbed_tuning(self):
        first = self.first({"winner": 0.1, "a": 0.4, "b": 0.5})
        tuned, ran = self.again({"winner": 0.1, "a": 0.4}, first, unfinished=True)
        assert (tuned.config, ran) == ("winner", [])

    def test_a_winner_keeps_its_samples_if_the_added_candidate_fails(self):
        first = self.first({"a": 0.1, "b": 0.2})
        long = first._replace(measurements=tuple(m._replace(samples_s=m.samples_s * 20) for m in first.measurements))
        tuned, ran = self.again({"a": 0.1, "b": 0.2, "new": OSError("x")}, long)
        assert set(ran) == {"a", "new"}
        assert len(next(m for m in tuned.measurements if m.config == "a").samples_s) >= 20

    def test_other_code_policy_or_environment_is_measured_anew(self):
        tuned = self.first({"a": 0.3, "b": 0.2})
        for options in ({"code": "edited"}, {"environment": "driver 2"}, {"mode": "forward+backward"}):
            _, ran = self.again({"a": 0.3, "b": 0.2}, tuned, **options)
            assert set(ran) == {"a", "b"}

    def test_a_failure_is_not_tried_again_until_it_expires(self):
        clock = FakeClock()
        known = [
            Measurement(
                config=c, fingerprint=fingerprint(c), code="", policy="host-clock/race/warmup=1/forward",
                environment="", failure=Failure(kind="launch", message="x", expires=expires),
            )
            for c, expires in (("old", 10.0), ("recent", 100.0))
        ]  # fmt: skip
        work, ran = job(clock, {"old": 0.1, "recent": 0.1, "new": 0.1}, known=known)
        fake_tuner(clock, now_s=lambda: 50.0).tune(work)
        assert set(ran) == {"old", "new"}


class TestBudget:
    @pytest.mark.parametrize("budget", [0.5, 1.0, 3.3])
    def test_a_budget_is_kept_to_within_one_candidate(self, budget):
        clock = FakeClock()
        work, _ = job(clock, dict.fromkeys(range(100), 0.1), budget=Budget(budget))
        start = clock.seconds
        tuned = fake_tuner(clock).tune(work)
        one_candidate = 0.1 * 4
        assert clock.seconds - start <= budget + one_candidate
        assert not tuned.complete

    def test_the_best_so_far_stands_and_more_budget_goes_on_from_there(self):
        clock = FakeClock()
        costs = {i: 0.2 - i * 0.01 for i in range(10)} | {"broken": OSError("x")}
        work, _ = job(clock, costs, budget=Budget(2.0))
        first = fake_tuner(clock, now_s=lambda: 0.0).tune(work)
        assert not first.complete
        again, ran = job(clock, costs, known=first.measurements, unfinished=True)
        second = fake_tuner(clock, now_s=lambda: 0.0).tune(again)
        assert (second.complete, second.config) == (True, 9)
        assert set(ran) == set(range(10)), "what is known to fail is not run again"

    @pytest.mark.promise("heuristic-wins-ties")
    def test_a_heuristic_outside_the_candidates_races_and_may_win(self):
        clock = FakeClock()
        costs = {"a": 0.2, "b": 0.3, "guess": 0.1}
        work, _ = job(clock, costs, heuristic="guess")
        assert fake_tuner(clock).tune(work._replace(candidates=["a", "b"])).config == "guess"

    def test_an_incumbent_that_is_the_heuristic_is_tried_once(self):
        clock = FakeClock()
        work, _ = job(clock, {"a": 0.1, "b": 0.2}, heuristic="a", incumbent=fingerprint("a"))
        tuned = fake_tuner(clock).tune(work)
        assert (tuned.ran, tuned.config) == (2, "a")
        counts = {m.config: len(m.samples_s) for m in tuned.measurements}
        assert counts["a"] >= counts["b"]

    def test_the_heuristic_is_measured_first(self):
        clock = FakeClock()
        work, ran = job(clock, dict.fromkeys(range(10), 1.0), heuristic=7, budget=Budget(0.5))
        assert fake_tuner(clock).tune(work).config == 7
        assert set(ran) == {7}

    @pytest.mark.parametrize(
        ("written", "seconds"), [("1h30m", 5400), ("30 sec", 30), ("5", 5), ("1 hour 5 min", 3900), (".5s", 0.5)]
    )
    def test_a_budget_may_be_written_as_people_write_times(self, written, seconds):
        assert parse_budget(written) == Budget(seconds=seconds)

    @pytest.mark.parametrize("bad", ["fast", "1.2.3s", "-1s", 0, -2, "", math.nan, [1], "1x", True])
    def test_an_invalid_budget_is_refused_with_examples(self, bad):
        with pytest.raises(tb.DefinitionError, match='"30s"'):
            parse_budget(bad)


class TestCompile:
    def test_a_compile_error_costs_one_candidate(self):
        clock = FakeClock()

        def compile_one(config):
            if config == "bad":
                raise tb.CompileError("syntax")

        work, ran = job(clock, {"bad": 0.01, "good": 0.1}, compile=compile_one)
        tuned = fake_tuner(clock).tune(work)
        assert tuned.config == "good"
        assert "bad" not in ran
