"""The memo is never coarser than the key: calls with different keys never share an answer, in C and in pure Python."""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tunebook as tb
from tunebook._keys.call_key import call_key, fast_key_of

pytestmark = pytest.mark.usefixtures("way")


class Mode(enum.Enum):
    A = 1
    B = 2


class Level(enum.IntEnum):
    A = 1


class Text(str):
    __slots__ = ()


class Sub(np.ndarray):
    pass


class Other(np.ndarray):
    pass


@dataclass
class Box:
    x: Any


@dataclass
class Crate:
    x: Any


class Pair(NamedTuple):
    x: Any
    y: Any = 0


class Quantised:
    """Keyed by its array and its scheme."""

    def __init__(self, values, scheme):
        self.values, self.scheme = values, scheme


class Child(Quantised):
    pass


tb.register_key(Quantised, lambda q: (q.values, q.scheme))

ZEROS = np.zeros((2, 2), np.float32)
ARRAYS = [
    ZEROS,
    ZEROS.T.copy().T,
    np.zeros((2, 4), np.float32)[:, ::2],
    ZEROS.astype(">f4"),
    ZEROS.view(np.int32),
    ZEROS.view(Sub),
    ZEROS.view(Other),
    ZEROS.view(np.matrix),
    np.ma.masked_array(ZEROS),
    np.zeros(2, [("a", "i4")]),
    np.zeros(2, [("b", "i4")]),
    np.zeros(2, "M8[s]"),
    np.zeros(2, "M8[D]"),
]
# Values that are equal, or nearly so, and have different keys.
CONFUSING = [
    *(0, False, 0.0, -0.0, 0j, complex(0, -0.0), complex(-0.0, 0), "", "0", b"0", bytearray(b"0"), None, ...),
    *(1, True, 1.0, 1 + 0j, "1", Mode.A, Mode.B, Level.A, Text("1"), math.nan, math.inf, 2**64, float(2**64)),
    *(range(0, 3, 2), range(0, 4, 2), range(0), range(1, 1), slice(0, 1), slice(False, True), slice(1), slice(1.0)),
    *(np.float32(0), np.float32(-0.0), np.float64(0), np.int64(1), np.int32(1), np.bool_(True), np.complex64(0)),
    *(np.datetime64(0, "s"), np.datetime64(0, "D"), np.timedelta64(0, "s"), np.timedelta64(0, "D")),
    *(np.zeros((), [("a", "i4")])[()], np.zeros((), [("b", "i4")])[()], np.longdouble(1), np.str_("1")),
    *(np.float32, np.dtype("f4"), np.dtype(">f4"), int, bool, Box, len, max, partial(max, 1), partial(max, True)),
    *ARRAYS,
]


def foreign() -> list[Any]:
    """Return values of jax and torch, which are slow to import."""
    jax, torch = pytest.importorskip("jax"), pytest.importorskip("torch")
    return [
        *(jax.numpy.float32(2.0), jax.numpy.asarray(2.0), jax.numpy.asarray(2), jax.numpy.int32(2)),
        *(jax.numpy.zeros((2, 2)), jax.numpy.bfloat16(2.0), jax.numpy.float32, jax.numpy.bfloat16),
        *(torch.zeros(2, 2), torch.zeros(2, 2).T, torch.zeros(2, 2, requires_grad=True), torch.tensor(2.0)),
        *(torch.nn.Parameter(torch.zeros(2, 2)), torch.zeros(2, 2).as_subclass(type("Mine", (torch.Tensor,), {}))),
        *(torch.float32, torch.zeros(2, 2, dtype=torch.bfloat16), torch.device("cpu").type, ZEROS),
    ]


def containers(inner):
    names = st.sampled_from(["a", "b", 0, False, 1, True, 1.0])
    pairs = st.dictionaries(names, inner, max_size=2)
    hashable = st.sampled_from([0, False, "", 1.0, (1,), (True,)])
    return st.one_of(
        st.lists(inner, max_size=2),
        st.lists(inner, max_size=2).map(tuple),
        *(pairs, pairs.map(OrderedDict), pairs.map(MappingProxyType)),
        *(inner.map(kind) for kind in (Box, Crate, Pair)),
        *(st.builds(kind, inner, st.sampled_from(["int4", "fp8"])) for kind in (Quantised, Child)),
        *(st.frozensets(hashable, max_size=2), st.sets(hashable, max_size=2)),
    )


def calls(values):
    return st.lists(st.recursive(st.sampled_from(values), containers, max_leaves=3), min_size=2, max_size=8)


def check(arguments, **options):
    @tb.tunable(space=tb.Space(answer=[0]), name="keyed", store=False, **options)
    def kernel(x, *, config):
        return config.answer

    for x in arguments:
        problem = kernel.problem(x)
        kernel.selector.cache.put(*problem, tb.Config(answer=problem.call_key))
    for _ in range(3):  # cold, known, hot
        for x in arguments:
            assert kernel(x) == kernel.problem(x).call_key


quickly = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


HOLDERS = {
    "alone": lambda x: x,
    "a list": lambda x: [x],
    "a tuple": lambda x: (x,),
    "a dict": lambda x: {"x": x},
    "a mapping": lambda x: MappingProxyType({"x": x}),
    "a dataclass": Box,
    "a NamedTuple": Pair,
    "a registered class": lambda x: Quantised(x, ""),
    "a partial": lambda x: partial(max, x),
}


@pytest.mark.promise("memo-as-fine-as-key")
@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_values_that_are_easily_confused_keep_their_answers(hold):
    check([hold(x) for x in CONFUSING])


@pytest.mark.parametrize("layout", [True, False])
def test_arrays_that_are_easily_confused_keep_their_answers(layout):
    check(ARRAYS, layout=layout)


@pytest.mark.promise("memo-as-fine-as-key")
@quickly
@given(calls(CONFUSING), st.booleans())
def test_a_call_never_gets_the_answer_to_another_key(arguments, layout):
    check(arguments, layout=layout)


@quickly
@given(calls(CONFUSING))
def test_equal_fast_keys_mean_equal_call_keys(arguments):
    seen: dict[Any, str] = {}
    for x in arguments:
        try:
            fast = fast_key_of(x)
            hash(fast)
        except TypeError:
            continue  # the call always goes the long way
        assert seen.setdefault(fast, call_key({"x": x})) == call_key({"x": x})


@pytest.mark.promise("memo-as-fine-as-key")
@pytest.mark.parametrize("first", range(4))
def test_arrays_and_scalars_of_frameworks_keep_their_answers(first):
    values = foreign()
    check(values[first:] + values[:first])


def test_a_key_function_that_is_registered_later_counts():
    class Scheme:
        def __init__(self, name):
            self.name = name

    tb.register_key(Scheme, lambda scheme: 0)
    assert fast_key_of(Scheme("a")) == fast_key_of(Scheme("b"))
    tb.register_key(Scheme, lambda scheme: scheme.name)
    check([Scheme("int4"), Scheme("fp8")])
