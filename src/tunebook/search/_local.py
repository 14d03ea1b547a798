"""Iterated local search: walk downhill, and when there is no way down, jump away from the best point and walk again."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from tunebook.search._trial_history import Ledger, Start

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tunebook._space.space import Config, Point, Space
    from tunebook.search._protocol import Observation

# A walk begins at the best of so many random points: one is often among the worst, and the way down from there long.
_BEGINNINGS: Final = 4
_WIDEST: Final = 4  # axes that a jump changes at most


class Local:
    """Walks to faster neighbours. Near ones are tried first, then all that differ in one axis.

    When a walk ends, the next begins at a point some axes away from the best: two at first, and one more after every
    walk that found nothing faster, until it starts anew from random points.
    """

    def __init__(self, space: Space, *, seed: int = 0, start: Start = Start()) -> None:  # noqa: B008 - immutable
        self._walker = Walker(Ledger(space, seed, start))

    def propose(self, n: int) -> list[Config]:
        """Return the next configurations."""
        return self._walker.ledger.hand_out(n, self._walker.next)

    def observe(self, observations: Iterable[Observation]) -> None:
        """Move to what is faster than where the walk is."""
        self._walker.learn(self._walker.ledger.note(observations))


class Walker:
    """One walk after another, over a ledger that others may write to as well."""

    def __init__(self, ledger: Ledger, beginnings: int = _BEGINNINGS) -> None:
        """`beginnings` is how many random points come before the first walk; with none, it begins at the best known."""
        self.ledger: Final = ledger
        self._here: Point | None = None
        self._here_value = math.inf
        self._round: list[Point] = []
        self._near = True
        self._reach = 2
        self._walk_best = math.inf
        self._beginnings = beginnings

    def learn(self, points: Iterable[Point]) -> None:
        """Move to a point whose time became known, if it is faster than where the walk is."""
        for point in points:
            value = self.ledger.values[point]
            if value < self._here_value:
                self._here, self._here_value = point, value
                self._round, self._near = [], True

    def next(self) -> Point | None:
        """Return the next point of the walk."""
        if self._here is None and self._beginnings <= 0 and self.ledger.ranked:
            self._here_value, self._here = self.ledger.ranked[0]
        if self._here is None or self._beginnings > 0:
            self._beginnings -= 1
            return self.ledger.random_point()
        while self._round:
            point = self._round.pop()
            if self.ledger.is_open(point):
                return point
        self._round = self.ledger.beside(self._here) if self._near else self.ledger.changed(self._here)
        if self._round:
            self.ledger.rng.shuffle(self._round)
            self._round.sort(key=self.ledger.is_compiled)  # taken from the end: what costs no compiling first
            self._near = False
            return self._round.pop()
        if self._near:
            self._near = False
            return self.next()
        return self._jump()

    def _jump(self) -> Point | None:
        """End the walk, and begin another one."""
        best_value, best = self.ledger.ranked[0] if self.ledger.ranked else (math.inf, self._here)
        self._reach = 2 if best_value < self._walk_best else self._reach + 1
        self._walk_best = best_value
        self._here_value, self._near = math.inf, True
        if self._reach > _WIDEST or best is None:
            self._reach, self._beginnings = 2, _BEGINNINGS - 1
            return self.ledger.random_point()
        for _ in range(100):
            point = self._away_from(best)
            if self.ledger.is_open(point):
                return point
        return self.ledger.random_point()

    def _away_from(self, point: Point) -> Point:
        rng, axes = self.ledger.rng, self.ledger.axes
        moved = list(point)
        many = [at for at, axis in enumerate(axes) if len(axis.values) > 1]
        for at in rng.sample(many, min(self._reach, len(many))):
            moved[at] = rng.choice([i for i in range(len(axes[at].values)) if i != point[at]])
        return tuple(moved)
