"""The table of clusters: the kinds of workers that `over=` can name, and any executor of the user's own."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import TYPE_CHECKING, Final, NamedTuple

from tunebook._base.errors import DefinitionError, Unsupported, require
from tunebook.fleet._farm.on_dask import DaskCluster
from tunebook.fleet._farm.on_processes import LocalProcesses
from tunebook.fleet._farm.on_ray import RayCluster
from tunebook.fleet._farm.workers import Cluster, FarmWorker

if TYPE_CHECKING:
    from collections.abc import Callable


class GivenExecutor(Cluster):
    """An executor whose devices are unknown: it gets `at_once` problems at a time.

    The executor decides which worker gets a problem. Two problems on one device take turns there.
    """

    def __init__(self, executor: Executor, at_once: int, *, close: bool = False) -> None:
        self._executor, self._at_once, self._close = executor, at_once, close

    def workers(self) -> list[FarmWorker]:
        return [FarmWorker(f"place {n}", self._executor) for n in range(self._at_once)]

    def close(self, busy: list[FarmWorker]) -> None:
        if self._close:
            self._executor.shutdown(wait=not busy, cancel_futures=True)


def _mpi() -> Cluster:
    executor = require("mpi4py.futures", extra="mpi", feature="over='mpi'").MPIPoolExecutor()
    executor.bootup()
    if not executor.num_workers:
        raise Unsupported("MPI has no worker; run: mpiexec -n 5 python -m mpi4py.futures -m tunebook tune ...")
    return GivenExecutor(executor, executor.num_workers, close=True)


class ClusterKind(NamedTuple):
    """How users write a kind of cluster, and how it is opened from the address after "://" and `at_once`."""

    written: tuple[str, ...]
    open: Callable[[str, int], Cluster]


CLUSTERS: Final = {
    "local": ClusterKind(("local",), lambda _address, at_once: LocalProcesses(at_once)),
    "dask": ClusterKind(("dask://host:port",), DaskCluster),
    "ray": ClusterKind(("ray://auto", "ray://host:port"), RayCluster),
    "mpi": ClusterKind(("mpi",), lambda _address, _at_once: _mpi()),
}


def open_cluster(over: Executor | str | None, at_once: int) -> Cluster:
    """Return the cluster that a user names; None is this machine."""
    if at_once < 1:
        raise DefinitionError(f"at_once={at_once!r}: a device needs at least 1 problem at a time")
    if isinstance(over, Executor):
        return GivenExecutor(over, at_once)
    name, _, address = (over or "local").partition("://")
    kind = CLUSTERS.get(name)
    if kind is None or (not address and "://" in kind.written[0]):
        known = ", ".join(repr(text) for each in CLUSTERS.values() for text in each.written)
        raise DefinitionError(f"unknown cluster over={over!r}; use {known}, or an Executor of concurrent.futures")
    return kind.open(address, at_once)
