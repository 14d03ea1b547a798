"""An evolutionary search: the fastest configurations are crossed, and now and then changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tunebook.search._trial_history import Ledger, Start

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tunebook._space.space import Config, Point, Space
    from tunebook.search._protocol import Observation

_POPULATION: Final = 20
_TOURNAMENT: Final = 3
_TRIES: Final = 60


class Evolution:
    """Keeps the fastest 20; a child takes each axis from one of two parents, and one or two of them change a step."""

    def __init__(self, space: Space, *, seed: int = 0, start: Start = Start()) -> None:  # noqa: B008 - immutable
        self._ledger = Ledger(space, seed, start)

    def propose(self, n: int) -> list[Config]:
        """Return the next configurations."""
        return self._ledger.hand_out(n, lambda: self._child() or self._ledger.random_point())

    def observe(self, observations: Iterable[Observation]) -> None:
        """Learn who may be a parent."""
        self._ledger.note(observations)

    def _child(self) -> Point | None:
        population = self._ledger.ranked[:_POPULATION]
        if len(self._ledger.ranked) < _POPULATION:
            return None
        for _ in range(_TRIES):
            mother, father = self._parent(population), self._parent(population)
            mixed = tuple(self._ledger.rng.choice(pair) for pair in zip(mother, father, strict=True))
            child = self._mutated(mixed)
            if self._ledger.is_open(child):
                return child
        return None

    def _parent(self, population: list[tuple[float, Point]]) -> Point:
        """Return the fastest of a few; the population is in order."""
        return population[min(self._ledger.rng.randrange(len(population)) for _ in range(_TOURNAMENT))][1]

    def _mutated(self, point: Point) -> Point:
        rng, axes = self._ledger.rng, self._ledger.axes
        moved = list(point)
        for _ in range(rng.randint(1, 2)):
            at = rng.randrange(len(axes))
            # A step is more often an improvement than a leap, but only leaps leave a valley.
            to = list(axes[at].beside(moved[at]) if rng.random() < 0.5 else axes[at].others(moved[at]))
            if to:
                moved[at] = rng.choice(to)
        return tuple(moved)
