"""The codec: what goes in comes out, with its type; what cannot is an error; what is read builds nothing undeclared."""

from __future__ import annotations

import enum
import json
import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tunebook as tb
from tunebook._base.config_codec import classes_of, decode, encode, fingerprint, register_codec


class Mode(enum.Enum):
    FAST = 1
    SAFE = "s"


class Flags(enum.Flag):
    A = enum.auto()
    B = enum.auto()


class Pair(NamedTuple):
    a: int
    b: str = "x"


@dataclass(frozen=True)
class Inner:
    sizes: tuple[int, ...] = (1, 2)
    mode: Mode = Mode.FAST


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    scale: float | None = None
    unroll: bool = True


class Model(pydantic.BaseModel):
    block: tuple[int, int]
    mode: Mode = Mode.SAFE


class LikeTriton:
    """A plain class that keeps its constructor's arguments, as triton.Config does."""

    def __init__(self, kwargs, num_warps=4, pre_hook=None):
        self.kwargs, self.num_warps, self.pre_hook = kwargs, num_warps, pre_hook

    def __eq__(self, other):
        return vars(self) == vars(other)

    __hash__ = None


VALUES = [
    None,
    True,
    1,
    1.0,
    -0.0,
    10**400,
    -(2**53),
    float("inf"),
    "a,b|c$",
    "\udc80",
    "\ud83d\ude00",
    b"\x00\xff",
    2 + 3j,
    (1, (2, [3, {"k": (4,)}])),
    {1: "int key", "1": "str key", (2, 3): None},
    {"$": "looks like a tag"},
    {"$tag": 1},
    {1, 2, 3},
    frozenset({("a", 1)}),
    Mode.FAST,
    Flags.A | Flags.B,
    Pair(3),
    Outer(Inner((7,), Mode.SAFE), scale=0.1),
    Model(block=(64, 32)),
    LikeTriton({"BLOCK": 64}, num_warps=8),
    np.dtype("float32"),
    np.dtype(ml_dtypes.bfloat16),
    np.float16,
    np.int8(3),
    ml_dtypes.bfloat16(1.5),
    tb.Config(block_m=64, order=("i", "j"), dtype=np.dtype("int8"), mode=Mode.SAFE, inner=Inner((9,))),
]


def same(a, b):
    """Equal, and of the same types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return a == b


def there_and_back(value):
    return decode(json.loads(json.dumps(encode(value))), classes_of([value]))


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_equal_and_of_its_type(value):
    assert same(there_and_back(value), value)


def test_nan_comes_back_as_nan():
    assert math.isnan(there_and_back(math.nan))


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary(max_size=20)
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(
            st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.text(max_size=2)), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_whatever_is_made_of_plain_values_round_trips(value):
    assert same(there_and_back(value), value)


@given(PLAIN, PLAIN)
def test_fingerprints_are_equal_exactly_when_values_are(a, b):
    assert (fingerprint(a) == fingerprint(b)) == same(_nan_to_str(a), _nan_to_str(b))


def _nan_to_str(value):
    """NaN equals itself for a fingerprint; and dict order does not count."""
    return json.dumps(encode(value), sort_keys=True)


def test_a_pair_of_surrogates_is_not_the_character_that_it_would_encode():
    assert fingerprint("\ud83d\ude00") != fingerprint("\U0001f600")


def test_true_one_and_one_point_zero_are_three_values():
    assert len({fingerprint(v) for v in (True, 1, 1.0)}) == 3


@pytest.mark.parametrize("value", [object(), lambda: 1, {"a": [1, open]}, range(3), np.zeros(3)], ids=repr)
def test_a_value_without_a_codec_is_an_error_that_names_the_remedy(value):
    with pytest.raises(tb.CodecError, match="register_codec"):
        encode(value)


def test_the_error_names_the_part():
    with pytest.raises(tb.CodecError, match=r"value\.a\[1\]"):
        encode({"a": [1, object()]})


def test_a_value_that_contains_itself_is_an_error():
    loop = []
    loop.append(loop)
    with pytest.raises(tb.CodecError, match="contains itself"):
        encode(loop)


@pytest.mark.promise("only-candidates")
def test_a_class_that_was_not_declared_is_not_built():
    with pytest.raises(tb.CodecError, match="not among the classes"):
        decode(encode(Inner()), {})


def test_without_declared_classes_objects_come_back_as_their_fields():
    assert decode(encode(Outer(Inner((7,))))) == {
        "inner": {"sizes": (7,), "mode": "FAST"},
        "scale": None,
        "unroll": True,
    }


def test_a_dataclass_that_lost_a_field_does_not_read_the_old_entry():
    encoded = encode(Inner())
    encoded["v"]["gone"] = 1
    with pytest.raises(tb.CodecError, match="no fields"):
        decode(encoded, classes_of([Inner]))


def test_a_class_can_be_taught():
    class Odd:
        def __init__(self, *parts):
            self.parts = parts

    register_codec(Odd, lambda odd: odd.parts, lambda parts: Odd(*parts))
    assert there_and_back(Odd(1, (2,))).parts == (1, (2,))


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["$", "t", "v", "d", "a"]) | st.text(max_size=3), inner, max_size=4)
        | st.fixed_dictionaries(
            {
                "$": st.sampled_from(
                    [
                        "int",
                        "float",
                        "complex",
                        "tuple",
                        "set",
                        "map",
                        "bytes",
                        "dtype",
                        "scalar",
                        "scalar-type",
                        "torch-dtype",
                        "enum",
                        "object",
                        "custom",
                        "jax-scalar-type",
                        "frozenset",
                    ]
                ),
                "t": st.just("test_codec.Inner") | st.text(max_size=4),
                "v": inner,
            }
        )
    ),
    max_leaves=10,
)


@pytest.mark.promise("only-candidates")
@given(JSON)
def test_reading_arbitrary_json_gives_a_value_or_a_codec_error(data):
    with suppress(tb.CodecError):
        decode(data, classes_of([Inner, Mode]))
