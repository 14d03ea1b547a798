"""Spaces of any size: kinds of axes, dependent axes, counting, sampling, and the forms of other tools."""

from __future__ import annotations

import itertools
import json
import math
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunebook import DefinitionError, Space
from tunebook._base.config_codec import encode
from tunebook.search import Expression, from_kernel_tuner, read_t1, write_t1
from tunebook.search._model import product_positions
from tunebook.search._strategy import size_pairs


def kinds(space):
    return {axis.name: axis.kind for axis in space.grid}


def test_the_kind_of_an_axis_is_told_from_its_values():
    order = itertools.permutations("mnk")
    space = Space(tile=[1, 2, 4, 8], pad=[0, 1, 2], f=["a", "b"], flag=[False, True], order=order)
    assert kinds(space) == {
        "tile": "log", "pad": "ordered", "f": "categorical", "flag": "categorical", "order": "permutation"
    }  # fmt: skip
    assert kinds(space.typed(tile="categorical"))["tile"] == "categorical"
    assert space.typed(tile="categorical").fingerprint() == space.fingerprint()


def test_neighbours_are_the_next_values_a_swap_or_any_other_category():
    order = list(itertools.permutations("mnk"))
    tile, kind, perm = Space(tile=[64, 16, 32], kind=["x", "y", "z"], order=order).grid
    assert [tile.values[i] for i in tile.beside(1)] == [16, 64]
    assert [kind.values[i] for i in kind.beside(0)] == ["y", "z"]
    assert {"".join(perm.values[i]) for i in perm.beside(0)} == {"nmk", "mkn"}
    many = Space(m=range(1000)).grid[0]
    assert set(many.others(500)) == {500 + sign * 2**i for i in range(9) for sign in (1, -1)}


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ({"m": "round"}, "'m' cannot be 'round'"),
        ({"f": "ordered"}, "not numbers"),
        ({"z": "log"}, "zero or less"),
        ({"m": "permutation"}, "not all orders"),
        ({"x": "log"}, "unknown axis 'x'"),
    ],
)
def test_a_kind_that_does_not_fit_is_an_error(kinds, message):
    with pytest.raises(DefinitionError, match=message):
        Space(m=[1, 2], f=["a", "b"], z=[0, 1, 8]).typed(**kinds)


def roundness(values):
    found = Space(a=values).grid[0].roundness()
    return found and [tuple(round(part * math.sqrt(len(parts)), 2) for part in parts) for parts in found]


def test_axes_of_sizes_tell_how_round_each_value_is_and_others_do_not():
    halvings, powers = [0.67, 0.33, 1.0, 0.0, 0.67, 1.0], [1, 0, 1, 0, 0, 1]
    assert roundness([32, 48, 64, 72, 96, 128]) == list(zip(halvings, powers, strict=True))
    assert roundness([1, 2, 3, 4]) == [(1,), (1,), (0,), (1,)]
    assert roundness([48, 80, 96]) == [(0,), (0,), (1,)]
    for nothing_new in ([16, 32, 64], [3, 4], [17, 19], ["a", "b", "c"], [0, 1, 24], [16.0, 24.0, 30.0]):
        assert roundness(nothing_new) is None


def test_values_are_moved_to_a_power_of_two_of_the_axis_within_a_factor_of_the_root_of_two():
    (axis,) = Space(a=range(32, 1024, 96)).grid
    moved = [axis.values[at] for at in axis.nearest_powers_of_two()]
    assert moved == [32, 128, 224, 320, 512, 512, 512, 512, 800, 896, 992]
    assert Space(a=[1, 3, 5, 6]).grid[0].nearest_powers_of_two() == [0, 1, 2, 3]
    assert Space(a=["x", "y", "z"]).grid[0].nearest_powers_of_two() == [0, 1, 2]


@given(sizes=st.lists(st.integers(1, 4096), min_size=1, max_size=12, unique=True))
def test_how_round_values_are_is_never_further_apart_than_one(sizes):
    found = Space(a=sizes).grid[0].roundness() or [(0.0,)]
    assert all(math.dist(one, other) <= 1 + 1e-9 for one in found for other in found)


def test_products_are_of_sizes_and_the_same_product_is_at_the_same_place():
    axes = Space(x=[8, 16, 32], mode=["a", "b"], y=[1, 2, 4, 8], stages=[1, 2, 3], z=[1, 1024]).grid
    pairs = size_pairs(axes)
    assert [(axes[one].name, axes[other].name) for one, other in pairs] == [("x", "y"), ("x", "z"), ("y", "z")]
    products = itertools.product(axes[0].values, axes[2].values)
    position = dict(zip(products, product_positions(axes[0], axes[2]), strict=True))
    assert position[8, 2] == position[16, 1]
    assert position[8, 8] == position[32, 2]
    assert (position[8, 1], position[32, 8]) == (0.0, 1.0)
    assert len(size_pairs(Space(**{f"a{i}": [1, 4 + i] for i in range(9)}).grid)) == 15


def test_axes_that_are_set_at_launch_add_up_and_change_nothing_else():
    space = Space(tile=[1, 2], threads=[32, 64], group=[1, 2])
    launched = space.at_launch("threads").where(lambda c: c.tile < 3).at_launch("group").typed(tile="ordered")
    assert launched.launch_axes == {"threads", "group"}
    assert space.launch_axes == frozenset()
    assert list(launched) == list(space)
    assert space.at_launch("threads").fingerprint() == space.fingerprint()
    with pytest.raises(DefinitionError, match=r"unknown axis 'grid'\. Valid: tile, threads, group"):
        space.at_launch("grid")


def test_an_axis_may_depend_on_earlier_axes():
    space = Space(m=[2, 4, 6], n=lambda c: [d for d in range(1, c.m + 1) if c.m % d == 0])
    assert [(c.m, c.n) for c in space] == [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (6, 1), (6, 2), (6, 3), (6, 6)]
    assert len(space) == 9
    assert {"m": 4, "n": 3} not in space
    assert space.fingerprint() != Space(m=[2, 4, 6], n=lambda c: [1, c.m]).fingerprint()


def test_an_axis_that_depends_on_a_later_one_is_an_error():
    with pytest.raises(DefinitionError, match="axis 'n' depends on k; let it read axes that come before it: m"):
        Space(m=[1, 2], n=lambda c: [c.k], k=[1])


PREDICATES = [
    lambda c: c.a + c.b < 6,
    lambda c: c["b"] != c["c"],
    lambda c: c.a == 1 or c.c > 1,
    lambda c: sum(c.values()) % 2 == 0,
    lambda c: c.get("c", 0) < 3,
    lambda c: (c.a, c.c) not in {(1, 1), (2, 2)},
]


@settings(deadline=None)
@given(chosen=st.sets(st.integers(0, len(PREDICATES) - 1)))
def test_walking_counting_and_sampling_agree_with_listing_everything(chosen):
    space = Space(a=range(5), b=range(4), c=range(4), d=[1, 2])
    for i in sorted(chosen):
        space = space.where(PREDICATES[i])
    every = [c for c in Space(a=range(5), b=range(4), c=range(4), d=[1, 2]) if all(PREDICATES[i](c) for i in chosen)]
    assert list(space) == every
    assert len(space) == len(every)
    rng = random.Random(0)
    assert all(space.sample(rng) in set(every) for _ in range(20))


@given(st.integers(0, 10**6))
def test_a_point_leads_back_to_its_configuration(seed):
    space = Space(a=[3, 1, 2], b=[True, 1, "1", None, 1.0], c=[(1, 2), (2, 1)]).where(lambda c: c.a != 2)
    config = space.sample(random.Random(seed))
    assert space.at(space.point(config)) == config
    assert space.decoded(json.loads(json.dumps(encode(config)))) == config


def test_a_configuration_is_found_even_where_almost_none_is_valid():
    space = Space(a=range(100), b=range(100), c=range(100)).where(lambda c: c.a == 77).where(lambda c: c.b == c.c == 5)
    assert dict(space.sample(random.Random(0))) == {"a": 77, "b": 5, "c": 5}
    assert Space(a=range(3)).where(lambda c: c.a > 5).sample(random.Random(0)) is None


def test_a_mistake_in_a_constraint_is_still_shown():
    with pytest.raises(DefinitionError, match="AttributeError"):
        list(Space(a=[1], b=[2]).where(lambda c: c.a < c.nothing))


def test_a_space_of_seven_million_is_counted_and_sampled_without_being_listed():
    tracemalloc.start()
    space = (
        Space(a=range(10), b=range(10), c=range(10), d=range(10), e=range(10), f=range(10), g=range(10))
        .where(lambda c: c.a + c.b < 15)
        .where(lambda c: c.e * c.f <= 40)
    )
    pairs = list(itertools.product(range(10), repeat=2))
    assert len(space) == sum(a + b < 15 for a, b in pairs) * sum(e * f <= 40 for e, f in pairs) * 1000
    assert space.sample(random.Random(0)) in space
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 2**20


def test_kernel_tuner_s_form_is_read():
    space = from_kernel_tuner(
        {"block_size_x": [16, 32, 64], "block_size_y": [1, 2, 4], "use": [0, 1]},
        ["32 <= block_size_x * block_size_y <= 64", "use == 0 or block_size_x % 32 == 0", "block_size_y in (1, 2, 4)"],
    )
    expected = [
        (x, y, u)
        for x, y, u in itertools.product([16, 32, 64], [1, 2, 4], [0, 1])
        if 32 <= x * y <= 64 and (u == 0 or x % 32 == 0)
    ]
    assert [tuple(c.values()) for c in space] == expected


def test_t1_is_read_and_written_again_the_same():
    axes = {"x": [1, 2, 4], "s": ["a", "b"], "f": [0.5, 1.0]}
    space = from_kernel_tuner(axes, ["x * 2 <= 4", "min(x, 2) > 1 && x != 3"])
    document = json.loads(json.dumps(write_t1(space)))
    assert read_t1(document).fingerprint() == space.fingerprint()
    assert list(read_t1(document)) == list(space)


def test_every_operator_of_a_condition_means_the_same_as_in_python():
    config = {"x": 6, "y": 4, "none": None, "s": "a"}
    for text in (
        "none is None", "x is not None", "none is not None", "not x % 4", "-x < ~y", "x in (1, 6)", "s not in ['a']",
        "1 < y < x", "1 < x < y", "x if y > 4 else s == 'a'", "x // y + x / y - x ** 2 * 3 > 1", "max(x, y, 9) == 9",
        "(x & y | 1) ^ 2 == 7", "1 << x > y >> 1", "ceil(x / y) == 2", "x > 9 or y <= 4 and s != 'b'", "log2(y) == 2",
    ):  # fmt: skip
        assert Expression(text)(config) == bool(eval(text, {**vars(math)}, config)), text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Expression("x <"), "is not an expression"),
        (lambda: Expression("__import__('os')"), "only min, max"),
        (lambda: Expression("x.real > 1"), "not understood: 'x.real'"),
        (lambda: Expression("[y for y in x]"), "not understood"),
        (lambda: Expression("x @ x"), "not understood: 'x @ x'"),
        (lambda: read_t1({}), "not a T1 document"),
        (lambda: write_t1(Space(x=[1]).where(lambda c: c.x)), "is Python code"),
        (lambda: write_t1(Space(x=[True])), "T1 cannot hold"),
    ],
)
def test_a_space_or_condition_that_other_formats_cannot_hold_is_an_error(make, message):
    with pytest.raises(DefinitionError, match=message):
        make()
