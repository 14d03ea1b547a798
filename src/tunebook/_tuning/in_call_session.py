"""Candidates tried in the user's own calls: runs each call, says what it took, and decides in the end."""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from tunebook._arrays.describe import arrays_in, root_module
from tunebook._arrays.operations import ops_of, timer_for
from tunebook._base.vocabulary import Measurement
from tunebook._measure.candidate_runner import AgainstModel, Launches
from tunebook._measure.stopwatch import Stopwatch, Trial, first_trial, sample
from tunebook._statistics.decide import decide, objective_for
from tunebook._tuning.in_call_rules import InCallRules
from tunebook._tuning.job import Tuned
from tunebook._tuning.job_run import FAILURE_LIFETIME_S, identify

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tunebook._base.vocabulary import Json
    from tunebook._kernel.kernel import Invocation
    from tunebook._tuning.job import Call

C = TypeVar("C")

# Its samples are of calls on ever new values, between whatever else the program does: never to be compared with those
# of a race.
POLICY: Final = "host-clock/real-calls/forward"


def why_not_in_calls(arguments: object) -> str | None:
    """Return why candidates cannot be tried in calls with these arguments, or None if they can.

    After a candidate that failed, the heuristic runs on the same arguments, so these must be as they were before.
    """
    for array in arrays_in(arguments):
        kind = type(array)
        if not _can_be_put_back(array, root_module(kind)):
            return f"a {kind.__module__}.{kind.__qualname__} could not be put back after a candidate that failed"
    return None


def _can_be_put_back(array: Any, library: str) -> bool:
    if library == "jax":
        # Its arrays do not change. A tracer's class lives in jax, not in jaxlib: in a trace there is nothing to time.
        return type(array).__module__.startswith("jaxlib")
    if library == "numpy":
        return type(array).__name__ == "ndarray" and not array.dtype.hasobject
    return ops_of(array) is not None and type(array).__name__ != "FakeTensor"  # torch's stand-in, in a trace


def _shapes(inv: Invocation[Any, Any]) -> tuple[Any, ...]:
    return tuple(array.shape for array in arrays_in((inv.args, dict(inv.kwargs))))


class InCallSession(Generic[C]):
    """One problem that is tuned by its calls. Safe to share between threads: while one of them tries, others do not.

    Calls of other shapes than the first, which a bucket makes the same problem, run with the heuristic: their times
    could not be compared. `on_found` is called with what was found, again at every call until it says that it will use
    that; meanwhile calls run with it already.
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
        """Begin with the call `inv`, which `call` describes without its arrays; the heuristic's is the first config."""
        self._call, self._shapes = call, _shapes(inv)
        self._here = replace(call.inv, surroundings=None)  # whatever is in force where a call is run
        self._serve = call.kernel.bind(self._here, configs[0])
        self._configs: dict[str, C] = {}
        self._encoded: dict[str, Json] = {}
        for number, config in enumerate(configs):
            name, encoded = identify(config, number)
            self._configs.setdefault(name, config)
            self._encoded[name] = encoded
        self._heuristic = next(iter(self._configs))
        # The order in which candidates run must not depend on where they stand in a list, but be the same each time.
        rng = random.Random("".join(sorted(self._configs)))  # noqa: S311 - to shuffle
        self._explorer = InCallRules(self._configs, self._heuristic, slowdown=slowdown, rng=rng)
        # By the host's clock, because that is what callers wait by; but a device has to be waited for in its own way.
        timer = timer_for((inv.args, inv.kwargs))
        self._stopwatch = stopwatch if timer is None else stopwatch._replace(wait=timer.wait)
        self._on_found = on_found
        self._failures: dict[str, Measurement] = {}
        self._started_s = time.monotonic()
        self._found: Tuned[C] | None = None
        self._handed_over = False
        self._turn = threading.Lock()
        self._pid = os.getpid()

    @property
    def candidates(self) -> int:
        """How many configurations are tried."""
        return len(self._configs)

    def __str__(self) -> str:
        left = len(self._explorer.finalists)
        return f"trying one candidate per call: after {self._explorer.calls} calls {left} of {self.candidates} are left"

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call, with a candidate if it is time for one, and return its result."""
        turn = self._turn
        # Not waiting: whoever has the turn may be running a kernel.
        if turn.acquire(blocking=False):
            try:
                if self._found is not None:
                    self._hand_over(self._found)
                elif self._is_timed():
                    return self._take_turn(args, kwargs)
            finally:
                turn.release()
        else:
            self._free_turn_of_parent()
        found = self._found
        return self._serve(*args, **kwargs) if found is None else self._bind(found.config)(*args, **kwargs)

    def _hand_over(self, found: Tuned[C]) -> None:
        # Once: handed over again after it has taken effect, it would be news again.
        self._handed_over = self._handed_over or self._on_found(found)

    def _free_turn_of_parent(self) -> None:
        """Forget the turn that a thread of the parent process had when this process was forked from it."""
        if self._pid != os.getpid():
            self._pid, self._turn = os.getpid(), threading.Lock()

    def _bind(self, config: C) -> Callable[..., Any]:
        return self._call.kernel.bind(self._here, config)

    def _is_timed(self) -> bool:
        """Whether there is something to learn from the next call; if not, it is counted. That is nearly all of them."""
        timed = self._explorer.times_served or self._explorer.next() is not None
        if not timed:
            self._explorer.served()
        return timed

    def _take_turn(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        inv = replace(self._here, args=args, kwargs=kwargs)
        if _shapes(inv) != self._shapes or why_not_in_calls((args, dict(kwargs))) is not None:
            return self._serve(*args, **kwargs)
        name = self._explorer.next()
        if name is not None:
            return self._try(name, inv)
        start = self._stopwatch.clock_ns()
        result = self._serve(*args, **kwargs)
        self._stopwatch.wait(result)
        self._explorer.served(self._seconds_since(start))
        return result

    def _seconds_since(self, start_ns: int) -> float:
        return (self._stopwatch.clock_ns() - start_ns) * 1e-9

    def _try(self, name: str, inv: Invocation[C, Any]) -> Any:
        """Run a call with a candidate; if that fails or is wrong, with the heuristic, on arguments as they were."""
        kernel, start = self._call.kernel, self._stopwatch.clock_ns()
        configs = [self._configs[self._heuristic], self._configs[name]]
        launches = Launches(configs, partial(kernel.bind, inv), inv.args, inv.kwargs, kernel.mutated(inv))
        attempt = _Attempt(launches, self._stopwatch)
        is_heuristic = name == self._heuristic
        if self._explorer.is_new(name):
            trial = attempt.first(None if is_heuristic else _Check(kernel, inv, self._stopwatch))
        else:
            trial = attempt.again()
        if trial.failure is not None and is_heuristic:
            # The call's own error, as it would be without us.
            raise trial.error or RuntimeError(trial.failure.message)
        if trial.failure is not None:
            launches.arguments.notice()
            # If this raises too, the call is at fault and not the candidate, which gets another turn.
            attempt.output = self._serve(*inv.args, **inv.kwargs)
            self._stopwatch.wait(attempt.output)
            self._failures[name] = self._measurement(name, trial)
        sample_s = None if trial.failure is not None else trial.sample_s
        self._explorer.tried(name, call_s=self._seconds_since(start), sample_s=sample_s)
        if self._explorer.finished:
            self._found = self._decide()
            self._hand_over(self._found)
        return attempt.output

    def _measurement(self, name: str, trial: Trial | None = None) -> Measurement:
        now, inv, kernel = time.time(), self._call.inv, self._call.kernel
        failure = None if trial is None or trial.failure is None else trial.failure
        return Measurement(
            config=self._encoded[name],
            fingerprint=name,
            code=kernel.code_checksum,
            policy=POLICY,
            environment=kernel.environment(inv),
            samples_s=() if failure is not None else tuple(self._explorer.samples_s(name)),
            failure=None if failure is None else failure._replace(expires=now + FAILURE_LIFETIME_S),
            when=now,
            dropped=failure is None and name not in self._explorer.finalists,
        )

    def _decide(self) -> Tuned[C]:
        measured = [self._failures.get(name) or self._measurement(name) for name in self._configs]
        verdict = decide(measured, heuristic=self._heuristic, objective=objective_for(self._call.kernel.objective))
        winner = self._heuristic if verdict is None else verdict.winner.measurement.fingerprint
        return Tuned(
            config=self._configs[winner],
            verdict=verdict,
            measurements=tuple(measured),
            ran=len(measured),
            complete=True,
            seconds=time.monotonic() - self._started_s,
            configs=self._configs,
            when=time.time(),
            default=self._heuristic,
        )


class _Check:
    """Says whether a candidate's output is right: by the reference, or else by what the heuristic makes of the call."""

    def __init__(self, kernel: Any, inv: Invocation[Any, Any], stopwatch: Stopwatch) -> None:
        self._kernel, self._inv, self._stopwatch = kernel, inv, stopwatch

    def prepare(self, launches: Launches[Any]) -> Callable[[Any], Any] | None:
        """Return what checks an output. Called before the candidate can write to the arguments, and may raise."""
        checker: Callable[[Any], Any] | None = self._kernel.checker(self._inv)
        if checker is not None or not self._kernel.checks:
            return checker
        model = AgainstModel(0, self._kernel.compare, self._stopwatch)
        model(launches, 0, launches(0)())
        launches.arguments.notice()
        return partial(model, launches, 1)


class _Attempt:
    """Runs a candidate and keeps its output, which is the user's."""

    def __init__(self, launches: Launches[Any], stopwatch: Stopwatch) -> None:
        self._launches = launches
        # One run, because it is the user's; further ones to warm up would be further effects.
        self._stopwatch = stopwatch._replace(warmup=1)
        self._check: Callable[[Any], Any] | None = None
        self.output: Any = None

    def first(self, check: _Check | None) -> Trial:
        def run() -> Any:
            # In here, where whatever an author's reference raises is a failure of this candidate, and of no call.
            self._check = None if check is None else check.prepare(self._launches)
            return self._run()

        return first_trial(run, self._stopwatch, self._checked)

    def again(self) -> Trial:
        return sample(self._run, self._stopwatch, batch=False)

    def _run(self) -> Any:
        self.output = self._launches(1)()
        return self.output

    def _checked(self, output: Any) -> Any:
        return None if self._check is None else self._check(output)
