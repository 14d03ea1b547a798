"""Workers, and the kinds of clusters that `over=` can name: processes, Dask, Ray, MPI, and any executor of the user's.

The only seam is `concurrent.futures.Executor`: a cluster returns one `FarmWorker` per executor and device, and replaces
the workers that it lost. Dask, Ray and MPI are imported when they are named.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._base.environment_variables import show_gpu, visible_gpus
from tunebook._base.errors import DefinitionError, TunebookWarning, Unsupported, require
from tunebook._tuning.job_run import forget_all, forget_notes_of
from tunebook.fleet._farm.task import describe_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from multiprocessing.process import BaseProcess

# How long a worker may take to describe itself: it starts an interpreter first, perhaps on a slow mount.
_ANSWER_S: Final = 60.0
# How long a worker that is to end may take to write down what it has measured, before it is killed.
_FAREWELL_S: Final = 2.0
_usual_format: Final = warnings.formatwarning


class FarmWorker(NamedTuple):
    """Tunes one problem at a time on one device. `kind` is the device's; "" is unknown, and fits every problem."""

    name: str
    executor: Executor
    device: str = ""
    kind: str = ""


class Cluster(ABC):
    """The workers of a kind. Only one thread calls it.

    A device has one worker, unless `at_once` asks for more: then one compiles while another measures, because workers
    take turns at measuring (see `_measure.device_lock`).
    """

    @abstractmethod
    def workers(self) -> list[FarmWorker]:
        """Return the workers that are available now."""

    def is_gone(self, worker: FarmWorker) -> bool:  # noqa: ARG002 - a default
        """Whether a busy worker is gone although its future is pending; most executors end the future themselves."""
        return False

    def replace(self, worker: FarmWorker, error: BaseException) -> FarmWorker | None:  # noqa: ARG002 - a default
        """Return the worker to use after one raised `error` or vanished; None if none is available yet."""
        return worker

    @abstractmethod
    def close(self, busy: list[FarmWorker]) -> None:
        """Release all workers, and abandon the tasks of the busy ones."""


def find_workers(
    executors: Mapping[str, Executor], at_once: int, others: Iterable[FarmWorker] = ()
) -> list[FarmWorker]:
    """Ask executors for their devices, and return workers for them: at most `at_once` per device, `others` included."""
    futures = {name: executor.submit(describe_worker) for name, executor in executors.items()}
    wait(futures.values(), timeout=_ANSWER_S)
    # An executor that does not answer gets no worker.
    answers = {name: f.result() for name, f in futures.items() if f.done() and not f.cancelled() and not f.exception()}
    taken, found = Counter(worker.device for worker in others), []
    # Executors with the fewest devices come first, so that a host's processor goes to a process without a GPU.
    for name, (host, devices) in sorted(answers.items(), key=lambda item: len(item[1][1])):
        for kind, physical in devices:
            device = f"{host} {physical}"
            if taken[device] < at_once:
                taken[device] += 1
                found.append(FarmWorker(name, executors[name], device, kind))
    return found


class LocalProcesses(Cluster):
    """Processes for each GPU, and for the processor."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        gpus = gpus_here()
        # The process for the processor must not see a GPU of another process: jax would take most of its memory.
        devices: list[str | None] = [*gpus, "" if gpus else None]
        self._gpus = {f"process {n}": gpu for n, gpu in enumerate(devices * at_once)}
        self._pools: dict[str, ProcessPoolExecutor] = {}

    def workers(self) -> list[FarmWorker]:
        self._pools = {name: spawned_pool(gpu) for name, gpu in self._gpus.items()}
        workers = find_workers(self._pools, self._at_once)
        if not workers:
            raise Unsupported("no worker process could be started; a script needs `if __name__ == '__main__':`")
        return workers

    def replace(self, worker: FarmWorker, error: BaseException) -> FarmWorker | None:
        if not isinstance(error, BrokenExecutor):
            return worker
        worker.executor.shutdown(wait=False)
        self._pools[worker.name] = spawned_pool(self._gpus[worker.name])
        return worker._replace(executor=self._pools[worker.name])

    def close(self, busy: list[FarmWorker]) -> None:
        names = {worker.name for worker in busy}
        working: list[BaseProcess] = []
        for name, pool in self._pools.items():
            if name in names:
                working += (pool._processes or {}).values()  # noqa: SLF001 - public only since Python 3.14
            pool.shutdown(wait=False, cancel_futures=True)
        for process in working:
            process.terminate()  # see `_end_task`
        end_s = time.monotonic() + _FAREWELL_S
        try:
            for process in working:
                connection.wait([process.sentinel], max(end_s - time.monotonic(), 0.0))
        finally:  # also at a second Ctrl-C
            for process in working:
                process.kill()
                connection.wait([process.sentinel], _FAREWELL_S)
            forget_notes_of({process.pid for process in working if process.pid is not None})


def gpus_here(proc: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = visible_gpus()
    if visible is not None:
        return visible
    try:
        return [str(number) for number in range(len(list(proc.iterdir())))]
    except OSError:
        return []


def spawned_pool(gpu: str | None) -> ProcessPoolExecutor:
    """Return a pool of one process that sees a GPU, "" for none, or None for the GPUs that this process sees."""
    # Spawned: a fork of a process with threads would inherit their locks, and its CUDA context would not work.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=_start_worker, initargs=(gpu,))


def _start_worker(gpu: str | None) -> None:
    if gpu is not None:
        show_gpu(gpu)
    os.dup2(2, 1)  # the parent's stdout may be JSON: output of kernels goes to stderr
    warnings.formatwarning = _format_warning
    # Ctrl-C in the terminal is for the parent, which ends its workers by itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_task)
    threading.Thread(target=_end_with_parent, name="tunebook-parent", daemon=True).start()


class _Ended(KeyboardInterrupt, SystemExit):
    """Ends a tuning as Ctrl-C does, which keeps its measurements, and a worker without a task silently."""


def _end_task(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: a second one would disturb the writing of measurements
    raise _Ended


def _format_warning(message: Warning | str, category: type[Warning], *place: Any, **line: Any) -> str:
    """Return a warning of ours without a line: above a tuning in a worker there is no program's."""
    ours = issubclass(category, TunebookWarning)
    return f"tunebook: {message}\n" if ours else _usual_format(message, category, *place, **line)


def _end_with_parent() -> None:
    """End this worker when its parent ends, as the parent itself does in `LocalProcesses.close`."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_FAREWELL_S)
        forget_all()
        os._exit(1)


def exit_with_parent() -> None:
    """End this process when its parent ends: a pool's worker would wait for the next task for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class DaskCluster(Cluster):
    """The workers of an existing cluster, one executor each."""

    def __init__(self, address: str, at_once: int = 1) -> None:
        distributed = require("distributed", extra="dask", feature="over='dask://...'")
        url = address if "://" in address else f"tcp://{address}"
        try:
            self._client: Any = distributed.Client(url, set_as_default=False)
        except OSError as error:
            raise Unsupported(f"cannot reach a Dask scheduler at {address}: {error}") from error
        self._at_once = at_once
        self._workers: list[FarmWorker] = []

    def workers(self) -> list[FarmWorker]:
        self._workers = self._find(self._alive())
        if not self._workers:
            raise Unsupported(f"{self._client.scheduler.address} has no worker that answers; start some: dask worker")
        return list(self._workers)

    def is_gone(self, worker: FarmWorker) -> bool:
        # A task that is bound to one worker waits for ever when that worker is gone: its address may come back.
        return worker.name not in self._alive()

    def replace(self, worker: FarmWorker, error: BaseException) -> FarmWorker | None:  # noqa: ARG002 - the scheduler knows
        alive = self._alive()
        if worker.name in alive:
            return worker
        self._workers = others = [other for other in self._workers if other != worker]
        # A nanny starts a new worker under a new address.
        found = self._find(alive - {other.name for other in others}, others)
        same = next((other for other in found if other.device == worker.device), None)
        if same is not None:
            self._workers.append(same)
        return same

    def close(self, busy: list[FarmWorker]) -> None:
        for worker in busy:
            worker.executor.shutdown(wait=False)
        self._client.close()

    def _alive(self) -> set[str]:
        return set(self._client.nthreads())

    def _find(self, addresses: set[str], others: Iterable[FarmWorker] = ()) -> list[FarmWorker]:
        # Not pure: the same task sent again must run again, and not return the first result.
        options = {"allow_other_workers": False, "pure": False}
        executors = {each: self._client.get_executor(workers=[each], **options) for each in addresses}
        return find_workers(executors, self._at_once, others)


class RayCluster(Cluster):
    """Actors on the cluster at "auto" or host:port: one for each GPU, and one on each node for its processor."""

    def __init__(self, address: str, at_once: int = 1) -> None:
        self._at_once = at_once
        self._ray: Any = require("ray", extra="ray", feature="over='ray://...'")
        require("ray.util.scheduling_strategies", extra="ray", feature="over='ray://...'")
        try:
            self._ray.init(address if address == "auto" else f"ray://{address}", log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:  # the last if only half of Ray is installed
            raise Unsupported(f"cannot reach a Ray cluster at {address}: {error}") from error
        self._placements: dict[str, tuple[float, str | None]] = {}  # GPUs and node of each actor

    def workers(self) -> list[FarmWorker]:
        gpus = int(self._ray.cluster_resources().get("GPU", 0))
        nodes = [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]
        self._placements = {f"gpu actor {n}": (1 / self._at_once, None) for n in range(gpus * self._at_once)}
        for n in range(self._at_once):
            self._placements |= {f"cpu actor {n} on {node[:8]}": (0.0, node) for node in nodes}
        actors = {name: ActorExecutor(self._ray, *placement) for name, placement in self._placements.items()}
        workers = find_workers(actors, self._at_once)
        for name in actors.keys() - {worker.name for worker in workers}:
            actors[name].shutdown()
        if not workers:
            raise Unsupported("no Ray actor answers: the cluster has no free GPU or processor")
        return workers

    def replace(self, worker: FarmWorker, error: BaseException) -> FarmWorker | None:
        if not isinstance(error, self._ray.exceptions.RayActorError):
            return worker
        actor = ActorExecutor(self._ray, *self._placements[worker.name])
        found = find_workers({worker.name: actor}, 1)
        same = next((other for other in found if other.device == worker.device), None)
        if same is None:
            actor.shutdown()
        return same

    def close(self, busy: list[FarmWorker]) -> None:  # noqa: ARG002 - all end alike
        # The actors of this program end with its connection, the busy ones too.
        self._ray.shutdown()


class ActorExecutor(Executor):
    """One actor as an executor."""

    def __init__(self, ray: Any, gpus: float, node: str | None) -> None:
        options: dict[str, Any] = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0}
        if node is not None:
            affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            options["scheduling_strategy"] = affinity(node, soft=False)
        self._ray = ray
        self._actor = ray.remote(_RayActor).options(**options).remote()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function in the actor."""
        future: Future[Any] = self._actor.call.remote(fn, args, kwargs).future()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - Executor's
        """End the actor."""
        self._ray.kill(self._actor)


class _RayActor:
    """Runs in the actor's process."""

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)


class GivenExecutor(Cluster):
    """An executor, which decides itself where a problem runs: it gets `at_once` problems at a time."""

    def __init__(self, executor: Executor, at_once: int, *, close: bool = False) -> None:
        self._executor, self._at_once, self._close = executor, at_once, close

    def workers(self) -> list[FarmWorker]:
        return [FarmWorker(f"place {n}", self._executor) for n in range(self._at_once)]

    def close(self, busy: list[FarmWorker]) -> None:
        if self._close:
            self._executor.shutdown(wait=not busy, cancel_futures=True)


def open_cluster(over: Executor | str | None, at_once: int) -> Cluster:
    """Return the cluster that a user names; None is this machine."""
    if at_once < 1:
        raise DefinitionError(f"at_once={at_once!r}: a device needs at least 1 problem at a time")
    if isinstance(over, Executor):
        return GivenExecutor(over, at_once)
    name, _, address = (over or "local").partition("://")
    match name:
        case "local":
            return LocalProcesses(at_once)
        case "mpi":
            executor = require("mpi4py.futures", extra="mpi", feature="over='mpi'").MPIPoolExecutor()
            executor.bootup()
            if not executor.num_workers:
                raise Unsupported("MPI has no worker; run: mpiexec -n 5 python -m mpi4py.futures -m tunebook tune ...")
            return GivenExecutor(executor, executor.num_workers, close=True)
        case "dask" if address:
            return DaskCluster(address, at_once)
        case "ray" if address:
            return RayCluster(address, at_once)
    raise DefinitionError(
        f"unknown cluster over={over!r}; use 'local', 'dask://host:port', 'ray://auto', 'ray://host:port', 'mpi', "
        "or an Executor of concurrent.futures"
    )
