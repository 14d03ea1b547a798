"""The workers of a Dask cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebook._base.errors import Unsupported, require
from tunebook.fleet._farm.workers import Cluster, FarmWorker, find_workers

if TYPE_CHECKING:
    from concurrent.futures import Executor


class DaskCluster(Cluster):
    """An existing cluster, one executor per worker."""

    def __init__(self, address: str, at_once: int = 1) -> None:
        self._client = _connect(address)
        self._at_once = at_once
        self._workers: list[FarmWorker] = []

    def workers(self) -> list[FarmWorker]:
        self._workers = find_workers({address: self._executor(address) for address in self._alive()}, self._at_once)
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
        fresh = {address: self._executor(address) for address in alive - {other.name for other in others}}
        found = find_workers(fresh, self._at_once, others) if fresh else []
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

    def _executor(self, address: str) -> Executor:
        # Not pure: the same task sent again must run again, and not return the first result.
        executor: Executor = self._client.get_executor(workers=[address], allow_other_workers=False, pure=False)
        return executor


def _connect(address: str) -> Any:
    distributed = require("distributed", extra="dask", feature="over='dask://...'")
    try:
        return distributed.Client(address if "://" in address else f"tcp://{address}", set_as_default=False)
    except OSError as error:
        raise Unsupported(f"cannot reach a Dask scheduler at {address}: {error}") from error
