"""The attributes of an autotuner that programs read and write, and how its engine is told."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import triton
    from triton.runtime.autotuner import Autotuner

# Where an autotuner keeps its engine, its launcher for `kernel[grid]`, and the options for an engine.
ENGINE: Final = "_tunebook_engine"
LAUNCHER: Final = "_tunebook_launcher"
MORE: Final = "_tunebook_more"


class WatchedCache(dict[tuple[Any, ...], Any]):
    """The `cache` of an autotuner. A configuration that the program writes into it is launched; ours only show."""

    __slots__ = ("_autotuner", "written")

    def __init__(self, autotuner: Autotuner, given: Mapping[tuple[Any, ...], Any] = MappingProxyType({})) -> None:
        super().__init__(given)
        self._autotuner = autotuner
        self.written = set(given)  # the keys that the program wrote

    def publish(self, key: tuple[Any, ...], config: triton.Config) -> None:
        """Show a configuration that was selected."""
        super().__setitem__(key, config)

    def _told(self) -> None:
        self.written &= self.keys()
        tell_engine(self._autotuner)

    def __setitem__(self, key: tuple[Any, ...], config: Any) -> None:
        super().__setitem__(key, config)
        self.written.add(key)
        self._told()

    def __delitem__(self, key: tuple[Any, ...]) -> None:
        super().__delitem__(key)
        self._told()

    def clear(self) -> None:
        """Forget all configurations; the book keeps them."""
        super().clear()
        self._told()

    def pop(self, key: tuple[Any, ...], *default: Any) -> Any:
        """Remove a configuration, and return it."""
        found = super().pop(key, *default)
        self._told()
        return found

    def popitem(self) -> tuple[tuple[Any, ...], Any]:
        """Remove the last configuration, and return it with its key."""
        found = super().popitem()
        self._told()
        return found

    def update(self, *given: Any, **named: Any) -> None:
        """Write configurations."""
        for key, config in dict(*given, **named).items():
            self[key] = config

    def setdefault(self, key: tuple[Any, ...], default: Any = None) -> Any:
        """Write a configuration unless there is one, and return the one that there is."""
        if key not in self:
            self[key] = default
        return self[key]

    def __ior__(self, other: Any) -> Self:  # type: ignore[override, misc] # a dict takes more
        self.update(other)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def tell_engine(autotuner: Autotuner) -> None:
    """Tell the engine of an autotuner, if it has been built, that the program has written to an attribute."""
    engine: Any = vars(autotuner).get(ENGINE)
    if engine is not None and engine.autotuner is autotuner:
        engine.forget()


class Watched:
    """An attribute of an autotuner that the program may write to at any time; the next launch then selects anew."""

    def __init__(self, name: str, kept_as: Callable[[Autotuner, Any], Any] = lambda _autotuner, value: value) -> None:
        self._name, self._kept_as = name, kept_as

    def __get__(self, autotuner: Autotuner | None, owner: type) -> Any:
        if autotuner is None:
            return self
        try:
            value = vars(autotuner)[self._name]
        except KeyError:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}") from None
        if type(value) is list:
            # The program may write to the list that it gets: the next launch looks whether it did.
            vars(autotuner).pop(LAUNCHER, None)
        return value

    def __set__(self, autotuner: Autotuner, value: Any) -> None:
        vars(autotuner)[self._name] = self._kept_as(autotuner, value)
        tell_engine(autotuner)


class Stored:
    """An attribute that Triton sets where it tunes; after an answer from the book it is read from there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, autotuner: Autotuner | None, owner: type) -> Any:
        if autotuner is None:
            return self
        engine: Any = vars(autotuner).get(ENGINE)
        if engine is None:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}")
        return vars(autotuner).setdefault(self._name, engine.stored(self._name))
