"""The tests that every search strategy must pass."""
# ruff: noqa: S101 - a test kit is made of asserts, and the names of its tests are sentences

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tunebook._space.space import Config, Space
from tunebook.search import Observation, Start

if TYPE_CHECKING:
    from collections.abc import Callable

    from tunebook.search import Strategy


class StrategyContract:
    """The promises of `tunebook.search.Strategy`, as tests.

    They search a space of 231 configurations to its end, which takes a strategy with a model a few seconds.
    """

    def make(self, space: Space, *, seed: int = 0, start: Start = Start()) -> Strategy:  # noqa: B008 - immutable
        """Return a new strategy for a space."""
        raise NotImplementedError

    @staticmethod
    def space() -> Space:
        """Return a space with a constraint, and with axes of several kinds."""
        space = Space(m=[16, 32, 64, 128, 256], n=[16, 32, 64, 128, 256], stages=[1, 2, 3, 4], mode=["a", "b", "c"])
        return space.where(lambda c: c.m * c.n <= 16384)

    @staticmethod
    def seconds_of(c: Any) -> float:
        """Return the time of a configuration: a valley with a ridge, and a mode that only pays with three stages."""
        valley: float = abs(math.log2(c.m / 64)) + abs(math.log2(c.n / 128)) + 0.3 * abs(c.stages - 3)
        return 1e-3 * (1 + valley + (0.5 if (c.mode == "b") != (c.stages == 3) else 0.0))

    @classmethod
    def search(
        cls, strategy: Strategy, trials: int, batch: int = 1, seconds_of: Callable[[Config], float | None] | None = None
    ) -> list[Config]:
        """Run a search in batches, and return its proposals in order."""
        proposed: list[Config] = []
        while len(proposed) < trials:
            found = strategy.propose(min(batch, trials - len(proposed)))
            assert len(found) <= batch, "propose(n) returns at most n configurations"
            if not found:
                break
            proposed += found
            strategy.observe([Observation(c, (seconds_of or cls.seconds_of)(c)) for c in found])
        return proposed

    def test_every_configuration_is_proposed_once_and_nothing_outside_the_space(self) -> None:
        space = self.space()
        proposed = self.search(self.make(space, seed=1), 10_000, batch=7)
        assert len(proposed) == len(set(proposed)) == len(space)
        assert set(proposed) == set(space)

    def test_the_same_seed_gives_the_same_proposals(self) -> None:
        one, other = (self.search(self.make(self.space(), seed=3), 60, batch=4) for _ in range(2))
        assert one == other

    def test_an_observed_configuration_is_not_proposed_again(self) -> None:
        space = self.space()
        known = list(space)[::2]
        strategy = self.make(space)
        strategy.observe([Observation(c, self.seconds_of(c)) for c in known])
        assert not set(self.search(strategy, 10_000)) & set(known)

    def test_the_first_of_the_start_come_first_and_the_last_come_last(self) -> None:
        space = self.space()
        configs = list(space)
        start = Start(first=configs[100:103], last=configs[:5])
        proposed = self.search(self.make(space, start=start), 10_000)
        assert proposed[:3] == configs[100:103]
        assert set(proposed[-5:]) == set(configs[:5])

    def test_failures_invalid_times_and_unknown_configurations_do_no_harm(self) -> None:
        strategy = self.make(self.space())
        unknown = {"m": 17, "n": 16, "stages": 1, "mode": "a"}
        strategy.observe([Observation({"other": 1}, 1.0), Observation(unknown, 1.0)])
        odd_times = {1: None, 2: math.nan, 3: 0.0}
        proposed = self.search(strategy, 100, seconds_of=lambda c: odd_times.get(c.stages, self.seconds_of(c)))
        assert len(proposed) == 100
