"""A board on the store that every `torch.distributed` job has."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, final

from tunebook._base.errors import StoreError, Unsupported, require
from tunebook.fleet._agreement.board import poll

if TYPE_CHECKING:
    from collections.abc import Callable


@final
class TorchBoard:
    """A `torch.distributed` store of the job, or of a group of ranks that agree among themselves.

    It polls: the store's own wait occupies the job's one connection, and prints two lines when it times out.
    """

    def __init__(self, store: Any, *, rank: int, world: int) -> None:
        self._store = store
        self.rank = rank
        self.world = world
        self.where = f"torch.distributed's {type(store).__name__}"

    def first(self, key: str, value: str) -> str:
        return self._call(self._store.compare_set, key, "", value).decode()  # type: ignore[no-any-return] # bytes

    def wait(self, key: str, timeout_s: float) -> str | None:
        return poll(lambda: self._get(key), timeout_s)

    def post(self, topic: str, value: str) -> None:
        self._call(self._store.append, topic, f"{value}\n")

    def posted(self, topic: str) -> list[str]:
        return (self._get(topic) or "").splitlines()

    def add(self, key: str, amount: int) -> int:
        return int(self._call(self._store.add, key, amount))

    def _get(self, key: str) -> str | None:
        return self._call(self._store.get, key).decode() if self._call(self._store.check, [key]) else None

    def _call(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except RuntimeError as error:  # DistError and the errors of older stores
            raise StoreError("unreachable", self.where, f"{self.where} failed: {error}") from error


def torch_board() -> TorchBoard:
    """Return the board of this process's job."""
    distributed = require("torch", extra="torch", feature="agree('torch')").distributed
    if not distributed.is_available():
        raise Unsupported("agree('torch') needs torch.distributed, which this build of torch does not have")
    if not distributed.is_initialized():
        raise Unsupported(
            "agree('torch') needs a process group, and this process has not joined one; call "
            "torch.distributed.init_process_group(...) first"
        )
    store = importlib.import_module("torch.distributed.distributed_c10d")._get_default_store()  # noqa: SLF001 - torch has no public name
    prefixed = distributed.PrefixStore("tunebook", store)
    return TorchBoard(prefixed, rank=distributed.get_rank(), world=distributed.get_world_size())
