"""How much one call of a live session does, in function calls: long computations are done beside the program."""

from __future__ import annotations

import sys

import pytest
from live_server import alike, session_on

MOST = 1500  # function calls in one call of the program: a third of a millisecond
MOST_HELD = 6000  # between two moments in which a thread beside the program lets it go on: below one millisecond


class Counted:
    """Counts the calls of functions, of Python and of C, in a piece of work."""

    def __init__(self):
        self.calls, self.held, self._since = 0, 0, 0

    def __call__(self, work, *args):
        self.calls = self._since = 0
        sys.setprofile(self._note)
        try:
            return work(*args)
        finally:
            sys.setprofile(None)
            self.pause()

    def _note(self, _frame, event, _arg):
        if event in ("call", "c_call"):
            self.calls += 1
            self._since += 1

    def pause(self):
        self.held, self._since = max(self.held, self._since), 0


def run_to_the_end(costs, seed, is_beside):
    """Return the most function calls of one call, and the most that work beside the program takes without a pause."""
    beside, inside, most, made = Counted(), Counted(), 0, []
    left = made.append if is_beside else (lambda work: work())
    session = session_on(costs, seed, left)
    for _ in range(4000):
        inside(session.run, (), {})
        most = max(most, inside.calls)
        while made:
            beside(made.pop(0), beside.pause)
        if session.is_finished:
            return most, beside.held
    raise AssertionError(str(session))


@pytest.mark.parametrize("count", [8, 16, 36])
def test_no_call_does_the_statistics_over_all_samples(count):
    most, held = run_to_the_end(alike(count), 0, is_beside=True)
    assert most <= MOST
    assert held <= MOST_HELD


def test_they_would_take_a_call_ten_times_as_long_and_more():
    most, _ = run_to_the_end(alike(36), 0, is_beside=False)
    assert most > 10 * MOST


@pytest.mark.parametrize("count", [8, 16, 36])
def test_candidates_that_are_all_alike_are_decided_within_2000_calls(count):
    for seed in range(5):
        session = session_on(alike(count), seed, lambda work: work())
        calls = next(calls for calls in range(4000) if session.run((), {}) and session.is_finished)
        assert calls <= 2000, (seed, str(session))
