"""Timing candidates in this process: the clock, the first checked run, samples, and arguments put back in between.

An exception of a candidate becomes a failed `Trial` here, in a block of `Attempt`.
"""

from __future__ import annotations

import math
import re
import time
from contextlib import AbstractContextManager
from functools import partial
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

from tunebook._arrays.describe import is_array, map_leaves, walk
from tunebook._arrays.made_up import duplicate
from tunebook._base.errors import CompileError, DefinitionError, text_of
from tunebook._base.vocabulary import Failure, FailureKind
from tunebook._kernel.output_check import as_mismatch
from tunebook._measure.argument_restore import Restorer, refuse_iterators
from tunebook._measure.host_caches import empty_caches
from tunebook._statistics.decide import DEVICE_CLOCKS

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from tunebook._arrays.library import Timer

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
        kind = type(output).__name__.replace("_", " ")
        raise DefinitionError(f"it returns a {kind}, which has not run yet. Tune the function that does the work")


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


def mean_s(launch: Callable[[], object], stopwatch: Stopwatch) -> float:
    """Return the mean seconds of `iters` samples of a function; its error is raised."""
    trial, batches = first_trial(launch, stopwatch), Batches(stopwatch.shortest_s)
    samples: list[float] = []
    while trial.error is None and len(samples) < stopwatch.iters:
        trial = batches.take(launch, partial(sample, launch, stopwatch))
        samples.append(trial.sample_s)
        if batches.renew([launch]):
            samples.clear()
    if trial.error is not None:
        raise trial.error
    return math.fsum(samples) / len(samples)


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
        if (
            len(self._sets) > 1 and not self._kept
        ):  # no copy has been changed yet: a checked run is seen to change first
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
