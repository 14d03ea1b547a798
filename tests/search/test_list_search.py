"""The search of a list: batches that are spread out, limits of a device, and times of problems that are alike."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("numpy", reason="numpy is not installed")

from tunebook import Space
from tunebook.search import Observation, Start
from tunebook.search._listed import ListSearch
from tunebook.testing import StrategyContract

TILES = Space(m=[16, 32, 64, 128, 256], n=[16, 32, 64, 128, 256], k=[32, 64, 128], stages=[2, 3, 4, 5])


def seconds_of(config):
    """A pretended matmul: the fastest tile is next to the limit of shared memory, beyond which nothing runs."""
    if (config.m + config.n) * config.k * config.stages > 1 << 16:
        return None
    tile = abs(math.log2(config.m * config.n) - 14) + abs(math.log2(config.m / config.n)) / 2
    return 1e-4 * (1 + 0.3 * tile + 0.1 * (5 - config.stages) + 0.2 * abs(math.log2(config.k / 64)))


def search(strategy, trials=48, batch=16, seconds=seconds_of):
    """Return the times of proposals, in batches; what fails is told before it is compiled, and does not count."""
    found = {}
    while sum(time is not None for time in found.values()) < trials:
        proposed = strategy.propose(batch)
        new = {config: seconds(config) for config in proposed}
        strategy.observe([Observation(config, time) for config, time in new.items()])
        found |= new
    return found


class TestListSearch(StrategyContract):
    def make(self, space, **options):
        return ListSearch(space, **options)


@pytest.mark.parametrize("seed", range(4))
def test_48_of_300_candidates_are_enough_to_find_the_best_next_to_a_limit(seed):
    found = search(ListSearch(TILES, seed=seed))
    best = min(time for config in TILES if (time := seconds_of(config)) is not None)
    assert min(time for time in found.values() if time is not None) <= 1.01 * best


def is_beyond(config, limit):
    return all(config[axis] >= limit[axis] for axis in config)


def test_members_beyond_a_limit_are_not_proposed_before_all_others():
    strategy, left, limits = ListSearch(TILES), set(TILES), []
    while batch := strategy.propose(16):
        below = [config for config in left if not any(is_beyond(config, limit) for limit in limits)]
        left -= set(batch)
        assert set(batch) <= set(below) or len(below) < 16
        times = {config: seconds_of(config) for config in batch}
        strategy.observe([Observation(config, time) for config, time in times.items()])
        limits += [config for config, time in times.items() if time is None]
    assert not left


def test_a_failure_that_is_not_of_size_holds_no_larger_member_back():
    smallest = next(iter(TILES))
    found = search(ListSearch(TILES), seconds=lambda c: None if c == smallest else 1e-4 * (1 + 256 / c.m + 256 / c.n))
    assert min(time for time in found.values() if time is not None) == pytest.approx(3e-4)


def test_a_batch_is_spread_over_members_that_are_not_alike():
    strategy = ListSearch(TILES)
    strategy.observe([Observation(c, 1e-4 * (1 + abs(math.log2(c.m / 64)))) for c in strategy.propose(16)])
    batch = strategy.propose(16)
    assert len({config.n for config in batch}) == 5
    assert len({config.stages for config in batch}) == 4


def test_times_of_problems_that_are_alike_say_where_to_begin():
    fast = [Observation(config, seconds_of(config)) for config in TILES if seconds_of(config) is not None]
    failed = [config for config in TILES if seconds_of(config) is None]
    first = ListSearch(TILES, start=Start(last=failed, elsewhere=[fast, fast], near=2, alike=2)).propose(8)
    times = sorted(time for _, time in fast)
    assert all((time := seconds_of(config)) is not None and time <= times[20] for config in first)


def test_times_of_problems_that_are_not_alike_give_two_members_each_and_no_prediction():
    fast = [Observation(config, seconds_of(config)) for config in TILES if seconds_of(config) is not None]
    ranked = [config for config, _ in sorted(fast, key=lambda each: each[1])]
    strategy = ListSearch(TILES, start=Start(first=ranked, elsewhere=[fast]))
    cold = ListSearch(TILES)
    assert strategy.propose(10)[:2] == ranked[:2]
    assert set(strategy.propose(4)) & set(cold.propose(16))
