"""Times elsewhere as a prediction of times here, from which the model of a search starts."""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final

from tunebook.search._model import TimeModel, load_numpy
from tunebook.search._trial_history import log_of

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Sequence

    from tunebook._space.space import Point, Space
    from tunebook.search._protocol import Observation

# The belief that every source is worth the same counts as much as this many times measured here. Few: where sources
# disagree, a search that held on to them found less than one that knew nothing.
_BELIEF: Final = 0.5
# Points that a source did not measure are predicted from this many of its points, half of them the fastest.
_FITTED: Final = 200
# This many of the fastest points of a source may be proposed for it.
_LISTED: Final = 200
# How sources differ is learnt from this many pairs of them, each at this many points; below a minimum it tells nothing.
_COMPARED: Final = 4
_DIFFERING: Final = 96
_FEWEST: Final = 8


class Prior:
    """Predicts times here as a weighted sum of the logarithms of times elsewhere; the weights are learnt."""

    def __init__(self, space: Space, elsewhere: Iterable[Sequence[Observation]], rng: random.Random) -> None:
        self._np = np = load_numpy()
        self._rng = rng
        tables = [
            {point: log_of(seconds) for config, seconds in source if (point := space.point(config)) is not None}
            for source in elsewhere
        ]
        self._sources = [_PriorSource(space, table, rng) for table in tables if any(map(math.isfinite, table.values()))]
        self._weights = np.full(len(self._sources), 1 / max(len(self._sources), 1))
        self._rows: dict[Point, tuple[float, ...]] = {}
        self._listed = list(dict.fromkeys(point for source in self._sources for point in source.fastest))
        self.spread: Final = float(np.mean([source.spread for source in self._sources])) if self._sources else 0.0

    def __bool__(self) -> bool:
        return bool(self._sources)

    def learn(self, points: Sequence[Point], logs: Any) -> None:
        """Fit the weight of each source to times of here by least squares; a source that misleads gets 0."""
        if not self._sources:
            return
        np, many = self._np, len(self._sources)
        there = self._times_elsewhere(points)
        there, here = there - there.mean(0), logs - logs.mean()
        belief = _BELIEF * self.spread**2 + 1e-12
        left = there.T @ there + belief * np.eye(many)
        self._weights = np.maximum(np.linalg.solve(left, there.T @ here + belief / many), 0.0)

    def predict(self, points: Sequence[Point]) -> Any:
        """Return predicted logarithms of times, up to a constant; 0 is the usual time."""
        return self._times_elsewhere(points) @ self._weights if self._sources else 0.0

    def promising(self, many: int, is_open: Callable[[Point], bool]) -> list[Point]:
        """Return the points with the lowest predictions, among the points that were fast in some source."""
        self._listed = [point for point in self._listed if is_open(point)]
        if not self._listed:
            return []
        order = self._np.argsort(self.predict(self._listed), kind="stable")[:many]
        return [self._listed[int(at)] for at in order]

    def representatives(self) -> list[Point]:
        """Return the points that are the fastest elsewhere, in sum, for some pair of values on two axes.

        They differ more than the fastest points do: among the best ten of a device nine are often the same but for one
        axis, and none of them is in the region that is faster here.
        """
        known = list(dict.fromkeys(point for source in self._sources for point in source.known))
        if not known:
            return []
        order = self._np.argsort(self._times_elsewhere(known).sum(1), kind="stable")
        varied = [at for at, indices in enumerate(zip(*known, strict=True)) if len(set(indices)) > 1]
        pairs = list(combinations(varied, 2))
        best: dict[tuple[int, int, int, int], Point] = {}
        for number in order:
            point = known[int(number)]
            for one, other in pairs:
                best.setdefault((one, other, point[one], point[other]), point)
        return list(dict.fromkeys(best.values()))

    def differences(self) -> list[tuple[list[Point], Any]]:
        """Return how sources differ from one another at points where one is fast; for a single source, how it varies.

        Differences between sources show along which axes, and over which distances, times here may differ from the
        prediction.
        """
        pairs = list(combinations(self._sources, 2))
        if len(pairs) > _COMPARED:
            pairs = self._rng.sample(pairs, _COMPARED)
        fields = [one.minus(other) for one, other in pairs] if pairs else [s.minus(None) for s in self._sources]
        return [
            (chosen, self._np.array([field[point] for point in chosen]))
            for field in fields
            if len(chosen := self._rng.sample(list(field), min(_DIFFERING, len(field)))) >= _FEWEST
        ]

    def _times_elsewhere(self, points: Sequence[Point]) -> Any:
        missing = [point for point in dict.fromkeys(points) if point not in self._rows]
        if missing:
            columns = [source.times(missing) for source in self._sources]
            self._rows.update(zip(missing, zip(*columns, strict=True), strict=True))
        return self._np.array([self._rows[point] for point in points])


class _PriorSource:
    """One device or problem: logarithms of times there, 0 for the median; all bad times are alike."""

    def __init__(self, space: Space, times: dict[Point, float], rng: random.Random) -> None:
        self._axes, self._rng = space.grid, rng
        self._model: TimeModel | None = None
        worked = sorted(value for value in times.values() if math.isfinite(value))
        middle = worked[len(worked) // 2]
        bad = middle + (middle - worked[0]) / 2
        self.known: Final = {point: min(value, bad) - middle for point, value in times.items()}
        self._ranked: Final = sorted(self.known, key=lambda point: times[point])
        self.fastest: Final = self._ranked[: min(_LISTED, len(worked))]
        self._values = load_numpy().array([self.known[point] for point in self._ranked])
        self.spread: Final = float(self._values.std())

    def minus(self, other: _PriorSource | None) -> dict[Point, float]:
        """Return by how much times are above another source's, in the faster half of the points that both know."""
        theirs = dict.fromkeys(self.known, 0.0) if other is None else other.known
        both = {point: time - theirs[point] for point, time in self.known.items() if point in theirs}
        faster = sorted(both, key=lambda point: min(self.known[point], theirs[point]))[: len(both) // 2]
        return {point: both[point] for point in faster}

    def times(self, points: Sequence[Point]) -> list[float]:
        """Return the known times of points, and predictions for the others."""
        unknown = [point for point in points if point not in self.known]
        predicted = dict(zip(unknown, self._predict(unknown), strict=True)) if unknown else {}
        return [self.known[point] if point in self.known else predicted[point] for point in points]

    def _predict(self, points: Sequence[Point]) -> list[float]:
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
        predicted: list[float] = (self._offset + self._scale * means).tolist()
        return predicted
