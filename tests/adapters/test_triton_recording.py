"""Launches of Triton kernels: described by plain values, made again from them, compiled ahead, and tuned offline."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import re
import signal
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton", reason="triton is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

import recorded_triton  # noqa: E402 - after the check that it is there
import triton.language as tl  # noqa: E402 - as above
from fake_gpu import FakeGpu, installed  # noqa: E402 - as above
from recorded_triton import blocks, foreign, gather  # noqa: E402 - as above
from shared_checks import eventually  # noqa: E402 - as above
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402 - as above

import tunebook as tb  # noqa: E402 - as above
from tunebook._base.config_codec import decode, encode  # noqa: E402 - as above
from tunebook._cli import main  # noqa: E402 - as above
from tunebook._selection.recording import saved_calls  # noqa: E402 - as above
from tunebook.adapters._triton import launch_specs, recorded_kernels  # noqa: E402 - as above
from tunebook.adapters._triton.attributes import ENGINE, LAUNCHER  # noqa: E402 - as above
from tunebook.adapters._triton.candidate import Launch  # noqa: E402 - as above
from tunebook.adapters._triton.engine import engine_of  # noqa: E402 - as above
from tunebook.adapters._triton.launch_specs import (  # noqa: E402 - as above
    describe_grid,
    describe_launch,
    make_launch,
    without_memory,
)
from tunebook.adapters._triton.recorded_kernels import compile_calls, find_kernel, parse_target  # noqa: E402 - as above
from tunebook.adapters.triton import autotune, install, uninstall  # noqa: E402 - as above
from tunebook.fleet import tune_recording  # noqa: E402 - as above
from tunebook.fleet._farm import compiling  # noqa: E402 - as above
from tunebook.fleet._farm.task import Task, tune_call  # noqa: E402 - as above

FOREIGN = foreign.fn  # below its heuristics


def launch_foreign(x, n, grid=blocks):
    """Launch the kernel that knows nothing of tunebook, as a take-over does."""
    engine_of(FOREIGN).launcher().bind(grid)(x, n, EVEN=n % 128 == 0)


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # without it, Triton 3.9 warns that the default will change
    functions = (gather.fn, FOREIGN.fn)
    with installed(FakeGpu(lambda facts: facts["num_warps"] * 1e-5), *functions) as fake:
        yield fake


@pytest.fixture(autouse=True)
def fresh_engines():
    """Kernels of a module outlive a test, and its book."""
    yield
    for kernel in (gather, FOREIGN):
        for name in [name for name in vars(kernel) if name in (ENGINE, LAUNCHER)]:
            delattr(kernel, name)
        kernel.cache.clear()


def arguments(n=256):
    return torch.ones(n), torch.arange(n, dtype=torch.int32), torch.zeros(n)


def recorded(*launches):
    with tb.record() as calls:
        for launch in launches:
            launch()
    return calls


# ------------------------------------------------------------------------------------ a description, and made again

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
]  # fmt: skip


@st.composite
def tensors(draw):
    """Tensors of any shape, strides and offset, in storages that they may share and that may begin anywhere."""
    storages = []
    for _ in range(draw(st.integers(1, 2))):
        start = draw(st.sampled_from([0, 0, 1, 4, 8]))
        whole = torch.arange(512 + start, dtype=torch.uint8).untyped_storage()
        storages.append(whole[start:] if start else whole)
    made = []
    for _ in range(draw(st.integers(1, 4))):
        storage, dtype = draw(st.sampled_from(storages)), draw(st.sampled_from(DTYPES))
        room = 512 // dtype.itemsize - 1
        offset = draw(st.integers(0, room // 2))
        shape, strides, left = [], [], room - offset
        for _ in range(draw(st.integers(0, 3))):
            stride = draw(st.integers(0, 8))
            shape.append(draw(st.integers(0, 1 + min(4, left // stride if stride else 4))))
            strides.append(stride)
            left -= max(shape[-1] - 1, 0) * stride
        made.append(torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides))
    return made


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=3),
    st.sampled_from([torch.float16, tl.bfloat16]),
)  # fmt: skip


def through_json(spec):
    return decode(json.loads(json.dumps(encode(spec))), {})


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(tensors(), st.lists(SCALARS, max_size=3))
def test_a_launch_made_from_a_description_has_the_same_description(tensors, scalars):
    launch = Launch((4, 2), (*tensors, *scalars), {"again": tensors[0], "pair": (tensors[-1], 7)})
    spec = describe_launch(launch, [4, 2], samples=True)
    assert repr(through_json(spec)) == repr(spec)  # by text: a NaN differs from itself
    made = make_launch(through_json(spec), "cpu")
    assert repr(describe_launch(made, [4, 2], samples=True)) == repr(spec)
    assert made.grid == (4, 2)
    for ours, theirs in zip(made.args[: len(tensors)], tensors, strict=True):
        if not theirs.dtype.is_floating_point and not theirs.dtype.is_complex:
            assert torch.equal(ours, theirs)
    shared = {(i, j) for i, x in enumerate(tensors) for j, y in enumerate(tensors) if storage_of(x) == storage_of(y)}
    again = made.args[: len(tensors)]
    assert shared == {
        (i, j) for i, x in enumerate(again) for j, y in enumerate(again) if storage_of(x) == storage_of(y)
    }


def storage_of(x):
    return x.untyped_storage()._cdata


@settings(deadline=None, max_examples=50)
@given(tensors())
def test_a_tensor_without_memory_answers_all_but_values_as_the_tensor_does(tensors):
    spec = describe_launch(Launch((1,), tuple(tensors), {}), [1], samples=False)
    for ours, theirs in zip(without_memory(spec).args, tensors, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        assert ours.numel() == theirs.numel()
        if theirs.data_ptr():  # torch says 0 for a tensor without elements
            assert ours.data_ptr() % 16 == theirs.data_ptr() % 16
        assert ours.device.type == "meta"


def test_other_arguments_are_made_again():
    base = torch.ones(64, 32)
    given = (
        TensorDescriptor.from_tensor(base, [16, 16]),
        triton.reinterpret(torch.ones(8, dtype=torch.int8), tl.float8e4nv),
        tl.constexpr(3),
        recorded_triton.twice,
        [1, 2],
    )
    made = make_launch(through_json(describe_launch(Launch((1,), given, {}), [1], samples=True)), "cpu").args
    assert (made[0].base.shape, made[0].block_shape, made[0].padding) == ((64, 32), [16, 16], "zero")
    assert made[1].dtype == tl.float8e4nv
    assert (made[2].value, made[3], made[4]) == (3, recorded_triton.twice, [1, 2])


def test_many_integers_are_described_by_their_range_and_order(monkeypatch):
    monkeypatch.setattr(launch_specs, "SAMPLED", 8)
    ascending, mixed = torch.arange(100, 116), torch.tensor([7, -3] * 8, dtype=torch.int32)
    spec = describe_launch(Launch((1,), (ascending, mixed), {}), [1], samples=True)
    assert [(of["range"], of["sorted"]) for of in spec["args"]] == [([100, 115], True), ([-3, 7], False)]
    up, other = make_launch(spec, "cpu").args
    assert (up[1:] >= up[:-1]).all()
    assert (up.min() >= 100, up.max() <= 115, other.min() >= -3, other.max() <= 7) == (True,) * 4


def test_without_samples_integers_are_from_one_to_three():
    spec = describe_launch(Launch((1,), (torch.full((50,), 9),), {}), [1], samples=False)
    assert set(make_launch(spec, "cpu").args[0].tolist()) <= {1, 2, 3}


def test_floats_are_made_up_away_from_zero_and_the_same_for_a_seed():
    spec = describe_launch(Launch((1,), (torch.zeros(1000),), {}), [1], samples=True)
    (first,), (second,), (other,) = (make_launch(spec, "cpu", seed).args for seed in (0, 0, 1))
    assert first.abs().min() >= 0.25
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(("change", "message"), [
    (lambda of: of.update(values="AAAA"), "recorded values of a tensor"),
    (lambda of: of.update(dtype="torch.nonsense"), "not a dtype of this torch"),
])  # fmt: skip
def test_a_description_that_was_altered_is_refused(change, message):
    spec = describe_launch(Launch((1,), (torch.arange(4),), {}), [1], samples=True)
    change(spec["args"][0])
    with pytest.raises(tb.CodecError, match=message):
        make_launch(spec, "cpu")


# ----------------------------------------------------------------------------------------------------------- grids


def test_a_grid_that_is_a_closure_is_kept_as_its_results():
    n = 1000
    metas = [{"BLOCK": 64, "n": n}, {"BLOCK": 128, "n": n}, {"n": n}]  # the last one fails, as a pruned one may
    spec = through_json(describe_grid(lambda meta: (triton.cdiv(n, meta["BLOCK"]), 2), ["BLOCK"], metas))
    grid = without_memory({"grid": spec, "args": [], "kwargs": {}, "storages": []}).grid
    assert (grid({"BLOCK": 64}), grid({"BLOCK": tl.constexpr(128)})) == ((16, 2), (8, 2))
    with pytest.raises(tb.Unsupported, match="does not have the grid for BLOCK=32, which was not a candidate then"):
        grid({"BLOCK": 32})


def test_a_grid_function_of_a_module_is_asked_about_new_configurations():
    spec = through_json(describe_grid(blocks, ["BLOCK"], [{"BLOCK": 64, "n": 128}]))
    assert spec["function"] == "recorded_triton:blocks"
    grid = without_memory({"grid": spec, "args": [], "kwargs": {}, "storages": []}).grid
    assert (grid({"BLOCK": 64, "n": 128}), grid({"BLOCK": 32, "n": 128})) == ((2,), (4,))


# ------------------------------------------------------------------------------------------------------- recording


def test_launches_are_recorded_and_nothing_is_tuned_or_kept_alive(gpu):
    alive = []

    def launch():
        x, index, out = arguments()
        alive.extend(weakref.ref(each) for each in (x, index, out))
        gather[blocks](x, index, out, 256)
        launch_foreign(out, 256)

    calls = recorded(launch)
    assert len(gpu.launches) == 2
    assert {call.problem.op for call in calls} == {"recorded_triton.gather@v0", "recorded_triton.foreign@v0"}
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3


def test_launches_of_kernels_that_were_taken_over_are_recorded(gpu, tmp_path):
    install()
    try:
        calls = save_and_load(recorded(lambda: foreign[blocks](torch.ones(256), 256)), tmp_path)
    finally:
        uninstall()
    assert [outcome.status for outcome in tb.tune_all(calls, progress=False)] == ["tuned"]
    gpu.launches.clear()
    install()
    try:
        foreign[blocks](torch.ones(256), 256)
    finally:
        uninstall()
    assert [facts["num_warps"] for facts in gpu.launches] == [1]


def test_a_second_launch_of_a_key_counts_and_reads_no_integers(gpu, monkeypatch):
    read = []
    monkeypatch.setattr(launch_specs, "_integers", lambda x: read.append(x.shape) or {})
    calls = recorded(*[lambda: gather[blocks](*arguments(), 256)] * 3)
    assert [call.count for call in calls] == [3]
    assert len(read) == 1


def test_launches_into_a_graph_are_recorded_without_their_integers(gpu):
    gather[blocks](*arguments(), 256)
    gpu.capturing = True
    (call,) = recorded(lambda: gather[blocks](*arguments(), 256))
    assert not launch_specs.keeps_values(call.args[0])


def test_integers_are_read_before_the_launch_changes_them(gpu):
    gpu.effect = lambda _facts, given: given["index_ptr"].fill_(7)
    (call,) = recorded(lambda: gather[blocks](*arguments(), 256))
    assert torch.equal(make_launch(call.args[0], "cpu").args[1], torch.arange(256, dtype=torch.int32))


def test_a_kernel_with_one_configuration_has_nothing_to_tune(gpu):
    kernel = autotune(recorded_triton.WARPS[:1], key=["n"])(gather.fn)
    assert len(recorded(lambda: kernel[blocks](*arguments(), 256))) == 0


# ---------------------------------------------------------------------------------------------------------- tuning


def save_and_load(calls, tmp_path):
    calls.save(tmp_path / "calls.json")
    return tb.Recording.load(tmp_path / "calls.json")


def test_a_program_finds_what_was_tuned_from_its_recording(gpu, tmp_path):
    n = 256  # a closure, as most programs have it
    launches = [
        lambda: gather[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](*arguments(), n),
        lambda: launch_foreign(torch.ones(n), n),
    ]
    calls = save_and_load(recorded(*launches), tmp_path)
    assert [outcome.status for outcome in tb.tune_all(calls, progress=False)] == ["tuned"] * 2
    assert [outcome.status for outcome in tb.tune_all(calls, progress=False)] == ["known"] * 2
    gpu.launches.clear()
    for launch in launches:
        launch()
    assert [facts["num_warps"] for facts in gpu.launches] == [1, 1]  # the fastest, and no measurement


def test_made_up_arguments_are_like_those_of_the_launch(gpu, tmp_path):
    seen = []
    gpu.effect = lambda _facts, given: seen.append({name: given[name].clone() for name in ("x_ptr", "index_ptr")})
    x, _, out = arguments()
    index = torch.arange(255, -1, -1, dtype=torch.int32)
    calls = save_and_load(recorded(lambda: gather[blocks](x[1:], index[1:], out, 255)), tmp_path)
    seen.clear()
    (outcome,) = tb.tune_all(calls, progress=False)
    assert outcome.tuned.values_from == "samples"
    assert all(torch.equal(given["index_ptr"], index[1:]) for given in seen)
    assert not any(torch.equal(given["x_ptr"], x[1:]) for given in seen)


def opaque(gpu, tmp_path):
    calls = recorded(lambda: gather[blocks](*arguments(), 256))
    (call,) = calls
    call.args[0]["args"][0] = {"is": "opaque", "class": "lib.Buffer"}
    return calls


def renamed(gpu, tmp_path):
    calls = recorded(lambda: gather[blocks](*arguments(), 256))
    calls.save(tmp_path / "calls.json")
    text = (tmp_path / "calls.json").read_text()
    (tmp_path / "calls.json").write_text(text.replace("recorded_triton.gather", "recorded_triton.gathers"))
    return tmp_path / "calls.json"


def with_other_names(gpu, tmp_path):
    path = renamed(gpu, tmp_path)
    path.write_text(path.read_text().replace("gathers@v0", "gather@v0").replace("x_ptr.dtype", "y_ptr.dtype"))
    return path


def moved(gpu, tmp_path):
    path = renamed(gpu, tmp_path)
    path.write_text(path.read_text().replace("recorded_triton", "no_such_module"))
    return path


@pytest.mark.parametrize(("make", "message"), [
    (opaque, r"an argument is a lib\.Buffer, which a recording cannot hold; tune it in a launch"),
    (renamed, r"recorded_triton does not define recorded_triton\.gathers@v0: was it renamed"),
    (with_other_names, r"gather@v0 has another key than when it was recorded \(.*y_ptr.*Record it again"),
    (moved, r"needs the module no_such_module, which cannot be imported"),
])  # fmt: skip
def test_launches_that_cannot_be_made_again_say_why(gpu, tmp_path, make, message):
    (call,) = saved_calls(make(gpu, tmp_path))
    outcome = tune_call(Task(call))
    assert outcome.status == "failed"
    assert re.search(message, outcome.detail), outcome.detail


def test_a_machine_without_a_gpu_says_so(gpu, tmp_path):
    calls = save_and_load(recorded(lambda: gather[blocks](*arguments(), 256)), tmp_path)

    class Without:
        def get_current_device(self):
            raise RuntimeError("0 active drivers")

    with installed(Without()):
        (outcome,) = tb.tune_all(calls, progress=False)
    assert outcome.status == "failed"
    assert "runs on a GPU, and Triton finds none here (0 active drivers)" in outcome.detail
    assert "--target cuda:90" in outcome.detail


def test_kernels_are_found_by_name_below_heuristics_and_in_other_libraries():
    assert find_kernel("recorded_triton.foreign@v0").fn is FOREIGN.fn
    assert find_kernel("recorded_triton.gather@v0") is gather.kernel
    assert find_kernel("recorded_triton.gather@v1") is None
    assert find_kernel("recorded_triton.blocks@v0") is None
    assert find_kernel("not_imported.gather@v0") is None


# ------------------------------------------------------------------------------------------------- compiling ahead


@pytest.mark.parametrize("text", ["cuda", "cuda:", "cuda:x", "tpu:4", "90"])
def test_a_target_that_triton_does_not_know_is_refused(text):
    with pytest.raises(tb.DefinitionError, match="cuda:90 or hip:gfx942"):
        parse_target(text)


def test_targets():
    assert (parse_target("cuda:90").arch, parse_target("hip:gfx942").warp_size) == (90, 64)


def test_programs_that_were_compiled_ahead_are_found_by_the_launch(gpu, tmp_path, monkeypatch):
    x, index, out = arguments()
    launch = lambda: gather[blocks](x[1:], index, out, 255)  # an address that 16 does not divide: other code
    calls = list(recorded(launch, lambda: launch_foreign(out, 256)))
    with installed(gpu, gather.fn, FOREIGN.fn):
        results = compile_calls(calls, "cuda:90")
    assert [tuple(result) for result in results] == [(4, 0, "")] * 2
    found = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **facts: found.append(facts["cache_hit"]))
    launch()
    launch_foreign(out, 256)
    assert found == [True] * 8


def test_a_candidate_that_does_not_compile_is_counted_and_named(gpu):
    configs = [*recorded_triton.WARPS, triton.Config({"BLOCK": 100})]
    kernel = autotune(configs, key=["n"])(gather.fn)
    calls = list(recorded(lambda: kernel[blocks](*arguments(), 256)))
    with installed(gpu, gather.fn):
        (result,) = compile_calls(calls, "cuda:90")
    assert (result.compiled, result.failed) == (4, 1)
    assert "power of 2" in result.error


@pytest.mark.parametrize("fate", [lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: threading.Event().wait()])
def test_forks_that_die_or_hang_cost_their_programs_and_nothing_else(gpu, monkeypatch, fate):
    kernel = autotune(recorded_triton.WARPS, key=["n"])(gather.fn)
    calls = list(recorded(lambda: kernel[blocks](*arguments(), 256)))
    monkeypatch.setattr(kernel.kernel, "compile_cfg", lambda _inv, _cfg: fate())
    monkeypatch.setattr(recorded_kernels, "_PATIENCE_S", 0.5)
    with installed(gpu, gather.fn):
        (result,) = compile_calls(calls, "cuda:90")
    assert tuple(result) == (0, 0, "time was up, or a process was lost")
    # Not `join`: the pool's own thread waits for the same forks, and Python says "alive" to whoever waits second.
    assert eventually(lambda: not any(fork.is_alive() for fork in multiprocessing.active_children()))


def test_nothing_is_compiled_when_the_time_is_up(gpu):
    calls = list(recorded(lambda: gather[blocks](*arguments(), 256)))
    with installed(gpu, gather.fn):
        (result,) = compile_calls(calls, "cuda:90", limit_s=0.0)
    assert (result.compiled, result.error) == (0, "time was up, or a process was lost")


def test_a_recording_is_compiled_and_tuned_in_other_processes_and_found_here(gpu, tmp_path):
    n = 384
    launch = lambda: gather[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](*arguments(n), n)
    path = tmp_path / "calls.json"
    recorded(launch, lambda: launch_foreign(torch.ones(n), n)).save(path)
    report = tune_recording(path, modules=["recorded_triton_gpu"])
    assert report.counts == {"tuned": 2}, report
    assert report.compilation.programs == 8
    gpu.launches.clear()
    launch()
    launch_foreign(torch.ones(n), n)
    assert [facts["num_warps"] for facts in gpu.launches] == [1, 1]


@tb.tunable(space=[1, 2])
def other(n, *, config):
    return n


def test_the_command_compiles_a_recording_for_a_target(gpu, tmp_path, monkeypatch, capsys):
    # In this process, whose driver is put back, and not in a new one, which takes seconds to start.
    monkeypatch.setattr(compiling, "spawned_pool", lambda _gpu: ThreadPoolExecutor(1))
    path = tmp_path / "calls.json"
    recorded(lambda: gather[blocks](*arguments(), 256), lambda: other(3)).save(path)
    with installed(gpu, gather.fn):
        assert main(["tune", str(path), "--target", "cuda:80"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"gather@v0 .* compiled +4 compiled", said), said
    assert re.search(r"other@v0 .* skipped +only kernels of Triton", said)
    assert "4 programs for cuda:80 are in Triton's cache, and nothing was measured" in said
    assert main(["tune", str(path), "--target", "cuda:80", "--kernel", "none"]) == 1


@pytest.mark.parametrize("options", [["--budget", "1m"], ["--dry-run"], ["--over", "dask://there:1"]])
def test_a_target_takes_no_options_for_measuring(tmp_path, capsys, options):
    assert main(["tune", str(tmp_path / "calls.json"), "--target", "cuda:90", *options]) == 2
    assert f"--target measures nothing, and takes no {options[0]}" in capsys.readouterr().err


def test_the_command_verifies_a_recording(gpu, tmp_path, capsys):
    path = tmp_path / "calls.json"
    calls = recorded(lambda: gather[blocks](*arguments(), 256))
    calls.save(path)
    tb.tune_all(calls, progress=False)
    assert main(["verify", "--recording", str(path)]) == 0
    assert "1 holds" in capsys.readouterr().out
