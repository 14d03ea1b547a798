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
        """Show a configuration that was selected, unless the program wrote one: an overlay may stand before it."""
        if key not in self.written:
            super().__setitem__(key, config)

    def _removed(self) -> None:
        self.written &= self.keys()
        tell_engine(self._autotuner, tuned=True)

    def __setitem__(self, key: tuple[Any, ...], config: Any) -> None:
        super().__setitem__(key, config)
        self.written.add(key)
        tell_engine(self._autotuner)

    def __delitem__(self, key: tuple[Any, ...]) -> None:
        super().__delitem__(key)
        self._removed()

    def clear(self) -> None:
        """Forget all configurations; the book keeps them."""
        super().clear()
        self._removed()

    def pop(self, key: tuple[Any, ...], *default: Any) -> Any:
        """Remove a configuration, and return it."""
        found = super().pop(key, *default)
        self._removed()
        return found

    def popitem(self) -> tuple[tuple[Any, ...], Any]:
        """Remove the last configuration, and return it with its key."""
        found = super().popitem()
        self._removed()
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


def tell_engine(autotuner: Autotuner, *, tuned: bool = False) -> None:
    """Tell the engine of an autotuner, if it has been built, that the program has written to an attribute."""
    engine: Any = vars(autotuner).get(ENGINE)
    if engine is not None and engine.autotuner is autotuner:
        engine.forget(tuned=tuned)


class Watched:
    """An attribute of an autotuner that the program may write to at any time; the next launch then selects anew.

    `kept_as(autotuner, value)` returns the value to keep. `mutable`: the program may write to the value that it gets,
    and the next launch looks whether it did. `baked_in`: generated code holds the value, so it needs a new engine.
    """

    def __init__(
        self,
        name: str,
        kept_as: Callable[[Autotuner, Any], Any] = lambda _autotuner, value: value,
        *,
        mutable: bool = False,
        baked_in: bool = False,
    ) -> None:
        self._name, self._kept_as, self._mutable, self._baked_in = name, kept_as, mutable, baked_in

    def __get__(self, autotuner: Autotuner | None, owner: type) -> Any:
        if autotuner is None:
            return self
        try:
            value = vars(autotuner)[self._name]
        except KeyError:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}") from None
        if self._mutable and (engine := vars(autotuner).get(ENGINE)) is not None:
            engine.look_again = True
            vars(autotuner).pop(LAUNCHER, None)
        return value

    def __set__(self, autotuner: Autotuner, value: Any) -> None:
        vars(autotuner)[self._name] = self._kept_as(autotuner, value)
        if self._baked_in:
            for name in (ENGINE, LAUNCHER):
                vars(autotuner).pop(name, None)
        else:
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


def state_without_engine(autotuner: Autotuner) -> dict[str, Any]:
    """Return the state of an autotuner for a copy, which gets an engine of its own."""
    return {name: value for name, value in vars(autotuner).items() if name not in (ENGINE, LAUNCHER)}
