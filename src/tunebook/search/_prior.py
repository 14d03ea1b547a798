"""What times elsewhere say about times here: the guess that a model of times starts from."""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final

from tunebook.search._model import TimeModel, load_numpy

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Sequence

    from tunebook._space.space import Point, Space
    from tunebook.search._protocol import Observation

# The guess that every source is worth the same counts as much as so many times that were measured here. Few: where
# sources disagree, a search that held on to them found less than one that knew nothing.
_BELIEF: Final = 0.5
# What a source did not measure is guessed from so many of its points, half of them the fastest.
_FITTED: Final = 200
# Of what is known of a source, so many of the fastest may be proposed for it.
_LISTED: Final = 200
# How sources differ is learnt from so many pairs of them, each at so many points; fewer than so few tell nothing.
_COMPARED: Final = 4
_DIFFERING: Final = 96
_FEWEST: Final = 8


class Prior:
    """Guesses times here as a sum of the logarithms of those elsewhere, with weights that are learnt."""

    def __init__(self, space: Space, elsewhere: Iterable[Sequence[Observation]], rng: random.Random) -> None:
        self._np = np = load_numpy()
        self._rng = rng
        tables = [_times(space, source) for source in elsewhere]
        self._sources = [_PriorSource(space, table, rng) for table in tables if any(map(math.isfinite, table.values()))]
        self._weights = np.full(len(self._sources), 1 / max(len(self._sources), 1))
        self._rows: dict[Point, tuple[float, ...]] = {}
        self._listed = list(dict.fromkeys(point for source in self._sources for point in source.fastest))
        self.spread: Final = float(np.mean([source.spread for source in self._sources])) if self._sources else 0.0

    def __bool__(self) -> bool:
        """Whether anything is known elsewhere."""
        return bool(self._sources)

    def learn(self, points: Sequence[Point], logs: Any) -> None:
        """Find by least squares what each source is worth here, from times of here; nothing, if it misleads."""
        if not self._sources:
            return
        np, many = self._np, len(self._sources)
        there = self._there(points)
        there, here = there - there.mean(0), logs - logs.mean()
        belief = _BELIEF * self.spread**2 + 1e-12
        left = there.T @ there + belief * np.eye(many)
        self._weights = np.maximum(np.linalg.solve(left, there.T @ here + belief / many), 0.0)

    def guess(self, points: Sequence[Point]) -> Any:
        """Return guessed logarithms of times; all may be off by the same number, which is 0 for what is usual."""
        return self._there(points) @ self._weights if self._sources else 0.0

    def promising(self, many: int, is_open: Callable[[Point], bool]) -> list[Point]:
        """Return the points with the lowest guesses, of those that were fast in some source."""
        self._listed = [point for point in self._listed if is_open(point)]
        if not self._listed:
            return []
        order = self._np.argsort(self.guess(self._listed), kind="stable")[:many]
        return [self._listed[int(at)] for at in order]

    def representatives(self) -> list[Point]:
        """Return the points that are the fastest elsewhere, in sum, for some pair of values on two axes.

        They differ as the fastest ones do not: among the best ten of a device nine are often the same but for one axis,
        and where another region is faster here, none of them is in it.
        """
        known = list(dict.fromkeys(point for source in self._sources for point in source.known))
        if not known:
            return []
        order = self._np.argsort(self._there(known).sum(1), kind="stable")
        pairs = list(
            combinations([at for at, indices in enumerate(zip(*known, strict=True)) if len(set(indices)) > 1], 2)
        )
        best: dict[tuple[int, int, int, int], Point] = {}
        for number in order:
            point = known[int(number)]
            for one, other in pairs:
                best.setdefault((one, other, point[one], point[other]), point)
        return list(dict.fromkeys(best.values()))

    def differences(self) -> list[tuple[list[Point], Any]]:
        """Return how the sources differ from one another, where one of them is fast; of a single one, how it varies.

        As they differ, so may times here from the guess: along which axes, and over what distances.
        """
        pairs = list(combinations(self._sources, 2))
        if len(pairs) > _COMPARED:
            pairs = self._rng.sample(pairs, _COMPARED)
        fields = [one.less(other) for one, other in pairs] if pairs else [s.less(None) for s in self._sources]
        return [
            (chosen, self._np.array([field[point] for point in chosen]))
            for field in fields
            if len(chosen := self._rng.sample(list(field), min(_DIFFERING, len(field)))) >= _FEWEST
        ]

    def _there(self, points: Sequence[Point]) -> Any:
        missing = [point for point in dict.fromkeys(points) if point not in self._rows]
        if missing:
            columns = [source.times(missing) for source in self._sources]
            self._rows.update(zip(missing, zip(*columns, strict=True), strict=True))
        return self._np.array([self._rows[point] for point in points])


def _times(space: Space, observations: Iterable[Observation]) -> dict[Point, float]:
    """Return logarithms of times by point; infinite where it failed."""
    found: dict[Point, float] = {}
    for config, seconds in observations:
        point = space.point(config)
        if point is not None:
            valid = seconds is not None and math.isfinite(seconds) and seconds > 0
            found[point] = math.log(seconds) if valid and seconds is not None else math.inf
    return found


class _PriorSource:
    """One device or problem: logarithms of times there, 0 for the median; all that is bad is alike."""

    def __init__(self, space: Space, times: dict[Point, float], rng: random.Random) -> None:
        self._np = np = load_numpy()
        self._axes, self._rng = space.grid, rng
        self._model: TimeModel | None = None
        worked = sorted(value for value in times.values() if math.isfinite(value))
        middle = worked[len(worked) // 2]
        bad = middle + (middle - worked[0]) / 2
        self._known = {point: min(value, bad) - middle for point, value in times.items()}
        ranked = sorted(self._known, key=lambda point: times[point])
        self.fastest: Final = ranked[: min(_LISTED, len(worked))]
        self._ranked: Final = ranked
        self._values = np.array([self._known[point] for point in ranked])
        self.spread: Final = float(self._values.std())

    @property
    def known(self) -> Iterable[Point]:
        """The points that were measured."""
        return self._known

    def less(self, other: _PriorSource | None) -> dict[Point, float]:
        """Return by how much times are above another's, in the faster half of the points that both know."""
        theirs = dict.fromkeys(self._known, 0.0) if other is None else other._known  # noqa: SLF001 - of its own kind
        both = {point: time - theirs[point] for point, time in self._known.items() if point in theirs}
        faster = sorted(both, key=lambda point: min(self._known[point], theirs[point]))[: len(both) // 2]
        return {point: both[point] for point in faster}

    def times(self, points: Sequence[Point]) -> list[float]:
        """Return what is known of points, and a guess where nothing is."""
        unknown = [point for point in points if point not in self._known]
        guessed = dict(zip(unknown, self._guessed(unknown), strict=True)) if unknown else {}
        return [self._known[point] if point in self._known else guessed[point] for point in points]

    def _guessed(self, points: Sequence[Point]) -> list[float]:
        if self._model is None:
            half = _FITTED // 2
            every = range(len(self._ranked))
            chosen = every if len(every) <= _FITTED else [*every[:half], *self._rng.sample(every[half:], half)]
            fitted, values = [self._ranked[at] for at in chosen], self._values[list(chosen)]
            self._offset, self._scale = float(values.mean()), float(values.std()) + 1e-9
            self._model = TimeModel(self._axes, self._rng)
            self._model.rescale(fitted, (values - self._offset) / self._scale)
            self._model.fit(fitted, (values - self._offset) / self._scale)
        means, _ = self._model.predict(points)
        guessed: list[float] = (self._offset + self._scale * means).tolist()
        return guessed
