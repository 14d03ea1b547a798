"""The hot path is a memo and nothing else: whatever is called in whatever order, it answers as the tiers would."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tunebook as tb
from tunebook._leaf import exact_leaf


class Mode(enum.Enum):
    A = 1
    B = 2


@dataclass(frozen=True)
class Point:
    x: float
    y: object


def helper(x):
    return x


SQUARE = np.zeros((4, 4), np.float32)
VALUES = [
    SQUARE,
    SQUARE.T.copy().T,
    SQUARE[:, ::2],
    np.zeros((4, 2), np.float32),
    np.zeros((4, 4), np.float64),
    np.zeros((4, 4), ">f4"),
    np.asfortranarray(SQUARE),
    np.ma.masked_array(SQUARE),
    True,
    False,
    1,
    0,
    1.0,
    0.0,
    -0.0,
    math.nan,
    2,
    "1",
    "",
    b"1",
    None,
    (1, True),
    (1, 1),
    [1, 1],
    {"a": 1},
    {"a": 1.0},
    np.float32(0.0),
    np.float32(-0.0),
    np.int64(1),
    np.float32,
    np.dtype("float32"),
    Mode.A,
    Mode.B,
    Point(1.0, 2),
    Point(1, 2.0),
    helper,
    len,
    range(2),
    slice(1),
    ...,
    1j,
]


def answer_of(problem):
    return tb.Config(answer=hash(problem))


def make(**options):
    @tb.tunable(space=tb.Space(answer=[0]), name="hot", store=False, **options)
    def kernel(a, b=1, *, c=None, config):
        return config

    return kernel


CALLS = st.lists(
    st.tuples(st.sampled_from(VALUES), st.sampled_from(VALUES), st.sampled_from(VALUES), st.booleans()), max_size=40
)


@settings(max_examples=150, deadline=None)
@given(CALLS, st.sampled_from([{}, {"layout": False}, {"ignore": ("b",)}, {"key": ("a",)}]))
def test_every_call_gets_the_answer_to_its_own_problem(calls, options):
    kernel = make(**options)
    expected = {}
    for a, b, c, _ in calls:
        problem = kernel.problem(a, b, c=c)
        expected[problem] = answer_of(problem)
        kernel.selector.cache.put(*problem, expected[problem])
    for _ in range(3):  # cold, known, hot
        for a, b, c, overlaid in calls:
            problem = kernel.problem(a, b, c=c)
            if overlaid:
                with kernel.overlay(answer="overlay"):
                    assert kernel(a, b, c=c).answer == "overlay"
            assert kernel(a, b, c=c) == expected[problem]


@given(st.sampled_from(VALUES), st.sampled_from(VALUES))
def test_equal_stand_ins_mean_equal_keys(a, b):
    kernel = make()
    try:
        same = exact_leaf(a) == exact_leaf(b)
        hash(exact_leaf(a))
    except (TypeError, AttributeError):
        return  # not memoised at all
    if same:
        assert kernel.problem(a) == kernel.problem(b)


@pytest.mark.parametrize("name", ["found", "key", "config_", "_fast", "call", "self", "type", "int"])
def test_parameters_may_be_called_anything(name):
    namespace = {"tb": tb}
    exec(f"def f({name}, *, config):\n return {name}, config.b", namespace)
    f = tb.tunable(namespace["f"], space=[{"b": 1}], store=False, name="names")
    for _ in range(4):
        assert f(7) == (7, 1)
    assert f(**{name: 8}) == (8, 1)


def test_a_function_without_arguments_is_tunable():
    f = tb.tunable(lambda *, config: config.b, space=[{"b": 1}], store=False, name="none")
    assert [f() for _ in range(4)] == [1] * 4


def test_nan_arguments_do_not_fill_the_memo():
    kernel = make(policy=tb.AutotunePolicy(allow_autotune=False), heuristic={"answer": 0})
    kernel(1.5)
    answers = kernel.__globals__["_tb_fast"]
    for _ in range(50):
        kernel(float("nan"))
    assert len(answers) <= 2, "one for 1.5, and one for every NaN"
