"""One tuning job while it runs: which candidates must run, running them within the budget, and deciding."""

from __future__ import annotations

import math
import random
from collections import Counter
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from tunebook._base.config_codec import TAG, encode, fingerprint_of
from tunebook._base.errors import CodecError, DefinitionError, TuningFailed
from tunebook._base.record_format import identity
from tunebook._base.vocabulary import Measurement
from tunebook._measure.candidate_runner import AgainstModel, InProcess, Isolated, Launches, Runner, Together
from tunebook._measure.disturbance import Disturbances, DisturbanceWatch
from tunebook._measure.stopwatch import Stopwatch, Trial, failed
from tunebook._statistics.decide import decide
from tunebook._statistics.race import Lane, Race, typical_s
from tunebook._tuning.job import Doing, Job, Step, Tuned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from tunebook._base.vocabulary import Json
    from tunebook._measure.compile_pool import Compiled, Compiling
    from tunebook._measure.device_lock import DeviceTurn
    from tunebook._measure.disturbance import Probe

Cfg = TypeVar("Cfg")

# A failure is remembered so that it is not paid for at every start, but not for ever: a driver update, a freed-up
# device or a fixed compiler makes it worth another try.
FAILURE_LIFETIME_S: Final = 7 * 24 * 3600.0
# The part of a budget after which no further candidate is tried: the rest is for telling apart those that were.
TRYING: Final = 0.6
_PROGRAM: Final = "program"  # in a measurement: a digest of what the candidate compiled to


def _runner(
    job: Job[Any], configs: Sequence[Any], stopwatch: Stopwatch, calm: Callable[[], AbstractContextManager[None]]
) -> Runner:
    if job.runner is not None:
        return job.runner(configs)
    # The heuristic's configuration is the first one.
    model = None if job.compare is None or job.heuristic is None else partial(AgainstModel, 0, job.compare, stopwatch)

    runners = [
        InProcess(
            Launches(configs, part.make_fn, part.args, part.kwargs, part.mutated),
            stopwatch,
            part.check,
            None if model is None else model(),
        )
        for part in job.parts
    ]
    runner = Together(runners, [part.weight for part in job.parts]) if len(runners) > 1 else runners[0]
    return Isolated(runner, job.timeout_s, calm) if job.isolate else runner


def identify(config: object, number: int) -> tuple[str, Json]:
    """Return a candidate's fingerprint, and how it is written; by its number, if it cannot be."""
    try:
        encoded = encode(config)
    except CodecError:
        # It can still be tuned and used in this process; only writing it down will be refused.
        encoded = {TAG: "unwritable", "v": number}
    return fingerprint_of(encoded), encoded


class JobRun(Generic[Cfg]):
    """The state of one job while it runs. Candidates are known by their fingerprints."""

    def __init__(
        self, job: Job[Cfg], stopwatch: Stopwatch, clock_s: Callable[[], float], now_s: Callable[[], float]
    ) -> None:
        self.job = job
        self.stopwatch = stopwatch
        self.policy = f"{stopwatch.name}/{job.mode}"
        self.clock_s, self.now_s = clock_s, now_s
        self.started = clock_s()
        self.live: dict[str, Cfg] = {}
        self.encoded: dict[str, Json] = {}
        self.heuristic = None if job.heuristic is None else self._admit(job.heuristic)
        for config in job.candidates:
            self._admit(config)
        self.index = {fp: index for index, fp in enumerate(self.live)}
        self.results: dict[str, Measurement] = {}
        self.lanes: list[Lane] = []
        self.programs: dict[str, str] = {}
        self.twins: dict[str, str] = {}
        self.enough = False
        # The order in which candidates run must not depend on where they stand in a list, but be the same each time.
        self.rng = random.Random("".join(sorted(self.live)))  # noqa: S311 - to shuffle
        self.errors: dict[str, Exception] = {}
        self.ran = 0
        self.waiting_s = 0.0
        self.racing_since_s = math.inf
        self.disturbances = Disturbances()
        self.turn: DeviceTurn | None = None

    def _admit(self, config: Cfg) -> str:
        """Give a candidate its fingerprint."""
        fp, encoded = identify(config, len(self.live))
        self.live.setdefault(fp, config)
        self.encoded[fp] = encoded
        return fp

    def finish(
        self, compiling: Compiling[Cfg] | None, probes: Iterable[Probe] = (), turn: DeviceTurn | None = None
    ) -> Tuned[Cfg]:
        if not self.live:
            raise TuningFailed("there is no candidate to tune", [DefinitionError("the kernel gave no candidates")])
        todo = self.reuse_known()
        calm = nullcontext if compiling is None else compiling.quiet
        self.runner = _runner(self.job, list(self.live.values()), self.stopwatch, calm)
        self.turn = turn
        with self.runner:
            tried = self._try_groups(todo, compiling)
            with self._alone() if self.lanes else nullcontext():
                complete = self._race(probes if turn is None else (*probes, turn)) and tried
        verdict = decide(
            self.results.values(),
            incumbent=self.job.incumbent,
            heuristic=self.heuristic,
            objective=self.job.objective,
        )
        if verdict is None:
            raise self.failure()
        return Tuned(
            config=self.live[verdict.winner.measurement.fingerprint],
            verdict=verdict,
            measurements=tuple(self.results.values()),
            ran=self.ran,
            complete=complete,
            seconds=self.clock_s() - self.started,
            configs=self.live,
            disturbances=self.disturbances,
            when=self.now_s(),
            waiting_s=self.waiting_s,
            default=self.heuristic,
            roofline=self.job.roofline,
        )

    def failure(self) -> TuningFailed:
        failed = tuple(self.results.values())
        return TuningFailed(f"all {len(failed)} candidates failed", self._all_errors(), failed)

    # ------------------------------------------------------------------------------------------------ what must run

    def reuse_known(self) -> list[str]:
        """Take over what was measured before under the same conditions; return the fingerprints left to run."""
        here = (self.job.code, self.policy, self.job.environment)
        for m in self.job.known:
            expired = m.failure is not None and (m.failure.expires or 0.0) < self.now_s()
            if m.fingerprint in self.live and identity(m)[1:] == here and not expired:
                self.results[m.fingerprint] = m
                if isinstance(program := m.extra.get(_PROGRAM), str):
                    self.programs.setdefault(program, m.fingerprint)
        todo = [fp for fp in self.live if fp not in self.results or self._is_unfinished(self.results[fp])]
        self.rng.shuffle(todo)
        todo.sort(key=lambda fp: (self._group(fp), -self.job.order.priority(self.live[fp])))
        incumbent = self.job.incumbent
        if incumbent in self.results and incumbent not in todo and any(self._is_wanted(fp) for fp in todo):
            # The newcomers run today; the incumbent's old time was taken on another day. Measured again, it is
            # compared with them on equal terms. The others lost to it then, and that is all that counts now.
            todo.insert(0, incumbent)
            self.results = {fp: m._replace(dropped=True) for fp, m in self.results.items()}
        return todo

    def _is_unfinished(self, m: Measurement) -> bool:
        return self.job.unfinished and m.failure is None and not m.dropped

    def _group(self, fp: str) -> int:
        return self.job.order.group(self.live[fp])

    def _is_wanted(self, fp: str) -> bool:
        """Whether nothing in the groups before a candidate's was valid."""
        group = self._group(fp)
        return not any(m.failure is None and self._group(name) < group for name, m in self.results.items())

    # ------------------------------------------------------------------------------------------------------- trying

    def _try_groups(self, todo: list[str], compiling: Compiling[Cfg] | None) -> bool:
        """Try each candidate once; False if the budget ended it."""
        # These go first: if the budget ends early, they at least have been measured.
        ahead = [fp for fp in (self.job.incumbent, self.heuristic) if fp in todo]
        rest = [fp for fp in todo if fp not in ahead]
        for group, members in groupby([*ahead, *rest], key=lambda fp: None if fp in ahead else self._group(fp)):
            wanted = [fp for fp in members if group is None or self._is_wanted(fp)]
            if self.enough:
                return True
            if not self._try(wanted, len(todo), compiling):
                return False
        return True

    def _try(self, names: list[str], total: int, compiling: Compiling[Cfg] | None) -> bool:
        trials_left = math.inf if self.job.budget.trials is None else self.job.budget.trials - self.ran
        allowed = names[: int(min(trials_left, len(names)))]
        if compiling is not None:
            self._start_compiling(compiling, allowed)
        for fp in allowed:
            if self.ran and self._left_s(TRYING) <= 0:
                return False
            compiled = None if compiling is None else self._wait_for(compiling, fp)
            if compiled is None and compiling is not None:
                return False  # the budget ended while it compiled
            measurement = self._try_one(fp, compiled)
            self.results[fp] = measurement
            self.ran += 1
            self._tell("trying", self.ran, total, measurement)
            if self._is_enough(fp):
                return True
        return len(allowed) == len(names)

    def _start_compiling(self, compiling: Compiling[Cfg], names: list[str]) -> None:
        compiling.start(names)
        if not self.job.isolate or not names:
            return
        first = self._wait_for(compiling, names[0])
        if first is None or (not isinstance(first, Exception) and first.on_disk):
            return
        # What a process compiles in its memory is not seen by a worker that was forked before.
        for done, fp in enumerate(names, 1):
            if self._wait_for(compiling, fp) is None:
                break
            self._tell("compiling", done, len(names))

    def _wait_for(self, compiling: Compiling[Cfg], fp: str) -> Compiled | Exception | None:
        began_s = self.clock_s()
        compiled = compiling.result(fp, self._patience_s())
        self.waiting_s += self.clock_s() - began_s
        return compiled

    def _try_one(self, fp: str, compiled: Compiled | Exception | None) -> Measurement:
        if isinstance(compiled, Exception):
            return self._measurement(fp, failed(compiled))
        twin = fp if compiled is None or compiled.program is None else self.programs.setdefault(compiled.program, fp)
        if compiled is not None and twin != fp:
            self.twins[fp] = twin
            return self._copied(self.results[twin], fp, compiled.seconds)
        with self._alone():
            trial = self.runner.first(self.index[fp])
        if trial.failure is None:
            self.lanes.append(Lane(fp, _Sampler(partial(self._sample, fp)), trial.sample_s))
        return self._measurement(fp, trial, compiled)

    def _copied(self, m: Measurement, fp: str, compile_s: float | None) -> Measurement:
        """Return what was measured of one candidate as that of another, which compiles to the same program."""
        return m._replace(
            config=self.encoded[fp],
            fingerprint=fp,
            compile_s=compile_s,
            extra={**m.extra, "same_program_as": m.fingerprint},
        )

    def _is_enough(self, fp: str) -> bool:
        """Whether a candidate that was just tried is as fast as the job needs; it is sampled only if it may be."""
        if not self.lanes or self.lanes[-1].name != fp or self.results[fp].samples_s[0] > 3 * self.job.enough_s:
            return False
        lane = self.lanes[-1]
        with self._alone():
            self.enough = all(lane.run_once() for _ in range(3)) and self._is_good(lane)
        return self.enough

    def _alone(self) -> AbstractContextManager[None]:
        """Measure in the block while no other process of this host does on the same device, as far as that can be."""
        # Half of what is left of a budget, at most: who has waited for all of it would have none left to measure in.
        return nullcontext() if self.turn is None else self.turn.taken(self._left_s() / 2)

    def _is_good(self, lane: Lane) -> bool:
        return len(lane.samples_s) >= 3 and typical_s(lane.samples_s) <= self.job.enough_s

    # ------------------------------------------------------------------------------------------------------- racing

    def _race(self, probes: Iterable[Probe]) -> bool:
        """Sample the candidates that work; False if the budget ended it."""
        ends_s = math.inf if self.job.budget.seconds is None else self.started + self.job.budget.seconds
        self.racing_since_s = self.clock_s()
        race = Race(
            self.lanes,
            self.rng,
            self.clock_s,
            ends_s=ends_s,
            on_round=self._raced,
            is_good=self._is_good,
            objective=self.job.objective,
        )
        watch = DisturbanceWatch(probes)
        finished = race.qualify() if self.job.brief else race.run(spent_s=self.clock_s() - self.started)
        self.disturbances = watch.disturbances([lane.samples_s for lane in race.finalists])
        if not self.disturbances.quiet and not self.job.brief:
            finished = self._go_on(race.finalists, ends_s) and finished
            self.disturbances = watch.disturbances([lane.samples_s for lane in race.finalists])
        finalists = {lane.name for lane in race.finalists}
        for lane in self.lanes:
            known = self.results[lane.name]
            if known.failure is None and lane.samples_s:
                dropped = lane.name not in finalists
                self.results[lane.name] = known._replace(samples_s=tuple(lane.samples_s), dropped=dropped)
        for fp, twin in self.twins.items():
            self.results[fp] = self._copied(self.results[twin], fp, self.results[fp].compile_s)
        if self.ran:
            self._tell("racing", 100, 100)
        return finished

    def _go_on(self, finalists: Iterable[Lane], ends_s: float) -> bool:
        """Take as many samples again, in turn, because something disturbed the first; False if the time was up."""
        lanes = list(finalists)
        for _ in range(max((len(lane.samples_s) for lane in lanes), default=0) if len(lanes) > 1 else 0):
            self.rng.shuffle(lanes)
            for lane in tuple(lanes):
                if self.clock_s() >= ends_s:
                    return False
                if not lane.run_once():
                    lanes.remove(lane)
        return True

    def _raced(self, done: float) -> None:
        self._tell("racing", min(int(100 * done), 99), 100)

    def _sample(self, fp: str, runs: int) -> Trial:
        trial = self.runner.sample(self.index[fp], runs)
        if trial.failure is not None:
            known = self.results[fp]
            self.results[fp] = self._measurement(fp, trial)._replace(compile_s=known.compile_s, extra=known.extra)
        return trial

    def _measurement(self, fp: str, trial: Trial, compiled: Compiled | None = None) -> Measurement:
        now, failure = self.now_s(), trial.failure
        if failure is not None:
            failure = failure._replace(expires=now + FAILURE_LIFETIME_S)
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
            compile_s=None if compiled is None else compiled.seconds,
            when=now,
            extra={} if compiled is None or compiled.program is None else {_PROGRAM: compiled.program},
        )

    # -------------------------------------------------------------------------------------------------- time, errors

    def _left_s(self, share: float = 1.0) -> float:
        budget_s = self.job.budget.seconds
        return math.inf if budget_s is None else share * budget_s - (self.clock_s() - self.started)

    def _patience_s(self) -> float | None:
        """Return how long a candidate may go on compiling; the first one as long as it takes."""
        return None if self.job.budget.seconds is None or not self.ran else max(self._left_s(TRYING), 0.0)

    def _tell(self, doing: Doing, done: int, total: int, latest: Measurement | None = None) -> None:
        if self.job.on_step is None:
            return
        now_s = self.clock_s()
        raced = {lane.name: lane.value_s for lane in self.lanes if lane.samples_s}
        best = min(raced, key=raced.__getitem__, default=None)
        spent_s = now_s - (self.racing_since_s if doing == "racing" else self.started)
        left_s = spent_s * (total - done) / done if done else None
        self.job.on_step(
            Step(
                doing,
                done,
                total,
                now_s - self.started,
                failures=Counter(m.failure.kind for m in self.results.values() if m.failure is not None),
                best_s=None if best is None else raced[best],
                best=None if best is None else self.live[best],
                latest=latest,
                left_s=None if left_s is None else min(left_s, max(self._left_s(), 0.0)),
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
