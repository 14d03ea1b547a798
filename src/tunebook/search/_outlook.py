"""Which candidates of a list are worth a try: a model over their values predicts times that were not measured.

For tuning in a running program, where each candidate takes milliseconds of its time before it has run once.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from tunebook._base.errors import CodecError, DefinitionError, MissingDependency
from tunebook.search._candidate_list import CandidateList
from tunebook.search._model import TimeModel, load_numpy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tunebook._space.space import Point

C = TypeVar("C")

# Before so many times are known, nothing is predicted. The first ones are the nearest to the one that serves meanwhile.
FIRST: Final = 8
# A candidate is left out if it is predicted to be so many times slower than the best, and so many standard deviations
# of the prediction beyond that. On the times of four kernels at 160 shapes each on an H200, 0.46 to 0.73 of the
# candidates were tried, and the best of them was within 1 % of the best of all at 0.975 to 1.0 of the shapes; with two
# deviations, 0.37 to 0.64, and 0.906 (`bench/outlook.py`). With the times at two other shapes,
# the model left out no more candidates. Dropping the candidates that were 1.3 times slower at other shapes lost the
# best one at many shapes. So other shapes decide the order alone.
_MARGIN, _SURELY = 1.1, 2.5
MOST: Final = 3.0  # times the best: slower ones are all alike, and would hide how the fast ones differ


class Outlook(Generic[C]):
    """Orders candidates by their predicted times, and leaves out the surely slow candidates."""

    def __init__(self, configs: Mapping[str, C], likely: Iterable[str] = ()) -> None:
        """Order candidates, of which the first serves meanwhile; `likely` are fast elsewhere, and tried first."""
        members = CandidateList(configs.values())
        space = members.space()
        found = {name: space.point(members.point(config)) for name, config in configs.items()}
        self._points: dict[str, Point] = {name: point for name, point in found.items() if point is not None}
        self._model = TimeModel(space.grid, random.Random(0))  # noqa: S311 - it is not asked for anything random
        first = [*(name for name in likely if name in configs), *nearest(self._points, FIRST)]
        self._place = {name: at for at, name in enumerate(dict.fromkeys([*first, *configs]))}
        self.predicted: dict[str, float] = {}  # times the best, of candidates that have not run

    def worth_trying(self, names: Iterable[str], times: Mapping[str, float], *, pressed: bool = False) -> list[str]:
        """Return the candidates of `names` that are not surely slow, the most promising first, given other times.

        If `pressed`, because tries have become dear, only those that are predicted to be the best.
        """
        waiting = sorted(names, key=self._place.__getitem__)
        known = [name for name in times if name in self._points]
        if len(known) < FIRST or not waiting:
            return waiting
        np, best = load_numpy(), min(times.values())
        logs = np.array([min(math.log(times[name] / best), math.log(MOST)) for name in known])
        middle, spread = logs.mean(), logs.std() + 1e-9
        self._model.fit([self._points[name] for name in known], (logs - middle) / spread)
        means, errors = self._model.predict([self._points[name] for name in waiting])
        # Where times follow their values less than the model believes, it knows less about the others too.
        means, errors = middle + spread * means, spread * errors * max(self._model.surprise(), 1.0)
        self.predicted = dict(zip(waiting, np.exp(means).tolist(), strict=True))
        slow = means > 0 if pressed else means - _SURELY * errors > math.log(_MARGIN)
        worth = dict(zip(waiting, (~slow).tolist(), strict=True))
        return sorted((name for name in waiting if worth[name]), key=self.predicted.__getitem__)


def nearest(points: Mapping[str, Point], count: int) -> list[str]:
    """Return so many names whose points are the fewest steps away from the first one's, the nearest first.

    A candidate far from one that is good may take many times as long, and its first launch alone costs a program so
    much. With the first ones from all over the list, the worst of 30 races needed 4,800 to 6,500 calls where one of the
    best tenth served meanwhile; with the nearest first, 1,500 to 1,800, and the winners are as good.
    """
    start = next(iter(points.values()), ())
    steps = {name: sum(abs(a - b) for a, b in zip(point, start, strict=True)) for name, point in points.items()}
    return sorted(points, key=steps.__getitem__)[1 : count + 1]


def outlook_for(configs: Mapping[str, C], likely: Sequence[str] = ()) -> Outlook[C] | None:
    """Return the outlook of candidates by name; None for few, without names of their values, or without numpy."""
    if len(configs) <= FIRST:
        return None
    try:
        return Outlook(configs, likely)
    except (CodecError, DefinitionError, MissingDependency):
        return None
