"""Trap 13: a kernel that writes to its arguments is timed on what the user passed, and leaves it as one call would."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

import tunebook as tb
from tunebook._arrays.describe import arrays_in
from tunebook._measure.argument_restore import Restorer


@pytest.fixture(params=["never", "always"])
def policy(request):
    return tb.AutotunePolicy(isolate=request.param)


@pytest.mark.promise("arguments-left-alone")
def test_an_argument_that_is_scaled_in_place_is_scaled_once(policy):
    @tb.tunable(space=tb.Space(b=[1, 2, 3]), heuristic={"b": 1}, store=False, policy=policy)
    def double(x, *, config):
        x *= 2
        return x

    x = np.ones(100)
    out = double(x)
    assert (x == 2).all()
    assert out is x
    double(x)
    assert (x == 4).all()


def test_every_candidate_sees_the_arguments_as_they_were(policy):
    @tb.tunable(space=tb.Space(b=[1, 2, 3]), reference=lambda x, out: x.sum(), store=False, policy=policy)
    def total(x, out, *, config):
        out += x.sum()  # right only if `out` was zero
        return out[0]

    out = np.zeros(1)
    total(np.ones(10), out)
    assert out[0] == 10


def test_the_reference_is_computed_before_anything_is_written_to(policy):
    @tb.tunable(space=tb.Space(b=[1, 2, 3]), reference=lambda x: x * 2, store=False, policy=policy)
    def double(x, *, config):
        x *= 2
        return x

    x = np.ones(100)
    double(x)
    assert (x == 2).all()


def test_arrays_deep_in_containers_are_put_back_too():
    @tb.tunable(space=tb.Space(b=[1, 2]), ignore=("state",), store=False)
    def step(x, state, *, config):
        state["count"][0] += 1
        state["all"][0].fill(7)
        return x

    state = {"count": np.zeros(1), "all": (np.ones(3),)}
    step(np.ones(2), state)
    assert state["count"][0] == 1


@dataclass
class State:
    x: Any


@dataclass(frozen=True, slots=True)
class FrozenState:
    x: Any


class Pair(NamedTuple):
    x: Any
    n: int


class Keyed:
    """A class of the user's own, keyed by its array."""

    def __init__(self, x):
        self.x = x


tb.register_key(Keyed, lambda keyed: (keyed.x,))


def ten_lists_deep(x):
    for _ in range(10):
        x = [x]
    return x


HOLDERS = {
    "a dataclass": State,
    "a frozen dataclass": FrozenState,
    "a read-only mapping": lambda x: MappingProxyType({"x": x}),
    "an ordered dict": lambda x: OrderedDict(x=x),
    "a NamedTuple": lambda x: Pair(x, 1),
    "ten lists": ten_lists_deep,
    "a dataclass in a mapping in a dataclass": lambda x: State(MappingProxyType({"x": (State(x),)})),
    "a class with a registered key": lambda x: [Keyed(x)],
    "a partial": lambda x: partial(print, x),
}


@pytest.mark.promise("arguments-left-alone")
@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_an_array_in_any_container_sees_exactly_one_run(policy, hold):
    @tb.tunable(space=tb.Space(w=[1, 2]), heuristic={"w": 1}, store=False, check=False, policy=policy)
    def bump(holder, *, config):
        next(arrays_in(holder))[:] += 1

    x = np.zeros(4)
    bump(hold(x))
    assert x.tolist() == [1, 1, 1, 1]
    bump(hold(x))
    assert x.tolist() == [2, 2, 2, 2]


def test_an_array_in_two_places_is_copied_once():
    x = np.zeros(4)
    restorer = Restorer(((x, [x]), {"x": x}))
    x += 1
    assert [copy.tolist() for copy in restorer.written()] == [[1, 1, 1, 1]]


def test_aliased_and_strided_arguments_are_put_back():
    base = np.arange(12.0).reshape(3, 4)

    @tb.tunable(space=tb.Space(b=[1, 2]), store=False)
    def add(x, y, *, config):
        x += 1
        return x

    add(base[:, ::2], base.T)
    assert base[0].tolist() == [1, 1, 3, 3]


@pytest.mark.promise("arguments-left-alone")
def test_a_tuning_that_fails_leaves_the_arguments_as_they_were():
    @tb.tunable(space=tb.Space(b=[1, 2]), store=False)
    def breaks(x, *, config):
        x += 1
        raise ValueError("after writing")

    x = np.zeros(3)
    with pytest.raises(tb.NoConfig, match="after writing"):
        breaks(x)
    assert (x == 0).all()


def test_nothing_is_restored_that_was_not_written_to():
    x, y = np.zeros(3), np.zeros(3)
    restorer = Restorer((x, [y]))
    restorer.notice()
    assert not restorer.has_changes
    y[0] = 1
    restorer.notice()
    assert restorer.has_changes
    assert y[0] == 0
    x[0] = 5
    restorer.restore()
    assert x[0] == 5
