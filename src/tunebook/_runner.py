"""Where candidates run: in this process, or in one that may die of them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, Self, TypeVar, cast

from tunebook._measure import Stopwatch, Trial, first_trial, sample
from tunebook._restore import Restorer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from tunebook._worker import Answer

Cfg = TypeVar("Cfg")


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
    ) -> None:
        self._configs, self._make_fn, self._args, self._kwargs = configs, make_fn, args, kwargs
        self._made: dict[int, Callable[[], object]] = {}
        self.arguments: Final = Restorer((args, kwargs))

    def __call__(self, index: int) -> Callable[[], object]:
        # At the first run, and not before: a factory that rejects a configuration fails that one candidate.
        return partial(self._run, index)

    def _run(self, index: int) -> object:
        launch = self._made.get(index)
        if launch is None:
            function = self._make_fn(self._configs[index])
            launch = self._made[index] = partial(function, *self._args, **self._kwargs)
        return launch()


class InProcess:
    """Runs candidates right here. Arguments that they write to are put back before each sample, and at the end."""

    def __init__(
        self, launches: Launches[Any], stopwatch: Stopwatch, check: Callable[[Any], str | None] | None
    ) -> None:
        self._launches, self._stopwatch, self._check = launches, stopwatch, check

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._launches.arguments.restore()

    def first(self, index: int) -> Trial:
        """Run a candidate for the first time, check it and warm it up."""
        trial = first_trial(self._launches(index), self._stopwatch, self._check)
        self._launches.arguments.notice()
        return trial

    def sample(self, index: int, runs: int) -> Trial:
        """Take one sample of a candidate that has run."""
        arguments = self._launches.arguments
        arguments.restore()
        # What is written to would be written to several times in a sample of several runs.
        return sample(self._launches(index), self._stopwatch, runs, batch=not arguments.has_changes)


class Isolated:
    """Runs candidates in a worker process, which is forked anew after each one that it dies of."""

    def __init__(
        self,
        launches: Launches[Any],
        stopwatch: Stopwatch,
        check: Callable[[Any], str | None] | None,
        timeout_s: float,
    ) -> None:
        from tunebook._worker import Job, Limits, Worker  # noqa: PLC0415 - only who isolates needs it

        # In the child, which has its own copy of the arguments, everything goes as it does without one.
        there = InProcess(launches, stopwatch, check)

        def first(index: Callable[[], object]) -> Any:
            trial = there.first(cast("int", index()))
            return trial.failure or (trial.sample_s, 1.0)

        def again(index: Callable[[], object], runs: int) -> Any:
            trial = there.sample(cast("int", index()), runs)
            return trial.failure or (trial.sample_s, float(trial.runs))

        job = Job(build=lambda index: lambda: index, first=first, sample=again)
        self._worker = Worker(job, Limits(timeout_s=timeout_s))

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


def _trial(answer: Answer) -> Trial:
    if answer.failure is not None:
        error = RuntimeError(answer.failure.message)
        if answer.remote:
            error.add_note(answer.remote)
        return Trial(failure=answer.failure, error=error)
    seconds, runs = answer.samples_s
    return Trial(sample_s=seconds, runs=int(runs))
