"""Running one candidate: the only module that reads a clock around a kernel, and the only broad `except`."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._errors import CompileError
from tunebook._types import Failure, FailureKind

if TYPE_CHECKING:
    from collections.abc import Callable

# Runs shorter than this are timed several at once: reading the clock twice takes a hundredth of it.
SHORTEST_SAMPLE_S: Final = 20e-6


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
    """How a run is timed. `wait` blocks until a result is really there; the clock must be monotonic."""

    warmup: int = 1
    iters: int = 3
    clock_ns: Callable[[], int] = time.perf_counter_ns
    wait: Callable[[Any], None] = wait_for

    @property
    def name(self) -> str:
        """The measurement policy: numbers taken under different ones are never compared."""
        return f"host-clock/race/warmup={self.warmup}"

    def sample_s(self, launch: Callable[[], object], runs: int = 1) -> float:
        """Return the seconds of one run, as the mean of several that are timed together."""
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


def first_trial(
    launch: Callable[[], object], stopwatch: Stopwatch, check: Callable[[Any], str | None] | None = None
) -> Trial:
    """Run a candidate for the first time, check its output, and warm it up.

    The sample is that of the first run, which may have compiled something: better than none if there is time for none.
    """

    def attempt() -> Trial:
        start = stopwatch.clock_ns()
        output = launch()
        stopwatch.wait(output)
        first_s = (stopwatch.clock_ns() - start) * 1e-9
        wrong = None if check is None else check(output)
        if wrong is not None:
            return Trial(failure=Failure(kind="wrong-result", message=wrong), error=ValueError(wrong))
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
    if isinstance(error, MemoryError):
        kind = "memory"
    elif isinstance(error, CompileError):
        kind = "compile"
    elif isinstance(error, TimeoutError):
        kind = "timeout"
    return Trial(failure=Failure(kind=kind, message=f"{type(error).__name__}: {error}"), error=error)
