"""Times on a GPU, taken by its own clock: events around a run, with nothing of it in the L2 cache.

The host's clock would time the launch, which takes longer than many kernels. A device that is busy with the cache when
the events and the kernel are queued meets them without a gap, so that the events see the kernel alone. A host that was
too slow for that is noticed, and the sample is taken again behind more work.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, final

if TYPE_CHECKING:
    from collections.abc import Callable

# A GPU that was idle runs at a fifth of its clock (345 of 1980 MHz on an H200). Racing while the clock ramps up would
# look like a machine that is disturbed, so it is kept busy for so long first.
WAKE_NS: Final = 30_000_000
# And it is taken for idle if nothing was sampled for so long.
IDLE_NS: Final = 50_000_000
# Several times the largest L2 there is. 256 MB take 80 us on an H200: as long as a launch through Python, twice.
CACHE_BYTES: Final = 256 << 20
# How often the caches are emptied before a run, at most, to give the host time for the launch. A matmul of 10 us on an
# H200 was timed at 13 us by half of its samples, and at up to 60, before late launches were noticed.
MOST_FLUSHES: Final = 4
# How often a sample is taken at most, and how short it must be for a gap of a few microseconds to matter.
TRIES: Final = 5
SHORT_S: Final = 10e-3


@final
class EventTimer:
    """A `Timer` for what `torch.cuda` is the interface of: `device()` has `Event` and `synchronize`.

    `cache()` makes a buffer as large as the caches, and its `zero_()` empties them. With `windows`, what is sampled
    calls `begin` and `end` itself, so that what it does before and after is not timed. For one thread at a time.
    """

    is_device_clock: Final = True

    def __init__(
        self,
        device: Callable[[], Any],
        cache: Callable[[], Any] | None = None,
        *,
        windows: bool = False,
        way: str = "launch",
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """`way` is how kernels get to the device: it is a part of the policy under which a time was taken."""
        self.name: Final = f"device-events/{'warm' if cache is None else 'cold'}-l2/{way}"
        self._clock_ns = clock_ns
        self._device, self._make_cache, self._windows = device, cache, windows
        self._cache: Any = None
        self._pairs: list[tuple[Any, Any]] = []
        self._used = 0
        self._flushes = 1
        self._sampling = False
        self._open = False
        self._late = False
        self._idle_since_ns = -IDLE_NS

    def wait(self, _result: object) -> None:
        """Block until the device has done all that it was given."""
        self._device().synchronize()

    def sample_s(self, launch: Callable[[], object], runs: int) -> float:
        """Return the seconds of one run on the device, as the mean of several; each finds a cold cache.

        If the device had to wait for a launch, all runs are made again, with more for the device to do before them.
        """
        self._wake()
        for _ in range(TRIES):
            seconds = self._taken_s(launch, runs)
            if not self._late or seconds > SHORT_S:
                break
            self._flushes = min(2 * self._flushes, MOST_FLUSHES)
        self._idle_since_ns = self._clock_ns()
        return seconds

    def _taken_s(self, launch: Callable[[], object], runs: int) -> float:
        self._used, self._sampling, self._late = 0, True, False
        try:
            for _ in range(runs):
                if not self._windows:
                    self.begin()
                launch()
                self.end()
        finally:
            self._sampling = self._open = False
        self._device().synchronize()
        used = self._pairs[: self._used]
        return float(sum(start.elapsed_time(end) for start, end in used) * 1e-3 / len(used))

    def begin(self) -> None:
        """Open the window: what is queued from here on is timed."""
        if self._sampling:
            start, _ = self._next_pair()
            if self._make_cache is not None:
                for _ in range(self._flushes):
                    self._flush()
            start.record()
            self._open = True

    def end(self) -> None:
        """Close the window."""
        if self._open:
            start, end = self._pairs[self._used - 1]
            # Past the start while the launch was not through: the device waited, and the window has that in it.
            self._late = self._late or (self._make_cache is not None and start.query())
            end.record()
            self._open = False

    def _next_pair(self) -> tuple[Any, Any]:
        """Return events for a window; those of the last sample again, since making one takes the host's time."""
        if self._used == len(self._pairs):
            event = self._device().Event
            self._pairs.append((event(enable_timing=True), event(enable_timing=True)))
        self._used += 1
        return self._pairs[self._used - 1]

    def release(self) -> None:
        """Let go of the buffer; it is made anew when it is needed."""
        self._cache = None

    def _wake(self) -> None:
        if self._clock_ns() - self._idle_since_ns < IDLE_NS:
            return
        start_ns = self._clock_ns()
        while self._make_cache is not None and self._clock_ns() - start_ns < WAKE_NS:
            self._flush()
            self._device().synchronize()

    def _flush(self) -> None:
        if self._cache is None and self._make_cache is not None:
            self._cache = self._make_cache()
        self._cache.zero_()
