"""One walk: the arrays, devices and keys of arguments in containers of any kind."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tunebook as tb
from tunebook._arrays.describe import MAX_DEPTH, arrays_in, device_of, libraries_of, map_leaves, parts_of, walk
from tunebook._arrays.library import ArraySpec
from tunebook._keys.call_key import call_key, fast_key_of
from tunebook._selection.recording import abstract, concrete


@dataclass
class Box:
    x: Any
    note: Any = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class FrozenBox:
    x: Any


class Pair(NamedTuple):
    a: Any
    b: Any


class Gpu(SimpleNamespace):
    platform = "gpu"
    id = 0
    device_kind = "H200"


CONTAINERS = [
    list,
    tuple,
    lambda items: {f"k{i}": item for i, item in enumerate(items)},
    lambda items: OrderedDict((f"k{i}", item) for i, item in enumerate(items)),
    lambda items: MappingProxyType(dict(enumerate(items))),
    lambda items: Box(list(items)),
    lambda items: FrozenBox(tuple(items)),
    lambda items: Pair(list(items), None),
    lambda items: partial(print, *items),
]

ARRAYS = st.builds(
    lambda shape, dtype, order: np.zeros(shape, dtype, order=order),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(["f4", "f8", ">f4", "i4"]),
    st.sampled_from("CF"),
)
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([0.0, -0.0, 1.0, float("nan"), 0j, -0j, complex(0, -0.0), "", "1", b"", b"1", ..., int, float]),
    st.sampled_from([range(0), range(1, 1), range(True), range(1), slice(0), slice(False), slice(0.0), slice(None)]),
    st.sampled_from(
        [np.float32(0), np.float32(-0.0), np.float64(0), np.int8(1), np.bool_(1), np.dtype("f4"), np.float32]
    ),
    st.sampled_from(
        [np.datetime64(1, "s"), np.datetime64(1, "ms"), frozenset({1}), frozenset({True}), bytearray(b"1")]
    ),
)
ARGUMENTS = st.recursive(
    st.one_of(ARRAYS, PLAIN),
    lambda inner: st.builds(lambda make, items: make(items), st.sampled_from(CONTAINERS), st.lists(inner, max_size=3)),
    max_leaves=8,
)


def arrays_made_by_hand(value):
    """The arrays in a generated argument, by a walk of its own."""
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, (list, tuple)):
        return [x for item in value for x in arrays_made_by_hand(item)]
    if isinstance(value, (dict, MappingProxyType)):
        return [x for item in value.values() for x in arrays_made_by_hand(item)]
    if isinstance(value, partial):
        return arrays_made_by_hand(value.args)
    return arrays_made_by_hand(value.x) if isinstance(value, (Box, FrozenBox)) else []


@given(ARGUMENTS)
def test_the_walk_finds_every_array_in_order(arguments):
    found = list(arrays_in(arguments))
    assert list(map(id, found)) == list(map(id, arrays_made_by_hand(arguments)))


@pytest.mark.promise("memo-as-fine-as-key")
@given(ARGUMENTS, ARGUMENTS)
def test_a_fast_key_distinguishes_whatever_the_call_key_distinguishes(one, other):
    try:
        same = fast_key_of(one) == fast_key_of(other)
    except TypeError:
        return  # not memoised
    if same:
        assert call_key({"x": one}) == call_key({"x": other})


@given(PLAIN, PLAIN)
def test_a_fast_key_distinguishes_plain_values_as_the_call_key_does(one, other):
    if fast_key_of(one) == fast_key_of(other):
        assert call_key({"x": one}) == call_key({"x": other})


@given(ARGUMENTS)
def test_a_call_of_specs_has_the_key_of_the_call_and_so_has_one_made_up_from_them(arguments):
    key = call_key({"x": arguments})
    specs = abstract(arguments)
    assert not [x for x in walk(specs) if isinstance(x, np.ndarray)]
    assert call_key({"x": specs}) == key
    assert call_key({"x": concrete(specs)}) == key


@pytest.mark.parametrize("make", CONTAINERS)
def test_a_gpu_array_in_a_container_makes_it_a_call_on_the_gpu(make):
    x = SimpleNamespace(shape=(2,), dtype="float32", device=Gpu())
    inv = tb.Invocation("op", (make([np.zeros(2), x]),), {})
    assert device_of(inv.args) is x.device
    assert inv.platform == "gpu"
    assert inv.device == "gpu:H200"
    assert "numpy" in libraries_of(inv.args)


def test_a_field_that_is_not_compared_is_walked_but_not_keyed():
    x = np.zeros(2)
    assert next(arrays_in(Box(1, note=x))) is x
    assert call_key({"b": Box(1, note=x)}) == call_key({"b": Box(1)})


@pytest.mark.parametrize("make", [lambda loop: loop, Box, lambda loop: {"k": loop}])
def test_a_container_inside_itself_ends_the_walk(make):
    loop: list[Any] = [np.zeros(1)]
    loop.append(make(loop))
    assert sum(1 for _ in arrays_in(loop)) == 1
    with pytest.raises(TypeError, match="not memoised"):
        fast_key_of(loop)


@dataclass(eq=False)
class Node:
    x: Any
    links: list[Any] = field(default_factory=list)


def test_a_graph_with_more_paths_than_nodes_is_walked_in_no_time():
    nodes = [Node(np.zeros(i)) for i in range(30)]
    for node in nodes:
        node.links = nodes
    assert {id(x) for x in arrays_in(nodes[0])} == {id(node.x) for node in nodes}
    specs = abstract(nodes[0])
    assert specs is not nodes[0]
    assert specs.x == ArraySpec("numpy", "float64", (0,), "C", "cpu")


def test_an_array_in_two_places_is_found_twice():
    shared = [np.zeros(2)]
    assert len(list(arrays_in((shared, shared)))) == 2
    first, second = abstract((shared, shared))
    assert first is second


def test_the_walk_goes_as_deep_as_a_call_key():
    def nested(depth):
        value: Any = np.zeros(1)
        for _ in range(depth):
            value = [value]
        return value

    assert sum(1 for _ in arrays_in(nested(MAX_DEPTH))) == 1
    call_key({"x": nested(MAX_DEPTH)})
    with pytest.raises(tb.UnkeyableError, match="nested more than 64 deep"):
        call_key({"x": nested(MAX_DEPTH + 1)})


def test_classes_numbers_and_texts_are_leaves():
    for leaf in (1, "ab", b"ab", None, 2.0, Box, np.zeros(2), np.float32(1), ArraySpec("numpy", "f4", (1,)), object()):
        assert parts_of(leaf) is None


def test_a_container_without_a_changed_leaf_stays_the_same_object():
    box = Box([1, 2])
    assert map_leaves(lambda leaf: leaf, box) == box
    frozen = FrozenBox(1)
    assert map_leaves(lambda leaf: leaf, frozen) is frozen


def test_a_mapping_that_cannot_be_made_again_is_left_alone():
    class Odd(dict[str, Any]):
        def __copy__(self):
            raise TypeError("not copied")

    odd = Odd(x=np.zeros(2))
    assert abstract(odd) is odd
