"""A search that is guided by a model: it proposes what is likely to be fast, near the best and anywhere."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, Final, cast

from tunebook.search._local import Walker
from tunebook.search._model import TimeModel, load_numpy
from tunebook.search._prior import Prior
from tunebook.search._trial_history import STRAIGHT, Ledger, Start

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tunebook._space.space import Config, Point, Space
    from tunebook.search._protocol import Observation

# Points before the model is asked. Few: where a run costs seconds, eight may be all there is time for. The first is the
# one that is nearest to the middle of some random ones: what is extreme on an axis can be 100 times slower than the
# best, and cost the time of ten others. Of those, it is one of the so many with most powers of two: these divide most
# problems without a rest. Of a filter on a W6600, half of those with nothing else are 3 times slower than the best, and
# half of all are 32 times slower; on NVIDIA's GPUs it makes little difference. The second is one of them too, and
# differs from the first on as many axes as can be.
_BLIND: Final = 2
_ROUNDEST: Final = 8
# Neighbours of so many of the fastest are candidates; with one alone a search stays in its valley. Where more are as
# good as the fastest, in logarithms, they take turns.
_TOP: Final = 3
_AS_GOOD: Final = 0.01
_TAKING_TURNS: Final = 40
# One turn in so many looks everywhere instead: random points, and uphill from the most promising one.
_EVERYWHERE: Final = 3
# One turn in so many is a walk's that asks no model: where the model is wrong, that still gets on.
_STEP: Final = 4
# Every second turn launches a program that is compiled already in another way: one of the so many fastest.
_RELAUNCHED: Final = 10
_ANYWHERE: Final = 60
# Before so many times are known, every turn looks near and everywhere, and none walks: what is near two random points
# is no better, and what a model would not choose can cost as much as all that it does.
_EARLY: Final = 30
_CLIMBS: Final = 3
# A launch of what is compiled is worth a try if it may be faster than the fastest by so many standard deviations.
_HOPE: Final = 1.5
# Below so many standard deviations, the expected improvement is computed by its limit, a tenth too large there: it is
# lost in rounding else.
_TAIL: Final = -5.0
# The model is fitted to at most so many points. When there are more, it goes on from so many of them, half of them the
# fastest, and of those that failed at most so many.
_FITTED: Final = 600
_KEPT: Final = 450
_FAILURES: Final = 60
# After so many observations, one more proposal is made of each fit: the model changes little then, and a proposal must
# stay far below a millisecond.
_PER_FIT: Final = 80
_FIRST_SCALING: Final = 8
# So many of the fastest of each source are tried first: the next ones are much like them, and each is a run that the
# model could choose better by then.
_FROM_EACH: Final = 2
# So many that were fast elsewhere are candidates, beside the neighbours of what is fast here.
_PROMISING: Final = 20
# A look everywhere is at so many of those that represent all regions elsewhere, and at so many random points.
_REPRESENTING: Final = 60
_BESIDE_THEM: Final = 20
# Times here are taken to vary at least by this part of how they vary elsewhere: the first ones, all of them good
# elsewhere, are often alike, and say little about the others.
_VARY: Final = 0.25


class Guided:
    """Proposes by a Gaussian process over the logarithm of times; needs numpy.

    Times far above the median all count alike, and so do failures: the model need not tell apart what is bad. Where
    times elsewhere are known, it models how times here differ from what those make it guess.
    """

    def __init__(self, space: Space, *, seed: int = 0, start: Start = Start()) -> None:  # noqa: B008 - immutable
        self._np = load_numpy()
        # With times elsewhere, the model itself finds what else was fast there, and says when that is no use here.
        straight = min(_FROM_EACH * len(start.elsewhere), STRAIGHT)
        first = start.first[:straight] if start.elsewhere else start.first
        self._ledger = Ledger(space, seed, start._replace(first=first))
        self._model = TimeModel(self._ledger.axes, self._ledger.rng)
        self._prior = Prior(space, start.elsewhere, self._ledger.rng)
        self._model.expect(self._prior.differences())
        self._representing = self._prior.representatives()
        self._fitted: list[Point] = []
        self._offset, self._scale = 0.0, 1.0
        self._walker = Walker(self._ledger, beginnings=0)
        self._walked: set[Point] = set()
        self._queue: list[Point] = []
        self._turn = 0
        self._compiling = False
        self._next_scaling = _FIRST_SCALING

    def propose(self, n: int) -> list[Config]:
        """Return the next configurations."""
        return self._ledger.hand_out(n, lambda: self._next(n))

    def observe(self, observations: Iterable[Observation]) -> None:
        """Learn from what came of configurations."""
        noted = self._ledger.note(observations)
        self._fitted += noted
        self._walker.learn(point for point in noted if point in self._walked)
        if noted and len(self._ledger.values) < _PER_FIT:
            self._queue.clear()  # early on, every time changes what is worth a try

    def _next(self, n: int) -> Point | None:
        while self._queue:
            point = self._queue.pop(0)
            if self._ledger.is_open(point):
                return point
        if not self._ledger.ranked or (len(self._ledger.taken) < _BLIND and not self._prior):
            return self._blind()
        self._queue = self._promising(max(1 + len(self._ledger.values) // _PER_FIT, -(-n // _EVERYWHERE)))
        return self._queue.pop(0) if self._queue else self._ledger.random_point()

    def _blind(self) -> Point | None:
        """Return a point to begin with: what is guessed to be fast, else a round one, in the middle or far from it."""
        if guessed := self._prior.promising(1, self._ledger.is_open):
            return guessed[0]
        drawn = self._drawn() if len(self._ledger.taken) < _BLIND else []
        if not drawn:
            return self._ledger.random_point()
        round_ = self._roundest(drawn)
        if not self._ledger.taken:
            return self._model.middle(round_)
        return max(round_, key=lambda point: min(_apart(point, known) for known in self._ledger.taken))

    def _roundest(self, points: list[Point]) -> list[Point]:
        """Return the points with most powers of two, and those that have as many as the last of them."""
        powers = [(at, flags) for at, axis in enumerate(self._ledger.axes) if (flags := axis.powers_of_two())]
        counts = [sum(flags[point[at]] for at, flags in powers) for point in points]
        least = sorted(counts, reverse=True)[:_ROUNDEST][-1]
        return [point for point, count in zip(points, counts, strict=True) if count >= least]

    def _promising(self, many: int) -> list[Point]:
        """Fit the model, and return what it thinks best of some open points."""
        self._compiling = not self._compiling
        if not self._compiling and (launches := self._relaunches()):
            return launches[:many]
        self._turn += 1
        early = len(self._ledger.values) < _EARLY
        if not early and self._turn % _STEP == 0:
            point = self._walker.next()
            if point is not None:
                self._walked.add(point)
                return [point]
        pool: list[Point] = []
        if early or self._turn % _EVERYWHERE:
            near = [p for point in self._tops() for p in self._ledger.changed(point)]
            near += self._prior.promising(_PROMISING, self._ledger.is_open)
            near += self._anywhere() if early else []
            pool = list(dict.fromkeys(near))
        drawn = [] if pool else self._anywhere()
        if not pool and not drawn:
            return []
        self._fit()
        pool, worths = (pool, self._worths(pool)) if pool else self._climbed(drawn)
        order = sorted(range(len(pool)), key=worths.__getitem__, reverse=True)
        return [pool[i] for i in order[:many]]

    def _relaunches(self) -> list[Point]:
        """Return what may be faster than the fastest and costs no compiling, the most promising first."""
        tops = [point for _, point in self._ledger.ranked[:_RELAUNCHED]]
        pool = list(dict.fromkeys(p for point in tops for p in self._ledger.relaunched(point)))
        if not pool:
            return []
        self._fit()
        times, deviations = self._guessed([tops[0], *pool])
        fastest, *hopes = (times - _HOPE * deviations).tolist()
        return [point for hope, point in sorted(zip(hopes, pool, strict=True)) if hope < fastest]

    def _tops(self) -> list[Point]:
        """Return some of the fastest points: the first, and of those that are as good any."""
        (best, _), *others = ranked = self._ledger.ranked[:_TAKING_TURNS]
        as_good = sum(value <= best + _AS_GOOD for value, _ in others)
        chosen = ranked[:_TOP] if as_good < _TOP else [ranked[0], *self._ledger.rng.sample(others[:as_good], _TOP - 1)]
        return [point for _, point in chosen]

    def _anywhere(self) -> list[Point]:
        """Return random open points, most of them the best elsewhere of their region, as far as that is known."""
        self._representing = [point for point in self._representing if self._ledger.is_open(point)]
        if not self._representing:
            return self._drawn()
        many = min(_REPRESENTING, len(self._representing))
        chosen = self._ledger.rng.sample(self._representing, many)
        return list(dict.fromkeys([*chosen, *self._drawn()[:_BESIDE_THEM]]))

    def _drawn(self) -> list[Point]:
        """Return random open points."""
        drawn = (self._ledger.space.sample(self._ledger.rng) for _ in range(_ANYWHERE))
        points = (None if config is None else self._ledger.space.point(config) for config in drawn)
        return list(dict.fromkeys(p for p in points if p is not None and self._ledger.is_open(p)))

    def _climbed(self, pool: list[Point]) -> tuple[list[Point], list[float]]:
        """Return some points with what a try is worth, and those around the most promising one too."""
        worths = self._worths(pool)
        for _ in range(_CLIMBS):
            best = max(range(len(pool)), key=worths.__getitem__)
            near = [p for p in self._ledger.changed(pool[best]) if p not in pool]
            if not near:
                break
            more = self._worths(near)
            better = max(more) > worths[best]
            pool, worths = pool + near, worths + more
            if not better:
                break
        return pool, worths

    def _worths(self, points: list[Point]) -> list[float]:
        """Return by how much each is expected to improve on the fastest; in logarithms, and so for the hopeless too."""
        np = self._np
        times, deviations = self._guessed(points)
        gaps = (self._ledger.ranked[0][0] - times) / deviations
        density = np.exp(-gaps * gaps / 2) / math.sqrt(2 * math.pi)
        below = np.array([math.erfc(-gap / math.sqrt(2)) / 2 for gap in gaps.tolist()])
        tail = -gaps * gaps / 2 - math.log(math.sqrt(2 * math.pi)) - 2 * np.log(np.maximum(-gaps, 1.0))
        improvements = np.where(gaps > _TAIL, np.log(np.maximum(gaps * below + density, 1e-12)), tail)
        return cast("list[float]", (improvements + np.log(deviations)).tolist())

    def _guessed(self, points: list[Point]) -> tuple[Any, Any]:
        """Return logarithms of times, and how uncertain they are."""
        means, deviations = self._model.predict(points)
        return self._offset + self._prior.guess(points) + self._scale * means, self._scale * deviations

    def _fit(self) -> None:
        if len(self._fitted) > _FITTED:
            self._fitted = self._kept()
        points = self._fitted
        times = self._to_explain([self._ledger.values[point] for point in points], points)
        if len(self._ledger.values) >= self._next_scaling:
            self._model.rescale(points, times)
            self._next_scaling = 2 * len(self._ledger.values)
        self._model.fit(points, times)

    def _kept(self) -> list[Point]:
        """Return some of the points whose times are known: the fastest, some others, and the last that failed."""
        failed = self._ledger.failed[-_FAILURES:]
        half = (_KEPT - len(failed)) // 2
        worked = [point for _, point in self._ledger.ranked]
        others = worked[half:]
        return [*worked[:half], *self._ledger.rng.sample(others, min(half, len(others))), *failed]

    def _to_explain(self, values: list[float], points: list[Point]) -> Any:
        """Return what is left of times after the guess from elsewhere, with mean 0 and variance 1."""
        ranked = self._ledger.ranked
        median = ranked[len(ranked) // 2][0]
        bad = median + (median - ranked[0][0]) / 2
        times = self._np.array([min(value, bad) for value in values])
        self._prior.learn(points, times)
        times = times - self._prior.guess(points)
        self._offset = float(times.mean())
        self._scale = max(float(times.std()), _VARY * self._prior.spread) + 1e-9
        return (times - self._offset) / self._scale


def _apart(one: Point, other: Point) -> int:
    """Return on how many axes two points differ."""
    return sum(map(operator.ne, one, other))
