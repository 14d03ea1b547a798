"""A model of times over a space: a Gaussian process that finds out by itself how much each axis matters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tunebook._errors import MissingDependency

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from tunebook._axes import Axis
    from tunebook._space import Point

# The part of the variance of standardised times that no model explains.
_NOISE: Final = 0.01
# The part of the variance that is a sum over the axes, each for itself, and of that, the part in which a value tells
# nothing about the next one. With few times known, a sum is learnt much sooner than how axes act on each other; and a
# block of 17 is not like one of 16. On made-up spaces and a matmul, half and half scored 0.74, and no sum 0.67.
_SUMMED: Final = 0.5
_BY_ITSELF: Final = 0.5
_ALIKE: Final = 0.5  # the distance over which values are alike in the sum; an axis is of length 1
# How many points the scales of the axes are found from: the cost grows with the cube.
_SCALED_FROM: Final = 96


def load_numpy() -> Any:
    """Return numpy, which models need and the rest of tunebook does not."""
    try:
        import numpy  # noqa: PLC0415, ICN001 - optional, and 100 ms
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise MissingDependency(
            "a search that is guided by a model needs 'numpy', which is not installed. Run: pip install numpy, "
            "or ask for strategy='local', which needs nothing"
        ) from None
    return numpy


class Model:
    """Predicts standardised times, and how sure that is, from points whose times are known."""

    def __init__(self, axes: Sequence[Axis], rng: random.Random) -> None:
        self._np = np = load_numpy()
        self._rng = rng
        used = [(at, axis.positions()) for at, axis in enumerate(axes) if len(axis.values) > 1]
        # Of how round sizes are, as of one more axis. On recorded spaces, ranks of the faster half correlate by 0.65
        # with what 60 random times predict, instead of 0.62.
        used += [(at, round_) for at, axis in enumerate(axes) if (round_ := axis.roundness()) is not None]
        self._used = [at for at, _ in used]
        self._tables = [np.array(table) * np.sqrt(2.0) for _, table in used]
        self._effects = [_effect(np, table) / np.sqrt(len(self._used)) for table in self._tables]
        # In so many dimensions points are so far apart; nothing else is known about the scales before there are times.
        self._usual = 0.5 * np.sqrt(max(len(self._used), 1))
        self._scales = np.full(len(self._used), self._usual)

    def fit(self, points: Sequence[Point], times: Any) -> None:
        """Learn times, which have mean 0 and variance 1."""
        np = self._np
        self._known = self._features(points), self._summed(points)
        kernel = self._kernel(self._known, self._known)
        kernel[np.diag_indices(len(points))] += _NOISE
        self._inverse = np.linalg.inv(kernel)
        self._weights = self._inverse @ times

    def predict(self, points: Sequence[Point]) -> tuple[Any, Any]:
        """Return means and standard deviations."""
        np = self._np
        near = self._kernel((self._features(points), self._summed(points)), self._known)
        variance = 1 + _NOISE - ((near @ self._inverse) * near).sum(1)
        return near @ self._weights, np.sqrt(np.maximum(variance, 1e-9))

    def middle(self, points: Sequence[Point]) -> Point:
        """Return the point that is nearest to the mean of some."""
        features = self._features(points)
        return points[int(self._np.argmin(((features - features.mean(0)) ** 2).sum(1)))]

    def rescale(self, points: Sequence[Point], times: Any) -> None:
        """Find for each axis over what distance times stay alike, by what makes the known ones most likely."""
        np = self._np
        chosen = self._to_scale_from(times)
        times = times[chosen]
        times = (times - times.mean()) / (times.std() + 1e-9)
        fitted = [points[int(i)] for i in chosen]
        apart, summed = self._apart(fitted), self._summed(fitted)
        summed = _SUMMED * summed @ summed.T

        def likelihood(scales: Any) -> float:
            kernel = (1 - _SUMMED) * _matern(np, np.tensordot(1 / scales**2, apart, 1)) + summed
            kernel[np.diag_indices(len(chosen))] += _NOISE
            try:
                root = np.linalg.cholesky(kernel)
            except np.linalg.LinAlgError:
                return float("-inf")
            residual = np.linalg.solve(root, times)
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

    def _to_scale_from(self, times: Any) -> Any:
        np = self._np
        if len(times) <= _SCALED_FROM:
            return np.arange(len(times))
        fastest = np.argsort(times, kind="stable")[: _SCALED_FROM // 2]
        others = self._rng.sample(range(len(times)), _SCALED_FROM // 2)
        return np.unique(np.concatenate([fastest, others]))

    def _features(self, points: Sequence[Point]) -> Any:
        np = self._np
        at = np.array(points, dtype=np.intp)
        columns = zip(self._tables, self._used, self._scales, strict=True)
        return np.concatenate([table[at[:, axis]] / scale for table, axis, scale in columns], 1)

    def _summed(self, points: Sequence[Point]) -> Any:
        """Return vectors whose products are how alike points are, summed over the axes."""
        at = self._np.array(points, dtype=self._np.intp)
        effects = zip(self._effects, self._used, strict=True)
        return self._np.concatenate([table[at[:, axis]] for table, axis in effects], 1)

    def _apart(self, points: Sequence[Point]) -> Any:
        """Return the squared distances of all pairs, axis by axis."""
        np = self._np
        at = np.array(points, dtype=np.intp)
        places = [table[at[:, axis]] for table, axis in zip(self._tables, self._used, strict=True)]
        return np.stack([((place[:, None] - place[None]) ** 2).sum(2) for place in places])

    def _kernel(self, ours: tuple[Any, Any], theirs: tuple[Any, Any]) -> Any:
        np = self._np
        (near, summed), (other_near, other_summed) = ours, theirs
        squared = (near * near).sum(1)[:, None] + (other_near * other_near).sum(1)[None] - 2 * near @ other_near.T
        return (1 - _SUMMED) * _matern(np, squared) + _SUMMED * summed @ other_summed.T


def _effect(np: Any, table: Any) -> Any:
    """Return a vector for each value of an axis, whose products are how alike the values are."""
    squared = ((table[:, None] - table[None]) ** 2).sum(2) / (2 * _ALIKE**2)
    alike = (1 - _BY_ITSELF) * _matern(np, squared) + _BY_ITSELF * (squared == 0)
    return np.linalg.cholesky(alike + 1e-9 * np.eye(len(table)))  # values may be at the same place


def _matern(np: Any, squared: Any) -> Any:
    """Matern 3/2: times over tile sizes have kinks, which smoother kernels ring at."""
    distance = np.sqrt(np.maximum(squared, 0.0) * 3)
    return (1 + distance) * np.exp(-distance)
