"""The array libraries that we support keep the contract of the test kit; a record with a mistake does not."""

from __future__ import annotations

import array

import numpy as np
import pytest

import tunebook as tb
from tunebook.testing import ArrayLibraryContract

DTYPES = {"f": "float32", "d": "float64", "q": "int64"}
CODES = {name: code for code, name in DTYPES.items()}


def put_back(x, copy):
    x[:] = copy


STANDARD_LIBRARY = tb.ArrayLibrary(
    name="array",
    classes=(array.array,),
    shape=lambda x: (len(x),),
    dtype=lambda x: DTYPES[x.typecode],
    layout=lambda _x, _shape: "C",
    device=lambda _x: "cpu",
    is_writable=lambda x: len(x) > 0,
    copy=lambda x: x[:],
    is_same=lambda x, copy: x.tobytes() == copy.tobytes(),
    put_back=put_back,
    fast_key=lambda x: (len(x), x.typecode),
    make=lambda spec, seed: array.array(CODES[spec.dtype], [1 + seed % 7] * spec.shape[0]),
)


class TestNumpy(ArrayLibraryContract):
    name = "numpy"

    def arrays(self):
        a = np.arange(24, dtype="f4").reshape(4, 6)
        return [a, a.T.copy(order="A").T[:2], np.ones(3), np.ones(3, "i8"), np.ones((2, 3), order="F"), np.ones(())]

    def write(self, x):
        x += 1
        return True


class TestJax(ArrayLibraryContract):
    name = "jax"

    def arrays(self):
        jnp = pytest.importorskip("jax.numpy")
        return [jnp.ones((4, 6)), jnp.ones(3), jnp.ones(3, "int32"), jnp.ones(())]


class TestTorch(ArrayLibraryContract):
    name = "torch"

    def arrays(self):
        torch = pytest.importorskip("torch")
        return [torch.ones(4, 6), torch.ones(6, 4).T, torch.ones(3), torch.ones(3, dtype=torch.int64), torch.ones(())]

    def write(self, x):
        x += 1
        return True


class TestOpenCL(ArrayLibraryContract):
    name = "pyopencl"

    @pytest.fixture(autouse=True)
    def queue(self):
        cl = pytest.importorskip("pyopencl")
        opencl = pytest.importorskip("tunebook.adapters.opencl")
        if not cl.get_platforms():
            pytest.skip("OpenCL has no platform here")
        context = cl.create_some_context(interactive=False)
        self._program = opencl.CLProgram(context, "__kernel void unused(__global float* x) {}")  # its arrays' context
        self._queue = cl.CommandQueue(context, properties=cl.command_queue_properties.PROFILING_ENABLE)

    def arrays(self):
        import pyopencl.array

        made = [np.ones((4, 6), "f4"), np.ones(3, "f4"), np.ones(3, "i4"), np.ones((2, 3), "f4", order="F")]
        return [pyopencl.array.to_device(self._queue, x) for x in made]

    def write(self, x):
        x += 1
        return True


class TestStandardLibrary(ArrayLibraryContract):
    """A library whose arrays have neither a shape nor a dtype."""

    name = "array"

    @pytest.fixture(autouse=True)
    def registered(self):
        tb.register_array_library(STANDARD_LIBRARY)

    def arrays(self):
        return [array.array("d", [1, 2, 3]), array.array("f", [1, 2, 3]), array.array("d", [1])]

    def write(self, x):
        for i, value in enumerate(x):
            x[i] = value + 1
        return True


MISTAKES = {
    "copy shares memory": (
        {"copy": lambda x: x},
        "test_a_copy_is_the_same_until_the_array_is_written_to",
    ),
    "nothing is put back": (
        {"put_back": lambda _x, _copy: None},
        "test_a_copy_is_the_same_until_the_array_is_written_to",
    ),
    "not writable": (
        {"is_writable": lambda _x: False},
        "test_an_array_that_a_run_wrote_to_is_restored",
    ),
    "a coarse fast key": (
        {"fast_key": lambda _x: ()},
        "test_a_fast_key_is_stable_and_as_fine_as_the_call_key",
    ),
    "made up with another length": (
        {"make": lambda _spec, _seed: array.array("d", [1])},
        "test_made_up_arrays_describe_as_their_spec_and_are_the_same_for_the_same_seed",
    ),
    "no shape": (
        {"shape": lambda _x: ()},
        "test_different_arrays_have_different_keys",
    ),
}


@pytest.mark.parametrize(("wrong", "test"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_a_record_fails_a_test_of_the_contract(wrong, test):
    tb.register_array_library(STANDARD_LIBRARY._replace(**wrong))
    try:
        with pytest.raises(AssertionError):
            getattr(TestStandardLibrary(), test)()
    finally:
        tb.register_array_library(STANDARD_LIBRARY)


def test_a_record_without_a_name_is_refused():
    with pytest.raises(tb.DefinitionError, match="takes a record with a name"):
        tb.register_array_library(tb.ArrayLibrary(""))
    with pytest.raises(tb.DefinitionError, match="takes a record with a name"):
        tb.register_array_library("array")
