"""Dask's workers as seats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebook._base.errors import Unsupported
from tunebook._base.optional import require
from tunebook.fleet._farm.workers import FarmWorker, seats_from

if TYPE_CHECKING:
    from concurrent.futures import Executor


class DaskEngine:
    """The workers of an existing cluster, one executor for each. `client` is a `distributed.Client`, or its address."""

    def __init__(self, client: Any, at_once: int = 1) -> None:
        self._own = isinstance(client, str)
        self._client = _connected(client) if isinstance(client, str) else client
        self._at_once = at_once
        self._seats: list[FarmWorker] = []

    def seats(self) -> list[FarmWorker]:
        self._seats = seats_from({address: self._executor(address) for address in self._living()}, self._at_once)
        if not self._seats:
            raise Unsupported(f"{self._client.scheduler.address} has no worker that answers; start some: dask worker")
        return list(self._seats)

    def is_gone(self, seat: FarmWorker) -> bool:
        # A task that is for one worker only waits for ever when that is gone, since another of its address may come.
        return seat.name not in self._living()

    def renewed(self, seat: FarmWorker, error: BaseException | None) -> FarmWorker | None:  # noqa: ARG002 - the scheduler knows
        living = self._living()
        if seat.name in living:
            return seat
        self._seats = others = [other for other in self._seats if other != seat]
        # A nanny starts a new worker under a new address.
        fresh = {address: self._executor(address) for address in living - {other.name for other in others}}
        found = seats_from(fresh, self._at_once, others) if fresh else []
        same = next((other for other in found if other.device == seat.device), None)
        if same is not None:
            self._seats.append(same)
        return same

    def close(self, busy: list[FarmWorker]) -> None:
        for seat in busy:
            seat.executor.shutdown(wait=False)
        if self._own:
            self._client.close()

    def _living(self) -> set[str]:
        return set(self._client.nthreads())

    def _executor(self, address: str) -> Executor:
        # Not pure: the same task sent again is a second try, and not the first one's result.
        executor: Executor = self._client.get_executor(workers=[address], allow_other_workers=False, pure=False)
        return executor


def _connected(address: str) -> Any:
    distributed = require("distributed", extra="dask", feature="over='dask://...'")
    try:
        return distributed.Client(address if "://" in address else f"tcp://{address}", set_as_default=False)
    except OSError as error:
        raise Unsupported(f"there is no Dask scheduler at {address}: {error}") from error
