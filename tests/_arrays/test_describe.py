from __future__ import annotations

import subprocess
import sys
import weakref
from itertools import permutations
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunebook._arrays.describe import DeviceOrdinals, describe, device_of, is_array, libraries_of, platform_of
from tunebook._arrays.library import ArrayLibrary, ArraySpec, dtype_name, layout_class, register_array_library
from tunebook._arrays.made_up import materialise
from tunebook._base.errors import DefinitionError, MissingDependency, UnkeyableError, Unsupported


def standing_in_for(module: str, name: str, /, **fields: object) -> object:
    """Return an object whose class says that it comes from a library which is not installed here."""
    kind = type(name, (SimpleNamespace,), {"__module__": module})
    return kind(**fields)


def torch_tensor(shape, stride, dtype="float32", device="cpu", index=None, layout="torch.strided"):
    place = standing_in_for("torch", "device", type=device, index=index)
    return standing_in_for(
        "torch",
        "Tensor",
        shape=shape,
        dtype=f"torch.{dtype}",
        stride=lambda: stride,
        device=place,
        layout=layout,
        requires_grad=False,
    )


def jax_array(shape, device, dtype="float32"):
    return standing_in_for("jaxlib._jax", "ArrayImpl", shape=shape, dtype=np.dtype(dtype), device=device)


def jax_device(platform, number=0):
    return standing_in_for("jaxlib._jax", "Device", platform=platform, id=number, device_kind="NVIDIA H200")


@pytest.mark.parametrize("x", [np.zeros(3), np.zeros(()), ArraySpec("numpy", "float32", (3,))])
def test_whatever_has_a_shape_and_a_dtype_is_an_array(x):
    assert is_array(x)


@pytest.mark.parametrize(
    "x", [np, np.dtype("f4"), np.float32, np.ndarray, np.float32(1), 3, "x", None, [1], ml_dtypes.bfloat16, ArraySpec]
)
def test_dtypes_classes_scalars_and_containers_are_not_arrays(x):
    assert not is_array(x)


def test_a_spec_describes_as_itself():
    spec = describe(np.zeros((2, 3), order="F"))
    assert spec == ArraySpec("numpy", "float64", (2, 3), "F", "cpu")
    assert describe(spec) is spec


def test_libraries_are_named_by_their_root_whatever_module_the_class_lives_in():
    tracer = standing_in_for("jax._src.core", "Tracer", shape=(2,), dtype=np.dtype("f4"))
    spec = standing_in_for("jax", "ShapeDtypeStruct", shape=(2,), dtype=np.dtype("f4"))
    live = jax_array((2,), jax_device("cpu"))
    assert [describe(x).library for x in (tracer, spec, live)] == ["jax"] * 3
    assert describe(live).platform == "cpu"


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.dtype("float32"), "float32"),
        (np.dtype(">f4"), ">f4"),
        (np.dtype(ml_dtypes.bfloat16), "bfloat16"),
        (np.dtype(ml_dtypes.float8_e4m3fn), "float8_e4m3fn"),
        (np.dtype([("a", "<i4"), ("b", "<f4")]), "[('a', '<i4'), ('b', '<f4')]"),
        (np.dtype(("f4", (2,))), "('<f4', (2,))"),
        (np.dtype("datetime64[ns]"), "datetime64[ns]"),
        ("torch.bfloat16", "bfloat16"),
        ("float32", "float32"),
    ],
)
def test_dtypes_are_named_without_their_library(dtype, name):
    assert dtype_name(dtype) == name


def test_records_of_equal_size_have_different_names():
    assert dtype_name(np.dtype("i4,f4")) != dtype_name(np.dtype("f4,i4"))


# ----------------------------------------------------------------------------------------------------------- layout

_a = np.zeros((4, 5, 6))


@pytest.mark.parametrize(
    ("x", "layout"),
    [
        (_a, "C"),
        (_a.T, "F"),
        (_a.transpose(0, 2, 1), "P021"),
        (_a.transpose(1, 0, 2), "P102"),
        (_a[:, :, :3], "S012"),
        (_a[:, :, ::2], "S012g"),
        (_a[::-1], "S-012"),
        (_a[:, :, ::-1], "S01-2"),
        (_a[:1].transpose(2, 1, 0), "F"),
        (_a[:1, :, :1], "S1g"),
        (np.broadcast_to(np.zeros(6), (4, 6)), "S1*0"),
        (np.broadcast_to(np.zeros(()), (4, 6)), "S*0*1"),
        (np.zeros((0, 3)), "C"),
        (np.zeros(()), "C"),
        (np.zeros((1, 1, 7)).T, "C"),
        (np.zeros([2] * 11).transpose(0, 10, *range(1, 10)), "P0.2.3.4.5.6.7.8.9.10.1"),
    ],
)
def test_layouts_have_classes(x, layout):
    assert describe(x).layout == layout


def test_torch_strides_count_elements():
    assert describe(torch_tensor((4, 6), (6, 1))).layout == "C"
    assert describe(torch_tensor((4, 6), (1, 4))).layout == "F"
    assert describe(torch_tensor((4, 6), (0, 1))).layout == "S1*0"


def test_a_sparse_tensor_is_not_asked_for_its_strides():
    assert describe(torch_tensor((4, 6), None, layout="torch.sparse_csr")).layout == "sparse_csr"


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_every_permutation_of_a_dense_array_is_dense(shape, data):
    order = data.draw(st.sampled_from(list(permutations(range(len(shape))))))
    x = np.zeros(shape).transpose(order)
    assert describe(x).layout[0] in "CFP"
    assert describe(x[..., None]).layout == describe(x).layout  # a dimension of size 1 has no layout


@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([1, 2, -1, -2, 0])), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_materialised_arrays_describe_as_the_spec_they_were_made_from(dimensions, random):
    x = np.zeros([2 * n for n, _ in dimensions])
    x = x[tuple(slice(None, None, step) if step else slice(0, 1) for _, step in dimensions)]
    x = np.broadcast_to(x, [2 * n if step == 0 else x.shape[i] for i, (n, step) in enumerate(dimensions)])
    order = list(range(x.ndim))
    random.shuffle(order)
    spec = describe(x.transpose(order))
    assert describe(materialise(spec)) == spec


@given(st.lists(st.integers(0, 3), max_size=3), st.lists(st.integers(-20, 20), min_size=3, max_size=3))
def test_any_strides_have_a_class(shape, strides):
    assert layout_class(shape, strides[: len(shape)], 4)[0] in "CFPS"


# ----------------------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize("dimension", [SimpleNamespace(), None, "b"])
def test_symbolic_shapes_cannot_be_described(dimension):
    x = standing_in_for("somelibrary", "Array", shape=(dimension, 3), dtype=np.dtype("f4"))
    with pytest.raises(UnkeyableError, match="Symbolic shapes cannot be tuned"):
        describe(x)


def test_dimensions_that_are_numpy_integers_are_integers():
    x = standing_in_for("jax", "ShapeDtypeStruct", shape=(np.int64(3),), dtype=np.dtype("f4"))
    assert type(describe(x).shape[0]) is int


# ---------------------------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("device", "platform"),
    [
        (None, ""),
        ("cpu", "cpu"),
        ("cuda:1", "gpu"),
        (jax_device("cuda"), "gpu"),
        (jax_device("rocm"), "gpu"),
        (jax_device("tpu"), "tpu"),
        (standing_in_for("torch", "device", type="cuda", index=0), "gpu"),
        (standing_in_for("torch", "device", type="mps", index=0), "gpu"),
        (standing_in_for("torch", "device", type="meta", index=None), "meta"),
        (standing_in_for("cupy.cuda.device", "Device", id=0), "gpu"),
        (standing_in_for("pyopencl", "Device", type=4, name="Arc", platform=SimpleNamespace()), "gpu"),
        (standing_in_for("pyopencl", "Device", type=2, name="pocl", platform=SimpleNamespace()), "cpu"),
        (SimpleNamespace(), ""),
    ],
)
def test_platforms_are_read_from_device_objects_of_any_library(device, platform):
    assert platform_of(device) == platform


def test_two_devices_of_one_call_are_numbered_by_first_appearance():
    one, two = jax_array((2,), jax_device("cuda", 5)), jax_array((2,), jax_device("cuda", 3))
    devices = DeviceOrdinals()
    assert [describe(x, devices).platform for x in (one, two, one)] == ["gpu", "gpu#1", "gpu"]
    assert describe(two).platform == "gpu"


def test_an_array_spread_over_devices_says_over_how_many():
    sharding = standing_in_for("jax.sharding", "NamedSharding", device_set={1, 2})
    sharding.device_set = [jax_device("tpu", 2), jax_device("tpu", 1)]
    assert describe(jax_array((8,), sharding)).platform == "tpu*2"
    assert device_of([jax_array((8,), sharding)]).id == 1


def test_the_device_of_a_call_is_that_of_its_first_array():
    one, two = torch_tensor((2,), (1,), device="cuda", index=0), torch_tensor((2,), (1,), device="cuda", index=1)
    assert device_of((3, {"x": [one]}, two)) is one.device
    assert device_of(((), {"a": 1})) is None
    assert device_of((np.zeros(3),)) == "cpu"


def test_an_accelerator_comes_before_the_host():
    lengths, x = np.zeros(3), torch_tensor((2,), (1,), device="cuda", index=0)
    assert device_of((lengths, x)) is x.device


def test_a_container_that_contains_itself_has_no_device():
    loop = []
    loop.append(loop)
    assert device_of(loop) is None


def test_a_device_array_of_numba_is_on_the_current_device(monkeypatch):
    device = standing_in_for("numba.cuda.cudadrv.driver", "Device", name=b"NVIDIA H200")
    monkeypatch.setitem(sys.modules, "numba.cuda", SimpleNamespace(get_current_device=lambda: device))
    x = standing_in_for(
        "numba.cuda.cudadrv.devicearray", "DeviceNDArray", shape=(2,), strides=(4,), dtype=np.dtype("f4")
    )
    assert describe(x).platform == "gpu"
    assert device_of((x,)) == "gpu:NVIDIA H200"
    assert platform_of(weakref.proxy(device)) == "gpu"


def test_the_libraries_of_a_call_come_from_its_arrays():
    assert libraries_of((np.zeros(2), [ArraySpec("jax", "float32", ())], 3)) == {"numpy", "jax"}


# --------------------------------------------------------------------------------------------------- making arrays


@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "uint64", "float16", "float32", "complex64", ">f4", "bfloat16", "float8_e4m3fn", "float8_e5m2"],
)
def test_made_up_numbers_are_never_zero_and_the_same_for_the_same_seed(dtype):
    spec = ArraySpec("numpy", dtype, (100,), "C", "cpu")
    x = materialise(spec)
    assert describe(x) == spec
    assert dtype == "bool" or (x.astype("complex128") != 0).all()
    assert x.tobytes() == materialise(spec).tobytes()
    assert x.tobytes() != materialise(spec, rng_seed=1).tobytes()


def test_made_up_integers_are_small_enough_to_index_with():
    x = materialise(ArraySpec("numpy", "int64", (1000,)))
    assert {1, 2, 3} == set(x.tolist())


def test_records_are_made_field_by_field():
    dtype = np.dtype([("a", "<i4"), ("b", "<f4", (2,))])
    x = materialise(describe(np.zeros(5, dtype)))
    assert x.dtype == dtype
    assert (x["a"] > 0).all()
    assert (x["b"] != 0).all()


def test_made_up_arrays_can_be_written_to():
    x = materialise(ArraySpec("numpy", "float32", (3, 4), "P10"))
    x[:] = 1


@pytest.mark.parametrize("x", [np.array(["abc"]), np.array([None]), np.zeros(2, "datetime64[ns]")])
def test_values_of_other_dtypes_are_not_made_up(x):
    with pytest.raises(Unsupported, match="cannot make up values of dtype"):
        materialise(describe(x))


def test_a_missing_package_is_named_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(MissingDependency, match="Run: pip install numpy"):
        materialise(ArraySpec("numpy", "float32", (3,)))


def test_a_layout_must_fit_the_shape():
    with pytest.raises(DefinitionError, match="'P01' does not describe"):
        materialise(ArraySpec("numpy", "float32", (2, 3, 4), "P01"))


def test_other_libraries_need_their_adapter():
    with pytest.raises(Unsupported, match="a make function"):
        materialise(ArraySpec("nolibrary", "float32", (3,)))
    register_array_library(ArrayLibrary("somelibrary", make=lambda spec, seed: (spec.shape, seed)))
    assert materialise(ArraySpec("somelibrary", "float32", (3,)), 7) == ((3,), 7)


def test_describing_imports_no_library():
    code = "import sys, tunebook._arrays.describe; assert not {'numpy', 'jax', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
