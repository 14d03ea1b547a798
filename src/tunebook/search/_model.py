"""Models of times over a space, which need numpy.

`TimeModel` is a Gaussian process that learns how much each axis matters. `Prior` predicts times here from times
elsewhere, for the model of a search to start from.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final

from tunebook._base.errors import require
from tunebook.search._small_products import inverse, product, solve_lower
from tunebook.search._strategy import log_of, size_pairs

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Sequence

    from tunebook._space.axis import Axis
    from tunebook._space.space import Point, Space
    from tunebook.search._strategy import Observation

# The part of the variance of standardised times that no model explains.
_NOISE: Final = 0.01
_ROOM: Final = 64  # more times than are known fit into the arrays of a model, and so do twice as many
# The part of the variance that is a sum over single axes, and of that sum, the part in which a value tells nothing
# about the next value. With few times known, a sum is learnt much sooner than how axes act on each other; and a block
# of 17 is not like a block of 16. On made-up spaces and a matmul, half and half scored 0.74, and no sum 0.67.
_SUMMED: Final = 0.5
_BY_ITSELF: Final = 0.5
_ALIKE: Final = 0.5  # the distance over which values are alike in the sum; an axis is of length 1
# Components of a product's similarity below this part of all are left out: a few numbers are enough for each.
_SMALL_PART: Final = 0.002
_NARROW: Final = 4  # coordinates of a value, but for categories, which have one each
_PLACES: Final = 512  # for products on a line of length 1: closer ones are as good as equal
# How often scales are adjusted to times elsewhere: each time a scale at most doubles, or halves.
_ROUNDS: Final = 4
# How many points the scales of the axes are found from: the cost grows with the cube.
_SCALED_FROM: Final = 96
# The belief that every source is worth the same counts as much as this many times measured here. Few: where sources
# disagree, a search that held on to them found less than one that knew nothing.
_BELIEF: Final = 0.5
# Points whose times in a source vary by less than this part of all times there are alike.
_ALIKE_TIMES: Final = 0.5
# Points that a source did not measure are predicted from this many of its points, half of them the fastest.
_FITTED: Final = 200
# This many of the fastest points of a source may be proposed for it.
_LISTED: Final = 200
# How sources differ is learnt from this many pairs of them, each at this many points; below a minimum it tells nothing.
_COMPARED: Final = 4
_DIFFERING: Final = 96
_FEWEST: Final = 8
# Below this many standard deviations, the expected improvement is lost in rounding. Its limit, which is a tenth too
# large there, is used instead.
_TAIL: Final = -5.0


def load_numpy() -> Any:
    """Return numpy, which models need and the rest of tunebook does not."""
    return require("numpy", feature="a search guided by a model, unlike strategy='local',")


def log_improvements(np: Any, best: float, times: Any, deviations: Any) -> Any:
    """Return the logarithms of the expected improvements on the best time; finite for hopeless predictions too."""
    gaps = (best - times) / deviations
    density = np.exp(-gaps * gaps / 2) / math.sqrt(2 * math.pi)
    below = np.array([math.erfc(-gap / math.sqrt(2)) / 2 for gap in gaps.tolist()])
    tail = -gaps * gaps / 2 - math.log(math.sqrt(2 * math.pi)) - 2 * np.log(np.maximum(-gaps, 1.0))
    improvements = np.where(gaps > _TAIL, np.log(np.maximum(gaps * below + density, 1e-12)), tail)
    return improvements + np.log(deviations)


class TimeModel:
    """Predicts standardised times, with their uncertainty, from points with known times."""

    def __init__(self, axes: Sequence[Axis], rng: random.Random) -> None:
        self._np = np = load_numpy()
        self._rng = rng
        self._products = [(one, other, len(axes[other].values)) for one, other in size_pairs(axes)]
        used = [(at, axis.positions()) for at, axis in enumerate(axes) if len(axis.values) > 1]
        # The roundness of sizes, and the products of two sizes, count as further axes. On 27 recorded spaces, ranks of
        # the faster half correlate with the prediction from 60 random times by 0.57 without both, 0.60 with roundness
        # and 0.62 with both.
        used += [(at, round_) for at, axis in enumerate(axes) if (round_ := axis.roundness()) is not None]
        tables = [(at, np.array(table) * np.sqrt(2.0)) for at, table in used]
        positions = [product_positions(axes[one], axes[other]) for one, other, _ in self._products]
        multiplied = [np.array(each).reshape(-1, 1) * np.sqrt(2.0) for each in positions]
        tables += [(len(axes) + number, table) for number, table in enumerate(multiplied)]
        self._places = _Columns(np, tables)
        sizes = [number for number, (at, _) in enumerate(tables) if at >= len(axes) or axes[at].kind == "log"]
        self._of_sizes = np.isin(self._places.table, sizes)
        effects = [_axis_effect(np, table) for _, table in tables[: len(used)]]
        effects += [_product_effect(np, table) for table in multiplied]
        share = np.sqrt(max(len(tables), 1))
        summed = np.sqrt(_SUMMED) / share
        self._effects = _Columns(np, [(at, e * summed) for (at, _), e in zip(tables, effects, strict=True)])
        # Points are this far apart in that many dimensions; before any times, nothing else is known about scales.
        self._usual = np.full(len(tables), 0.5 * share)
        self._scales = self._usual
        self._fitted: list[Point] = []
        self._room: Any = None  # the inverse grows inside of it
        self._inverse: Any = None

    def fit(self, points: Sequence[Point], times: Any) -> None:
        """Learn times, which have mean 0 and variance 1; quick if the points begin with the points of the last fit."""
        np, known = self._np, len(self._fitted)
        if 0 < known <= len(points) and self._fitted == points[:known]:
            self._extend(points[known:])
        else:
            self._known = self._features(points)
            self._keep(inverse(np, self._with_noise(self._kernel(self._known, self._known))))
        self._fitted = list(points)
        self._weights = self._inverse @ times
        self._single = *_single(np, (self._inverse, self._weights)), _single(np, self._known)

    def predict(self, points: Sequence[Point]) -> tuple[Any, Any]:
        """Return means and standard deviations."""
        np = self._np
        # In single precision, which takes half the time. Times are not known to four digits.
        inverted, weights, known = self._single
        near = self._kernel(_single(np, self._features(points)), known)
        variance = 1 + _NOISE - np.einsum("ij,ij->i", product(np, near, inverted), near).astype(float)
        return (near @ weights).astype(float), np.sqrt(np.maximum(variance, 1e-9))

    def surprise(self) -> float:
        """Return how far off predictions of known times are, each from all others, in their standard deviations."""
        np = self._np
        return float(np.sqrt((self._weights**2 / np.diag(self._inverse)).mean()))

    def middle(self, points: Sequence[Point]) -> Point:
        """Return the point whose sizes are nearest to their mean; any point, if no axis is a size."""
        places = self._places.of(self._codes(points))[:, self._of_sizes]
        return points[int(self._np.argmin(((places - places.mean(0)) ** 2).sum(1)))]

    def rescale(self, points: Sequence[Point], times: Any) -> None:
        """Find for each axis the distance over which times stay alike: the scales that make known times most likely."""
        np = self._np
        chosen = self._scaling_sample(times)
        times = times[chosen]
        times = (times - times.mean()) / (times.std() + 1e-9)
        codes = self._codes([points[int(i)] for i in chosen])
        apart, summed = self._places.apart(codes), self._effects.of(codes)
        summed = product(np, summed, summed.T)

        def likelihood(scales: Any) -> float:
            kernel = _matern(np, np.tensordot(1 / scales**2, apart, 1))
            kernel *= 1 - _SUMMED
            kernel += summed
            self._with_noise(kernel)
            try:
                root = np.linalg.cholesky(kernel)
            except np.linalg.LinAlgError:
                return float("-inf")
            residual = solve_lower(np, root, times)
            far = 0.25 * (np.log(scales / self._usual) ** 2).sum()  # few times say little, and must not say too much
            return float(-0.5 * residual @ residual - np.log(np.diag(root)).sum() - far)

        best, most = self._scales, likelihood(self._scales)
        turns: list[list[int]] = [list(range(len(best)))]
        turns += [[at] for at in self._rng.sample(range(len(best)), len(best))]
        for turn in turns:
            for factor in (0.5, 2.0):
                scales = best.copy()
                scales[turn] *= factor
                if (value := likelihood(scales)) > most:
                    best, most = scales, value
                    break
        self._scales = best
        self._fitted = []

    def set_usual_scales(self, fields: Sequence[tuple[Sequence[Point], Any]]) -> None:
        """Start from the scales of other times: each field is points with their values."""
        for number in range(_ROUNDS if fields else 0):
            self.rescale(*fields[number % len(fields)])
        self._usual = self._scales

    def _extend(self, points: Sequence[Point]) -> None:
        """Add points to the kernel's inverse in quadratic time; inverting it again takes cubic time."""
        if not points:
            return
        np, old, known = self._np, self._inverse, len(self._fitted)
        seen = self._features(points)
        both = self._kernel(self._known, seen)
        across = product(np, old, both)
        rest = self._with_noise(self._kernel(seen, seen)) - both.T @ across
        corner = np.linalg.inv((rest + rest.T) / 2)
        side = across @ corner
        old += product(np, side, across.T)
        if known + len(points) > len(self._room):
            self._keep(old)
        self._inverse = self._room[: known + len(points), : known + len(points)]
        self._inverse[:known, known:] = -side
        self._inverse[known:, :known] = -side.T
        self._inverse[known:, known:] = corner
        self._known = tuple(np.concatenate(parts) for parts in zip(self._known, seen, strict=True))

    def _keep(self, kept: Any) -> None:
        """Copy the inverse into a larger array, in which it grows in place: a new one for every time takes longer."""
        known = len(kept)
        self._room = self._np.empty((2 * known + _ROOM, 2 * known + _ROOM))
        self._inverse = self._room[:known, :known]
        self._inverse[:] = kept

    def _scaling_sample(self, times: Any) -> Any:
        np = self._np
        if len(times) <= _SCALED_FROM:
            return np.arange(len(times))
        fastest = np.argsort(times, kind="stable")[: _SCALED_FROM // 2]
        others = self._rng.sample(range(len(times)), _SCALED_FROM // 2)
        return np.unique(np.concatenate([fastest, others]))

    def _codes(self, points: Sequence[Point]) -> Any:
        """Return each point's row in every table: its index on every axis, and for every product."""
        np = self._np
        at = np.array(points, dtype=np.intp)
        codes = [at[:, one] * width + at[:, other] for one, other, width in self._products]
        return np.column_stack([at, *codes]) if codes else at

    def _features(self, points: Sequence[Point]) -> tuple[Any, ...]:
        """Return positions in units of the scales, and vectors whose inner products are the similarity of the sums."""
        codes = self._codes(points)
        near = self._places.of(codes) / self._scales[self._places.table]
        return near, self._np.einsum("ij,ij->i", near, near), self._effects.of(codes)

    def _kernel(self, ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> Any:
        (near, length, summed), (other_near, other_length, other_summed) = ours, theirs
        squared = product(self._np, near, -2 * other_near.T)
        squared += length[:, None]
        squared += other_length
        kernel = _matern(self._np, squared)
        kernel *= 1 - _SUMMED
        kernel += product(self._np, summed, other_summed.T)
        return kernel

    def _with_noise(self, kernel: Any) -> Any:
        kernel[self._np.diag_indices(len(kernel))] += _NOISE
        return kernel


class _Columns:
    """Tables with one vector per value of an axis, side by side: read all at once."""

    def __init__(self, np: Any, tables: Sequence[tuple[int, Any]]) -> None:
        self._np = np
        columns = [(number, at, column) for number, (at, table) in enumerate(tables) for column in table.T]
        self.table: Final = np.array([number for number, _, _ in columns], dtype=np.intp)
        self._at = np.array([at for _, at, _ in columns], dtype=np.intp)
        lengths = [len(column) for _, _, column in columns]
        self._start = np.cumsum([0, *lengths])[:-1].astype(np.intp)
        self._values = np.concatenate([column for _, _, column in columns]) if columns else np.zeros(0)

    def of(self, codes: Any) -> Any:
        """Return the vectors of points, given their rows in each table."""
        return self._values[codes[:, self._at] + self._start]

    def apart(self, codes: Any) -> Any:
        """Return the squared distances of all pairs, table by table."""
        np = self._np
        vectors = self.of(codes)
        squared = (vectors[:, None] - vectors[None]) ** 2
        starts = np.flatnonzero(np.diff(self.table, prepend=-1))
        return np.moveaxis(np.add.reduceat(squared, starts, axis=2), 2, 0)


def product_positions(one: Axis, other: Axis) -> list[float]:
    """Return the products of all pairs of sizes, by ratio, on a line of length 1."""
    logs = [[math.log(size / axis.values[0]) for size in axis.values] for axis in (one, other)]
    length = logs[0][-1] + logs[1][-1]
    return [round((a + b) / length, 9) for a in logs[0] for b in logs[1]]  # 2 x 64 and 4 x 32 are at the same place


def _similarity(np: Any, table: Any) -> Any:
    """Return how alike the values of an axis are, pair by pair."""
    return _matern(np, _squares(np, table) / (2 * _ALIKE**2))


def _squares(np: Any, table: Any) -> Any:
    """Return the squares of the distances of all pairs of rows."""
    if table.shape[1] <= _NARROW:
        return ((table[:, None] - table[None]) ** 2).sum(2)
    lengths = (table**2).sum(1)  # of 720 categories, the differences of all pairs would take 3 GB
    return np.maximum(lengths[:, None] + lengths - 2 * table @ table.T, 0.0)


def _axis_effect(np: Any, table: Any) -> Any:
    """Return a vector for each value of an axis, whose inner products are how alike the values are."""
    same = _squares(np, table) == 0.0
    alike = (1 - _BY_ITSELF) * _similarity(np, table) + _BY_ITSELF * same
    return np.linalg.cholesky(alike + 1e-9 * np.eye(len(table)))  # values may be at the same place


def _product_effect(np: Any, table: Any) -> Any:
    """Return the same for a product, as short as possible: neighbouring values always tell about each other."""
    places, which = table, np.arange(len(table))
    if len(table) > _PLACES:  # two axes of 60 values have 3600 products, which would take 25 s
        places, which = np.unique(np.round(table * _PLACES) / _PLACES, axis=0, return_inverse=True)
    parts, vectors = np.linalg.eigh(_similarity(np, places))
    kept = parts > _SMALL_PART * parts.sum()
    return (vectors[:, kept] * np.sqrt(parts[kept]))[which.reshape(-1)]


def _matern(np: Any, squared: Any) -> Any:
    """Return the Matern 3/2 kernel: times over tile sizes have kinks, which smoother kernels ring at.

    It is computed in the place of its argument: most of the time would go into new arrays.
    """
    np.maximum(squared, 0.0, out=squared)
    squared *= 3
    distance = np.sqrt(squared, out=squared)
    decay = np.exp(-distance)
    distance += 1
    distance *= decay
    return distance


def _single(np: Any, parts: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(part.astype(np.float32) for part in parts)


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

    def agreement(self, points: Sequence[Point], logs: Any) -> float:
        """Return how far times elsewhere rank points as times here do: 1 is as they do, and 0 or less not at all."""
        if not self._sources or len(points) < 2:
            return 0.0
        there, here = self._times_elsewhere(points).mean(1), logs - logs.mean()
        there = there - there.mean()
        return float(there @ here / math.sqrt((there @ there) * (here @ here) + 1e-12))

    def is_untested(self, points: Sequence[Point]) -> bool:
        """Whether points are alike in every source, so that their times here cannot show whether it misleads."""
        if not self._sources or not points:
            return False
        spreads = self._np.array([source.spread for source in self._sources])
        return bool((self._times_elsewhere(points).std(0) < _ALIKE_TIMES * spreads).all())

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
        """Return the points that are the fastest elsewhere, in sum, for some pair of values on two axes."""
        # They differ more than the fastest points do: among the best ten of a device nine are often the same but for
        # one axis, and none of them is in the region that is faster here.
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
        """Return how pairs of sources differ at points where one is fast; for a single source, how it varies."""
        # It shows along which axes, and over which distances, times here may differ from the prediction.
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
