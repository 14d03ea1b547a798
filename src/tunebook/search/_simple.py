"""Strategies without a model: everything in order, at random, and by evolution."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tunebook.search._trial_history import HistoryStrategy

if TYPE_CHECKING:
    from tunebook._space.space import Point

_POPULATION: Final = 20
_TOURNAMENT: Final = 3
_TRIES: Final = 60


class Exhaustive(HistoryStrategy):
    """Proposes every configuration in the order of the space."""

    def _next(self) -> Point | None:
        return self._history.next_in_order()


class Random(HistoryStrategy):
    """Proposes configurations at random, without replacement."""

    def _next(self) -> Point | None:
        return self._history.random_point()


class Evolution(HistoryStrategy):
    """Keeps the fastest 20; a child takes each axis from one of two parents, and then one or two axes mutate."""

    def _next(self) -> Point | None:
        return self._child() or self._history.random_point()

    def _child(self) -> Point | None:
        if len(self._history.ranked) < _POPULATION:
            return None
        for _ in range(_TRIES):
            mother, father = self._parent(), self._parent()
            child = self._mutate([self._history.rng.choice(pair) for pair in zip(mother, father, strict=True)])
            if self._history.is_open(child):
                return child
        return None

    def _parent(self) -> Point:
        """Return the fastest of a few random points of the population."""
        rng = self._history.rng
        return self._history.ranked[min(rng.randrange(_POPULATION) for _ in range(_TOURNAMENT))][1]

    def _mutate(self, point: list[int]) -> Point:
        rng, axes = self._history.rng, self._history.axes
        for _ in range(rng.randint(1, 2)):
            at = rng.randrange(len(axes))
            # A step is more often an improvement than a leap, but only leaps leave a valley.
            to = list(axes[at].beside(point[at]) if rng.random() < 0.5 else axes[at].others(point[at]))
            if to:
                point[at] = rng.choice(to)
        return tuple(point)
