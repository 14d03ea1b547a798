"""Where problems are tuned: seats, each with a worker and a device.

The one seam is `concurrent.futures.Executor`. An engine makes seats from the workers that it has, and new ones for
those that it lost: processes of this machine here, Dask and Ray in files of their own. A device has one seat, unless
more are asked for: then one compiles while the other measures, since workers take turns at that (see `_device_lock`).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from tunebook._base.environment_variables import show_gpu, visible_gpus
from tunebook._base.errors import DefinitionError, Unsupported
from tunebook._base.optional import require
from tunebook.fleet._farm.task import look_around

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# How long a worker may take to say what it has: it starts an interpreter first, perhaps on a slow mount.
ANSWER_S: Final = 60.0


class FarmWorker(NamedTuple):
    """One problem at a time is tuned here. `kind` is the device's; "" where it is not known, which fits everything."""

    name: str
    executor: Executor
    device: str = ""
    kind: str = ""

    @property
    def platform(self) -> str:
        """The kind of device in one word."""
        return self.kind.partition(":")[0]


class Engine(Protocol):
    """Workers of one kind. Called by one thread."""

    def seats(self) -> list[FarmWorker]:
        """Return the seats that there are now."""

    def is_gone(self, seat: FarmWorker) -> bool:
        """Whether the worker of a seat is known to be gone, while its future waits."""

    def renewed(self, seat: FarmWorker, error: BaseException | None) -> FarmWorker | None:
        """Return the seat to go on with after its worker raised or was lost; None if there is none for now."""

    def close(self, busy: list[FarmWorker]) -> None:
        """Let go of the workers; those in `busy` are still at work, which is not wanted any more."""


def seats_from(workers: Mapping[str, Executor], at_once: int, others: Iterable[FarmWorker] = ()) -> list[FarmWorker]:
    """Ask workers what they have, and return seats; `others` have some of the devices already.

    A device gets at most `at_once`, from different workers. Who does not answer gets none.
    """
    futures = {name: executor.submit(look_around) for name, executor in workers.items()}
    wait(futures.values(), timeout=ANSWER_S)
    answers = {name: f.result() for name, f in futures.items() if f.done() and not f.cancelled() and not f.exception()}
    taken, found = Counter(seat.device for seat in others), []
    # Who has the fewest devices first, so that a host's processor goes to a worker that has no GPU to look after.
    for name, facts in sorted(answers.items(), key=lambda item: len(item[1].devices)):
        for kind, physical in facts.devices:
            device = f"{facts.host} {physical}"
            if taken[device] < at_once:
                taken[device] += 1
                found.append(FarmWorker(name, workers[name], device, kind))
    return found


# ------------------------------------------------------------------------------------------------ processes, right here


class LocalEngine:
    """Processes for each GPU, and for the processor."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        gpus = gpus_here()
        # Who looks after the processor is not to see a GPU that another has: jax would take most of its memory.
        devices: list[str | None] = [*gpus, "" if gpus else None]
        self._shown = {f"process {n}": gpu for n, gpu in enumerate(devices * at_once)}
        self._pools: dict[str, ProcessPoolExecutor] = {}

    def seats(self) -> list[FarmWorker]:
        self._pools = {name: _pool(gpu) for name, gpu in self._shown.items()}
        seats = seats_from(self._pools, self._at_once)
        if not seats:
            raise Unsupported("no worker process could be started; a script needs `if __name__ == '__main__':`")
        return seats

    def is_gone(self, seat: FarmWorker) -> bool:  # noqa: ARG002 - as it says
        """Return False: a pool tells by itself."""
        return False

    def renewed(self, seat: FarmWorker, error: BaseException | None) -> FarmWorker | None:
        if not isinstance(error, BrokenExecutor):
            return seat
        seat.executor.shutdown(wait=False)
        self._pools[seat.name] = _pool(self._shown[seat.name])
        return seat._replace(executor=self._pools[seat.name])

    def close(self, busy: list[FarmWorker]) -> None:
        working = {seat.name for seat in busy}
        for name, pool in self._pools.items():
            processes = list((pool._processes or {}).values())  # noqa: SLF001 - public only since Python 3.14
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes if name in working else ():
                process.kill()


def gpus_here(proc: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    told = visible_gpus()
    if told is not None:
        return told
    try:
        return [str(number) for number in range(len(list(proc.iterdir())))]
    except OSError:
        return []


def _pool(gpu: str | None) -> ProcessPoolExecutor:
    # Spawned: a fork of a process with threads in it would have their locks, and its CUDA context would not work.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(gpu,))


def _begin(gpu: str | None) -> None:
    if gpu is not None:
        show_gpu(gpu)
    os.dup2(2, 1)  # what kernels print must not get into what the parent prints, which may be JSON
    # Ctrl-C in the terminal is for the parent, which ends its workers by itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, name="tunebook-parent", daemon=True).start()


def _leave_with_parent() -> None:
    """End this process when its parent has: a pool's worker would wait for the next task for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


# --------------------------------------------------------------------------------------------------- any other executor


class GivenEngine:
    """An executor that cannot be asked what it has: `at_once` problems are sent to it at a time.

    Which worker gets one is the executor's affair. Two on one device wait for each other's turn there.
    """

    def __init__(self, executor: Executor, at_once: int, *, close: bool = False) -> None:
        self._executor, self._at_once, self._close = executor, at_once, close

    def seats(self) -> list[FarmWorker]:
        return [FarmWorker(f"place {n}", self._executor) for n in range(self._at_once)]

    def is_gone(self, seat: FarmWorker) -> bool:  # noqa: ARG002 - as it says
        """Return False: nobody can tell."""
        return False

    def renewed(self, seat: FarmWorker, error: BaseException | None) -> FarmWorker | None:  # noqa: ARG002 - as it says
        """Return the same seat: if the executor is broken, it says so again."""
        return seat

    def close(self, busy: list[FarmWorker]) -> None:
        if self._close:
            self._executor.shutdown(wait=not busy, cancel_futures=True)


def engine_for(over: Executor | str | None, at_once: int) -> Engine:
    """Return the engine that a user means."""
    if at_once < 1:
        raise DefinitionError(f"at_once={at_once!r}: a device needs at least 1 problem at a time")
    if isinstance(over, Executor):
        return GivenEngine(over, at_once)
    scheme, _, address = (over or "local").partition("://")
    if scheme == "local":
        return LocalEngine(at_once)
    if scheme == "dask" and address:
        from tunebook.fleet._farm.on_dask import DaskEngine  # noqa: PLC0415 - who does not use it need not have it

        return DaskEngine(address, at_once)
    if scheme == "ray" and address:
        from tunebook.fleet._farm.on_ray import RayEngine  # noqa: PLC0415 - as above

        return RayEngine(address, at_once)
    if scheme == "mpi":
        return _mpi_engine()
    raise DefinitionError(
        f"over={over!r} is no place to tune at; use 'local', 'dask://host:port', 'ray://auto', 'ray://host:port', "
        "'mpi', or an Executor of concurrent.futures"
    )


def _mpi_engine() -> Engine:
    executor = require("mpi4py.futures", extra="mpi", feature="over='mpi'").MPIPoolExecutor()
    executor.bootup()
    if not executor.num_workers:
        raise Unsupported("there is no MPI worker; run: mpiexec -n 5 python -m mpi4py.futures -m tunebook tune ...")
    return GivenEngine(executor, executor.num_workers, close=True)
