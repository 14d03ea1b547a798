"""One tuning job: which candidates must run, running them within the budget, and deciding."""

from __future__ import annotations

import math
import os
import random
import re
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from tunebook._codec import TAG, encode, fingerprint_of
from tunebook._decide import Verdict, decide
from tunebook._errors import CodecError, DefinitionError, TuningFailed
from tunebook._measure import Stopwatch, Trial, failed, first_trial, sample
from tunebook._race import Lane, Race, typical_s
from tunebook._record import identity
from tunebook._runner import InProcess, Isolated, Launches, Runner
from tunebook._types import Measurement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Future, ThreadPoolExecutor

    from tunebook._types import Json

Cfg = TypeVar("Cfg")

# A failure is remembered so that it is not paid for at every start, but not for ever: a driver update, a freed-up
# device or a fixed compiler makes it worth another try.
FAILURE_LIFETIME_S: Final = 7 * 24 * 3600.0

_UNITS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_budget(budget: float | str | None) -> float | None:
    """Return a budget in seconds; None is no limit.

    >>> parse_budget("1.5m"), parse_budget(20), parse_budget(None)
    (90.0, 20.0, None)
    """
    if budget is None:
        return None
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|m|h)\s*", budget)
        seconds = float(match[1]) * _UNITS[match[2]] if match else -1.0
    else:
        seconds = float(budget)
    if not seconds > 0:
        raise DefinitionError(f'budget={budget!r} is no length of time; write "500ms", "30s", "10m", "2h" or seconds')
    return seconds


Doing: TypeAlias = Literal["compiling", "trying", "racing"]


class Step(NamedTuple):
    """Where a tuning job is; what a progress bar shows.

    Candidates are compiled, then tried one by one, then raced against each other. `done` of `total` counts candidates,
    and of a race percent: it may end early. The last step of a job has all of its race done.
    """

    doing: Doing
    done: int
    total: int
    elapsed_s: float
    failures: int = 0
    best_s: float | None = None
    best: object = None
    latest: Measurement | None = None


class Job(NamedTuple, Generic[Cfg]):
    """What is to be tuned. `known` are measurements to reuse; `incumbent` is the fingerprint of an earlier choice.

    `isolate` runs the candidates in a worker process, where each step of one may take `timeout_s`. `unfinished` says
    that a budget ended the tuning that `known` is from: those that were still in the race go on.
    """

    make_fn: Callable[[Cfg], Callable[..., object]]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    candidates: Sequence[Cfg]
    heuristic: Cfg | None = None
    incumbent: str | None = None
    known: Sequence[Measurement] = ()
    unfinished: bool = False
    code: str = ""
    environment: str = ""
    mode: str = "forward"
    compile: Callable[[Cfg], None] | None = None
    check: Callable[[Any], str | None] | None = None
    isolate: bool = False
    timeout_s: float = 60.0
    budget_s: float | None = None
    on_step: Callable[[Step], None] | None = None


class Tuned(NamedTuple, Generic[Cfg]):
    """What a tuning job found. `complete` is False if the budget ended it: the best so far stands.

    `verdict` is None if a tuner that is not ours chose. `configs` are the candidates by fingerprint.
    """

    config: Cfg
    verdict: Verdict | None
    measurements: tuple[Measurement, ...]
    ran: int
    complete: bool
    seconds: float
    configs: Mapping[str, Any]

    @property
    def ranking(self) -> list[tuple[Cfg, float]]:
        """The configurations that worked with their seconds, fastest first."""
        ranked = () if self.verdict is None else self.verdict.ranking
        return [(self.configs[r.measurement.fingerprint], r.value_s) for r in ranked]


class Tuner:
    """Finds the fastest candidate: each is tried and checked once, then they race (see `_race`).

    `warmup` is how often a candidate runs untimed before, and `iters` how often `measure` times a function.

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
    ) -> None:
        if iters < 1 or warmup < 0:
            raise DefinitionError(f"a tuner needs iters >= 1 and warmup >= 0; got iters={iters}, warmup={warmup}")
        self.stopwatch: Final = stopwatch or Stopwatch(warmup=warmup, iters=iters)
        self._compile_threads = compile_threads or os.cpu_count() or 1
        self._clock_s = clock_s
        self._now_s = now_s

    def measure(self, fn: Callable[..., object], *args: Any, **kwargs: Any) -> float:
        """Return the seconds of the fastest of `iters` runs; what the function raises is raised."""
        launch = partial(fn, *args, **kwargs)
        trial = first_trial(launch, self.stopwatch)
        samples: list[float] = []
        while trial.error is None and len(samples) < self.stopwatch.iters:
            trial = sample(launch, self.stopwatch, trial.runs)
            samples.append(trial.sample_s)
        if trial.error is not None:
            raise trial.error
        return min(samples)

    def autotune(
        self,
        make_fn: Callable[[Cfg], Callable[..., object]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        candidates: Iterable[Cfg],
    ) -> Cfg:
        """Return the fastest candidate; `TuningFailed` with each candidate's error if all fail."""
        return self.tune(Job(make_fn=make_fn, args=args, kwargs=kwargs, candidates=list(candidates))).config

    def tune(self, job: Job[Cfg]) -> Tuned[Cfg]:
        """Measure what is not known yet, and decide over all of it."""
        return _Run(job, self.stopwatch, self._clock_s, self._now_s, self._compile_threads).finish()


class _Run(Generic[Cfg]):
    """The state of one job while it runs."""

    def __init__(
        self,
        job: Job[Cfg],
        stopwatch: Stopwatch,
        clock_s: Callable[[], float],
        now_s: Callable[[], float],
        compile_threads: int,
    ) -> None:
        self.job = job
        self.stopwatch = stopwatch
        self.policy = f"{stopwatch.name}/{job.mode}"
        self.clock_s, self.now_s = clock_s, now_s
        self.compile_threads = compile_threads
        self.started = clock_s()
        self.live: dict[str, Cfg] = {}
        self.encoded: dict[str, Json] = {}
        self.heuristic = None if job.heuristic is None else self._admit(job.heuristic)
        for config in job.candidates:
            self._admit(config)
        self.index = {fp: index for index, fp in enumerate(self.live)}
        launches = Launches(list(self.live.values()), job.make_fn, job.args, job.kwargs)
        self.runner: Runner = (
            Isolated(launches, stopwatch, job.check, job.timeout_s)
            if job.isolate
            else InProcess(launches, stopwatch, job.check)
        )
        self.results: dict[str, Measurement] = {}
        self.lanes: list[Lane] = []
        # The order in which candidates run must not depend on where they stand in a list, but be the same each time.
        self.rng = random.Random("".join(sorted(self.live)))  # noqa: S311 - to shuffle
        self.errors: dict[str, Exception] = {}
        self.ran = 0

    def _admit(self, config: Cfg) -> str:
        """Give a candidate its fingerprint."""
        try:
            encoded = encode(config)
        except CodecError:
            # It can still be tuned and used in this process; only writing it down will be refused.
            encoded = {TAG: "unwritable", "v": len(self.live)}
        fp = fingerprint_of(encoded)
        self.live.setdefault(fp, config)
        self.encoded[fp] = encoded
        return fp

    def finish(self) -> Tuned[Cfg]:
        if not self.live:
            raise TuningFailed("there is no candidate to tune", [DefinitionError("the kernel gave no candidates")])
        todo = self._reuse_known()
        with self.runner:
            self._run_all(todo)
            complete = self._race() and self.ran == len(todo)
        verdict = decide(self.results.values(), incumbent=self.job.incumbent, heuristic=self.heuristic)
        if verdict is None:
            raise TuningFailed(f"all {len(self.results)} candidates failed", self._all_errors())
        return Tuned(
            config=self.live[verdict.winner.measurement.fingerprint],
            verdict=verdict,
            measurements=tuple(self.results.values()),
            ran=self.ran,
            complete=complete,
            seconds=self.clock_s() - self.started,
            configs=self.live,
        )

    def _reuse_known(self) -> list[str]:
        """Take over what was measured before under the same conditions; return the fingerprints left to run."""
        here = (self.job.code, self.policy, self.job.environment)
        for m in self.job.known:
            expired = m.failure is not None and (m.failure.expires or 0.0) < self.now_s()
            if m.fingerprint in self.live and identity(m)[1:] == here and not expired:
                self.results[m.fingerprint] = m
        todo = [fp for fp in self.live if fp not in self.results or self._is_unfinished(self.results[fp])]
        self.rng.shuffle(todo)
        # The heuristic's goes first: if the budget ends early, it at least has been measured.
        todo.sort(key=lambda fp: fp != self.heuristic)
        incumbent = self.job.incumbent
        if todo and incumbent in self.results and incumbent not in todo:
            # The newcomers run today; the incumbent's old time was taken on another day. Measured again, it is
            # compared with them on equal terms. The others lost to it then, and that is all that counts now.
            todo.insert(0, incumbent)
            self.results = {fp: replace(m, dropped=True) for fp, m in self.results.items()}
        return todo

    def _is_unfinished(self, m: Measurement) -> bool:
        return self.job.unfinished and m.failure is None and not m.dropped

    def _race(self) -> bool:
        """Sample the candidates that work; False if the budget ended it."""
        ends_s = math.inf if self.job.budget_s is None else self.started + self.job.budget_s
        race = Race(self.lanes, self.rng, self.clock_s, ends_s=ends_s, on_round=self._raced)
        finished = race.run(spent_s=self.clock_s() - self.started)
        finalists = {lane.name for lane in race.finalists}
        for lane in self.lanes:
            known = self.results[lane.name]
            if known.failure is None and lane.samples_s:
                dropped = lane.name not in finalists
                self.results[lane.name] = replace(known, samples_s=tuple(lane.samples_s), dropped=dropped)
        if self.ran:
            self._tell("racing", 100, 100)
        return finished

    def _raced(self, done: float) -> None:
        self._tell("racing", min(int(100 * done), 99), 100)

    def _run_all(self, todo: list[str]) -> None:
        from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - a tenth of the time of `import tunebook`

        pool = ThreadPoolExecutor(self.compile_threads, thread_name_prefix="tunebook-compile")
        try:
            compiled = self._start_compiling(pool, todo)
            for index, fp in enumerate(todo):
                if index and self._left_s() <= 0:
                    break
                measurement = self._run_one(fp, compiled.get(fp))
                if measurement is None:
                    break
                self.results[fp] = measurement
                self.ran += 1
                self._tell("trying", self.ran, len(todo), measurement)
        finally:
            # Not as a with-block: at Ctrl-C that would compile all the rest before it lets go.
            pool.shutdown(cancel_futures=True)

    def _start_compiling(self, pool: ThreadPoolExecutor, todo: list[str]) -> dict[str, Future[float]]:
        """Compile everything before anything runs: a worker process must not be forked while threads hold locks."""
        if self.job.compile is None:
            return {}
        futures = {fp: pool.submit(self._compile, self.live[fp]) for fp in todo}
        deadline = None if self.job.budget_s is None else self.started + self.job.budget_s / 2
        for done, future in enumerate(futures.values(), 1):
            try:
                future.exception(None if deadline is None else max(deadline - self.clock_s(), 0.0))
                self._tell("compiling", done, len(futures))
            except TimeoutError:  # which is what concurrent.futures raises
                break  # half of the budget is gone: measure what there is, and let the rest be cancelled or finish
        return futures

    def _compile(self, config: Cfg) -> float:
        start = self.clock_s()
        if self.job.compile is not None:
            self.job.compile(config)
        return self.clock_s() - start

    def _run_one(self, fp: str, compiled: Future[float] | None) -> Measurement | None:
        """Return the measurement of one candidate, or None if the budget ended while it compiled."""
        compile_s: float | None = None
        if compiled is not None:
            try:
                error = compiled.exception(self._left_s() if self.ran else None)
            except TimeoutError:  # which is what concurrent.futures raises
                return None
            compile_s = compiled.result() if error is None else None
            if isinstance(error, Exception):
                return self._measurement(fp, failed(error), None)
        return self._measurement(fp, self._trial(fp), compile_s)

    def _trial(self, fp: str) -> Trial:
        trial = self.runner.first(self.index[fp])
        if trial.failure is None:
            self.lanes.append(Lane(fp, _Sampler(partial(self._sample, fp))))
        return trial

    def _sample(self, fp: str, runs: int) -> Trial:
        trial = self.runner.sample(self.index[fp], runs)
        if trial.failure is not None:
            self.results[fp] = self._measurement(fp, trial, self.results[fp].compile_s)
        return trial

    def _measurement(self, fp: str, trial: Trial, compile_s: float | None) -> Measurement:
        now, failure = self.now_s(), trial.failure
        if failure is not None:
            failure = replace(failure, expires=now + FAILURE_LIFETIME_S)
        if trial.error is not None:
            trial.error.add_note(f"candidate {self.live[fp]!r}")
            self.errors[fp] = trial.error
        return Measurement(
            config=self.encoded[fp],
            fingerprint=fp,
            code=self.job.code,
            policy=self.policy,
            environment=self.job.environment,
            samples_s=() if failure is not None else (trial.sample_s,),
            failure=failure,
            compile_s=compile_s,
            when=now,
        )

    def _left_s(self) -> float:
        return float("inf") if self.job.budget_s is None else self.job.budget_s - (self.clock_s() - self.started)

    def _tell(self, doing: Doing, done: int, total: int, latest: Measurement | None = None) -> None:
        if self.job.on_step is None:
            return
        raced = {lane.name: typical_s(lane.samples_s) for lane in self.lanes if lane.samples_s}
        best = min(raced, key=raced.__getitem__, default=None)
        self.job.on_step(
            Step(
                doing,
                done,
                total,
                self.clock_s() - self.started,
                failures=sum(m.failure is not None for m in self.results.values()),
                best_s=None if best is None else raced[best],
                best=None if best is None else self.live[best],
                latest=latest,
            )
        )

    def _all_errors(self) -> list[Exception]:
        """One error per failed candidate, in their order: the real ones of this run, and what is remembered."""
        found: list[Exception] = []
        for fp, config in self.live.items():
            failure = self.results[fp].failure if fp in self.results else None
            if fp in self.errors:
                found.append(self.errors[fp])
            elif failure is not None:
                found.append(RuntimeError(f"{config!r}: {failure.message} (remembered)"))
        return found or [ValueError("no candidate gave a valid time")]


class _Sampler:
    """Takes samples of one candidate, each of as many runs as the clock needs."""

    __slots__ = ("_runs", "_take")

    def __init__(self, take: Callable[[int], Trial]) -> None:
        self._take = take
        self._runs = 1

    def __call__(self) -> float | None:
        trial = self._take(self._runs)
        self._runs = trial.runs
        return None if trial.failure is not None else trial.sample_s
