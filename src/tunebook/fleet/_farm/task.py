"""The work of a worker: tune one recorded call, and return its record as bytes.

Only plain values travel, and the call as the text of a recording's file: the sender need not be able to import the
kernel. The worker tunes with the kernel's own selector, into its own book. That makes runs resumable: a result is kept
even if the sender is gone.
"""

from __future__ import annotations

import os
import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from tunebook._api.executor import Executor
from tunebook._api.tunable import tune_recorded
from tunebook._arrays.device_fingerprint import host_cpu
from tunebook._base.errors import TunebookError, Unsupported
from tunebook._base.record_format import Record
from tunebook._measure.device_lock import cuda_names, physical_name
from tunebook._memo.answer_memo import ConfigCache
from tunebook._selection.persistent_cache import PersistentCache
from tunebook._selection.recording import SavedCall, live_kernel, problem_here
from tunebook._selection.selector import ConfigSelectorChain
from tunebook._tuning.job import Budget
from tunebook._tuning.tuner import Tuner
from tunebook.formats._bundle import merge_into
from tunebook.stores._files import this_process

if TYPE_CHECKING:
    from tunebook._base.vocabulary import Problem
    from tunebook._kernel.kernel import Kernel

Status: TypeAlias = Literal["tuned", "known", "new", "compiled", "failed", "skipped"]


class Task(NamedTuple):
    """One call to tune. `records` are the sender's records of it; kernels without a book of their own write to `book`.

    The worker imports `modules` first. A `dry` task only finds out whether the call needs tuning. `attempt` makes a
    second try another task: Dask returns the old result of a task that it has seen. `local`: the worker is a process of
    the sender's machine, with its directory and path. `again`: a known call is tuned too, and from scratch.
    """

    call: SavedCall
    modules: tuple[str, ...] = ()
    records: tuple[bytes, ...] = ()
    budget: Budget = Budget()
    book: str | None = None
    dry: bool = False
    attempt: int = 1
    local: bool = False
    again: bool = False


class TaskOutcome(NamedTuple):
    """The result of a task. `problem` is the call's problem on the worker, whose device may be of another kind.

    `complete` is False if the budget ended the tuning.
    """

    status: Status
    detail: str
    problem: Problem
    worker: str = ""
    ran: int = 0
    seconds: float = 0.0
    record: bytes = b""
    complete: bool = True


def describe_worker() -> tuple[str, list[tuple[str, str]]]:
    """Return this worker's host, and the devices that it measures on by default as (kind, physical device)."""
    # Of several GPUs only the first counts, because frameworks put arrays there.
    gpus = [(f"gpu:{' '.join(name.split())}", physical_name("gpu", 0)) for name in cuda_names()[:1]]
    return f"{os.uname().nodename} {this_process().host}", [*gpus, (host_cpu(), "cpu")]


def tune_call(task: Task) -> TaskOutcome:
    """Tune a call here, unless it is known. An error of the call itself becomes a "failed" outcome."""
    began_s = time.monotonic()
    try:
        outcome = _tune(task)
    except TunebookError as error:
        outcome = TaskOutcome("failed", str(error), task.call.problem)
    worker = f"{os.uname().nodename}:{os.getpid()}"
    return outcome._replace(seconds=time.monotonic() - began_s, worker=worker)


def _tune(task: Task) -> TaskOutcome:
    kernel = find_task_kernel(task)
    call = task.call.restored()
    selector = _find_selector(kernel, task)
    if selector.persistent is None:
        return TaskOutcome("skipped", "it keeps nothing (store=False), so it would be lost", call.problem)
    problem = problem_here(kernel, call.invocation(kernel))
    recorded, found = (each.device.partition(":")[0] for each in (call.problem, problem))
    if recorded != found:
        return TaskOutcome("skipped", f"recorded on a {recorded}, but this worker has a {found} for it", problem)
    store = selector.persistent.store
    merge_into(store, map(Record.from_bytes, task.records))
    if store.get(problem) is None:
        selector.cache.clear()  # a long-lived worker may have the answer in memory only, and must write it down
    outcome = tune_recorded(call, selector, Budget(trials=0) if task.dry else task.budget, again=task.again)
    if task.dry and outcome.status == "skipped":
        return TaskOutcome("new", "", problem)
    record = store.get(problem)
    if outcome.status == "tuned" and record is None:
        return TaskOutcome("failed", f"tuned, but {store.where} did not keep it", problem)
    ran = 0 if outcome.tuned is None else outcome.tuned.ran
    data = b"" if record is None else record.to_bytes()
    complete = outcome.tuned is None or outcome.tuned.complete
    return TaskOutcome(outcome.status, outcome.detail, problem, ran=ran, record=data, complete=complete)


def find_task_kernel(task: Task) -> Kernel[Any, Any]:
    """Import the modules of a task, and return its kernel."""
    op, module, finder = task.call.problem.op, task.call.module, task.call.finder
    for name in task.modules:
        _import(name, op, local=task.local)
    kernel = live_kernel(op, module, finder)
    if kernel is None and module != "__main__":
        _import(module, op, local=task.local)
        kernel = live_kernel(op, module, finder)
    if kernel is not None:
        return kernel
    if module == "__main__":
        name = op.partition(".")[0]
        raise Unsupported(
            f"{op} was recorded in a script. If importing the script does not run it (its work is below "
            f"`if __name__ == '__main__':`), name its module, as in --import {name}."
        )
    raise Unsupported(f"{module} does not define {op}: was it renamed, or given another version, after the recording?")


def _import(module: str, op: str, *, local: bool) -> None:
    try:
        import_module(module)
    except ImportError as error:
        if not local:
            raise Unsupported(
                f"{op} needs the module {module}, which cannot be imported on the worker: {error}. Install it where "
                "workers run, or name another with --import."
            ) from error
        top = module.partition(".")[0]
        remedy = f"Install {error.name}" if error.name else "Fix the module"
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            place = f"{top}.py" if top == module else f"the package {top}"
            remedy = f"Run the command in the directory of {place}, or set PYTHONPATH to it"
        raise Unsupported(
            f"the module {module} cannot be imported: {error}. {remedy}, or name another module with --import."
        ) from error


def _find_selector(kernel: Kernel[Any, Any], task: Task) -> ConfigSelectorChain[Any]:
    """Return the kernel's own selector, else the only selector in its module, else one for the task's book."""
    own: ConfigSelectorChain[Any] | None = getattr(kernel, "selector", None)
    if own is not None:
        return own
    defined = vars(sys.modules[kernel.module]).values()
    choosers = [thing.chooser if isinstance(thing, Executor) else thing for thing in defined]
    chains = {id(chain): chain for chain in choosers if isinstance(chain, ConfigSelectorChain)}
    if len(chains) == 1:
        return next(iter(chains.values()))
    return ConfigSelectorChain(ConfigCache(), None, Tuner(), PersistentCache(kernel.op_id, task.book))
