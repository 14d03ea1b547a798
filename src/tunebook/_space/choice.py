"""Choosing among whole implementations of an operation."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from tunebook._base.errors import DefinitionError
from tunebook._base.record_format import blake2b
from tunebook._base.vocabulary import computed_once
from tunebook._code.checksum import read_code
from tunebook._code.deferred import refuse_deferred
from tunebook._space.space import Config, Space

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

    from tunebook._code.replay import CodeFacts

WAY: Final = "way"
_REMEMBERED: Final = 1024  # a service that overrides every call makes a new configuration each time


class Option(NamedTuple):
    """One implementation of an operation; it takes `config` if it has a `space` of its own.

    A group is tried only if all groups with lower numbers failed. In a group the highest `priority` is tried first; it
    may be a function of the call's arguments, and a negative priority leaves the implementation out. `heuristic` is
    the configuration that stands for the implementation before anything is measured.
    """

    function: Callable[..., Any]
    space: Space | None = None
    group: int = 0
    priority: int | Callable[..., int] = 0
    heuristic: Mapping[str, Any] | None = None


@final
class Choice:
    """Implementations of an operation. `choice(config, *args)` runs the implementation that `config.way` names.

    >>> ways = choice(builtin=sum, loop=lambda values: max(values) * 3)
    >>> ways(Config(way="builtin"), [1, 2, 3]), [dict(config) for config in ways]
    (6, [{'way': 'builtin'}, {'way': 'loop'}])
    """

    def __init__(self, options: dict[str, Option]) -> None:
        if not options:
            raise DefinitionError("a choice needs implementations: choice(fast=..., plain=...)")
        for name, option in options.items():
            if not callable(option.function):
                raise DefinitionError(f"{name}={option.function!r} cannot be called; give a function or an Option")
            refuse_deferred(option.function, name)
            if option.space is not None and WAY in option.space.axes:
                raise DefinitionError(f"the space of {name!r} has an axis {WAY!r}, a reserved name; rename it")
        self.options: Final = dict(options)
        self._own: dict[Hashable, Config] = {}  # configurations without "way"

    def __repr__(self) -> str:
        return f"<Choice of {', '.join(self.options)}>"

    def __call__(self, config: Config, /, *args: Any, **kwargs: Any) -> Any:
        option = self.options[config[WAY]]
        if option.space is None:
            return option.function(*args, **kwargs)
        # The same object each time, so that it can be a key. 1 == 1.0, and a kernel may divide by it.
        key = (*config.items(), *map(type, config.values()))
        own = self._own.get(key)
        if own is None:
            if len(self._own) >= _REMEMBERED:
                self._own.clear()
            own = self._own[key] = Config(**{axis: value for axis, value in config.items() if axis != WAY})
        return option.function(*args, config=own, **kwargs)

    def __iter__(self) -> Iterator[Config]:
        for name, option in self.options.items():
            points: Iterable[Mapping[str, Any]] = ({},) if option.space is None else option.space
            yield from (Config(**{WAY: name, **point}) for point in points)

    def option(self, config: Config) -> Option:
        """Return the implementation that a configuration names."""
        return self.options[config[WAY]]

    @property
    def default(self) -> Config | None:
        """The first implementation of the first group; None if it has a space and no heuristic."""
        name, option = min(self.options.items(), key=lambda item: item[1].group)
        own = {} if option.space is None else option.heuristic
        return None if own is None else Config(**{WAY: name, **own})

    def function(self, name: str) -> Callable[..., Any]:
        """Return a function that runs the choice, with the signature of the first implementation and `config`."""
        first = next(iter(self.options.values())).function

        def chosen(*args: Any, config: Config, **kwargs: Any) -> Any:
            return self(config, *args, **kwargs)

        chosen.__name__ = chosen.__qualname__ = name.rpartition(".")[2]
        chosen.__module__ = getattr(first, "__module__", None) or "builtins"
        chosen.__doc__ = f"Runs one of these: {', '.join(self.options)}."
        try:
            signature = inspect.signature(first)
        except (TypeError, ValueError) as error:
            raise DefinitionError(
                f"{name!r}: the signature of the first implementation, {first!r}, cannot be read. Put one written in "
                "Python first, or wrap it: lambda a, b: ..."
            ) from error
        parameters = [p for p in signature.parameters.values() if p.name != "config"]
        config = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY)
        parameters = sorted([*parameters, config], key=lambda p: p.kind)  # before a **kwargs
        chosen.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined] # for inspect
        return chosen

    def __tunebook_checksum__(self) -> str:
        """Return a digest of the code of every implementation."""
        parts = [f"{name}={facts.checksum}" for name, facts in self._code.items()]
        return blake2b(";".join(parts).encode(), digest_size=16).hexdigest()

    def __tunebook_versions__(self) -> Mapping[str, str]:
        """Return the versions of the packages that the implementations use."""
        return {name: version for facts in self._code.values() for name, version in facts.versions.items()}

    @computed_once
    def _code(self) -> dict[str, CodeFacts]:
        return {name: read_code(option.function) for name, option in self.options.items()}


def choice(**ways: Callable[..., Any] | Option) -> Choice:
    """Let a tunable function be one of several implementations: plain functions, or an `Option` each.

    `tunable(choice(...), name="attention")` makes one function of them. The first implementation runs while nothing is
    measured.
    """
    return Choice({name: way if isinstance(way, Option) else Option(way) for name, way in ways.items()})
