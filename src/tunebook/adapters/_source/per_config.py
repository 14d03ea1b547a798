"""Values that are made once per configuration: a loaded library, a compiled function."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, final

from tunebook._base.config_codec import fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# A service that overrides every call makes a new configuration each time, and each entry keeps one alive.
_REMEMBERED: Final = 1024


@final
class PerConfig(Generic[T]):
    """Calls `make` once per configuration, also under threads; an error is raised and not remembered.

    `key` tells configurations apart, and is called only for new objects: a tuned call always passes the same object,
    which is found again in 0.1 us. A lookup by the configuration's own hash would take twice as long and be wrong,
    because `Config(n=1) == Config(n=1.0)`, and C divides by them differently.
    """

    __slots__ = ("__wrapped__", "_by_identity", "_by_value", "_key", "_locks")

    def __init__(self, make: Callable[[Any], T], key: Callable[[Any], Hashable] = fingerprint) -> None:
        self.__wrapped__ = make  # the name under which a checksum looks for the code of an object
        self._key = key
        self._by_identity: dict[int, tuple[object, T]] = {}
        self._by_value: dict[Hashable, T] = {}
        self._locks: dict[Hashable, threading.Lock] = {}

    def __call__(self, config: Any) -> T:
        found = self._by_identity.get(id(config))
        return self._find(config) if found is None else found[1]

    def _find(self, config: Any) -> T:
        key = self._key(config)
        with self._locks.setdefault(key, threading.Lock()):
            if key not in self._by_value:
                self._by_value[key] = self.__wrapped__(config)
        if isinstance(config, Hashable) and type(config).__hash__ is not object.__hash__:
            # Hashed by value, so its value does not change.
            if len(self._by_identity) >= _REMEMBERED:
                self._by_identity.clear()
            # With the configuration itself: if it were freed, another object could get its identity.
            self._by_identity[id(config)] = config, self._by_value[key]
        return self._by_value[key]
