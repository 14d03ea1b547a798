"""Tuning by the user's own calls: each runs at most one candidate, and together they keep to a slow-down."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter, deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from tunebook._arrays.describe import arrays_in, timer_for
from tunebook._arrays.library import library_of
from tunebook._measure.stopwatch import AgainstModel, Attempt, Launches, Stopwatch, Trial, first_trial, sample
from tunebook._statistics.decide import objective_for
from tunebook._statistics.race import (
    HOPELESS,
    QUALIFYING,
    SAMPLES_PER_CANDIDATE,
    STAGES,
    Lane,
    RaceStage,
    is_settled,
    is_time,
    survivors,
    typical_s,
)
from tunebook._tuning.job import CandidateSet, Conditions
from tunebook._tuning.pause import is_paused

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tunebook._kernel.kernel import Invocation
    from tunebook._tuning.job import Call, Tuned

C = TypeVar("C")

# Samples of calls on ever new values, between other work of the program, never compare with the samples of a race.
POLICY: Final = "host-clock/real-calls/forward"
# One sample each instead of two before the hopeless leave: here the user waits for the second.
_STAGES: Final = (RaceStage(1, HOPELESS, few=10**6), QUALIFYING[-1], *STAGES)
# Timed calls of the heuristic before anything else runs, without the very first call: it may compile.
_BASELINE: Final = 5
# The expected time of a candidate that has not run yet, in times of the heuristic: half of a matmul's space take less.
_UNSEEN: Final = 2.0


class InCallRules:
    """Chooses the candidate of each call, so that all calls together take at most `slowdown` times the heuristic.

    A state machine that neither runs nor times anything. `names` are the candidates, the heuristic's among them. A
    candidate runs if the calls so far, with it, are expected to keep to the slow-down. If it then takes longer than
    expected, the account is overdrawn by one run, and only the heuristic runs until it is balanced.
    """

    def __init__(self, names: Iterable[str], heuristic: str, *, slowdown: float, rng: random.Random) -> None:
        self._all: Final = {
            name: Lane(name, lambda: None, wins_ties=name == heuristic) for name in names
        }  # calls run them
        self._heuristic, self._slowdown, self._rng = heuristic, slowdown, rng
        self._lanes = list(self._all.values())
        self._runs: Counter[str] = Counter()
        self._usual: deque[float] = deque(maxlen=32)
        self.usual_s = math.nan  # the time of a call with the heuristic
        self.calls = self._tried = 0
        self._tried_s = 0.0
        self._turns = self._plan()
        self._due = next(self._turns, None)

    @property
    def finished(self) -> bool:
        """Whether all candidates are compared."""
        return self._due is None

    @property
    def finalists(self) -> list[str]:
        """The candidates still in the race."""
        return [lane.name for lane in self._lanes]

    @property
    def times_served(self) -> bool:
        """Whether the next call of the heuristic is timed."""
        return len(self._usual) < _BASELINE

    def samples_s(self, name: str) -> Sequence[float]:
        """Return the samples of a candidate, without its first run."""
        return self._all[name].samples_s

    def is_new(self, name: str) -> bool:
        """Whether a candidate has not run yet."""
        return not self._runs[name]

    def next(self) -> str | None:
        """Return the candidate of the next call, or None if the heuristic serves it."""
        due, usual_s = self._due, self.usual_s
        if due is None or self.times_served:
            return None
        extra = self._slowdown - 1
        saved_s = extra * usual_s - (self._tried_s - (self._tried + extra * self.calls) * usual_s)
        if saved_s <= -usual_s:
            return None  # calls of the heuristic must be decided fast: without an expected time
        if due.samples_s:
            expected_s = due.value_s
        else:  # the first run may have compiled something, and says little about the second
            expected_s = min(due.first_s, HOPELESS * usual_s) if self._runs[due.name] else _UNSEEN * usual_s
        return due.name if expected_s - usual_s <= saved_s else None

    def served(self, seconds: float | None = None) -> None:
        """Count a call that the heuristic served, and learn its time if it was timed."""
        self.calls += 1
        if seconds is not None and self.calls > 1:
            self._note_usual(seconds)

    def tried(self, name: str, *, call_s: float, sample_s: float | None) -> None:
        """Learn the time of a whole call, and of its candidate, or None if that failed."""
        self.calls += 1
        self._tried += 1
        self._tried_s += call_s if is_time(call_s) else 0.0
        candidate = self._all[name]
        self._runs[name] += 1
        if sample_s is None or not is_time(sample_s):
            self._lanes = [lane for lane in self._lanes if lane is not candidate]
        elif self._runs[name] == 1:
            candidate.first_s = sample_s
        else:
            candidate.samples_s.append(sample_s)
            if name == self._heuristic:
                self._note_usual(sample_s)
        self._due = next(self._turns, None)

    def _note_usual(self, seconds: float) -> None:
        if is_time(seconds):
            self._usual.append(seconds)
            self.usual_s = typical_s(self._usual)

    def _plan(self) -> Iterator[Lane]:
        for stage in _STAGES:
            yield from self._rounds_until(stage.samples)
            self._lanes = survivors(self._lanes, stage, len(self._all))
            if stage is not _STAGES[0] and is_settled(self._lanes):
                return
        most = SAMPLES_PER_CANDIDATE * len(self._all)
        while not is_settled(self._lanes):
            taken = sum(len(candidate.samples_s) for candidate in self._all.values())
            if taken + len(self._lanes) > most:
                return
            yield from self._rounds_until(1 + min(len(lane.samples_s) for lane in self._lanes))
            self._lanes = survivors(self._lanes, STAGES[-1], len(self._all))

    def _rounds_until(self, samples: int) -> Iterator[Lane]:
        while short := [lane for lane in self._lanes if len(lane.samples_s) < samples]:
            self._rng.shuffle(short)
            for lane in short:
                yield lane
                if self._runs[lane.name] == 1 and lane in self._lanes:
                    yield lane  # a sample at once after its first run


def why_not_in_calls(arguments: object) -> str | None:
    """Return why candidates cannot be tried in calls with these arguments, or None if they can."""
    # After a candidate that failed, the heuristic runs on the same arguments, so these must be as they were before.
    for array in arrays_in(arguments):
        kind = type(array)
        if not library_of(array).is_restorable(array):
            return f"a {kind.__module__}.{kind.__qualname__} could not be put back after a candidate that failed"
    return None


def _shapes(inv: Invocation[Any, Any]) -> tuple[Any, ...]:
    return tuple(library_of(array).shape(array) for array in arrays_in((inv.args, dict(inv.kwargs))))


class InCallSession(Generic[C]):
    """One problem that is tuned by its calls. Threads may share it: one at a time tries a candidate.

    Calls of other shapes than the first, which a bucket makes the same problem, run with the heuristic, because their
    times do not compare. Calls use the result at once; `on_found` gets it, at every call until it returns True.
    """

    def __init__(
        self,
        inv: Invocation[C, Any],
        call: Call[C],
        configs: Sequence[C],
        *,
        slowdown: float,
        stopwatch: Stopwatch,
        on_found: Callable[[Tuned[C]], bool],
    ) -> None:
        """Begin with the call `inv`, which `call` describes without its arrays; the first config is the heuristic's."""
        self._call, self._shapes = call, _shapes(inv)
        self._here = replace(call.inv, surroundings=None)  # the settings of the thread that runs a call apply
        self._serve = call.kernel.bind(self._here, configs[0])
        conditions = Conditions(call.kernel.code_checksum, call.kernel.environment(call.inv))
        self._candidates = CandidateSet(conditions, POLICY, configs[0])
        for config in configs[1:]:
            self._candidates.admit(config)
        self._heuristic = next(iter(self._candidates.configs))
        rng = self._candidates.shuffler()
        self._rules = InCallRules(self._candidates.configs, self._heuristic, slowdown=slowdown, rng=rng)
        # By the host's clock, because callers wait by it; but every device has its own way to wait for its work.
        timer = timer_for((inv.args, inv.kwargs))
        self._stopwatch = stopwatch if timer is None else stopwatch._replace(wait=timer.wait)
        self.candidates: Final = len(self._candidates.configs)
        self._on_found, self._started_s = on_found, time.monotonic()
        self._found: Tuned[C] | None = None
        self._handed_over = False
        self._turn, self._pid = threading.Lock(), os.getpid()

    @property
    def is_finished(self) -> bool:
        """Whether a configuration was found."""
        return self._found is not None

    def __str__(self) -> str:
        left = len(self._rules.finalists)
        return f"trying one candidate per call: after {self._rules.calls} calls {left} of {self.candidates} are left"

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call, with a candidate if it is time for one, and return its result."""
        turn = self._turn
        # Without waiting: the thread that has the turn may be running a kernel.
        if turn.acquire(blocking=False):
            try:
                if self._found is not None:
                    self._hand_over(self._found)
                elif not is_paused() and (self._rules.times_served or self._rules.next() is not None):
                    return self._take_turn(args, kwargs)
                else:  # nearly all calls
                    self._rules.served()
            finally:
                turn.release()
        elif self._pid != os.getpid():  # a thread of the parent process had the turn at the fork
            self._pid, self._turn = os.getpid(), threading.Lock()
        found = self._found
        run = self._serve if found is None else self._call.kernel.bind(self._here, found.config)
        return run(*args, **kwargs)

    def _hand_over(self, found: Tuned[C]) -> None:
        # Once: a second hand-over after it has taken effect would count as news.
        self._handed_over = self._handed_over or self._on_found(found)

    def _take_turn(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        inv = replace(self._here, args=args, kwargs=kwargs)
        if _shapes(inv) != self._shapes or why_not_in_calls((args, dict(kwargs))) is not None:
            return self._serve(*args, **kwargs)
        name = self._rules.next()
        if name is not None:
            return self._try(name, inv)
        start = self._stopwatch.clock_ns()
        result = self._serve(*args, **kwargs)
        self._stopwatch.wait(result)
        self._rules.served((self._stopwatch.clock_ns() - start) * 1e-9)
        return result

    def _try(self, name: str, inv: Invocation[C, Any]) -> Any:
        """Run a call with a candidate; if it fails or is wrong, with the heuristic, on the original arguments."""
        kernel, start, output = self._call.kernel, self._stopwatch.clock_ns(), None
        configs = [self._candidates.configs[fingerprint] for fingerprint in (self._heuristic, name)]
        launches = Launches(configs, partial(kernel.bind, inv), inv.args, inv.kwargs, kernel.mutated(inv))
        is_heuristic = name == self._heuristic

        def run() -> Any:
            nonlocal output
            output = launches(1)()
            return output

        # One run, because the user made one call; more runs to warm up would have more effects.
        once = self._stopwatch._replace(warmup=1)
        with Attempt() as attempt:  # an error of the author's reference fails this candidate and not the call
            if self._rules.is_new(name):
                attempt.trial = first_trial(run, once, None if is_heuristic else self._check(launches, inv))
            else:
                attempt.trial = sample(run, once)
        trial = attempt.trial
        if trial.failure is not None and is_heuristic:
            # The call's own error, as without tuning.
            raise trial.error or RuntimeError(trial.failure.message)
        if trial.failure is not None:
            with Attempt():  # an argument that cannot be put back must not fail the call
                launches.arguments.put_back_all()
            # If this raises too, the call is at fault, and the candidate gets another turn.
            output = self._serve(*inv.args, **inv.kwargs)
            self._stopwatch.wait(output)
            self._candidates.record(name, trial)
        sample_s = None if trial.failure is not None else trial.sample_s
        self._rules.tried(name, call_s=(self._stopwatch.clock_ns() - start) * 1e-9, sample_s=sample_s)
        if self._rules.finished:
            self._found = self._decide()
            self._hand_over(self._found)
        return output

    def _check(self, launches: Launches[C], inv: Invocation[C, Any]) -> Callable[[Any], Any] | None:
        """Return the check of an output: by the reference, or else against the heuristic's output for the call."""
        kernel = self._call.kernel  # the candidate has not run yet, so it has not written to the arguments
        checker = kernel.checker(inv)
        if checker is not None or not kernel.checks:
            return checker
        model = AgainstModel(0, kernel.comparison(inv), self._stopwatch)
        model(launches, 0, launches(0)())
        launches.arguments.notice()
        return partial(model, launches, 1)

    def _decide(self) -> Tuned[C]:
        candidates, rules = self._candidates, self._rules
        for name in [name for name in candidates.configs if name not in candidates.results]:
            dropped = name not in rules.finalists
            candidates.record(name, Trial(), samples_s=rules.samples_s(name), dropped=dropped)
        return candidates.decide(
            objective=objective_for(self._call.kernel.objective),
            ran=len(candidates.results),
            complete=True,
            seconds=time.monotonic() - self._started_s,
        )
