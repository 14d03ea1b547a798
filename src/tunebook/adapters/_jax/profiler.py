"""Device times from jax's profiler: how long a device's streams were busy with a program.

The host's clock also times the way to the device: 20 to 50 us through Python, longer than many kernels run, so it could
eliminate the best before the finals. A profile has its cost too (2 ms on a CPU, to start, stop, write and read it), so
one profile holds several runs, and is one sample. Each process tries once whether it can afford that.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import jax

from tunebook._base.locks import InterruptSafeLock
from tunebook._measure.stopwatch import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

# The name of compiled candidates in a profile. Programs of other threads have other names, and do not count.
CANDIDATE: Final = "jit_candidate"
# A sample has this many runs, or as many as fit into this time: they share the cost of the profile.
_RUNS: Final = 8
_RUNS_NS: Final = 2_000_000
# A race takes some hundreds of samples. With slower ones, tuning would take longer than it saves.
LONGEST_PROFILE_NS: Final = 50_000_000
# How long to wait for another profile, the user's own; jax has one at a time.
_PATIENCE_S: Final = 60.0
_one_at_a_time: Final = InterruptSafeLock()
_affordable: Final[dict[str, bool]] = {}


def record_profile(work: Callable[[], object], patience_s: float = 0.0) -> Any:
    """Run `work` under jax's profiler, and return the profile; `RuntimeError` if another profile does not end."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every call of a Python function would be an event
    options.host_tracer_level = 1
    options.enable_hlo_proto = False  # the text of all programs
    until_s = time.monotonic() + patience_s
    with _one_at_a_time, tempfile.TemporaryDirectory(prefix="tunebook-profile-") as folder:
        while True:
            try:
                jax.profiler.start_trace(folder, profiler_options=options)
                break
            except RuntimeError:
                if time.monotonic() >= until_s:
                    raise
                time.sleep(0.05)
        try:
            work()
        finally:
            jax.profiler.stop_trace()
        found = next(Path(folder).rglob("*.xplane.pb"), None)
        if found is None:
            raise RuntimeError("jax's profiler wrote no profile")
        return jax.profiler.ProfileData.from_file(str(found))


def on_a_device(plane: str, line: str) -> bool:
    """Return whether a line of a profile shows work of a device: a GPU's streams, a TPU's programs."""
    return plane.startswith(("/device:GPU:", "/device:TPU:")) and line.startswith(("Stream ", "XLA Modules"))


def busy_ns(profile: Any, counts: Callable[[str, str], bool] = on_a_device) -> float:
    """Return how long the slowest device was busy with candidates, or else with any program; overlaps count once."""
    busiest = 0.0
    for plane in profile.planes:
        spans = read_spans(plane, counts)
        covered, until = 0.0, float("-inf")
        for start_ns, end_ns, _ in sorted([span for span in spans if span[2] == CANDIDATE] or spans):
            covered += max(0.0, end_ns - max(start_ns, until))
            until = max(until, end_ns)
        busiest = max(busiest, covered)
    return busiest


def read_spans(plane: Any, counts: Callable[[str, str], bool]) -> list[tuple[float, float, str]]:
    """Return the start, the end and the program of each event on the lines of a plane that count."""
    events = [event for line in plane.lines if counts(plane.name, line.name) for event in line.events]
    with warnings.catch_warnings():
        # jax 0.11 makes a class when this is first read. Python 3.12 warns about that, and where warnings are errors,
        # this one would end the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        stats = [dict(event.stats) for event in events]
    # A GPU's events are kernels, and name their program; a TPU's events are programs, named "jit_f(123)".
    modules = [str(found.get("hlo_module", event.name)) for found, event in zip(stats, events, strict=True)]
    return [
        (event.start_ns, event.start_ns + event.duration_ns, module.partition("(")[0])
        for module, event in zip(modules, events, strict=True)
    ]


@final
class ProfilerTimer:
    """A `Timer` by the profiler. `record(work)` runs `work` and returns its profile."""

    name: Final = "device-profiler/warm-cache"
    is_device_clock: Final = True

    def __init__(
        self,
        record: Callable[[Callable[[], object]], Any] = lambda work: record_profile(work, _PATIENCE_S),
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        counts: Callable[[str, str], bool] = on_a_device,
    ) -> None:
        self._record, self._clock_ns, self._counts = record, clock_ns, counts

    def wait(self, result: Any) -> None:
        """Block until a result is there, on all of its devices."""
        wait_for(result)

    def sample_s(self, launch: Callable[[], object], runs: int) -> float:
        """Return the seconds of one run on the slowest device: the mean of `runs`, or of more short runs."""
        done = 0

        def run_several() -> None:
            nonlocal done
            start_ns = self._clock_ns()
            while done < runs or (done < _RUNS and self._clock_ns() - start_ns < _RUNS_NS):
                wait_for(launch())
                done += 1

        found_ns = busy_ns(self._record(run_several), self._counts)
        if not found_ns:
            # The device had nothing to do, or the profile was lost. An error is better than a time of zero, which wins.
            raise RuntimeError("jax's profiler saw nothing of a run on the device")
        return found_ns * 1e-9 / done


def timer_on(
    device: Any,
    record: Callable[[Callable[[], object]], Any] = record_profile,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> ProfilerTimer | None:
    """Return a timer for runs on a device; None if the profiler does not see the device, or takes too long."""

    def is_affordable() -> bool:
        x = jax.device_put(jax.numpy.ones(1024), device)
        run = jax.jit(lambda x: x + 1)
        wait_for(run(x))
        record(lambda: wait_for(run(x)))  # the first profile of a process also loads the device's library for it
        start_ns = clock_ns()
        profile = record(lambda: wait_for(run(x)))
        return busy_ns(profile) > 0 and clock_ns() - start_ns < LONGEST_PROFILE_NS

    if device.platform not in _affordable:
        try:
            # A thread of our own is in no trace, even if the caller is.
            with ThreadPoolExecutor(1, thread_name_prefix="tunebook-jax") as pool:
                _affordable[device.platform] = pool.submit(is_affordable).result()
        except RuntimeError:
            return None  # the user's own profile is running; the next call tries again
    return ProfilerTimer() if _affordable[device.platform] else None
