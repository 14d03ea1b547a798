"""Strategies without a model: everything in order, at random, by evolution, and by walking downhill."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from tunebook.search._strategy import HistoryStrategy, Observation, Start, TrialHistory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tunebook._space.space import Point, Space

_POPULATION: Final = 20
_TOURNAMENT: Final = 3
_TRIES: Final = 60
# A walk begins at the best of this many random points: one is often among the worst, and the way down from there long.
_BEGINNINGS: Final = 4
_WIDEST: Final = 4  # axes that a jump changes at most


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
        history, rng, axes = self._history, self._history.rng, self._history.axes
        for _ in range(_TRIES if len(history.ranked) >= _POPULATION else 0):
            child = [rng.choice(pair) for pair in zip(self._parent(), self._parent(), strict=True)]
            for _ in range(rng.randint(1, 2)):
                at = rng.randrange(len(axes))
                # A step is more often an improvement than a leap, but only leaps leave a valley.
                to = list(axes[at].beside(child[at]) if rng.random() < 0.5 else axes[at].others(child[at]))
                child[at] = rng.choice(to) if to else child[at]
            if history.is_open(point := tuple(child)):
                return point
        return history.random_point()

    def _parent(self) -> Point:
        """Return the fastest of a few random points of the population."""
        rng = self._history.rng
        return self._history.ranked[min(rng.randrange(_POPULATION) for _ in range(_TOURNAMENT))][1]


class Local(HistoryStrategy):
    """Walks to faster neighbours. Near ones are tried first, then all that differ in one axis.

    When a walk ends, the next begins some axes away from the best point: two at first, and one more after every walk
    that found nothing faster, until it starts anew from random points.
    """

    def __init__(self, space: Space, *, seed: int = 0, start: Start = Start()) -> None:  # noqa: B008 - immutable
        self._history = TrialHistory(space, seed, start)
        self._walker = Walker(self._history)

    def observe(self, observations: Iterable[Observation]) -> None:
        """Move to a point that is faster than the walk's."""
        self._walker.learn(self._history.add(observations))

    def _next(self) -> Point | None:
        return self._walker.next()


class Walker:
    """Takes one walk after another, over a history that others may add to as well."""

    def __init__(self, history: TrialHistory, beginnings: int = _BEGINNINGS) -> None:
        """`beginnings` is how many random points come before the first walk; with 0, it begins at the best known."""
        self._history = history
        self._here: Point | None = None
        self._here_value = math.inf
        self._untried: list[Point] = []
        self._near = True
        self._reach = 2
        self._walk_best = math.inf
        self._beginnings = beginnings

    def learn(self, points: Iterable[Point]) -> None:
        """Move to the fastest of some points with new times, if it is faster than the walk's."""
        for point in points:
            value = self._history.values[point]
            if value < self._here_value:
                self._here, self._here_value = point, value
                self._untried, self._near = [], True

    def next(self) -> Point | None:
        """Return the next point of the walk."""
        history = self._history
        if self._here is None and self._beginnings <= 0 and history.ranked:
            self._here_value, self._here = history.ranked[0]
        if self._here is None or self._beginnings > 0:
            self._beginnings -= 1
            return history.random_point()
        while self._untried:
            point = self._untried.pop()
            if history.is_open(point):
                return point
        self._untried = history.neighbours(self._here) if self._near else history.variations(self._here)
        if self._untried:
            history.rng.shuffle(self._untried)
            self._untried.sort(key=history.is_compiled)  # taken from the end: compiled programs come first
        if self._untried or self._near:
            self._near = False
            return self.next()
        return self._jump()

    def _jump(self) -> Point | None:
        """End the walk, and begin another one."""
        history, rng, axes = self._history, self._history.rng, self._history.axes
        best_value, best = history.ranked[0] if history.ranked else (math.inf, self._here)
        self._reach = 2 if best_value < self._walk_best else self._reach + 1
        self._walk_best = best_value
        self._here_value, self._near = math.inf, True
        if self._reach > _WIDEST or best is None:
            self._reach, self._beginnings = 2, _BEGINNINGS - 1
            return history.random_point()
        varied = [at for at, axis in enumerate(axes) if len(axis.values) > 1]
        for _ in range(100):
            moved = list(best)
            for at in rng.sample(varied, min(self._reach, len(varied))):
                moved[at] = rng.choice([i for i in range(len(axes[at].values)) if i != best[at]])
            if history.is_open(point := tuple(moved)):
                return point
        return history.random_point()
