"""Finding the fastest candidate: tries each once, within the budget, races the valid ones, and decides."""

from __future__ import annotations

import math
import os
import sys
import time
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tunebook._arrays.describe import at_tuning_site, timer_for
from tunebook._base.durations import LONG_S, seconds_text
from tunebook._base.errors import DefinitionError, TuningFailed
from tunebook._kernel.kernel import Invocation
from tunebook._kernel.output_check import CheckError
from tunebook._measure.disturbance import Disturbances, DisturbanceWatch, probes_for
from tunebook._measure.stopwatch import (
    AgainstModel,
    AmongThemselves,
    Attempt,
    Batches,
    InProcess,
    Launches,
    Runner,
    Stopwatch,
    TimedPart,
    first_trial,
    sample,
)
from tunebook._statistics.race import ENOUGH, LEAST_FINAL_S, Lane, Race
from tunebook._tuning.job import Job, Part, Setup, Timing, Tuned
from tunebook._tuning.job_run import LOST_TO, JobRun
from tunebook._tuning.plan import is_forward_only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from tunebook._arrays.library import TuningSite
    from tunebook._measure.device_lock import DeviceTurn
    from tunebook._measure.disturbance import Probe
    from tunebook._tuning.job import Step

Cfg = TypeVar("Cfg")
if TYPE_CHECKING:
    from typing_extensions import TypeVar as DefaultTypeVar

    # Left out in most annotations. The methods have a type of their own: one tuner serves all kernels.
    AnyCfg = DefaultTypeVar("AnyCfg", default=Any)
else:
    AnyCfg = TypeVar("AnyCfg")


class Tuner(Generic[AnyCfg]):
    """Finds the fastest candidate: each is tried and checked once, then they race (see `_statistics.race`).

    `warmup` is the number of untimed runs of a candidate, and `iters` the number of runs that `measure` times.
    Processes that tune on one device take turns while they measure. In one tuning, a process waits for at most
    `device_wait_s` for the others; then it measures all the same, and reports a disturbance.

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
        self.stopwatch = stopwatch or _checked(Stopwatch(warmup=warmup, iters=iters))
        self._compile_threads = compile_threads or os.cpu_count() or 1
        self._clock_s, self._now_s, self._probes, self._device_wait_s = clock_s, now_s, probes, device_wait_s
        # Times by another clock than the machine's say nothing about the machine.
        self._real = self.stopwatch.clock_ns is time.perf_counter_ns

    def __repr__(self) -> str:
        return f"Tuner(warmup={self.warmup}, iters={self.iters})"

    @property
    def warmup(self) -> int:
        """The number of untimed runs of a candidate."""
        return self.stopwatch.warmup

    @warmup.setter
    def warmup(self, warmup: int) -> None:
        self.stopwatch = _checked(self.stopwatch._replace(warmup=warmup))

    @property
    def iters(self) -> int:
        """The number of runs that `measure` times."""
        return self.stopwatch.iters

    @iters.setter
    def iters(self, iters: int) -> None:
        self.stopwatch = _checked(self.stopwatch._replace(iters=iters))

    def measure(self, fn: Callable[..., object], *args: Any, **kwargs: Any) -> float:
        """Return the mean seconds of a run, over `iters` timed runs; errors of the function pass.

        With arrays of a framework that compiles whole functions, as jax does, the function is compiled for them first.
        A function with the attribute `_ejk_validate_backward=True` is measured with its gradient, where it has one. A
        function that cannot be compiled as a whole is measured as it is.
        """

        def measure(site: TuningSite | None) -> float:
            stopwatch = self._stopwatch_for(Setup(timer=timer_for((args, kwargs))))
            if site is None:
                return _mean_s(partial(fn, *args, **kwargs), stopwatch)
            make_fn, _ = site.programs(lambda _config: fn, _has_gradient(lambda _config: fn, None, site))
            return _mean_s(partial(make_fn(None), *site.args, **site.kwargs), stopwatch)

        return at_tuning_site(Invocation("measured", args, kwargs), measure)

    def _stopwatch_for(self, setup: Setup[Any]) -> Stopwatch:
        """Return the stopwatch, with a device's timer unless the stopwatch came with a clock or timer."""
        plain = type(self.stopwatch) is Stopwatch and self._real and self.stopwatch.timer is None
        return _stopwatch_of(self.stopwatch, setup, plain=plain)

    def autotune(
        self,
        make_fn: Callable[[Cfg], Callable[..., object]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        candidates: Iterable[Cfg],
    ) -> Cfg:
        """Return the fastest candidate; raise `TuningFailed` with each candidate's error if all fail.

        Gradients are measured too, as by `measure`, if the function of the first candidate asks for it.
        """
        setup: Setup[Cfg] = Setup(timer=timer_for((args, kwargs)))
        listed = list(candidates)

        def tune(site: TuningSite | None) -> Cfg:
            if site is None:
                return self.tune(Job([Part(make_fn, args, kwargs)], listed, setup=setup)).config
            with Attempt() as attempt:  # a candidate that cannot be made fails later, by itself
                backward = bool(listed) and _has_gradient(make_fn, listed[0], site)
            made, compile_one = site.programs(make_fn, attempt.trial.error is None and backward)
            part = Part(made, site.args, site.kwargs)
            return self.tune(Job([part], listed, setup=setup._replace(compile=compile_one))).config

        return at_tuning_site(Invocation("tuned", args, kwargs), tune)

    def foregone(self, job: Job[Cfg]) -> TuningFailed | None:
        """Return the error of a tuning whose candidates are all known to fail; None if something would run."""
        if job.search is not None and len(job.known) < job.search.trials:
            return None
        run = JobRun(job, self._stopwatch_for(job.setup), self._clock_s, self._now_s)
        if not run.candidates.configs or run.todo():
            return None
        failed_all = all(m.failure is not None for m in run.candidates.results.values())
        return run.candidates.failure() if failed_all else None

    def tune(self, job: Job[Cfg]) -> Tuned[Cfg]:
        """Measure the candidates without a known measurement, and decide over all of them."""
        watch = self._watch(job)  # once, because its limit on waiting for a device is for all batches of a search
        if job.search is None:
            return self._tune(job, *watch)
        from tunebook._tuning.search_run import Searching  # noqa: PLC0415 - loaded late: for big spaces only

        policy = job.policy(self._stopwatch_for(job.setup))
        return Searching(job, job.search, policy, lambda batch: self._tune(batch, *watch), self._clock_s).run()

    def _tune(self, job: Job[Cfg], turn: DeviceTurn | None, probes: Iterable[Probe]) -> Tuned[Cfg]:
        stopwatch = self._stopwatch_for(job.setup)
        run = JobRun(job, stopwatch, self._clock_s, self._now_s, turn)
        if not run.candidates.configs:
            raise TuningFailed("no candidates to tune", [DefinitionError("the kernel gave no candidates")])
        todo = run.todo()
        with ExitStack() as stack:
            stack.enter_context(_handing_on(run))
            if job.setup.compile is not None:
                from tunebook._measure.compile_pool import Compiling  # noqa: PLC0415 - a tenth of `import tunebook`

                configs, axes = run.candidates.configs, job.setup.launch_axes
                run.compiling = Compiling(job.setup.compile, configs, self._compile_threads, self._clock_s, axes)
                stack.callback(run.compiling.close)
            quiet = nullcontext if run.compiling is None else run.compiling.quiet
            run.runner = stack.enter_context(_runner_for(run, stopwatch, quiet))
            tried = run.try_all(todo) and run.try_all(run.todo_without_incumbent())
            with run.alone() if run.lanes else nullcontext():
                raced, disturbances = _race(run, probes)
        tuned = run.candidates.decide(
            job.incumbent,
            job.goal.objective,
            ran=run.ran,
            complete=raced and tried,
            seconds=run.elapsed_s,
            disturbances=disturbances,
            waiting_s=0.0 if run.compiling is None else run.compiling.waiting_s,
            left_out={} if run.compiling is None else run.compiling.left_out,
            roofline=job.goal.roofline,
        )
        if tuned.verdict is None:
            raise run.candidates.failure()
        return tuned

    def _watch(self, job: Job[Any]) -> tuple[DeviceTurn | None, tuple[Probe, ...]]:
        """Return the turn on the devices of a job, and the probes that watch them."""
        platform = job.setup.platform
        if not self._real:
            return None, () if self._probes is None else tuple(self._probes(platform))
        from tunebook._measure.device_lock import DeviceTurn, physical_devices  # noqa: PLC0415 - for measuring only

        devices = physical_devices([(part.args, part.kwargs) for part in job.parts], platform, job.setup.ordinal)
        turn = DeviceTurn(devices, self._device_wait_s)
        return turn, (*(probes_for(platform, devices) if self._probes is None else self._probes(platform)), turn)


def _race(run: JobRun[Any], probes: Iterable[Probe]) -> tuple[bool, Disturbances]:
    """Sample the valid candidates; return False if the budget ended the race, and the disturbances meanwhile."""
    job, results = run.job, run.candidates.results
    run.leave_out_slow()
    ends_s = math.inf if job.budget.seconds is None else run.started_s + job.budget.seconds
    racing = run.racing = Race(
        run.lanes,
        run.rng,
        run.clock_s,
        ends_s=ends_s,
        on_round=lambda done: run.tell("racing", min(int(100 * done), 99), 100),
        is_good=run.is_good,
        renew=run.renew,
        objective=job.goal.objective,
    )
    watch = DisturbanceWatch(probes)
    finished = racing.qualify() if job.brief else racing.run(spent_s=run.elapsed_s)
    disturbances = watch.disturbances([lane.samples_s for lane in racing.finalists])
    if not disturbances.quiet and not job.brief:
        racing.finalists += _unlucky(run.lanes, racing.finalists)
        finished = _sample_again(run, racing.finalists, ends_s) and finished
        disturbances = watch.disturbances([lane.samples_s for lane in racing.finalists])
    finalists = {lane.name: lane.value_s if lane.samples_s else math.inf for lane in racing.finalists}
    leader = {} if not finalists else {LOST_TO: min(finalists, key=finalists.__getitem__)}
    for lane in run.lanes:
        known = results[lane.name]
        if known.failure is None and lane.samples_s:
            dropped = lane.name not in finalists
            extra = {**known.extra, **leader} if dropped else known.extra
            results[lane.name] = known._replace(samples_s=tuple(lane.samples_s), dropped=dropped, extra=extra)
    before = run.before
    if before is not None and [lane.name for lane in run.lanes] == [before.fingerprint]:
        # All that it was to be compared with have failed, and a lone candidate gets a few samples only.
        results[before.fingerprint] = max(before, results[before.fingerprint], key=lambda m: len(m.samples_s))
    for name, twin in run.twins.items():
        run.candidates.copy(twin, name, results[name].compile_s)
    if run.ran:
        run.tell("racing", 100, 100)
    return finished, disturbances


def _unlucky(lanes: Iterable[Lane], finalists: Sequence[Lane]) -> list[Lane]:
    """Return the runner-up of a lone finalist if it left after a few samples, which may all have been disturbed."""
    left = [lane for lane in lanes if lane not in finalists and 0 < len(lane.samples_s) < ENOUGH]
    return [] if len(finalists) != 1 or not left else [min(left, key=lambda lane: lane.value_s)]


def _sample_again(run: JobRun[Any], finalists: Iterable[Lane], ends_s: float) -> bool:
    """Double the samples of the finalists, in turn, after a disturbance; return False if the time was up."""
    lanes = list(finalists)
    cut_s = run.clock_s() + max(run.elapsed_s, LEAST_FINAL_S)  # as in the race: not longer than everything before
    for _ in range(max(ENOUGH, *(len(lane.samples_s) for lane in lanes)) if len(lanes) > 1 else 0):
        if run.clock_s() >= cut_s:
            break
        run.rng.shuffle(lanes)
        for lane in tuple(lanes):
            if run.clock_s() >= ends_s:
                return False
            if not lane.run_once():
                lanes.remove(lane)
    return True


def _runner_for(run: JobRun[Any], stopwatch: Stopwatch, quiet: Callable[[], AbstractContextManager[None]]) -> Runner:
    """Return the runner of a job's candidates, the heuristic's first; `quiet` keeps compilers away from a fork."""
    job, configs = run.job, list(run.candidates.configs.values())
    if job.setup.runner is not None:
        return job.setup.runner(configs)
    total = math.fsum(part.weight for part in job.parts)
    parts = [
        TimedPart(
            Launches(
                configs, part.make_fn, part.args, part.kwargs, part.mutated,
                copies=part.copies, graph=job.setup.timing.graph,
            ),
            part.check,
            _model_for(job, stopwatch),
            part.weight / total,
        )
        for part in job.parts
    ]  # fmt: skip
    runner = InProcess(parts, stopwatch, job.goal.combine)
    if not job.setup.isolate:
        return runner
    from tunebook._measure.forked_worker import Isolated  # noqa: PLC0415 - loaded late: for isolation only

    return Isolated(runner, job.setup.timeout_s, quiet, run.tell_of_wait)


def _model_for(job: Job[Any], stopwatch: Stopwatch) -> AgainstModel | AmongThemselves | None:
    """Return the outputs that candidates are compared with: the heuristic's, whose configuration is the first one."""
    if (compare := job.goal.compare) is None:
        return None
    return AmongThemselves(compare) if job.heuristic is None else AgainstModel(0, compare, stopwatch)


@contextmanager
def _handing_on(run: JobRun[Any]) -> Iterator[None]:
    """Hand the measurements so far to the job's `on_interrupt` if the block is interrupted.

    The interrupt gets a note about a candidate that was running for long: it may hang. An error of the check of outputs
    is raised as a `DefinitionError`.
    """
    try:
        yield
    except CheckError as error:
        raise DefinitionError(str(error)) from error.__cause__
    except KeyboardInterrupt as error:
        config, seconds = run.running
        if config is not None and seconds >= LONG_S:
            setup = run.job.setup
            limit = "" if setup.isolate else 'with AutotunePolicy(isolate="always"), '
            limit += f"candidate_timeout_s={setup.timeout_s:g} ends it"
            error.add_note(f"tunebook: {config!r} had been running for {seconds_text(seconds)}; {limit}.")
        if run.job.on_interrupt is not None:
            run.job.on_interrupt(run.so_far())
        raise


def _stopwatch_of(own: Stopwatch, setup: Setup[Any], *, plain: bool) -> Stopwatch:
    """Return a tuner's stopwatch for a job; a `plain` one takes the device's timer, others keep their own clock."""
    timing = setup.timing
    if own.timer is not None and timing._replace(inputs=1) != Timing():
        raise DefinitionError("the tuner has a timer of its own, which measure= cannot change: leave one of them out")
    watch = own._replace(cold=timing.cold, replayed=timing.graph is not None)
    if timing.by_host:
        return watch if setup.timer is None else watch._replace(wait=setup.timer.wait)
    return watch.by(setup.timer) if plain else watch


def shown_steps(
    op: str, on_step: Callable[[Step], None] | None
) -> AbstractContextManager[Callable[[Step], None] | None]:
    """Return a block that shows the progress of a call's tuning on a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        return nullcontext(on_step)
    from tunebook._tuning.progress import line_of_call  # noqa: PLC0415 - loaded late: for terminals only

    return line_of_call(op, on_step)


def _checked(stopwatch: Stopwatch) -> Stopwatch:
    if stopwatch.iters < 1 or stopwatch.warmup < 0:
        got = f"iters={stopwatch.iters}, warmup={stopwatch.warmup}"
        raise DefinitionError(f"a tuner needs iters >= 1 and warmup >= 0; got {got}")
    return stopwatch


def _has_gradient(make_fn: Callable[[Cfg], Callable[..., object]], config: Cfg, site: TuningSite) -> bool:
    """Whether the function of a configuration asks for its gradient to be measured, and has one."""
    asks = bool(getattr(make_fn(config), "_ejk_validate_backward", False)) and not is_forward_only()
    return asks and site.differentiable(make_fn, config)


def _mean_s(launch: Callable[[], object], stopwatch: Stopwatch) -> float:
    """Return the mean seconds of `iters` samples of a function; its error is raised."""
    trial, batches = first_trial(launch, stopwatch), Batches(stopwatch.shortest_s)
    samples: list[float] = []
    while trial.error is None and len(samples) < stopwatch.iters:
        trial = batches.take(launch, partial(sample, launch, stopwatch))
        samples.append(trial.sample_s)
        if batches.renew([launch]):
            samples.clear()
    if trial.error is not None:
        raise trial.error
    return math.fsum(samples) / len(samples)
