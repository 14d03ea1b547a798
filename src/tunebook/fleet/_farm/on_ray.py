"""Ray's actors as seats: one for each GPU, and one on each node for its processor."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, NamedTuple

from tunebook._base.errors import Unsupported
from tunebook._base.optional import require
from tunebook.fleet._farm.workers import FarmWorker, seats_from

if TYPE_CHECKING:
    from collections.abc import Callable


class _RayPlacement(NamedTuple):
    """What an actor asks Ray for."""

    gpus: float
    node: str | None = None


class RayEngine:
    """Actors on an existing cluster: `address` is "auto", or host and port of its client server."""

    def __init__(self, address: str, at_once: int = 1) -> None:
        self._at_once = at_once
        self._ray = _connected(address)
        self._places: dict[str, _RayPlacement] = {}

    def seats(self) -> list[FarmWorker]:
        gpus = int(self._ray.cluster_resources().get("GPU", 0))
        nodes = [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]
        self._places = {f"gpu actor {n}": _RayPlacement(1 / self._at_once) for n in range(gpus * self._at_once)}
        for n in range(self._at_once):
            self._places |= {f"cpu actor {n} on {node[:8]}": _RayPlacement(0.0, node) for node in nodes}
        actors = {name: ActorExecutor(self._ray, place) for name, place in self._places.items()}
        seats = seats_from(actors, self._at_once)
        for name in actors.keys() - {seat.name for seat in seats}:
            actors[name].shutdown()
        if not seats:
            raise Unsupported("no actor answers: the cluster has no GPU or processor that is free")
        return seats

    def is_gone(self, seat: FarmWorker) -> bool:  # noqa: ARG002 - as it says
        """Return False: Ray tells by itself."""
        return False

    def renewed(self, seat: FarmWorker, error: BaseException | None) -> FarmWorker | None:
        if error is not None and not isinstance(error, self._ray.exceptions.RayActorError):
            return seat
        actor = ActorExecutor(self._ray, self._places[seat.name])
        found = seats_from({seat.name: actor}, 1)
        same = next((other for other in found if other.device == seat.device), None)
        if same is None:
            actor.shutdown()
        return same

    def close(self, busy: list[FarmWorker]) -> None:  # noqa: ARG002 - as it says
        # All actors of this program go with its connection, those at work too.
        self._ray.shutdown()


class ActorExecutor(Executor):
    """One actor as an executor."""

    def __init__(self, ray: Any, place: _RayPlacement) -> None:
        options: dict[str, Any] = {"num_cpus": 1, "num_gpus": place.gpus, "max_restarts": 0}
        if place.node is not None:
            affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            options["scheduling_strategy"] = affinity(place.node, soft=False)
        self._ray = ray
        self._actor = ray.remote(_RayWorker).options(**options).remote()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function in the actor."""
        future: Future[Any] = self._actor.call.remote(fn, args, kwargs).future()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - Executor's
        """End the actor."""
        self._ray.kill(self._actor)


class _RayWorker:
    """What the actor is."""

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)


def _connected(address: str) -> Any:
    ray = require("ray", extra="ray", feature="over='ray://...'")
    require("ray.util.scheduling_strategies", extra="ray", feature="over='ray://...'")
    try:
        ray.init(address if address == "auto" else f"ray://{address}", log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:  # the last if only half of Ray is installed
        raise Unsupported(f"there is no Ray cluster at {address}: {error}") from error
    return ray
