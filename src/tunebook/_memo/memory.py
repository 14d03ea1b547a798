"""The memory tier."""

from __future__ import annotations

from typing import Generic, TypeVar

from tunebook._base.vocabulary import Problem
from tunebook._memo.answer_memo import MEMO

C = TypeVar("C")


class ConfigCache(Generic[C]):
    """Configurations by (device, op_id, call_key), for as long as the process lives.

    Reads take no lock. Each write is one dict operation, which is atomic with and without the GIL.

    >>> cache = ConfigCache()
    >>> cache.put("cpu", "matmul@v0", "f32[64,64]", {"block": 32})
    >>> cache.get("cpu", "matmul@v0", "f32[64,64]")
    {'block': 32}
    >>> cache.size()
    1
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[Problem, C] = {}

    def get(self, dev: str, op_id: str, call_key: str) -> C | None:
        """Return the configuration, or None."""
        return self._entries.get(Problem(dev, op_id, call_key))

    def put(self, dev: str, op_id: str, call_key: str, cfg: C) -> None:
        """Keep a configuration; calls that were answered otherwise before are answered by it from now on."""
        problem = Problem(dev, op_id, call_key)
        self._entries[problem] = cfg
        MEMO.invalidate(problem)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        MEMO.invalidate()

    def size(self) -> int:
        """Return how many configurations there are."""
        return len(self._entries)

    def keys(self) -> list[Problem]:
        """Return the problems that have a configuration, as they are now."""
        return list(self._entries)
