"""A search of a list that is short enough to ask a model about every member, in batches.

Each member of a batch is chosen as if the members before it had the times that the model predicts for them. So a batch
of 16, as many as cores compile at once, is spread over the promising members, and not over 16 that are alike.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from tunebook.search._guided import FROM_EACH, VARY
from tunebook.search._model import Prior, TimeModel, load_numpy, log_improvements
from tunebook.search._outlook import MOST
from tunebook.search._strategy import STRAIGHT, Start, TrialHistory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tunebook._space.space import Config, Point, Space
    from tunebook.search._strategy import Observation

# Members before the model is asked, with as many different values as possible on each axis: one batch.
_BLIND: Final = 16
# The scales of the axes are found again after each batch, and change by a factor of two at most each time.
_ROUNDS: Final = 2
# At most so many members of a longer list are compared for a batch: a proposal must stay at some milliseconds.
_COMPARED: Final = 2000


class ListSearch:
    """Proposes the members with the largest expected improvement, by a Gaussian process; needs numpy.

    A member that failed, and that no working member is as large as in every value, is taken for one beyond a limit of
    the device. Larger members come last, and the model does not learn from it: the best members are often next to such
    a limit, and would look slow. Other failures count as slow.
    """

    def __init__(self, space: Space, *, seed: int = 0, start: Start = Start()) -> None:  # noqa: B008 - immutable
        self._np = load_numpy()
        alike = start.elsewhere[: start.alike]
        # Of sizes that are alike, the fastest of each is tried; the others tell all members' times together.
        straight = len(alike) or min(FROM_EACH * len(start.elsewhere), STRAIGHT)
        first = start.first[:straight] if start.elsewhere else start.first
        self._history = history = TrialHistory(space, seed, start._replace(first=first))
        self._model = TimeModel(history.axes, history.rng)
        self._prior = Prior(space, alike, history.rng)
        self._model.set_usual_scales(self._prior.differences())
        points = [point for config in space if (point := space.point(config)) is not None]
        self._points: Final = history.rng.sample(points, len(points))
        blind = _spread_out(dict(enumerate(self._points)), 0 if self._prior else _BLIND)
        self._blind = [self._points[at] for at in blind]
        self._known: list[Point] = []  # that the model learns from, in the order of the fit
        self._times: list[float] = []  # standardised; of the points above, and of those believed
        self._believed: list[Point] = []
        self._pool: list[Point] | None = None
        self._offset, self._scale = 0.0, 1.0

    def __repr__(self) -> str:
        return "<ListSearch strategy>"

    def propose(self, n: int) -> list[Config]:
        """Return the next `n` configurations to measure; fewer only if fewer are left."""
        return self._history.propose(n, self._next)

    def observe(self, observations: Iterable[Observation]) -> None:
        """Learn the times of configurations, in any order."""
        self._history.add(observations)
        self._pool = None

    @property
    def is_misled(self) -> bool:
        """Whether times at alike sizes rank the members that were measured here no better than chance."""
        times, points = zip(*self._history.ranked, strict=True) if self._history.ranked else ((), ())
        return bool(self._prior) and self._prior.agreement(points, self._np.array(times)) <= 0

    def _next(self) -> Point | None:
        history = self._history
        while self._blind and len(history.taken) < _BLIND:
            point = self._blind.pop(0)
            if history.is_open(point):
                return point
        if self._pool is None:
            self._pool = self._refitted() if history.ranked else self._predicted_elsewhere()
        self._pool = [point for point in self._pool if history.is_open(point)]
        if not self._pool:
            return history.random_point()
        if not history.ranked:
            return self._pool[0]
        self._model.fit([*self._known, *self._believed], self._np.array(self._times))
        means, deviations = self._model.predict(self._pool)
        times = self._offset + self._prior.predict(self._pool) + self._scale * means
        worths = log_improvements(self._np, history.ranked[0][0], times, self._scale * deviations)
        chosen = int(self._np.argmax(worths))
        self._believed.append(self._pool[chosen])
        self._times.append(float(means[chosen]))
        return self._pool[chosen]

    def _predicted_elsewhere(self) -> list[Point]:
        """Return the open members, the fastest by the times elsewhere first; none if there are no such times.

        Members that were measured at none of those sizes are predicted from the others. On recorded times of a matmul
        at three near sizes, a third of the members measured at each, the best of 16 was 0.57 % slower than the best of
        all where they were left out, and 0.25 % where they were not.
        """
        if not self._prior:
            return []
        known = self._prior.promising(_COMPARED, self._history.is_open)
        members = list(dict.fromkeys([*known, *self._promising()]))
        order = self._np.argsort(self._prior.predict(members), kind="stable")
        return [members[int(at)] for at in order]

    def _promising(self) -> list[Point]:
        """Return the open members that are below all limits, if there are any."""
        open_ = [point for point in self._points if self._history.is_open(point)]
        limits = self._limits()
        below = [point for point in open_ if not any(self._is_beyond(point, limit) for limit in limits)]
        return (below or open_)[:_COMPARED]

    def _limits(self) -> list[Point]:
        """Return the members that failed, and that no working member is as large as in every value."""
        history = self._history
        worked = [point for _, point in history.ranked]
        return [limit for limit in history.failed if not any(self._is_beyond(point, limit) for point in worked)]

    def _is_beyond(self, point: Point, limit: Point) -> bool:
        pairs = zip(self._history.axes, point, limit, strict=True)
        return all(mine >= theirs if axis.is_ordered else mine == theirs for axis, mine, theirs in pairs)

    def _refitted(self) -> list[Point]:
        """Standardise how times differ from the prior's prediction, find the scales of the axes, and return a pool."""
        np, history, limits = self._np, self._history, set(self._limits())
        self._known = [point for point in history.values if point not in limits]
        slow = history.ranked[0][0] + math.log(MOST)
        times: Any = np.array([min(history.values[point], slow) for point in self._known])
        self._prior.learn(self._known, times)
        times = times - self._prior.predict(self._known)
        self._offset = float(times.mean())
        self._scale = max(float(times.std()), VARY * self._prior.spread) + 1e-9
        times = (times - self._offset) / self._scale
        for _ in range(_ROUNDS):
            self._model.rescale(self._known, times)
        self._times, self._believed = times.tolist(), []
        return self._promising()


def _spread_out(points: Mapping[int, Point], count: int) -> list[int]:
    """Return so many numbers whose points have as many different values as possible, on each axis."""
    seen: Counter[tuple[int, int]] = Counter()
    left, found = dict(points), list[int]()
    while left and len(found) < count:
        index = max(left, key=lambda each: math.fsum((1 + seen[value]) ** -2 for value in enumerate(left[each])))
        found.append(index)
        seen.update(enumerate(left.pop(index)))
    return found
