"""Kernels in CUDA C: what reaches the compiler is checked with a stand-in for CuPy, and what comes of it on a GPU."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

import tunebook as tb
from tunebook._arrays.describe import describe, timer_for
from tunebook._arrays.library import ArraySpec
from tunebook._arrays.made_up import materialise
from tunebook._base.errors import CompileError, DefinitionError, TuningFailed
from tunebook._kernel.output_check import difference
from tunebook._keys.call_key import fast_key_of
from tunebook._measure.argument_restore import Restorer
from tunebook.adapters.cupy import CudaModule, CupyTimer

SAXPY = """
extern "C" __global__ void scale(float *x, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) x[i] *= FACTOR;
}
"""
TEMPLATE = """
template <int FACTOR, typename T> __global__ void scale(T *x, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) x[i] *= T(FACTOR);
}
"""


class CompileException(Exception):  # noqa: N818 - as it is called there
    pass


class CUDADriverError(Exception):
    pass


class FakeModule:
    """What CuPy would be asked for; source that says #error does not compile."""

    def __init__(self, code, options, name_expressions):
        self.code, self.options, self.names = code, options, name_expressions
        self.compiled = 0

    def compile(self):
        self.compiled += 1
        if "#error" in self.code:
            raise CompileException("kernel.cu(1): error: #error directive: not today\n1 error detected")

    def get_function(self, name):
        if name not in (self.names or ["scale"]):
            raise CUDADriverError("CUDA_ERROR_NOT_FOUND: named symbol not found")
        return lambda grid, block, args: (name, grid, block, args)


class FakeEvent:
    """Its time is that of a clock which launches move."""

    done = False  # when it is asked for, the device is still at what was queued before it

    def __init__(self, now_ms, disable_timing):
        assert not disable_timing, "such an event has no time"
        self.now_ms = now_ms

    def record(self, stream=None):
        assert stream is None, "the current one"
        self.at_ms = self.now_ms()


@pytest.fixture
def cupy():
    modules = []

    def raw_module(**asked):
        modules.append(FakeModule(**asked))
        return modules[-1]

    return SimpleNamespace(
        RawModule=raw_module,
        modules=modules,
        cuda=SimpleNamespace(
            compiler=SimpleNamespace(CompileException=CompileException),
            driver=SimpleNamespace(CUDADriverError=CUDADriverError),
            nvrtc=SimpleNamespace(getVersion=lambda: (12, 9)),
        ),
    )


def test_items_of_a_configuration_are_macros_and_each_is_compiled_once(cupy):
    module = CudaModule(SAXPY, cupy=cupy)
    for config in (tb.Config(FACTOR=2, FAST=True), {"FAST": True, "FACTOR": 2}, tb.Config(FACTOR=3, FAST=True)):
        assert module(config).scale((1,), (2,), ("x",)) == ("scale", (1,), (2,), ("x",))
    assert [made.options for made in cupy.modules] == [
        ("-std=c++17", "-DFACTOR=2", "-DFAST=1"),
        ("-std=c++17", "-DFACTOR=3", "-DFAST=1"),
    ]
    assert cupy.modules[0].names is None


def test_an_item_that_a_template_names_is_its_argument_and_not_a_macro(cupy):
    module = CudaModule(TEMPLATE, templates={"scale": "scale<{FACTOR}, {T}>"}, options=(), cupy=cupy)
    built = module(tb.Config(FACTOR=4, T="double", UNROLL=8))
    assert built.scale((1,), (1,), ())[0] == "scale<4, double>"
    assert cupy.modules[0].options == ("-DUNROLL=8",)
    assert cupy.modules[0].names == ["scale<4, double>"]


def test_template_arguments_are_spelled_as_the_language_does(cupy):
    module = CudaModule(TEMPLATE, templates={"scale": "scale<{FLAG}, {N}>"}, cupy=cupy)
    assert module({"FLAG": True, "N": -1}).scale((), (), ())[0] == "scale<true, -1>"
    assert module({"FLAG": 1, "N": False}).scale((), (), ())[0] == "scale<1, false>"


def test_flags_of_a_configuration_are_compile_options(cupy):
    CudaModule(SAXPY, options=("-lineinfo",), cupy=cupy)({"cflags": ("--use_fast_math",)})
    assert cupy.modules[0].options == ("-lineinfo", "--use_fast_math")


def test_a_template_that_names_an_unknown_item_is_an_error(cupy):
    module = CudaModule(TEMPLATE, templates={"scale": "scale<{FACTOR}, {T}>"}, cupy=cupy)
    with pytest.raises(DefinitionError, match=r"the templates name T, which the configuration .*FACTOR"):
        module({"FACTOR": 4})
    with pytest.raises(DefinitionError, match=r"scale<\{FACTOR' cannot be read"):
        CudaModule(TEMPLATE, templates={"scale": "scale<{FACTOR"}, cupy=cupy)


def test_the_error_has_the_compilers_message_and_the_configuration(cupy):
    module = CudaModule(f"#error\n{SAXPY}", cupy=cupy)
    with pytest.raises(CompileError, match=r"error: #error directive: not today\n  compiled with FACTOR=2\b"):
        module.compile({"FACTOR": 2})


def test_the_error_for_an_unknown_kernel_names_the_known_kernels(cupy):
    with pytest.raises(
        DefinitionError, match=r"kernel\.c has no kernel 'scael': .*It has the kernels that .*extern \"C\""
    ):
        CudaModule(SAXPY, cupy=cupy)({"FACTOR": 2}).scael  # noqa: B018 - looked up
    templated = CudaModule(TEMPLATE, templates={"scale": "scale<{FACTOR}>"}, cupy=cupy)
    with pytest.raises(DefinitionError, match="It has scale"):
        templated({"FACTOR": 2}).scael  # noqa: B018 - looked up


def test_source_templates_and_options_are_part_of_the_checksum_and_the_compiler_is_a_version(cupy):
    variants = [
        CudaModule(SAXPY, cupy=cupy),
        CudaModule(TEMPLATE, cupy=cupy),
        CudaModule(SAXPY, templates={"scale": "scale<{FACTOR}>"}, cupy=cupy),
        CudaModule(SAXPY, options=("-lineinfo",), cupy=cupy),
    ]
    seen = {module.__tunebook_checksum__() for module in variants}
    assert len(seen) == len(variants)
    cupy.cuda.nvrtc.getVersion = lambda: (13, 0)
    assert {module.__tunebook_checksum__() for module in variants} == seen
    assert variants[0].__tunebook_versions__() == {"nvrtc": "13.0"}


def test_a_file_is_read_at_once_and_headers_beside_it_are_found(cupy, tmp_path):
    (tmp_path / "k.cu").write_text(f'#include "k.cuh"\n{SAXPY}')
    (tmp_path / "k.cuh").write_text("#define FACTOR 2\n")
    module = CudaModule(tmp_path / "k.cu", options=(), cupy=cupy)
    before = module.__tunebook_checksum__()
    (tmp_path / "k.cuh").write_text("#define FACTOR 3\n")
    module({})
    assert cupy.modules[0].options == (f"-I{tmp_path}",)
    assert CudaModule(tmp_path / "k.cu", options=(), cupy=cupy).__tunebook_checksum__() != before


def test_tuning_skips_candidates_that_do_not_compile(cupy):
    good, bad = CudaModule(SAXPY, cupy=cupy), CudaModule("#error", cupy=cupy)
    pick = {"good": good, "bad": bad}

    @tb.tunable(space=tb.Space(way=["good", "bad"]), compile=lambda c: pick[c.way].compile({"FACTOR": 1}), store=False)
    def scale(n, *, config):
        return pick[config.way]({"FACTOR": 1}).scale((1,), (1,), ())[0]

    tuned = tb.tune(scale, 3)
    assert tuned.config.way == "good"
    assert [m.failure.kind for m in tuned.measurements if m.failure is not None] == ["compile"]


def test_runs_are_timed_by_events_of_the_device_without_the_emptying_of_its_cache():
    now = [0.0]
    emptied = []

    class Buffer:
        def fill(self, value):
            emptied.append(value)
            now[0] += 5.0

    waits = []
    fake = SimpleNamespace(
        empty=lambda n, dtype: Buffer(),
        cuda=SimpleNamespace(
            Event=lambda disable_timing: FakeEvent(lambda: now[0], disable_timing),
            get_elapsed_time=lambda start, end: end.at_ms - start.at_ms,
            runtime=SimpleNamespace(deviceSynchronize=lambda: waits.append(now[0])),
        ),
    )
    timer = CupyTimer(nullcontext(), fake)

    def launch():
        now[0] += 2.0

    assert timer.sample_s(launch, 3) == pytest.approx(2e-3)
    assert len(emptied) >= 3
    assert timer.name.startswith("device-events/cold-l2")
    assert waits, "events are read when they have happened"


def test_calls_that_are_tuned_while_the_program_runs_are_timed_by_events_that_nothing_waits_for():
    now = iter([1.0, 3.0])
    fake = SimpleNamespace(
        cuda=SimpleNamespace(
            Event=lambda disable_timing: FakeEvent(lambda: next(now), disable_timing),
            get_elapsed_time=lambda start, end: end.at_ms - start.at_ms,
            runtime=SimpleNamespace(deviceSynchronize=None),
        ),
    )
    result, window = CupyTimer(nullcontext(), fake).live_windows().around(lambda: "result")
    assert result == "result"
    assert window.seconds() is None
    window._end._event.done = True
    assert window.seconds() == pytest.approx(2e-3)


def test_hot_calls_tell_arrays_of_two_gpus_apart():
    kind = type("ndarray", (SimpleNamespace,), {"__module__": "cupy"})
    facts = {"shape": (4,), "dtype": np.dtype("float32"), "strides": (4,)}
    one, same, other = (kind(**facts, device=SimpleNamespace(id=i)) for i in (0, 0, 1))
    assert hash(fast_key_of(one)) == hash(fast_key_of(same))
    assert fast_key_of(one) == fast_key_of(same) != fast_key_of(other)


# ---------------------------------------------------------------------------------------------------------- on a GPU


@pytest.fixture(scope="module")
def gpu():
    """CuPy, where it is installed and there is a GPU."""
    cupy = pytest.importorskip("cupy", reason="cupy is not installed: pip install 'tunebook[cupy]'")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        pytest.skip("there is no GPU")
    importlib.import_module("tunebook.adapters.cupy")
    return cupy


def scaling(module, **options):
    @tb.tunable(compile=module.compile, store=False, **options)
    def scale(x, *, config):
        module(config).scale((4,), (128,), (x, np.int32(x.size)))
        return x

    return scale


@pytest.mark.parametrize("templates", [None, {"scale": "scale<{FACTOR}, float>"}], ids=["macros", "template"])
def test_on_a_gpu_kernels_are_tuned_by_its_clock_and_put_back_between_runs(gpu, templates):
    module = CudaModule(SAXPY if templates is None else TEMPLATE, templates=templates)
    scale = scaling(module, space=tb.Space(FACTOR=[2, 3]), reference=lambda x: x * 2)
    x = gpu.ones(1000, "float32")
    tuned = tb.tune(scale, x)
    assert (x == 1).all()
    assert tuned.config.FACTOR == 2
    assert {m.failure.kind for m in tuned.measurements if m.failure is not None} == {"wrong-result"}
    assert all(m.policy.startswith("device-events/") for m in tuned.measurements)
    assert (scale(x) == 2).all()


def test_on_a_gpu_a_compile_error_is_that_of_every_candidate(gpu):
    scale = scaling(CudaModule(SAXPY), space=tb.Space(FACTOR=["nothing", "nowhere"]))
    with pytest.raises(TuningFailed, match="all 2 candidates failed") as failed:
        tb.tune(scale, gpu.ones(10, "float32"))
    assert all(isinstance(error, CompileError) for error in failed.value.exceptions)


def test_on_a_gpu_an_unknown_kernel_is_an_error(gpu):
    with pytest.raises(DefinitionError, match="no kernel 'scael'"):
        CudaModule(SAXPY)({"FACTOR": 2}).scael  # noqa: B018 - looked up


@pytest.mark.parametrize("part", [np.s_[:], np.s_[:, ::2], np.s_[1:, 1:3], np.s_[::-1]], ids=str)
def test_on_a_gpu_views_are_copied_compared_and_put_back(gpu, part):
    whole = gpu.arange(24, dtype="float32").reshape(4, 6)
    view = whole[part]
    restorer = Restorer((view,))
    restorer.notice()
    assert not restorer.has_changes
    view += 1
    restorer.notice()
    assert restorer.has_changes
    assert np.array_equal(whole.get(), np.arange(24, dtype="float32").reshape(4, 6))


@pytest.mark.parametrize("layout", ["C", "F", "S01g", "S-01"])
@pytest.mark.parametrize("dtype", ["float32", "int8", "complex64", "bool"])
def test_on_a_gpu_an_array_that_is_made_up_has_the_description_it_was_made_from(gpu, dtype, layout):
    spec = ArraySpec("cupy", dtype, (5, 7), layout, "gpu")
    assert describe(materialise(spec)) == spec
    assert difference(materialise(spec, 1), materialise(spec, 1)) is None


def test_on_a_gpu_recorded_calls_are_tuned_later(gpu):
    scale = scaling(CudaModule(SAXPY), space=tb.Space(FACTOR=[1, 1.0]), heuristic={"FACTOR": 1})
    x = gpu.ones(1000, "float32")
    with tb.record() as calls:
        scale(x)
    (outcome,) = tb.tune_all(calls)
    assert outcome.status == "tuned", outcome.detail
    assert scale.explain(x).selection.source == "memory"


def test_on_a_gpu_calls_have_its_name_and_their_arrays_a_timer(gpu):
    scale = scaling(CudaModule(SAXPY), space=tb.Space(FACTOR=[1]))
    assert scale.problem(gpu.ones(4)).device.startswith("gpu:")
    assert timer_for((gpu.ones(4),)).name.startswith("device-events/")
