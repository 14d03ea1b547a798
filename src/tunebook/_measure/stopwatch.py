"""Running one candidate: the only module that reads a clock around a kernel, and the only broad `except`."""

from __future__ import annotations

import math
import re
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._base.errors import CompileError
from tunebook._base.vocabulary import Failure, FailureKind
from tunebook._kernel.output_check import as_mismatch
from tunebook._statistics.decide import DEVICE_CLOCKS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tunebook._arrays.operations import Timer

# Runs shorter than this are timed several at once: reading the clock twice takes a hundredth of it.
SHORTEST_SAMPLE_S: Final = 20e-6
# XLA, CUDA's runtime and Triton, OpenCL.
_OUT_OF_MEMORY: Final = re.compile(
    r"RESOURCE_EXHAUSTED|\bout of (?:memory|resource)|MEM_OBJECT_ALLOCATION_FAILURE|OUT_OF_RESOURCES", re.IGNORECASE
)


def wait_for(result: Any) -> None:
    """Block until an asynchronous result is there: whatever has `block_until_ready`, also inside containers."""
    if isinstance(result, (tuple, list)):
        for item in result:
            wait_for(item)
    elif isinstance(result, dict):
        for item in result.values():
            wait_for(item)
    else:
        block = getattr(result, "block_until_ready", None)
        if block is not None:
            block()


class Stopwatch(NamedTuple):
    """How a run is timed. `wait` blocks until a result is really there; the clock must be monotonic.

    A `timer` takes the samples by a device's own clock.
    """

    warmup: int = 1
    iters: int = 3
    clock_ns: Callable[[], int] = time.perf_counter_ns
    wait: Callable[[Any], None] = wait_for
    timer: Timer | None = None

    @property
    def name(self) -> str:
        """The measurement policy: times under different policies are never compared.

        It says whether a device's own clock took them, because `decide` is stricter with these.
        """
        clock = "host-clock" if self.timer is None else self.timer.name
        if self.timer is not None and self.timer.is_device_clock and not clock.startswith(DEVICE_CLOCKS):
            clock = f"device-clock/{clock}"
        return f"{clock}/race/warmup={self.warmup}"

    def by(self, timer: Timer | None) -> Stopwatch:
        """Return one that takes samples by the clock of a device; None is this one."""
        return self if timer is None else self._replace(timer=timer, wait=timer.wait)

    def sample_s(self, launch: Callable[[], object], runs: int = 1) -> float:
        """Return the seconds of one run, as the mean of several that are timed together."""
        if self.timer is not None:
            return self.timer.sample_s(launch, runs)
        start = self.clock_ns()
        for _ in range(runs):
            self.wait(launch())
        return (self.clock_ns() - start) * 1e-9 / runs


class Trial(NamedTuple):
    """What came of running a candidate: a sample of so many runs, or a failure and the error behind it."""

    sample_s: float = math.nan
    runs: int = 1
    failure: Failure | None = None
    error: Exception | None = None


def first_trial(launch: Callable[[], object], stopwatch: Stopwatch, check: Callable[[Any], Any] | None = None) -> Trial:
    """Run a candidate for the first time, check its output, and warm it up.

    The sample is that of the first run, which may have compiled something: better than none if there is time for none.
    """

    def attempt() -> Trial:
        start = stopwatch.clock_ns()
        output = launch()
        stopwatch.wait(output)
        first_s = (stopwatch.clock_ns() - start) * 1e-9
        wrong = None if check is None else as_mismatch(check(output))
        if wrong is not None:
            return Trial(failure=Failure(kind=wrong.kind, message=wrong.message), error=ValueError(wrong.message))
        del output  # a second result in memory could be what makes the next run fail
        for _ in range(stopwatch.warmup - 1):
            stopwatch.wait(launch())
        return Trial(sample_s=first_s)

    return _guarded(attempt)


def sample(launch: Callable[[], object], stopwatch: Stopwatch, runs: int = 1, *, batch: bool = True) -> Trial:
    """Take one sample of a candidate that is warm; a run too short for the clock is taken again with many of it.

    `batch=False` times it alone all the same.
    """

    def attempt() -> Trial:
        seconds = stopwatch.sample_s(launch, runs)
        if runs > 1 or not batch or not 0 < seconds < SHORTEST_SAMPLE_S:
            return Trial(sample_s=seconds, runs=runs)
        many = math.ceil(SHORTEST_SAMPLE_S / seconds)
        return Trial(sample_s=stopwatch.sample_s(launch, many), runs=many)

    return _guarded(attempt)


def _guarded(attempt: Callable[[], Trial]) -> Trial:
    try:
        return attempt()
    except Exception as error:  # noqa: BLE001 - a kernel may raise anything, and a failure is a result, not a crash
        return failed(error)


def failed(error: Exception) -> Trial:
    """Return the trial of a candidate that raised."""
    kind: FailureKind = "launch"
    if isinstance(error, MemoryError) or _says_out_of_memory(error):
        kind = "memory"
    elif isinstance(error, CompileError):
        kind = "compile"
    elif isinstance(error, TimeoutError):
        kind = "timeout"
    return Trial(failure=Failure(kind=kind, message=f"{type(error).__name__}: {error}"), error=error)


def _says_out_of_memory(error: Exception) -> bool:
    """Whether a device ran out of memory: every framework has its own class for it, or only words."""
    return "OutOfMemory" in type(error).__name__ or bool(_OUT_OF_MEMORY.search(str(error)))
