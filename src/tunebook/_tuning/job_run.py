"""A job while it runs: each candidate is tried once, then the valid ones race."""

from __future__ import annotations

import atexit
import math
import os
from collections import Counter
from contextlib import nullcontext, suppress
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Final, Generic, Self, TypeVar

from tunebook._base.environment_variables import lock_root
from tunebook._base.errors import LeftOut
from tunebook._base.locks import InterruptSafeLock
from tunebook._base.vocabulary import Failure
from tunebook._measure.stopwatch import Batches, Runner, Stopwatch, Trial, failed
from tunebook._statistics.decide import TIE_CEILING
from tunebook._statistics.race import HOPELESS, HOPELESS_AT_ONCE, Lane, Race, typical_s
from tunebook._tuning.job import DIED, PROGRAM, TRYING, CandidateSet, Doing, Job, Step
from tunebook.stores._files import Maker, this_process

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tunebook._base.vocabulary import Measurement
    from tunebook._measure.compile_pool import Compiled, Compiling
    from tunebook._measure.device_lock import DeviceTurn

Cfg = TypeVar("Cfg")

# A candidate that was so many times slower in an interrupted tuning gets two runs in the next one, and leaves if both
# say the same: a disturbed run takes three times as long now and then, but seldom in two processes.
SLOW_BEFORE: Final = 2.0
LOST_TO: Final = "lost_to"  # in a measurement: the fingerprint of the candidate that led the race when this one left


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
        self.racing: Race | None = None
        self.ran = 0
        self._slow_before: set[str] = set()
        self._lost: dict[str, Measurement] = {}  # to the incumbent, in the last tuning
        self.before: Measurement | None = None  # of the incumbent, in the last tuning
        self._running, self._since_s = "", 0.0
        self._told: tuple[Doing, int, int] = ("trying", 0, len(job.candidates))
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
        if self.job.died in configs and self.job.died not in results:
            self.candidates.record(self.job.died, Trial(failure=Failure("crash", DIED)))
        going_on = set()
        unjudged = self._unjudged()
        results.update({name: results[name]._replace(dropped=False) for name in unjudged})
        if unjudged or not self.job.history.complete:
            self._drop_hopeless()
            going_on = {name for name, m in results.items() if m.failure is None and not m.dropped}
        if len(going_on) == 1 and len(results) == len(configs):
            going_on.clear()  # nothing is left that it could race
        todo = [name for name in configs if name not in results or name in going_on]
        self.rng.shuffle(todo)
        todo.sort(key=lambda name: (order.group(configs[name]), -order.priority(configs[name])))
        incumbent = self.job.incumbent
        if incumbent in results and incumbent not in todo and any(map(self.is_wanted, todo)):
            # The newcomers run today; the incumbent's old time was taken on another day. Measured again, it is compared
            # with them on equal terms. The others lost to it then, so their old times need not compete now.
            today = [incumbent, *self._surely_faster(results[incumbent])]
            todo[:0] = today
            self.before = results[incumbent]
            self._lost = {name: m for name, m in results.items() if m.failure is None and name not in today}
            lost_to = {LOST_TO: incumbent}
            results.update(
                {name: m._replace(dropped=True, extra={**lost_to, **m.extra}) for name, m in results.items()}
            )
        return todo

    def _surely_faster(self, incumbent: Measurement) -> list[str]:
        """Return the known winners that are clearly faster: they were not candidates when the incumbent was chosen."""
        limit_s = (1 - TIE_CEILING) * typical_s(incumbent.valid_samples_s or (math.inf,))
        stayed = {name: m.valid_samples_s for name, m in self.candidates.results.items() if not m.dropped}
        return [name for name, samples_s in stayed.items() if samples_s and typical_s(samples_s) < limit_s]

    def _unjudged(self) -> list[str]:
        """Return the candidates that left a race behind one that is not a candidate any more, or fails now.

        Nothing says how fast they are beside the others of today.
        """
        configs, results = self.candidates.configs, self.candidates.results
        valid = {name: m for name, m in results.items() if m.failure is None}
        # Records of older versions do not tell the leader: then it is gone if nobody is left who did not leave.
        some_leader = self.job.incumbent is None or not all(m.dropped for m in valid.values())
        leaders = {name: m.extra.get(LOST_TO) for name, m in valid.items() if m.dropped}
        may_lead = {name for name in configs if name not in results or name in valid}
        return [name for name, leader in leaders.items() if not (some_leader if leader is None else leader in may_lead)]

    def todo_without_incumbent(self) -> list[str]:
        """Return the candidates that had lost to the incumbent, if that was measured again and fails now."""
        results = self.candidates.results
        if not self._lost or results[str(self.job.incumbent)].failure is None:
            return []
        results.update({name: m._replace(dropped=False) for name, m in self._lost.items()})
        self._drop_hopeless()
        return [name for name in self._lost if not results[name].dropped]

    def _drop_hopeless(self) -> None:
        """Leave out the candidates of an unfinished tuning that were many times slower than its best; note the slow."""
        results = self.candidates.results
        valid = {name: m.valid_samples_s for name, m in results.items() if m.failure is None and m.valid_samples_s}
        best_s = min(map(min, valid.values()), default=0.0)
        for name, samples_s in valid.items():
            if name in (self.candidates.heuristic, self.job.incumbent):
                continue
            margin = HOPELESS if len(samples_s) > 1 else HOPELESS_AT_ONCE
            if min(samples_s) > margin * best_s:
                results[name] = results[name]._replace(dropped=True)
            elif min(samples_s) > SLOW_BEFORE * best_s:
                self._slow_before.add(name)

    def leave_out_slow(self) -> None:
        """Take the candidates out of the race that are slow in this process too, after one sample each."""
        limit_s = SLOW_BEFORE * min((lane.first_s for lane in self.lanes), default=0.0)
        for lane in [lane for lane in self.lanes if lane.name in self._slow_before and lane.first_s > limit_s]:
            if lane.run_once() and not self.renew([lane]) and min(lane.samples_s) > limit_s:
                known = self.candidates.results[lane.name]
                self.candidates.results[lane.name] = known._replace(samples_s=tuple(lane.samples_s), dropped=True)
                self.lanes.remove(lane)

    def so_far(self) -> tuple[Measurement, ...]:
        """Return the measurements of an unfinished job, with the samples of its race; some have left it."""
        results = dict(self.candidates.results)
        stay = {lane.name for lane in (self.lanes if self.racing is None else self.racing.finalists)}
        stay |= {name for name in (self.candidates.heuristic, self.job.incumbent) if name is not None}
        for lane in self.lanes:
            known = results.get(lane.name)  # an interrupt may have come before it was noted
            if lane.samples_s and known is not None and known.failure is None:
                left = lane.name not in stay
                results[lane.name] = known._replace(samples_s=tuple(lane.samples_s), dropped=left)
        return tuple(results.values())

    def _about_to_run(self, name: str) -> None:
        self._running, self._since_s = name, self.clock_s()
        if self.job.on_run is not None:
            self.job.on_run(name)

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

    @property
    def running(self) -> tuple[object, float]:
        """The candidate that is running, or None, and for how many seconds."""
        return self.candidates.configs.get(self._running), self.clock_s() - self._since_s

    def tell_of_wait(self) -> None:
        """Report which candidate is running, and for how long."""
        self.tell(*self._told, running=self.running[0])

    def tell(
        self, doing: Doing, done: int, total: int, latest: Measurement | None = None, *, running: object = None
    ) -> None:
        """Report progress."""
        if self.job.on_step is None:
            return
        now_s, self._told = self.clock_s(), (doing, done, total)
        raced = {lane.name: lane.value_s for lane in self.lanes if lane.samples_s}
        name = min(raced, key=raced.__getitem__, default=None)
        best_s, best = (None, None) if name is None else (raced[name], self.candidates.configs[name])
        left_s = None
        if doing == "racing":  # it ends when its times are certain, which nobody knows before
            left_s = 0.0 if done == total else None
        elif done:
            from tunebook._tuning.time_left import time_left_s  # noqa: PLC0415 - for a tuning that is watched

            first_s = [] if self.job.brief else [lane.first_s for lane in self.lanes]
            left_s = min(time_left_s(self.elapsed_s, done, total, first_s), max(self.left_s(), 0.0))
        failures = Counter(m.failure.kind for m in self.candidates.results.values() if m.failure is not None)
        elapsed_s, known = now_s - self.started_s, self.job.history.unfinished
        step = Step(doing, done, total, elapsed_s, failures, best_s, best, latest, left_s, known)
        self.job.on_step(step if running is None else step._replace(running=running, running_s=now_s - self._since_s))

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
                if isinstance(compiled, LeftOut) and self.compiling is not None:
                    self.compiling.left_out[name] = str(compiled)
                    continue
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
            self._about_to_run(name)
            trial = self.runner.first(index)
            self._running = ""
        if trial.failure is None:
            self.lanes.append(self._lane(name, index, trial.sample_s))
        return self.candidates.record(name, trial, compiled=compiled)

    def _lane(self, name: str, index: int, first_s: float) -> Lane:
        def take() -> float | None:
            self._about_to_run(name)
            trial = self.batches.take(name, partial(self.runner.sample, index))
            self._running = ""
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


# -------------------------------------------------------------------------- the candidate that runs when a process dies

_SIZE: Final = 512
_NAME: Final = 64  # bytes of a fingerprint
_open: Final[set[RunningCandidate]] = set()


class RunningCandidate:
    """The note of one tuning: the candidate that runs right now, in a file that outlives the process.

    It is written and not mapped: a map of a file that another thread or process cuts short ends the process. It is
    removed when a tuning ends in any way that Python sees. `died` is the fingerprint of the candidate that ran
    when the last one died, or None.
    """

    def __init__(self, name: str) -> None:
        self._path: Final[Path] = lock_root() / f"running-{name}"
        self._descriptor: int | None = None
        self._lock = InterruptSafeLock()  # a descriptor that is closed may be another file's a moment later
        self._maker: Maker | None = None
        self.died: str | None = None

    def __enter__(self) -> Self:
        # Without a place for the note nothing is lost but the name of a candidate that kills the process.
        with suppress(OSError, ValueError):
            known = _read(self._path)
            if known is not None and known[0] != this_process() and not known[0].is_gone():
                return self  # another process tunes the same, without a book
            self.died = None if known is None or known[0] == this_process() else known[1]
            self._open()
        return self

    def _open(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        maker = self._maker = this_process()
        head = f"{maker.host} {maker.pid} {maker.started}\n".encode()
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.pwrite(self._descriptor, bytes(_NAME) + head.ljust(_SIZE - _NAME), 0)
        if not _open:
            atexit.register(forget_all)
        _open.add(self)

    def note(self, fingerprint: str) -> None:
        """Note the candidate that runs from now on."""
        name = fingerprint.encode("ascii", "replace")[:_NAME].ljust(_NAME)
        with self._lock, suppress(OSError):
            if self._descriptor is not None:
                os.pwrite(self._descriptor, name, 0)

    def __exit__(self, *_: object) -> None:
        self.forget()

    def forget(self) -> None:
        """Remove the note: the process did not die of the candidate. In a forked child it is the parent's."""
        _open.discard(self)
        if self._descriptor is None or self._maker != this_process():
            return
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)
                self._path.unlink()


def forget_all() -> None:
    """Remove the notes of tunings that a process leaves in its other threads when it ends."""
    for note in list(_open):
        note.forget()


def forget_notes_of(pids: Collection[int]) -> None:
    """Remove the notes of other processes of this host, which were ended on purpose: no candidate is to blame."""
    for path in lock_root().glob("running-*"):
        with suppress(OSError, ValueError):  # it cannot be read, or is being written
            known = _read(path)
            if known is not None and known[0].host == this_process().host and known[0].pid in pids:
                path.unlink(missing_ok=True)


def _read(path: Path) -> tuple[Maker, str | None] | None:
    """Return the process that made a note, and the candidate in it; None without a note."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    name, head = content[:_NAME].strip(b"\0 ").decode("ascii", "replace"), content[_NAME:].decode("ascii", "replace")
    host, pid, started = head.split()
    return Maker(host, int(pid), started), name or None
