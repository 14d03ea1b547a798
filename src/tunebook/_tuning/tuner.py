"""Finding the fastest candidate: tries each once, within the budget, races the valid ones, and decides."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tunebook._arrays.describe import at_tuning_site, timer_for
from tunebook._base.errors import DefinitionError, TuningFailed
from tunebook._kernel.kernel import Invocation
from tunebook._measure.disturbance import Disturbances, DisturbanceWatch, probes_for
from tunebook._measure.stopwatch import Attempt, Batches, Runner, Stopwatch, failed, mean_s
from tunebook._statistics.race import ENOUGH, LEAST_FINAL_S, Lane, Race, typical_s
from tunebook._tuning.job import PROGRAM, TRYING, CandidateSet, Doing, Job, Part, Setup, Step, Tuned
from tunebook._tuning.measuring import runner_for, stopwatch_for
from tunebook._tuning.plan import is_forward_only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from tunebook._arrays.library import TuningSite
    from tunebook._base.vocabulary import Measurement
    from tunebook._measure.compile_pool import Compiled, Compiling
    from tunebook._measure.device_lock import DeviceTurn
    from tunebook._measure.disturbance import Probe

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
                return mean_s(partial(fn, *args, **kwargs), stopwatch)
            make_fn, _ = site.programs(lambda _config: fn, _has_gradient(lambda _config: fn, None, site))
            return mean_s(partial(make_fn(None), *site.args, **site.kwargs), stopwatch)

        return at_tuning_site(Invocation("measured", args, kwargs), measure)

    def _stopwatch_for(self, setup: Setup[Any]) -> Stopwatch:
        """Return the stopwatch, with a device's timer unless the stopwatch came with a clock or timer."""
        plain = type(self.stopwatch) is Stopwatch and self._real and self.stopwatch.timer is None
        return stopwatch_for(self.stopwatch, setup, plain=plain)

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
            if job.setup.compile is not None:
                from tunebook._measure.compile_pool import Compiling  # noqa: PLC0415 - a tenth of `import tunebook`

                configs, axes = run.candidates.configs, job.setup.launch_axes
                run.compiling = Compiling(job.setup.compile, configs, self._compile_threads, self._clock_s, axes)
                stack.callback(run.compiling.close)
            quiet = nullcontext if run.compiling is None else run.compiling.quiet
            listed = list(run.candidates.configs.values())
            run.runner = stack.enter_context(runner_for(job, listed, stopwatch, quiet))
            tried = run.try_all(todo)
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


def _checked(stopwatch: Stopwatch) -> Stopwatch:
    if stopwatch.iters < 1 or stopwatch.warmup < 0:
        got = f"iters={stopwatch.iters}, warmup={stopwatch.warmup}"
        raise DefinitionError(f"a tuner needs iters >= 1 and warmup >= 0; got {got}")
    return stopwatch


def _has_gradient(make_fn: Callable[[Cfg], Callable[..., object]], config: Cfg, site: TuningSite) -> bool:
    """Whether the function of a configuration asks for its gradient to be measured, and has one."""
    asks = bool(getattr(make_fn(config), "_ejk_validate_backward", False)) and not is_forward_only()
    return asks and site.differentiable(make_fn, config)


class JobRun(Generic[Cfg]):
    """A job while it runs: tries each candidate once, and keeps the valid ones as the lanes of its race."""

    runner: Runner
    compiling: Compiling[Cfg] | None = None

    def __init__(
        self,
        job: Job[Cfg],
        stopwatch: Stopwatch,
        clock_s: Callable[[], float],
        now_s: Callable[[], float],
        turn: DeviceTurn | None = None,
    ) -> None:
        self.job, self.clock_s, self.started_s = job, clock_s, clock_s()
        self.candidates = CandidateSet(job.conditions, job.policy(stopwatch), job.heuristic, now_s)
        for config in job.candidates:
            self.candidates.admit(config)
        self.rng = self.candidates.shuffler()
        self.batches = Batches(stopwatch.shortest_s)
        self.lanes: list[Lane] = []
        self.programs: dict[str, str] = {}  # the first candidate of each compiled program
        self.twins: dict[str, str] = {}
        self.ran = 0
        self._now_s, self._turn = now_s, turn

    @property
    def elapsed_s(self) -> float:
        return self.clock_s() - self.started_s

    def left_s(self, share: float = 1.0) -> float:
        return self.job.budget.left_s(self.elapsed_s, share)

    def todo(self) -> list[str]:
        """Reuse known measurements under the same conditions; return the fingerprints left to run, in order."""
        configs, results, order = self.candidates.configs, self.candidates.results, self.job.setup.order
        for m in self.job.known:
            expired = m.failure is not None and (m.failure.expires or 0.0) < self._now_s()
            if m.fingerprint in configs and self.candidates.is_comparable(m) and not expired:
                results[m.fingerprint] = m
                if isinstance(program := m.extra.get(PROGRAM), str):
                    self.programs.setdefault(program, m.fingerprint)
        going_on = set()
        if not self.job.history.complete:
            going_on = {name for name, m in results.items() if m.failure is None and not m.dropped}
        todo = [name for name in configs if name not in results or name in going_on]
        self.rng.shuffle(todo)
        todo.sort(key=lambda name: (order.group(configs[name]), -order.priority(configs[name])))
        incumbent = self.job.incumbent
        if incumbent in results and incumbent not in todo and any(map(self.is_wanted, todo)):
            # The newcomers run today; the incumbent's old time was taken on another day. Measured again, it is compared
            # with them on equal terms. The others lost to it then, so their old times need not compete now.
            todo.insert(0, incumbent)
            results.update({name: m._replace(dropped=True) for name, m in results.items()})
        return todo

    def is_wanted(self, name: str) -> bool:
        """Whether no candidate in the groups before a candidate's was valid."""
        configs, group = self.candidates.configs, self.job.setup.order.group
        number = group(configs[name])
        valid = (other for other, m in self.candidates.results.items() if m.failure is None)
        return not any(group(configs[other]) < number for other in valid)

    def is_good(self, lane: Lane) -> bool:
        """Whether a candidate is as fast as the job needs."""
        return len(lane.samples_s) >= 3 and typical_s(lane.samples_s) <= self.job.goal.enough_s

    def alone(self) -> AbstractContextManager[None]:
        """Keep other processes of this host from measuring on the same device inside the block, if possible."""
        # For at most half of the rest of a budget: a longer wait would leave too little of it to measure in.
        return nullcontext() if self._turn is None else self._turn.taken(self.left_s() / 2)

    def tell(
        self, doing: Doing, done: int, total: int, latest: Measurement | None = None, since_s: float | None = None
    ) -> None:
        """Report progress; `since_s` is the start of the phase, if it is not the start of the job."""
        if self.job.on_step is None:
            return
        now_s = self.clock_s()
        raced = {lane.name: lane.value_s for lane in self.lanes if lane.samples_s}
        name = min(raced, key=raced.__getitem__, default=None)
        best_s, best = (None, None) if name is None else (raced[name], self.candidates.configs[name])
        spent_s = now_s - (self.started_s if since_s is None else since_s)
        left_s = min(spent_s * (total - done) / done, max(self.left_s(), 0.0)) if done else None
        failures = Counter(m.failure.kind for m in self.candidates.results.values() if m.failure is not None)
        self.job.on_step(Step(doing, done, total, now_s - self.started_s, failures, best_s, best, latest, left_s))

    def try_all(self, todo: list[str]) -> bool:
        """Try candidates until one is fast enough; return False if the budget ended first."""
        trials = self.job.budget.trials
        for names in self._groups(todo):
            allowed = names if trials is None else names[: trials - self.ran]
            self._start_compiling(allowed)
            for name in self._in_turn(allowed):
                if self.ran and self.left_s(TRYING) <= 0:
                    return False
                compiled = self._wait_for(name)
                if compiled is None and self.compiling is not None:
                    return False  # the budget ended while it compiled
                measurement = self._try(name, compiled)
                self.ran += 1
                self.tell("trying", self.ran, len(todo), measurement)
                if self.lanes and self.lanes[-1].name == name and self._is_enough(self.lanes[-1]):
                    return True
            if len(allowed) < len(names):
                return False
        return True

    def _groups(self, todo: list[str]) -> Iterator[list[str]]:
        """Yield the candidates in order; a group is empty if an earlier one had a valid candidate."""
        group, configs = self.job.setup.order.group, self.candidates.configs
        # These go first: if the budget ends early, they at least have been measured. Their group is built meanwhile.
        ahead = [name for name in dict.fromkeys((self.job.incumbent, self.candidates.heuristic)) if name in todo]
        rest = [name for name in todo if name not in ahead]
        if {group(configs[name]) for name in ahead} != {group(configs[name]) for name in rest[:1]}:
            yield ahead
            ahead = []
        for _, members in groupby(rest, key=lambda name: group(configs[name])):
            yield [*ahead, *filter(self.is_wanted, members)]
            ahead = []

    def _start_compiling(self, names: list[str]) -> None:
        if self.compiling is None:
            return
        self.compiling.start(names)
        if not self.job.setup.isolate or not names:
            return
        first = self._wait_for(names[0])
        if first is None or (not isinstance(first, Exception) and first.on_disk):
            return
        # A worker does not see programs that this process compiles in memory after the fork.
        for done, name in enumerate(names, 1):
            if self._wait_for(name) is None:
                break
            self.tell("compiling", done, len(names))

    def _in_turn(self, names: list[str]) -> Iterable[str]:
        """Return candidates in order; where some may be left out, as they are compiled, and without those."""
        against, configs = self.job.setup.reason_against, self.candidates.configs
        if against is None or self.compiling is None:
            return names
        return self.compiling.in_turn(names, self._patience_s, lambda name: against(configs[name]))

    def _wait_for(self, name: str) -> Compiled | Exception | None:
        return None if self.compiling is None else self.compiling.result(name, self._patience_s())

    def _patience_s(self) -> float | None:
        """Return how long to wait for a build: the first of a job may take any time."""
        return None if self.job.budget.seconds is None or not self.ran else max(self.left_s(TRYING), 0.0)

    def _try(self, name: str, compiled: Compiled | Exception | None) -> Measurement:
        if isinstance(compiled, Exception):
            return self.candidates.record(name, failed(compiled))
        if compiled is not None and compiled.program is not None:
            twin = self.programs.setdefault(compiled.program, name)
            if twin != name:
                self.twins[name] = twin
                return self.candidates.copy(twin, name, compiled.seconds)
        index = list(self.candidates.configs).index(name)
        with self.alone():
            trial = self.runner.first(index)
        if trial.failure is None:
            self.lanes.append(self._lane(name, index, trial.sample_s))
        return self.candidates.record(name, trial, compiled=compiled)

    def _lane(self, name: str, index: int, first_s: float) -> Lane:
        def take() -> float | None:
            trial = self.batches.take(name, partial(self.runner.sample, index))
            if trial.failure is None:
                return trial.sample_s
            known = self.candidates.results[name]
            found = self.candidates.record(name, trial)
            self.candidates.results[name] = found._replace(compile_s=known.compile_s, extra=known.extra)
            return None

        return Lane(name, take, first_s, wins_ties=name in (self.job.incumbent, self.candidates.heuristic))

    def _is_enough(self, lane: Lane) -> bool:
        """Whether a candidate that was just tried is as fast as the job needs; sampled only if it may be."""
        if lane.first_s > 3 * self.job.goal.enough_s:
            return False
        with self.alone():
            while len(lane.samples_s) < 3:
                if not lane.run_once():
                    return False
                self.renew([lane])
            return self.is_good(lane)

    def renew(self, lanes: Sequence[Lane]) -> bool:
        """Discard the samples that had fewer runs than samples have from now on; return whether there were any."""
        void = self.batches.renew(lane.name for lane in lanes)
        for lane in lanes:
            if lane.name in void:
                lane.samples_s.clear()
        return bool(void)


def _race(run: JobRun[Any], probes: Iterable[Probe]) -> tuple[bool, Disturbances]:
    """Sample the valid candidates; return False if the budget ended the race, and the disturbances meanwhile."""
    job, results = run.job, run.candidates.results
    ends_s = math.inf if job.budget.seconds is None else run.started_s + job.budget.seconds
    since_s = run.clock_s()
    race = Race(
        run.lanes,
        run.rng,
        run.clock_s,
        ends_s=ends_s,
        on_round=lambda done: run.tell("racing", min(int(100 * done), 99), 100, since_s=since_s),
        is_good=run.is_good,
        renew=run.renew,
        objective=job.goal.objective,
    )
    watch = DisturbanceWatch(probes)
    finished = race.qualify() if job.brief else race.run(spent_s=run.elapsed_s)
    disturbances = watch.disturbances([lane.samples_s for lane in race.finalists])
    if not disturbances.quiet and not job.brief:
        race.finalists += _unlucky(run.lanes, race.finalists)
        finished = _sample_again(run, race.finalists, ends_s) and finished
        disturbances = watch.disturbances([lane.samples_s for lane in race.finalists])
    finalists = {lane.name for lane in race.finalists}
    for lane in run.lanes:
        known = results[lane.name]
        if known.failure is None and lane.samples_s:
            dropped = lane.name not in finalists
            results[lane.name] = known._replace(samples_s=tuple(lane.samples_s), dropped=dropped)
    for name, twin in run.twins.items():
        run.candidates.copy(twin, name, results[name].compile_s)
    if run.ran:
        run.tell("racing", 100, 100, since_s=since_s)
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
