"""Processes of this machine as workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from pathlib import Path

from tunebook._base.environment_variables import show_gpu, visible_gpus
from tunebook._base.errors import Unsupported
from tunebook.fleet._farm.workers import Cluster, FarmWorker, find_workers


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
        self._pools = {name: _pool(gpu) for name, gpu in self._gpus.items()}
        workers = find_workers(self._pools, self._at_once)
        if not workers:
            raise Unsupported("no worker process could be started; a script needs `if __name__ == '__main__':`")
        return workers

    def replace(self, worker: FarmWorker, error: BaseException) -> FarmWorker | None:
        if not isinstance(error, BrokenExecutor):
            return worker
        worker.executor.shutdown(wait=False)
        self._pools[worker.name] = _pool(self._gpus[worker.name])
        return worker._replace(executor=self._pools[worker.name])

    def close(self, busy: list[FarmWorker]) -> None:
        working = {worker.name for worker in busy}
        for name, pool in self._pools.items():
            processes = list((pool._processes or {}).values())  # noqa: SLF001 - public only since Python 3.14
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes if name in working else ():
                process.kill()


def gpus_here(proc: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = visible_gpus()
    if visible is not None:
        return visible
    try:
        return [str(number) for number in range(len(list(proc.iterdir())))]
    except OSError:
        return []


def _pool(gpu: str | None) -> ProcessPoolExecutor:
    # Spawned: a fork of a process with threads would inherit their locks, and its CUDA context would not work.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=_start_worker, initargs=(gpu,))


def _start_worker(gpu: str | None) -> None:
    if gpu is not None:
        show_gpu(gpu)
    os.dup2(2, 1)  # the parent's stdout may be JSON: output of kernels goes to stderr
    # Ctrl-C in the terminal is for the parent, which ends its workers by itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, name="tunebook-parent", daemon=True).start()


def _exit_with_parent() -> None:
    """End this process when its parent ends: a pool's worker would wait for the next task for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
