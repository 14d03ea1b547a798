"""The part of a program's time that the host spends on live tuning."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tunebook._tuning.host_share import HostShare

SHARE = 0.03


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(1e-6, 0.02)), max_size=200), st.floats(0.5, 20))
def test_any_window_spends_at_most_its_share_and_one_piece_of_work(moments, window_s):
    clock = Clock()
    share, spent = HostShare(SHARE, clock), []
    for idle_s, work_s in moments:
        clock.now_s += idle_s
        if share.allows():
            clock.now_s += work_s
            share.spend(work_s, "steps of loading")
            spent.append((clock.now_s, work_s))
    for end_s, _ in spent:
        inside = sum(work_s for at_s, work_s in spent if end_s - window_s < at_s <= end_s)
        # The first piece in the window may be of any size; the others wait until the ones before are paid.
        assert inside <= SHARE * window_s + 2 * 0.02 + 0.01  # which was saved up


def test_a_long_rest_saves_up_ten_milliseconds_and_no_more():
    clock = Clock()
    share = HostShare(SHARE, clock)
    clock.now_s = 3600.0
    assert share.allows()
    share.spend(0.02, "steps of loading")
    assert not share.allows()
    clock.now_s += 0.3
    assert not share.allows()
    clock.now_s += 0.04
    assert share.allows()


def test_a_program_that_became_faster_pays_for_more():
    clock = Clock()
    share = HostShare(SHARE, clock)
    share.spend(0.01, "steps of loading")
    share.earn(0.004)
    assert not share.allows()
    share.earn(0.006)
    assert share.allows()
    share.earn(100.0)  # not saved up either, but for ten milliseconds
    share.spend(0.011, "steps of loading")
    assert not share.allows()


@given(st.lists(st.tuples(st.integers(1, 900), st.sampled_from(["forks", "choices", "decisions"])), max_size=60))
def test_of_so_many_calls_at_most_one_stands_still(moments):
    share, stalls, now = HostShare(1e9, Clock()), [], 0
    for calls, work in moments:
        share.count(calls)
        now += calls
        if work == "choices" or share.may_stall(1000, share):
            share.spend(1e-3, work)
            stalls += [now] if work != "choices" else []
    assert all(later - sooner >= 1000 for sooner, later in pairwise(stalls))


def test_long_calls_are_tuned_first():
    share = HostShare(SHARE, Clock())
    assert share.patience(0.0) == 1  # not known yet
    assert share.patience(1e-3) == 1
    assert share.patience(0.4e-3) == 2
    assert share.patience(1e-6) == 8
    assert share.patience(1e-3) == 1


def test_another_clock_begins_with_nothing_owed():
    clock, own = Clock(), Clock()
    clock.now_s = 5000.0
    share = HostShare(SHARE, clock)
    share.use_clock(own)
    assert share.allows()
    own.now_s = 0.5
    assert share.allows()


def test_work_that_takes_no_time_is_not_a_call_that_stands_still():
    share = HostShare(1e9, Clock())
    share.spend(20e-6, "steps of loading")  # of a program that is in memory
    assert share.stalls == 0
    assert share.may_stall(1000, share)
    share.spend(2e-3, "steps of loading")
    assert not share.may_stall(1000, share)


def test_one_session_at_a_time_has_the_calls_that_may_stand_still_until_it_forgoes_one():
    share, first, second = HostShare(1e9, Clock()), Clock(), Clock()
    assert share.may_stall(1000, first)
    assert share.may_stall(0, second)  # where nobody counts, all may
    share.spend(2e-3, "forks")
    share.count(1000)
    assert not share.may_stall(1000, second)
    assert share.may_stall(1000, first)
    share.count(500)
    assert share.may_stall(1000, second)
    share.has_prepared(second)
    assert share.may_stall(1000, first)
