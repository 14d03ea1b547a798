"""`tunebook.adapters.triton.autotune` on a GPU that does not exist; compilation for sm_90 is real."""

# ruff: noqa: N803 - constexprs are written in capitals in Triton

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

import triton.language as tl  # noqa: E402 - after the check that it is there
from fake_gpu import FakeGpu, installed  # noqa: E402 - as above
from triton.runtime import Autotuner  # noqa: E402 - as above

import tunebook as tb  # noqa: E402 - as above
from tunebook.adapters._triton import engine  # noqa: E402 - as above
from tunebook.adapters.triton import autotune  # noqa: E402 - as above

pytestmark = pytest.mark.usefixtures("compiled_once")


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out_ptr + at, tl.load(x_ptr + at, inside) + tl.load(y_ptr + at, inside), inside)


@triton.jit
def scale(x_ptr, n, BLOCK: tl.constexpr, UNUSED: tl.constexpr = 0):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, at < n) * 2, at < n)


def blocks(*sizes, **options):
    return [triton.Config({"BLOCK": size}, num_warps=4, **options) for size in sizes]


CONFIGS = blocks(64, 128, 256, 512)
COST = {64: 40e-6, 128: 20e-6, 256: 10e-6, 512: 30e-6, 1024: 5e-6}


@pytest.fixture
def gpu():
    with installed(FakeGpu(lambda facts: COST[facts["BLOCK"]]), add, scale) as fake:
        yield fake


def grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def tensors(n=1024, dtype=torch.float32):
    return torch.ones(n, dtype=dtype), torch.ones(n, dtype=dtype), torch.zeros(n, dtype=dtype), n


def tried(gpu):
    """The blocks that ran, each once."""
    return sorted({facts["BLOCK"] for facts in gpu.launches})


# ------------------------------------------------------------------------------------------------------------ choosing


def test_the_fastest_configuration_is_launched_and_remembered(gpu):
    kernel = autotune(CONFIGS, key=["n"])(add)
    kernel[grid](*tensors())
    assert kernel.best_config.kwargs == {"BLOCK": 256}
    assert gpu.launches[-1] == {"BLOCK": 256, "num_warps": 4, "grid": (4, 1, 1), "device": 0}
    gpu.launches.clear()
    for _ in range(5):
        kernel[grid](*tensors())
    assert tried(gpu) == [256]
    assert len(gpu.launches) == 5


def test_it_is_an_autotuner_of_tritons_with_its_attributes(gpu):
    kernel = autotune(CONFIGS, key=["n"])(add)
    kernel[grid](*tensors())
    assert isinstance(kernel, Autotuner)
    assert kernel.cache == {(1024, "torch.float32", "torch.float32", "torch.float32"): CONFIGS[2]}
    assert kernel.configs_timings[CONFIGS[0]][0] == pytest.approx(0.04)
    assert kernel.bench_time > 0
    assert kernel.configs == CONFIGS


def test_a_program_tunes_on_one_gpu_after_another(gpu):
    gpu.names = ("One GPU", "Another GPU")
    kernel = autotune(CONFIGS, key=["n"])(add)
    for device in range(2):
        gpu.set_current_device(device)
        kernel[grid](*tensors())
        assert kernel.best_config.kwargs == {"BLOCK": 256}
    assert tried(gpu) == [64, 128, 256, 512]


def test_another_process_finds_the_choice_in_the_book(gpu):
    autotune(CONFIGS, key=["n"])(add)[grid](*tensors())
    gpu.launches.clear()
    fresh = autotune(CONFIGS, key=["n"])(add)
    fresh[grid](*tensors())
    assert fresh.best_config is CONFIGS[2]
    assert len(gpu.launches) == 1


def test_an_added_configuration_is_raced_against_the_winner_alone(gpu):
    autotune(CONFIGS, key=["n"])(add)[grid](*tensors())
    gpu.launches.clear()
    grown = autotune([*CONFIGS, *blocks(1024)], key=["n"])(add)
    grown[grid](*tensors())
    assert tried(gpu) == [256, 1024]
    assert grown.best_config.kwargs == {"BLOCK": 1024}


def test_the_order_of_configurations_does_not_matter(gpu):
    autotune(CONFIGS, key=["n"])(add)[grid](*tensors())
    gpu.launches.clear()
    autotune(CONFIGS[::-1], key=["n"])(add)[grid](*tensors())
    assert len(gpu.launches) == 1


@pytest.mark.parametrize("change", [{"n": 2048}, {"dtype": torch.float16}])
def test_the_key_holds_the_named_values_and_every_dtype(gpu, change):
    kernel = autotune(CONFIGS, key=["n"])(add)
    kernel[grid](*tensors())
    gpu.launches.clear()
    kernel[grid](*tensors(**change))
    assert tried(gpu) == [64, 128, 256, 512]


def test_a_flag_in_the_key_differs_from_a_number(gpu):
    kernel = autotune(blocks(64, 128), key=["UNUSED"])(scale)
    for flag in (1, True):
        gpu.launches.clear()
        kernel[grid](torch.ones(64), 64, UNUSED=flag)
        assert tried(gpu) == [64, 128]


def test_devices_of_another_name_have_their_own_entry(gpu):
    gpu.names = ("Fake GPU", "Fake GPU", "Other GPU")
    kernel = autotune(CONFIGS, key=["n"])(add)
    expected = {0: 4, 1: 1, 2: 4}
    for device, candidates in expected.items():
        gpu.device = device
        gpu.launches.clear()
        kernel[grid](*tensors())
        assert len(tried(gpu)) == candidates


def test_an_entry_holds_for_the_same_driver_triton_and_target_only(gpu):
    kernel = autotune(CONFIGS, key=["n"])(add)
    tuned = kernel.tune(*tensors(), grid=grid)
    environment = json.loads(tuned.measurements[0].environment)
    assert environment["triton"] == triton.__version__
    assert environment["target"] == "cuda:90"
    assert "driver" in environment


def test_a_single_configuration_is_not_measured(gpu):
    kernel = autotune(blocks(128), key=["n"])(add)
    kernel[grid](*tensors())
    kernel[grid](*tensors())
    with kernel.overlay(CONFIGS[0]):
        kernel[grid](*tensors())
    assert [facts["BLOCK"] for facts in gpu.launches] == [128, 128, 64]


@pytest.mark.parametrize("option", ["reset_to_zero", "restore_value"])
def test_an_unknown_parameter_name_is_an_error_at_the_first_launch_at_the_latest(gpu, option):
    with pytest.raises(ValueError, match=r"out_prt.*out_ptr"):  # since Triton 3.9 where the kernel is defined
        autotune(CONFIGS, **{"key": ["n"], option: ["out_prt"]})(add)[grid](*tensors())


def test_an_unknown_parameter_name_that_is_written_later_is_an_error_too(gpu):
    kernel = autotune(CONFIGS, key=["n"])(add)
    kernel.restore_value = ["out_prt"]
    with pytest.raises(ValueError, match=r"restore_value.*out_prt.*out_ptr"):
        kernel[grid](*tensors())


def test_a_value_that_call_and_configuration_both_give_is_an_error(gpu):
    kernel = autotune(CONFIGS, key=["n"])(add)
    with pytest.raises(ValueError, match="BLOCK: given by the call and by configurations"):
        kernel[grid](*tensors(), BLOCK=64)


def test_decorating_builds_nothing_and_generates_no_code(monkeypatch):
    def built(*_given, **_named):
        raise AssertionError("built where the kernel is defined")

    monkeypatch.setattr(engine, "Engine", built)
    calls = []
    sys.setprofile(lambda _frame, event, _value: calls.append(event))
    try:
        kernel = autotune(CONFIGS, key=["n"], restore_value=["x_ptr"])(add)
    finally:
        sys.setprofile(None)
    assert len(calls) < 120  # of which Triton makes 35; building an engine makes thousands
    with pytest.raises(AssertionError, match="built where"):
        kernel[grid]


# ----------------------------------------------------------------------------------------- what candidates may do wrong


def test_a_candidate_that_does_not_compile_is_one_candidate_lost(gpu):
    kernel = autotune(blocks(100, 128, 256), key=["n"])(add)  # an arange must be a power of two
    kernel[grid](*tensors())
    assert kernel.best_config.kwargs == {"BLOCK": 256}
    assert "compile" in str(kernel.explain(*tensors(), grid=grid))


def test_a_candidate_that_needs_too_much_is_one_candidate_lost(gpu):
    gpu.cost = lambda facts: RuntimeError("out of resource") if facts["BLOCK"] == 256 else COST[facts["BLOCK"]]
    kernel = autotune(CONFIGS, key=["n"])(add)
    kernel[grid](*tensors())
    assert kernel.best_config.kwargs == {"BLOCK": 128}
    assert kernel.configs_timings[CONFIGS[2]] == [float("inf")] * 3


def test_if_all_fail_the_error_names_each_and_nothing_is_chosen(gpu):
    gpu.cost = lambda _facts: RuntimeError("no such luck")
    kernel = autotune(CONFIGS, key=["n"])(add)
    with pytest.raises(tb.NoConfig, match="all 4 candidates failed"):
        kernel[grid](*tensors())
    gpu.cost = lambda facts: COST[facts["BLOCK"]]
    with pytest.raises(tb.NoConfig, match="failed before"):
        autotune(CONFIGS, key=["n"])(add)[grid](*tensors())


def test_programs_that_are_the_same_are_measured_once(gpu):
    same = [triton.Config({"BLOCK": 128, "UNUSED": i}) for i in range(3)]
    kernel = autotune([*same, triton.Config({"BLOCK": 64, "UNUSED": 0})], key=["n"])(scale)
    kernel[grid](torch.ones(256), 256)
    assert len({facts["UNUSED"] for facts in gpu.launches if facts["BLOCK"] == 128}) == 1


def test_the_same_program_on_another_grid_is_another_candidate(gpu):
    same = [triton.Config({"BLOCK": 128, "UNUSED": i}) for i in (1, 2)]
    kernel = autotune(same, key=["n"])(scale)
    kernel[lambda meta: (meta["UNUSED"],)](torch.ones(256), 256)
    assert {facts["grid"] for facts in gpu.launches} == {(1, 1, 1), (2, 1, 1)}


# -------------------------------------------------------------------------------------------- arguments are left alone


def doubled(_facts, arguments):
    arguments["x_ptr"].mul_(2)


@pytest.mark.parametrize("declared", [{"restore_value": ["x_ptr"]}, {}])
def test_tensors_that_runs_write_to_are_put_back(gpu, declared):
    gpu.effect = doubled
    x = torch.arange(256.0)
    autotune(blocks(64, 128, 256), key=["n"], **declared)(scale)[grid](x, 256)
    assert torch.equal(x, 2 * torch.arange(256.0))


def test_tensors_that_are_reset_are_zero_in_every_run(gpu):
    seen = []

    def accumulate(_facts, arguments):
        seen.append(arguments["x_ptr"].sum().item())
        arguments["x_ptr"].add_(1)

    gpu.effect = accumulate
    x = torch.full((256,), 7.0)
    autotune(blocks(64, 128), key=["n"], reset_to_zero=["x_ptr"])(scale)[grid](x, 256)
    assert set(seen) == {0.0}
    assert torch.equal(x, torch.ones(256))


def test_a_backward_pass_survives_the_tuning(gpu):
    x = torch.ones(256, requires_grad=True)
    y = x.exp()
    autotune(blocks(64, 128), key=["n"])(scale)[grid](y.detach(), 256)
    y.sum().backward()  # would raise if `y` had been written to under autograd's eyes
    assert x.grad is not None


def test_hooks_run_around_every_run_and_are_not_timed(gpu):
    calls = []

    def before(arguments, reset_only=False):
        gpu.clock_s += 1.0
        calls.append(("reset" if reset_only else "before", arguments["BLOCK"]))

    def after(arguments, exception):
        gpu.clock_s += 1.0
        calls.append(("after", exception))

    kernel = autotune(CONFIGS, key=["n"], pre_hook=before, post_hook=after)(add)
    kernel[grid](*tensors())
    assert kernel.configs_timings[CONFIGS[2]][0] == pytest.approx(0.01)
    assert calls[0] == ("before", calls[0][1])
    assert calls[1] == ("after", None)
    assert calls[-1] == ("reset", 256)


def test_the_hook_after_a_run_gets_the_exception(gpu):
    gpu.cost = lambda facts: RuntimeError("bad block") if facts["BLOCK"] == 64 else COST[facts["BLOCK"]]
    seen = []
    told = lambda _arguments, exception: seen.append(str(exception))
    kernel = autotune(CONFIGS, key=["n"], post_hook=told)(add)
    kernel[grid](*tensors())
    assert "bad block" in seen


def test_the_hook_of_a_configuration_runs_before_its_launches(gpu):
    seen = []
    hooked = triton.Config({"BLOCK": 256}, pre_hook=lambda arguments: seen.append(arguments["BLOCK"]))
    kernel = autotune([*blocks(64, 128), hooked], key=["n"])(add)
    kernel[grid](*tensors())
    tuning = len(seen)
    kernel[grid](*tensors())
    assert len(seen) == tuning + 1


# ------------------------------------------------------------------------------------------------- Triton's own options


def test_early_pruning_and_a_performance_model_choose_the_candidates(gpu):
    def early(configs, named, **keywords):
        assert named["n"] == 1024
        assert "grid" in keywords
        return [config for config in configs if config.kwargs["BLOCK"] > 64]

    prune = {"early_config_prune": early, "perf_model": lambda BLOCK, **_rest: -BLOCK, "top_k": 2}
    kernel = autotune(CONFIGS, key=["n"], prune_configs_by=prune)(add)
    kernel[grid](*tensors())
    assert tried(gpu) == [256, 512]


def test_pruning_everything_is_an_error(gpu):
    kernel = autotune(CONFIGS, key=["n"], prune_configs_by={"early_config_prune": lambda *_, **__: []})(add)
    with pytest.raises(triton.TritonError, match="at least one config"):
        kernel[grid](*tensors())


def test_heuristics_may_stand_below_and_above(gpu):
    below = autotune(CONFIGS, key=["n"])(triton.heuristics({"n": lambda args: args["x_ptr"].numel()})(add))
    below[(1,)](*tensors()[:3])
    assert below.best_config.kwargs == {"BLOCK": 256}
    above = triton.heuristics({"n": lambda args: args["x_ptr"].numel()})(autotune(CONFIGS, key=["n"])(add))
    above[(1,)](*tensors()[:3])
    assert gpu.launches[-1]["BLOCK"] == 256


def test_do_bench_of_the_users_measures_each_configuration_once(gpu):
    asked = []

    def do_bench(call, quantiles):
        call()
        asked.append(gpu.launches[-1]["BLOCK"])
        return [COST[gpu.launches[-1]["BLOCK"]] * 1e3] * len(quantiles)

    kernel = autotune(CONFIGS, key=["n"], do_bench=do_bench)(add)
    kernel[grid](*tensors())
    assert sorted(asked) == [64, 128, 256, 512]
    assert kernel.best_config.kwargs == {"BLOCK": 256}


def test_a_benchmark_that_gives_no_time_never_wins(gpu):
    bench = lambda call, quantiles: float("inf") if call() or gpu.launches[-1]["BLOCK"] == 64 else [1.0, 1.0, 1.0]
    kernel = autotune(blocks(64, 128), key=["n"], do_bench=bench)(add)
    kernel[grid](*tensors())
    assert kernel.best_config.kwargs == {"BLOCK": 128}


@pytest.mark.parametrize(
    ("measure", "how"),
    [
        (tb.Measure(cache="warm"), "device-events/warm-l2/launch"),
        (tb.Measure(launch="graph"), "device-events/cold-l2/graph"),
        (tb.Measure(cache="cold", launch="eager"), "device-events/cold-l2/launch"),
    ],
)
def test_measure_says_how_launches_are_timed(gpu, measure, how):
    kernel = autotune(CONFIGS, key=["n"], measure=measure)(add)
    tuned = kernel.tune(*tensors(), grid=grid)
    assert {m.policy.partition("/race")[0] for m in tuned.measurements} == {how}
    assert tuned.config.config.kwargs == {"BLOCK": 256}


def test_a_way_to_measure_that_triton_kernels_do_not_have_is_an_error(gpu):
    with pytest.raises(tb.DefinitionError, match="leave host= and inputs= out"):
        autotune(CONFIGS, key=["n"], measure=tb.Measure(host=True))
    with pytest.raises(tb.DefinitionError, match="do_bench= measures in its own way"):
        autotune(CONFIGS, key=["n"], measure=tb.Measure(cache="warm"), do_bench=lambda *_, **__: 1.0)(add)[grid]
    kernel = autotune(CONFIGS, key=["n"], policy=tb.AutotunePolicy(measure=tb.Measure(cache="warm")))(add)
    with pytest.raises(tb.DefinitionError, match="is measured as its definition says: give it measure="):
        kernel[grid](*tensors())


def test_graphs_are_replayed_where_that_is_asked_for(gpu):
    with pytest.warns(DeprecationWarning, match="use_cuda_graph"):  # as with Triton
        kernel = autotune(CONFIGS, key=["n"], use_cuda_graph=True)(add)
    kernel[grid](*tensors())
    assert gpu.replays > 10
    assert kernel.best_config.kwargs == {"BLOCK": 256}


def test_warmup_compiles_every_candidate_and_runs_none(gpu):
    compiled = autotune(CONFIGS, key=["n"])(add).warmup(*tensors(), grid=grid)
    assert len(compiled) == 4
    assert all(kernel.asm["cubin"] for kernel in compiled)
    assert gpu.launches == []


def test_printing_is_switched_on_by_tritons_own_knob(gpu, capsys, monkeypatch):
    monkeypatch.setattr(triton.knobs.autotuning, "print", True)
    autotune(CONFIGS, key=["n"])(add)[grid](*tensors())
    assert "best config selected: BLOCK: 256" in capsys.readouterr().out


def test_tritons_listener_is_told_of_choices_made_and_found(gpu, monkeypatch):
    told = []
    monkeypatch.setattr(triton.knobs.autotuning, "listener", lambda **facts: told.append(facts), raising=False)
    for _ in range(2):
        autotune(CONFIGS, key=["n"])(add)[grid](*tensors())
    assert [facts["cache_hit"] for facts in told] == [False, True]
    assert told[0]["fn"] is add
    assert told[0]["best_config"] is CONFIGS[2]


# ------------------------------------------------------------------------------------------------------ graph captures


def test_nothing_is_measured_under_capture_and_the_error_has_a_remedy(gpu):
    kernel = autotune(CONFIGS, key=["n"])(add)
    gpu.capturing = True
    with pytest.raises(tb.NoConfig, match=r"graph is being captured[\s\S]*before the capture"):
        kernel[grid](*tensors())
    assert gpu.launches == []


def test_under_capture_a_known_choice_is_used(gpu):
    autotune(CONFIGS, key=["n"])(add)[grid](*tensors())
    gpu.launches.clear()
    gpu.capturing = True
    autotune(CONFIGS, key=["n"])(add)[grid](*tensors())
    assert [facts["BLOCK"] for facts in gpu.launches] == [256]


def test_under_capture_the_heuristic_answers_and_is_not_remembered(gpu):
    kernel = autotune(CONFIGS, key=["n"], heuristic=CONFIGS[0])(add)
    gpu.capturing = True
    kernel[grid](*tensors())
    assert tried(gpu) == [64]
    gpu.capturing = False
    kernel[grid](*tensors())
    assert kernel.best_config is CONFIGS[2]


# ----------------------------------------------------------------------------------------------------- many at a time


def test_eight_threads_tune_one_key_once(gpu):
    kernel = autotune(CONFIGS, key=["n"])(add)
    events = []
    kernel.selector.listen(lambda event, **_facts: events.append(event))
    threads = [threading.Thread(target=lambda: kernel[grid](*tensors())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events.count("autotune_start") == 1
    assert [facts["BLOCK"] for facts in gpu.launches[-7:]] == [256] * 7  # the eighth may be the first to go on


def test_candidates_are_spread_over_the_gpus_of_one_model(gpu):
    gpu.names = ("Fake GPU", "Fake GPU", "Other GPU")
    gpu.cost = lambda facts: {64: 40e-6, 128: 20e-6, 256: 10e-6, 512: 90e-6}[facts["BLOCK"]]
    kernel = autotune(CONFIGS, key=["n"], devices="all")(add)
    kernel[grid](*tensors())
    ran = {device: {facts["BLOCK"] for facts in gpu.launches if facts["device"] == device} for device in range(3)}
    assert ran == {0: {64, 256, 128}, 1: {128, 512}, 2: set()}  # 128 won its share, and then met 256
    assert kernel.best_config.kwargs == {"BLOCK": 256}
    assert gpu.launches[-1]["device"] == 0


def test_an_overlay_changes_launches_inside_its_block(gpu):
    kernel = autotune(CONFIGS, key=["n"])(add)
    kernel[grid](*tensors())
    with kernel.overlay(CONFIGS[0]):
        kernel[grid](*tensors())
        assert gpu.launches[-1]["BLOCK"] == 64
    kernel[grid](*tensors())
    assert gpu.launches[-1]["BLOCK"] == 256


# ---------------------------------------------------------------------------------------------------------- the code

MODULE = """
import triton, triton.language as tl
FACTOR = tl.constexpr({factor})

@triton.jit
def helper(x):
    return x {operator} FACTOR

@triton.jit
def kernel(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, helper(tl.load(x_ptr + at, at < n)), at < n)
"""


def checksum_of(path, monkeypatch, **parts):
    path.write_text(MODULE.format(**{"factor": 2, "operator": "*", **parts}))
    namespace = {"__name__": "edited"}
    sys.modules.pop("edited", None)
    monkeypatch.syspath_prepend(path.parent)
    import importlib
    import linecache

    linecache.checkcache()
    importlib.invalidate_caches()
    namespace = importlib.import_module("edited")
    return autotune(blocks(64, 128), key=["n"])(namespace.kernel).kernel.code_checksum


def test_editing_a_helper_or_a_constant_changes_the_checksum(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / "edited.py"
    before = checksum_of(path, monkeypatch)
    assert checksum_of(path, monkeypatch) == before
    assert checksum_of(path, monkeypatch, operator="+") != before
    assert checksum_of(path, monkeypatch, factor=3) != before


# ------------------------------------------------------------------------------------------------------ without a GPU

INTERPRETED = """
import torch, triton, triton.language as tl
from tunebook.adapters.triton import autotune

@autotune([triton.Config({"BLOCK": b}) for b in (8, 512)], key=["n"])
@triton.jit
def add(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, at < n) + 1, at < n)

x, out = torch.ones(512), torch.zeros(512)
add[lambda meta: (triton.cdiv(512, meta["BLOCK"]),)](x, out, 512)
assert torch.equal(out, x + 1)
print(add.best_config)
"""


def test_the_interpreter_is_tuned_by_the_hosts_clock(tmp_path):
    script = tmp_path / "interpreted.py"
    script.write_text(INTERPRETED)
    source = Path(tb.__file__).parents[1]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(source)}
    said = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert "BLOCK: 512" in said.stdout  # 64 programs take 64 times as long to interpret as one
