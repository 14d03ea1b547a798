"""Running one candidate: the only module that reads a clock around a kernel, and the only broad `except`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._errors import CompileError
from tunebook._types import Failure, FailureKind

if TYPE_CHECKING:
    from collections.abc import Callable

# A candidate whose fastest run so far is this many times slower than the best candidate's fastest run is not sampled
# further. Both are single runs under the same clock, so like is compared with like; the first run of a kernel can be
# 3.3 x its mean, which is why the warm-up comes first and why the factor is no smaller.
HOPELESS: Final = 3.0


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
        return f"host-clock/warmup={self.warmup}/iters={self.iters}"

    def sample_s(self, launch: Callable[[], object]) -> float:
        """Return the seconds of one run."""
        start = self.clock_ns()
        self.wait(launch())
        return (self.clock_ns() - start) * 1e-9


class Trial(NamedTuple):
    """What came of running a candidate: samples, or a failure and the error behind it."""

    samples_s: tuple[float, ...] = ()
    failure: Failure | None = None
    error: Exception | None = None


def run_trial(
    launch: Callable[[], object],
    stopwatch: Stopwatch,
    *,
    check: Callable[[Any], str | None] | None = None,
    best_s: float | None = None,
) -> Trial:
    """Warm up, check the first output, take the samples. Never raises what the kernel raises.

    `best_s` is the fastest run of any candidate so far; one that is hopelessly behind it is not sampled to the end.
    """
    try:
        output = launch()
        stopwatch.wait(output)
        wrong = None if check is None else check(output)
        if wrong is not None:
            return Trial(failure=Failure(kind="wrong-result", message=wrong), error=ValueError(wrong))
        del output  # a second result in memory could be what makes the next run fail
        for _ in range(stopwatch.warmup - 1):
            stopwatch.wait(launch())
        return Trial(samples_s=_samples(launch, stopwatch, best_s))
    except Exception as error:  # noqa: BLE001 - a kernel may raise anything, and a failure is a result, not a crash
        return failed(error)


def _samples(launch: Callable[[], object], stopwatch: Stopwatch, best_s: float | None) -> tuple[float, ...]:
    samples: list[float] = []
    while len(samples) < stopwatch.iters:
        samples.append(stopwatch.sample_s(launch))
        if best_s is not None and min(samples) > HOPELESS * best_s:
            break
    return tuple(samples)


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
