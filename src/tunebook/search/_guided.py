"""A search that is guided by a model: it proposes what is likely to be fast, near the best and anywhere."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from tunebook.search._ledger import STRAIGHT, Ledger, Start
from tunebook.search._local import Walker
from tunebook.search._model import Model, load_numpy
from tunebook.search._prior import Prior

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tunebook._space import Config, Point, Space
    from tunebook.search._protocol import Observation

# Points before the model is asked. Few: where a run costs seconds, eight may be all there is time for. The first is the
# one of some random ones that is nearest to their middle: what is extreme on an axis can be 100 times slower than the
# best, and cost the time of ten others.
_BLIND: Final = 2
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
# Before so many times are known, every turn looks near and everywhere: what is near two random points is not better.
_EARLY: Final = 8
_CLIMBS: Final = 3
# How many standard deviations below its mean a time is hoped to be.
_HOPE: Final = 1.5
# The model is fitted to so many points, half of them the fastest: at 200 a fit takes 1.5 ms.
_FITTED: Final = 200
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
        self._model = Model(self._ledger.axes, self._ledger.rng)
        self._prior = Prior(space, start.elsewhere, self._ledger.rng)
        self._representing = self._prior.representatives()
        self._scale = 1.0
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
        """Return a point to begin with: what is guessed to be fast, else the middle, else any."""
        if guessed := self._prior.promising(1, self._ledger.is_open):
            return guessed[0]
        drawn = [] if self._ledger.taken else self._drawn()
        return self._model.middle(drawn) if len(drawn) > 1 else self._ledger.random_point()

    def _promising(self, many: int) -> list[Point]:
        """Fit the model, and return what it thinks best of some open points."""
        self._compiling = not self._compiling
        if not self._compiling and (launches := self._relaunches()):
            return launches[:many]
        self._turn += 1
        if self._turn % _STEP == 0:
            point = self._walker.next()
            if point is not None:
                self._walked.add(point)
                return [point]
        pool: list[Point] = []
        if self._turn % _EVERYWHERE:
            near = [p for point in self._tops() for p in self._ledger.changed(point)]
            near += self._prior.promising(_PROMISING, self._ledger.is_open)
            near += self._drawn() if len(self._ledger.values) < _EARLY else []
            pool = list(dict.fromkeys(near))
        drawn = [] if pool else self._anywhere()
        if not pool and not drawn:
            return []
        self._fit()
        pool, hopes = (pool, self._hopes(pool)) if pool else self._climbed(drawn)
        order = sorted(range(len(pool)), key=hopes.__getitem__)
        return [pool[i] for i in order[:many]]

    def _relaunches(self) -> list[Point]:
        """Return what may be faster than the fastest and costs no compiling, the most promising first."""
        tops = [point for _, point in self._ledger.ranked[:_RELAUNCHED]]
        pool = list(dict.fromkeys(p for point in tops for p in self._ledger.relaunched(point)))
        if not pool:
            return []
        self._fit()
        fastest, *hopes = self._hopes([tops[0], *pool])
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
        """Return some points with what the model hopes of them, and those around the most promising one too."""
        hopes = self._hopes(pool)
        for _ in range(_CLIMBS):
            best = min(range(len(pool)), key=hopes.__getitem__)
            near = [p for p in self._ledger.changed(pool[best]) if p not in pool]
            if not near:
                break
            more = self._hopes(near)
            better = min(more) < hopes[best]
            pool, hopes = pool + near, hopes + more
            if not better:
                break
        return pool, hopes

    def _hopes(self, points: list[Point]) -> list[float]:
        means, deviations = self._model.predict(points)
        hopes: list[float] = (self._prior.guess(points) + self._scale * (means - _HOPE * deviations)).tolist()
        return hopes

    def _fit(self) -> None:
        ranked, rng = self._ledger.ranked, self._ledger.rng
        failed = self._ledger.failed[-_FAILURES:]
        room = _FITTED - len(failed)
        chosen = ranked if len(ranked) <= room else [*ranked[: room // 2], *rng.sample(ranked[room // 2 :], room // 2)]
        points = [point for _, point in chosen] + failed
        times = self._to_explain([value for value, _ in chosen] + [math.inf] * len(failed), points)
        if len(self._ledger.values) >= self._next_scaling:
            self._model.rescale(points, times)
            self._next_scaling = 2 * len(self._ledger.values)
        self._model.fit(points, times)

    def _to_explain(self, values: list[float], points: list[Point]) -> Any:
        """Return what is left of times after the guess from elsewhere, with mean 0 and variance 1."""
        ranked = self._ledger.ranked
        median = ranked[len(ranked) // 2][0]
        bad = median + (median - ranked[0][0]) / 2
        times = self._np.array([min(value, bad) for value in values])
        self._prior.learn(points, times)
        times = times - self._prior.guess(points)
        self._scale = max(float(times.std()), _VARY * self._prior.spread) + 1e-9
        return (times - times.mean()) / self._scale
