"""An open-loop server on a pretend clock, with live tuning and with a fixed configuration on the same requests."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import NamedTuple

import pytest
from live_server import Server, first_of, p99, requests_of, shapes_of

SECONDS, SETTLED_S = 180, 60
# How good the candidate is that serves first: the best one of each shape, which leaves nothing to gain; or by its rank.
FIRST = ["best", 0.0, 0.3]


class Served(NamedTuple):
    """What became of the same requests: 99 of 100 took no longer than this after the first minute; the live server."""

    fixed_s: float
    live_s: float
    live: Server


@cache
def served(seed, rank, load, calls_per_stall=1000):
    shapes = shapes_of(seed, count=6 + seed % 5, candidates=9 if seed % 2 else 12)
    firsts = first_of(shapes, rank)
    servers = Server(shapes, firsts, fixed=True), Server(shapes, firsts, calls_per_stall=calls_per_stall)
    settled = [[], []]
    for request in requests_of(seed, shapes, firsts, load, SECONDS):
        for server, latencies in zip(servers, settled, strict=True):
            latency_s = server.serve(request)
            if request.arrives_s >= SETTLED_S:
                latencies.append(latency_s)
    return Served(*map(p99, settled), servers[1])


def served_often():
    return [(seed, rank, load) for seed in range(4) for rank in FIRST for load in (0.3, 0.6)]


@pytest.mark.parametrize(("seed", "rank", "load"), served_often())
def test_p99_is_at_most_one_percent_above_that_of_a_fixed_configuration_after_the_first_minute(seed, rank, load):
    found = served(seed, rank, load)
    assert found.live_s <= 1.01 * found.fixed_s


@pytest.mark.parametrize(("seed", "rank", "load"), served_often())
def test_of_a_thousand_requests_at_most_one_stands_still(seed, rank, load):
    live = served(seed, rank, load).live
    assert len(live.stood_still) > 3
    assert min(later - sooner for sooner, later in pairwise(live.stood_still)) >= 1000


@pytest.mark.parametrize(("seed", "rank", "load"), served_often())
def test_a_shape_is_decided_within_2000_of_its_calls_from_when_its_candidates_are_loaded(seed, rank, load):
    live = served(seed, rank, load).live
    assert len(live.decided) == len(live.sessions), list(map(str, live.sessions))
    assert all(live.decided[shape] - live.prepared[shape] <= 2000 for shape in live.decided)
    # One call of a thousand stands still, for a fork, or for a program that is loaded once for all shapes. When each
    # shape made its own forks and half loads, some took 25,800 calls, and others were not decided after 26,000.
    stalls = len(live.programs.loaded) + live.programs.forks
    assert sum(live.decided.values()) <= 1250 * stalls + 1000 * len(live.sessions)
    for session, device in zip(live.sessions, live.devices, strict=True):
        assert device.costs[session.config] <= 1.015 * min(device.costs.values())  # as far as ties may differ


@pytest.mark.parametrize("seed", range(4))
def test_a_shape_is_decided_within_2000_calls_where_any_call_may_stand_still(seed):
    live = served(seed, 0.3, 0.3, calls_per_stall=0).live
    assert len(live.decided) == len(live.sessions)
    assert max(live.decided.values()) <= 2000


@pytest.mark.promise("live-rollback")
@pytest.mark.parametrize("slower", [1.3, 3.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_winner_that_becomes_slower_at_one_shape_is_rolled_back_within_50_calls_of_it(seed, slower):
    shapes = shapes_of(seed, count=6, candidates=9)
    firsts = first_of(shapes, 0.3)
    live, changed, calls = Server(shapes, firsts, calls_per_stall=0), {}, {}
    for request in requests_of(seed, shapes, firsts, 0.3, SECONDS):
        live.serve(request)
        session, shape = live.sessions[request.shape], request.shape
        if request.arrives_s > SETTLED_S and shape not in changed:
            changed[shape], live.devices[shape].slower[session.config] = live.calls[shape], slower
        elif session.rollbacks and shape not in calls:
            calls[shape] = live.calls[shape] - changed[shape]
    assert len(calls) == len(shapes)
    assert max(calls.values()) <= 50
    assert all(session.rollbacks == 1 for session in live.sessions)
