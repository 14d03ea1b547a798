"""Timing candidates in this process: the clock, the first checked run, samples, and arguments put back in between.

An exception of a candidate becomes a failed `Trial` here, in a block of `Attempt`.
"""

from __future__ import annotations

import math
import re
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

from tunebook._arrays.describe import is_array, map_leaves, parts_of, walk
from tunebook._arrays.library import library_of
from tunebook._arrays.made_up import duplicate
from tunebook._base.errors import CompileError, DefinitionError, text_of, with_article
from tunebook._base.vocabulary import Failure, FailureKind
from tunebook._kernel.output_check import CheckError, Mismatch, as_mismatch, is_scalar
from tunebook._measure.argument_restore import Restorer, refuse_iterators
from tunebook._measure.host_caches import empty_caches
from tunebook._statistics.decide import DEVICE_CLOCKS

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from tunebook._arrays.library import Timer
    from tunebook._base.vocabulary import Combine
    from tunebook._kernel.output_check import Compare

Cfg = TypeVar("Cfg")

# Runs shorter than this are timed several at once: reading the clock twice takes a hundredth of it.
SHORTEST_SAMPLE_S: Final = 20e-6
# A candidate whose sample of so many runs would take longer is timed with fewer runs: of two candidates that are alike,
# one would have to be disturbed in all of its samples to seem so slow.
LONGEST_BATCH_S: Final = 1e-3
# How many times more runs a sample gets at once: a slip of the clock may show a long run as a short one.
_GROWTH: Final = 10
# With more runs in a sample, a run would take less time than calling a function does.
_MOST_RUNS: Final = 1000
# XLA, CUDA's runtime and Triton, OpenCL.
_OUT_OF_MEMORY: Final = re.compile(
    r"RESOURCE_EXHAUSTED|\bout of (?:memory|resource)|MEM_OBJECT_ALLOCATION_FAILURE|OUT_OF_RESOURCES", re.IGNORECASE
)


def wait_for(result: Any) -> None:
    """Block until an asynchronous result is ready: any object with `block_until_ready`, also inside containers."""
    for part in (result,) if result is None or hasattr(result, "shape") else walk(result):  # an array is not walked
        block = getattr(part, "block_until_ready", None)
        if block is not None:
            block()


class Stopwatch(NamedTuple):
    """How a run is timed: by a monotonic clock, or by a device's `timer`. `wait` blocks until a result is ready.

    Runs that are shorter than `shortest_s` are timed several at once. If `cold`, the host's caches are emptied before
    each run, outside of its time. If `replayed`, runs are replays of graphs.
    """

    warmup: int = 1
    iters: int = 3
    clock_ns: Callable[[], int] = time.perf_counter_ns
    wait: Callable[[Any], None] = wait_for
    timer: Timer | None = None
    shortest_s: float = SHORTEST_SAMPLE_S
    cold: bool = False
    replayed: bool = False
    empty_caches: Callable[[], object] = empty_caches

    @property
    def name(self) -> str:
        """The measurement policy: times under different policies are never compared."""
        clock = f"host-clock{'/cold-cache' * self.cold}{'/graph' * self.replayed}"
        clock = clock if self.timer is None else self.timer.name
        # It says whether a device's own clock took them, because `decide` is stricter with these.
        if self.timer is not None and self.timer.is_device_clock and not clock.startswith(DEVICE_CLOCKS):
            clock = f"device-clock/{clock}"
        return f"{clock}/race/warmup={self.warmup}"

    def by(self, timer: Timer | None) -> Stopwatch:
        """Return a stopwatch that takes samples by a timer; with None, this one."""
        return self if timer is None else self._replace(timer=timer, wait=timer.wait)

    def sample_s(self, launch: Callable[[], object], runs: int = 1) -> float:
        """Return the seconds of a run, as the mean of several that are timed together."""
        if self.timer is not None:
            return self.timer.sample_s(launch, runs)
        if self.cold:
            return math.fsum(self._cold_run_s(launch) for _ in range(runs)) / runs
        start = self.clock_ns()
        for _ in range(runs):
            self.wait(launch())
        return (self.clock_ns() - start) * 1e-9 / runs

    def _cold_run_s(self, launch: Callable[[], object]) -> float:
        self.empty_caches()
        start = self.clock_ns()
        self.wait(launch())
        return (self.clock_ns() - start) * 1e-9


class Trial(NamedTuple):
    """The outcome of running a candidate: a sample, or a failure and the error behind it.

    `more_s` is how much longer a sample with one run more takes; infinite if a sample cannot have more runs.
    """

    sample_s: float = math.nan
    more_s: float = math.inf
    failure: Failure | None = None
    error: Exception | None = None


class Attempt(AbstractContextManager["Attempt", bool]):
    """A with-block in which a candidate runs. An exception in the block becomes the failed `trial`.

    A kernel may raise anything, and its failure is a result. Ctrl-C and the like are not an `Exception`: they pass.
    """

    trial = Trial()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.trial = failed(error)
        return True


def first_trial(launch: Callable[[], object], stopwatch: Stopwatch, check: Callable[[Any], Any] | None = None) -> Trial:
    """Run a candidate for the first time, which may compile something and is the sample; check it and warm it up."""
    with Attempt() as attempt:
        start = stopwatch.clock_ns()
        output = launch()
        _refuse_deferred_output(output)
        stopwatch.wait(output)
        first_s = (stopwatch.clock_ns() - start) * 1e-9
        wrong = None if check is None else as_mismatch(check(output))
        if wrong is not None:
            return Trial(failure=Failure(kind=wrong.kind, message=wrong.message), error=ValueError(wrong.message))
        del output  # with a second result in memory, the next run could fail
        for _ in range(stopwatch.warmup - 1):
            stopwatch.wait(launch())
        attempt.trial = Trial(sample_s=first_s)
    return attempt.trial


def _refuse_deferred_output(output: object) -> None:
    """Raise `DefinitionError` for an output that has not been computed: a coroutine or a generator."""
    if isinstance(output, (CoroutineType, GeneratorType, AsyncGeneratorType)):
        if isinstance(output, CoroutineType):
            output.close()  # or Python warns that it was never awaited
        kind = with_article(type(output).__name__.replace("_", " "))
        raise DefinitionError(f"it returns {kind}, which has not run yet. Tune the function that does the work")


def sample(launch: Callable[[], object], stopwatch: Stopwatch, runs: int = 1) -> Trial:
    """Take one sample of a warm candidate: the mean of so many runs."""
    with Attempt() as attempt:
        seconds = stopwatch.sample_s(launch, runs)
        # To empty the caches takes longer than the runs that a sample with several runs is for.
        attempt.trial = Trial(sample_s=seconds, more_s=math.inf if stopwatch.cold else seconds)
    return attempt.trial


class Batches:
    """How many runs are timed together as one sample: equally many for all candidates of a race.

    A sample takes longer than its runs: the clock is read twice, and the first run finds the caches full of another
    candidate's work. With equal numbers of runs this adds the same to candidates that are alike. With numbers of their
    own, taken from the first samples, the candidate that ran first had half the runs of the others, and lost by 5 %.
    """

    def __init__(self, shortest_s: float) -> None:
        self._shortest_s, self._common = shortest_s, 1
        self._runs: dict[Hashable, int] = {}
        self._fastest: dict[Hashable, Trial] = {}  # since the number of runs changed

    def take(self, name: Hashable, take: Callable[[int], Trial]) -> Trial:
        """Return a sample of a candidate, which `take` takes with a number of runs."""
        trial = take(self._runs.get(name, 1))
        if trial.failure is None and (name not in self._fastest or trial.sample_s < self._fastest[name].sample_s):
            self._fastest[name] = trial
        return trial

    def renew(self, names: Iterable[Hashable]) -> set[Hashable]:
        """Give samples more runs if they are too short; return the candidates whose samples so far are void by that.

        Ask again after the next samples: the first ones are slow, and call for too few runs.
        """
        seen = {name: self._fastest[name] for name in names if name in self._fastest}
        if seen:
            name = min(seen, key=lambda name: seen[name].sample_s)
            self._grow(seen[name], self._runs.get(name, 1))
        void: set[Hashable] = {
            name
            for name, trial in seen.items()
            if self._runs.get(name, 1) < self._common and self._common * trial.more_s <= LONGEST_BATCH_S
        }
        for name in void:
            self._runs[name] = self._common
            del self._fastest[name]
        return void

    def _grow(self, fastest: Trial, runs: int) -> None:
        if 0 < runs * fastest.sample_s < self._shortest_s / 2:
            wanted = min(math.ceil(self._shortest_s / fastest.sample_s), _GROWTH * runs, _MOST_RUNS)
            # A quarter, or candidates that are alike would be on either side of the limit.
            self._common = max(self._common, min(wanted, math.floor(LONGEST_BATCH_S / 4 / fastest.more_s)))


def failed(error: Exception) -> Trial:
    """Return the trial of a candidate that raised an error."""
    kind: FailureKind = "launch"
    text = text_of(error)
    # Every framework has its own class for a device out of memory, or only words.
    out_of_memory = "OutOfMemory" in type(error).__name__ or _OUT_OF_MEMORY.search(text)
    if isinstance(error, MemoryError) or out_of_memory:
        kind = "memory"
    elif isinstance(error, CompileError):
        kind = "compile"
    elif isinstance(error, TimeoutError):
        kind = "timeout"
    elif isinstance(error, CheckError):
        return Trial(failure=Failure(kind="check", message=text), error=error)
    return Trial(failure=Failure(kind=kind, message=f"{type(error).__name__}: {text}"), error=error)


# ------------------------------------------------------------------------------------------------------------- runners


class Runner(AbstractContextManager["Runner", None], Protocol):
    """Runs candidates by their index."""

    def first(self, index: int) -> Trial:
        """Run a candidate for the first time, check it and warm it up."""

    def sample(self, index: int, runs: int) -> Trial:
        """Take one sample of so many runs of a candidate that has run."""


class Launches(Generic[Cfg]):
    """Binds each candidate's function to the arguments of a job; `arguments` puts them back.

    Of `copies` of the arguments, the caller's own are the first, which checked runs get; samples take them in turn.
    `graph` makes a function that replays a run.
    """

    def __init__(
        self,
        configs: Sequence[Cfg],
        make_fn: Callable[[Cfg], Callable[..., object]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        mutated: Sequence[object] | None = None,
        *,
        copies: int = 1,
        graph: Callable[[Callable[[], object]], Callable[[], object]] | None = None,
    ) -> None:
        self._configs, self._make_fn, self._graph = configs, make_fn, graph
        self._made: dict[tuple[int, int], Callable[[], object]] = {}
        self._replays: dict[tuple[int, int], Callable[[], object]] = {}
        refuse_iterators((args, dict(kwargs)))
        self.arguments: Final = Restorer((args, kwargs), mutated)
        self._sets = [(args, kwargs), *(_another((args, dict(kwargs))) for _ in range(copies - 1))]
        self._turn = 0
        self._kept: list[Restorer] = []

    def __call__(self, index: int, copy: int = 0) -> Callable[[], object]:
        """Return the launch of a candidate, made at the first request. The factory may reject the configuration."""
        if (index, copy) not in self._made:
            args, kwargs = self._sets[copy]
            self._made[index, copy] = partial(self._make_fn(self._configs[index]), *args, **kwargs)
        return self._made[index, copy]

    def prepare(self, index: int) -> None:
        """Capture a candidate that has run in graphs, if runs are to be replayed."""
        for copy in range(0 if self._graph is None else len(self._sets)):
            replay = self._replays[index, copy] = self._graph(self(index, copy))  # type: ignore[misc] # there is one
            for _ in range(2):  # it runs as it is, and is captured
                replay()
                self.ready()

    def in_turn(self, index: int) -> Callable[[], object]:
        """Return the launch that samples of a candidate are taken of: with each call, the next copy takes its turn."""
        if len(self._sets) == 1:
            return self._replays.get((index, 0)) or self(index)
        launches = [self._replays.get((index, copy)) or self(index, copy) for copy in range(len(self._sets))]

        def launch() -> object:
            self._turn = (self._turn + 1) % len(launches)
            return launches[self._turn]()

        return launch

    def ready(self) -> bool:
        """Put back the arguments that runs change; return whether there are any: a sample then has one run only."""
        self.arguments.restore()
        if not self.arguments.has_changes:
            return False
        if len(self._sets) > 1 and not self._kept:  # no copy has changed yet: a checked run is seen to change first
            self._kept = [Restorer(each) for each in self._sets[1:]]
        if self._turn:
            self._kept[self._turn - 1].notice()
        return True


def _another(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """Return arguments with copies of their arrays; an array that is passed twice is copied once."""
    made: dict[int, Any] = {}

    def copied(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = duplicate(leaf)
        return made[id(leaf)]

    return map_leaves(copied, arguments)


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
            if found is not None and self._difference(found, expected) is None:
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
        wrong = wrong if found is None else self._difference(found, expected) or wrong
        return Trial(failure=Failure(kind=wrong.kind, message=wrong.message), error=ValueError(wrong.message))

    def _difference(self, found: object, expected: object) -> Mismatch | None:
        # Both ways: neither counts as correct, and a coarse dtype of the expected output allows more.
        return as_mismatch(self._compare(found, expected)) or as_mismatch(self._compare(expected, found))


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
            if isinstance(attempt.trial.error, CheckError):
                raise attempt.trial.error
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
