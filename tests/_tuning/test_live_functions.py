"""Functions of `@tunable` whose calls are timed by device events, on a stream that does not exist."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from limits import HANG_S

import tunebook as tb
from tunebook._kernel.kernel import Invocation
from tunebook._tuning import host_share, live_functions, live_session
from tunebook.adapters._cuda.timer import EventTimer

COSTS = {1: 20e-6, 2: 10e-6, 3: 40e-6, 4: 12e-6}
LIVE = tb.AutotunePolicy(cache_miss_fallback="incremental")


class Stream:
    """A device that runs behind its host: an event is passed after `behind` more runs."""

    def __init__(self, behind=2):
        self.now_s, self.runs, self.behind, self.waits = 0.0, [], behind, 0
        self.count = 0

    def Event(self, enable_timing):  # noqa: N802 - torch's name
        event = SimpleNamespace(at=None)
        event.record = lambda stream=None: setattr(event, "at", (self.now_s, self.count))
        event.query = lambda: self.count >= event.at[1] + self.behind
        event.elapsed_time = lambda end: (end.at[0] - event.at[0]) * 1e3
        return event

    def synchronize(self):
        self.waits += 1

    def run(self, tile, factor=1.0):
        self.runs.append(tile)
        self.count += 1
        self.now_s += COSTS[tile] * factor


@pytest.fixture
def stream(monkeypatch):
    stream = Stream()
    timer = EventTimer(lambda: stream, on=nullcontext)
    monkeypatch.setattr(live_functions, "timer_for", lambda _arguments: timer)
    monkeypatch.setattr(live_session, "HOST", host_share.HostShare(1e9))
    return stream


def doubling(stream, wrong=(), on_event=None, factors=None):
    @tb.tunable(space=tb.Space(tile=[1, 2, 3, 4]), heuristic={"tile": 1}, policy=LIVE, store=False, on_event=on_event)
    def double(x, *, config):
        stream.run(config["tile"], (factors or {}).get(config["tile"], 1.0))
        return x * (3 if config["tile"] in wrong else 2)

    return double


def call(function, stream, times):
    x = np.ones(8)
    for _ in range(times):
        assert float(function(x)[0]) == 2.0
        tb.wait_for_background(HANG_S)
    stream.runs.clear()
    for _ in range(20):
        function(x)
    return set(stream.runs)


def test_calls_converge_to_the_fastest(stream):
    assert call(doubling(stream), stream, 600) == {2}


def test_nothing_waits_for_the_device_but_the_check_of_each_candidate(stream):
    call(doubling(stream), stream, 600)
    # The check of each of three candidates: the first run of a candidate, and one that warms it up.
    assert stream.waits <= 2 * 3


def test_a_candidate_with_a_wrong_output_never_serves_a_call(stream):
    assert call(doubling(stream, wrong={2}), stream, 600) == {4}


def test_a_winner_that_becomes_slower_is_rolled_back(stream):
    told, factors = [], {}
    function = doubling(stream, on_event=lambda event, **_data: told.append(event), factors=factors)
    assert call(function, stream, 600) == {2}
    factors[2] = 5.0
    call(function, stream, 50)
    assert told.count("rolled_back") == 1


class Array:
    """An array of a library that is not known."""

    shape, dtype = (8,), np.dtype("float32")

    def __init__(self, device):
        self.device = device


def test_candidates_run_on_the_device_of_the_first_call_alone(stream):
    first, other = Array("gpu:0"), Array("gpu:1")
    inv = Invocation("double", (first,), {})
    runs = live_functions.function_runs(None, inv, None, None)  # its timer enters the device of the first call
    assert runs.may_try((first,), {})
    assert not runs.may_try((other,), {})


def test_functions_without_events_keep_the_rules_of_calls_that_are_waited_for():
    function = doubling(Stream())
    function(np.ones(8))
    (session,) = function.selector.pending
    assert type(session).__name__ == "InCallSession"
