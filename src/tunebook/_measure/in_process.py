"""Runs candidates in this process: outputs are compared, and the times of several calls combined."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._arrays.describe import is_array, parts_of
from tunebook._arrays.library import library_of
from tunebook._base.vocabulary import Failure
from tunebook._kernel.output_check import Mismatch, as_mismatch, is_scalar
from tunebook._measure.stopwatch import Attempt, Launches, Runner, Stopwatch, Trial, first_trial, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tunebook._base.vocabulary import Combine
    from tunebook._kernel.output_check import Compare


# Outputs that differ, of candidates that nothing else is compared with: each is kept whole.
_MOST_GROUPS: Final = 8


class AgainstModel:
    """Compares outputs with the output of the model, a candidate that counts as correct."""

    def __init__(self, model: int, compare: Compare, stopwatch: Stopwatch) -> None:
        self._model, self._compare, self._stopwatch = model, compare, stopwatch
        self._expected: object = None
        self._known = False

    def __call__(self, launches: Launches[Any], index: int, output: object) -> Any:
        if index == self._model:
            return self._learn(launches, output)
        found = _outcome(launches, output)
        if not self._known:
            # The model has run first, but perhaps in a process that was lost since. If it fails, nothing is compared.
            launches.arguments.restore()
            self._known = True
            with Attempt():
                first_trial(launches(self._model), self._stopwatch, partial(self._learn, launches))
        return None if self._expected is None else self._compare(found, self._expected)

    def _learn(self, launches: Launches[Any], output: object) -> None:
        self._expected, self._known = _outcome(launches, output), True


class AmongThemselves:
    """Compares outputs with each other, where no candidate counts as correct: the output of most of them is right.

    Of outputs that equally many give, the first candidate's is. A candidate is rejected at its first sample, when all
    have run once.
    """

    def __init__(self, compare: Compare) -> None:
        self._compare = compare
        self._groups: list[tuple[object, list[int]]] = []  # an output, and the candidates that give it

    def __call__(self, launches: Launches[Any], index: int, output: object) -> None:
        """Note the output of a candidate; nothing is wrong yet."""
        found = _outcome(launches, output)
        for expected, members in self._groups:
            if found is not None and as_mismatch(self._compare(found, expected)) is None:
                members.append(index)
                return
        # Each group keeps a whole output.
        if found is not None and len(self._groups) < _MOST_GROUPS:
            self._groups.append((found, [index]))

    def rejects(self, index: int) -> Trial | None:
        """Return the failure of a candidate whose output differs from the output of most others."""
        if len(self._groups) < 2:
            return None
        expected, right = max(self._groups, key=lambda group: (len(group[1]), -min(group[1])))
        found = next((output for output, members in self._groups if index in members), None)
        if index in right:
            return None
        wrong = Mismatch("wrong-result", "output is like no other candidate's")
        wrong = wrong if found is None else as_mismatch(self._compare(found, expected)) or wrong
        return Trial(failure=Failure(kind=wrong.kind, message=wrong.message), error=ValueError(wrong.message))


def _outcome(launches: Launches[Any], output: object) -> object:
    # A candidate that returns None has written its result to its arguments, so these are compared.
    return (launches.arguments.written() or None) if output is None else _copy(output)


def _copy(output: object) -> object:
    """Return a copy of the comparable parts of an output, which the next run cannot write to."""
    parts = parts_of(output)
    if isinstance(output, (set, frozenset)):
        return output if all(map(is_scalar, output)) else type(output)
    if parts is not None:
        copied = {step: _copy(part) for step, part in parts.items()}
        return list(copied.values()) if isinstance(output, (tuple, list)) else copied
    if is_array(output):
        return library_of(output).copy(output)
    # Objects of any other class may be equal to nothing but themselves.
    return output if is_scalar(output) else type(output)


class TimedPart(NamedTuple):
    """One problem that candidates run on, with its checks and its share: the shares of all problems add up to 1."""

    launches: Launches[Any]
    check: Callable[[Any], Any] | None = None
    model: AgainstModel | AmongThemselves | None = None
    share: float = 1.0


def _geometric_mean(seconds: Sequence[float], shares: Sequence[float]) -> float:
    """Return the weighted geometric mean of the times.

    >>> round(_geometric_mean([2.0, 8.0], [0.5, 0.5]), 9)
    4.0
    """
    if min(seconds) <= 0.0:  # shorter than a tick of the clock
        return 0.0
    return math.exp(math.fsum(share * math.log(each) for each, share in zip(seconds, shares, strict=True)))


def _weighted_mean(seconds: Sequence[float], shares: Sequence[float]) -> float:
    return math.fsum(share * each for each, share in zip(seconds, shares, strict=True))


def _largest(seconds: Sequence[float], shares: Sequence[float]) -> float:
    """Return the largest product of a time and its share; times their number, it is as long as a mean would be."""
    return len(seconds) * max(share * each for each, share in zip(seconds, shares, strict=True))


# How the times of several problems make one. The shares of "relative" and "max" hold the best time of each problem.
_COMBINE: Final[dict[Combine, Callable[[Sequence[float], Sequence[float]], float]]] = {
    "mean": _weighted_mean,
    "geomean": _geometric_mean,
    "max": _largest,
    "relative": _weighted_mean,
}


def combined_s(combine: Combine, seconds: Sequence[float], shares: Sequence[float]) -> float:
    """Return one time for several problems."""
    return _COMBINE[combine](seconds, shares)


class InProcess(Runner):
    """Runs candidates in this process. A sample combines a sample on each problem."""

    def __init__(self, parts: Sequence[TimedPart], stopwatch: Stopwatch, combine: Combine = "mean") -> None:
        self._parts, self._stopwatch, self._combine = parts, stopwatch, combine
        self._shares: Final = [part.share for part in parts]

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        with Attempt() if error is not None else nullcontext():  # the error at hand says more
            self.put_back()

    def put_back(self) -> None:
        """Leave the arguments as they were before the first run."""
        for part in self._parts:
            part.launches.arguments.put_back_all()

    def first(self, index: int) -> Trial:
        seconds = []
        for launches, check, model, _ in self._parts:
            if check is None and model is not None:
                check = partial(model, launches, index)  # noqa: PLW2901 - in place of the missing one
            with Attempt() as attempt:
                attempt.trial = first_trial(launches(index), self._stopwatch, check)
            launches.arguments.notice()
            seconds.append(attempt.trial.sample_s)
            if attempt.trial.failure is None:
                with attempt:
                    launches.prepare(index)
            if attempt.trial.failure is not None:
                return attempt.trial
        return Trial(sample_s=combined_s(self._combine, seconds, self._shares))

    def sample(self, index: int, runs: int) -> Trial:
        seconds, more_s = [], 0.0
        for launches, check, model, _ in self._parts:
            if check is None and isinstance(model, AmongThemselves) and (rejected := model.rejects(index)) is not None:
                return rejected
            alone = launches.ready()  # several runs would write to changed arguments several times
            trial = sample(launches.in_turn(index), self._stopwatch, 1 if alone else runs)
            if trial.failure is not None:
                return trial
            seconds.append(trial.sample_s)
            more_s += math.inf if alone else trial.more_s
        return Trial(sample_s=combined_s(self._combine, seconds, self._shares), more_s=more_s)
