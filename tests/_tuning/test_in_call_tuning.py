"""Tuning by the user's own calls: `AutotunePolicy(cache_miss_fallback="incremental")`."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import FakeClock, PretendKernel, Tiles, fake_tuner, invocation
from limits import HANG_S

import tunebook as tb
from tunebook._measure.stopwatch import Stopwatch
from tunebook._selection.selector import local_tiers
from tunebook._statistics.race import typical_s
from tunebook._tuning.in_call_session import InCallRules
from tunebook._tuning.job import Tuned
from tunebook.testing import Landscape

INCREMENTAL = tb.AutotunePolicy(cache_miss_fallback="incremental", incremental_slowdown=1.5)


# ------------------------------------------------------------------------------------------------ the state machine


def explorer(names, heuristic, slowdown=1.5):
    return InCallRules(names, heuristic, slowdown=slowdown, rng=random.Random(0))


def drive(explorer, heuristic, run, after=lambda name: None):
    """Make calls until it has finished; `run` returns the seconds of a configuration."""
    while not explorer.finished:
        name = explorer.next()
        seconds = run(name or heuristic)
        if name is None:
            explorer.served(seconds if explorer.times_served else None)
        else:
            explorer.tried(name, call_s=seconds or 0.0, sample_s=seconds)
        after(name)
        assert explorer.calls < 10**5


def best_of(explorer):
    return min(explorer.finalists, key=lambda name: typical_s(explorer.samples_s(name)))


@given(
    costs=st.lists(st.floats(1.0, 20.0), min_size=2, max_size=12, unique=True),
    slowdown=st.floats(1.1, 4.0),
    first_run=st.floats(1.0, 3.0),
)
@settings(max_examples=40, deadline=None)
def test_calls_keep_to_the_slowdown_but_for_one_surprise_and_find_the_best(costs, slowdown, first_run):
    names = {str(index): cost for index, cost in enumerate(costs)}
    usual_s, seen, spent_s = names["0"], Counter(), [0.0]

    def run(name):
        seen[name] += 1
        seconds = names[name] * (first_run if seen[name] == 1 and name != "0" else 1.0)
        spent_s[0] += seconds
        return seconds

    def keeps_to_it(_name):
        surprise_s = first_run * max(costs)
        assert spent_s[0] <= slowdown * seen.total() * usual_s + surprise_s + 1e-6

    machine = explorer(names, "0", slowdown)
    drive(machine, "0", run, keeps_to_it)
    assert names[best_of(machine)] == min(costs)


@pytest.mark.parametrize("cv", [0.01, 0.05, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_the_choice_is_within_two_percent_of_the_best_under_noise(cv, seed):
    land = Landscape(Landscape(64, seed=3).costs, seed=seed, cv=cv, spikes=0.1, drift=0.05, first_run=2.0)
    guess = sorted(land.configs, key=land.true_s)[12]

    def run(name):
        before = land.elapsed_s
        land.make_fn(int(name))()
        return land.elapsed_s - before

    machine = explorer([str(config) for config in land.configs], str(guess))
    drive(machine, str(guess), run)
    assert land.regret(int(best_of(machine))) <= 0.02
    assert machine.calls <= 1500


def test_nothing_is_tried_before_the_usual_time_of_a_call_is_known():
    machine = explorer(["a", "b"], "a")
    for _ in range(6):
        assert machine.next() is None
        assert machine.times_served
        machine.served(1.0)
    assert not machine.times_served
    assert machine.next() is not None


def test_the_first_call_of_the_heuristic_is_not_its_usual_time():
    machine = explorer(["a", "b"], "a")
    for seconds in (100.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        machine.served(seconds)
    assert machine.usual_s == 1.0


def test_a_hopeless_candidate_runs_twice_and_a_failed_one_once():
    costs, runs = {"guess": 1.0, "hopeless": 9.0, "broken": None, "best": 0.5}, Counter()

    def run(name):
        runs[name] += 1
        return costs[name]

    machine = explorer(costs, "guess")
    drive(machine, "guess", run)
    assert best_of(machine) == "best"
    assert (runs["hopeless"], runs["broken"]) == (2, 1)


@pytest.mark.parametrize("bad", [float("nan"), 0.0, -1.0, float("inf")])
def test_an_invalid_time_never_wins(bad):
    machine = explorer(["guess", "odd"], "guess")
    drive(machine, "guess", lambda name: 1.0 if name == "guess" else bad)
    assert best_of(machine) == "guess"
    assert list(machine.samples_s("odd")) == []


def test_an_overdrawn_account_is_made_up_for_by_the_heuristic():
    machine = explorer(["guess", "slow"], "guess", slowdown=1.5)
    trace = []
    drive(machine, "guess", lambda name: 1.0 if name == "guess" else 21.0, trace.append)
    first = trace.index("slow")
    again = trace.index("slow", first + 1)
    assert set(trace[first + 1 : again]) <= {None, "guess"}
    assert again - first > 20 / 0.5 - 10, "half a call is saved by each"


# ------------------------------------------------------------------------------------------------------ real calls

COSTS = {1: 2e-3, 2: 1e-3, 3: 4e-3, 4: 1.2e-3, 5: 30e-3}


class Calls:
    """A tunable function whose runs move a fake clock, and what was seen of it."""

    def __init__(self, costs=COSTS, body=None, *, policy=INCREMENTAL, store=False, **options):
        self.clock, self.runs, self.events = FakeClock(), [], []

        def body_or(x, b):
            return float(x.sum()) if body is None else body(x, b)

        @tb.tunable(
            space=[{"b": b} for b in costs],
            heuristic={"b": 1},
            name="calls",
            store=store,
            policy=policy,
            tuner=fake_tuner(self.clock),
            on_event=lambda event, **data: self.events.append((event, data)),
            **{"check": False, **options},
        )
        def function(x, *, config):
            self.runs.append(config.b)
            self.clock.spend(costs[config.b])
            return body_or(x, config.b)

        self.function = function

    def until_found(self, *args, most=2000):
        """Call until the result is in, and return how often."""
        for calls in range(1, most):
            self.function(*args)
            if not self.function.selector.pending:
                return calls
            if all(session.is_finished for session in self.function.selector.pending):
                assert tb.wait_for_background(HANG_S)
        raise AssertionError(f"nothing was found in {most} calls")

    def names(self):
        return [event for event, _ in self.events]


X = np.ones(4)


def test_each_call_runs_one_candidate_until_the_best_is_found(tmp_path):
    calls = Calls(store=tmp_path)
    before = tb.epoch()
    made = calls.until_found(X)
    assert len(calls.runs) == made
    assert set(calls.runs) == set(COSTS)
    assert calls.function(X) == 4.0
    assert calls.runs[-1] == 2
    assert tb.epoch() == before + 1
    told = [event for event in calls.names() if not event.startswith("autotune")]
    assert told == ["heuristics"] * (made - 1) + ["cache_hit"] * 2
    assert calls.names().count("autotune_start") == calls.names().count("autotune_finish") == 1
    again = Calls(store=tmp_path)
    again.function(X)
    assert again.names() == ["cache_hit"], "another process finds it in the book"


def test_no_candidate_runs_while_tuning_is_paused():
    calls = Calls()
    pause = tb.pause_tuning()
    try:
        for _ in range(50):
            calls.function(X)
    finally:
        pause.resume()
    assert set(calls.runs) == {1}
    calls.until_found(X)
    assert calls.runs[-1] == 2


@pytest.mark.parametrize("slowdown", [1.1, 1.5, 3.0])
def test_the_calls_together_take_no_longer_than_stated(slowdown):
    calls = Calls(policy=INCREMENTAL.updated({"incremental_slowdown": slowdown}))
    start = calls.clock.seconds
    made = calls.until_found(X)
    surprise_s = max(COSTS.values())
    assert calls.clock.seconds - start <= slowdown * made * COSTS[1] + surprise_s


def test_explain_says_how_far_it_is():
    calls = Calls()
    assert "would try one candidate per call" in str(calls.function.explain(X))
    for _ in range(12):
        calls.function(X)
    assert "trying one candidate per call: after 12 calls" in str(calls.function.explain(X))
    before = list(calls.runs)
    calls.function.explain(X)
    assert calls.runs == before


def test_memoised_explorations_do_not_ask_the_tiers_again():
    asked = []

    def guess(x):
        asked.append(1)
        return {"b": 1}

    calls = Calls()
    calls.function.kernel._heuristic = guess
    calls.function(X)
    count = len(asked)
    for _ in range(9):
        calls.function(X)
    assert len(asked) == count


def test_a_wrong_candidate_is_noticed_by_the_reference_and_never_returned():
    calls = Calls(body=lambda x, b: float(x.sum()) + (b == 2), check=True, reference=lambda x: float(x.sum()))
    seen = set()
    for _ in range(400):
        seen.add(calls.function(X))
    assert tb.wait_for_background(HANG_S)
    assert seen == {4.0}
    assert calls.runs.count(2) == 1
    assert calls.function(X) == 4.0
    assert calls.runs[-1] == 4, "the best of those that are right"


def test_without_a_reference_a_candidate_is_compared_with_the_heuristic_on_its_first_run():
    calls = Calls(body=lambda x, b: float(x.sum()) + (b == 2), check=True)
    assert {calls.function(X) for _ in range(400)} == {4.0}
    assert tb.wait_for_background(HANG_S)
    calls.function(X)
    assert calls.runs[-1] == 4


def test_failures_go_into_the_book_with_their_reason(tmp_path):
    calls = Calls(body=lambda x, b: 1 / 0 if b == 3 else 4.0, store=tmp_path)
    calls.until_found(X)
    record = calls.function.selector.persistent.read(calls.function.problem(X))
    failed = [m for m in record.body.measurements if m.failure is not None]
    assert [m.failure.message for m in failed] == ["ZeroDivisionError: division by zero"]
    assert {m.policy for m in record.body.measurements} == {"host-clock/real-calls/forward"}


@pytest.mark.parametrize("check", [True, False])
def test_arguments_are_written_to_as_often_as_there_are_calls_though_candidates_fail_half_way(check):
    def increment(x, b):
        x[:2] += 1
        if b == 3:
            raise ValueError("half way")
        x[2:] += 1

    calls, mine = Calls(body=increment, check=check), np.zeros(4)
    for made in range(1, 300):
        calls.function(mine)
        assert mine.tolist() == [made] * 4
    assert calls.runs.count(3) == 1


def test_an_error_that_is_the_calls_own_is_raised_and_blamed_on_no_candidate():
    def picky(x, b):
        if np.isnan(x).any():
            raise ValueError("not a number")
        return 4.0

    calls, bad = Calls(body=picky), np.full(4, np.nan)
    for _ in range(200):
        calls.function(X)
        with pytest.raises(ValueError, match="not a number"):
            calls.function(bad)
    assert tb.wait_for_background(HANG_S)
    calls.function(X)
    assert calls.runs[-1] == 2


def test_an_interrupted_call_gives_its_turn_back():
    interrupt = [True]

    def body(x, b):
        if b == 2 and interrupt:
            interrupt.clear()
            raise KeyboardInterrupt
        return 4.0

    calls = Calls(body=body)

    def call_often():
        for _ in range(200):
            calls.function(X)

    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        call_often()
    calls.until_found(X)
    calls.function(X)
    assert calls.runs[-1] == 2


class Foreign:
    """An array of a library of which copies cannot be made."""

    shape, dtype, device = (3,), "float32", "cpu"

    def sum(self):
        return 3.0


def test_arrays_that_cannot_be_put_back_keep_the_heuristic_and_say_why():
    calls, mine = Calls(), Foreign()
    with pytest.warns(tb.TunebookWarning, match=r"a test_in_call_tuning.Foreign could not be put back"):
        assert {calls.function(mine) for _ in range(50)} == {3.0}
    assert set(calls.runs) == {1}
    assert "could not be put back" in str(calls.function.explain(mine))


def test_recordings_overlays_and_overrides_explore_nothing():
    calls = Calls()
    with tb.record():
        calls.function(X)
    with calls.function.overlay(b=3):
        calls.function(X)
    calls.function(X, config={"b": 4})
    assert calls.runs == [1, 3, 4]
    assert calls.function.selector.pending == ()


def test_while_an_exploration_is_on_a_recording_an_overlay_and_a_policy_hold_it():
    calls = Calls()
    for _ in range(8):
        calls.function(X)
    before = str(calls.function.explain(X))
    calls.runs.clear()
    for _ in range(5):
        with tb.record():
            calls.function(X)
        with calls.function.overlay(b=3):
            calls.function(X)
        with tb.policy_override(calls.function.selector, allow_autotune=False):
            calls.function(X)
    assert calls.runs == [1, 3, 1] * 5
    assert str(calls.function.explain(X)) == before


def test_other_shapes_of_the_same_bucket_are_served_and_not_compared():
    calls = Calls(bucket={"x": {0: tb.pow2}})
    assert calls.function.problem(np.ones(8)) == calls.function.problem(np.ones(7))
    calls.function(np.ones(8))
    for _ in range(50):
        assert calls.function(np.ones(7)) == 7.0
    assert set(calls.runs) == {1}
    calls.until_found(np.ones(8))
    calls.function(np.ones(7))
    assert calls.runs[-1] == 2


def test_results_that_come_later_are_waited_for_when_timed():
    clock, waited = FakeClock(), []
    costs = {1: 2e-3, 2: 1e-3}

    class Later:
        def __init__(self, seconds):
            self.seconds = seconds

    def wait(result):
        waited.append(result)
        clock.spend(result.seconds)

    tuner = tb.Tuner(stopwatch=Stopwatch(clock_ns=clock, wait=wait), clock_s=lambda: clock.seconds)

    space = [{"b": 1}, {"b": 2}]

    @tb.tunable(space=space, heuristic={"b": 1}, store=False, policy=INCREMENTAL, tuner=tuner, check=False)
    def f(x, *, config):
        return Later(costs[config.b])

    for _ in range(60):
        f(X)
    assert tb.wait_for_background(HANG_S)
    assert f(X).seconds == 1e-3
    assert len(waited) < 60, "calls that are not timed are not waited for"


def test_jax_arrays_are_tried_and_traces_are_left_alone():
    jax = pytest.importorskip("jax")
    clock, runs, space = FakeClock(), [], [{"b": 1}, {"b": 2}]

    @tb.tunable(space=space, heuristic={"b": 1}, store=False, policy=INCREMENTAL, tuner=fake_tuner(clock), check=False)
    def f(x, *, config):
        runs.append((config.b, isinstance(x, jax.core.Tracer)))
        clock.spend(2e-3 / config.b)
        return x + 1

    x = jax.numpy.ones(3)
    for _ in range(40):
        f(x)
        jax.jit(lambda x: f(x))(x)  # noqa: PLW0108 - a new function of the user's, traced anew
    assert tb.wait_for_background(HANG_S)
    traced = [b for b, is_traced in runs if is_traced]
    assert traced == sorted(traced), "the heuristic until it is found, and never a trial"
    assert f(x).tolist() == [2.0] * 3
    assert runs[-1] == (2, False)


def test_a_selector_that_only_chooses_serves_the_heuristic():
    kernel = PretendKernel(FakeClock(), {Tiles(1): 1e-3, Tiles(2): 2e-3}, heuristic=Tiles(2))
    chain = tb.ConfigSelectorChain(tb.ConfigCache(), INCREMENTAL, fake_tuner(kernel.clock))
    assert {chain.choose(invocation(kernel, 1), kernel) for _ in range(50)} == {Tiles(2)}
    assert kernel.runs == []


def test_an_executor_tries_candidates_too():
    clock = FakeClock()
    kernel = PretendKernel(clock, {Tiles(1): 1e-3, Tiles(2): 2e-3}, heuristic=Tiles(2))
    kernel.checks = False
    chain = tb.ConfigSelectorChain(tb.ConfigCache(), INCREMENTAL, fake_tuner(clock))
    executor = tb.Executor(chain)
    results = [executor(kernel, 7) for _ in range(40)]
    assert results == kernel.runs
    assert tb.wait_for_background(HANG_S)
    assert executor(kernel, 7) == Tiles(1)


def test_candidates_of_a_later_group_are_not_tried():
    class Grouped(PretendKernel):
        checks = False

        def cfg_group(self, inv, cfg):
            return int(cfg.m == 3)

    clock = FakeClock()
    kernel = Grouped(clock, {Tiles(1): 2e-3, Tiles(2): 1e-3, Tiles(3): 1e-4}, heuristic=Tiles(1))
    executor = tb.Executor(tb.ConfigSelectorChain(tb.ConfigCache(), INCREMENTAL, fake_tuner(clock)))
    for _ in range(60):
        executor(kernel, 7)
    assert tb.wait_for_background(HANG_S)
    assert executor(kernel, 7) == Tiles(2)
    assert Tiles(3) not in kernel.runs


def test_too_few_measurements_write_no_entry(tmp_path):
    calls = Calls(store=tmp_path)
    for _ in range(15):
        calls.function(X)
    assert list(calls.function.selector.persistent.store.items()) == []


def test_an_entry_that_another_process_wrote_meanwhile_is_adopted(tmp_path):
    first, second = Calls(store=tmp_path), Calls(store=tmp_path)
    first.until_found(X)
    chain, kernel = second.function.selector, second.function.kernel
    request = chain.request(kernel.invocation((X,)), kernel)
    late = Tuned(tb.Config(b=3), None, (), ran=1, complete=True, seconds=1.0, configs={})
    assert local_tiers(chain.tiers).autotune.adopt(request, late).config == tb.Config(b=2)
    assert second.function(X) == 4.0
    assert second.runs == [2]


def test_many_problems_at_once_do_not_grow_without_bound():
    calls = Calls()
    for n in range(1, 300):
        calls.function(np.ones(n))
    assert len(calls.function.selector.pending) == 256


# ------------------------------------------------------------------------------------------------ threads, processes


def test_threads_share_one_exploration_and_all_get_right_answers():
    calls = Calls()
    barrier = threading.Barrier(8)

    def call(thread):
        barrier.wait()
        mine = np.full(4, float(thread))
        return {calls.function(mine) for _ in range(300)} == {4.0 * thread}

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(8)))
    calls.until_found(X)
    assert calls.names().count("autotune_start") == calls.names().count("autotune_finish") == 1
    calls.runs.clear()
    calls.function(X)
    assert calls.runs[0] in COSTS


def test_while_one_thread_tries_a_candidate_another_gets_the_heuristic():
    inside, go_on = threading.Event(), threading.Event()

    def body(x, b):
        if b != 1:
            inside.set()
            assert go_on.wait(HANG_S)
        return b

    calls = Calls(body=body)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: [calls.function(X) for _ in range(60)])
        assert inside.wait(HANG_S)
        assert [calls.function(X) for _ in range(20)] == [1] * 20
        go_on.set()
        assert set(other.result(HANG_S)) > {1}


@pytest.mark.filterwarnings("ignore:.*fork")  # JAX and Python 3.12 warn of forks in processes with threads
def test_a_child_that_is_forked_while_a_candidate_runs_goes_on_by_itself():
    forked = []

    def body(x, b):
        if b != 1 and not forked:
            forked.append(os.fork())
            if forked[0] == 0:
                # As a thread that is not the one that has the turn, and may have been in the parent only.
                with ThreadPoolExecutor(1) as pool:
                    served = pool.submit(lambda: [calls.function(X) for _ in range(400)]).result(HANG_S)
                in_child.append(set(served) == {4.0} and set(calls.runs) == set(COSTS))
        return 4.0

    in_child, made = [], 0
    calls = Calls(body=body)
    try:
        made = calls.until_found(X)
    finally:
        if forked[0] == 0:
            os._exit(0 if in_child == [True] and made else 1)
    assert os.waitpid(forked[0], 0)[1] == 0
