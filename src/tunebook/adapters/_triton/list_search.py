"""Search of long lists of configurations: most of a list of 480 is never compiled.

The values of the configurations (constants, warps, stages) are the axes of a space whose points are the members of the
list, so every proposal is one of the user's configurations. Times of other shapes in the book show where to begin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from tunebook._base.errors import CodecError, DefinitionError
from tunebook.search import Observation
from tunebook.search._by_name import Search
from tunebook.search._candidate_list import CandidateList

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tunebook._base.vocabulary import StrategyLike
    from tunebook._space.space import Space
    from tunebook._tuning.job import Job
    from tunebook.adapters._triton.candidate import LaunchConfig
    from tunebook.search import Start, Strategy

# The candidates of a longer list that are tried, by how many near shapes the book knows. On recorded times of a matmul
# with 480 configurations on an H200, a search that knew nothing found the best with 128 for each of three shapes; with
# 48 it was up to 3 % behind, and with 32 up to 16 %.
TRIALS: Final = (128, 48, 32, 16)
# Few at a time where few are tried: with 16 at a time, 48 candidates are three steps, and were 9 % behind.
BATCH: Final = 8


class ListStrategy:
    """Proposes members of a list by a strategy over the space of their values."""

    def __init__(
        self, asked: StrategyLike, trials: int, members: CandidateList[LaunchConfig], seed: int, start: Start
    ) -> None:
        self._members: Final = members
        there = start._replace(
            first=[members.point(config) for config in start.first],
            last=[members.point(config) for config in start.last],
            elsewhere=[self._observations(source) for source in start.elsewhere],
        )
        self._inner: Final[Strategy] = Search(members.space(), asked, trials, there, seed).begin()

    def propose(self, n: int) -> list[Any]:
        """Return the next `n` candidates to measure; fewer only if fewer are left."""
        return [self._members.member(point) for point in self._inner.propose(n)]

    def observe(self, observations: Iterable[Observation]) -> None:
        """Learn the times of candidates."""
        self._inner.observe(self._observations(observations))

    def _observations(self, observations: Iterable[Observation]) -> list[Observation]:
        return [Observation(self._members.point(config), seconds) for config, seconds in observations]


def list_search(candidates: Sequence[LaunchConfig], asked: StrategyLike | None) -> Search | None:
    """Return the search over a list; None if its configurations cannot be told apart by their values."""
    try:
        members = CandidateList(candidates)
    except (CodecError, DefinitionError):
        return None  # values that cannot be written down cannot be told apart in the book either
    trials = min(TRIALS[0], len(members))

    def begin(space: CandidateList[LaunchConfig], *, seed: int, start: Start) -> ListStrategy:
        return ListStrategy(asked or "auto", trials, space, seed, start)

    return Search(cast("Space", members), begin, trials, batch=_batch(trials))


def _batch(trials: int) -> int:
    return max(BATCH, trials // 8)


def with_trials(job: Job[LaunchConfig]) -> Job[LaunchConfig]:
    """Return a job whose search tries fewer candidates where near shapes are known, and some that are not known yet."""
    search = cast("Search", job.search)
    trials = TRIALS[min(search.start.near, len(TRIALS) - 1)]
    known = sum(m.code == job.code for m in job.known)
    # A list that has grown since is worth another look, however much of it is known.
    at_least = known + BATCH if known else 0
    return job._replace(
        search=search._replace(trials=min(max(trials, at_least), len(search.space)), batch=_batch(trials))
    )
