"""Compiles the candidates of recorded calls ahead of measuring: all calls at once, on all cores of this machine.

Only kernels whose `CallRecorder.finder` module has a `compile_calls` can be compiled so: Triton's. A process of its own
does it, because the process that measures has the device, and must not be forked.
"""

from __future__ import annotations

import time
from collections import defaultdict
from concurrent.futures import BrokenExecutor
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from tunebook._base.errors import TunebookError, Unsupported
from tunebook.fleet._farm.clusters import spawned_pool
from tunebook.fleet._farm.task import TaskOutcome, find_task_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tunebook._selection.recording import RecordedCall
    from tunebook.fleet._farm.task import Status, Task


class Compilation(NamedTuple):
    """The outcome of each task in order, the number of programs, and the seconds that it took."""

    outcomes: tuple[TaskOutcome, ...] = ()
    programs: int = 0
    seconds: float = 0.0


def compile_ahead(tasks: Sequence[Task], target: str | None = None, limit_s: float | None = None) -> Compilation:
    """Compile in a new process, for a target or for the device here. After `limit_s` nothing more is started."""
    began_s = time.monotonic()
    with spawned_pool(None) as pool:
        try:
            outcomes = pool.submit(compile_tasks, tasks, target, limit_s).result()
        except BrokenExecutor as error:
            raise Unsupported(f"the process that compiles was lost: {error}") from error
    return Compilation(tuple(outcomes), sum(outcome.ran for outcome in outcomes), time.monotonic() - began_s)


def compile_tasks(tasks: Sequence[Task], target: str | None, limit_s: float | None) -> list[TaskOutcome]:
    """Compile in this process. An error of a call becomes its outcome."""
    skipped = "only kernels of Triton can be compiled without a call"
    outcomes = [TaskOutcome("skipped", skipped, task.call.problem) for task in tasks]
    found: defaultdict[str, dict[int, RecordedCall]] = defaultdict(dict)
    for number, task in enumerate(tasks):
        if not task.call.finder:
            continue
        try:
            find_task_kernel(task)
            found[task.call.finder][number] = task.call.restored()
        except TunebookError as error:
            outcomes[number] = TaskOutcome("failed", str(error), task.call.problem)
    for finder, calls in found.items():
        results = import_module(finder).compile_calls(list(calls.values()), target, limit_s=limit_s)
        for number, (compiled, failed, reason) in zip(calls, results, strict=True):
            detail = f"{compiled} compiled" + (f", {failed or 'others'} failed: {reason}" if reason else "")
            status: Status = "compiled" if compiled else "failed"
            outcomes[number] = TaskOutcome(status, detail, tasks[number].call.problem, ran=compiled)
    return outcomes
