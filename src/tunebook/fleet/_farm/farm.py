"""Tuning a recording on many devices at once: what is sent where, what comes back, and who is told."""

from __future__ import annotations

import os
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tunebook._base.errors import StoreError, warn_once
from tunebook._base.record_format import Record
from tunebook._selection.env_pins import names_of
from tunebook._selection.persistent_cache import default_book
from tunebook._selection.recording import SavedCall, saved_calls
from tunebook._tuning.job import Budget, parse_budget
from tunebook.fleet._farm.task import Status, Task, TaskOutcome, tune_call
from tunebook.fleet._farm.workers import FarmWorker, engine_for
from tunebook.formats._bundle import merge_into
from tunebook.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from tunebook._base.vocabulary import Problem
    from tunebook._selection.recording import Recording
    from tunebook.fleet._farm.workers import Engine
    from tunebook.stores import Store

# How often a call is sent out. The second time, because a worker may have died of something else.
TRIES: Final = 2
# How often the parent looks for workers that are gone without a word, and for new ones in their place.
_LOOK_S: Final = 0.5
# How long a seat may stay without a worker before it is given up: a nanny has a new one within seconds.
_VACANT_S: Final = 60.0


class FarmResult(NamedTuple):
    """What became of one recorded call: "tuned", "known", "failed", "skipped", or "new" if it would be tuned.

    `tuned_as` is what it is on the worker: the device may be another one than where it was recorded.
    """

    problem: Problem
    status: Status
    detail: str
    tuned_as: Problem
    worker: str = ""
    ran: int = 0
    seconds: float = 0.0
    tries: int = 0


class FarmStep(NamedTuple):
    """Where the whole is: how many calls are done, which are being tuned (by seat), and what was done last."""

    done: int
    total: int
    elapsed_s: float
    running: dict[str, Problem]
    latest: FarmResult | None = None


class FarmReport(NamedTuple):
    """What became of a recording, in its order."""

    results: tuple[FarmResult, ...]
    seconds: float

    @property
    def counts(self) -> dict[str, int]:
        """How many of each status."""
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
    kernel: str = "*",
    device: str = "*",
    book: Store | str | os.PathLike[str] | None = None,
    at_once: int = 1,
    dry_run: bool = False,
    on_step: Callable[[FarmStep], None] | None = None,
) -> FarmReport:
    """Tune the calls of a recording, or of the file of one, on many devices; what is known is not tuned again.

    `over` is where: None or "local" for the devices of this machine, "dask://host:port", "ray://auto" or
    "ray://host:port", "mpi", or any executor of `concurrent.futures`. Workers import the modules that the calls name,
    and `modules` before; each problem is tuned by the kernel's own selector, into the worker's book, and merged into
    `book` (the user's own) here. A device tunes `at_once` problems at a time: with 2, one compiles while the other
    measures, if both fit into its memory. An executor that cannot be asked is sent so many at a time.

    A call whose worker dies is tried once more. `budget` is for all: seconds from now, or candidates, which are shared
    out evenly. `kernel` is a pattern such as "attention*", and `device` one of a part of the name where a call was
    recorded, such as "h200". With `dry_run` nothing is measured: what would be is "new".
    """
    calls = [call for call in saved_calls(recording) if _is_meant(call, kernel, device)]
    if not calls:
        return FarmReport((), 0.0)
    path = Path(book).absolute() if isinstance(book, (str, os.PathLike)) else None
    store = open_store(path) if path is not None else default_book() if book is None else book
    farm = _Farm(engine_for(over, at_once), store, parse_budget(budget), on_step, calls)  # type: ignore[arg-type] # no path
    farm.prepare(modules, None if path is None else str(path), dry=dry_run)
    return farm.run()


def _is_meant(call: SavedCall, kernel: str, device: str) -> bool:
    op = call.problem.op
    named = any(fnmatchcase(name, kernel) for name in names_of(op))
    return named and fnmatchcase(call.problem.device.lower(), f"*{device.lower()}*")


class _Farm:
    """One run. Only the caller's thread works, but for the book, where a lease may have to be waited for."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        budget: Budget,
        on_step: Callable[[FarmStep], None] | None,
        calls: list[SavedCall],
    ) -> None:
        self._engine, self._store, self._on_step, self._calls = engine, store, on_step, calls
        self._began_s = time.monotonic()
        self._budget = budget
        self._waiting: list[Task] = []
        self._tries: Counter[Problem] = Counter()
        self._results: dict[Problem, FarmResult] = {}
        self._running: dict[Future[TaskOutcome], tuple[FarmWorker, Task]] = {}
        self._free: list[FarmWorker] = []
        self._vacant: dict[FarmWorker, float] = {}
        self._kept: list[Future[None]] = []

    def prepare(self, modules: Sequence[str], book: str | None, *, dry: bool) -> None:
        """Make a task of each call."""
        known = self._known()
        self._waiting = [
            Task(call, tuple(modules), known.get(call.problem[1:], ()), book=book, dry=dry) for call in self._calls
        ]

    def _known(self) -> dict[tuple[str, str], tuple[bytes, ...]]:
        """Return what the book knows of these calls, on whatever device: which one a worker has, it alone can tell."""
        keys = {call.problem[1:] for call in self._calls}
        found: dict[tuple[str, str], tuple[bytes, ...]] = {}
        for op in {call.problem.op for call in self._calls}:
            for record in self._store.items(op):
                key = record.problem.op, record.problem.call_key
                if key in keys:
                    found[key] = (*found.get(key, ()), record.to_bytes())
        return found

    def run(self) -> FarmReport:
        try:
            self._free = self._engine.seats()
            with ThreadPoolExecutor(1, thread_name_prefix="tunebook-book") as self._bookkeeper:
                while self._waiting or self._running:
                    self._send()
                    self._receive()
                    self._look_after_seats()
                for kept in self._kept:
                    kept.result()
        finally:
            self._engine.close([seat for seat, _ in self._running.values()])
        results = tuple(self._results[call.problem] for call in self._calls)
        return FarmReport(results, time.monotonic() - self._began_s)

    # ------------------------------------------------------------------------------------------------------- sending

    def _send(self) -> None:
        for seat in list(self._free):
            task = next((task for task in self._waiting if self._fits(seat, task)), None)
            if task is None:
                continue
            self._waiting.remove(task)
            granted = self._granted()
            if granted.is_spent and not task.dry:
                self._finish(task, TaskOutcome("skipped", "the budget is spent", task.call.problem))
                continue
            self._free.remove(seat)
            self._tries[task.call.problem] += 1
            task = task._replace(budget=granted, attempt=self._tries[task.call.problem])
            try:
                future = seat.executor.submit(tune_call, task)
            except RuntimeError as error:  # it is broken, or has been shut down
                future = Future()
                future.set_exception(error)
            self._running[future] = seat, task
            self._tell()
        if not self._running and not self._vacant:
            for task in self._waiting:
                self._finish(task, TaskOutcome("failed", "no worker is left that could tune it", task.call.problem))
            self._waiting.clear()

    def _fits(self, seat: FarmWorker, task: Task) -> bool:
        """Whether a seat has the device of a call: that kind if there is one, else that platform.

        A platform that no seat is known to have (only NVIDIA's GPUs are found without a framework) is left to those
        that look after a processor: the worker says so if it has none either.
        """
        seats = [*self._free, *self._vacant, *(busy for busy, _ in self._running.values())]
        wanted = task.call.problem.device
        platform = wanted.partition(":")[0]
        if not seat.kind or any(other.kind == wanted for other in seats):
            return seat.kind in {"", wanted}
        if any(other.platform == platform for other in seats):
            return seat.platform == platform
        return seat.platform == "cpu"

    def _granted(self) -> Budget:
        """Return what one task may cost: the time that is left, and its part of the candidates that are left."""
        seconds, trials = self._budget
        if seconds is not None:
            seconds = max(seconds - (time.monotonic() - self._began_s), 0.0)
        if trials is not None:
            ran = sum(result.ran for result in self._results.values())
            granted = sum(task.budget.trials or 0 for _, task in self._running.values())
            left = max(trials - ran - granted, 0)
            trials = -(-left // (len(self._waiting) + 1))
        return Budget(seconds, trials)

    # ----------------------------------------------------------------------------------------------------- receiving

    def _receive(self) -> None:
        done, _ = wait(self._running, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
        for future in done:
            seat, task = self._running.pop(future)
            error = CancelledError() if future.cancelled() else future.exception()
            if error is None:
                self._free.append(seat)
                self._finish(task, future.result())
            else:
                self._lost(seat, task, error)
        for future, (seat, task) in list(self._running.items()):
            if self._engine.is_gone(seat):
                del self._running[future]
                future.cancel()
                self._lost(seat, task, ConnectionError(f"the worker {seat.name} is gone"))

    def _lost(self, seat: FarmWorker, task: Task, error: BaseException) -> None:
        renewed = self._engine.renewed(seat, error)
        if renewed is None:
            self._vacant[seat] = time.monotonic()
        else:
            self._free.append(renewed)
        tries = self._tries[task.call.problem]
        if tries < TRIES:
            self._waiting.insert(0, task)
            return
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._finish(task, TaskOutcome("failed", f"{said} ({tries} times)", task.call.problem, worker=seat.name))

    def _look_after_seats(self) -> None:
        for seat, since_s in list(self._vacant.items()):
            renewed = self._engine.renewed(seat, None)
            if renewed is not None:
                self._free.append(renewed)
            if renewed is not None or time.monotonic() - since_s > _VACANT_S:
                del self._vacant[seat]

    def _finish(self, task: Task, answer: TaskOutcome) -> None:
        problem = task.call.problem
        if answer.record:  # also if it was known: the parent of another run may have died before it kept it
            self._kept.append(self._bookkeeper.submit(_keep, self._store, answer.record))
        detail = answer.detail
        if answer.status == "tuned" and answer.problem.device != problem.device:
            detail = f"{detail}, on {answer.problem.device}"
        latest = FarmResult(
            problem,
            answer.status,
            detail,
            answer.problem,
            answer.worker,
            answer.ran,
            answer.seconds,
            self._tries[problem],
        )
        self._results[problem] = latest
        self._tell(latest)

    def _tell(self, latest: FarmResult | None = None) -> None:
        if self._on_step is None:
            return
        running = {seat.name: task.call.problem for seat, task in self._running.values()}
        elapsed_s = time.monotonic() - self._began_s
        self._on_step(FarmStep(len(self._results), len(self._calls), elapsed_s, running, latest))


def _keep(store: Store, data: bytes) -> None:
    try:
        merge_into(store, [Record.from_bytes(data)])
    except StoreError as error:
        warn_once(error.kind, error.path, f"a result was not merged: {error}")
