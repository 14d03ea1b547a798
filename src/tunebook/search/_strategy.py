"""The interface of every strategy, and the history that strategies share: taken points, open points, times so far."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from bisect import insort
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from tunebook._base.errors import DefinitionError
from tunebook._space.axis import Axis
from tunebook._space.space import Config, Point, Space

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

# How often a random configuration may turn out to be known before the rest is gone through in order.
_TRIES: Final = 50
# Whether a constraint accepts a point is remembered for this many points: 280 bytes each.
_REMEMBERED: Final = 100_000
# The variations of this many points are remembered: a search asks for those of its fastest points again and again.
_VARIED: Final = 64
# This many of `Start.first` are proposed one after the other; the rest alternates with the strategy's own proposals.
# The best of a device are often alike, and if they are bad here, the search must not have to try them all first.
STRAIGHT: Final = 6
# This many sizes are paired, each with each: 15 products, with which a model is still quick.
_PAIRED: Final = 6


class Observation(NamedTuple):
    """The seconds of a configuration, or None if it failed. Any unit works, if it is the same for all."""

    config: Mapping[str, Any]
    seconds: float | None


class Start(NamedTuple):
    """Where a search begins: with `first`; `last` are proposed when nothing else is left.

    `first` are configurations that were fast elsewhere, fastest first; from the seventh on they alternate with the
    strategy's own proposals. `last` are configurations that failed elsewhere. `elsewhere` are the times of other
    devices or problems, one list each: a strategy with a model predicts times here from them. The first `alike` of them
    have sizes that differ by a factor of 4 in all, on any device; `near` of these are of this device.
    """

    first: Sequence[Mapping[str, object]] = ()
    last: Sequence[Mapping[str, object]] = ()
    elsewhere: Sequence[Sequence[Observation]] = ()
    near: int = 0
    alike: int = 0


class Strategy(Protocol):
    """Proposes configurations of a space. `tunebook.testing.StrategyContract` checks an implementation.

    It never proposes a configuration twice, nor an observed one, nor one outside the space. The same seed and the same
    calls give the same proposals. Observations need not be of its own proposals: to continue an interrupted search, a
    new strategy observes everything that is known. Not safe to share between threads.
    """

    def propose(self, n: int) -> list[Config]:
        """Return the next `n` configurations to measure; fewer only if fewer are left."""

    def observe(self, observations: Iterable[Observation]) -> None:
        """Learn the times of configurations, in any order."""


class TrialHistory:
    """The points that were proposed or observed, and the times of the points that worked, fastest first."""

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
        self._exchanges = [
            (one, other, {size: at for at, size in enumerate(self.axes[other].values)})
            for one, other in size_pairs(self.axes)
        ]
        self._rest: Iterator[Config] | None = None
        self._lengths = [len(axis.values) for axis in self.axes]
        self._accepts: Callable[[Point], bool] = (
            lru_cache(_REMEMBERED)(lambda point: space.at(point) is not None) if space.constraints else lambda _: True
        )
        self._varied = lru_cache(_VARIED)(self._accepted_variations)

    def add(self, observations: Iterable[Observation]) -> list[Point]:
        """Add observations, and return the points that are new; configurations outside the space are ignored."""
        added = []
        for config, seconds in observations:
            point = self.space.point(config)
            if point is None or point in self.values:
                continue
            self._take(point)
            added.append(point)
            self.values[point] = value = log_of(seconds)
            if value < math.inf:
                insort(self.ranked, (value, point))
            else:
                self.failed.append(point)
                self._programs.discard(self._program(point))  # other launches of it may well fail too
        return added

    def _take(self, point: Point) -> None:
        self.taken.add(point)
        if self.shares_programs:
            self._programs.add(self._program(point))

    def _program(self, point: Point) -> Point:
        return tuple(point[at] for at in self._compiled_in)

    def is_compiled(self, point: Point) -> bool:
        """Whether a point's program was compiled for another point, which did not fail."""
        return self.shares_programs and self._program(point) in self._programs

    def is_open(self, point: Point) -> bool:
        """Whether a point may be proposed: it is in the space, and neither taken nor held back."""
        return self._is_untried(point) and self._accepts(point)

    def _is_untried(self, point: Point) -> bool:
        return point not in self.taken and point not in self._held_back

    def propose(self, n: int, find: Callable[[], Point | None]) -> list[Config]:
        """Return the next `n` configurations, of `Start.first` or found by `find`; fewer if none is left."""
        found: list[Config] = []
        while len(found) < n and (point := self._next_first() or find()) is not None:
            self._take(point)
            config = self.space.at(point)
            if config is None:
                raise DefinitionError(f"a constraint refuses {point} now but accepted it before; it must not change")
            found.append(config)
        return found

    def _next_first(self) -> Point | None:
        """Return the next point of `Start.first`, or None if it is used up, or if it is the strategy's own turn."""
        self._asked += 1
        if self._asked > STRAIGHT and self._asked % 2 and self.ranked:
            return None
        while self._first:
            point = self._first.pop(0)
            if point not in self.taken and self._accepts(point):
                self._held_back.discard(point)
                return point
        return None

    def random_point(self) -> Point | None:
        """Return a random open point, or None if none is left; points that are held back come last."""
        for _ in range(_TRIES):
            point = self._sample()
            if point is not None and self._is_untried(point):
                return point
        return self.next_in_order()

    def random_points(self, many: int) -> list[Point]:
        """Return random open points, at most so many: fewer where points are drawn twice, or are not open."""
        drawn = (self._sample() for _ in range(many))
        return list(dict.fromkeys(point for point in drawn if point is not None and self._is_untried(point)))

    def _sample(self) -> Point | None:
        """Return a random point of the space, or None if the space is empty."""
        random = self.rng.random
        for _ in range(_TRIES):
            point = tuple([int(random() * length) for length in self._lengths])
            if self._accepts(point):
                return point
        config = self.space.sample(self.rng)  # where constraints accept few, it finds one axis by axis
        return None if config is None else self.space.point(config)

    def next_in_order(self) -> Point | None:
        """Return the next open point in the order of the space, or None; points that are held back come last."""
        if self._rest is None:
            self._rest = iter(self.space)
        for config in self._rest:
            point = self.space.point(config)
            if point is not None and self._is_untried(point):
                return point
        return min((point for point in self._held_back - self.taken if self._accepts(point)), default=None)

    def neighbours(self, point: Point) -> list[Point]:
        """Return the open points that are one step away on a single axis."""
        return [near for near in self._moved(point, Axis.beside) if self.is_open(near)]

    def variations(self, point: Point) -> list[Point]:
        """Return the open points that differ in a single axis, or in two sizes with the same product."""
        taken, held_back = self.taken, self._held_back
        return [near for near in self._varied(point) if near not in taken and near not in held_back]

    def _accepted_variations(self, point: Point) -> list[Point]:
        found = list(self._moved(point, Axis.others))
        # The best points often have the same number of threads, or of elements in a tile, in other forms: 32 x 32,
        # 64 x 16 and 128 x 8. Changes of a single axis lead from form to form only through slow or invalid points.
        for one, other, index_of in self._exchanges:
            sizes = self.axes[one].values
            product = sizes[point[one]] * self.axes[other].values[point[other]]
            for index in self.axes[one].others(point[one]):
                near = list(point)
                near[one], near[other] = index, index_of.get(product / sizes[index], -1)
                if near[other] >= 0:
                    found.append(tuple(near))
        return list(filter(self._accepts, found))

    def _moved(self, point: Point, moves: Callable[[Axis, int], Iterable[int]]) -> Iterator[Point]:
        for at, axis in enumerate(self.axes):
            for index in moves(axis, point[at]):
                yield (*point[:at], index, *point[at + 1 :])


def size_pairs(axes: Sequence[Axis]) -> list[tuple[int, int]]:
    """Return all pairs of axes of sizes, whose product matters too: threads in a block, or elements in a tile."""
    sizes = [at for at, axis in enumerate(axes) if axis.kind == "log"]
    # Of many sizes, the sizes with most values are paired.
    chosen = sorted(sizes, key=lambda at: -len(axes[at].values))[:_PAIRED]
    return list(combinations(sorted(chosen), 2))


def log_of(seconds: float | None) -> float:
    """Return the logarithm of a time; infinite for a failure, and for a time that is not positive and finite."""
    return math.log(seconds) if seconds is not None and math.isfinite(seconds) and seconds > 0 else math.inf


class HistoryStrategy(ABC):
    """The common part of strategies: `Start.first` comes first, then the points that `_next` finds."""

    def __init__(self, space: Space, *, seed: int = 0, start: Start = Start()) -> None:  # noqa: B008 - immutable
        self._history = TrialHistory(space, seed, start)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} strategy>"

    def propose(self, n: int) -> list[Config]:
        """Return the next `n` configurations to measure; fewer only if fewer are left."""
        return self._history.propose(n, self._next)

    def observe(self, observations: Iterable[Observation]) -> None:
        """Learn the times of configurations, in any order."""
        self._history.add(observations)

    @abstractmethod
    def _next(self) -> Point | None:
        """Return the next point to measure; None if the strategy has no more."""
