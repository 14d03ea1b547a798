"""Ctrl-C at any line of a first call leaves nothing behind: no flight, lease, device, suspension or running tuning."""

from __future__ import annotations

import linecache
import os
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from limits import HANG_S

import tunebook as tb
from tunebook import metrics
from tunebook._measure import device_lock
from tunebook._memo.answer_memo import MEMO
from tunebook._memo.context_stack import INNERMOST
from tunebook._selection import single_flight

ROOT = str(Path(tb.__file__).parent)
# The files that take something which must be given back.
TAKERS = ("single_flight.py", "device_lock.py", "selector.py", "answer_memo.py")
pytestmark = [
    # Generators and files that an interrupt has left are closed by the collector, which says so.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.* was tuned for 8 values:UserWarning"),  # of its argument, as intended here
]


class Interrupt(KeyboardInterrupt):
    pass


def trace(call, at=None):
    """Return how often each line of tunebook runs in a call; `at=(line, nth)` interrupts the call there."""
    seen, visited = Counter(), {}

    def in_frame(frame, event, _argument):
        line = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        # A tracer is called once more before a with-block is left. No signal is handled there: the lock's own exit is
        # one step of the interpreter.
        left = frame.f_lineno in visited.setdefault(frame, set()) and "lock" in linecache.getline(*line[:2])
        if event == "line" and not left:
            visited[frame].add(frame.f_lineno)
            seen[line] += 1
            if at == (line, seen[line]):
                sys.settrace(None)
                raise Interrupt
        return in_frame

    def enter(frame, _event, _argument):
        code = frame.f_code
        wanted = code.co_filename.startswith(ROOT) if at is None else (code.co_filename, code.co_name) == at[0][::2]
        return in_frame if wanted else None

    sys.settrace(enter)
    try:
        call()
    except Interrupt:
        pass
    finally:
        sys.settrace(None)
    return seen


def left_behind(kernel):
    """Return the names of the things that are still held."""
    held = {
        "suspension": MEMO.suspended,
        "overlay": INNERMOST.get(),
        "device": device_lock._held,
        "device in the context": device_lock._holds.get(),
        "flight": kernel.selector._autotune._flights._up,
        "flight in the context": [flight for flight in single_flight._works.get() if flight.leading],
        "lease": list(Path(os.environ["TUNEBOOK_HOME"], "v1", "leases").glob("*/*")),
        "tuning": sum(metrics.counts()["tunebook_tunings_running"].values()),
    }
    return [name for name, value in held.items() if value]


def called_elsewhere(kernel, x):
    """Return the answer in another thread, where anything that this thread still holds would be waited for."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(kernel(x)), daemon=True)
    thread.start()
    thread.join(HANG_S)
    return answers


@pytest.fixture
def kernel():
    metrics.on()

    # One candidate, or the race takes most of the time.
    @tb.tunable(space=[{"s": 1}], heuristic={"s": 1}, check=False, tuner=tb.Tuner(warmup=0, iters=1, device_wait_s=1.0))
    def kernel(x, *, config):
        return x * config.s

    yield kernel
    metrics.off()
    metrics.reset()


def interrupt_everywhere(kernel, files, *, last=False):
    """Interrupt a first call at every line of some files, where it first (and `last`) runs; return the faults."""
    for warm_up in range(2):
        kernel(warm_up)
    lines = trace(lambda: kernel(2))
    points = [
        (line, nth) for line, times in lines.items() for nth in {1, times if last else 1} if line[0].endswith(files)
    ]
    faults = []
    for x, point in enumerate(points, 10):
        trace(lambda x=x: kernel(x), point)
        found = left_behind(kernel)
        if found or called_elsewhere(kernel, x) != [x]:
            faults.append((point, found or "the next call hangs"))
    return len(points), faults


@pytest.mark.promise("metrics-settle")
def test_a_first_call_that_is_interrupted_at_any_line_leaves_nothing_behind(kernel):
    points, faults = interrupt_everywhere(kernel, TAKERS)
    assert points > 200
    assert faults == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_same_at_every_line_of_the_package(kernel):
    points, faults = interrupt_everywhere(kernel, ".py", last=True)
    assert points > 1500
    assert faults == []


# ------------------------------------------------------------------------------------------------------------ overlays


def interrupt_at(call, nth, files=".py"):
    """Interrupt a call where a signal can be handled: when a function begins, and when a built-in one has returned.

    Only Python 3.14 tells that the `__enter__` of a lock has returned: before, no signal is handled there.
    """
    count = 0

    def profile(frame, event, _argument):
        nonlocal count
        name = frame.f_code.co_filename
        if event in {"call", "c_return"} and name.startswith(ROOT) and name.endswith(files):
            count += 1
            if count == nth:
                sys.setprofile(None)
                raise Interrupt

    sys.setprofile(profile)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def test_a_first_call_that_a_signal_interrupts_leaves_nothing_behind(kernel):
    for warm_up in range(2):
        kernel(warm_up)
    nth, faults, interrupted = 0, [], True
    while interrupted:
        nth += 1
        interrupted = interrupt_at(lambda x=nth + 10: kernel(x), nth, TAKERS)
        found = left_behind(kernel)
        if found or called_elsewhere(kernel, nth + 10) != [nth + 10]:
            faults.append((nth, found or "the next call hangs"))
            break
    assert nth > 100
    assert faults == []


def test_an_overlay_that_is_interrupted_while_it_begins_is_not_left_on(kernel):
    kernel(1)
    scope = kernel.overlay(tb.Config(s=5))
    nth = 0
    while True:
        nth += 1
        interrupted = interrupt_at(scope.__enter__, nth)
        if not interrupted:
            break
        assert left_behind(kernel) == [], f"interrupted at step {nth}"
    assert nth > 5
    assert kernel(1) == 5
    scope.__exit__(None, None, None)
    assert left_behind(kernel) == []
    assert kernel(1) == 1
