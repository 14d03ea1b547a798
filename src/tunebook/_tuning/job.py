"""What a tuning job is asked, what it says on the way, and what it found."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from tunebook._base.errors import DefinitionError
from tunebook._measure.disturbance import Disturbances
from tunebook._statistics.race import typical_s

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tunebook._arrays.operations import Timer
    from tunebook._base.vocabulary import FailureKind, Measurement, Problem, StrategyLike
    from tunebook._kernel.kernel import Invocation, Kernel
    from tunebook._kernel.output_check import Compare
    from tunebook._measure.candidate_runner import Runner
    from tunebook._statistics.decide import Verdict
    from tunebook._statistics.race import Objective
    from tunebook._statistics.roofline import Roofline
    from tunebook.search._by_name import Search

Cfg = TypeVar("Cfg")

_UNITS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[Cfg]):
    """A call that needs a configuration, with what the tiers ask about it."""

    inv: Invocation[Cfg, Any]
    kernel: Kernel[Cfg, Any]
    problem: Problem
    strategy: StrategyLike | None = None


class History(NamedTuple):
    """What is known about a problem: measurements under whatever conditions, the winner's fingerprint, a generation.

    `complete` is False if a budget ended the last tuning, or something disturbed it: its finalists then race again.
    """

    measurements: tuple[Measurement, ...] = ()
    winner: str | None = None
    generation: int = 0
    complete: bool = True


class Budget(NamedTuple):
    """What a tuning may cost: seconds, or how many candidates are tried; None is no limit."""

    seconds: float | None = None
    trials: int | None = None

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left of it."""
        return self.seconds == 0 or self.trials == 0

    def less(self, tuned: Tuned[Any]) -> Budget:
        """Return what a tuning has left of it."""
        return Budget(
            None if self.seconds is None else max(self.seconds - tuned.seconds, 0.0),
            None if self.trials is None else max(self.trials - tuned.ran, 0),
        )


def parse_budget(budget: Budget | float | str | None) -> Budget:
    """Return a budget from what a user wrote.

    >>> parse_budget("1.5m"), parse_budget(20), parse_budget("200 trials")
    (Budget(seconds=90.0, trials=None), Budget(seconds=20.0, trials=None), Budget(seconds=None, trials=200))
    """
    if budget is None or isinstance(budget, Budget):
        return budget or Budget()
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|m|h|trials?)\s*", budget)
        amount, unit = (float(match[1]), match[2]) if match else (0.0, "")
        if unit.startswith("trial") and amount == int(amount) > 0:
            return Budget(trials=int(amount))
        seconds = amount * _UNITS.get(unit, 0.0)
    else:
        seconds = float(budget)
    if not seconds > 0:
        raise DefinitionError(
            f'budget={budget!r} is no amount of tuning; write "500ms", "30s", "10m", "2h", seconds, or "200 trials"'
        )
    return Budget(seconds=seconds)


Doing: TypeAlias = Literal["compiling", "trying", "racing"]

_NO_FAILURES: Final[Mapping[FailureKind, int]] = MappingProxyType({})


class Step(NamedTuple):
    """Where a tuning job is; what a progress bar shows.

    Candidates are tried one by one, as they are compiled, and then raced against each other; they are compiled before
    only where they cannot be meanwhile. `done` of `total` counts candidates, and of a race percent: it may end early.
    The last step of a job has all of its race done. `left_s` is a guess, or None before there is anything to guess by.
    """

    doing: Doing
    done: int
    total: int
    elapsed_s: float
    failures: Mapping[FailureKind, int] = _NO_FAILURES
    best_s: float | None = None
    best: object = None
    latest: Measurement | None = None
    left_s: float | None = None


class Order(NamedTuple, Generic[Cfg]):
    """In which order candidates are tried: groups from the lowest number, in each the highest priority first.

    A group is tried only if nothing in the groups before it was valid.
    """

    group: Callable[[Cfg], int] = lambda _config: 0
    priority: Callable[[Cfg], int] = lambda _config: 0


class Part(NamedTuple, Generic[Cfg]):
    """One of the problems that a job is about."""

    make_fn: Callable[[Cfg], Callable[..., object]]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    check: Callable[[Any], Any] | None = None
    mutated: Sequence[object] | None = None
    weight: float = 1.0


class Job(NamedTuple, Generic[Cfg]):
    """What is to be tuned. `known` are measurements to reuse; `incumbent` is the fingerprint of an earlier choice.

    `compile` prepares a candidate, from several threads at once, and may return what it made: the path of a file, or
    bytes. Candidates that compile to the same content are measured once, unless they differ on `launch_axes`, and those
    that differ on nothing else are compiled once. `check` says what is wrong with an output;
    without one, `compare` compares it with that of the heuristic's configuration. `isolate` runs the candidates in a
    worker process, where each step of one may take `timeout_s`. `unfinished` says that a budget ended the tuning that
    `known` is from: those that were still in the race go on. A candidate that takes `enough_s` or less ends the job.
    `mutated` are the arguments that runs write to; None is to find out. `timer` is the clock of the device that they
    run on; None is the host's. `others` are further problems, which get the
    same configuration: the one with the smallest weighted mean over all. `runner` makes what runs the candidates, where
    an adapter has a place for them that is neither this process nor a fork of it. With a `search`, candidates are those
    that it proposes (see `_searching`). A `brief` job takes the first samples of its race only. `ordinal` is the number
    of the GPU that the candidates run on, where the arguments do not say.
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
    platform: str = "cpu"
    compile: Callable[[Cfg], object] | None = None
    launch_axes: frozenset[str] = frozenset()
    check: Callable[[Any], Any] | None = None
    compare: Compare | None = None
    mutated: Sequence[object] | None = None
    weight: float = 1.0
    others: Sequence[Part[Cfg]] = ()
    timer: Timer | None = None
    isolate: bool = False
    timeout_s: float = 60.0
    budget: Budget = Budget()
    order: Order[Cfg] = Order()
    objective: Objective = typical_s
    enough_s: float = 0.0
    on_step: Callable[[Step], None] | None = None
    runner: Callable[[Sequence[Cfg]], Runner] | None = None
    search: Search | None = None
    brief: bool = False
    ordinal: int | None = None
    roofline: Roofline | None = None

    @property
    def size(self) -> int:
        """How many candidates it may have to try."""
        return len(self.candidates) if self.search is None else self.search.trials

    @property
    def parts(self) -> tuple[Part[Cfg], ...]:
        """The problems that it is about."""
        return (
            Part(self.make_fn, self.args, self.kwargs, self.check, self.mutated, self.weight),
            *self.others,
        )


class Tuned(NamedTuple, Generic[Cfg]):
    """What a tuning job found. `complete` is False if the budget ended it: the best so far stands.

    `verdict` is None if a tuner that is not ours chose. `configs` are the candidates by fingerprint. `ground` says what
    disturbed the measurements. It ended at `when`, a Unix time, and for `waiting_s` only waited for compilers.
    `default` is the fingerprint of the heuristic's configuration, `problem` what was tuned if it was one, and
    `roofline` its work, where that is known. In a notebook it shows itself as a report.
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

    @property
    def ranking(self) -> list[tuple[Cfg, float]]:
        """The configurations that worked with their seconds, fastest first."""
        ranked = () if self.verdict is None else self.verdict.ranking
        return [(self.configs[r.measurement.fingerprint], r.value_s) for r in ranked]

    def _repr_html_(self) -> str:
        # By name, because reports stand above tuning: only a notebook that shows a result needs them.
        shown: str = import_module("tunebook._report").report(self)._repr_html_()
        return shown
