"""The default: a strategy by the size of the space, by what may be tried, and by what is installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from tunebook.search._exhaustive import Exhaustive
from tunebook.search._guided import Guided
from tunebook.search._local import Local
from tunebook.search._random import Random
from tunebook.search._trial_history import Start

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tunebook._space.space import Config, Space
    from tunebook.search._protocol import Observation, Strategy

# A space with no more combinations than this is gone through whole: no search could save much.
SMALL: Final = 64


class Portfolio:
    """Goes through a small space whole, and else is guided by a model; without numpy, it walks.

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
        self._strategy: Final[Strategy] = _chosen(space, trials)(space, seed=seed, start=start)

    @property
    def chosen(self) -> str:
        """The name of the strategy that was chosen."""
        return type(self._strategy).__name__.lower()

    def propose(self, n: int) -> list[Config]:
        """Return the next configurations."""
        return self._strategy.propose(n)

    def observe(self, observations: Iterable[Observation]) -> None:
        """Learn what came of configurations."""
        self._strategy.observe(observations)


def _chosen(space: Space, trials: int | None) -> type[Exhaustive | Guided | Local | Random]:
    if space.size <= max(SMALL, trials or 0):
        return Exhaustive
    if all(axis.kind == "categorical" for axis in space.grid) and len(space.grid) == 1:
        return Random  # nothing is near anything
    return Local if find_spec("numpy") is None else Guided
