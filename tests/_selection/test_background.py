"""Tuning behind the user's calls: `AutotunePolicy(cache_miss_fallback="background")`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels import FakeClock, PretendKernel, Tiles, fake_tuner, invocation, note_in
from limits import HANG_S

import tunebook as tb
from tunebook._memo.answer_memo import EPOCH
from tunebook._selection.deferred_tuning import Background
from tunebook._selection.selector import local_tiers

SCRIPT = Path(__file__).parents[1] / "background_process.py"
BACKGROUND = tb.AutotunePolicy(cache_miss_fallback="background")
GUESS, SLOW, FAST = Tiles(1), Tiles(2), Tiles(3)
COSTS = {GUESS: 0.003, SLOW: 0.005, FAST: 0.001}


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    yield
    assert tb.wait_for_background(HANG_S)


def is_behind():
    return threading.current_thread().name == "tunebook background"


class Latch:
    """Stops the background until it is opened."""

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()

    def pass_through(self):
        if is_behind():
            self.reached.set()
            assert self.opened.wait(HANG_S)


class LatchedKernel(PretendKernel):
    """Its candidates cannot run in the background before its latch is opened."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.latch = Latch()
        self.behind = []

    def run(self, *args, cfg, **kwargs):
        self.behind.append(is_behind())
        self.latch.pass_through()
        return super().run(*args, cfg=cfg, **kwargs)


def make(*, policy=BACKGROUND, heuristic=GUESS, path=None, costs=COSTS, kind=LatchedKernel, **options):
    clock, events = FakeClock(), []
    kernel = kind(clock, costs, heuristic=heuristic)
    chain = tb.ConfigSelectorChain(
        tb.ConfigCache(),
        policy,
        fake_tuner(clock),
        None if path is None else tb.PersistentCache("pretend", path, cfg_type=Tiles),
        on_event=note_in(events),
        **options,
    )
    return chain, kernel, events


def names(events):
    return [event for event, _ in events]


def names_by_thread(events):
    """Return the events of the calls, and of the thread behind them: which of the two is first is up to the system."""
    behind = [name for name in names(events) if name.startswith("autotune")]
    return [name for name in names(events) if name not in behind], behind


def said_by_autotune(chain, kernel, *args):
    tried = dict(chain.preview(invocation(kernel, *args), kernel).tried)
    return tried.get("autotune")


def test_the_heuristic_serves_while_it_is_tuned_and_then_the_tuned_one_does(tmp_path):
    chain, kernel, events = make(path=tmp_path)
    before = tb.epoch()
    assert chain.choose(invocation(kernel, 1), kernel) == GUESS
    assert kernel.latch.reached.wait(HANG_S)
    assert said_by_autotune(chain, kernel, 1) == "running in the background"
    assert chain.choose(invocation(kernel, 1), kernel) == GUESS
    assert tb.epoch() == before
    kernel.latch.opened.set()
    assert tb.wait_for_background(HANG_S)
    assert chain.choose(invocation(kernel, 1), kernel) == FAST
    assert tb.epoch() == before + 1
    assert chain.persistent.get(*kernel.problem(invocation(kernel, 1))) == FAST
    calls = ["heuristics", "heuristics", "cache_hit"]
    assert names_by_thread(events) == (calls, ["autotune_start", "autotune_finish"])
    assert all(kernel.behind)


def test_before_the_first_call_it_says_that_it_would_tune_in_the_background():
    chain, kernel, events = make()
    assert said_by_autotune(chain, kernel, 1) == "would tune in the background"
    assert names(events) == []


def test_several_problems_wait_for_their_turn():
    chain, kernel, events = make()
    for n in range(5):
        assert chain.choose(invocation(kernel, n), kernel) == GUESS
    assert kernel.latch.reached.wait(HANG_S)
    assert said_by_autotune(chain, kernel, 4) == "waiting for its turn in the background"
    kernel.latch.opened.set()
    assert tb.wait_for_background(HANG_S)
    assert {chain.choose(invocation(kernel, n), kernel) for n in range(5)} == {FAST}
    assert names(events).count("autotune_start") == 5


@pytest.mark.parametrize("policy", [BACKGROUND, tb.AutotunePolicy(cache_miss_fallback="incremental")])
@pytest.mark.parametrize("without", ["kernel", "policy"])
def test_with_no_heuristic_to_serve_the_call_itself_tunes(policy, without):
    heuristic = None if without == "kernel" else GUESS
    policy = policy.updated({"allow_heuristics": without == "kernel"})
    chain, kernel, events = make(policy=policy, heuristic=heuristic)
    assert said_by_autotune(chain, kernel, 1) == "would tune now"
    assert chain.choose(invocation(kernel, 1), kernel) == FAST
    assert not any(kernel.behind)
    assert names(events) == ["autotune_start", "autotune_finish"]


def test_a_tuning_that_confirms_the_heuristic_does_not_start_a_new_epoch():
    chain, kernel, _ = make(costs={GUESS: 0.001, SLOW: 0.005})
    kernel.latch.opened.set()
    before = tb.epoch()
    chain.choose(invocation(kernel, 1), kernel)
    assert tb.wait_for_background(HANG_S)
    assert chain.choose(invocation(kernel, 1), kernel) == GUESS
    assert tb.epoch() == before


def test_listeners_learn_of_the_epoch_until_they_stop():
    heard, again = [], []
    stop, stop_again = tb.on_epoch(heard.append), tb.on_epoch(again.append)
    twice = tb.on_epoch(heard.append)
    EPOCH.advance()
    stop()
    EPOCH.advance()
    twice()
    stop_again()
    EPOCH.advance()
    now = tb.epoch()
    assert heard == [now - 2, now - 2, now - 1]
    assert again == [now - 2, now - 1]


def test_an_epoch_listener_finds_the_new_answer_in_place(tmp_path):
    chain, kernel, _ = make(path=tmp_path)
    kernel.latch.opened.set()
    problem = kernel.problem(invocation(kernel, 1))
    found = []
    stop = tb.on_epoch(lambda _: found.append((chain.cache.get(*problem), chain.persistent.get(*problem))))
    chain.choose(invocation(kernel, 1), kernel)
    assert tb.wait_for_background(HANG_S)
    stop()
    assert found == [(FAST, FAST)]


def test_a_memoised_heuristic_serves_while_tuning_runs_and_does_not_stick():
    latch, asked = Latch(), []

    def guess(x):
        asked.append(1)
        return {"s": 1}

    @tb.tunable(space=[{"s": 1}, {"s": 2}], heuristic=guess, store=False, policy=BACKGROUND, tuner=Second(latch))
    def f(x, *, config):
        return config.s

    x = np.ones(4)
    assert f(x) == 1
    assert latch.reached.wait(HANG_S)
    f(x)  # memoised by now, at the latest
    count = len(asked)
    assert [f(x) for _ in range(50)] == [1] * 50
    assert len(asked) == count, "the tiers were not asked again"
    latch.opened.set()
    assert tb.wait_for_background(HANG_S)
    assert f(x) == 2


class Second:
    """A tuner that takes the second candidate, when its latch lets it."""

    def __init__(self, latch=None):
        self.latch = latch

    def autotune(self, make_fn, args, kwargs, candidates):
        if self.latch is not None:
            self.latch.pass_through()
        return candidates[1]


def test_the_users_arrays_are_left_alone():
    seen = []

    @tb.tunable(space=[{"s": 1}, {"s": 2}], heuristic={"s": 1}, store=False, policy=BACKGROUND)
    def add_one(x, scale, *, config):
        seen.append((x, is_behind(), scale))
        x += scale

    mine = np.zeros((2, 3), np.float32)
    add_one(mine, 2)
    assert tb.wait_for_background(HANG_S)
    assert (mine == 2).all(), "one run, in the user's own call"
    behind = [x for x, is_behind_, _ in seen if is_behind_]
    assert behind
    assert not any(np.shares_memory(x, mine) for x in behind)
    assert {(x.shape, x.dtype.name) for x in behind} == {((2, 3), "float32")}
    assert {scale for _, _, scale in seen} == {2}


@dataclass
class Options:
    causal: bool = True


class Pool:
    """Something of the user's own, of which nobody knows what it holds."""

    def __init__(self):
        self.used = 0


tb.register_key(Pool, lambda pool: "pool")


def test_plain_values_and_dataclasses_of_them_go_along_by_value():
    @tb.tunable(space=[{"s": 1}, {"s": 2}], heuristic={"s": 1}, store=False, policy=BACKGROUND, tuner=Second())
    def f(x, options, names, *, config):
        assert options == Options()
        assert names == ["a", {"b": 1.5}]
        return config.s

    arguments = np.ones(3), Options(), ["a", {"b": 1.5}]
    assert f(*arguments) == 1
    assert tb.wait_for_background(HANG_S)
    assert f(*arguments) == 2


@dataclass
class Batch:
    x: Any


def test_an_array_in_a_dataclass_is_made_up_and_the_callers_is_not_touched():
    mine = Batch({"x": np.zeros((2, 3), np.float32)})
    seen = []

    @tb.tunable(space=[{"s": 1}, {"s": 2}], heuristic={"s": 1}, store=False, policy=BACKGROUND, tuner=Second())
    def f(batch, *, config):
        seen.append(batch.x["x"])
        return config.s

    assert f(mine) == 1
    assert tb.wait_for_background(HANG_S)
    assert f(mine) == 2
    assert all(x is mine.x["x"] or not np.shares_memory(x, mine.x["x"]) for x in seen)


@pytest.mark.parametrize("fallback", ["background", "incremental"])
def test_an_argument_of_unknown_content_keeps_the_heuristic_and_says_why(fallback):
    policy = tb.AutotunePolicy(cache_miss_fallback=fallback)

    @tb.tunable(space=[{"s": 1}, {"s": 2}], heuristic={"s": 1}, store=False, policy=policy)
    def f(pool, *, config):
        return config.s

    pool = Pool()
    with pytest.warns(tb.TunebookWarning, match=r"one of its arguments is a test_background.Pool") as told:
        assert [f(pool) for _ in range(20)] == [1] * 20
    assert len(told) == 1
    assert tb.wait_for_background(HANG_S)
    assert f(pool) == 1
    assert "another thread must not touch" in str(f.explain(pool))


def test_failures_behind_a_call_never_reach_it_and_are_remembered():
    class FailsBehind(LatchedKernel):
        def run(self, *args, cfg, **kwargs):
            if is_behind():
                raise ValueError(f"no {cfg}")
            return super().run(*args, cfg=cfg, **kwargs)

    chain, kernel, events = make(kind=FailsBehind)
    executor = tb.Executor(chain)

    def call_and_wait():
        return executor(kernel, 1), tb.wait_for_background(HANG_S)

    with pytest.warns(tb.TunebookWarning, match=r"pretend@v0 could not be tuned in the background: all 3 candidates"):
        assert call_and_wait() == (GUESS, True)
    assert executor(kernel, 1) == GUESS
    assert names_by_thread(events) == (["heuristics"] * 2, ["autotune_start", "autotune_finish"])
    (finish,) = [fields for name, fields in events if name == "autotune_finish"]
    assert isinstance(finish["error"], tb.TuningFailed)
    assert said_by_autotune(chain, kernel, 1).startswith("failed before: all 3 candidates failed")


class Foreign:
    """An array of a library of which none can be made up."""

    shape, dtype, device = (3,), "float32", "cpu"


def test_arrays_that_cannot_be_made_up_are_a_failure_that_is_told_once():
    chain, kernel, events = make()

    def choose_and_wait():
        return chain.choose(invocation(kernel, Foreign()), kernel), tb.wait_for_background(HANG_S)

    with pytest.warns(tb.TunebookWarning, match="cannot make an array of 'test_background'"):
        assert choose_and_wait() == (GUESS, True)
    assert chain.choose(invocation(kernel, Foreign()), kernel) == GUESS
    assert names_by_thread(events) == (["heuristics"] * 2, ["autotune_finish"])
    assert "cannot make an array" in said_by_autotune(chain, kernel, Foreign())


def test_the_callers_overlays_and_policies_do_not_leak_into_the_background():
    seen = []

    @tb.tunable(space=[{"s": 1}, {"s": 2}], heuristic={"s": 1}, store=False, name="inner")
    def inner(n, *, config):
        return config.s

    @tb.tunable(space=[{"s": 1}, {"s": 2}], heuristic={"s": 1}, store=False, name="outer")
    def outer(n, *, config):
        seen.append((is_behind(), inner(n), outer.selector.policy.cache_miss_fallback))
        return n

    with inner.overlay(tb.Config(s=7)), tb.policy_override(outer.selector, cache_miss_fallback="background"):
        outer(1)
    with tb.policy_override(inner.selector, allow_autotune=False):
        assert tb.wait_for_background(HANG_S)
    assert seen[0] == (False, 7, "background")
    assert {said for said in seen if said[0]} <= {(True, 1, "autotune"), (True, 2, "autotune")}
    assert any(behind for behind, *_ in seen)


@pytest.mark.parametrize("forward_only", [True, False])
def test_a_block_of_forward_passes_only_is_part_of_the_request(forward_only):
    class WithBackward(LatchedKernel):
        def fwd_with_residuals(self, *args, cfg, **kwargs):
            self.backward += 1
            return super().run(*args, cfg=cfg), None

        def vjp(self, residuals, dy, *args, cfg, **kwargs):
            return (dy,)

    chain, kernel, _ = make(policy=BACKGROUND.updated({"validate_backward": True}), kind=WithBackward)
    kernel.backward = 0
    kernel.latch.opened.set()
    if forward_only:
        with tb.forward_autotune_only():
            chain.choose(invocation(kernel, 1), kernel)
    else:
        chain.choose(invocation(kernel, 1), kernel)
    assert tb.wait_for_background(HANG_S)
    assert bool(kernel.backward) is not forward_only


def test_a_call_that_may_wait_waits_for_the_background():
    chain, kernel, events = make()
    chain.choose(invocation(kernel, 1), kernel)
    assert kernel.latch.reached.wait(HANG_S)

    def wait_for_it():
        with tb.policy_override(chain, cache_miss_fallback="autotune"):
            return chain.choose(invocation(kernel, 1), kernel)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for_it)
        assert not waiting.done()
        kernel.latch.opened.set()
        assert waiting.result(HANG_S) == FAST
    assert tb.wait_for_background(HANG_S)
    assert names(events).count("autotune_start") == 1


def test_a_problem_tuned_in_a_call_meanwhile_is_not_tuned_again():
    chain, kernel, events = make()
    chain.choose(invocation(kernel, 0), kernel)
    assert kernel.latch.reached.wait(HANG_S)
    chain.choose(invocation(kernel, 1), kernel)  # waits behind the first
    assert chain.tune(invocation(kernel, 1), kernel).config == FAST
    kernel.latch.opened.set()
    assert tb.wait_for_background(HANG_S)
    assert names(events).count("autotune_start") == 2


def test_a_recording_puts_the_tuning_off_and_not_away():
    chain, kernel, events = make()
    chain.choose(invocation(kernel, 0), kernel)
    assert kernel.latch.reached.wait(HANG_S)
    chain.choose(invocation(kernel, 1), kernel)
    with tb.record():
        kernel.latch.opened.set()
        assert tb.wait_for_background(HANG_S)
        assert chain.choose(invocation(kernel, 1), kernel) == GUESS
    assert names(events).count("autotune_start") == 1
    assert chain.choose(invocation(kernel, 1), kernel) == GUESS
    assert tb.wait_for_background(HANG_S)
    assert chain.choose(invocation(kernel, 1), kernel) == FAST


def test_a_recording_does_not_leave_the_heuristic_memoised_for_ever():
    latch = Latch()

    @tb.tunable(space=[{"s": 1}, {"s": 2}], heuristic={"s": 1}, store=False, policy=BACKGROUND, tuner=Second(latch))
    def f(x, *, config):
        return config.s

    f(1.0)
    assert latch.reached.wait(HANG_S)
    f(2.0)
    with tb.record():
        latch.opened.set()
        assert tb.wait_for_background(HANG_S)
    f(2.0)
    assert tb.wait_for_background(HANG_S)
    assert f(2.0) == 2


def test_a_changed_policy_counts_at_once_though_a_tuning_runs():
    chain, kernel, _ = make()
    chain.choose(invocation(kernel, 1), kernel)
    assert kernel.latch.reached.wait(HANG_S)
    chain.policy = tb.AutotunePolicy(allow_autotune=False)
    assert said_by_autotune(chain, kernel, 1) == "off: policy.allow_autotune is False"
    kernel.latch.opened.set()
    assert tb.wait_for_background(HANG_S)
    assert chain.choose(invocation(kernel, 1), kernel) == FAST


def test_a_call_inside_a_jax_trace_is_tuned_behind_it_and_leaves_nothing_in_it():
    jax = pytest.importorskip("jax")

    @tb.tunable(space=[{"s": 1}, {"s": 2}], heuristic={"s": 1}, store=False, policy=BACKGROUND, tuner=Second())
    def f(x, *, config):
        return x * config.s

    before = tb.epoch()
    x = jax.numpy.ones(3)
    program = jax.make_jaxpr(lambda x: f(x))(x)  # noqa: PLW0108 - a function of the user's
    assert tb.wait_for_background(HANG_S)
    assert len(program.eqns) <= 1
    assert tb.epoch() == before + 1
    assert jax.jit(lambda x: f(x))(x).tolist() == [2.0] * 3  # noqa: PLW0108 - as above


# ------------------------------------------------------------------------------------------------- threads and tasks


def test_eight_threads_get_right_answers_while_results_land_and_each_problem_is_tuned_once():
    tuned = []

    class Picks:
        def autotune(self, make_fn, args, kwargs, candidates):
            tuned.append(args[0])
            return candidates[1]

    @tb.tunable(space=[{"s": 1}, {"s": 2}], heuristic={"s": 1}, store=False, policy=BACKGROUND, tuner=Picks())
    def f(n, x, *, config):
        return n, x.sum(), config.s

    barrier = threading.Barrier(8)
    x = np.ones(8)

    def call(_):
        barrier.wait()
        seen = [[] for _ in range(6)]
        for turn in range(600):
            n = turn % 6
            same, total, s = f(n, x)
            assert (same, total) == (n, 8.0)
            seen[n].append(s)
        return seen

    with ThreadPoolExecutor(8) as pool:
        for seen in pool.map(call, range(8)):
            assert all(answers == sorted(answers) for answers in seen), "once the tuned one came, it stays"
    assert tb.wait_for_background(HANG_S)
    assert sorted(tuned) == list(range(6))
    assert [f(n, x)[2] for n in range(6)] == [2] * 6


def test_asyncio_tasks_are_served_at_once():
    latch = Latch()

    @tb.tunable(space=[{"s": 1}, {"s": 2}], heuristic={"s": 1}, store=False, policy=BACKGROUND, tuner=Second(latch))
    def f(n, *, config):
        return config.s

    async def call(n):
        await asyncio.sleep(0)
        return f(n)

    async def main():
        first = await asyncio.gather(*(call(n % 4) for n in range(40)))
        latch.opened.set()
        assert await asyncio.to_thread(tb.wait_for_background, HANG_S)
        return first, await asyncio.gather(*(call(n % 4) for n in range(40)))

    first, then = asyncio.run(main())
    assert first == [1] * 40
    assert then == [2] * 40


# ------------------------------------------------------------------------------------------------------- processes


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("book", ["book", "book.json"])
def test_processes_with_one_book_tune_each_problem_once(tmp_path, book):
    processes = [start(tmp_path / book, tmp_path / "log", 8, 0.002, "wait") for _ in range(3)]
    assert [p.communicate(timeout=HANG_S) for p in processes] == [("served\ntuned\n", "")] * 3
    begun = Counter((tmp_path / "log").read_text().splitlines())
    assert len(begun) == 8
    assert set(begun.values()) == {1}


def leases(book):
    return [path.name for path in (book / "v1" / "leases").rglob("*") if path.is_file()]


@pytest.mark.parametrize("seconds_per_run", [0.05, 3600])
def test_the_end_of_a_process_is_not_held_up_by_its_background(tmp_path, seconds_per_run):
    book, log = tmp_path / "book", tmp_path / "log"
    ending = start(book, log, 3, seconds_per_run, "exit")
    assert ending.communicate(timeout=HANG_S) == ("served\n", "")
    assert ending.returncode == 0
    if seconds_per_run < 1:
        assert leases(book) == [], "let go of, because the candidate's run ended in time"
    successor = start(book, log, 3, 0.003, "wait")
    assert successor.communicate(timeout=HANG_S) == ("served\ntuned\n", "")


IN_A_POOL = """
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from tunebook._selection.deferred_tuning import BACKGROUND

started = threading.Event()

class Job:
    def attempt(self, *, patient):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self.work).result()

    def work(self):
        started.set()
        while True:
            time.sleep(0.01)
            BACKGROUND.check_stop()

    def ended(self):
        pass

job = Job()
BACKGROUND.submit("for ever", job.attempt, job.ended)
started.wait()
"""


def test_the_end_of_a_process_is_not_held_up_by_work_in_a_pool_which_it_joins():
    ended = subprocess.run(
        [sys.executable, "-c", IN_A_POOL], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.filterwarnings("ignore:.*fork")  # JAX and Python 3.12 warn of forks in processes with threads
def test_a_forked_child_has_a_queue_and_a_thread_of_its_own():
    latch = Latch()

    @tb.tunable(space=[{"s": 1}, {"s": 2}], heuristic={"s": 1}, store=False, policy=BACKGROUND, tuner=Second(latch))
    def f(n, *, config):
        return config.s

    f(1)
    assert latch.reached.wait(HANG_S)
    f(1), f(2)
    pid = os.fork()
    if pid == 0:
        outcome = 1
        try:
            latch.opened = threading.Event()  # the parent's may be locked for ever in here
            latch.opened.set()
            empty = tb.wait_for_background(0)
            served = [f(1), f(2)]
            tuned = tb.wait_for_background(HANG_S) and [f(1), f(2)]
            outcome = 0 if (empty, served, tuned) == (True, [1, 1], [2, 2]) else 2
        finally:
            os._exit(outcome)
    assert os.waitpid(pid, 0)[1] == 0
    assert f(1) == 1
    latch.opened.set()
    assert tb.wait_for_background(HANG_S)
    assert [f(1), f(2)] == [2, 2]


# -------------------------------------------------------------------------------------------------------- the queue


class Job:
    """A job that answers what it is told to, and says how it was asked."""

    def __init__(self, log, name, *answers):
        self.log, self.name, self.answers = log, name, list(answers)

    def attempt(self, *, patient):
        self.log.append((self.name, patient))
        answer = self.answers.pop(0)
        if isinstance(answer, threading.Event):
            assert answer.wait(HANG_S)
            return True
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def ended(self):
        self.log.append((self.name, "ended"))


def submit(queue, key, job):
    return queue.submit(key, job.attempt, job.ended)


def test_a_job_that_another_caller_is_doing_is_put_off_until_the_others_are_done():
    queue, log, gate = Background(), [], threading.Event()
    submit(queue, 0, Job(log, "first", gate))
    submit(queue, 1, Job(log, "busy", False, True))
    submit(queue, 2, Job(log, "last", True))
    gate.set()
    assert queue.wait(HANG_S)
    assert log == [
        ("first", False), ("first", "ended"), ("busy", False), ("last", False), ("last", "ended"),
        ("busy", True), ("busy", "ended"),
    ]  # fmt: skip


def test_a_job_that_waits_for_the_queue_does_not_wait_for_itself():
    queue, said = Background(), []

    class Waits(Job):
        def attempt(self, *, patient):
            said.append(queue.wait())
            return True

    submit(queue, 0, Waits([], "waits"))
    assert queue.wait(HANG_S)
    assert said == [False]


def test_a_full_queue_refuses_new_keys_and_knows_the_old_ones():
    queue, log, gate = Background(capacity=2), [], threading.Event()
    assert submit(queue, "a", Job(log, "a", gate))
    assert submit(queue, "b", Job(log, "b", True))
    assert not submit(queue, "c", Job(log, "c", True))
    assert submit(queue, "b", Job(log, "another b", True))
    assert not queue.wait(0)
    gate.set()
    assert queue.wait(HANG_S)
    assert submit(queue, "c", Job(log, "c", True))
    assert queue.wait(HANG_S)
    assert [name for name, said in log if said == "ended"] == ["a", "b", "c"]


def test_a_job_that_ends_its_thread_ends_no_other_job(monkeypatch):
    seen = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    queue, log, gate = Background(), [], threading.Event()
    submit(queue, 0, Job(log, "first", gate))
    submit(queue, 1, Job(log, "broken", RuntimeError("a listener's")))
    submit(queue, 2, Job(log, "after", True))
    gate.set()
    assert queue.wait(HANG_S)
    assert [name for name, said in log if said == "ended"] == ["first", "broken", "after"]
    assert [type(hook.exc_value) for hook in seen] == [RuntimeError]


def test_where_no_thread_can_be_started_a_job_is_refused_and_nobody_waits(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    queue, log = Background(), []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert not submit(queue, 0, Job(log, "refused", True))
    assert queue.wait(0)
    assert submit(queue, 0, Job(log, "again", True))
    assert queue.wait(HANG_S)
    assert log == [("again", False), ("again", "ended")]


def test_a_stopped_queue_takes_nothing_and_long_jobs_let_go():
    queue, log, gate = Background(), [], threading.Event()
    submit(queue, 0, Job(log, "running", gate))
    submit(queue, 1, Job(log, "dropped", True))
    queue.check_stop()
    threading.Timer(0.05, gate.set).start()
    queue.stop()
    with pytest.raises(SystemExit, match=r"^$"):
        queue.check_stop()
    assert not submit(queue, 2, Job(log, "late", True))
    assert ("dropped", False) not in log


def test_a_call_is_served_though_the_queue_is_full_and_asks_again_later():
    chain, kernel, _ = make()
    local_tiers(chain.tiers).autotune.deferred.queue = Background(capacity=0)
    selection = chain.select(invocation(kernel, 1), kernel)
    assert (selection.config, selection.transient) == (GUESS, True)
    assert dict(selection.tried)["autotune"] == "the background takes no more for now"


# ------------------------------------------------------------------------------------------------------- the policy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache_miss_fallback": "backgrund"}, "did you mean 'background'"),
        ({"cache_miss_fallback": "behind"}, "use one of 'autotune', 'heuristics', 'background', 'incremental'"),
        ({"incremental_slowdown": 1.0}, "must be a number, more than 1: 1.5 lets calls take half as long again"),
        ({"incremental_slowdown": float("nan")}, "incremental_slowdown=nan must be a number, more than 1"),
        ({"slowdown": "fast"}, "slowdown='fast' must be a number, more than 1"),
        ({"candidate_timeout_s": "5s"}, "candidate_timeout_s='5s' must be a number, more than 0: 60.0 is a minute"),
        ({"strict": "no"}, "strict='no' must be True or False"),
        ({"allow_autotune": "background"}, "must be True or False; did you mean cache_miss_fallback='background'"),
        ({"cache_miss_fallback": "incremental", "isolate": "always"}, "use cache_miss_fallback='background'"),
    ],
)
def test_an_invalid_policy_is_an_error_that_names_valid_settings(settings, message):
    with pytest.raises(tb.DefinitionError, match=message):
        tb.AutotunePolicy(**settings)


def test_candidates_in_the_background_may_be_isolated():
    chain, kernel, _ = make(policy=BACKGROUND.updated({"isolate": "always"}))
    kernel.latch.opened.set()
    chain.choose(invocation(kernel, 1), kernel)
    assert tb.wait_for_background(HANG_S)
    assert kernel.runs == [], "all in the worker process"
    assert dict(chain.preview(invocation(kernel, 1), kernel)._asdict())["source"] == "memory"
