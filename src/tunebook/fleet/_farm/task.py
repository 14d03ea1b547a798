"""What runs on a worker: one recorded call is tuned there, and its record comes back as bytes.

Only plain values travel, and the call as the text that a recording's file holds: who sends it need not be able to
import the kernel, and who tunes it does so with the kernel's own selector, into the worker's own book. That is what
makes it resumable: the worker's result is kept even if nobody is left to send it to.
"""

from __future__ import annotations

import os
import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from tunebook._api.executor import Executor
from tunebook._api.function_kernel import FunctionKernel
from tunebook._api.tunable import tune_recorded
from tunebook._arrays.device_fingerprint import host_cpu
from tunebook._base.errors import TunebookError, Unsupported
from tunebook._base.record_format import Record
from tunebook._measure.device_lock import cuda_names, physical_name
from tunebook._memo.answer_memo import ConfigCache
from tunebook._selection.persistent_cache import PersistentCache
from tunebook._selection.recording import SavedCall, live_kernel, problem_here
from tunebook._selection.selector import ConfigSelectorChain
from tunebook._selection.single_flight import this_process
from tunebook._tuning.job import Budget
from tunebook._tuning.tuner import Tuner
from tunebook.formats._bundle import merge_into

if TYPE_CHECKING:
    from tunebook._base.vocabulary import Problem
    from tunebook._kernel.kernel import Kernel

Status: TypeAlias = Literal["tuned", "known", "new", "failed", "skipped"]

_SCRIPT: Final = "__main__"


class WorkerFacts(NamedTuple):
    """What a worker has: where it is, and its devices as (kind, physical device), those that it measures on by default.

    A GPU is the first that it sees, since that is where frameworks put arrays.
    """

    host: str
    name: str
    pid: int
    devices: tuple[tuple[str, str], ...]


class Task(NamedTuple):
    """One call to tune. `records` is what the sender's book knows about it, `book` where kernels without one keep it.

    `modules` are imported first. A `dry` task only finds out whether there is anything to do. `attempt` makes a second
    try another task: Dask returns the result of one that it has had.
    """

    call: SavedCall
    modules: tuple[str, ...] = ()
    records: tuple[bytes, ...] = ()
    budget: Budget = Budget()
    book: str | None = None
    dry: bool = False
    attempt: int = 1


class TaskOutcome(NamedTuple):
    """What became of a task. `problem` is what the call is on the worker, whose device may be of another kind."""

    status: Status
    detail: str
    problem: Problem
    record: bytes = b""
    ran: int = 0
    seconds: float = 0.0
    worker: str = ""


def look_around() -> WorkerFacts:
    """Return what this worker has."""
    gpus = [(f"gpu:{' '.join(name.split())}", physical_name("gpu", 0)) for name in cuda_names()[:1]]
    process = this_process()
    node = os.uname().nodename
    return WorkerFacts(f"{node} {process.host}", node, process.pid, (*gpus, (host_cpu(), "cpu")))


def tune_call(task: Task) -> TaskOutcome:
    """Tune a call here, unless it is known. What goes wrong with the call itself is an answer and not an error."""
    began_s = time.monotonic()
    try:
        answer = _tuned(task)
    except TunebookError as error:
        answer = TaskOutcome("failed", str(error), task.call.problem)
    worker = f"{os.uname().nodename}:{os.getpid()}"
    return answer._replace(seconds=time.monotonic() - began_s, worker=worker)


def _tuned(task: Task) -> TaskOutcome:
    kernel = _kernel_of(task)
    call = task.call.restored()
    selector = _selector_of(kernel, task)
    if selector.persistent is None:
        return TaskOutcome("skipped", "it keeps nothing (store=False), so it would be lost", call.problem)
    problem = problem_here(kernel, call.invocation(kernel))
    wanted, found = _platform(call.problem), _platform(problem)
    if wanted != found:
        return TaskOutcome("skipped", f"recorded on a {wanted}, but this worker has a {found} for it", problem)
    store = selector.persistent.store
    merge_into(store, map(Record.from_bytes, task.records))
    if store.get(problem) is None:
        selector.cache.clear()  # what only the memory of a long-lived worker knows is not written down, and must be
    outcome = tune_recorded(call, selector, Budget(trials=0) if task.dry else task.budget)
    if task.dry and outcome.status == "skipped":
        return TaskOutcome("new", "", problem)
    record = store.get(problem)
    kept = b"" if record is None else record.to_bytes()
    if outcome.status == "tuned" and not kept:
        return TaskOutcome("failed", f"tuned, but {store.where} did not keep it", problem)
    ran = 0 if outcome.tuned is None else outcome.tuned.ran
    return TaskOutcome(outcome.status, outcome.detail, problem, kept, ran)


def _platform(problem: Problem) -> str:
    return problem.device.partition(":")[0]


def _kernel_of(task: Task) -> Kernel[Any, Any]:
    op, module = task.call.problem.op, task.call.module
    for name in task.modules:
        _import(name, op)
    kernel = live_kernel(op, module)
    if kernel is None and module != _SCRIPT:
        _import(module, op)
        kernel = live_kernel(op, module)
    if kernel is not None:
        return kernel
    if module == _SCRIPT:
        name = op.partition(".")[0]
        raise Unsupported(
            f"{op} was recorded in a script. If importing that does not run it (its work is below "
            f"`if __name__ == '__main__':`), name it, as in --import {name}."
        )
    raise Unsupported(f"{module} defines no {op}: was it renamed, or given another version, since it was recorded?")


def _import(module: str, op: str) -> None:
    try:
        import_module(module)
    except ImportError as error:
        said = f"{op} needs the module {module}, which cannot be imported on the worker: {error}"
        raise Unsupported(f"{said}. Install it where workers run, or name another with --import.") from error


def _selector_of(kernel: Kernel[Any, Any], task: Task) -> ConfigSelectorChain[Any]:
    """Return the kernel's own selector, else the one that its module runs kernels with, else one for the given book."""
    if isinstance(kernel, FunctionKernel):
        return kernel.selector
    defined = vars(sys.modules[kernel.module]).values()
    choosers = [thing.chooser if isinstance(thing, Executor) else thing for thing in defined]
    chains = {id(chain): chain for chain in choosers if isinstance(chain, ConfigSelectorChain)}
    if len(chains) == 1:
        return next(iter(chains.values()))
    return ConfigSelectorChain(ConfigCache(), None, Tuner(), PersistentCache(kernel.op_id, task.book))
