"""Search of long lists of configurations: most of a list of 480 is never compiled.

The values of the configurations (constants, warps, stages) are the axes of a space whose points are the members of the
list, so every proposal is one of the user's configurations. Times of other shapes in the book show where to begin.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, cast

from tunebook._base.errors import CodecError, DefinitionError
from tunebook.search import Observation
from tunebook.search._by_name import Search
from tunebook.search._candidate_list import CandidateList
from tunebook.search._listed import ListSearch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tunebook._base.vocabulary import StrategyLike
    from tunebook._space.space import Space
    from tunebook._tuning.job import Job
    from tunebook.adapters._triton.candidate import LaunchConfig
    from tunebook.search import Start, Strategy

# The candidates of a longer list that are compiled, by how many near shapes the book knows. On recorded times of a
# matmul with 480 configurations on an H200, the best of 48 was 0.1 % behind the best of all in the mean. Where nothing
# tells before their compilation which candidates fail or spill, the best of 128 was 0.6 % behind, and of 48 2.7 %
# (`bench/list_search.py`).
TRIALS: Final = (48, 48, 32, 16)
UNFORESEEN: Final = (128, 48, 32, 16)
# As many at a time as cores compile at once. More would be chosen on too little knowledge: 48 candidates are three
# batches of 16.
LEAST, MOST = 4, 16


class ListStrategy:
    """Proposes members of a list by a strategy over the space of their values.

    It ends after a number of proposals, unless they show that times at alike sizes mislead here.
    """

    def __init__(self, beginning: Beginning, members: CandidateList[LaunchConfig], seed: int, start: Start) -> None:
        self._members: Final = members
        self._left = beginning.proposals
        there = start._replace(
            first=[members.point(config) for config in start.first],
            last=[members.point(config) for config in start.last],
            elsewhere=[self._observations(source) for source in start.elsewhere],
        )
        self._inner: Final[Strategy] = Search(members.space(), beginning.asked, beginning.trials, there, seed).begin()

    def propose(self, n: int) -> list[Any]:
        """Return the next `n` candidates to measure; fewer only if fewer are left, or may be proposed."""
        if not self._left and isinstance(self._inner, ListSearch) and self._inner.is_misled:
            self._left = sys.maxsize
        found = [self._members.member(point) for point in self._inner.propose(min(n, self._left))]
        self._left -= len(found)
        return found

    def observe(self, observations: Iterable[Observation]) -> None:
        """Learn the times of candidates."""
        self._inner.observe(self._observations(observations))

    def _observations(self, observations: Iterable[Observation]) -> list[Observation]:
        return [Observation(self._members.point(config), seconds) for config, seconds in observations]


@dataclass(frozen=True)
class Beginning:
    """Begins the search of a list by the strategy that was asked for, which ends after so many proposals."""

    asked: StrategyLike
    trials: int
    proposals: int = sys.maxsize

    def __call__(self, space: CandidateList[LaunchConfig], *, seed: int, start: Start) -> ListStrategy:
        """Return a new strategy."""
        return ListStrategy(self, space, seed, start)


def list_search(candidates: Sequence[LaunchConfig], asked: StrategyLike | None) -> Search | None:
    """Return the search over a list; None if its configurations cannot be told apart by their values."""
    try:
        members = CandidateList(candidates)
    except (CodecError, DefinitionError):
        return None  # values that cannot be written down cannot be told apart in the book either
    trials = min(UNFORESEEN[0], len(members))
    batch = min(max(os.cpu_count() or 1, LEAST), MOST)
    return Search(cast("Space", members), Beginning(asked or "auto", trials), trials, batch=batch)


def with_trials(job: Job[LaunchConfig], *, foreseen: bool = False) -> Job[LaunchConfig]:
    """Return a job whose search tries fewer candidates where near shapes are known, and some that are not known yet.

    `foreseen`: candidates that fail or spill are told before they are compiled.
    """
    search = cast("Search", job.search)
    foreseen = foreseen and find_spec("numpy") is not None
    by_near = TRIALS if foreseen else UNFORESEEN
    trials = by_near[min(search.start.near, len(by_near) - 1)]
    known = sum(m.code == job.code for m in job.known)
    # A list that has grown since is worth another look, however much of it is known.
    trials = min(max(trials, known + LEAST if known else 0), len(search.space))
    begin = cast("Beginning", search.strategy)
    if foreseen and begin.asked == "auto":
        begin = replace(begin, asked=ListSearch)
    setup = job.setup
    if foreseen and trials <= MOST:
        # A single batch does not wait for first stages. A compilation that is not worth more ends after them in any
        # case, and another batch in its place would take as long as the first. It is not the last one if near shapes
        # rank its members no better than chance: of 586 matmuls, that was so for 6, where the best of 16 was 2.5 %
        # slower than the best of all in the mean, and for half of those whose near shapes were exchanged for others.
        begin, trials = replace(begin, proposals=trials), min(TRIALS[0], len(search.space))
        setup = setup._replace(foresee=None)
    return job._replace(search=search._replace(trials=trials, strategy=begin), setup=setup)
