"""Strategies by name, the default among them, and spaces of lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._base.errors import DefinitionError, not_among
from tunebook._space.space import Config, Space
from tunebook.search._guided import Guided
from tunebook.search._simple import Evolution, Exhaustive, Local, Random
from tunebook.search._strategy import Start

if TYPE_CHECKING:
    from tunebook._base.vocabulary import StrategyLike
    from tunebook.search._strategy import Observation, Strategy

# A space with at most this many combinations is tried whole: no search could save much.
SMALL: Final = 64


# An axis of more values is too long for a model of all pairs of values (10,000 took 72 s), and for walks step by step.
_LONG: Final = 1000
_LONG_WALK: Final = 100


class Portfolio:
    """The default: tries a small space whole, else uses a model; without numpy, it walks.

    `trials` is how many configurations may be tried, if that is known.
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int = 0,
        start: Start = Start(),  # noqa: B008 - immutable
        trials: int | None = None,
    ) -> None:
        chosen: type[Strategy]
        if not isinstance(space, Space) or space.size <= max(SMALL, trials or 0):
            chosen = Exhaustive  # which refuses a list, and says how to make a space of it
        elif len(space.grid) == 1 and space.grid[0].kind == "categorical":
            chosen = Random  # categories have no neighbours
        else:
            best, most = (Local, _LONG_WALK) if find_spec("numpy") is None else (Guided, _LONG)
            chosen = best if all(len(axis.values) <= most for axis in space.grid) else Evolution
        self._strategy: Final[Strategy] = chosen(space, seed=seed, start=start)

    def __repr__(self) -> str:
        return f"<Portfolio strategy: {self.chosen}>"

    @property
    def chosen(self) -> str:
        """The name of the strategy in use."""
        return type(self._strategy).__name__.lower()

    def propose(self, n: int) -> list[Config]:
        """Return the next `n` configurations to measure; fewer only if fewer are left."""
        return self._strategy.propose(n)

    def observe(self, observations: Iterable[Observation]) -> None:
        """Learn the times of configurations, in any order."""
        self._strategy.observe(observations)


_NAMED: Final[dict[str, Callable[..., Strategy]]] = {
    "auto": Portfolio,
    "guided": Guided,
    "local": Local,
    "evolution": Evolution,
    "random": Random,
    "exhaustive": Exhaustive,
}


def check_strategy(strategy: object) -> StrategyLike | None:
    """Return a strategy as it was given; a `DefinitionError` for an unknown name lists the names."""
    if strategy is None or callable(strategy) or (isinstance(strategy, str) and strategy in _NAMED):
        return strategy
    other = "a class that is called as Strategy(space, seed=0, start=Start())"
    raise DefinitionError(not_among("strategy", strategy, _NAMED, other))


class Search(NamedTuple):
    """A search to run: its space and strategy, how many configurations it may try, and where it begins.

    `blocks` says how many blocks the launch of a configuration has, or None.
    """

    space: Space
    strategy: StrategyLike
    trials: int
    start: Start = Start()
    seed: int = 0
    batch: int | None = None  # proposals at once; None is the default
    blocks: Callable[[Any], int | None] = lambda _config: None

    def first(self, n: int) -> list[Any]:
        """Return the first `n` proposals of a new strategy."""
        return list(self.begin().propose(n))

    def begin(self) -> Strategy:
        """Return a new strategy."""
        make: Callable[..., Strategy] = _NAMED[self.strategy] if isinstance(self.strategy, str) else self.strategy
        options = {"trials": self.trials} if self.strategy == "auto" else {}
        return make(self.space, seed=self.seed, start=self.start, **options)


def listed(configs: Sequence[Any]) -> Space | None:
    """Return the space of exactly these configurations; None if they do not all have the same keys.

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
        return None  # a value that is not hashable cannot be on an axis
    return Space(**axes).where(_Members(frozenset(Config(**config) for config in mappings)))


class _Members:
    """The constraint that a configuration is in a list."""

    def __init__(self, configs: frozenset[Config]) -> None:
        self._configs = configs

    def __call__(self, config: Config) -> bool:
        return config in self._configs

    def __tunebook_checksum__(self) -> str:
        return "|".join(sorted(map(repr, self._configs)))
