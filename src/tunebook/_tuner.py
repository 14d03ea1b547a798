"""One tuning job: which candidates must run, running them within the budget, and deciding."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeVar

from tunebook._codec import TAG, encode, fingerprint_of
from tunebook._decide import Verdict, decide
from tunebook._errors import CodecError, DefinitionError, TuningFailed
from tunebook._measure import Stopwatch, Trial, failed, run_trial
from tunebook._record import identity
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


class Step(NamedTuple):
    """Where a tuning job is, after one more candidate; what a progress bar shows."""

    doing: Literal["compiling", "measuring"]
    done: int
    total: int
    elapsed_s: float
    failures: int = 0
    best_s: float | None = None
    best: object = None
    latest: Measurement | None = None


class Job(NamedTuple, Generic[Cfg]):
    """What is to be tuned. `known` are measurements to reuse; `incumbent` is the fingerprint of an earlier choice."""

    make_fn: Callable[[Cfg], Callable[..., object]]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    candidates: Sequence[Cfg]
    heuristic: Cfg | None = None
    incumbent: str | None = None
    known: Sequence[Measurement] = ()
    code: str = ""
    environment: str = ""
    mode: str = "forward"
    compile: Callable[[Cfg], None] | None = None
    check: Callable[[Any], str | None] | None = None
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
    """Measures candidates one after the other, each `warmup` times untimed and `iters` times timed.

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
        trial = run_trial(lambda: fn(*args, **kwargs), self.stopwatch)
        if trial.error is not None:
            raise trial.error
        return min(trial.samples_s)

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
        # The heuristic's goes first: if the budget ends early, it at least has been measured.
        self.heuristic = None if job.heuristic is None else self._admit(job.heuristic)
        for config in job.candidates:
            self._admit(config)
        self.results: dict[str, Measurement] = {}
        self.errors: list[Exception] = []
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
        self._run_all(todo)
        complete = self.ran == len(todo)
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
        todo = [fp for fp in self.live if fp not in self.results]
        incumbent = self.job.incumbent
        if todo and incumbent in self.results:
            # The newcomers run today; the incumbent's old time was taken on another day. Measured again, it is
            # compared with them on equal terms.
            todo.insert(0, incumbent)
        return todo

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
                self._tell(self._measured(measurement, len(todo)))
        finally:
            # Not as a with-block: at Ctrl-C that would compile all the rest before it lets go.
            pool.shutdown(cancel_futures=True)

    def _start_compiling(self, pool: ThreadPoolExecutor, todo: list[str]) -> dict[str, Future[float]]:
        """Compile everything before anything is timed: a compiler on the next core would slow the candidate down."""
        if self.job.compile is None:
            return {}
        futures = {fp: pool.submit(self._compile, self.live[fp]) for fp in todo}
        deadline = None if self.job.budget_s is None else self.started + self.job.budget_s / 2
        for done, future in enumerate(futures.values(), 1):
            try:
                future.exception(None if deadline is None else max(deadline - self.clock_s(), 0.0))
                self._tell(Step("compiling", done, len(futures), self.clock_s() - self.started))
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
        config = self.live[fp]
        compile_s: float | None = None
        if compiled is not None:
            try:
                error = compiled.exception(self._left_s() if self.ran else None)
            except TimeoutError:  # which is what concurrent.futures raises
                return None
            compile_s = compiled.result() if error is None else None
            if isinstance(error, Exception):
                return self._measurement(fp, failed(error), None)
        return self._measurement(fp, self._trial(config), compile_s)

    def _trial(self, config: Cfg) -> Trial:
        # Building the function is part of the trial: a factory that rejects a configuration fails that one only.
        launch = _Launch(partial(self.job.make_fn, config), self.job.args, self.job.kwargs)
        times = [min(m.valid_samples_s) for m in self.results.values() if m.failure is None and m.valid_samples_s]
        return run_trial(launch, self.stopwatch, check=self.job.check, best_s=min(times, default=None))

    def _measurement(self, fp: str, trial: Trial, compile_s: float | None) -> Measurement:
        now, failure = self.now_s(), trial.failure
        if failure is not None:
            failure = replace(failure, expires=now + FAILURE_LIFETIME_S)
        if trial.error is not None:
            trial.error.add_note(f"candidate {self.live[fp]!r}")
            self.errors.append(trial.error)
        return Measurement(
            config=self.encoded[fp],
            fingerprint=fp,
            code=self.job.code,
            policy=self.policy,
            environment=self.job.environment,
            samples_s=trial.samples_s,
            failure=failure,
            compile_s=compile_s,
            when=now,
        )

    def _left_s(self) -> float:
        return float("inf") if self.job.budget_s is None else self.job.budget_s - (self.clock_s() - self.started)

    def _tell(self, step: Step) -> None:
        if self.job.on_step is not None:
            self.job.on_step(step)

    def _measured(self, latest: Measurement, total: int) -> Step:
        verdict = decide(self.results.values(), incumbent=self.job.incumbent, heuristic=self.heuristic)
        return Step(
            "measuring",
            self.ran,
            total,
            self.clock_s() - self.started,
            failures=sum(m.failure is not None for m in self.results.values()),
            best_s=None if verdict is None else verdict.winner.value_s,
            best=None if verdict is None else self.live[verdict.winner.measurement.fingerprint],
            latest=latest,
        )

    def _all_errors(self) -> list[Exception]:
        """One error per failed candidate: the real ones of this run, and what is remembered of earlier ones."""
        remembered: list[Exception] = [
            RuntimeError(f"{self.live[m.fingerprint]!r}: {m.failure.message} (remembered)")
            for m in self.results.values()
            if m.failure is not None and m.when < self.now_s() and not self.ran
        ]
        return [*self.errors, *remembered] or [ValueError("no candidate gave a valid time")]


class _Launch:
    """Calls the candidate's function on the job's arguments; the function is made at the first call."""

    __slots__ = ("_args", "_fn", "_kwargs", "_make")

    def __init__(
        self, make: Callable[[], Callable[..., object]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._make, self._args, self._kwargs = make, args, kwargs
        self._fn: Callable[..., object] | None = None

    def __call__(self) -> object:
        if self._fn is None:
            self._fn = self._make()
        return self._fn(*self._args, **self._kwargs)
