"""A search that is guided by a model: it proposes points that are likely to be fast, near the best and anywhere."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, Final, cast

from tunebook.search._model import Prior, TimeModel, load_numpy, log_improvements
from tunebook.search._simple import Walker
from tunebook.search._strategy import STRAIGHT, Start, TrialHistory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tunebook._space.space import Config, Point, Space
    from tunebook.search._strategy import Observation

# Points before the model is asked. With two, the model knows nothing about the axes, and stays near the faster one,
# which made a search worse than random on spaces of two sizes and two methods. Each axis is cut into as many regions,
# and a point is drawn where the others are not, so that every region is as likely as in random search: points that
# are all powers of two, as different as possible, left out the upper half of block sizes of 32, 64, ... 992, and had
# up to twice the rank of random points. Where launches share a program two are enough: each of these points is
# compiled, and launches of it tell the rest.
_BLIND: Final = 8
_BLIND_WITH_LAUNCHES: Final = 2
# The first point is the nearest to the middle of this many random points: an extreme size can be 100 times slower than
# the best, and cost the time of ten other points. Of 60, all searches would begin at nearly the same point.
_FOR_MIDDLE: Final = 8
# The sizes of these points are moved to the nearest powers of two, which divide most problems without a rest: of a
# filter on a W6600, half of the points with powers of two alone are 3 times slower than the best, and half of all
# points 32 times. If two times or more are within this factor, nothing is that much slower, and sizes stay as drawn.
_FLAT: Final = 2.0
_MOVED: Final = 8  # of the best points drawn, the first that constraints accept with powers of two is taken
# Variations of this many of the fastest are candidates; with one alone a search stays in its valley. Where more are as
# good as the fastest, in logarithms, they take turns.
_TOP: Final = 3
_AS_GOOD: Final = 0.01
_TAKING_TURNS: Final = 40
# One turn in this many looks everywhere instead: at random points, and uphill from the most promising point.
_EVERYWHERE: Final = 3
# One turn in this many takes a step of a walk without the model: it makes progress where the model is wrong.
_STEP: Final = 4
# One turn in this many takes a random point, unless times elsewhere are known: otherwise a search never sees the points
# that its model is wrong about. Seven has no common factor with the turns above.
_RANDOM_TURN: Final = 7
# One turn in two takes a random point if all but this part of the times were taken since the fastest was found: then
# the model has little to say. On made-up spaces of two sizes and two methods the best of 180 points was 0.33 % slower
# than the best of all on the mean, instead of 0.73 %, and the worst of 8 spaces had rank 0.81 beside random, not 1.26.
# With a half it was 0.06 %, but recorded spaces where the fastest is found late scored 0.84 instead of 0.87.
_STUCK: Final = 0.125
_RANDOM_TURN_IF_STUCK: Final = 2
# Every second turn launches a compiled program in another way: one of this many fastest.
_RELAUNCHED: Final = 10
_ANYWHERE: Final = 60
# Before this many times are known, every turn looks near and everywhere, and none walks: points near two random points
# are not better than others, and one bad point can cost as much as all that the model chooses.
_EARLY: Final = 30
_CLIMBS: Final = 3
# A launch of a compiled program is worth a try if it may be faster than the fastest by this many standard deviations.
_HOPE: Final = 1.5
# The model is fitted to at most _FITTED points. Beyond that, it goes on from _KEPT of them: half of them the fastest,
# and at most _FAILURES that failed.
_FITTED: Final = 600
_KEPT: Final = 450
_FAILURES: Final = 60
# After each further 80 observations, a fit makes one more proposal: the model changes little then, and a proposal must
# stay far below a millisecond.
_PER_FIT: Final = 80
_FIRST_SCALING: Final = 8
# This many of the fastest of each source are tried first: the next are much like them, and by then the model chooses
# better.
FROM_EACH: Final = 2
# This many points that were fast elsewhere are candidates, beside the variations of the fastest here.
_PROMISING: Final = 20
# A look everywhere takes this many points that represent all regions elsewhere, and this many random points.
_REPRESENTING: Final = 60
_RANDOM: Final = 20
# Times here vary at least by this part of how they vary elsewhere: the first times, of points that were all good
# elsewhere, are often alike, and say little about the others.
VARY: Final = 0.25
# The fastest points of a single other device are alike: if they are all slow here, nothing shows it. So this many
# points that differ from them take turns with the model's. With two devices, the fastest of one test the other.
_HEDGES: Final = 2
# They are among this many of some random points, by their powers of two. Points like the first ones of a search from
# nothing would do less well: a search from one other device scored 0.89 on recorded spaces instead of 0.93.
_ROUNDEST: Final = 8


class Guided:
    """Proposes by a Gaussian process over the logarithm of times; needs numpy.

    Times far above the median all count alike, and so do failures: the model need not tell bad points apart. Where
    times elsewhere are known, it models how times here differ from the prediction that they give.
    """

    def __init__(self, space: Space, *, seed: int = 0, start: Start = Start()) -> None:  # noqa: B008 - immutable
        self._np = load_numpy()
        # With times elsewhere, the model itself finds other points that were fast there, and stops when they are slow.
        straight = min(FROM_EACH * len(start.elsewhere), STRAIGHT)
        first = start.first[:straight] if start.elsewhere else start.first
        self._history = TrialHistory(space, seed, start._replace(first=first))
        self._hedges: int | None = 0 if start.near else None
        self._blind = _BLIND_WITH_LAUNCHES if self._history.shares_programs else _BLIND
        self._model = TimeModel(self._history.axes, self._history.rng)
        self._prior = Prior(space, start.elsewhere, self._history.rng)
        self._model.set_usual_scales(self._prior.differences())
        self._representing = self._prior.representatives()
        self._fitted: list[Point] = []
        self._offset, self._scale = 0.0, 1.0
        self._walker = Walker(self._history, beginnings=0)
        self._walked: set[Point] = set()
        self._hedged: set[Point] = set()
        self._powers_of_two = [axis.nearest_powers_of_two() for axis in self._history.axes]
        self._drawn_as: dict[Point, Point] = {}  # points before their sizes were moved to powers of two
        self._queue: list[Point] = []
        self._turn = 0
        self._found_at = 0  # how many times were known when the fastest was found
        self._compiling = False
        self._next_scaling = _FIRST_SCALING

    def __repr__(self) -> str:
        return "<Guided strategy>"

    def propose(self, n: int) -> list[Config]:
        """Return the next `n` configurations to measure; fewer only if fewer are left."""
        return self._history.propose(n, lambda: self._next(n))

    def observe(self, observations: Iterable[Observation]) -> None:
        """Learn the times of configurations, in any order."""
        fastest = self._history.ranked[:1]
        added = self._history.add(observations)
        if self._history.ranked[:1] != fastest:
            self._found_at = len(self._history.values)
        # A hedge that is slower shows that times elsewhere are right. The model would take it for a sign of how times
        # vary among fast points, and look for faster points everywhere.
        fastest_s = fastest[0][0] if fastest else math.inf
        self._fitted += [p for p in added if p not in self._hedged or self._history.values[p] < fastest_s]
        self._walker.learn(point for point in added if point in self._walked)
        if added and len(self._history.values) < _PER_FIT:
            self._queue.clear()  # early on, every time changes which point is worth a try

    def _next(self, n: int) -> Point | None:
        while self._queue:
            point = self._queue.pop(0)
            if self._history.is_open(point):
                return point
        if not self._history.ranked or (len(self._history.taken) < self._blind and not self._prior):
            return self._blind_point()
        if self._is_hedging() and (hedge := self._hedge()) is not None:
            self._hedged.add(hedge)
            return hedge
        self._queue = self._best_points(max(1 + len(self._history.values) // _PER_FIT, -(-n // _EVERYWHERE)))
        return self._queue.pop(0) if self._queue else self._history.random_point()

    def _blind_point(self) -> Point | None:
        """Return a point to begin with: the fastest by the prior, else one in the middle or in other regions."""
        if promising := self._prior.promising(1, self._history.is_open):
            return promising[0]
        return (
            len(self._history.taken) < self._blind and self._point_in_other_regions()
        ) or self._history.random_point()

    def _is_hedging(self) -> bool:
        """Whether it is the turn of a point that shows how well times elsewhere predict times here."""
        if self._hedges is None:
            self._hedges = _HEDGES if self._prior.is_untested(list(self._history.values)) else 0
        if not self._hedges or len(self._history.taken) % 2:
            return False
        self._hedges -= 1
        return True

    def _hedge(self) -> Point | None:
        """Return a round point that differs from the nearest point before it on as many axes as possible."""
        drawn = self._history.random_points(_ANYWHERE)
        powers = [(at, flags) for at, axis in enumerate(self._history.axes) if (flags := axis.powers_of_two())]
        counts = [sum(flags[point[at]] for at, flags in powers) for point in drawn]
        least = sorted(counts, reverse=True)[:_ROUNDEST][-1:]
        round_ = [point for point, count in zip(drawn, counts, strict=True) if [count] >= least]
        taken = self._history.taken
        return max(round_, key=lambda point: min(sum(map(operator.ne, point, t)) for t in taken), default=None)

    def _point_in_other_regions(self) -> Point | None:
        """Return a point in other regions than the points before it; the first is near the middle."""
        history = self._history
        drawn = history.random_points(_ANYWHERE)
        if not drawn:
            return None
        before = [self._regions(self._drawn_as.get(point, point)) for point in history.taken]
        if before:
            drawn.sort(key=lambda point: sum(sum(map(operator.eq, self._regions(point), each)) ** 2 for each in before))
        else:
            drawn = [self._model.middle(drawn[:_FOR_MIDDLE])]
        times = [time for time, _ in history.ranked]
        is_flat = len(times) > 1 and times[-1] - times[0] < math.log(_FLAT)
        for point in drawn[: 0 if is_flat else _MOVED]:  # a constraint may refuse the powers of two
            moved = tuple(to[at] for to, at in zip(self._powers_of_two, point, strict=True))
            if history.is_open(moved):
                self._drawn_as[moved] = point
                return moved
        return drawn[0]

    def _regions(self, point: Point) -> list[int]:
        """Return the region of a point on each axis: its value, where there are few."""
        lengths = [len(axis.values) for axis in self._history.axes]
        return [at * min(_BLIND, many) // many for at, many in zip(point, lengths, strict=True)]

    def _best_points(self, many: int) -> list[Point]:
        """Fit the model, and return the most promising of some open points."""
        self._compiling = not self._compiling
        if not self._compiling and (launches := self._relaunches()):
            return launches[:many]
        self._turn += 1
        early = len(self._history.values) < _EARLY
        stuck = not early and self._found_at < _STUCK * len(self._history.values)
        every = _RANDOM_TURN_IF_STUCK if stuck else _RANDOM_TURN
        if self._turn % every == 0 and not self._prior and (point := self._history.random_point()) is not None:
            return [point]
        if not early and self._turn % _STEP == 0:
            point = self._walker.next()
            if point is not None:
                self._walked.add(point)
                return [point]
        pool: list[Point] = []
        if early or self._turn % _EVERYWHERE:
            near = [p for point in self._fastest() for p in self._history.variations(point)]
            near += self._prior.promising(_PROMISING, self._history.is_open)
            near += self._points_anywhere() if early else []
            pool = list(dict.fromkeys(near))
        drawn = [] if pool else self._points_anywhere()
        if not pool and not drawn:
            return []
        self._fit()
        pool, worths = (pool, self._improvements(pool)) if pool else self._climb(drawn)
        order = sorted(range(len(pool)), key=worths.__getitem__, reverse=True)
        return [pool[i] for i in order[:many]]

    def _relaunches(self) -> list[Point]:
        """Return points that need no compiling and may be faster than the fastest, the most promising first."""
        history = self._history
        tops = [point for _, point in history.ranked[: _RELAUNCHED if history.shares_programs else 0]]
        pool = list(dict.fromkeys(p for top in tops for p in history.variations(top) if history.is_compiled(p)))
        if not pool:
            return []
        self._fit()
        times, deviations = self._predict([tops[0], *pool])
        fastest, *hopes = (times - _HOPE * deviations).tolist()
        return [point for hope, point in sorted(zip(hopes, pool, strict=True)) if hope < fastest]

    def _fastest(self) -> list[Point]:
        """Return some of the fastest points: the first, and a random choice of the points that are as good."""
        (best, _), *others = ranked = self._history.ranked[:_TAKING_TURNS]
        as_good = sum(value <= best + _AS_GOOD for value, _ in others)
        chosen = ranked[:_TOP] if as_good < _TOP else [ranked[0], *self._history.rng.sample(others[:as_good], _TOP - 1)]
        return [point for _, point in chosen]

    def _points_anywhere(self) -> list[Point]:
        """Return random open points, most of them the best elsewhere of their region, as far as known."""
        self._representing = [point for point in self._representing if self._history.is_open(point)]
        if not self._representing:
            return self._history.random_points(_ANYWHERE)
        many = min(_REPRESENTING, len(self._representing))
        chosen = self._history.rng.sample(self._representing, many)
        return list(dict.fromkeys([*chosen, *self._history.random_points(_RANDOM)]))

    def _climb(self, pool: list[Point]) -> tuple[list[Point], list[float]]:
        """Return the points, and the variations of the most promising, with their expected improvements."""
        worths = self._improvements(pool)
        for _ in range(_CLIMBS):
            best = max(range(len(pool)), key=worths.__getitem__)
            known = set(pool)
            near = [p for p in self._history.variations(pool[best]) if p not in known]
            if not near:
                break
            more = self._improvements(near)
            better = max(more) > worths[best]
            pool, worths = pool + near, worths + more
            if not better:
                break
        return pool, worths

    def _improvements(self, points: list[Point]) -> list[float]:
        """Return the logarithm of each point's expected improvement on the fastest; finite for hopeless points too."""
        times, deviations = self._predict(points)
        worths = log_improvements(self._np, self._history.ranked[0][0], times, deviations)
        return cast("list[float]", worths.tolist())

    def _predict(self, points: list[Point]) -> tuple[Any, Any]:
        """Return predicted logarithms of times, and their standard deviations."""
        means, deviations = self._model.predict(points)
        return self._offset + self._prior.predict(points) + self._scale * means, self._scale * deviations

    def _fit(self) -> None:
        """Fit the model to how times differ from the prior's prediction, with mean 0 and variance 1."""
        history = self._history
        if len(self._fitted) > _FITTED:
            failed, worked = history.failed[-_FAILURES:], [point for _, point in history.ranked]
            half = (_KEPT - len(failed)) // 2
            others = history.rng.sample(worked[half:], min(half, len(worked[half:])))
            self._fitted = [*worked[:half], *others, *failed]
        points = self._fitted
        fastest, median = history.ranked[0][0], history.ranked[len(history.ranked) // 2][0]
        bad = median + (median - fastest) / 2
        times = self._np.array([min(history.values[point], bad) for point in points])
        self._prior.learn(points, times)
        times = times - self._prior.predict(points)
        self._offset = float(times.mean())
        self._scale = max(float(times.std()), VARY * self._prior.spread) + 1e-9
        times = (times - self._offset) / self._scale
        if len(history.values) >= self._next_scaling:
            self._model.rescale(points, times)
            self._next_scaling = 2 * len(history.values)
        self._model.fit(points, times)
