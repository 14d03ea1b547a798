"""Tunes a recording on many devices at once: sends tasks to workers, collects their results, and reports progress."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tunebook._base.record_format import Record
from tunebook._selection.env_pins import fits_device, fits_kernel
from tunebook._selection.persistent_cache import default_book
from tunebook._selection.recording import SavedCall, saved_calls
from tunebook._tuning.job import Budget, parse_budget
from tunebook.fleet._farm.clusters import open_cluster
from tunebook.fleet._farm.compiling import Compilation, compile_ahead
from tunebook.fleet._farm.task import Status, Task, TaskOutcome, tune_call
from tunebook.formats._bundle import merge_into
from tunebook.stores import open_store
from tunebook.stores._files import FaultsAreWarnings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Executor

    from tunebook._base.vocabulary import Problem
    from tunebook._selection.recording import Recording
    from tunebook.fleet._farm.clusters import Cluster, FarmWorker
    from tunebook.stores import Store

# How often a call is sent out. The second time, because a worker may have died of something else.
_TRIES: Final = 2
# How often the parent looks for workers that vanished without an error, and for replacements.
_LOOK_S: Final = 0.5
# How long a place may stay without a worker before it is given up: a nanny has a new one within seconds.
_VACANT_S: Final = 60.0


class FarmResult(NamedTuple):
    """The result of a recorded call: "tuned", "known", "failed", "skipped", or "new" if it would be tuned.

    `tuned_as` is the problem on the worker: its device may differ from the device of the recording. `complete` is False
    if the budget ended the tuning.
    """

    problem: Problem
    status: Status
    detail: str
    tuned_as: Problem
    worker: str = ""
    ran: int = 0
    seconds: float = 0.0
    tries: int = 0
    complete: bool = True


class FarmStep(NamedTuple):
    """Progress: how many calls are done, which problems are being tuned (by worker), and the latest result."""

    done: int
    total: int
    elapsed_s: float
    running: dict[str, Problem]
    latest: FarmResult | None = None


class FarmReport(NamedTuple):
    """The results of a recording, in its order."""

    results: tuple[FarmResult, ...]
    seconds: float
    compilation: Compilation = Compilation()

    @property
    def counts(self) -> dict[str, int]:
        """How many results have each status."""
        return dict(Counter(result.status for result in self.results))

    @property
    def ok(self) -> bool:
        """Whether every call is tuned or known now."""
        return all(result.status in {"tuned", "known"} for result in self.results)


def tune_recording(
    recording: Recording | str | os.PathLike[str],
    *,
    over: Executor | str | None = None,
    budget: Budget | float | str | None = None,
    modules: Sequence[str] = (),
    kernel: str | Sequence[str] = "*",
    device: str | Sequence[str] = "*",
    book: Store | str | os.PathLike[str] | None = None,
    at_once: int = 1,
    dry_run: bool = False,
    again: bool = False,
    on_step: Callable[[FarmStep], None] | None = None,
) -> FarmReport:
    """Tune the calls of a recording, or of its file, on many devices; known problems only if `again`, from scratch.

    `over` names the workers: None or "local" for the devices of this machine, the address of a cluster, as in
    "dask://host:port" (docs/fleet-tuning.md lists all kinds), or any executor of `concurrent.futures`. Workers import
    `modules`, then the modules that the calls name. The kernel's own selector tunes each problem into the worker's
    book; this process merges the result into `book` (by default the user's). A device tunes `at_once` problems at a
    time: with 2, one compiles while the other measures, if both fit into its memory. An executor gets `at_once`
    problems in all.

    A call whose worker dies is tried once more. `budget` is for all calls: seconds from now, or candidates, shared out
    evenly. `kernel` is a pattern, as in "attention*", or several; `device` is one for a part of the device's name, as
    in "h200", or several. A `dry_run` measures nothing: calls that it would tune are "new".
    """
    calls = _matching(recording, kernel, device)
    if not calls:
        return FarmReport((), 0.0)
    path: str | None = None
    if isinstance(book, (str, os.PathLike)):
        path = str(Path(book).absolute())
        book = open_store(Path(path))
    store = default_book() if book is None else book
    known = _known_records(store, calls)
    local = over in {None, "local"}
    task = Task(calls[0], tuple(modules), book=path, dry=dry_run, local=local, again=again)
    tasks = [task._replace(call=call, records=known[call.problem[1:]]) for call in calls]
    limit = parse_budget(budget)
    compilation = Compilation()
    unknown = [task for task in tasks if task.call.finder and (again or not task.records)]
    if unknown and local and not dry_run:  # the workers of a cluster compile on their own machines
        compilation = compile_ahead(unknown, limit_s=limit.seconds)
    if limit.seconds is not None:
        limit = limit._replace(seconds=max(limit.seconds - compilation.seconds, 0.0))
    report = _Farm(open_cluster(over, at_once), store, limit, on_step, tasks).run()
    return report._replace(seconds=report.seconds + compilation.seconds, compilation=compilation)


def compile_recording(
    recording: Recording | str | os.PathLike[str],
    target: str,
    *,
    modules: Sequence[str] = (),
    kernel: str | Sequence[str] = "*",
    device: str | Sequence[str] = "*",
) -> FarmReport:
    """Compile the candidates of a recording's Triton kernels for a target, as in "cuda:90", without a GPU.

    This fills Triton's cache on disk, and measures nothing. The other arguments are as for `tune_recording`.
    """
    tasks = [Task(call, tuple(modules), local=True) for call in _matching(recording, kernel, device)]
    if not tasks:
        return FarmReport((), 0.0)
    compilation = compile_ahead(tasks, target)
    results = [FarmResult(outcome.problem, *outcome[:3], ran=outcome.ran) for outcome in compilation.outcomes]
    return FarmReport(tuple(results), compilation.seconds, compilation)


def _matching(
    recording: Recording | str | os.PathLike[str], kernel: str | Sequence[str], device: str | Sequence[str]
) -> list[SavedCall]:
    kernels, devices = ([given] if isinstance(given, str) else given for given in (kernel, device))
    calls = (call for call in saved_calls(recording) if fits_kernel(call.problem.op, kernels))
    return [call for call in calls if fits_device(call.problem.device, devices)]


def _known_records(store: Store, calls: Sequence[SavedCall]) -> defaultdict[tuple[str, str], tuple[bytes, ...]]:
    """Return the records of these calls by operation and call key, on any device: only a worker knows its device."""
    keys = {call.problem[1:] for call in calls}
    found: defaultdict[tuple[str, str], tuple[bytes, ...]] = defaultdict(tuple)
    for op in {call.problem.op for call in calls}:
        for record in store.items(op):
            if record.problem[1:] in keys:
                found[record.problem[1:]] += (record.to_bytes(),)
    return found


def fits(worker: FarmWorker, workers: Iterable[FarmWorker], device: str) -> bool:
    """Whether a worker may tune a problem of a device: it has that kind, or that platform if no worker has the kind."""
    kinds = {each.kind for each in workers}
    if not worker.kind or device in kinds:
        return worker.kind in {"", device}
    own, wanted, *others = (kind.partition(":")[0] for kind in (worker.kind, device, *kinds))
    # A platform that no worker reports (only NVIDIA's GPUs are found without a framework) goes to the workers for a
    # processor, which report an error if they lack it too.
    return own == (wanted if wanted in others else "cpu")


class _Farm:
    """One run. All work happens in the caller's thread, except writing to the book, which may wait for a lease."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        budget: Budget,
        on_step: Callable[[FarmStep], None] | None,
        tasks: list[Task],
    ) -> None:
        self._cluster, self._store, self._budget, self._on_step = cluster, store, budget, on_step
        self._began_s = time.monotonic()
        self._problems = [task.call.problem for task in tasks]
        self._waiting = tasks
        self._tries: Counter[Problem] = Counter()
        self._results: dict[Problem, FarmResult] = {}
        self._running: dict[Future[TaskOutcome], tuple[FarmWorker, Task]] = {}
        self._free: list[FarmWorker] = []
        self._vacant: dict[FarmWorker, tuple[BaseException, float]] = {}
        self._writes: list[Future[None]] = []

    def run(self) -> FarmReport:
        try:
            self._free = self._cluster.workers()
            with ThreadPoolExecutor(1, thread_name_prefix="tunebook-book") as self._bookkeeper:
                while self._waiting or self._running:
                    self._send()
                    self._receive()
                    self._replace_vacant()
                for write in self._writes:
                    write.result()
        except KeyboardInterrupt as error:
            error.add_note(self._progress())
            raise
        finally:
            self._cluster.close([worker for worker, _ in self._running.values()])
        results = tuple(self._results[problem] for problem in self._problems)
        return FarmReport(results, time.monotonic() - self._began_s)

    def _progress(self) -> str:
        """Return what an interrupted run has done, and how to go on, in a line."""
        done, total = len(self._results), len(self._problems)
        others = "the other" if total == done + 1 else "the others"
        rest = f" Measurements of {others} are kept: the same command goes on from there." if done < total else ""
        return f"tunebook: {done} of {total} calls {'is' if done == 1 else 'are'} done.{rest}"

    def _send(self) -> None:
        for worker in list(self._free):
            workers = [*self._free, *self._vacant, *(busy for busy, _ in self._running.values())]
            task = next((task for task in self._waiting if fits(worker, workers, task.call.problem.device)), None)
            if task is None:
                continue
            budget = self._budget_of_one()
            if budget.is_spent and not task.dry:
                break
            self._waiting.remove(task)
            self._free.remove(worker)
            self._tries[task.call.problem] += 1
            task = task._replace(budget=budget, attempt=self._tries[task.call.problem])
            try:
                future = worker.executor.submit(tune_call, task)
            except RuntimeError as error:  # it is broken, or has been shut down
                future = Future()
                future.set_exception(error)
            self._running[future] = worker, task
            self._report_step()
        spent = bool(self._waiting) and not self._waiting[0].dry and self._budget_of_one().is_spent
        if not self._running and (spent or not self._vacant):
            why: tuple[Status, str] = ("failed", "no worker is left that could tune it")
            why = ("skipped", "the budget is spent") if spent else why
            for task in self._waiting:
                self._finish(task, TaskOutcome(*why, task.call.problem))
            self._waiting.clear()

    def _budget_of_one(self) -> Budget:
        """Return the budget of the next task: the time that is left, and its share of the candidates that are left."""
        seconds, trials = self._budget
        if seconds is not None:
            seconds = max(seconds - (time.monotonic() - self._began_s), 0.0)
        if trials is not None:
            ran = sum(result.ran for result in self._results.values())
            granted = sum(task.budget.trials or 0 for _, task in self._running.values())
            left = max(trials - ran - granted, 0)
            trials = -(-left // len(self._waiting))
        return Budget(seconds, trials)

    def _receive(self) -> None:
        done, _ = wait(self._running, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
        for future in done:
            worker, task = self._running.pop(future)
            error = CancelledError() if future.cancelled() else future.exception()
            if error is None:
                self._free.append(worker)
                self._finish(task, future.result())
            else:
                self._retry(worker, task, error)
        for future, (worker, task) in list(self._running.items()):
            if self._cluster.is_gone(worker):
                del self._running[future]
                future.cancel()
                self._retry(worker, task, ConnectionError(f"the worker {worker.name} is gone"))

    def _retry(self, worker: FarmWorker, task: Task, error: BaseException) -> None:
        """Queue the task of a lost worker again, or fail it after the last try; the worker awaits replacement."""
        self._vacant[worker] = error, time.monotonic()
        tries = self._tries[task.call.problem]
        if tries < _TRIES:
            self._waiting.insert(0, task)
            return
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._finish(task, TaskOutcome("failed", f"{reason} ({tries} times)", task.call.problem, worker.name))

    def _replace_vacant(self) -> None:
        for worker, (error, since_s) in list(self._vacant.items()):
            replacement = self._cluster.replace(worker, error)
            if replacement is not None:
                self._free.append(replacement)
            if replacement is not None or time.monotonic() - since_s > _VACANT_S:
                del self._vacant[worker]

    def _finish(self, task: Task, outcome: TaskOutcome) -> None:
        problem = task.call.problem
        if outcome.record:  # also if it was known: the parent of another run may have died before it wrote the record
            self._writes.append(self._bookkeeper.submit(_merge, self._store, outcome.record))
        detail = outcome.detail
        if outcome.status == "tuned" and outcome.problem.device != problem.device:
            detail = f"{detail}, on {outcome.problem.device}"
        result = FarmResult(problem, outcome.status, detail, *outcome[2:6], self._tries[problem], outcome.complete)
        self._results[problem] = result
        self._report_step(result)

    def _report_step(self, latest: FarmResult | None = None) -> None:
        if self._on_step is not None:
            running = {worker.name: task.call.problem for worker, task in self._running.values()}
            elapsed_s = time.monotonic() - self._began_s
            self._on_step(FarmStep(len(self._results), len(self._problems), elapsed_s, running, latest))


def _merge(store: Store, data: bytes) -> None:
    with FaultsAreWarnings(store.where, before="a result was not merged: "):
        merge_into(store, [Record.from_bytes(data)])
