"""Keys that explode are noticed: a number that makes a new key for each call, and a container of thousands."""

from __future__ import annotations

import enum
import random
import warnings

import numpy as np
import pytest
from kernels import FakeClock, fake_tuner

import tunebook as tb

X = np.ones(4)


class Mode(enum.Enum):
    A, B, C, D, E, F, G, H, J = range(9)


def make(name, **options):
    clock = FakeClock()

    @tb.tunable(
        space=tb.Space(b=[1, 2]), heuristic={"b": 1}, store=False, name=name, tuner=fake_tuner(clock), **options
    )
    def kernel(x, by, seed=0, *, config):
        clock.spend(1e-3)
        return x

    return kernel


def warned_by(work):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [str(w.message) for w in caught if issubclass(w.category, tb.TunebookWarning)]


def tune_for(kernel, values):
    return warned_by(lambda: [kernel(X, value) for value in values])


@pytest.mark.promise("exploding-keys")
@pytest.mark.parametrize(
    ("values", "is_size"),
    [
        ([i / 7 for i in range(1, 20)], False),
        (range(1, 20), True),
        ([f"run {i}" for i in range(20)], False),
        ([np.float32(i) for i in range(20)], False),
        ([1j * i for i in range(20)], False),
    ],
    ids=["floats", "integers", "texts", "scalars of numpy", "complex numbers"],
)
def test_eight_values_of_a_plain_argument_give_one_warning(values, is_size):
    (message,) = tune_for(make("scattered"), values)
    assert message.startswith("scattered@v0 was tuned for 8 values of its argument 'by' (")
    assert "ignore=('by',)" in message
    assert ("bucket={'by': tunebook.pow2}" in message) == is_size


def test_two_arguments_that_change_together_are_noticed():
    kernel, rng = make("together"), random.Random(0)
    (message,) = warned_by(lambda: [kernel(X, rng.random(), rng.random()) for _ in range(9)])
    assert "tuned for 8 values of its argument 'by'" in message


@pytest.mark.parametrize(
    "calls",
    [
        [(X, i / 7) for i in range(7)],
        [(np.ones(i), i) for i in range(1, 20)],
        [(X, mode) for mode in Mode],
        [(X, i % 2 == 0) for i in range(20)],
        [(X, (i, 1)) for i in range(7)],
        [(X, 0.5)] * 20,
    ],
    ids=["seven values", "a size that goes with the shape", "an enum", "a flag", "a tuple", "one value"],
)
def test_ordinary_keys_give_none(calls):
    kernel = make("ordinary")
    assert warned_by(lambda: [kernel(*call) for call in calls]) == []


def test_an_ignored_or_bucketed_argument_gives_none():
    assert tune_for(make("ignored", ignore=("by",)), [i / 7 for i in range(20)]) == []
    assert tune_for(make("bucketed", bucket={"by": tb.pow2}), range(1, 20)) == []


def test_tuning_ahead_of_time_gives_none():
    kernel = make("offline")
    assert warned_by(lambda: [tb.tune(kernel, X, i / 7, progress=False) for i in range(20)]) == []


@pytest.mark.promise("exploding-keys")
@pytest.mark.parametrize("kind", [tuple, list, lambda values: {"a": [list(values)]}])
def test_a_container_of_thousands_gives_one_warning(kind):
    big = kind(range(3000))
    (message,) = tune_for(make("long"), [big, big])
    assert message.startswith("long@v0: the 3000 values in its argument 'by' are all part of the key")
    assert "Pass an array" in message
    assert "ignore=('by',)" in message


def test_a_container_of_many_arrays_gives_none():
    assert tune_for(make("pytree"), [{f"layer {i}": X for i in range(300)}]) == []
