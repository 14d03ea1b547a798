"""Finding the fastest of some candidates."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tunebook._arrays.framework import at_tuning_site
from tunebook._arrays.operations import timer_for
from tunebook._base.errors import DefinitionError
from tunebook._kernel.kernel import Invocation
from tunebook._measure.disturbance import probes_for
from tunebook._measure.stopwatch import Stopwatch, first_trial, sample
from tunebook._tuning.job import Job, Tuned
from tunebook._tuning.job_run import JobRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tunebook._arrays.framework import TuningSite
    from tunebook._arrays.operations import Timer
    from tunebook._base.errors import TuningFailed
    from tunebook._measure.compile_pool import Compiling
    from tunebook._measure.device_lock import DeviceTurn
    from tunebook._measure.disturbance import Probe

Cfg = TypeVar("Cfg")


class Tuner:
    """Finds the fastest candidate: each is tried and checked once, then they race (see `_race`).

    `warmup` is how often a candidate runs untimed before, and `iters` how often `measure` times a function. Processes
    that tune on one device take turns while they measure: `device_wait_s` is how long one waits for the others before
    it measures all the same, and says that the ground was shared. With 0 it does not wait.

    >>> tuner = Tuner(warmup=1, iters=3)
    >>> tuner.autotune(lambda n: lambda: sum(range(n)), (), {}, [200_000, 10])
    10
    """

    def __init__(
        self,
        warmup: int = 1,
        iters: int = 3,
        *,
        stopwatch: Stopwatch | None = None,
        compile_threads: int | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        now_s: Callable[[], float] = time.time,
        probes: Callable[[str], Iterable[Probe]] | None = None,
        device_wait_s: float = 60.0,  # a problem is measured within seconds: this is the turn of several others
    ) -> None:
        if iters < 1 or warmup < 0:
            raise DefinitionError(f"a tuner needs iters >= 1 and warmup >= 0; got iters={iters}, warmup={warmup}")
        self.stopwatch: Final = stopwatch or Stopwatch(warmup=warmup, iters=iters)
        self._compile_threads = compile_threads or os.cpu_count() or 1
        self._clock_s = clock_s
        self._now_s = now_s
        # Times by a clock that is not the machine's say nothing about the machine.
        self._real = self.stopwatch.clock_ns is time.perf_counter_ns
        self._probes = probes or (probes_for if self._real else lambda _platform: ())
        self._device_wait_s = device_wait_s

    def measure(self, fn: Callable[..., object], *args: Any, **kwargs: Any) -> float:
        """Return the seconds of the fastest of `iters` runs; what the function raises is raised.

        With arrays of a framework that compiles whole functions, as jax does, it is compiled for them first.
        """

        def measure(stage: TuningSite | None) -> float:
            stopwatch = self._stopwatch_by(timer_for((args, kwargs)))
            if stage is None:
                return _fastest_s(partial(fn, *args, **kwargs), stopwatch)
            make_fn, _ = stage.programs(lambda _config: fn, False)  # noqa: FBT003 - forward only
            return _fastest_s(partial(make_fn(None), *stage.args, **stage.kwargs), stopwatch)

        return at_tuning_site(Invocation("measured", args, kwargs), measure)

    def _stopwatch_by(self, timer: Timer | None) -> Stopwatch:
        """Return the stopwatch, with the clock of a device unless it was given a clock of its own."""
        plain = type(self.stopwatch) is Stopwatch and self._real and self.stopwatch.timer is None
        return self.stopwatch.by(timer) if plain else self.stopwatch

    def autotune(
        self,
        make_fn: Callable[[Cfg], Callable[..., object]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        candidates: Iterable[Cfg],
    ) -> Cfg:
        """Return the fastest candidate; `TuningFailed` with each candidate's error if all fail."""
        timer = timer_for((args, kwargs))
        job = Job(make_fn=make_fn, args=args, kwargs=kwargs, candidates=list(candidates), timer=timer)

        def tune(stage: TuningSite | None) -> Cfg:
            if stage is None:
                return self.tune(job).config
            made, compile_one = stage.programs(make_fn, False)  # noqa: FBT003 - forward only
            mutated = None if stage.in_place else ()
            there = job._replace(
                make_fn=made, compile=compile_one, args=stage.args, kwargs=stage.kwargs, mutated=mutated
            )
            return self.tune(there).config

        return at_tuning_site(Invocation("tuned", args, kwargs), tune)

    def foregone(self, job: Job[Cfg]) -> TuningFailed | None:
        """Return what tuning would raise at once, because every candidate is known to fail; None if it would run."""
        if job.search is not None and len(job.known) < job.search.trials:
            return None
        run = JobRun(job, self._stopwatch_by(job.timer), self._clock_s, self._now_s)
        known_to_fail = run.live and not run.reuse_known() and all(m.failure is not None for m in run.results.values())
        return run.failure() if known_to_fail else None

    def tune(self, job: Job[Cfg]) -> Tuned[Cfg]:
        """Measure what is not known yet, and decide over all of it."""
        if job.search is not None:
            from tunebook._tuning.search_run import Searching  # noqa: PLC0415 - only big spaces need it

            policy = f"{self._stopwatch_by(job.timer).name}/{job.mode}"
            return Searching(job, job.search, policy, self.tune, self._clock_s).run()
        compiling: Compiling[Cfg] | None = None
        run = JobRun(job, self._stopwatch_by(job.timer), self._clock_s, self._now_s)
        if job.compile is not None:
            from tunebook._measure.compile_pool import Compiling  # noqa: PLC0415 - a tenth of the time of `import tunebook`

            compiling = Compiling(job.compile, run.live, self._compile_threads, self._clock_s, job.launch_axes)
        try:
            return run.finish(compiling, self._probes(job.platform), self._turn(job))
        finally:
            # Not as a with-block: at Ctrl-C that would compile all the rest before it lets go.
            if compiling is not None:
                compiling.close()

    def _turn(self, job: Job[Any]) -> DeviceTurn | None:
        if not self._real:
            return None
        from tunebook._measure.device_lock import turn_for  # noqa: PLC0415 - only who measures needs it

        return turn_for(
            [(part.args, part.kwargs) for part in job.parts], job.platform, job.ordinal, self._device_wait_s
        )


def _fastest_s(launch: Callable[[], object], stopwatch: Stopwatch) -> float:
    trial = first_trial(launch, stopwatch)
    samples: list[float] = []
    while trial.error is None and len(samples) < stopwatch.iters:
        trial = sample(launch, stopwatch, trial.runs)
        samples.append(trial.sample_s)
    if trial.error is not None:
        raise trial.error
    return min(samples)
