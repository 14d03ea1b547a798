"""From candidates to a choice: pruned, compiled while others run, checked, grouped, bounded."""

from __future__ import annotations

import threading
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
from kernels import FakeClock, PretendKernel, Tiles, fake_tuner, invocation, job
from limits import HANG_S

import tunebook as tb
from tunebook._base.errors import LeftOut
from tunebook._statistics.decide import objective_for
from tunebook._tuning.job import Budget, Order, Part

ONES = np.ones(4)


def tuned_by(clock, work, **options):
    return fake_tuner(clock, **options).tune(work)


def failures(tuned):
    return {tuned.configs[m.fingerprint]: m.failure.kind for m in tuned.measurements if m.failure is not None}


class TestCompile:
    def test_candidates_run_while_others_are_still_compiled(self):
        clock, ran, log = FakeClock(), threading.Event(), []

        def compile_one(config):
            if config == "late":
                assert ran.wait(HANG_S), "nothing ran while this one was compiling"
            log.append(config)

        costs = {name: lambda: ran.set() or 0.1 for name in ("early", "late")}
        work, _ = job(clock, costs, heuristic="early", compile=compile_one)
        tuned = tuned_by(clock, work, compile_threads=1)
        assert log == ["early", "late"]
        assert failures(tuned) == {}
        assert all(m.compile_s is not None for m in tuned.measurements)

    def test_several_are_compiled_at_once(self):
        clock, together = FakeClock(), threading.Barrier(4, timeout=HANG_S)
        work, _ = job(clock, dict.fromkeys(range(4), 0.1), compile=lambda _: together.wait())
        assert failures(tuned_by(clock, work, compile_threads=4)) == {}

    def test_candidates_with_a_reason_against_them_are_left_out_and_not_waited_for(self):
        clock, ran_good, asked = FakeClock(), threading.Event(), threading.Event()

        def compile_one(config):
            if config == "hopeless":  # until the tuner has gone on without it
                assert ran_good.wait(HANG_S)
                assert asked.wait(HANG_S)

        def reason_against(config):
            if config != "hopeless" or not ran_good.is_set():
                return None
            asked.set()
            return "it spills"

        costs = {"hopeless": 0.01, "good": lambda: ran_good.set() or 0.1, "slow": 0.3}
        work, ran = job(clock, costs, compile=compile_one)
        setup = work.setup._replace(
            reason_against=reason_against, order=Order(priority=lambda name: {"hopeless": 2, "good": 1}.get(name, 0))
        )
        tuned = tuned_by(clock, work._replace(setup=setup), compile_threads=2)
        assert tuned.config == "good"
        assert "hopeless" not in ran
        assert {tuned.configs[name]: reason for name, reason in tuned.left_out.items()} == {"hopeless": "it spills"}
        assert tuned.complete

    def test_a_candidate_whose_compilation_says_that_it_cannot_win_is_left_out(self):
        def compile_one(config):
            if config == "hopeless":
                raise LeftOut("it would spill")

        clock = FakeClock()
        work, ran = job(clock, {"hopeless": 0.01, "good": 0.1}, compile=compile_one)
        tuned = tuned_by(clock, work)
        assert tuned.config == "good"
        assert "hopeless" not in ran
        assert {tuned.configs[name]: reason for name, reason in tuned.left_out.items()} == {
            "hopeless": "it would spill"
        }
        assert failures(tuned) == {}
        assert tuned.complete

    def test_in_memory_programs_are_all_compiled_before_a_worker_is_forked(self):
        log, steps = [], []
        work, _ = job(FakeClock(), dict.fromkeys("abc", 0.1), compile=log.append, isolate=True, on_step=steps.append)
        tb.Tuner().tune(work)
        assert sorted(log) == ["a", "b", "c"]
        assert [step.doing for step in steps[:4]] == ["compiling"] * 3 + ["trying"]

    def test_a_worker_runs_programs_compiled_into_files_while_others_compile(self, tmp_path):
        def compile_one(config):
            path = tmp_path / config
            path.write_text(config)
            return path

        def run(config):
            return (tmp_path / config).read_text

        work, _ = job(FakeClock(), dict.fromkeys("abc", 0.1), compile=compile_one, isolate=True)
        steps = []
        tuned = tb.Tuner().tune(work._replace(parts=[Part(run)], on_step=steps.append))
        assert failures(tuned) == {}
        assert "compiling" not in {step.doing for step in steps}

    def test_candidates_that_compile_to_the_same_program_are_measured_once_and_tied(self):
        clock = FakeClock()
        work, ran = job(clock, {"a": 0.2, "b": 0.1, "c": 0.1}, compile=lambda c: b"slow" if c == "a" else b"fast")
        tuned = tuned_by(clock, work)
        assert len(set(ran) & {"b", "c"}) == 1
        assert tuned.config == "b", "of two names for one program the first by rule, whichever was run"
        assert {tuned.configs[r.measurement.fingerprint] for r in tuned.verdict.tied} == {"b", "c"}

    def test_a_new_candidate_that_compiles_to_a_known_program_is_not_run(self):
        clock = FakeClock()
        work, _ = job(clock, {"a": 0.2, "b": 0.1}, compile=str.encode)
        known = tuned_by(clock, work).measurements
        again, ran = job(clock, {"a": 0.2, "b": 0.1, "B": 0.1}, known=known, compile=lambda c: c.lower().encode())
        assert tuned_by(clock, again).complete
        assert "B" not in ran

    def test_twins_of_a_candidate_that_fails_fail_with_it(self):
        clock = FakeClock()
        costs = {"a": OSError("no"), "b": OSError("no"), "ok": 0.1}
        work, ran = job(clock, costs, compile=lambda c: b"bad" if c in "ab" else b"good")
        tuned = tuned_by(clock, work)
        assert failures(tuned) == {"a": "launch", "b": "launch"}
        assert len([name for name in ran if name in "ab"]) == 1

    def test_configurations_that_differ_at_launch_are_compiled_once_and_measured_each(self):
        compiled = []

        def compile_one(config):
            compiled.append(config.tile)
            return f"tile {config.tile}".encode()

        space = tb.Space(tile=[1, 2], threads=[32, 64, 128]).at_launch("threads")
        clock = FakeClock()
        costs = {config: 0.1 * config.tile + abs(config.threads - 64) / 1000 for config in space}
        work, ran = job(clock, costs, compile=compile_one, launch_axes=space.launch_axes)
        tuned = tuned_by(clock, work)
        assert tuned.config == tb.Config(tile=1, threads=64), "not that of the one that was compiled first"
        assert sorted(compiled) == [1, 2]
        assert set(ran) == set(space)

    def test_a_compile_error_fails_all_candidates_that_share_the_program(self):
        compiled = []

        def compile_one(config):
            compiled.append(config.tile)
            if config.tile == 2:
                raise tb.CompileError("too large")

        space = tb.Space(tile=[1, 2], threads=[32, 64]).at_launch("threads")
        clock = FakeClock()
        work, _ = job(clock, dict.fromkeys(space, 0.1), compile=compile_one, launch_axes=space.launch_axes)
        assert failures(tuned_by(clock, work)) == {c: "compile" for c in space if c.tile == 2}
        assert sorted(compiled) == [1, 2]

    def test_the_space_of_a_kernel_names_the_axes_set_at_launch(self):
        compiled, ran = [], set()
        space = tb.Space(tile=[1, 2, 4], threads=[32, 64]).at_launch("threads")

        @tb.tunable(space=space, name="launched", store=False, compile=lambda config: compiled.append(config.tile))
        def kernel(x, *, config):
            ran.add(config)
            return x

        tb.tune(kernel, ONES, progress=False)
        assert (sorted(compiled), ran) == ([1, 2, 4], set(space))
        compiled.clear()
        tb.tune(kernel, np.ones(8), progress=False, strategy="local")
        assert sorted(compiled) == [1, 2, 4]

    def test_a_compiler_that_times_out_costs_one_candidate(self):
        def compile_one(config):
            if config == "endless":
                raise TimeoutError("the compiler took too long")

        clock = FakeClock()
        work, _ = job(clock, {"endless": 0.1, "ok": 0.2}, compile=compile_one)
        assert failures(tuned_by(clock, work)) == {"endless": "timeout"}


class TestCheck:
    def tunable(self, outputs, **options):
        @tb.tunable(space=[{"way": way} for way in outputs], name="checked", store=False, **options)
        def kernel(x, *, config):
            return outputs[config.way](x)

        return tb.tune(kernel, ONES, progress=False)

    def lost(self, outputs, **options):
        tuned = self.tunable(outputs, **options)
        return {tuned.configs[m.fingerprint].way: m.failure.kind for m in tuned.measurements if m.failure is not None}

    WAYS: ClassVar = {
        "same": lambda x: x * 2,
        "close": lambda x: x * (2 + 1e-12),
        "off": lambda x: x * 2.5,
        "nan": lambda x: x * np.nan,
        "short": lambda x: x[:2],
    }

    def test_without_a_reference_outputs_are_compared_with_the_heuristics(self):
        lost = self.lost(self.WAYS, heuristic={"way": "same"})
        assert lost == {"off": "wrong-result", "nan": "nan", "short": "wrong-result"}

    def test_the_message_names_the_option_for_outputs_that_may_differ(self):
        tuned = self.tunable(self.WAYS, heuristic={"way": "same"})
        messages = {m.failure.message for m in tuned.measurements if m.failure is not None}
        assert all("check=False" in message for message in messages)

    def test_a_reference_goes_before_the_heuristic(self):
        assert set(self.lost(self.WAYS, heuristic={"way": "off"}, reference=lambda x: x * 2)) == {"off", "nan", "short"}

    def test_exact_means_equal_bits(self):
        lost = self.lost(self.WAYS, reference=lambda x: x * 2, check="exact")
        assert set(lost) == {"close", "off", "nan", "short"}
        zeros = {"plus": lambda x: x * 0.0, "minus": lambda x: x * -0.0, "single": lambda x: (x * 0).astype("f4")}
        assert set(self.lost(zeros, heuristic={"way": "plus"}, check="exact")) == {"minus", "single"}

    @pytest.mark.parametrize("tolerance", [0.3, {"float64": 0.3}])
    def test_a_tolerance_of_ones_own(self, tolerance):
        assert set(self.lost(self.WAYS, heuristic={"way": "same"}, tolerance=tolerance)) == {"nan", "short"}

    def test_a_comparison_of_ones_own(self):
        lost = self.lost(self.WAYS, heuristic={"way": "same"}, check=lambda output, _: len(output) == 4)
        assert set(lost) == {"short"}

    @pytest.mark.parametrize("returned", [None, True, np.True_, np.array(True), np.array([1.0]).max() > 0])
    def test_a_check_says_that_an_output_is_right(self, returned):
        assert self.lost({"a": np.copy, "b": np.copy}, reference=np.copy, check=lambda *_: returned) == {}

    @pytest.mark.parametrize("model", [{"heuristic": {"way": "same"}}, {"reference": lambda x: x * 2}])
    @pytest.mark.parametrize(
        ("said", "reason"),
        [
            (False, "the check rejected the output"),
            (np.False_, "the check rejected the output"),
            (np.array(False), "the check rejected the output"),
            ("too far off", "too far off"),
        ],
    )
    def test_a_check_says_that_an_output_is_wrong(self, said, reason, model):
        ways = {"same": lambda x: x * 2, "off": lambda x: x * 3}
        tuned = self.tunable(ways, check=lambda output, _: output[0] == 2 or said, **model)
        (failure,) = [m.failure for m in tuned.measurements if m.failure is not None]
        assert failure.kind == "wrong-result"
        assert failure.message.startswith(f"{reason}, unlike the ")

    def test_an_assertion_of_a_check_that_does_not_hold_is_a_wrong_output_with_its_first_line(self):
        tuned = self.tunable(self.WAYS, reference=lambda x: x * 2, check=np.testing.assert_allclose)
        lost = {tuned.configs[m.fingerprint].way: m.failure for m in tuned.measurements if m.failure is not None}
        kinds = {way: failure.kind for way, failure in lost.items()}
        assert kinds == dict.fromkeys(("off", "nan", "short"), "wrong-result")
        assert lost["off"].message == "Not equal to tolerance rtol=1e-07, atol=0, unlike the reference"

        def bare(output, right):
            if output.shape != right.shape:
                raise AssertionError  # as `assert` does, which pytest would give a text

        tuned = self.tunable(self.WAYS, heuristic={"way": "same"}, check=bare)
        (failure,) = [m.failure for m in tuned.measurements if m.failure is not None]
        assert failure.message.startswith("the check rejected the output, unlike the heuristic's")

    @pytest.mark.parametrize("isolate", ["never", "always"])
    @pytest.mark.parametrize("model", [{"heuristic": {"way": "same"}}, {"reference": lambda x: x * 2}, {}])
    @pytest.mark.parametrize(
        ("returned", "named"),
        [
            (0.0, "float (0.0)"),
            (1, "int (1)"),
            (np.float64(0.5), "float64 (np.float64(0.5))"),
            ("", "str ('')"),
            (np.array([True, True]), "ndarray"),
            ({}, "dict"),
        ],
        ids=str,
    )
    def test_a_check_that_returns_anything_else_is_an_error_that_names_it(self, returned, named, model, isolate):
        policy = tb.AutotunePolicy(isolate=isolate)
        with pytest.raises(tb.DefinitionError) as failed:
            self.tunable(self.WAYS, check=lambda *_: returned, policy=policy, **model)
        assert str(failed.value) == (
            f"check= of 'checked' returned a value of type {named}; return True for a right output, and False or a "
            "text with the reason for a wrong one"
        )

    @pytest.mark.parametrize("isolate", ["never", "always"])
    def test_an_error_of_a_check_is_not_a_candidates(self, tmp_path, isolate):
        @tb.tunable(
            space=tb.Space(way=[1, 2]),
            heuristic={"way": 1},
            name="checked",
            store=tmp_path,
            check=lambda output, right: output[0] == right,
            policy=tb.AutotunePolicy(isolate=isolate),
        )
        def kernel(x, *, config):
            return 1

        for ask in (kernel, partial(tb.tune, kernel)):
            with pytest.raises(tb.DefinitionError, match="check= of 'checked' raised TypeError: 'int' object is not"):
                ask(ONES)
        assert kernel.explain(ONES).record is None, "an error of the check says nothing about candidates"

    def test_a_search_ends_with_an_error_of_the_check_too(self):
        with pytest.raises(tb.DefinitionError, match="check= of 'checked' raised ValueError: mine"):
            self.tunable(self.WAYS, heuristic={"way": "same"}, check=_raise_value_error, strategy="random")

    def test_nothing_is_checked_if_so_asked(self):
        assert self.lost(self.WAYS, heuristic={"way": "same"}, check=False) == {}

    def test_a_failing_heuristic_is_not_the_reference_output(self):
        def broken(x):
            raise OSError("no")

        assert self.lost({"bad": broken, "a": lambda x: x, "b": lambda x: x + 1}, heuristic={"way": "bad"}) == {
            "bad": "launch"
        }

    def test_results_written_to_an_argument_are_compared(self):
        @tb.tunable(space=tb.Space(factor=[2, 3]), heuristic={"factor": 2}, name="writes", store=False)
        def scale(x, out, *, config):
            np.multiply(x, config.factor, out=out)

        tuned = tb.tune(scale, ONES, np.zeros(4), progress=False)
        assert tuned.config.factor == 2
        assert [m.failure.kind for m in tuned.measurements if m.failure is not None] == ["wrong-result"]

    def test_in_a_worker_the_model_survives_a_crash(self):
        import os

        ways = {"same": lambda x: x * 2, "dies": lambda _: os._exit(3), "off": lambda x: x}
        isolated = tb.AutotunePolicy(isolate="always")
        assert self.lost(ways, heuristic={"way": "same"}, policy=isolated) == {"dies": "crash", "off": "wrong-result"}

    @pytest.mark.parametrize("options", [{"check": "loose"}, {"check": False, "tolerance": 0.1}])
    def test_options_that_make_no_sense_are_refused(self, options):
        with pytest.raises(tb.DefinitionError, match="check"):
            self.tunable({"a": lambda x: x}, **options)

    def test_objects_that_cannot_be_compared_are_compared_by_class(self):
        ways = {"a": lambda _: object(), "b": lambda _: object(), "c": lambda _: 1}
        assert self.lost(ways, heuristic={"way": "a"}) == {"c": "wrong-result"}


def _raise_value_error(*_):
    raise ValueError("mine")


class TestPrune:
    def tried(self, **options):
        @tb.tunable(space=tb.Space(n=[1, 2, 3, 4, 5, 6, 7, 8]), name="pruned", store=False, **options)
        def kernel(x, *, config):
            return x

        return {dict(config)["n"] for config, _ in tb.tune(kernel, 10, progress=False).ranking}

    def test_a_hook_gets_the_candidates_and_the_arguments(self):
        assert self.tried(prune=lambda configs, x: [c for c in configs if c.n * 2 > x]) == {6, 7, 8}

    @pytest.mark.parametrize(("keep", "left"), [(2, {5, 6}), (0.25, {5, 6}), (100, set(range(1, 9)))])
    def test_a_cost_model_keeps_the_cheapest(self, keep, left):
        assert self.tried(cost=lambda c, x: abs(c.n * 2 - x - 1), keep=keep) == left

    def test_a_nan_cost_is_the_last_to_be_kept(self):
        assert self.tried(cost=lambda c, _: float("nan") if c.n < 8 else 1.0, keep=1) == {8}

    @pytest.mark.promise("heuristic-wins-ties")
    def test_the_heuristic_races_though_it_was_pruned(self):
        assert self.tried(prune=lambda configs, _: configs[:1], heuristic={"n": 8}) == {1, 8}

    def test_equal_copies_of_candidates_and_generators_are_as_good(self):
        assert self.tried(prune=lambda configs, _: ({"n": c.n} for c in configs[:2])) == {1, 2}

    def test_pruning_everything_is_an_error_that_says_so(self):
        with pytest.raises(tb.TuningFailed, match="pruned: prune left none of 8"):
            self.tried(prune=lambda *_: [])

    @pytest.mark.parametrize(
        ("returned", "said"),
        [
            (lambda _: None, "returned None"),
            (lambda _: 3, "returned 3"),
            (lambda configs: configs[0], "returned 'n', which is not one of the candidates"),
            (lambda _: [{"n": 77}], "returned {'n': 77}, which is not one of the candidates"),
            (lambda _: [True] * 8, "returned True, which is not one of the candidates"),
        ],
    )
    def test_a_hook_that_returns_anything_but_candidates_is_an_error_that_says_what_to_return(self, returned, said):
        with pytest.raises(tb.DefinitionError) as failed:
            self.tried(prune=lambda configs, _x: returned(configs))
        assert str(failed.value) == (
            f"prune= of 'pruned' {said}; return the candidates to try, as [config for config in configs if ...]"
        )

    @pytest.mark.parametrize("name", ["prune", "cost"])
    def test_a_hook_that_raises_is_an_error_that_names_the_kernel_the_option_and_the_call(self, name):
        first = {"prune": "configs", "cost": "config"}[name]
        options = {"keep": 2} if name == "cost" else {}
        said = rf"{name}= of 'pruned' raised TypeError: .*takes 1 positional .*; it is called with \({first}, x\)"
        with pytest.raises(tb.DefinitionError, match=said) as failed:
            self.tried(**{name: lambda given: given}, **options)
        assert isinstance(failed.value.__cause__, TypeError)
        with pytest.raises(tb.DefinitionError, match=f"{name}= of 'pruned' raised ValueError: mine"):
            self.tried(**{name: _raise_value_error}, **options)

    def test_a_generator_that_raises_is_named_too(self):
        def prune(configs, _x):
            yield configs[0]
            raise KeyError("mine")

        with pytest.raises(tb.DefinitionError, match="prune= of 'pruned' raised KeyError: 'mine'"):
            self.tried(prune=prune)

    def test_a_cost_that_is_no_number_is_an_error_with_its_candidate(self):
        with pytest.raises(tb.DefinitionError, match=r"cost= of 'pruned' returned None for Config\(n=1\); return"):
            self.tried(cost=lambda *_: None, keep=1)

    def test_the_method_of_a_kernel_is_named_likewise(self):
        class Odd(PretendKernel):
            def prune_cfgs(self, inv, cfgs):
                return [Tiles(99)]

        kernel = Odd(FakeClock(), {Tiles(1): 0.1, Tiles(2): 0.2}, op_id="odd")
        chain = tb.ConfigSelectorChain(tb.ConfigCache(), tuner=fake_tuner(kernel.clock))
        with pytest.raises(tb.DefinitionError, match=r"prune_cfgs of 'odd' returned Tiles\(m=99, n=32\), which is not"):
            chain.tune(invocation(kernel, 1), kernel)

    @pytest.mark.parametrize("options", [{"keep": 3}, {"cost": lambda *_: 1.0}, {"cost": lambda *_: 1.0, "keep": 0}])
    def test_half_of_a_model_is_refused(self, options):
        with pytest.raises(tb.DefinitionError, match="keep="):
            self.tried(**options)


class TestGroups:
    def run(self, costs, groups, **options):
        clock = FakeClock()
        order = Order(group=lambda c: groups.get(c, 0), priority=options.pop("priority", lambda _: 0))
        work, ran = job(clock, costs, order=order, **options)
        return tuned_by(clock, work), list(dict.fromkeys(ran))

    def test_a_group_is_tried_only_if_the_one_before_gave_nothing_valid(self):
        costs = {"a": 0.3, "b": 0.2, "c": 0.1}
        tuned, ran = self.run(costs, {"c": 1})
        assert (tuned.config, set(ran), tuned.complete) == ("b", {"a", "b"}, True)

    def test_and_then_it_is(self):
        costs = {"a": OSError("no"), "b": 0.2, "c": 0.1}
        tuned, ran = self.run(costs, {"b": 1, "c": 2})
        assert (tuned.config, ran) == ("b", ["a", "b"])

    def test_the_heuristic_races_whatever_its_group(self):
        tuned, ran = self.run({"a": 0.2, "b": 0.1, "c": 0.05}, {"b": 1, "c": 1}, heuristic="b")
        assert (tuned.config, ran) == ("b", ["b", "a"])

    def test_the_highest_priority_goes_first(self):
        costs = dict.fromkeys(range(5), 0.1)
        tuned, ran = self.run(costs, {}, priority=lambda c: c, budget=Budget(trials=2))
        assert (set(ran), tuned.complete) == ({4, 3}, False)


class TestBounds:
    def test_a_number_of_trials_ends_a_tuning_and_the_next_goes_on(self):
        clock = FakeClock()
        costs = {i: 0.2 - i * 0.01 for i in range(10)}
        work, ran = job(clock, costs, budget=Budget(trials=4))
        first = tuned_by(clock, work)
        assert (first.ran, len(set(ran)), first.complete) == (4, 4, False)
        again, ran_again = job(clock, costs, known=first.measurements, unfinished=True)
        second = tuned_by(clock, again)
        assert (second.config, second.complete) == (9, True)
        dropped = {first.configs[m.fingerprint] for m in first.measurements if m.dropped}
        assert dropped.isdisjoint(ran_again)

    def test_at_the_roofline_nothing_more_is_tried(self):
        clock = FakeClock()
        costs = dict.fromkeys(range(100), 0.1) | {"best": 0.010}
        work, ran = job(clock, costs, heuristic="best", enough_s=0.011)
        tuned = tuned_by(clock, work)
        assert (tuned.config, set(ran), tuned.complete) == ("best", {"best"}, True)

    def test_a_race_ends_when_one_is_good_enough(self):
        clock = FakeClock()
        slow_first = iter([0.1])
        costs = {"good": lambda: next(slow_first, 0.010), "other": 0.012, "slow": 0.1}
        work, ran = job(clock, costs, enough_s=0.0105)
        assert tuned_by(clock, work).config == "good"
        assert len(ran) < 30

    def test_flops_and_bytes_bound_a_call_by_the_devices_peak(self):
        peak = tb.Peak(flops_per_s=1e9, bytes_per_s=1e8)
        options = {"flops": lambda x: 2 * x.size, "bytes": 4, "peak": peak}

        @tb.tunable(space=tb.Space(n=[1]), name="bounded", store=False, **options)
        def kernel(x, *, config):
            return x

        inv = kernel.kernel.invocation((np.ones(450),))
        assert kernel.kernel.enough_s(inv) == pytest.approx(1e-6)

    def test_a_peak_of_another_kind_is_refused(self):
        with pytest.raises(tb.DefinitionError, match=r"tunebook\.Peak"):
            tb.tunable(space=[{"n": 1}], flops=1, peak=1e12)(lambda *, config: None)


class TestObjective:
    # The steady one is slower in most runs, and far faster in the worst.
    STEADY, SPIKY = [1.0] * 20, [0.8] * 18 + [5.0] * 2

    @pytest.mark.parametrize(
        ("objective", "best"),
        [("typical", "spiky"), ("median", "spiky"), ("mean", "steady"), ("p95", "steady"), (max, "steady")],
    )
    def test_objectives_disagree_where_they_should(self, objective, best):
        value = objective_for(objective)
        assert min((value(self.STEADY), "steady"), (value(self.SPIKY), "spiky"))[1] == best

    def test_an_unknown_objective_is_refused_with_the_nearest_name(self):
        with pytest.raises(tb.DefinitionError, match="'p95'"):
            tb.tunable(space=[{"n": 1}], objective="p59")(lambda *, config: None)

    def test_a_nan_from_ones_own_objective_never_wins(self):
        assert objective_for(lambda _: float("nan"))([1.0]) == float("inf")

    @pytest.mark.promise("measurements-kept")
    def test_another_objective_decides_anew_and_measures_nothing(self, tmp_path):
        ran, clock = [], FakeClock()

        def make(objective):
            # By the fake clock: a tuning that the machine disturbed would be measured again.
            options = {"name": "objected", "store": tmp_path, "tuner": fake_tuner(clock)}

            @tb.tunable(space=tb.Space(n=[1, 2]), objective=objective, **options)
            def kernel(x, *, config):
                ran.append(config)
                clock.spend(config.n * 1e-3)
                return x

            return kernel

        tb.tune(make("typical"), 1, progress=False)
        ran.clear()
        kernel = make("p95")
        assert "other candidates" in str(kernel.explain(1))
        tb.tune(kernel, 1, progress=False)
        assert ran == []


class TestTogether:
    def test_one_configuration_is_found_for_several_problems_by_weight(self):
        clock = FakeClock()
        costs = {"a": (0.1, 0.9), "b": (0.4, 0.4), "c": (0.2, OSError("no"))}

        def make_for(which):
            def make(config):
                def run():
                    cost = costs[config][which]
                    if isinstance(cost, Exception):
                        raise cost
                    clock.spend(cost)

                return run

            return make

        def best(weights):
            work, _ = job(clock, costs)
            parts = [Part(make_for(which), weight=weight) for which, weight in enumerate(weights)]
            tuned = tuned_by(clock, work._replace(parts=parts))
            assert failures(tuned) == {"c": "launch"}
            return tuned.config, dict(tuned.ranking)

        config, times = best([1.0, 1.0])
        assert (config, times["a"]) == ("b", pytest.approx(0.5))
        assert best([9.0, 1.0])[0] == "a"

    def test_each_problem_remembers_it_and_so_does_the_next_process(self, tmp_path):
        def make(events):
            def note(event, **_):
                events.append(event)

            @tb.tunable(space=tb.Space(n=[1, 2]), name="together", store=tmp_path, on_event=note)
            def kernel(x, *, config):
                return x * 2

            return kernel

        calls = [(np.ones(n),) for n in (2, 3, 3)]
        tuned = tb.tune_together(make([]), calls, weights=[1, 2, 3], progress=False)
        events = []
        kernel = make(events)
        assert all(kernel.explain(*call).selection.config == tuned.config for call in calls)
        kernel(np.ones(3))
        assert events == ["cache_hit"]
        assert kernel(np.ones(4)) is not None
        assert "autotune_start" in events, "another problem is another matter"

    @pytest.mark.parametrize("weights", [[1], [1, 0], [1, -1], [1, float("nan")], [1, float("inf")]])
    def test_weights_that_are_none_are_refused(self, weights):
        kernel = tb.tunable(space=[{"n": 1}], store=False)(lambda x, *, config: x)
        with pytest.raises(tb.DefinitionError, match="for each of the 2 calls"):
            tb.tune_together(kernel, [(1,), (2,)], weights=weights)
        with pytest.raises(tb.DefinitionError, match="at least one"):
            tb.tune_together(kernel, [])


class TestWatching:
    def test_steps_count_failures_by_kind_and_guess_the_time_left(self):
        clock, steps = FakeClock(), []
        costs = dict.fromkeys(range(4), 0.1) | {"bad": OSError("no"), "big": MemoryError("no")}
        work, _ = job(clock, costs, on_step=steps.append)
        tuned_by(clock, work)
        trying = [step for step in steps if step.doing == "trying"]
        assert [(step.done, step.total) for step in trying] == [(n, 6) for n in range(1, 7)]
        assert dict(steps[-1].failures) == {"launch": 1, "memory": 1}
        assert steps[-1].left_s == 0
        assert all(step.left_s > 0 for step in trying[2:-1])

    def test_the_time_left_is_within_the_budget(self):
        clock, steps = FakeClock(), []
        work, _ = job(clock, dict.fromkeys(range(100), 0.1), budget=Budget(2.0), on_step=steps.append)
        tuned_by(clock, work)
        trying = [step.left_s for step in steps if step.doing == "trying"]
        assert trying
        assert all(left_s <= 2.0 for left_s in trying)

    def test_a_race_guesses_no_time_left_before_its_end(self):
        clock, steps = FakeClock(), []
        work, _ = job(clock, dict.fromkeys(range(4), 0.1), on_step=steps.append)
        tuned_by(clock, work)
        racing = [step.left_s for step in steps if step.doing == "racing"]
        assert racing == [None] * (len(racing) - 1) + [0.0]
        assert len(racing) > 1

    def test_listeners_are_told_the_same_through_events(self):
        told = []

        @tb.tunable(space=tb.Space(n=[1, 2]), name="told", store=False, on_event=lambda e, **d: told.append((e, d)))
        def kernel(x, *, config):
            return x

        tb.tune(kernel, 1, progress=False)
        assert told[0][0] == "autotune_start"
        steps = [data["step"] for event, data in told if event == "autotune_progress"]
        assert (steps[-1].doing, steps[-1].done, steps[-1].total) == ("racing", 100, 100)
        assert told[-1][0] == "autotune_finish"


class TestMutates:
    def test_declared_arguments_and_all_others_are_put_back(self):
        seen = []

        @tb.tunable(space=tb.Space(n=[1, 2]), mutates=("out",), name="declares", store=False, check=False)
        def kernel(x, out, scratch, *, config):
            seen.append(float(out[0]))
            out += 1
            scratch += 1

        out, scratch = np.zeros(2), np.zeros(2)
        tb.tune(kernel, ONES, out, scratch, progress=False)
        assert set(seen) == {0.0}
        assert out[0] == 0.0
        assert scratch[0] == 0.0

    def test_a_typo_in_mutates_is_an_error_where_the_kernel_is_defined(self):
        with pytest.raises(tb.DefinitionError, match="'outt'"):
            tb.tunable(space=[{"n": 1}], mutates=("outt",))(lambda out, *, config: None)
