from __future__ import annotations

import copy
import itertools
import os
import pickle
import subprocess
import sys
from enum import Enum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunebook._base.config_codec import classes_of, decode, encode, fingerprint
from tunebook._base.errors import DefinitionError
from tunebook._space.space import Config, Space


class Mode(Enum):
    FAST = 1
    SAFE = 2


# ---------------------------------------------------------------------------------------------------------- configs


def test_a_config_reads_both_ways():
    c = Config(block_m=64, mode=Mode.FAST)
    assert (c.block_m, c["mode"]) == (64, Mode.FAST)
    assert {**c} == dict(c) == {"block_m": 64, "mode": Mode.FAST}
    assert dict(**c, more=1) == {**c, "more": 1}
    assert list(c) == list(c.keys()) == ["block_m", "mode"]
    assert list(c.values()) == [64, Mode.FAST]
    assert (len(c), "mode" in c, "x" in c, c.get("x", 3)) == (2, True, False, 3)


def test_a_config_is_frozen():
    c = Config(block=1)
    with pytest.raises(AttributeError, match="frozen; make another one"):
        c.block = 2
    with pytest.raises(AttributeError, match="frozen"):
        del c.block
    with pytest.raises(TypeError, match="does not support item assignment"):
        c["block"] = 2
    assert c.block == 1


def test_equal_configs_hash_alike_whatever_the_order():
    a, b = Config(m=1, n=2), Config(n=2, m=1)
    assert a == b
    assert hash(a) == hash(b)
    assert a == {"n": 2, "m": 1}
    assert a != {"n": 2}
    assert a != Config(m=1, n=3)
    assert a != 3
    assert len({a, b}) == 1


def test_a_config_copies_pickles_and_prints():
    c = Config(block_m=64, mode="x,y")
    hash(c)
    assert copy.copy(c) is c
    assert copy.deepcopy(c) is c
    assert pickle.loads(pickle.dumps(c)) == c
    assert repr(c) == "Config(block_m=64, mode='x,y')"


def test_a_pickled_config_hashes_right_in_a_process_with_another_seed():
    c = Config(name="x")
    hash(c)
    code = (
        f"import pickle; from tunebook import Config; assert pickle.loads({pickle.dumps(c)!r}) in {{Config(name='x')}}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONHASHSEED": "99"})


values = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text('ab,|"\u00e9', max_size=4),
    st.none(),
    st.tuples(st.integers(), st.booleans()),
    st.sampled_from(Mode),
)


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), values))
def test_configs_round_trip_exactly(items):
    c = Config(**items)
    back = decode(encode(c), classes_of([c, *c.values()]))
    assert back == c
    assert [type(v) for v in back.values()] == [type(v) for v in c.values()]
    assert fingerprint(back) == fingerprint(c)


@pytest.mark.parametrize("name", ["keys", "items", "values", "get", "_x", "__class__", "a b", "class", "1st", ""])
def test_names_that_would_hide_something_are_refused(name):
    with pytest.raises(DefinitionError, match="cannot be the name of an axis"):
        Config(**{name: 1})
    with pytest.raises(DefinitionError, match="cannot be the name of an axis"):
        Space(**{name: [1]})


def test_a_config_has_the_attributes_of_a_plain_object():
    assert vars(Config(a=1)) == {"a": 1}
    assert "__getattr__" not in vars(Config)
    with pytest.raises(AttributeError, match="no attribute 'blok'"):
        _ = Config(block=1).blok


# ----------------------------------------------------------------------------------------------------------- spaces


@given(
    st.dictionaries(
        st.sampled_from("abcd"), st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True), min_size=1
    )
)
def test_a_space_is_the_product_in_the_order_written(axes):
    space = Space(**axes)
    expected = [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    assert list(space) == expected
    assert len(space) == space.size == len(expected)
    assert dict(space.axes) == {name: tuple(listed) for name, listed in axes.items()}


def test_constraints_filter():
    space = Space(m=[1, 2, 3], n=[1, 2, 3]).where(lambda c: c.m <= c["n"]).where(lambda c: (c.m * c.n) % 2)
    assert list(space) == [Config(m=1, n=1), Config(m=1, n=3), Config(m=3, n=3)]
    assert (len(space), space.size) == (3, 9)


def test_where_makes_a_new_space():
    space = Space(m=[1, 2])
    assert (len(space), len(space.where(lambda c: c.m > 1)), len(space)) == (2, 1, 2)


def test_a_space_of_a_thousand_billion_points_is_read_lazily():
    space = Space(**{name: range(100) for name in "abcdef"}).where(lambda c: c.f > 50)
    assert next(iter(space)).f == 51
    assert space
    assert space.size == 10**12
    assert dict.fromkeys("abcdef", 99) in space


def test_the_count_is_taken_once():
    calls = []
    space = Space(m=range(10)).where(lambda c: calls.append(c) or c.m > 3)
    assert len(space) == 6
    asked = len(calls)
    assert (len(space), len(calls)) == (6, asked)


def test_an_impossible_space_is_empty():
    space = Space(m=[1]).where(lambda c: False)
    assert not space
    assert list(space) == []


def test_values_are_told_apart_by_type():
    space = Space(x=[True, 1, 1.0])
    assert [type(c.x) for c in space] == [bool, int, float]
    assert {"x": 1} in Space(x=[1])
    assert {"x": True} not in Space(x=[1])
    assert {"x": 1.0} not in Space(x=[1])


def test_membership():
    space = Space(m=[1, 2], mode=list(Mode)).where(lambda c: c.m == 1 or c.mode is Mode.FAST)
    assert Config(mode=Mode.FAST, m=2) in space
    assert {"m": 1, "mode": Mode.SAFE} in space
    for outside in ({"m": 2, "mode": Mode.SAFE}, {"m": 3, "mode": Mode.FAST}, {"m": 1}, {"m": 1, "mode": object()}, 3):
        assert outside not in space


def test_config_builds_a_member_in_the_order_of_the_axes():
    assert repr(Space(m=[1, 2], n=[3]).config(n=3, m=2)) == "Config(m=2, n=3)"


@pytest.mark.parametrize(
    ("given_values", "said"),
    [
        ({"m": 1}, "the axes of this space are m, n; n missing"),
        ({"m": 1, "n": 3, "k": 1}, "k unknown"),
        ({"m": 5, "n": 3}, r"m=5 is not a value of that axis; it has \[1, 2\]"),
        ({"m": np.int64(2), "n": 3}, "2 is equal, but of type int, not int64"),
        ({"m": True, "n": 3}, "1 is equal, but of type int, not bool"),
        ({"m": 2, "n": 3}, r"the constraint lambda c: c.m \* c.n < 6 refuses it"),
    ],
)
def test_config_says_which_axis_or_constraint_refuses(given_values, said):
    with pytest.raises(DefinitionError, match=said):
        Space(m=[1, 2], n=[3]).where(lambda c: c.m * c.n < 6).config(**given_values)


@pytest.mark.parametrize(
    ("axis", "said"),
    [
        ("64", r"for one value write block=\['64'\]"),
        (64, r"for one value write block=\[64\]"),
        ({"a": 1}, "needs a list of values"),
        ({1, 2}, "a set, which has no order"),
        ([], "has no values"),
        ([1, 2, 1], "has the value 1 twice"),
        ([[1, 2]], "not hashable .* write a tuple"),
        ([object()], "cannot be written down"),
    ],
)
def test_an_invalid_axis_is_an_error_with_an_example(axis, said):
    with pytest.raises(DefinitionError, match=said):
        Space(block=axis)


def test_a_space_needs_an_axis():
    with pytest.raises(DefinitionError, match="at least one axis"):
        Space()


def test_axes_may_be_any_iterable():
    assert len(Space(a=range(3), b=(n for n in (1, 2)), c=np.arange(2))) == 12


def test_a_constraint_must_be_a_function():
    with pytest.raises(DefinitionError, match="needs a function of a configuration"):
        Space(m=[1]).where("m > 1")


@pytest.mark.parametrize(
    ("predicate", "said"),
    [
        (lambda c: c.blok > 1, "lambda c: c.blok > 1 failed on Config.m=0.: AttributeError: .* no attribute 'blok'"),
        (lambda c: 1 / c.m, "ZeroDivisionError"),
        (lambda: True, "TypeError"),
    ],
)
def test_an_error_in_a_constraint_names_constraint_and_config(predicate, said):
    with pytest.raises(DefinitionError, match=said):
        list(Space(m=[0]).where(predicate))


def test_the_fingerprint_is_that_of_the_set():
    limit = 4
    one = Space(m=[1, 2], n=[3, 4]).where(lambda c: c.m < c.n).where(lambda c: c.n < limit)
    two = Space(n=[4, 3], m=[2, 1]).where(lambda c: c.n < limit).where(lambda c: c.m < c.n)
    assert one.fingerprint() == two.fingerprint()


def test_the_fingerprint_changes_with_axes_values_and_constraints():
    def below(limit):
        return lambda c: c.m < limit

    spaces = [
        Space(m=[1, 2]),
        Space(m=[1, 2, 3]),
        Space(m=[1, 2.0]),
        Space(n=[1, 2]),
        Space(m=[1, 2], n=[1]),
        Space(m=[1, 2]).where(below(2)),
        Space(m=[1, 2]).where(below(3)),
    ]
    assert len({space.fingerprint() for space in spaces}) == len(spaces)


def test_the_fingerprint_is_the_same_in_every_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from tunebook._space.space import Space\n"
        "print(Space(a=['x', 'y'], b=[(1, 2), None]).where(lambda c: c.a in {'x', 'z'}).fingerprint())\n"
    )

    def run(seed: str) -> str:
        env = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run([sys.executable, script], check=True, capture_output=True, text=True, env=env).stdout

    assert run("1") == run("2")


def test_a_space_prints_short():
    space = Space(m=[1, 2], n=range(100)).where(lambda c: c.m < c.n)
    assert repr(space) == "Space(m=[1, 2], n=[0, 1, 2, 3, 4, 5, ... 100 values]).where(lambda c: c.m < c.n)"


@pytest.mark.parametrize(
    ("axes", "says"), [({"rows": [1, 2]}, r"Space\(rows=\[1, 2\]\)"), ([1, 2], r"Space\(block=\[")]
)
def test_axes_that_are_not_given_by_name_are_an_error_that_writes_them_so(axes, says):
    with pytest.raises(DefinitionError, match=f"by name: write {says}"):
        Space(axes)
