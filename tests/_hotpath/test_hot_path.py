"""The hot path is a memo and nothing else: whatever is called in whatever order, it answers as the tiers would.

Everything here is tested with the accelerator and without it.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tunebook as tb
from tunebook._keys.call_key import fast_key_of

pytestmark = pytest.mark.usefixtures("way")


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
SWAPPED, HUGE = np.zeros((4, 4), ">f4"), 2**64
VALUES = [
    SQUARE,
    SQUARE.T.copy().T,
    SQUARE[:, ::2],
    np.zeros((4, 2), np.float32),
    np.zeros((4, 4), np.float64),
    SWAPPED,
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
    HUGE,
    1.5,
    (SQUARE, "1"),
    np.zeros((4, 4), "q"),
    np.zeros((4, 4), "l"),
    np.zeros(0),
]


def answer_of(problem):
    return tb.Config(answer=hash(problem))


def make(**options):
    @tb.tunable(space=tb.Space(answer=[0]), name="hot", store=False, **options)
    def kernel(a, b=1, *, c=None, config):
        return config

    return kernel


def calls_with(values):
    value = st.sampled_from(values)
    return st.lists(st.tuples(value, value, value, st.booleans()), max_size=40)


# Of any kinds, or of those that the accelerator knows: one other argument, and a kernel goes the pure way for good.
KNOWN = (np.ndarray, bool, int, float, str, bytes, type(None))
PACKED = [x for x in VALUES if type(x) in KNOWN and x is not SWAPPED and x is not HUGE]
CALLS = calls_with(VALUES) | calls_with(PACKED)


@pytest.mark.promise("memo-as-fine-as-key")
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
                with kernel.overlay(tb.Config(answer="overlay")):
                    assert kernel(a, b, c=c).answer == "overlay"
            assert kernel(a, b, c=c) == expected[problem]


@given(st.sampled_from(VALUES), st.sampled_from(VALUES))
def test_equal_stand_ins_mean_equal_keys(a, b):
    kernel = make()
    try:
        same = fast_key_of(a) == fast_key_of(b)
        hash(fast_key_of(a))
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


def code_after(kernel, *calls):
    for call in calls:
        kernel(*call)
    return kernel.__code__


def test_arguments_of_other_kinds_need_no_other_code_where_they_are_packed(way):
    kernel = make()
    first = code_after(kernel, (SQUARE, 1))
    assert (code_after(kernel, (1, "x"), (None, 1.5)) is first) == (way == "accelerated")


def test_an_argument_that_cannot_be_packed_makes_the_kernel_go_the_pure_way_for_good(way):
    kernel = make()
    same = kernel
    before = code_after(kernel, (SQUARE, 1), (SQUARE, 1))
    assert ("_tb_find" in before.co_names) == (way == "accelerated")
    after = code_after(kernel, (SQUARE, [1]), (SQUARE, [1]), (SQUARE, 1), (SQUARE, 1))
    assert after is not before
    assert kernel is same
    assert "_tb_find" not in after.co_names


def test_a_warm_call_asks_nobody(way, monkeypatch):
    kernel = make()
    calls = [
        (SQUARE, 1),
        (SQUARE, 2),
        (
            SQUARE,
            1.5,
        ),
        (SQUARE.astype("f8"), True),
    ]
    for a, b in calls * 2:
        kernel(a, b)
    monkeypatch.setitem(kernel.__globals__, "_tb_known", None)
    monkeypatch.setitem(kernel.__globals__, "_tb_miss", None)
    for a, b in calls[:2] if way == "pure" else calls:
        kernel(a, b)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_every_listener_is_told_of_every_hit(count):
    told = []
    kernel = make()
    for i in range(count):
        kernel.selector.listen(lambda event, i=i, **data: told.append((i, event, data["level"], data["cfg"])))
    config = tb.Config(answer=7)
    kernel.selector.cache.put(*kernel.problem(SQUARE, 1), config)
    for _ in range(3):
        kernel(SQUARE, 1)
    assert told == [(i, "cache_hit", "memory", config) for i in range(count)] * 3


@pytest.mark.filterwarnings("ignore:.*is not tuned")
def test_the_authors_own_errors_have_no_other_behind_them():
    @tb.tunable(space=[{"b": 1}], heuristic={"b": 1}, name="raises", store=False)
    def kernel(a, *, config):
        if a < 0:
            raise ValueError("negative")

    kernel(1)
    for _ in range(3):
        with pytest.raises(ValueError, match="negative") as caught:
            kernel(-1)
        assert caught.value.__context__ is None
