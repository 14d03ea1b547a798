"""Where candidates run: in this process, or in one that may die of them."""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, Self, TypeVar, cast

from tunebook._arrays.describe import is_array
from tunebook._arrays.operations import ops_of
from tunebook._measure.argument_restore import Restorer
from tunebook._measure.stopwatch import Stopwatch, Trial, first_trial, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from tunebook._kernel.output_check import Compare
    from tunebook._measure.forked_worker import Reply

Cfg = TypeVar("Cfg")

_SCALARS: Final = (bool, int, float, complex, str, bytes)


class Runner(Protocol):
    """Runs candidates, which it knows by their index. A context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def first(self, index: int) -> Trial:
        """Run a candidate for the first time, check it and warm it up."""

    def sample(self, index: int, runs: int) -> Trial:
        """Take one sample of a candidate that has run."""


class Launches(Generic[Cfg]):
    """Makes what runs a candidate: its function, made once, on the arguments of the job."""

    def __init__(
        self,
        configs: Sequence[Cfg],
        make_fn: Callable[[Cfg], Callable[..., object]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        mutated: Sequence[object] | None = None,
    ) -> None:
        self._configs, self._make_fn, self._args, self._kwargs = configs, make_fn, args, kwargs
        self._made: dict[int, Callable[[], object]] = {}
        self.arguments: Final = Restorer((args, kwargs), mutated)

    def __call__(self, index: int) -> Callable[[], object]:
        # At the first run, and not before: a factory that rejects a configuration fails that one candidate.
        return partial(self._run, index)

    def _run(self, index: int) -> object:
        launch = self._made.get(index)
        if launch is None:
            function = self._make_fn(self._configs[index])
            launch = self._made[index] = partial(function, *self._args, **self._kwargs)
        return launch()


class AgainstModel:
    """Checks outputs against that of one candidate, the model: it is taken for right, having no reference.

    What returns nothing has written its result to its arguments, and those are compared.
    """

    def __init__(self, model: int, compare: Compare, stopwatch: Stopwatch) -> None:
        self._model, self._compare, self._stopwatch = model, compare, stopwatch
        self._expected: object = None
        self._known = False

    def __call__(self, launches: Launches[Any], index: int, output: object) -> Any:
        if index == self._model:
            return self._learn(launches, output)
        found = _outcome(launches, output)
        if not self._known:
            # The model has run first, but perhaps in a process that was lost since. If it fails there is no model.
            launches.arguments.restore()
            self._known = True
            first_trial(launches(self._model), self._stopwatch, partial(self._learn, launches))
        return None if self._expected is None else self._compare(found, self._expected)

    def _learn(self, launches: Launches[Any], output: object) -> None:
        self._expected, self._known = _outcome(launches, output), True


def _outcome(launches: Launches[Any], output: object) -> object:
    return (launches.arguments.written() or None) if output is None else _kept(output)


def _kept(output: object) -> object:
    """Return what can be compared of an output, so that the next run cannot write to it."""
    if isinstance(output, (tuple, list)):
        return [_kept(part) for part in output]
    if isinstance(output, dict):
        return {key: _kept(part) for key, part in output.items()}
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return {field.name: _kept(getattr(output, field.name)) for field in dataclasses.fields(output)}
    if is_array(output):
        access = ops_of(output)
        return output if access is None else access.copy(output)
    # Objects of any other class may be equal to nothing but themselves.
    return output if isinstance(output, _SCALARS) else type(output)


class InProcess:
    """Runs candidates right here. Arguments that they write to are put back before each sample, and at the end."""

    def __init__(
        self,
        launches: Launches[Any],
        stopwatch: Stopwatch,
        check: Callable[[Any], Any] | None = None,
        model: AgainstModel | None = None,
    ) -> None:
        self._launches, self._stopwatch, self._check, self._model = launches, stopwatch, check, model

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._launches.arguments.restore()

    def first(self, index: int) -> Trial:
        """Run a candidate for the first time, check it and warm it up."""
        check = self._check
        if check is None and self._model is not None:
            check = partial(self._model, self._launches, index)
        trial = first_trial(self._launches(index), self._stopwatch, check)
        self._launches.arguments.notice()
        return trial

    def sample(self, index: int, runs: int) -> Trial:
        """Take one sample of a candidate that has run."""
        arguments = self._launches.arguments
        arguments.restore()
        # What is written to would be written to several times in a sample of several runs.
        return sample(self._launches(index), self._stopwatch, runs, batch=not arguments.has_changes)


class Together:
    """Runs candidates on several problems; a sample is the weighted mean of one on each."""

    def __init__(self, runners: Sequence[Runner], weights: Sequence[float]) -> None:
        total = math.fsum(weights)
        self._parts = [(runner, weight / total) for runner, weight in zip(runners, weights, strict=True)]
        self._runs: dict[tuple[int, int], int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for runner, _ in self._parts:
            runner.__exit__(kind, error, trace)

    def first(self, index: int) -> Trial:
        return self._sum(lambda _part, runner: runner.first(index))

    def sample(self, index: int, runs: int) -> Trial:  # noqa: ARG002 - each problem has its own number of runs
        def one(part: int, runner: Runner) -> Trial:
            trial = runner.sample(index, self._runs.get((part, index), 1))
            self._runs[part, index] = trial.runs
            return trial

        return self._sum(one)

    def _sum(self, run: Callable[[int, Runner], Trial]) -> Trial:
        seconds = 0.0
        for part, (runner, weight) in enumerate(self._parts):
            trial = run(part, runner)
            if trial.failure is not None:
                return trial
            seconds += weight * trial.sample_s
        return Trial(sample_s=seconds)


class Isolated:
    """Runs candidates in a worker process, which is forked anew after each one that it dies of."""

    def __init__(
        self, there: Runner, timeout_s: float, calm: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """`there` runs them in the child, which has its own copy of the arguments. `calm` is around each fork."""
        from tunebook._measure.forked_worker import ChildTask, ForkedWorker, Limits  # noqa: PLC0415 - only who isolates needs it

        def first(index: Callable[[], object]) -> Any:
            trial = there.first(cast("int", index()))
            return trial.failure or (trial.sample_s, 1.0)

        def again(index: Callable[[], object], runs: int) -> Any:
            trial = there.sample(cast("int", index()), runs)
            return trial.failure or (trial.sample_s, float(trial.runs))

        job = ChildTask(build=lambda index: lambda: index, first=first, sample=again)
        self._worker = ForkedWorker(job, Limits(timeout_s=timeout_s), calm)

    def __enter__(self) -> Self:
        self._worker.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.__exit__(kind, error, trace)

    def first(self, index: int) -> Trial:
        return _trial(self._worker.prepare(index))

    def sample(self, index: int, runs: int) -> Trial:
        return _trial(self._worker.sample(index, runs))


def _trial(answer: Reply) -> Trial:
    if answer.failure is not None:
        error = RuntimeError(answer.failure.message)
        if answer.remote:
            error.add_note(answer.remote)
        return Trial(failure=answer.failure, error=error)
    seconds, runs = answer.samples_s
    return Trial(sample_s=seconds, runs=int(runs))
