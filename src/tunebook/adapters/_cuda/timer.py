"""Times GPU runs by the GPU's own clock: events around a run that starts with a cold L2 cache, or with a warm one.

The host's clock would time the launch, which takes longer than many kernels. While the device is busy emptying the
cache, the host queues the events and the kernel, so the device meets them without a gap and the events see the kernel
alone. If the host was too slow for that, the timer notices, and takes the sample again behind more work.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final, final
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

# An idle GPU runs at a fifth of its clock (345 of 1980 MHz on an H200). A race during the ramp-up would look like a
# disturbed machine, so the GPU is kept busy this long first.
WAKE_NS: Final = 30_000_000
# The GPU counts as idle if no sample was taken for this long.
IDLE_NS: Final = 50_000_000
# Several times the largest L2 there is. 256 MB take 80 us on an H200: twice as long as a launch through Python.
CACHE_BYTES: Final = 256 << 20
# How often the caches are emptied before a run, at most, to give the host time for the launch. A matmul of 10 us on an
# H200 was timed at 13 us by half of its samples, and at up to 60, before late launches were noticed.
MOST_FLUSHES: Final = 4
# How often a sample is taken at most, and how short it must be for a gap of a few microseconds to matter.
TRIES: Final = 5
SHORT_S: Final = 10e-3


class EventTimer:
    """A `Timer` by device events, for one thread. `device()` returns an interface like `torch.cuda`.

    `cache()` returns a buffer as large as the caches; its `zero_()` empties them. With `windows`, the sampled function
    calls `begin` and `end` itself, so that its work before and after is not timed. `way` says how kernels reach the
    device: it is part of the measurement policy. `on()` is entered around all work. If `warm`, a run that is not timed
    fills the caches again before each run; without `cache`, they are left alone.
    """

    is_device_clock: Final = True

    def __init__(
        self,
        device: Callable[[], Any],
        cache: Callable[[], Any] | None = None,
        *,
        windows: bool = False,
        way: str = "launch",
        warm: bool = False,
        on: Callable[[], AbstractContextManager[object]] = nullcontext,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.name: Final = f"device-events/{'warm' if warm or cache is None else 'cold'}-l2/{way}"
        self._device, self._make_cache, self._windows, self._warm = device, cache, windows, warm
        self._on, self._clock_ns = on, clock_ns
        self._cache: Any = None
        self._pairs: list[tuple[Any, Any]] = []
        self._used = 0
        self._flushes = 1
        self._sampling = self._open = self._late = self._filling = False
        self._idle_since_ns = -IDLE_NS

    def wait(self, _result: object) -> None:
        """Block until the device has finished all of its work."""
        with self._on():
            self._device().synchronize()

    def sample_s(self, launch: Callable[[], object], runs: int) -> float:
        """Return the seconds of one run on the device, as the mean of several."""
        with self._on():
            start_ns = self._clock_ns()
            if self._make_cache is not None and start_ns - self._idle_since_ns >= IDLE_NS:
                while self._clock_ns() - start_ns < WAKE_NS:
                    self._flush()
                    self._device().synchronize()
            for _ in range(TRIES):
                seconds = self._try_sample_s(launch, runs)
                if not self._late or seconds > SHORT_S:
                    break
                # The device had to wait for a launch: all runs are made again, with more work queued before them.
                self._flushes = min(2 * self._flushes, MOST_FLUSHES)
        self._idle_since_ns = self._clock_ns()
        return seconds

    def _try_sample_s(self, launch: Callable[[], object], runs: int) -> float:
        self._used, self._sampling, self._late = 0, True, False
        try:
            for _ in range(runs):
                if self._warm:
                    self._fill_caches(launch)
                if not self._windows:
                    self.begin()
                launch()
                self.end()
        finally:
            self._sampling = self._open = self._filling = False
        self._device().synchronize()
        used = self._pairs[: self._used]
        return float(sum(start.elapsed_time(end) for start, end in used) * 1e-3 / len(used))

    def _fill_caches(self, launch: Callable[[], object]) -> None:
        """Queue a run that is not timed, behind enough work for the host to queue the timed run meanwhile."""
        for _ in range(0 if self._make_cache is None else self._flushes):
            self._flush()
        self._filling = True
        launch()
        self._filling = False

    def begin(self) -> None:
        """Open the window: work that is queued from here on is timed."""
        if not self._sampling or self._filling:
            return
        if self._used == len(self._pairs):  # pairs of earlier samples are used again: making one takes host time
            event = self._device().Event
            self._pairs.append((event(enable_timing=True), event(enable_timing=True)))
        start, _ = self._pairs[self._used]
        self._used += 1
        if self._make_cache is not None and not self._warm:
            for _ in range(self._flushes):
                self._flush()
        start.record()
        self._open = True

    def end(self) -> None:
        """Close the window."""
        if self._open:
            start, end = self._pairs[self._used - 1]
            # The device passed the start before the launch was queued: it waited, and the window contains the wait.
            self._late = self._late or (self._make_cache is not None and start.query())
            end.record()
            self._open = False

    def live_windows(self) -> LaunchWindows:
        """Return windows around single runs that nothing waits for, on warm caches."""
        return LaunchWindows(self._device, self._on)

    def release(self) -> None:
        """Free the buffer and the events, which belong to one device; the next sample makes new ones."""
        self._cache = None
        self._pairs.clear()

    def _flush(self) -> None:
        if self._cache is None and self._make_cache is not None:
            self._cache = self._make_cache()
        self._cache.zero_()


@final
class EventWindow:
    """One launch between two events that nothing waits for; `seconds` lets it be used again."""

    __slots__ = ("_end", "_free", "_start", "_stream", "host_s", "late", "passed_start")

    def __init__(self, start: Any, end: Any, free: list[EventWindow]) -> None:
        self._start, self._end, self._free = start, end, free
        self.passed_start = start.query
        self.late, self.host_s = False, 0.0

    def open(self, stream: Any) -> None:
        """Record the first event on a stream; None is the current one."""
        self._stream = stream
        self._start.record(stream)

    def close(self) -> None:
        """Record the second event on the same stream."""
        self._end.record(self._stream)

    def seconds(self) -> float | None:
        """Return the time on the device, or None if the device has not passed the second event yet."""
        if not self._end.query():
            return None
        seconds: float = self._start.elapsed_time(self._end) * 1e-3
        self._free.append(self)  # making events takes host time
        return seconds


@final
class LaunchWindows:
    """Makes windows around launches on the current stream. `device()` returns an interface like `torch.cuda`.

    `stream()` returns the current stream faster than that interface does, or None to let each event ask for it.
    """

    def __init__(
        self,
        device: Callable[[], Any],
        on: Callable[[], AbstractContextManager[object]] = nullcontext,
        stream: Callable[[], Any] = lambda: None,
    ) -> None:
        self._device, self._on, self._stream = device, on, stream
        self._free: list[EventWindow] = []
        self._made: list[EventWindow] = []
        _all_windows.add(self)

    def keep(self) -> None:
        """Never destroy an event in this process, not even at its exit."""
        import ctypes  # noqa: PLC0415 - loaded late: 2 ms

        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._made))

    def opened(self) -> EventWindow:
        """Return a window whose first event is recorded."""
        if self._free:
            window = self._free.pop()
        else:
            event = self._device().Event
            window = EventWindow(event(enable_timing=True), event(enable_timing=True), self._free)
            self._made.append(window)
        window.open(self._stream())
        return window

    def around(self, launch: Callable[[], Any]) -> tuple[Any, EventWindow]:
        """Launch between two events, and return the result and the window."""
        began_s = time.perf_counter()
        with self._on():
            window = self.opened()
            before_s = time.perf_counter()
            result = launch()
            after_s = time.perf_counter()
            # The device has passed the start before the launch was queued: the window contains the wait for it.
            window.late = bool(window.passed_start())
            window.close()
        window.host_s = time.perf_counter() - after_s + before_s - began_s
        return result, window


_all_windows: Final[WeakSet[LaunchWindows]] = WeakSet()


def _keep_parents_events() -> None:
    # The destructor of torch's events asks the device, which a forked child cannot: it ends the process. On an H200,
    # forks of compilers and a program's own forks (workers that load data) died of it.
    for windows in _all_windows:
        windows.keep()


os.register_at_fork(after_in_child=_keep_parents_events)


@final
class Replay:
    """Captures the launches of a function at its second call; from then on each call replays them."""

    def __init__(self, function: Callable[[], object], device: Any) -> None:
        self._function, self._device = function, device
        self._ran = False
        self._graph: Any = None

    def __call__(self) -> None:
        """Run the function once."""
        if not self._ran:  # as it is, because loading a module may not happen during a capture
            self._function()
            self._ran = True
            return
        if self._graph is None:
            # Not by `torch.cuda.graph`: it collects garbage and empties the allocator's cache, 100 ms per candidate.
            device = self._device
            graph, side = device.CUDAGraph(), device.Stream()
            side.wait_stream(device.current_stream())
            with device.stream(side):
                graph.capture_begin()
                try:
                    self._function()
                finally:
                    graph.capture_end()
            device.current_stream().wait_stream(side)
            self._graph = graph
        self._graph.replay()
