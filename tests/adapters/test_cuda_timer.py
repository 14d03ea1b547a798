"""Times by a device's events, with a device whose clock only its work moves."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels import job_of

import tunebook as tb
from tunebook._measure.stopwatch import Stopwatch
from tunebook.adapters._cuda.timer import IDLE_NS, SHORT_S, TRIES, WAKE_NS, EventTimer, LaunchWindows


class Device:
    """Kernels and flushes take time on its clock, in turn, and none begins before the host has queued it."""

    def __init__(self):
        self.now_s = 0.0
        self.host_ns = 0
        self.flushes = 0

    def Event(self, enable_timing):  # noqa: N802 - torch's name
        assert enable_timing
        return Event(self)

    def synchronize(self):
        self.host_ns = max(self.host_ns, round(self.now_s * 1e9))

    def zero_(self):
        self.run(80e-6)
        self.flushes += 1

    def run(self, seconds):
        self.now_s = max(self.now_s, self.host_ns * 1e-9) + seconds


class Event:
    def __init__(self, device):
        self._device = device

    def record(self, stream=None):
        self.at_s = max(self._device.now_s, self._device.host_ns * 1e-9)

    def query(self):
        return self.at_s <= self._device.host_ns * 1e-9

    def elapsed_time(self, end):
        return (end.at_s - self.at_s) * 1e3


def timer_on(device, **options):
    return EventTimer(lambda: device, lambda: device, clock_ns=lambda: device.host_ns, **options)


@given(st.floats(1e-6, 1e-2), st.integers(1, 9))
def test_a_sample_is_the_mean_of_runs_that_each_find_a_cold_cache(seconds, runs):
    device = Device()
    timer = timer_on(device)
    timer.sample_s(lambda: device.run(seconds), 1)
    flushes = device.flushes
    assert timer.sample_s(lambda: device.run(seconds), runs) == pytest.approx(seconds)
    assert device.flushes == flushes + runs


def test_a_launch_that_the_device_had_to_wait_for_is_timed_again_behind_more_work():
    device = Device()
    timer = timer_on(device)

    def launch():
        device.host_ns += 100_000  # longer than the caches take to empty
        device.run(10e-6)

    assert timer.sample_s(launch, 3) == pytest.approx(10e-6)
    before = device.flushes
    assert timer.sample_s(launch, 3) == pytest.approx(10e-6)
    assert device.flushes == before + 3 * 2, "how much is needed is remembered"


@pytest.mark.parametrize("seconds", [10e-6, 1.0])
def test_a_host_that_is_always_late_gets_times_all_the_same(seconds):
    device, launches = Device(), []
    timer = timer_on(device)

    def launch():
        launches.append(seconds)
        device.host_ns += 1_000_000
        device.run(seconds)

    assert timer.sample_s(launch, 1) > seconds
    assert len(launches) == (TRIES if seconds < SHORT_S else 1), "a gap is nothing to a long run"


def test_work_outside_of_the_window_is_not_timed():
    device = Device()
    timer = timer_on(device, windows=True)

    def launch():
        device.run(1.0)  # puts arguments back
        timer.begin()
        device.run(3e-6)
        timer.end()
        device.run(1.0)  # a hook

    assert timer.sample_s(launch, 4) == pytest.approx(3e-6)


def test_a_window_outside_of_a_sample_does_nothing():
    device = Device()
    timer = timer_on(device, windows=True)
    timer.begin()
    timer.end()
    assert device.flushes == 0


def test_a_device_that_was_idle_is_kept_busy_first():
    device = Device()
    timer = timer_on(device)
    timer.sample_s(lambda: device.run(1e-5), 1)
    assert device.now_s * 1e9 >= WAKE_NS
    before = device.flushes
    timer.sample_s(lambda: device.run(1e-5), 1)
    assert device.flushes == before + 1
    device.host_ns += IDLE_NS
    timer.sample_s(lambda: device.run(1e-5), 1)
    assert device.flushes > before + 100


@pytest.mark.parametrize("windows", [False, True])
def test_with_a_warm_cache_a_run_that_is_not_timed_goes_before_each_timed_run(windows):
    device, ran = Device(), []
    timer = timer_on(device, warm=True, windows=windows)

    def launch():
        if windows:
            timer.begin()
        # The first run after a flush finds a cold cache.
        device.run(9e-6 if device.flushes else 2e-6)
        ran.append(device.flushes > 0)
        device.flushes = 0
        if windows:
            timer.end()

    assert timer.sample_s(launch, 3) == pytest.approx(2e-6)
    assert ran == [True, False] * 3
    assert timer.name == "device-events/warm-l2/launch"


def test_a_sample_that_raises_leaves_no_window_open():
    device = Device()
    timer = timer_on(device)
    with pytest.raises(RuntimeError, match="bad launch"):
        timer.sample_s(lambda: (_ for _ in ()).throw(RuntimeError("bad launch")), 1)
    assert timer.sample_s(lambda: device.run(2e-6), 1) == pytest.approx(2e-6)


def test_the_policy_says_how_the_times_were_taken():
    device = Device()
    cold = Stopwatch().by(timer_on(device, way="graph"))
    warm = Stopwatch().by(EventTimer(lambda: device))
    assert cold.name == "device-events/cold-l2/graph/race/warmup=1"
    assert warm.name == "device-events/warm-l2/launch/race/warmup=1"


class CountingTimer(EventTimer):
    """Notes the runs of each sample."""

    def sample_s(self, launch, runs):
        self.runs = [*getattr(self, "runs", ()), runs]
        return super().sample_s(launch, runs)


def test_kernels_of_2_us_that_are_alike_have_as_many_runs_per_sample_and_one_synchronization_each():
    device, rng, syncs = Device(), random.Random(0), []
    plainly = device.synchronize
    device.synchronize = lambda: (syncs.append(1), plainly())
    timer = CountingTimer(lambda: device, lambda: device, clock_ns=lambda: device.host_ns)
    stopwatch = Stopwatch(clock_ns=lambda: device.host_ns).by(timer)
    timer.sample_s(lambda: device.run(1e-6), 1)  # wakes the device up, which takes synchronizations of its own
    timer.runs.clear()
    syncs.clear()
    work = job_of(lambda _: lambda: device.run(2e-6 * (1 + rng.random() / 50)), [1, 2], heuristic=2)
    tuned = tb.Tuner(stopwatch=stopwatch, clock_s=lambda: device.host_ns * 1e-9, probes=lambda _: ()).tune(work)
    assert tuned.verdict.rule == "tie, kept the heuristic"
    assert timer.runs[:2] == [1, 1]
    assert set(timer.runs[2:]) == {10}
    assert len(syncs) == len(timer.runs) + 2, "one per sample, and one for the first run of each"


class EventOfOneProcess(Event):
    """torch's events end a forked child that destroys one: their destructor asks the device, which raises."""

    def __init__(self, device):
        super().__init__(device)
        self._made_in = os.getpid()

    def __del__(self):
        if os.getpid() != self._made_in:
            os.abort()


@pytest.mark.filterwarnings("ignore:.*fork")  # Python 3.12 and JAX warn of forks in processes with threads
def test_a_forked_child_destroys_no_event_of_its_parent_also_at_its_exit():
    device = Device()
    device.Event = lambda **_: EventOfOneProcess(device)
    windows = LaunchWindows(lambda: device)
    waiting = [windows.around(lambda: device.run(1e-6))[1] for _ in range(3)]
    device.synchronize()
    assert waiting.pop().seconds() is not None  # its events are used again
    child = os.fork()
    if child == 0:
        waiting.clear()  # as a live session does: the child cannot ask for their times
        del windows  # as at an exit
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
