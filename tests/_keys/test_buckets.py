from __future__ import annotations

import pickle
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunebook._base.errors import DefinitionError, TunebookWarning, UnkeyableError, forget_warnings
from tunebook._keys.buckets import anchor, as_buckets, exact, multiple, pow2, unknown_name


@pytest.fixture(autouse=True)
def _fresh_warnings():
    forget_warnings()


@given(st.integers(0, 200), st.integers(-1, 1))
def test_pow2_is_exact_around_every_power(exponent, step):
    x = 2**exponent + step
    expected = x if x <= 1 else 2**exponent if step <= 0 else 2 ** (exponent + 1)
    if exponent == 0 and step == 1:
        expected = 2
    if exponent == 1 and step == -1:
        expected = 1
    assert pow2(x) == expected


@given(st.integers(2, 10**30))
def test_pow2_is_the_smallest_power_that_is_large_enough(x):
    assert pow2(x) // 2 < x <= pow2(x)
    assert pow2(x).bit_count() == 1


def test_zero_one_and_negative_numbers_stand_for_themselves():
    assert [pow2(x) for x in (-5, 0, 1)] == [-5, 0, 1]


@given(st.integers(0, 10**30), st.integers(1, 10**6))
def test_multiple_rounds_up(x, of):
    bucket = multiple(of)
    assert bucket(x) % of == 0
    assert x <= bucket(x) < x + of


@pytest.mark.parametrize("of", [0, -1, 1.5, True])
def test_multiple_needs_a_step(of):
    with pytest.raises(DefinitionError, match="at least 1"):
        multiple(of)


@given(st.integers(0, 60), st.integers(2, 10), st.integers(-1, 1))
def test_anchor_is_exact_around_every_power_of_any_base(exponent, base, step):
    x = base**exponent + step
    expected = base**exponent if step <= 0 else base ** (exponent + 1)
    if x <= 1:
        expected = 1
    elif step < 0 and x <= base ** (exponent - 1):
        expected = base ** (exponent - 1)
    assert anchor(x, base=base) == expected


@pytest.mark.parametrize(
    ("x", "kwargs", "expected"),
    [(0, {}, 1), (100, {}, 128), (100, {"max": 64}, 64), (3, {"min": 16}, 16), (10**9, {"max": 4096, "min": 16}, 4096)],
)
def test_anchor_is_clamped(x, kwargs, expected):
    assert anchor(x, **kwargs) == expected


def test_anchor_has_a_base_of_at_least_two():
    with pytest.raises(DefinitionError, match="at least 2"):
        anchor(5, base=1)


# ------------------------------------------------------------------------------------------------ reading `bucket=`


def test_buckets_apply_to_the_dimensions_they_name():
    buckets = as_buckets({"a": {0: pow2, -1: [64, 128]}}, ["a", "b"])
    assert buckets.shape("a", (100, 7, 100)) == ["~128", 7, "~128"]
    assert buckets.shape("b", (100, 7)) == [100, 7]


def test_a_bucket_for_an_argument_applies_to_all_its_dimensions_and_to_a_number():
    buckets = as_buckets({"a": pow2, "n": partial(anchor, max=64)}, ["a", "n", "m"])
    assert buckets.shape("a", (3, 5)) == ["~4", "~8"]
    assert buckets.scalar("n", 1000) == 64
    assert buckets.scalar("m", 1000) is None


def test_exact_is_the_same_as_no_bucket():
    buckets = as_buckets({"a": {0: exact}, "n": exact}, ["a", "n"])
    assert buckets.shape("a", (100, 7)) == [100, 7]
    assert buckets.scalar("n", 5) is None


def test_a_size_above_the_list_is_clamped_with_one_warning():
    buckets = as_buckets({"a": {0: [128, 64]}}, ["a"])
    with pytest.warns(TunebookWarning, match=r"a.shape\[0\] is 1000, above the largest bucket 128") as caught:
        assert [buckets.shape("a", (n,)) for n in (1000, 2000, 65)] == [["~128"], ["~128"], ["~128"]]
    assert len(caught) == 1


@pytest.mark.parametrize("x", [0, 1, 63, 64])
def test_a_size_within_the_list_takes_the_next_larger_one(x):
    assert as_buckets({"n": (64, 128)}, ["n"]).scalar("n", x) == 64


def test_an_unknown_argument_is_an_error_with_the_close_match():
    with pytest.raises(
        DefinitionError, match=r"'lenght', but the arguments are 'length', 'q'; did you mean 'length'\?"
    ):
        as_buckets({"lenght": pow2}, ["length", "q"])
    assert unknown_name("zzz", ["length"]) == "the arguments are 'length'"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (pow2, "must say which argument"),
        ({"a": {"0": pow2}}, "a dimension is an int, not '0'"),
        ({"a": {True: pow2}}, "a dimension is an int, not True"),
        ({"a": []}, "give exact, pow2"),
        ({"a": [1, 2.5]}, "give exact, pow2"),
        ({"a": [True]}, "give exact, pow2"),
        ({"a": {0: 64}}, "give exact, pow2"),
        ({"a": "pow2"}, "give exact, pow2"),
    ],
)
def test_a_bucket_that_can_never_apply_is_an_error_at_definition(spec, said):
    with pytest.raises(DefinitionError, match=said):
        as_buckets(spec, ["a"])


@pytest.mark.parametrize(("dimension", "rank"), [(2, 2), (-3, 2), (0, 0)])
def test_a_dimension_out_of_range_names_argument_and_rank(dimension, rank):
    buckets = as_buckets({"a": {dimension: pow2}}, ["a"])
    with pytest.raises(UnkeyableError, match=f"dimension {dimension} of argument 'a', which has rank {rank}"):
        buckets.shape("a", (1,) * rank)


def test_one_dimension_named_twice_is_an_error():
    buckets = as_buckets({"a": {0: pow2, -2: exact}}, ["a"])
    with pytest.raises(UnkeyableError, match="dimension 0 of argument 'a' twice"):
        buckets.shape("a", (3, 4))


def test_dimensions_of_a_number_are_an_error():
    with pytest.raises(UnkeyableError, match="argument 'n' is the number 5, but bucket= names its dimensions"):
        as_buckets({"n": {0: pow2}}, ["n"]).scalar("n", 5)


@pytest.mark.parametrize("wrong", [1.5, None, "64", True])
def test_a_bucket_that_gives_no_integer_is_an_error_that_names_it(wrong):
    buckets = as_buckets({"a": lambda _: wrong}, ["a"])
    with pytest.raises(UnkeyableError, match=r"the bucket of a.shape\[0\] gave .* for 7"):
        buckets.shape("a", (7,))


def test_no_buckets_leave_shapes_as_they_are():
    assert as_buckets(None, ["a"]).shape("a", (3, 4)) == [3, 4]


def test_buckets_travel_to_other_processes():
    buckets = pickle.loads(pickle.dumps(as_buckets({"a": {0: pow2, 1: multiple(8), 2: [4]}}, ["a"])))
    assert buckets.shape("a", (3, 3, 3)) == ["~4", "~8", "~4"]
