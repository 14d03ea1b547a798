"""Kernels that call kernels: nobody waits for a tuning that waits for them, in threads, pools or processes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context

import pytest
from limits import HANG_S

import tunebook as tb
from tunebook._measure.device_lock import DeviceTurn, StuckWatch, place_of_wait, turns_put_down
from tunebook._selection.single_flight import Flights

# A wait for the device would last longer than a test may.
PATIENT = {"check": False, "store": False}


def tuner():
    return tb.Tuner(device_wait_s=10 * HANG_S)


def in_threads(*calls):
    """Return the results of calls in a thread each."""
    results = [None] * len(calls)

    def run(number, call):
        results[number] = call()

    threads = [threading.Thread(target=run, args=item) for item in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_the_thread_that_measures_and_the_thread_that_leads_do_not_wait_for_each_other():
    leads, measures = threading.Event(), threading.Event()

    def leading(candidates, x):  # called when the flight is up, and nothing has been measured
        leads.set()
        measures.wait(HANG_S)
        return candidates

    @tb.tunable(space=[{"n": 1}, {"n": 2}], heuristic={"n": 1}, tuner=tuner(), prune=leading, **PATIENT)
    def inner(x, *, config):
        return x

    @tb.tunable(space=[{"n": 1}], heuristic={"n": 1}, tuner=tuner(), **PATIENT)
    def outer(x, *, config):
        measures.set()
        leads.wait(HANG_S)
        return inner(x)

    assert in_threads(lambda: outer(1), lambda: inner(1)) == [1, 1]


def test_a_kernel_that_spreads_its_work_over_a_pool_does_not_wait_for_itself():
    @tb.tunable(space=[{"n": 1}, {"n": 2}], heuristic={"n": 1}, tuner=tuner(), **PATIENT)
    def inner(x, *, config):
        return x

    @tb.tunable(space=[{"workers": 1}, {"workers": 2}], heuristic={"workers": 1}, tuner=tuner(), **PATIENT)
    def outer(x, *, config):
        with ThreadPoolExecutor(config.workers) as pool:
            return list(pool.map(inner, [x, x + 1]))

    assert outer(1) == [1, 2]


@pytest.mark.parametrize("heuristic", [{"via": 0}, None], ids=["guessed", "tuned"])
def test_kernels_that_call_each_other_end_in_two_threads(heuristic):
    meet = threading.Barrier(2)
    met = set()

    def together():
        if threading.get_ident() not in met:  # once per thread: both lead by then
            met.add(threading.get_ident())
            meet.wait(HANG_S)

    @tb.tunable(space=[{"via": 0}, {"via": 1}], heuristic=heuristic, tuner=tuner(), **PATIENT)
    def conv(n, depth=0, *, config):
        together()
        return matmul(n, depth + 1) if config.via and depth < 3 else n

    @tb.tunable(space=[{"via": 0}, {"via": 1}], heuristic=heuristic, tuner=tuner(), **PATIENT)
    def matmul(n, depth=0, *, config):
        together()
        return conv(n, depth + 1) if config.via and depth < 3 else n

    assert in_threads(lambda: conv(7), lambda: matmul(7)) == [7, 7]


@pytest.mark.parametrize("may_guess", [True, False])
def test_a_ring_of_flights_is_seen_by_the_last_to_join_it(may_guess):
    flights, meet, seen = Flights(), threading.Barrier(3), []

    def lead(key, other):
        with flights.turn(key) as turn:
            meet.wait(HANG_S)
            with flights.turn(other, may_guess=lambda: may_guess) as inner:
                seen.append((inner.ring, inner.leads))
                inner.result = inner.result or "inner"
            turn.result = key
        return key

    assert in_threads(lambda: lead("a", "b"), lambda: lead("b", "c"), lambda: lead("c", "a")) == ["a", "b", "c"]
    assert (True, not may_guess) in seen
    assert not flights._up


def test_a_flight_of_the_same_thread_in_another_context_is_not_waited_for():
    flights = Flights()
    with flights.turn("key") as turn:
        thread = threading.current_thread()
        assert turn.leads

        def ask():
            with flights.turn("key", may_guess=lambda: True) as again:
                return again.ring, threading.current_thread() is thread

        assert Context().run(ask) == (True, True)


# ----------------------------------------------------------------------------------------------------- waiting threads


@pytest.fixture
def waiting():
    """A thread that waits for an event, as a kernel does that waits for a pool."""
    over = threading.Event()
    thread = threading.Thread(target=lambda: over.wait(HANG_S))
    thread.start()
    while place_of_wait(thread.ident) is None:
        pass
    yield thread
    over.set()
    thread.join()


class Work:
    def __init__(self, thread):
        self.thread, self.stuck_at = thread.ident, None


def test_a_thread_that_waits_at_one_place_for_the_limit_is_stuck_for_every_watch(waiting):
    work, now = Work(waiting), 0.0
    watch = StuckWatch(1.0, lambda: now)
    assert not watch.is_stuck(work)
    now = 0.9
    assert not watch.is_stuck(work)
    now = 1.0
    assert watch.is_stuck(work)
    assert StuckWatch(1.0, lambda: now).is_stuck(work), "another watch need not wait again"


def test_a_thread_that_runs_is_never_stuck():
    over = []
    thread = threading.Thread(target=lambda: [None for _ in iter(lambda: bool(over), True)])
    thread.start()
    watch = StuckWatch(0.0)
    assert not any(watch.is_stuck(Work(thread)) for _ in range(100))
    over.append(None)
    thread.join()
    assert not watch.is_stuck(Work(thread)), "nor one that has ended"


def test_a_turn_that_is_put_down_can_be_taken_by_another_thread_and_is_taken_again(tmp_path):
    def turn(wait_s=HANG_S):
        return DeviceTurn(["cpu"], wait_s, root=tmp_path / "locks")

    def names():
        mine = turn()
        with mine.taken(HANG_S):
            return mine.disturbances(), [claim.name for claim in mine._claims]

    mine = turn()
    with mine.taken(HANG_S):
        with turns_put_down():
            assert in_threads(names) == [((), ["cpu"])]
        assert [claim.name for claim in mine._claims] == ["cpu"]
        late = turn(0.0)

        def disturbances():
            with late.taken(0.0):
                return late.disturbances()

        assert in_threads(disturbances) == [("another thread of this process measured on cpu at the same time",)]
