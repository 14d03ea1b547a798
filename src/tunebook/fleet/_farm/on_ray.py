"""Ray actors as workers: one for each GPU, and one on each node for its processor."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, NamedTuple

from tunebook._base.errors import Unsupported, require
from tunebook.fleet._farm.workers import Cluster, FarmWorker, find_workers

if TYPE_CHECKING:
    from collections.abc import Callable


class _RayPlacement(NamedTuple):
    """The resources that an actor requests from Ray."""

    gpus: float
    node: str | None = None


class RayCluster(Cluster):
    """Actors on an existing cluster: `address` is "auto", or host and port of its client server."""

    def __init__(self, address: str, at_once: int = 1) -> None:
        self._at_once = at_once
        self._ray = _connect(address)
        self._placements: dict[str, _RayPlacement] = {}

    def workers(self) -> list[FarmWorker]:
        gpus = int(self._ray.cluster_resources().get("GPU", 0))
        nodes = [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]
        self._placements = {f"gpu actor {n}": _RayPlacement(1 / self._at_once) for n in range(gpus * self._at_once)}
        for n in range(self._at_once):
            self._placements |= {f"cpu actor {n} on {node[:8]}": _RayPlacement(0.0, node) for node in nodes}
        actors = {name: ActorExecutor(self._ray, placement) for name, placement in self._placements.items()}
        workers = find_workers(actors, self._at_once)
        for name in actors.keys() - {worker.name for worker in workers}:
            actors[name].shutdown()
        if not workers:
            raise Unsupported("no Ray actor answers: the cluster has no free GPU or processor")
        return workers

    def replace(self, worker: FarmWorker, error: BaseException) -> FarmWorker | None:
        if not isinstance(error, self._ray.exceptions.RayActorError):
            return worker
        actor = ActorExecutor(self._ray, self._placements[worker.name])
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

    def __init__(self, ray: Any, placement: _RayPlacement) -> None:
        options: dict[str, Any] = {"num_cpus": 1, "num_gpus": placement.gpus, "max_restarts": 0}
        if placement.node is not None:
            affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            options["scheduling_strategy"] = affinity(placement.node, soft=False)
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


def _connect(address: str) -> Any:
    ray = require("ray", extra="ray", feature="over='ray://...'")
    require("ray.util.scheduling_strategies", extra="ray", feature="over='ray://...'")
    try:
        ray.init(address if address == "auto" else f"ray://{address}", log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:  # the last if only half of Ray is installed
        raise Unsupported(f"cannot reach a Ray cluster at {address}: {error}") from error
    return ray
