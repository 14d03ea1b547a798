"""Workers, and the base of every kind of cluster.

The only seam is `concurrent.futures.Executor`: a cluster returns one `FarmWorker` per executor and device, and replaces
the workers that it lost. `on_dask` and `on_ray` build on this module; `clusters` is the table of all kinds.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Executor, wait
from typing import TYPE_CHECKING, Final, NamedTuple

from tunebook.fleet._farm.task import describe_worker

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# How long a worker may take to describe itself: it starts an interpreter first, perhaps on a slow mount.
ANSWER_S: Final = 60.0


class FarmWorker(NamedTuple):
    """Tunes one problem at a time on one device. `kind` is the device's; "" is unknown, and fits every problem."""

    name: str
    executor: Executor
    device: str = ""
    kind: str = ""

    @property
    def platform(self) -> str:
        """The kind of device in one word."""
        return self.kind.partition(":")[0]


class Cluster:
    """The workers of a kind. Only one thread calls it.

    A device has one worker, unless `at_once` asks for more: then one compiles while another measures, because workers
    take turns at measuring (see `_measure.device_lock`).
    """

    def workers(self) -> list[FarmWorker]:
        """Return the workers that are available now."""
        raise NotImplementedError

    def is_gone(self, worker: FarmWorker) -> bool:  # noqa: ARG002 - a default
        """Whether a busy worker is gone although its future is pending; most executors end the future themselves."""
        return False

    def replace(self, worker: FarmWorker, error: BaseException) -> FarmWorker | None:  # noqa: ARG002 - a default
        """Return the worker to use after one raised `error` or vanished; None if none is available yet."""
        return worker

    def close(self, busy: list[FarmWorker]) -> None:
        """Release all workers, and abandon the tasks of the busy ones."""
        raise NotImplementedError


def find_workers(
    executors: Mapping[str, Executor], at_once: int, others: Iterable[FarmWorker] = ()
) -> list[FarmWorker]:
    """Ask each executor for its devices, and return workers for them: at most `at_once` per device, `others` included.

    An executor that does not answer gets no worker.
    """
    futures = {name: executor.submit(describe_worker) for name, executor in executors.items()}
    wait(futures.values(), timeout=ANSWER_S)
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
