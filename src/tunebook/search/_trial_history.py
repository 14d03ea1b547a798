"""What a strategy knows about its space: which points were handed out, and what came of them."""

from __future__ import annotations

import math
import random
from bisect import insort
from typing import TYPE_CHECKING, Final, NamedTuple

from tunebook._base.errors import DefinitionError
from tunebook._space.space import Config, Point, Space
from tunebook.search._products import products

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tunebook.search._protocol import Observation

# How often a random configuration may turn out to be known before the rest is gone through in order.
_TRIES: Final = 50
# Whether a constraint accepts a point is remembered for so many points: 100 bytes each.
_REMEMBERED: Final = 200_000


# So many of those to begin with are proposed one after the other; the others in turn with the strategy's own. The best
# of one device are often alike, and if they are bad here, the search must not have to try them all first.
STRAIGHT: Final = 6


class Start(NamedTuple):
    """Where a search begins: `first` is proposed before anything else, `last` when nothing else is left.

    `first` are configurations that were good elsewhere, best first; of many, those after the sixth are proposed in turn
    with what the strategy finds by itself. `last` are those that failed there. `elsewhere` are the times of other
    devices or problems, each in a list of its own: a strategy with a model guesses times here from them.
    """

    first: Sequence[Mapping[str, object]] = ()
    last: Sequence[Mapping[str, object]] = ()
    elsewhere: Sequence[Sequence[Observation]] = ()


class Ledger:
    """The points that were proposed or observed, and the times of those that worked, fastest first."""

    def __init__(self, space: Space, seed: int, start: Start = Start()) -> None:  # noqa: B008 - immutable
        if not isinstance(space, Space):
            raise DefinitionError(
                f"a strategy searches a tunebook.Space; got {type(space).__name__}. "
                "For a list of configurations write tunebook.search.listed(configurations)."
            )
        self.space: Final = space
        self.axes: Final = space.grid
        self.rng: Final = random.Random(seed)  # noqa: S311 - to search, not to hide
        self.taken: set[Point] = set()
        self.values: dict[Point, float] = {}  # logarithms of seconds
        self.ranked: list[tuple[float, Point]] = []
        self.failed: list[Point] = []
        self._compiled_in = [at for at, axis in enumerate(self.axes) if axis.name not in space.launch_axes]
        self.shares_programs: Final = len(self._compiled_in) < len(self.axes)
        self._programs: set[Point] = set()
        self._held_back = {point for config in start.last if (point := space.point(config)) is not None}
        self._first = [point for config in start.first if (point := space.point(config)) is not None]
        self._asked = 0
        self._accepted: dict[Point, bool] = {}
        self._exchanges = [
            (pair.one, pair.other, {size: at for at, size in enumerate(self.axes[pair.other].values)})
            for pair in products(self.axes)
        ]
        self._rest: Iterator[Config] | None = None

    def note(self, observations: Iterable[Observation]) -> list[Point]:
        """Learn what came of configurations, and return the points that are new; those outside the space are not."""
        noted = []
        for config, seconds in observations:
            point = self.space.point(config)
            if point is None or point in self.values:
                continue
            self._count_in(point)
            noted.append(point)
            if seconds is not None and math.isfinite(seconds) and seconds > 0:
                self.values[point] = math.log(seconds)
                insort(self.ranked, (self.values[point], point))
            else:
                self.values[point] = math.inf
                self.failed.append(point)
                self._programs.discard(self._program(point))  # other launches of it may well fail too
        return noted

    def _count_in(self, point: Point) -> None:
        self.taken.add(point)
        if self.shares_programs:
            self._programs.add(self._program(point))

    def _program(self, point: Point) -> Point:
        return tuple(point[at] for at in self._compiled_in)

    def is_compiled(self, point: Point) -> bool:
        """Whether a point's program was compiled for another one, which did not fail."""
        return self.shares_programs and self._program(point) in self._programs

    def is_open(self, point: Point) -> bool:
        """Whether a point may be proposed: it is in the space, and neither taken nor held back."""
        return point not in self.taken and point not in self._held_back and self.accepts(point)

    def accepts(self, point: Point) -> bool:
        """Whether the constraints accept a point."""
        accepted = self._accepted.get(point)
        if accepted is None:
            accepted = self.space.at(point) is not None
            if len(self._accepted) < _REMEMBERED:
                self._accepted[point] = accepted
        return accepted

    def take(self, point: Point) -> Config:
        """Hand a point out."""
        self._count_in(point)
        config = self.space.at(point)
        if config is None:
            raise DefinitionError(f"a constraint refuses {point} now and did not before; it must not depend on time")
        return config

    def hand_out(self, n: int, find: Callable[[], Point | None]) -> list[Config]:
        """Return the next `n` configurations: those to begin with, and what `find` finds; fewer if none is left."""
        found: list[Config] = []
        while len(found) < n and (point := self.next_first() or find()) is not None:
            found.append(self.take(point))
        return found

    def next_first(self) -> Point | None:
        """Return the next point to begin with, or None if there are no more, or it is the strategy's own turn."""
        self._asked += 1
        if self._asked > STRAIGHT and self._asked % 2 and self.ranked:
            return None
        while self._first:
            point = self._first.pop(0)
            if point not in self.taken and self.accepts(point):
                self._held_back.discard(point)
                return point
        return None

    def random_point(self) -> Point | None:
        """Return a random point that is open, or None if none is left; those held back come last."""
        for _ in range(_TRIES):
            config = self.space.sample(self.rng)
            point = None if config is None else self.space.point(config)
            if point is not None and point not in self.taken and point not in self._held_back:
                return point
        return self.next_in_order()

    def next_in_order(self) -> Point | None:
        """Return the next open point in the order of the space, or None if none is left; those held back come last."""
        if self._rest is None:
            self._rest = iter(self.space)
        for config in self._rest:
            point = self.space.point(config)
            if point is not None and point not in self.taken and point not in self._held_back:
                return point
        open_ = sorted(point for point in self._held_back - self.taken if self.accepts(point))
        return open_[0] if open_ else None

    def changed(self, point: Point) -> list[Point]:
        """Return the open points that differ from one in a single axis, or in two sizes with the same product.

        The best ones often have the same number of threads, or of elements in a tile, in other forms: 32 x 32, 64 x 16
        and 128 x 8. From one to the next there is no way through single axes but past what is slow, or not allowed.
        """
        found = []
        for at, axis in enumerate(self.axes):
            for index in axis.others(point[at]):
                near = (*point[:at], index, *point[at + 1 :])
                if self.is_open(near):
                    found.append(near)
        return found + [near for near in self._exchanged(point) if self.is_open(near)]

    def _exchanged(self, point: Point) -> Iterator[Point]:
        for one, other, index_of in self._exchanges:
            sizes = self.axes[one].values
            product = sizes[point[one]] * self.axes[other].values[point[other]]
            for index in self.axes[one].others(point[one]):
                partner = index_of.get(product / sizes[index])
                if partner is not None:
                    near = list(point)
                    near[one], near[other] = index, partner
                    yield tuple(near)

    def relaunched(self, point: Point) -> list[Point]:
        """Return the points that one can be `changed` to, and whose program was compiled already."""
        return [near for near in self.changed(point) if self.is_compiled(near)] if self.shares_programs else []

    def beside(self, point: Point) -> list[Point]:
        """Return the open points that are one step away on a single axis."""
        found = []
        for at, axis in enumerate(self.axes):
            for index in axis.beside(point[at]):
                near = (*point[:at], index, *point[at + 1 :])
                if self.is_open(near):
                    found.append(near)
        return found
