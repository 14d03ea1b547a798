"""Kernels in OpenCL C, run for real: on the CPU through PoCL where there is no GPU."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from kernels import FakeClock, fake_tuner
from limits import HANG_S

import tunebook as tb
from tunebook._arrays.describe import describe, timer_for
from tunebook._arrays.library import ArraySpec
from tunebook._arrays.made_up import materialise
from tunebook._base.errors import CompileError, DefinitionError, TuningFailed, Unsupported
from tunebook._kernel.output_check import difference
from tunebook._measure.argument_restore import Restorer

cl = pytest.importorskip("pyopencl", reason="pyopencl is not installed: pip install 'pyopencl[pocl]'")
if not cl.get_platforms():
    pytest.skip("there is no OpenCL driver: pip install 'pyopencl[pocl]'", allow_module_level=True)

import pyopencl.array  # noqa: E402, F401 - after the skip; as `cl.array`

from tunebook.adapters import opencl  # noqa: E402 - as above
from tunebook.adapters.opencl import CLProgram  # noqa: E402 - as above

SCALE = """
__kernel void scale(__global float *x) { x[get_global_id(0)] *= FACTOR; }
"""
FILL = """
__kernel void fill(__global float *out) { out[get_global_id(0)] = VALUE; }
"""


@pytest.fixture(scope="module")
def context():
    return cl.create_some_context(interactive=False)


@pytest.fixture(scope="module")
def queue(context):
    return cl.CommandQueue(context, properties=cl.command_queue_properties.PROFILING_ENABLE)


def ones(queue, n=64, dtype=np.float32):
    return cl.array.to_device(queue, np.ones(n, dtype))


def scaling(context, factors=(1, 2, 4), **options):
    """A tunable function whose configurations give different results: the last one of them is found out."""
    program = CLProgram(context, SCALE)

    @tb.tunable(space=tb.Space(FACTOR=list(factors)), compile=program.compile, store=False, **options)
    def scale(x, *, config):
        program(config).scale(x.queue, x.shape, None, x.data)
        return x

    return scale


# ---------------------------------------------------------------------------------------------------------- building


def test_items_of_a_configuration_are_macros_and_each_is_built_once(context, queue):
    program = CLProgram(context, SCALE)
    x = ones(queue)
    for factor in (2, 3):
        program(tb.Config(FACTOR=factor)).scale(queue, x.shape, None, x.data)
    assert (x.get() == 6).all()
    assert program(tb.Config(FACTOR=2)) is program({"FACTOR": 2})
    assert program(tb.Config(FACTOR=2)).scale is program({"FACTOR": 2}).scale


def test_flags_of_a_configuration_are_build_options(context, queue):
    program = CLProgram(context, SCALE, options=("-DFACTOR=(BASE+1)",))
    x = ones(queue)
    program(tb.Config(cflags=("-DBASE=4", "-cl-mad-enable"))).scale(queue, x.shape, None, x.data)
    assert (x.get() == 5).all()


def test_the_error_has_the_compilers_message_and_the_configuration(context):
    with pytest.raises(CompileError, match=r"(?s)error.*FACTOR.*\n  compiled with OTHER=1\b"):
        CLProgram(context, SCALE).compile({"OTHER": 1})


def test_the_error_of_a_driver_that_is_older_than_the_cpu_names_a_newer_driver():
    for device in (device for platform in cl.get_platforms() for device in platform.get_devices()):
        try:
            cl.Program(cl.Context([device]), "__kernel void nothing() {}").build()
        except cl.RuntimeError:
            with pytest.raises(CompileError, match=r"(?s)unknown target CPU.*apt-get install pocl-opencl-icd"):
                CLProgram(cl.Context([device]), SCALE).compile({"FACTOR": 2})
            return
    pytest.skip("every driver knows this CPU")


def test_a_value_with_a_space_cannot_be_an_option(context):
    with pytest.raises(DefinitionError, match=r"'TYPE=unsigned int' cannot be a build option"):
        CLProgram(context, SCALE).compile({"TYPE": "unsigned int"})


def test_the_error_for_an_unknown_kernel_names_the_known_kernels(context):
    with pytest.raises(DefinitionError, match="this source has no kernel 'scael'; it has scale"):
        CLProgram(context, SCALE)({"FACTOR": 1}).scael  # noqa: B018 - looked up


def test_a_group_that_is_too_large_is_an_error_with_the_limit(context, queue):
    limit = context.devices[0].max_work_group_size
    x = ones(queue, 4 * limit)
    with pytest.raises(DefinitionError, match=rf"groups of \({2 * limit},\): .* may have \d+ .*\(FACTOR=1\)"):
        CLProgram(context, SCALE)({"FACTOR": 1}).scale(queue, x.shape, (2 * limit,), x.data)
    with pytest.raises(DefinitionError, match=r"must divide evenly"):
        CLProgram(context, SCALE)({"FACTOR": 1}).scale(queue, (10,), (3,), x.data)


def test_source_without_a_context_is_an_error_with_a_remedy():
    with pytest.raises(DefinitionError, match=r"CLProgram\(pyopencl\.create_some_context"):
        CLProgram(SCALE, None)


def test_source_headers_and_options_are_part_of_the_checksum(context, tmp_path):
    source, header = tmp_path / "k.cl", tmp_path / "k.h"
    header.write_text("#define FACTOR 2\n")
    source.write_text(f'#include "k.h"\n{SCALE}')
    seen = {CLProgram(context, source).__tunebook_checksum__()}
    seen.add(CLProgram(context, source, options=("-cl-mad-enable",)).__tunebook_checksum__())
    header.write_text("#define FACTOR 3\n")
    seen.add(CLProgram(context, source).__tunebook_checksum__())
    assert len(seen) == 3
    assert CLProgram(context, source).__tunebook_checksum__() in seen


def test_a_header_beside_the_source_is_found(context, queue, tmp_path):
    (tmp_path / "k.h").write_text("#define FACTOR 7\n")
    (tmp_path / "k.cl").write_text(f'#include "k.h"\n{SCALE}')
    x = ones(queue)
    CLProgram(context, tmp_path / "k.cl")({}).scale(queue, x.shape, None, x.data)
    assert (x.get() == 7).all()


def test_threads_share_a_kernel_without_mixing_their_arguments(context, queue):
    source = "__kernel void add(__global float *x, float y) { x[get_global_id(0)] += y; }"
    kernel = CLProgram(context, source)({}).add
    arrays = [cl.array.zeros(queue, 4, np.float32) for _ in range(8)]
    together = threading.Barrier(len(arrays))

    def launch(x):
        together.wait()
        for _ in range(1500):
            kernel(queue, x.shape, None, x.data, np.float32(1))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads change between setting the arguments and starting the kernel
    try:
        with ThreadPoolExecutor(len(arrays)) as pool:
            list(pool.map(launch, arrays))
    finally:
        sys.setswitchinterval(interval)
    assert [x.get()[0] for x in arrays] == [1500] * len(arrays)


# --------------------------------------------------------------------------------------------------------- measuring


def test_runs_are_timed_by_the_device_and_the_window_holds_them_all(context, queue):
    kernel = CLProgram(context, SCALE)({"FACTOR": 1}).scale
    x = ones(queue, 1 << 16)
    events = []
    seconds = timer_for((x,)).sample_s(lambda: events.append(kernel(queue, x.shape, None, x.data)), 3)
    assert len(events) == 3
    assert seconds >= sum(event.profile.end - event.profile.start for event in events) * 1e-9 / 3


@pytest.mark.parametrize("profiling", [True, False])
def test_the_policy_of_a_measurement_names_its_clock(context, profiling):
    flags = cl.command_queue_properties.PROFILING_ENABLE if profiling else 0
    queue = cl.CommandQueue(context, properties=flags)
    tuned = tb.tune(scaling(context, check=False), ones(queue))
    clock = "opencl-events" if profiling else "host-clock"
    assert {m.policy for m in tuned.measurements} == {f"{clock}/race/warmup=1/forward"}
    assert all(m.failure is None and min(m.samples_s) > 0 for m in tuned.measurements)


def test_a_clock_of_the_users_own_is_read_instead(context, queue):
    clock = FakeClock()
    tuner = fake_tuner(clock)
    program = CLProgram(context, SCALE)

    @tb.tunable(space=tb.Space(FACTOR=[1, 2]), compile=program.compile, tuner=tuner, check=False, store=False)
    def scale(x, *, config):
        program(config).scale(x.queue, x.shape, None, x.data)
        clock.spend(config.FACTOR)

    tuned = tb.tune(scale, ones(queue))
    assert [seconds for _, seconds in tuned.ranking] == pytest.approx([1.0, 2.0])


def test_a_wrong_result_and_a_build_error_cost_one_candidate_each(context, queue):
    program = CLProgram(context, FILL)

    @tb.tunable(space=tb.Space(VALUE=["1", "one", "2"]), compile=program.compile, reference=np.ones, store=False)
    def fill(n, out, *, config):
        program(config).fill(out.queue, out.shape, None, out.data)
        return out

    tuned = tb.tune(fill, 64, cl.array.zeros(queue, 64, np.float32))
    failures = {m.config["v"]["VALUE"]: m.failure.kind for m in tuned.measurements if m.failure is not None}
    assert tuned.config.VALUE == "1"
    assert failures == {"one": "compile", "2": "wrong-result"}


def test_candidates_run_in_this_process_which_the_drivers_threads_are_in(context, queue):
    program, processes = CLProgram(context, SCALE), []

    policy = tb.AutotunePolicy(isolate="auto")

    @tb.tunable(space=tb.Space(FACTOR=[1, 1.0]), compile=program.compile, policy=policy, store=False)
    def scale(x, *, config):
        processes.append(os.getpid())
        program(config).scale(x.queue, x.shape, None, x.data)

    scale(ones(queue))
    assert set(processes) == {os.getpid()}
    assert len(processes) > 2


def test_if_nothing_can_be_built_every_candidate_says_why(context, queue):
    with pytest.raises(TuningFailed, match="all 2 candidates failed") as failed:
        tb.tune(scaling(context, factors=("a", "b")), ones(queue))
    assert all(isinstance(error, CompileError) and "undeclared" in str(error) for error in failed.value.exceptions)


def test_arguments_that_runs_write_to_are_put_back_before_each_run(context, queue):
    x = ones(queue)
    scaling(context, factors=(2,), heuristic={"FACTOR": 2})(x)
    assert (x.get() == 2).all()


@pytest.mark.parametrize("part", [np.s_[:], np.s_[2:4], np.s_[:, ::2], np.s_[1:, 1:3]], ids=str)
def test_views_are_copied_compared_and_put_back(queue, part):
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    whole = cl.array.to_device(queue, base)
    view = whole[part]
    restorer = Restorer((view,))
    restorer.notice()
    assert not restorer.has_changes
    cl.enqueue_fill_buffer(queue, whole.base_data, np.float32(9), view.offset, 4)
    restorer.notice()
    assert restorer.has_changes
    assert np.array_equal(whole.get(), base)
    assert difference(view, base[part]) is None


# -------------------------------------------------------------------------------------------------------------- keys


def test_keys_tell_dtypes_shapes_and_layouts_apart(context, queue):
    scale = scaling(context)
    base = cl.array.to_device(queue, np.ones((8, 8), np.float32))
    arrays = [base, base.T, base[:, ::2], base[:4], base.astype(np.int32), base.reshape(64)]
    assert len({scale.problem(x) for x in arrays}) == len(arrays)
    assert scale.problem(base) == scale.problem(base + 1)


def test_the_driver_is_part_of_the_environment_and_not_of_the_device(context, queue):
    scale = scaling(context)
    kernel, inv = scale.kernel, scale.kernel.invocation((ones(queue),))
    device = context.devices[0]
    assert json.loads(kernel.environment(inv))["driver"] == f"{device.platform.name} {device.driver_version}"
    if device.type == cl.device_type.CPU:
        assert scale.problem(ones(queue)).device == tb.device_fingerprint()


def test_a_hot_call_finds_the_answer_of_its_own_kind(queue):
    arrays = [ones(queue), ones(queue, 128), ones(queue, 64, np.float64)]
    kernel = tb.tunable(lambda x, *, config: config.n, space=tb.Space(n=[0]), name="hot", store=False)
    for n, x in enumerate(arrays):
        kernel.selector.cache.put(*kernel.problem(x), tb.Config(n=n))
    assert [[kernel(x) for x in arrays] for _ in range(3)] == [[0, 1, 2]] * 3


# --------------------------------------------------------------------------------------------------- made-up arrays


@pytest.mark.parametrize("layout", ["C", "F", "S01g"])
@pytest.mark.parametrize("dtype", ["float32", "int8", "float64"])
def test_an_array_that_is_made_up_has_the_description_it_was_made_from(context, dtype, layout):
    CLProgram(context, SCALE)
    platform = describe(cl.array.zeros(cl.CommandQueue(context), 1, np.float32)).platform
    spec = ArraySpec("pyopencl", dtype, (5, 7), layout, platform)
    assert describe(materialise(spec)) == spec
    assert difference(materialise(spec, 1), materialise(spec, 1)) is None
    assert difference(materialise(spec, 1), materialise(spec, 2)) is not None


def test_an_array_for_a_device_that_no_program_is_for_cannot_be_made_up():
    with pytest.raises(Unsupported, match=r"this process has no CLProgram for it"):
        materialise(ArraySpec("pyopencl", "float32", (5,), "C", "accelerator"))


def test_recorded_calls_are_tuned_later_without_their_arrays(context, queue):
    scale = scaling(context, factors=(1, 1.0), heuristic={"FACTOR": 1})
    x = ones(queue)
    with tb.record() as calls:
        scale(x)
    (outcome,) = tb.tune_all(calls)
    assert outcome.status == "tuned", outcome.detail
    assert scale.explain(x).selection.source == "memory"


def test_tuning_in_the_background_serves_the_heuristic_meanwhile(context, queue):
    policy = tb.AutotunePolicy(cache_miss_fallback="background")
    scale = scaling(context, factors=(3, 3.0), heuristic={"FACTOR": 3}, policy=policy)
    x = ones(queue)
    scale(x)
    assert (x.get() == 3).all()
    assert tb.wait_for_background(HANG_S)
    assert scale.explain(x).selection.source == "memory"


# --------------------------------------------------------------------------------------------------------- the example


@pytest.fixture(scope="module")
def example():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "examples")
        yield importlib.import_module("opencl_matmul")


def test_the_example_has_enough_configurations_and_the_default_is_one(example):
    assert len(example.space) >= 16
    assert example.default in example.space


@pytest.mark.parametrize("size", [(8, 8, 8), (9, 17, 5), (3, 2, 1)], ids=str)
def test_every_configuration_of_the_example_computes_the_product(example, size):
    a, b = example.operands(*size)
    for config in list(example.space)[:: 1 if size == (9, 17, 5) else 5]:
        assert difference(example.matmul(a, b, config=config), example.reference(a, b)) is None, config


def test_the_example_prints_its_table_and_explains_its_choice(example, capsys):
    example.main([(32, 32, 32)])
    printed = capsys.readouterr().out
    for shown in ("best", "default", "worst", " x ", "Why", "winner", "driver", "From now on"):
        assert shown in printed


def test_an_array_needs_a_queue_to_be_timed_by(queue):
    assert opencl.QueueTimer(queue).name == "opencl-events"
    assert timer_for((ones(queue).with_queue(None),)) is None
