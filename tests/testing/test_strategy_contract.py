"""The contract of strategies finds the faults that it is for."""

from __future__ import annotations

import itertools
import random

import pytest

from tunebook import Config
from tunebook.search import Start
from tunebook.testing import StrategyContract


class InOrder:
    """Proposes the space in order, by the rules; each fault below breaks one of them."""

    def __init__(self, space, *, seed, start):
        first = [space.config(**config) for config in start.first]
        last = [space.config(**config) for config in start.last]
        middle = [config for config in space if config not in first and config not in last]
        self.left, self.known = iter([*first, *middle, *last]), set()

    def propose(self, n):
        return list(itertools.islice((config for config in self.left if config not in self.known), n))

    def observe(self, observations):
        self.known |= {Config(**config) for config, _ in observations}


class Repeats(InOrder):
    def propose(self, n):
        found = super().propose(n)
        return found and [found[0]] * len(found)


class Shuffles(InOrder):
    def propose(self, n):
        found = super().propose(n)
        random.shuffle(found)
        return found


class Forgets(InOrder):
    def observe(self, observations):
        pass


class IgnoresTheStart(InOrder):
    def __init__(self, space, *, seed, start):
        self.left, self.known = iter(space), set()


class Refuses(InOrder):
    def observe(self, observations):
        assert all(seconds is not None for _, seconds in observations), "a failure"


class Overfills(InOrder):
    def propose(self, n):
        return super().propose(n + 1)


FAULTS = {
    Repeats: "test_every_configuration_is_proposed_once_and_nothing_outside_the_space",
    Shuffles: "test_the_same_seed_gives_the_same_proposals",
    Forgets: "test_an_observed_configuration_is_not_proposed_again",
    IgnoresTheStart: "test_the_first_of_the_start_come_first_and_the_last_come_last",
    Refuses: "test_failures_invalid_times_and_unknown_configurations_do_no_harm",
    Overfills: "test_every_configuration_is_proposed_once_and_nothing_outside_the_space",
}


def contract_of(kind):
    class Contract(StrategyContract):
        def make(self, space, *, seed=0, start=Start()):  # noqa: B008 - immutable
            return kind(space, seed=seed, start=start)

    return Contract()


@pytest.mark.parametrize(("kind", "test"), FAULTS.items())
def test_a_strategy_with_a_fault_fails_the_test_for_it(kind, test):
    getattr(contract_of(InOrder), test)()
    with pytest.raises(AssertionError):
        getattr(contract_of(kind), test)()
