"""A tuning job: its inputs, its progress, its candidates with their measurements, and its result."""

from __future__ import annotations

import math
import os
import random
import re
import time
from dataclasses import dataclass
from importlib import import_module
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from tunebook._base.config_codec import TAG, encode, fingerprint_of
from tunebook._base.durations import seconds_text
from tunebook._base.errors import CodecError, DefinitionError, TuningFailed, hide_own_frames, remembered, text_of
from tunebook._base.record_format import CHECKED_BY
from tunebook._base.vocabulary import VALUES, Measurement, ValuesFrom
from tunebook._measure.disturbance import Disturbances
from tunebook._statistics.decide import decide
from tunebook._statistics.race import Objective, Pause, no_pause, typical_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tunebook._arrays.library import Timer
    from tunebook._base.vocabulary import Combine, Failure, FailureKind, Json, Problem, StrategyLike
    from tunebook._kernel.kernel import Invocation, Kernel
    from tunebook._kernel.measure import Measure
    from tunebook._kernel.output_check import Compare
    from tunebook._measure.compile_pool import Compiled
    from tunebook._measure.stopwatch import Runner, Stopwatch, Trial
    from tunebook._statistics.decide import Verdict
    from tunebook._statistics.roofline import Roofline
    from tunebook.search._by_name import Search

Cfg = TypeVar("Cfg")

# A failure is remembered so that it does not cost time at every start, but not for ever: a driver update or a fixed
# compiler makes the candidate worth another try. Memory that another job has now is free in a few minutes.
_LASTING_S: Final = 7 * 24 * 3600.0
_PASSING_S: Final = 600.0
# Some compilers print 20 kB for one error, and 400 candidates may fail alike: an entry has 8 MB. The first error is at
# the beginning, the last words of a crash are at the end.
_MESSAGE_HEAD, _MESSAGE_TAIL = 3000, 1000
HOST: Final = "host"  # in a measurement: where a failure was seen that other hosts need not have
# The fraction of a budget after which no further candidate is tried: the rest is for racing the tried ones.
TRYING: Final = 0.6
REJECTED: Final = frozenset({"wrong-result", "nan"})  # kinds of failures: it ran, and its output was wrong
PROGRAM: Final = "program"  # in a measurement: the digest of the candidate's compiled program
_AMOUNT: Final = r"(\d+(?:\.\d*)?|\.\d+)\s*"
_DURATION: Final = re.compile(_AMOUNT + r"(ms|s(?:ec(?:ond)?s?)?|m(?:in(?:ute)?s?)?|h(?:ours?)?)(?![a-z])\s*")
_DURATIONS: Final = re.compile(rf"\s*(?:{_AMOUNT}|(?:{_DURATION.pattern})+)")
_UNITS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[Cfg]):
    """A call that needs a configuration, with its kernel, problem, search strategy and way to measure.

    `again` has all candidates measured anew, whatever the book says of them.
    """

    inv: Invocation[Cfg, Any]
    kernel: Kernel[Cfg, Any]
    problem: Problem
    strategy: StrategyLike | None = None
    measure: Measure | None = None
    again: bool = False


class History(NamedTuple):
    """The past of a problem: measurements under any conditions, the winner's fingerprint, a generation."""

    measurements: tuple[Measurement, ...] = ()
    winner: str | None = None
    generation: int = 0
    complete: bool = True  # False if the last tuning was disturbed, or a budget ended it: its finalists race again
    unfinished: int = 0  # measurements of a tuning that was interrupted, and that the next one goes on from


class Budget(NamedTuple):
    """The limits of a tuning: its seconds, and the number of candidates tried; None is unlimited."""

    seconds: float | None = None
    trials: int | None = None

    def split(self, jobs: int) -> Budget:
        """Return an equal part of the budget for each of so many jobs."""
        return Budget(
            None if self.seconds is None else self.seconds / jobs,
            None if self.trials is None else max(self.trials // jobs, 1),
        )

    @property
    def is_spent(self) -> bool:
        return self.seconds == 0 or self.trials == 0

    def left_s(self, elapsed_s: float, share: float = 1.0) -> float:
        """Return the rest of a share of the seconds."""
        return math.inf if self.seconds is None else share * self.seconds - elapsed_s

    def less(self, tuned: Tuned[Any]) -> Budget:
        """Return the rest of the budget after a tuning."""
        return Budget(
            None if self.seconds is None else max(self.seconds - tuned.seconds, 0.0),
            None if self.trials is None else max(self.trials - tuned.ran, 0),
        )


def parse_budget(budget: Budget | float | str | None) -> Budget:
    """Return a budget from a user's value.

    >>> parse_budget("1h30m").seconds, parse_budget("30 sec").seconds, parse_budget(20).seconds
    (5400.0, 30.0, 20.0)
    >>> parse_budget("200 trials")
    Budget(seconds=None, trials=200)
    """
    if budget is None or isinstance(budget, Budget):
        return budget or Budget()
    if isinstance(budget, str):
        trials = re.fullmatch(r"\s*([1-9]\d*)\s*trials?\s*", budget)
        if trials is not None:
            return Budget(trials=int(trials[1]))
        written = _DURATIONS.fullmatch(budget) is not None
        parts = _DURATION.findall(budget) if written else []
        seconds = math.fsum(float(amount) * _UNITS["ms" if unit == "ms" else unit[0]] for amount, unit in parts)
        seconds = float(budget) if written and not parts else seconds
    else:
        seconds = float(budget) if isinstance(budget, Real) and not isinstance(budget, bool) else 0.0
    if not seconds > 0:
        raise DefinitionError(f'invalid budget={budget!r}: write "500ms", "30s", "10m", "2h", seconds, or "200 trials"')
    return Budget(seconds=seconds)


Doing: TypeAlias = Literal["compiling", "trying", "racing"]


class Step(NamedTuple):
    """The progress of a tuning job, for a progress bar.

    Candidates are tried one by one, as they are compiled, and then race each other; they are compiled before only if
    they cannot be compiled meanwhile. `done` of `total` counts candidates, and percent in a race, which may end early.
    The last step of a job has its race at 100 percent. `left_s` is a high estimate, with the race to come in
    it. It is None if it is too early for one, and in a race, which ends as soon as its times are certain.
    `known` counts the measurements of an interrupted tuning that this one goes on from. While an isolated candidate
    runs for long, a step is told each second, with the candidate that is `running`, and for how long.
    """

    doing: Doing
    done: int
    total: int
    elapsed_s: float
    failures: Mapping[FailureKind, int] = MappingProxyType({})
    best_s: float | None = None
    best: object = None
    latest: Measurement | None = None
    left_s: float | None = None
    known: int = 0
    running: object = None
    running_s: float = 0.0


class Part(NamedTuple, Generic[Cfg]):
    """One problem of a job: the calls that are timed."""

    make_fn: Callable[[Cfg], Callable[..., object]]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})
    check: Callable[[Any], Any] | None = None  # returns an error for a wrong output
    mutated: Sequence[object] | None = None  # the arguments that runs write to; None is to find out
    weight: float = 1.0
    copies: int = 1  # of the arguments, which take turns


class Order(NamedTuple, Generic[Cfg]):
    """The order in which candidates are tried: groups from the lowest number, in each the highest priority first."""

    group: Callable[[Cfg], int] = lambda _config: 0  # tried only if no candidate of the groups before it was valid
    priority: Callable[[Cfg], int] = lambda _config: 0


class Timing(NamedTuple):
    """How runs are timed, as far as that is not usual for the device; `inputs` copies of the arguments take turns."""

    by_host: bool = False  # by the host's clock, though the device has one
    cold: bool = False  # with empty caches of the host
    inputs: int = 1
    graph: Callable[[Callable[[], object]], Callable[[], object]] | None = None  # makes a function that replays a run


class Setup(NamedTuple, Generic[Cfg]):
    """How candidates are built, and where they run.

    `compile` prepares a candidate, from several threads at once, and may return its product: the path of a file, or
    bytes. Candidates with equal products are measured once, unless they differ on `launch_axes`; candidates that
    differ on nothing else are compiled once. A candidate for which it raises `LeftOut` is not measured. `foresee`
    returns for each candidate the error that `compile` would raise, as far as that is quickly known. `reason_against`
    is asked for each candidate left whenever one was tried, and may return why it is not worth waiting for; then
    candidates are tried as they are compiled.
    """

    compile: Callable[[Cfg], object] | None = None
    launch_axes: frozenset[str] = frozenset()
    foresee: Callable[[Sequence[Cfg]], Sequence[Exception | None]] | None = None
    reason_against: Callable[[Cfg], str | None] | None = None
    order: Order[Cfg] = Order()
    platform: str = "cpu"
    ordinal: int | None = None  # the number of the GPU, if the arguments do not tell
    timer: Timer | None = None  # the clock of the device; None is the host's
    timing: Timing = Timing()
    isolate: bool = False  # in a worker process, where each step may take `timeout_s`
    timeout_s: float = 60.0
    runner: Callable[[Sequence[Cfg]], Runner] | None = None  # runs elsewhere than in this process or a fork of it


class Goal(NamedTuple):
    """When a candidate is correct and fast."""

    objective: Objective = typical_s
    enough_s: float = 0.0  # a candidate that takes no longer ends the job
    compare: Compare | None = None  # with the output of the heuristic's configuration, for problems without a check
    roofline: Roofline | None = None
    combine: Combine = "mean"  # how the times of several problems make one


class Conditions(NamedTuple):
    """The conditions of measurements: only measurements under equal conditions and an equal policy are comparable."""

    code: str = ""
    environment: str = ""
    mode: str = "forward"
    values_from: ValuesFrom = "call"
    at: str = ""  # the sizes of the arguments, if the call is in a bucket with others
    checked_by: Callable[[], str] = str  # the digest of the check: a changed one may accept or reject other outputs


class Job(NamedTuple, Generic[Cfg]):
    """A tuning job: finds the configuration with the smallest time, combined over all parts."""

    parts: Sequence[Part[Cfg]]
    candidates: Sequence[Cfg]
    heuristic: Cfg | None = None
    search: Search | None = None  # proposes the candidates (see `search_run`)
    history: History = History()
    conditions: Conditions = Conditions()
    setup: Setup[Cfg] = Setup()
    goal: Goal = Goal()
    budget: Budget = Budget()
    brief: bool = False  # takes only the first samples of the race
    on_step: Callable[[Step], None] | None = None
    on_interrupt: Callable[[Sequence[Measurement]], object] | None = None  # gets the measurements so far
    on_run: Callable[[str], None] | None = None  # gets the fingerprint of the candidate that runs next
    died: str | None = None  # the candidate that ran when the last tuning died with its process

    @property
    def size(self) -> int:
        """The largest number of candidates that may be tried."""
        return len(self.candidates) if self.search is None else self.search.trials

    @property
    def known(self) -> tuple[Measurement, ...]:
        """The measurements that may be reused."""
        return self.history.measurements

    @property
    def incumbent(self) -> str | None:
        """The fingerprint of the earlier choice."""
        return self.history.winner

    @property
    def code(self) -> str:
        """The checksum of the kernel's code."""
        return self.conditions.code

    def policy(self, stopwatch: Stopwatch) -> str:
        """Return the measurement policy under a stopwatch."""
        made_up, inputs = self.conditions.values_from, self.setup.timing.inputs
        turns = "" if inputs == 1 else f"/inputs={inputs}"
        turns += f"/at:{self.conditions.at}" if self.conditions.at else ""
        return f"{stopwatch.name}/{self.conditions.mode}{turns}{'' if made_up == 'call' else f'{VALUES}{made_up}'}"


DIED: Final = "the process died while it ran this candidate"


class Tuned(NamedTuple, Generic[Cfg]):
    """The result of a tuning job. `complete` is False if the budget ended it: the best so far stands.

    The result of another library's tuner has no `verdict`. `configs` are the candidates by fingerprint. The job ended
    at `when`, a Unix time, and spent `waiting_s` on waiting for compilers alone. `default` is the fingerprint of the
    heuristic's configuration. `problem` is set if there was only one, and `roofline` if its work is known.
    `values_from` says on which arguments it was measured. `left_out` says by fingerprint why candidates were not
    measured. `at` has the sizes that a bucket was measured at, and the reason if these were the caller's own. `stands`
    says that `config` is an earlier choice, and which, instead of the measured winner. In a notebook a result shows as
    a report.
    """

    config: Cfg
    verdict: Verdict | None
    measurements: tuple[Measurement, ...]
    ran: int
    complete: bool
    seconds: float
    configs: Mapping[str, Any]
    disturbances: Disturbances = Disturbances()
    when: float = 0.0
    waiting_s: float = 0.0
    default: str | None = None
    problem: Problem | None = None
    roofline: Roofline | None = None
    values_from: ValuesFrom = "call"
    left_out: Mapping[str, str] = MappingProxyType({})
    at: Mapping[str, str] = MappingProxyType({})
    stands: str = ""

    @property
    def ranking(self) -> list[tuple[Cfg, float]]:
        """The configurations that worked with their seconds, fastest first; `measurements` has them encoded."""
        ranked = () if self.verdict is None else self.verdict.ranking
        return [(self.configs[r.measurement.fingerprint], r.value_s) for r in ranked]

    def __repr__(self) -> str:
        # The fields hold every sample: 20 kB for a few candidates.
        return f"<Tuned {self.config!r}: {self.summary}>"

    @property
    def tally(self) -> str:
        """How many candidates were tried, and how many failed or gave a wrong output, in a few words."""
        kinds = [m.failure.kind for m in self.measurements if m.failure is not None]
        if not kinds:
            return f"{self.ran} measured"
        # Some may have failed in an earlier tuning: then the failures are of them all.
        total, wrong = len(self.measurements), sum(kind in REJECTED for kind in kinds)
        known = f", {total - self.ran} known; {len(kinds)} of the {total}"
        counted = known if self.ran < total else f", {len(kinds)} of them"
        return f"{self.ran} tried{counted} failed{f' ({wrong} with a wrong output)' if wrong else ''}"

    @property
    def summary(self) -> str:
        """The time of the winner, why it won, and how much was measured, in one line."""
        best = "" if self.verdict is None else f"{seconds_text(self.verdict.winner.value_s)}, {self.verdict.rule}, "
        if self.stands and self.verdict is not None:
            winner = self.configs[self.verdict.winner.measurement.fingerprint]
            best = f"{self.stands}; measured winner {winner!r}: {best}"
        failed = sum(m.failure is not None for m in self.measurements)
        counted = "1 candidate" if len(self.measurements) == 1 else f"{len(self.measurements)} candidates"
        counted += f", {failed} failed, {self.ran} tried" if failed else f", {self.ran} measured"
        cut = "" if self.complete else ", not complete"
        return f"{best}{counted} in {seconds_text(self.seconds)}{cut}"

    def _repr_html_(self) -> str:
        # By name, because reports stand above tuning: only a notebook that shows a result needs them.
        return str(import_module("tunebook._report").report(self)._repr_html_())


def lifetime_s(failures: Iterable[Failure | None]) -> float:
    """Return for how long failures are remembered together: as long as the first of them to pass."""
    lasting = [failure is not None and failure.is_lasting for failure in failures]
    return _LASTING_S if lasting and all(lasting) else _PASSING_S


def is_believed(m: Measurement) -> bool:
    """Whether a measurement in a book counts in this process: the passing failures of other hosts do not.

    Neither does memory that ran out: another process of this host may have a limit of its own, or had the device then.
    """
    failure = m.failure
    return failure is None or failure.is_lasting or (failure.kind != "memory" and m.extra.get(HOST) == host_name())


def host_name() -> str:
    """Return the name of this host."""
    return os.uname().nodename


def _shortened(failure: Failure) -> Failure:
    text = failure.message
    if len(text) <= _MESSAGE_HEAD + _MESSAGE_TAIL:
        return failure
    left_out = f"\n... {len(text) - _MESSAGE_HEAD - _MESSAGE_TAIL} characters left out ...\n"
    return failure._replace(message=f"{text[:_MESSAGE_HEAD]}{left_out}{text[-_MESSAGE_TAIL:]}")


class CandidateSet(Generic[Cfg]):
    """The candidates of a tuning by fingerprint, with the measurement of each, and the decision among them."""

    def __init__(
        self, conditions: Conditions, policy: str, heuristic: Cfg | None, now_s: Callable[[], float] = time.time
    ) -> None:
        self.configs: dict[str, Cfg] = {}
        self.results: dict[str, Measurement] = {}
        self._conditions, self._policy, self._now_s = conditions, policy, now_s
        self._encoded: dict[str, Json] = {}
        self._errors: dict[str, Exception] = {}
        self.heuristic = None if heuristic is None else self.admit(heuristic)

    def admit(self, config: Cfg) -> str:
        """Add a candidate, and return its fingerprint."""
        try:
            encoded = encode(config)
        except CodecError:
            # It can still be tuned and used in this process; only storing it will fail.
            encoded = {TAG: "unwritable", "v": len(self.configs)}
        name = fingerprint_of(encoded)
        self.configs.setdefault(name, config)
        self._encoded[name] = encoded
        return name

    def shuffler(self) -> random.Random:
        """Return a generator for the order of runs: equal each time, whatever the order of the candidates."""
        return random.Random("".join(sorted(self.configs)))  # noqa: S311 - to shuffle

    def is_comparable(self, m: Measurement) -> bool:
        """Whether a measurement was made under the conditions of this tuning."""
        if (m.code, m.policy, m.environment) != (self._conditions.code, self._policy, self._conditions.environment):
            return False
        unchecked = m.failure is not None and m.failure.kind not in REJECTED
        return unchecked or m.extra.get(CHECKED_BY, "") == self._conditions.checked_by()

    def record(
        self,
        name: str,
        trial: Trial,
        *,
        samples_s: Sequence[float] | None = None,
        dropped: bool = False,
        compiled: Compiled | None = None,
    ) -> Measurement:
        """Keep the outcome of a candidate, with the samples of the trial unless others are given, and return it."""
        now_s, failure = self._now_s(), trial.failure
        if trial.error is not None:
            trial.error.add_note(f"candidate {self.configs[name]!r}")
            self._errors[name] = trial.error
        samples_s = (trial.sample_s,) if samples_s is None else samples_s
        self.results[name] = Measurement(
            config=self._encoded[name],
            fingerprint=name,
            code=self._conditions.code,
            policy=self._policy,
            environment=self._conditions.environment,
            samples_s=() if failure is not None else tuple(samples_s),
            failure=None if failure is None else _shortened(failure)._replace(expires=now_s + lifetime_s([failure])),
            compile_s=None if compiled is None else compiled.seconds,
            when=now_s,
            dropped=dropped,
            extra=self._remarks(failure, compiled),
        )
        return self.results[name]

    def _remarks(self, failure: Failure | None, compiled: Compiled | None) -> dict[str, Json]:
        program = None if compiled is None else compiled.program
        check = self._conditions.checked_by() if failure is None or failure.kind in REJECTED else ""
        host = "" if failure is None or failure.is_lasting else host_name()
        return {name: text for name, text in ((PROGRAM, program), (CHECKED_BY, check), (HOST, host)) if text}

    def copy(self, original: str, name: str, compile_s: float | None) -> Measurement:
        """Keep the measurement of a candidate for another that compiles to the same program, and return it."""
        m = self.results[original]
        extra = {**m.extra, "same_program_as": original}
        self.results[name] = m._replace(config=self._encoded[name], fingerprint=name, compile_s=compile_s, extra=extra)
        return self.results[name]

    def decide(
        self, incumbent: str | None = None, objective: Objective = typical_s, pause: Pause = no_pause, **outcome: Any
    ) -> Tuned[Cfg]:
        """Return the result of the tuning. If every candidate failed, it is the heuristic, without a verdict."""
        known = self.results.values()
        verdict = decide(known, incumbent=incumbent, heuristic=self.heuristic, objective=objective, pause=pause)
        winner = self.heuristic if verdict is None else verdict.winner.measurement.fingerprint
        if winner is None:
            raise self.failure()
        return Tuned(
            config=self.configs[winner],
            verdict=verdict,
            measurements=tuple(known),
            configs=self.configs,
            when=self._now_s(),
            default=self.heuristic,
            **outcome,
        )

    def failure(self) -> TuningFailed:
        """Return the error of a tuning in which every candidate failed, in their order, now or in the past."""
        found: list[Exception] = []
        for name, config in self.configs.items():
            failure = self.results[name].failure if name in self.results else None
            if name in self._errors:
                found.append(self._errors[name])
            elif failure is not None:
                found.append(remembered(failure.message, f"candidate {config!r}"))
        said = "the only candidate failed" if len(self.results) == 1 else f"all {len(self.results)} candidates failed"
        if len(found) > 1 and len({(type(error), text_of(error)) for error in found}) == 1:
            first, own = found[0], f"candidate {next(iter(self.configs.values()))!r}"
            first.__notes__ = [note for note in getattr(first, "__notes__", ()) if note != own]
            said, found = f"{said} alike", [first]
        errors = [*map(hide_own_frames, found)] or [ValueError("no candidate gave a valid time")]
        return TuningFailed(said, errors, tuple(self.results.values()))
