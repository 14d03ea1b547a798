"""Strategies by name, and spaces of lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._base.errors import DefinitionError
from tunebook._space.space import Config, Space
from tunebook.search._auto import Portfolio
from tunebook.search._evolution import Evolution
from tunebook.search._exhaustive import Exhaustive
from tunebook.search._guided import Guided
from tunebook.search._local import Local
from tunebook.search._random import Random
from tunebook.search._trial_history import Start

if TYPE_CHECKING:
    from tunebook._base.vocabulary import StrategyLike
    from tunebook.search._protocol import Strategy

_NAMED: Final[dict[str, Callable[..., Strategy]]] = {
    "auto": Portfolio,
    "guided": Guided,
    "local": Local,
    "evolution": Evolution,
    "random": Random,
    "exhaustive": Exhaustive,
}


def check_strategy(strategy: object) -> StrategyLike | None:
    """Return a strategy as it was given; `DefinitionError` lists the names if it is none."""
    if strategy is None or callable(strategy):
        return strategy
    if isinstance(strategy, str) and strategy in _NAMED:
        return strategy
    raise DefinitionError(
        f"strategy={strategy!r} is none; write one of {', '.join(map(repr, _NAMED))}, or pass a class that is made as "
        "Strategy(space, seed=0, start=Start())"
    )


class Search(NamedTuple):
    """A search to be run: where, how, from where, and how many configurations it may try."""

    space: Space
    strategy: StrategyLike
    trials: int
    start: Start = Start()
    seed: int = 0

    def first(self, n: int) -> list[Any]:
        """Return what is proposed before anything is known."""
        return list(self.begin().propose(n))

    def begin(self) -> Strategy:
        """Return a new strategy for it."""
        if not isinstance(self.strategy, str):
            made: Strategy = self.strategy(self.space, seed=self.seed, start=self.start)
            return made
        if self.strategy == "auto":
            return Portfolio(self.space, seed=self.seed, start=self.start, trials=self.trials)
        return _NAMED[self.strategy](self.space, seed=self.seed, start=self.start)


def listed(configs: Sequence[Any]) -> Space | None:
    """Return the space of some configurations: the axes are the values that occur; None if they have none in common.

    >>> space = listed([{"m": 32, "n": 32}, {"m": 64, "n": 32}])
    >>> len(space), space.axes["m"]
    (2, (32, 64))
    """
    mappings = [config for config in configs if isinstance(config, Mapping)]
    if not mappings or len(mappings) < len(configs) or any(c.keys() != mappings[0].keys() for c in mappings):
        return None
    try:
        axes = {name: list({(type(c[name]), c[name]): c[name] for c in mappings}.values()) for name in mappings[0]}
    except TypeError:
        return None  # a value that is not hashable is on no axis
    members = _Members(frozenset(Config(**config) for config in mappings))
    return Space(**axes).where(members)


class _Members:
    """The constraint that a configuration is one of those listed."""

    def __init__(self, configs: frozenset[Config]) -> None:
        self._configs = configs

    def __call__(self, config: Config) -> bool:
        return config in self._configs

    def __tunebook_checksum__(self) -> str:
        return "|".join(sorted(map(repr, self._configs)))
