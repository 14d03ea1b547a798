from __future__ import annotations

import enum
import json
import math
import operator
import os
import subprocess
import sys
import textwrap
import threading
from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import ml_dtypes
import numba
import numpy as np
import pydantic
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tunebook._arrays.describe import describe
from tunebook._arrays.library import ArraySpec
from tunebook._arrays.made_up import materialise
from tunebook._base.errors import DefinitionError, UnkeyableError, Unsupported
from tunebook._keys.buckets import as_buckets, multiple, pow2
from tunebook._keys.call_key import call_key, explain_difference, register_key, spell_out
from tunebook._space.space import Config


def key(value: object, **options: object) -> str:
    return call_key({"x": value}, **options)


class Mode(enum.Enum):
    FAST = 1
    SAFE = 2


class Level(enum.IntEnum):
    FAST = 1


class Bits(enum.Flag, boundary=enum.KEEP):
    A = 1
    B = 2


@dataclass
class Tile:
    m: int
    n: object = 1
    cache: dict = field(default_factory=dict, compare=False)


@dataclass
class Block:
    m: int
    n: object = 1


class Pair(NamedTuple):
    m: int
    n: int = 1


class Model(pydantic.BaseModel):
    m: int
    n: float = 1.0


class Text(str):
    __slots__ = ()


class Number(int):
    pass


# ---------------------------------------------------------------------------------------------------------- the form


def test_a_key_is_readable_json():
    arguments = {"a": np.zeros((512, 64), "f4"), "causal": True, "window": (128, 0), "dtype": np.float16}
    assert json.loads(call_key(arguments)) == {
        "a": {"$array": ["numpy", "float32", [512, 64], "C", "cpu"]},
        "causal": True,
        "window": {"$tuple": [128, 0]},
        "dtype": {"$dtype": "float16"},
    }


def test_the_order_of_arguments_does_not_matter():
    assert call_key({"a": 1, "b": 2}) == call_key({"b": 2, "a": 1})


def test_a_spec_gives_the_key_of_the_live_array():
    for x in (np.zeros((3, 4)), np.zeros((3, 4)).T, np.zeros((3, 4), "i1")[:, ::2]):
        assert key(describe(x)) == key(x) == key(describe(x[...]))


@pytest.mark.parametrize(
    "other",
    [
        np.zeros((3, 5), "f4"),
        np.zeros((3, 4, 1), "f4"),
        np.zeros((3, 4), "f8"),
        np.zeros((3, 4), ">f4"),
        np.zeros((4, 3), "f4").T,
        np.zeros((3, 8), "f4")[:, ::2],
        ArraySpec("torch", "float32", (3, 4), "C", "cpu"),
        ArraySpec("numpy", "float32", (3, 4), "C", "gpu"),
    ],
)
def test_arrays_differ_by_shape_dtype_layout_library_and_platform(other):
    assert key(other) != key(np.zeros((3, 4), "f4"))


class Mine(np.ndarray):
    pass


class Yours(np.ndarray):
    pass


def test_a_subclass_is_another_key_and_a_memory_map_is_not(tmp_path):
    a = np.zeros((2, 2))
    kinds = [a, a.view(np.matrix), np.ma.masked_array(a), a.view(Mine), a.view(Yours)]
    assert len(set(map(key, kinds))) == len(kinds)
    assert key(np.memmap(tmp_path / "x", "f8", "w+", shape=(2, 2))) == key(a)
    for x in kinds:
        assert key(describe(x)) == key(x)
        assert describe(x).library == "numpy"
    assert "Mine" in spell_out(key(a.view(Mine)))[0]


def test_an_array_with_a_class_of_its_own_is_not_made_up_as_a_plain_one():
    with pytest.raises(Unsupported, match=r"cannot make up values of a numpy.ma.MaskedArray"):
        materialise(describe(np.ma.zeros(3)))


def test_an_array_class_that_uses_a_mixin_of_numpy_is_no_array_of_numpy():
    class Lazy(np.lib.mixins.NDArrayOperatorsMixin):
        shape, dtype = (2,), np.dtype("f4")

    assert describe(Lazy()).library != "numpy"


def test_the_layout_may_be_left_out():
    a = np.zeros((3, 3), "f4")
    assert key(a, layout=False) == key(a.T, layout=False) != key(a)


def on(device):
    kind = type("Array", (SimpleNamespace,), {"__module__": "jax"})
    place = type("Device", (SimpleNamespace,), {"__module__": "jax", "__str__": lambda self: f"gpu:{self.id}"})
    return kind(shape=(3,), dtype=np.dtype("f4"), device=place(platform="gpu", id=device))


def test_a_call_over_two_devices_has_another_key_than_one_on_a_single_device():
    assert call_key({"a": on(0), "b": on(0)}) == call_key({"a": on(1), "b": on(1)})
    assert call_key({"a": on(0), "b": on(1)}) == call_key({"a": on(1), "b": on(0)})
    assert call_key({"a": on(0), "b": on(1)}) != call_key({"a": on(0), "b": on(0)})


# ---------------------------------------------------------------------------------------------------- all different

DIFFERENT = [
    True,
    1,
    1.0,
    np.bool_(True),
    np.int32(1),
    np.int64(1),
    np.float32(1),
    np.float64(1),
    np.longdouble(1),
    ml_dtypes.bfloat16(1),
    np.datetime64("2020-01-01"),
    np.datetime64("2020-01-01", "s"),
    1 + 0j,
    "1",
    b"1",
    bytearray(b"1"),
    Text("1"),
    Number(1),
    Level.FAST,
    Mode.FAST,
    Mode.SAFE,
    "FAST",
    Bits.A | Bits.B,
    Bits.A,
    Bits(8),
    Bits(16),
    0,
    0.0,
    -0.0,
    math.nan,
    math.inf,
    -math.inf,
    "nan",
    2**63,
    2**64,
    -(2**63),
    10**5000,
    None,
    "None",
    ...,
    "...",
    [],
    (),
    {},
    set(),
    frozenset(),
    [1],
    (1,),
    {1},
    [[1]],
    {"a": 1},
    {"a": 1.0},
    {1: "a"},
    {"1": "a"},
    {"$tuple": [1]},
    {"$array": ["numpy", "float32", [], "C", "cpu"]},
    {"$": 1},
    {(1, 2): 3},
    OrderedDict(a=1, b=2),
    OrderedDict(b=2, a=1),
    UserDict(a=1),
    MappingProxyType({"a": 1}),
    Config(a=1),
    Config(a=True),
    slice(1),
    slice(1, 2),
    slice(None, 1, None),
    range(1),
    range(1, 2),
    Tile(1),
    Tile(1.0),
    Tile(2),
    Block(1),
    Pair(1),
    Model(m=1),
    Model(m=2),
    {"m": 1, "n": 1},
    np.dtype("float32"),
    np.dtype(">f4"),
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    np.floating,
    np.dtype("i4,f4"),
    np.dtype("f4,i4"),
    "float32",
    float,
    int,
    Tile,
    np.zeros(()),
    np.zeros(1),
    np.zeros((1, 1)),
    len,
    max,
    math.sin,
    operator.add,
    np.add,
    np.sin,
    str.upper,
    "a".upper,
    "b".upper,
    partial(max, 1),
    partial(max, 2),
    partial(max, key=1),
    math,
    np,
    "a,b",
    ["a", "b"],
    ["a,b"],
    'a","b',
    "~4",
    "\ud83d\ude00",
    "\U0001f600",
    "x" * 1000,
    "x" * 1001,
    b"x" * 1000,
    "x" * 999 + "y",
]


def test_different_things_have_different_keys():
    keys: dict[str, object] = {}
    for value in DIFFERENT:
        found = key(value)
        if found in keys and keys[found] == value == slice(1):
            continue  # slice(1) and slice(None, 1, None) are equal
        assert found not in keys, f"{value!r} and {keys[found]!r} have the key {found}"
        keys[found] = value


def test_equal_things_have_equal_keys():
    pairs = [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1: 2, "a": 3}, {"a": 3, 1: 2}),
        ({"x", "y", "z"}, {"z", "y", "x"}),
        (Tile(1, cache={}), Tile(1, cache={"warm": 1})),
        (np.float32, np.dtype("float32")),
        (Config(a=1, b=2), Config(b=2, a=1)),
        (float("nan"), -float("nan")),
        (partial(max, key=len, default=1), partial(max, default=1, key=len)),
    ]
    for one, two in pairs:
        assert key(one) == key(two)


# A few values that are easily confused, often, and all others, sometimes.
leaves = st.one_of(
    st.sampled_from(
        [0, 0.0, -0.0, False, None, "", "0", b"0", "$tuple", "~0", ",", '"', "[", Mode.FAST, "FAST", math.nan]
    ),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.binary(),
    st.text(st.characters(codec=None, categories=None), max_size=6),
)


def containers(inner):
    names = st.sampled_from(["", "a", "$tuple", "$dict", 0, False, "0"]) | st.text(max_size=3) | st.integers()
    return st.one_of(
        st.lists(inner, max_size=2),
        st.lists(inner, max_size=2).map(tuple),
        st.dictionaries(names, inner, max_size=2),
        st.builds(Tile, st.integers(0, 1), inner),
        st.builds(Block, st.integers(0, 1), inner),
    )


plain = st.recursive(leaves, containers, max_leaves=4)


def strict(value: object) -> object:
    """Return something that is equal for two values exactly when no program can tell them apart."""
    kind = type(value).__name__
    if isinstance(value, dict):
        return kind, frozenset((strict(k), strict(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return kind, tuple(map(strict, value))
    if isinstance(value, (Tile, Block)):
        return kind, strict(value.m), strict(value.n)
    return kind, repr(value)


patiently = settings(suppress_health_check=[HealthCheck.too_slow])  # the first text on a fresh machine takes 2 s


@settings(patiently, max_examples=1000)
@given(plain, plain)
def test_keys_are_equal_exactly_when_the_values_are(one, two):
    assert (key(one) == key(two)) == (strict(one) == strict(two))


@patiently
@given(st.dictionaries(st.text(min_size=1), plain, max_size=3), st.dictionaries(st.text(min_size=1), plain, max_size=3))
def test_separators_in_names_and_values_do_not_collide(one, two):
    assume(strict(one) != strict(two))
    assert call_key(one) != call_key(two)


def test_keys_are_the_same_in_every_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        from dataclasses import dataclass
        from tunebook._keys.call_key import call_key
        @dataclass
        class Options:
            names: frozenset
        def make(n): return lambda x: x + n
        print(call_key({"o": Options(frozenset("abcdef")), "f": make(3), "s": {"x", "y"}, "d": {2: 1, "a": 2}}))
        """)
    )

    def run(seed: int) -> str:
        env = {**os.environ, "PYTHONHASHSEED": str(seed)}
        return subprocess.run([sys.executable, script], check=True, capture_output=True, text=True, env=env).stdout

    assert len({run(seed) for seed in range(3)}) == 1


# ----------------------------------------------------------------------------------------------------------- dtypes


def scalar_type(name: str) -> object:
    """Return a class as jax.numpy.float32 is one: callable, with the dtype that it makes, and no scalar of numpy's."""
    return type(name, (), {"__module__": "jax.numpy", "dtype": np.dtype(getattr(ml_dtypes, name, name))})


def test_scalar_types_of_jax_are_dtypes_and_not_functions():
    assert key(scalar_type("float32")) == key(np.float32)
    assert key(scalar_type("bfloat16")) == key(ml_dtypes.bfloat16)
    assert key(scalar_type("float32")) != key(scalar_type("bfloat16"))


def test_dtypes_of_torch_have_their_own_name():
    torch = pytest.importorskip("torch")
    assert key(torch.float32) == '{"x":{"$dtype":"torch.float32"}}'


# -------------------------------------------------------------------------------------------------------- callables


def causal(q, k):
    return q >= k


def test_two_lambdas_on_one_line_have_two_keys():
    one, two = (lambda s: s + 1), (lambda s: s + 2)
    assert key(one) != key(two)


def test_equal_functions_have_equal_keys_wherever_they_stand():
    one = lambda s: s * 3
    two = lambda s: s * 3  # elsewhere
    assert key(one) == key(two)
    assert "/" not in key(one)
    assert "0x" not in key(causal)


def test_functions_differ_by_their_closures_and_their_defaults():
    def make(n, m=1):
        return lambda x, scale=m: x * n * scale

    assert (
        len({key(make(*a)) for a in ((1,), (2,), (1.0,), (1, 2), (np.zeros(3),), (np.zeros(4),), (causal,), (len,))})
        == 8
    )
    assert key(make(1)) == key(make(1))


def test_functions_differ_by_the_helpers_they_call(tmp_path):
    keys = set()
    for body in ("return x", "return x + 1"):
        path = tmp_path / f"m{len(keys)}.py"
        path.write_text(f"def helper(x): {body}\ndef f(x): return helper(x)\n")
        names: dict[str, object] = {"__name__": "m"}
        exec(compile(path.read_text(), path, "exec"), names)
        keys.add(key(names["f"]))
    assert len(keys) == 2


def test_a_function_that_calls_itself_has_a_key():
    def make(n):
        def f(x):
            return f(x - n) if x else 0

        return f

    assert key(make(1)) == key(make(1)) != key(make(2))


def test_wrappers_are_keyed_by_the_function_they_wrap():
    wrappers = [lru_cache, numba.njit, partial, staticmethod]
    keys = {key(wrap(f)) for wrap in wrappers for f in (causal, lambda q, k: q)}
    assert len(keys) == 2 * len(wrappers)


def test_universal_functions_made_at_run_time_are_not_known_by_a_name():
    one, two = np.frompyfunc(lambda x: x, 1, 1), np.frompyfunc(lambda x: x + 1, 1, 1)
    for made in (one, two):
        with pytest.raises(UnkeyableError, match=r"numpy\.ufunc"):
            key(made)


@dataclass(frozen=True)
class Mask:
    width: int

    def apply(self, x):
        return x < self.width


def test_methods_are_keyed_by_function_and_object():
    assert key(Mask(1).apply) == key(Mask(1).apply)
    assert len({key(Mask(1).apply), key(Mask(2).apply), key(Mask(1)), key(Mask.apply)}) == 4


# ----------------------------------------------------------------------------------------------------- what has none


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"lock": threading.Lock()}, "lock is a _thread.lock"),
        ({"options": {"mask": [object()]}}, r"options\['mask'\]\[0\] is a builtins.object"),
        ({"tile": Tile(1, object())}, "tile.n is a builtins.object"),
        ({"f": partial(max, object())}, r"f.args\[0\] is a builtins.object"),
        ({"m": SimpleNamespace(a=1)}, "m is a types.SimpleNamespace"),
        ({"g": (n for n in ())}, "g is a builtins.generator"),
    ],
)
def test_an_unkeyable_value_is_an_error_with_argument_path_and_remedy(arguments, path):
    (name,) = arguments
    with pytest.raises(UnkeyableError, match=path) as caught:
        call_key(arguments)
    assert f"argument {name!r} cannot be part of a call key" in str(caught.value)
    assert f"ignore=({name!r},)" in str(caught.value)
    assert "key=(...)" in str(caught.value)
    assert "register_key(" in str(caught.value)


def test_an_unkeyable_closure_variable_is_an_error_that_names_it():
    lock = threading.Lock()
    with pytest.raises(UnkeyableError, match=r"x \(lock of it\) is a _thread.lock"):
        key(lambda: lock)


def test_containers_that_contain_themselves_are_an_error():
    loop: list = []
    loop.append({"again": loop})
    with pytest.raises(UnkeyableError, match="contains itself"):
        key(loop)


def test_containers_that_are_too_deep_are_an_error():
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UnkeyableError, match="nested more than 64 deep"):
        key(deep)


def test_an_object_that_occurs_twice_is_not_a_loop():
    part = [1]
    assert key([part, part]) == key([[1], [1]])


def test_symbolic_shapes_name_the_argument():
    x = SimpleNamespace(shape=("b", 3), dtype=np.dtype("f4"))
    with pytest.raises(
        UnkeyableError, match=r"argument 'x' .*x\[0\]: the shape \(b, 3\).*Symbolic shapes cannot be tuned"
    ):
        key([x])


class Sparse:
    def __init__(self, pattern, data):
        self.pattern, self.data = pattern, data


def test_users_teach_their_own_classes():
    with pytest.raises(UnkeyableError, match="register_key"):
        key(Sparse("a", object()))
    register_key(Sparse, lambda s: (s.pattern,))
    other = type("Other", (Sparse,), {})
    assert key(Sparse("a", object())) == key(Sparse("a", object())) != key(Sparse("b", object()))
    assert key(other("a", 1)) != key(Sparse("a", 1))
    with pytest.raises(DefinitionError, match="takes a class and a function"):
        register_key("Sparse", tuple)


# ---------------------------------------------------------------------------------------------------------- buckets


def test_buckets_stand_in_the_key_so_that_they_cannot_be_mistaken_for_sizes():
    buckets = as_buckets({"a": {0: pow2}, "n": multiple(8)}, ["a", "n"])
    one = call_key({"a": np.zeros((100, 3), "f4"), "n": 5}, buckets=buckets)
    assert one == call_key({"a": np.zeros((128, 3), "f4"), "n": 8}, buckets=buckets)
    assert json.loads(one) == {"a": {"$array": ["numpy", "float32", ["~128", 3], "C", "cpu"]}, "n": {"$bucket": 8}}
    assert one != call_key({"a": np.zeros((128, 3), "f4"), "n": 8})


def test_a_bucket_reaches_arrays_and_numbers_inside_its_argument():
    buckets = as_buckets({"x": pow2}, ["x"])
    assert key([np.zeros(5), {"n": 5}], buckets=buckets) == key([np.zeros(7), {"n": 6}], buckets=buckets)
    assert key((True, "5", 5.0), buckets=buckets) == key((True, "5", 5.0))
    assert key(np.int32(5), buckets=buckets) == key(np.int32(6), buckets=buckets) != key(6, buckets=buckets)


def test_a_bucket_beyond_the_rank_names_the_argument():
    with pytest.raises(UnkeyableError, match="dimension 2 of argument 'x', which has rank 1"):
        key(np.zeros(3), buckets=as_buckets({"x": {2: pow2}}, ["x"]))


# ------------------------------------------------------------------------------------------------------- for people


def test_a_key_is_spelled_out_line_by_line():
    arguments = {
        "a": np.zeros((512, 3), "f4"),
        "b": None,
        "c": (1,),
        "d": {"k": [1.5, "x"]},
        "e": Mode.FAST,
        "f": causal,
        "g": Tile(1, np.float32(2)),
        "h": np.float16,
        "i": {3},
        "j": math.nan,
        "n": 5,
    }
    lines = spell_out(call_key(arguments, buckets=as_buckets({"a": {0: pow2}, "n": pow2}, list(arguments))))
    lines[5] = lines[5].partition(" (")[0]
    assert lines == [
        "a: numpy float32[~512, 3] C on cpu",
        "b: None",
        "c: (1,)",
        "d: {k: [1.5, 'x']}",
        "e: Mode.FAST",
        "f: function causal",
        "g: Tile(m=1, n=float32(2.0))",
        "h: float16",
        "i: {3}",
        "j: nan",
        "n: ~8",
    ]


@patiently
@given(plain)
def test_every_key_can_be_spelled_out(value):
    assert spell_out(key(value))


def test_differences_are_told_part_by_part():
    there = {
        "a": np.zeros((512, 4), "f4"),
        "b": np.zeros((3, 3)),
        "o": Tile(1, (1, 2)),
        "n": 1,
        "s": np.zeros(3),
        "u": 1,
    }
    here = {
        "a": np.zeros((1024, 4), "f2"),
        "b": np.zeros((3, 3)).T,
        "o": Tile(1, (1, 3)),
        "n": True,
        "s": np.zeros((3, 1)),
        "v": 2,
    }
    assert explain_difference(call_key(there), call_key(here)) == [
        "a: dtype float32 there, float16 here",
        "a: dim 0 is 512 there, 1024 here",
        "b: layout C there, F here",
        "n: 1 there, True here",
        "o.n[1]: 2 there, 3 here",
        "s: rank 1 there, 2 here",
        "u: 1 there, not given here",
        "v: not given there, 2 here",
    ]


@patiently
@given(plain, plain)
def test_different_keys_have_a_difference_and_equal_ones_none(one, two):
    assert bool(explain_difference(key(one), key(two))) == (key(one) != key(two))


def test_keys_of_other_makes_are_shown_whole():
    assert spell_out("gpu|512") == ["gpu|512"]
    assert spell_out("[1]") == ["[1]"]
    assert explain_difference("gpu|512", "gpu|1024") == ["key: gpu|512 there, gpu|1024 here"]
    assert explain_difference('{"a":{"$array":3}}', '{"a":{"$array":[1]}}')
