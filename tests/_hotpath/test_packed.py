"""The accelerator: its bytes tell arguments apart exactly as the pure-Python keys do, and nothing makes it crash."""

from __future__ import annotations

import email
import enum
import importlib.util
import math
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import textwrap
import threading
import zipfile
from collections import namedtuple
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

import tunebook as tb
from tunebook._hotpath.codegen import find_pack
from tunebook._keys.call_key import fast_key_of

ROOT = Path(__file__).parents[2]
NUMPY_MAJOR = int(np.__version__.partition(".")[0])


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def packer(tmp_path_factory):
    """The accelerator of this very source, whatever an installation has built."""
    built = tmp_path_factory.mktemp("built") / "_packed.abi3.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TUNEBOOK_PURE", raising=False)
        reason = load("hatch_build", ROOT / "hatch_build.py").build(built)
    if reason is not None:
        pytest.skip(reason)
    return load("tunebook._hotpath._packed", built).packer


@pytest.fixture(scope="module")
def pack(packer):
    return packer(np.ndarray, True)


# ------------------------------------------------------------------------------------------------------ what is packed

DTYPES = [*"?bBhHiIlLqQefdgFDG", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4]
SHAPES = [(), (0,), (1,), (2,), (4,), (2, 2), (4, 1), (1, 4), (2, 4), (4, 2), (0, 2), (2, 0), (2, 1, 2), (1, 1, 1)]
LAYOUTS = [
    lambda x: x,
    np.asfortranarray,
    np.transpose,
    lambda x: x[..., ::-1] if x.ndim else x,
    lambda x: x[::2] if x.ndim else x,
    lambda x: np.broadcast_to(x[..., :1], x.shape) if 0 not in x.shape and x.ndim else x,
    lambda x: as_strided(x, x.shape, [s + 8 * (n == 1) for s, n in zip(x.strides, x.shape, strict=True)]),
    lambda x: np.concatenate([x, x], -1)[..., : x.shape[-1]] if x.ndim else x,
]
ARRAYS = [layout(np.zeros(shape, dtype)) for dtype, shape, layout in product(DTYPES, SHAPES, LAYOUTS)]
NANS = [math.nan, -math.nan, struct.unpack("d", struct.pack("Q", 0x7FF8_0000_0000_0001))[0]]
FLOATS = [*NANS, 0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, 5e-324, 0.1, 0.1 + 2**-55]
INTS = [0, 1, -1, 255, 256, 2**31, 2**32, 2**63 - 1, -(2**63)]
TEXTS = ["", "0", "1", "N", "NN", "I", "\0", "é", "\N{GRINNING FACE}"]
SCALARS = [*INTS, *FLOATS, *TEXTS, *map(str.encode, TEXTS), True, False, None]
TUPLES = [(), ((),), ((), ()), (((),),), (0, 1), ((0,), 1), (0, (1,)), *((x,) for x in (*SCALARS, *ARRAYS[:9]))]


def facts(x, *, layout=True):
    """What the pure-Python key takes from a value; strides only where they matter."""
    if type(x) is tuple:
        return (tuple, *(facts(item, layout=layout) for item in x))
    if type(x) is np.ndarray and (x.flags.c_contiguous or not layout):
        return np.ndarray, x.shape, x.dtype
    return fast_key_of(x)


@pytest.mark.parametrize("layout", [True, False])
def test_two_values_have_the_same_bytes_exactly_if_they_have_the_same_facts(packer, layout):
    pack = packer(np.ndarray, layout)
    pairs = [(pack(x), facts(x, layout=layout)) for x in (*ARRAYS, *SCALARS, *TUPLES)]
    assert {type(packed) for packed, _ in pairs} == {bytes}
    assert len(dict(pairs)) == len(set(pairs)), "the same bytes for different facts"
    assert len({known for _, known in pairs}) == len(set(pairs)), "different bytes for the same facts"


# Few values, in all ways to put them together: what one ends with may be what another begins with.
FEW = st.sampled_from([0, 1, True, None, "", "N", b"N", 0.0])
GROUPS = st.recursive(FEW, lambda inner: st.lists(inner, max_size=2).map(tuple), max_leaves=3)


@pytest.mark.promise("memo-as-fine-as-key")
@settings(max_examples=1000, deadline=None)
@given(st.lists(GROUPS, max_size=3), st.lists(GROUPS, max_size=3))
def test_two_lists_of_arguments_have_the_same_bytes_exactly_if_each_has_the_same_facts(pack, some, others):
    assert (pack(*some) == pack(*others)) == ([*map(facts, some)] == [*map(facts, others)])
    assert pack(*some, *others) == pack(*some) + pack(*others), "no value's bytes depend on its neighbours"


ANYTHING = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=99), st.binary(max_size=99))


@given(ANYTHING, ANYTHING)
def test_scalars_of_any_value_are_told_apart(pack, a, b):
    assert (pack(a) == pack(b)) == (facts(a) == facts(b))


def test_where_a_value_ends_is_in_its_bytes(pack):
    eight = int.from_bytes(b"N" * 8, sys.byteorder)  # as a dimension, it has the bytes of eight times None
    assert pack(np.zeros((0, eight), np.int8)) != pack(np.zeros(0, np.int8), *[None] * 8)
    assert pack("N") != pack("", None)
    assert pack((0, 1)) != pack((0,), 1)


@pytest.mark.parametrize("layout", [True, False])
def test_arrays_with_the_same_bytes_are_the_same_problem(packer, layout):
    kernel = tb.tunable(lambda x, *, config: x, space=[{"b": 1}], name="packed", store=False, layout=layout)
    pack = packer(np.ndarray, layout)
    problems = {(pack(x), kernel.problem(x)) for x in ARRAYS}
    assert len(problems) == len(dict(problems)) > 200


def test_every_pair_of_dtypes_is_told_apart_as_numpy_does(pack):
    arrays = [np.zeros(3, dtype) for dtype in DTYPES]
    for a, b in product(arrays, arrays):
        assert (pack(a) == pack(b)) == (a.dtype == b.dtype)


def test_no_arguments_are_packed_too(pack):
    assert pack() == b""


def test_arrays_of_as_many_dimensions_as_there_can_be_are_packed(pack):
    rank = 64 if NUMPY_MAJOR > 1 else 32
    straight, reversed_ = np.zeros((2,) + (1,) * (rank - 1)), np.zeros((2,) + (1,) * (rank - 1))[::-1]
    assert len({pack(straight), pack(reversed_), pack(np.zeros((1,) * rank)), None}) == 4


def test_dimensions_beyond_32_bits_are_told_apart(pack):
    long = [np.broadcast_to(np.zeros(1, np.int8), (n,)) for n in (1, 2**32 + 1, 2**33 + 1)]
    assert len({pack(x) for x in long}) == 3


# -------------------------------------------------------------------------------------------------- what is not packed


class Sub(np.ndarray):
    pass


class Level(enum.IntEnum):
    LOW = 1


class Text(str):
    __slots__ = ()


Pair = namedtuple("Pair", "x y")  # noqa: PYI024 - a subclass of tuple is all it is
NESTED = ((((((((((1,),),),),),),),),),)

REFUSED = {
    "objects": np.array([None]),
    "bytes": np.array([b"abc"]),
    "text": np.array(["abc"]),
    "records": np.zeros(2, [("a", "f4"), ("b", "i4")]),
    "void": np.zeros(2, "V4"),
    "dates": np.array(["2026-11-15"], "datetime64[D]"),
    "spans": np.array([1], "timedelta64[s]"),
    "other byte order": np.zeros(2, ">f4"),
    "other byte order of a user's type": np.zeros(2, np.dtype(ml_dtypes.bfloat16).newbyteorder(">")),
    "subclass": np.zeros(2).view(Sub),
    "masked": np.ma.masked_array([1.0]),
    "records with attributes": np.zeros(2, [("a", "f4")]).view(np.recarray),
    "numpy float": np.float64(1.0),
    "numpy int": np.int64(1),
    "numpy bool": np.bool_(1),
    "dtype": np.dtype("f4"),
    "large int": 2**63,
    "small int": -(2**63) - 1,
    "enum": Level.LOW,
    "subclass of str": Text("a"),
    "half of a pair": "\ud800",
    "long str": "x" * 5000,
    "long bytes": b"x" * 5000,
    "complex": 1j,
    "list": [1],
    "dict": {"a": 1},
    "set": {1},
    "named tuple": Pair(1, 2),
    "tuple with a list": (1, [2]),
    "deep tuple": NESTED,
    "class": int,
    "numpy's own class": np.ndarray,
    "function": load,
    "builtin": len,
    "ellipsis": ...,
    "object": object(),
    "bytearray": bytearray(b"a"),
    "memoryview": memoryview(b"a"),
}

if NUMPY_MAJOR > 1:
    REFUSED["any text"] = np.array(["abc"], np.dtypes.StringDType())


@pytest.mark.parametrize("what", REFUSED)
def test_arguments_that_need_more_than_a_few_bytes_are_left_to_python(pack, what):
    assert pack(REFUSED[what]) is None
    assert pack(1, np.zeros(3), REFUSED[what], 2) is None


def test_more_bytes_than_there_is_room_for_are_left_to_python(pack):
    assert pack(*[np.zeros((1,) * 32)] * 100) is None
    assert pack(*range(1000)) is None
    assert pack("x" * 4087) is not None
    assert pack("x" * 4088) is None


def test_without_numpy_no_array_is_packed(packer):
    pack = packer(None, True)
    assert pack(np.zeros(3)) is None
    assert pack(1, "a") is not None


def test_a_packer_takes_a_class_of_numpys_and_nothing_else(packer):
    for wrong in (Sub, type("ndarray", (), {"__module__": "numpy"}), 7, "ndarray"):
        with pytest.raises(TypeError, match="numpy's ndarray class, or None; got"):
            packer(wrong, True)
    with pytest.raises(TypeError, match="at least 2 arguments"):
        packer(np.ndarray)
    for wrong in ((np.ndarray,), [1, 2, 3, 4, 5], (1, 2, "aval", "value", 0), "jax"):
        with pytest.raises(TypeError, match="five things or more about jax, or None; got"):
            packer(np.ndarray, True, wrong)


def test_a_finder_looks_up_the_packed_arguments_in_the_memo(packer):
    for layout in (True, False):
        pack, memo, asked = packer(np.ndarray, layout), {}, []
        find = packer.__self__.finder(pack, memo, asked.append)
        x = np.zeros((2, 3)).T
        assert (find(x, 1), asked) == (None, [pack(x, 1)])
        memo[pack(x, 1)] = found = object()
        assert find(x.copy(order="K"), 1) is found
        assert (find(x, 2), find(object())) == (None, None)
        assert asked == [pack(x, 1), pack(x, 2)]


def test_a_finder_tells_before_it_answers_where_nothing_is_scoped(packer):
    pack, told, heard, asked, scopes = packer(None, True), {}, [], [], [None]
    find = packer.__self__.finder(pack, {}, asked.append, told, lambda: scopes[0])
    told[pack(1)] = "one", lambda: heard.append("one")
    told[pack(2)] = "two", lambda: told.clear() or heard.append("two")  # a listener may change the kernel's answers
    assert (find(1), find(2), find(1)) == ("one", "two", None)
    told[pack(1)] = "one", lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        find(1)
    scopes[0] = "an overlay"
    assert find(1) is None
    assert (heard, asked) == (["one", "two"], [pack(1), pack(1)])
    scopes.clear()
    with pytest.raises(IndexError):
        find(1)


def test_the_fallback_of_a_finder_answers_or_raises(packer):
    answers = {1: "one"}
    find = packer.__self__.finder(packer(None, True), {}, lambda key: answers[len(key) // 9])
    assert find(1) == "one"
    with pytest.raises(KeyError, match="2"):
        find(1, 1)


def test_a_finder_takes_a_pack_function_a_dict_and_a_fallback(packer):
    finder = packer.__self__.finder
    for wrong in (len, object(), packer, finder(packer(None, True), {}, len)):
        with pytest.raises(TypeError, match="what packer returned; got"):
            finder(wrong, {}, len)
    with pytest.raises(TypeError, match="must be dict"):
        finder(packer(None, True), [], len)
    with pytest.raises(TypeError, match="must be dict"):
        finder(packer(None, True), {}, len, [], len)
    pack = packer(None, True)
    with pytest.raises(TypeError, match="a dict of pairs; got 7"):
        finder(pack, {}, len, {pack(1): 7}, lambda: None)(1)


def test_arguments_are_packed_by_position_only(pack):
    with pytest.raises(TypeError, match="no keyword arguments"):
        pack(a=1)


def test_a_numpy_of_another_binary_interface_has_no_arrays_packed(monkeypatch):
    if find_pack(layout=True) is None:
        pytest.skip("the accelerator is not built: python hatch_build.py")
    monkeypatch.setattr(np, "__version__", "3.0.0")
    assert find_pack(layout=True)(np.zeros(3)) is None
    monkeypatch.setitem(sys.modules, "numpy", SimpleNamespace(__version__="2.0", ndarray=Sub))
    assert find_pack(layout=True) is None, "something else stands in for numpy"


# ---------------------------------------------------------------------------------------------- memory and threads


def test_nothing_is_leaked(pack):
    arrays = [np.zeros((2, 3)), np.zeros((2, 3)).T, np.zeros(2, ">f4")]
    calls = [(x, 10**6, 1.5, "é", b"b", None, True, (1, "x")) for x in arrays] + [(x,) for x in REFUSED.values()]

    def rounds(n):
        for _ in range(n):
            for call in calls:
                pack(*call)

    rounds(20)
    counted = [sys.getrefcount(x) for x in (*arrays, None, *arrays)]
    blocks = sys.getallocatedblocks()
    rounds(500)
    assert [sys.getrefcount(x) for x in (*arrays, None, *arrays)] == counted
    assert sys.getallocatedblocks() - blocks < 100, f"in {500 * len(calls)} calls"


def test_threads_pack_an_array_as_it_was_at_one_moment(pack):
    x, forms = np.zeros(12), [(12,), (3, 4), (2, 3, 2)]
    expected = {pack(np.zeros(form)) for form in forms}
    found, stop = set(), threading.Event()

    def packs():
        while not stop.is_set():
            found.add(pack(x))

    threads = [threading.Thread(target=packs) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for i in range(3000):
            x.resize(forms[i % 3], refcheck=False)  # in place
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert found <= expected


# ------------------------------------------------------------------------------------------------------------ building


@pytest.fixture
def checkout(tmp_path):
    """A copy of what a build needs, with a compiled file in it that git would ignore."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "hatch_build.py", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "src/tunebook/_hotpath/_packed.abi3.so").write_bytes(b"of an earlier build")
    return tmp_path


def hatch(checkout, target, **settings):
    environment = {k: v for k, v in os.environ.items() if k not in ("TUNEBOOK_PURE", "CC")} | settings
    line = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(checkout / "dist")]
    done = subprocess.run(line, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = (checkout / "dist").iterdir()
    return built, done.stdout + done.stderr


def test_a_wheel_holds_the_accelerator_for_every_cpython_from_3_11_on(packer, checkout):
    wheel, _ = hatch(checkout, "wheel")
    assert "-cp311-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as content:
        assert content.read("tunebook/_hotpath/_packed.abi3.so")[:4] == b"\x7fELF" or sys.platform != "linux"
        assert "tunebook/_hotpath/_packed.c" not in content.namelist()
        content.extractall(checkout / "installed")
    code = (
        "import numpy as np; from tunebook._hotpath._packed import packer; print(packer(np.ndarray, True)(np.zeros(3)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(checkout / "installed")}, capture_output=True, check=True
    )
    assert done.stdout.startswith(b"b'Ad")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"PATH": "/nonexistent"}, "there is no C compiler"),
        ({"CC": "false"}, "the C compiler failed"),
        ({"TUNEBOOK_PURE": "1"}, "TUNEBOOK_PURE is set"),
    ],
)
def test_without_a_compiler_or_on_request_the_wheel_is_pure_and_one_line_says_so(packer, checkout, settings, reason):
    wheel, said = hatch(checkout, "wheel", **settings)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert [line for line in said.splitlines() if reason in line and "pure-Python way" in line]
    with zipfile.ZipFile(wheel) as content:
        assert "tunebook/_hotpath/_packed.abi3.so" not in content.namelist(), "nor what an earlier build left"


def test_a_source_distribution_can_build_it_and_holds_nothing_built(checkout):
    sdist, _ = hatch(checkout, "sdist")
    with tarfile.open(sdist) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
    assert {"hatch_build.py", "src/tunebook/_hotpath/_packed.c"} <= names
    assert not [name for name in names if name.endswith(".so")]


def test_a_source_distribution_holds_no_results_of_benchmarks(checkout):
    for left_out in ("bench/results/store.json", ".ci/run", "bench/store.py"):
        (checkout / left_out).parent.mkdir(parents=True, exist_ok=True)
        (checkout / left_out).write_text("")
    sdist, _ = hatch(checkout, "sdist")
    with tarfile.open(sdist) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
    assert "bench/store.py" in names
    assert not [name for name in names if name.startswith(("bench/results", ".ci"))]


def test_a_python_without_a_gil_is_refused_with_the_reason_unless_the_pure_package_is_wanted(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    hook = pytest.importorskip("hatch_build", reason="hatchling is not installed")
    monkeypatch.setattr(hook.sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get)
    monkeypatch.delenv("TUNEBOOK_PURE", raising=False)
    with pytest.raises(RuntimeError, match=r"does not support free-threaded Python yet: .*TUNEBOOK_PURE=1 pip install"):
        hook.AcceleratorHook.initialize(None, "standard", {})
    monkeypatch.setenv("TUNEBOOK_PURE", "1")
    hook.refuse_free_threading()
    assert hook._obstacle() == "TUNEBOOK_PURE is set"


def test_the_package_says_where_its_source_its_issues_and_its_documentation_are(checkout):
    wheel, _ = hatch(checkout, "wheel", TUNEBOOK_PURE="1")
    with zipfile.ZipFile(wheel) as content:
        (name,) = (name for name in content.namelist() if name.endswith(".dist-info/METADATA"))
        facts = email.message_from_bytes(content.read(name))
        assert "tunebook/py.typed" in content.namelist()
    links = dict(link.split(", ") for link in facts.get_all("Project-URL"))
    assert set(links) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    declared = {line.rpartition(" :: ")[2] for line in facts.get_all("Classifier") if "Python :: 3." in line}
    assert declared == {"3.11", "3.12", "3.13", "3.14"}
    assert facts["Requires-Python"] == ">=3.11"


# ------------------------------------------------------------------------------------------------------ in a process

LATE_NUMPY = """
    import sys, tunebook as tb

    @tb.tunable(space=[{"b": 1}], store=False)
    def kernel(x, *, config):
        return config.b

    def packs():
        return "_tb_find" in kernel.__code__.co_names

    kernel(1)
    assert "numpy" not in sys.modules
    before = packs()
    import numpy as np
    print(before, [kernel(np.zeros(3)) for _ in range(3)], packs(), kernel(2), packs(), kernel([]), packs())
"""


def run(code, **settings):
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path), "TUNEBOOK_PURE": "", **settings}
    line = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_arrays_are_packed_as_soon_as_numpy_is_there():
    if find_pack(layout=True) is None:
        pytest.skip("the accelerator is not built: python hatch_build.py")
    assert run(LATE_NUMPY) == "True [1, 1, 1] True 1 True 1 False"


def test_the_switch_turns_it_off():
    assert run(LATE_NUMPY, TUNEBOOK_PURE="1") == "False [1, 1, 1] False 1 False 1 False"


def test_something_called_numpy_that_is_not_does_no_harm():
    code = """
        import sys, types

        class ndarray:
            __module__, shape, dtype, strides = "numpy", (3,), "float32", None
            flags = types.SimpleNamespace(c_contiguous=True)

        class generic:
            pass

        sys.modules["numpy"] = types.SimpleNamespace(__version__="2.4.6", ndarray=ndarray, generic=generic)
        import tunebook as tb
        options = {"heuristic": {"b": 1}, "policy": tb.AutotunePolicy(allow_autotune=False), "store": False}
        kernel = tb.tunable(lambda x, n, *, config: config.b, space=[{"b": 1}], name="fake", **options)
        print([kernel(ndarray(), 3) for _ in range(4)])
    """
    assert run(code) == "[1, 1, 1, 1]"
