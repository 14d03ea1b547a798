"""Kernel and Executor: variants, prepare, shard_map, compile."""

from __future__ import annotations

import numpy as np
import pytest

import tunebook as tb


class Scale(tb.Kernel):
    def prepare(self, x, factor=2):
        return (np.asarray(x),), {"factor": factor}

    def run(self, x, *, cfg, factor):
        return ("run", cfg, (x * factor).tolist())

    def heuristic_cfg(self, inv):
        return "guess"


class Device:
    device_kind = "pretend"

    def __init__(self, platform):
        self.platform = platform


class ArrayOn:
    shape, dtype = (4,), np.dtype("float32")

    def __init__(self, platform):
        self.device = Device(platform)


class PerPlatform(tb.Kernel):
    def run(self, x, *, cfg):
        return "run", cfg

    def run_gpu(self, x, *, cfg):
        return "run_gpu", cfg

    def run_shard_map(self, x, *, cfg):
        return "run_shard_map", cfg

    def run_shard_map_gpu(self, x, *, cfg):
        return "run_shard_map_gpu", cfg

    def heuristic_cfg(self, inv):
        return "any"

    def heuristic_cfg_cpu(self, inv):
        return "cpu"

    def heuristic_cfg_tpu(self, inv):
        return "tpu"

    def create_shard_map_wrapper(self, fn, *args, mesh, in_specs, out_specs, check_vma, **kwargs):
        return (lambda *a: (mesh, fn(*a))), args


def executor(**options):
    policy = tb.AutotunePolicy(cache_miss_fallback="heuristics")
    return tb.Executor(tb.ConfigSelectorChain(tb.ConfigCache(), policy, **options))


def test_prepare_runs_before_the_choice_and_the_run():
    assert executor()(Scale("scale"), [1, 2]) == ("run", "guess", [2, 4])
    assert executor()(Scale("scale"), [1, 2], factor=3) == ("run", "guess", [3, 6])


def test_an_override_reaches_the_kernel():
    assert executor()(Scale("scale"), [1], cfg="mine")[1] == "mine"


@pytest.mark.parametrize(
    ("platform", "expected"), [("cpu", ("run", "cpu")), ("gpu", ("run_gpu", "any")), ("tpu", ("run", "tpu"))]
)
def test_the_variant_for_the_platform_of_the_arguments_is_used(platform, expected):
    assert executor()(PerPlatform("p"), ArrayOn(platform)) == expected


@pytest.mark.parametrize(("platform", "expected"), [("cpu", "run_shard_map"), ("gpu", "run_shard_map_gpu")])
def test_shard_map_uses_its_own_variants_through_the_kernels_wrapper(platform, expected):
    out = executor()(
        PerPlatform("p"), ArrayOn(platform), method="shard_map", mesh="mesh", in_specs=("i",), out_specs="o"
    )
    assert out[0] == "mesh"
    assert out[1][0] == expected


def test_candidates_may_differ_by_platform():
    class Kernel(PerPlatform):
        def candidate_cfgs(self, inv):
            return ["any"]

        def candidate_cfgs_gpu(self, inv):
            return ["gpu"]

    kernel = Kernel("p")
    inv = lambda platform: tb.Invocation("p", (ArrayOn(platform),), {})
    assert (kernel.candidates(inv("cpu")), kernel.candidates(inv("gpu"))) == (["any"], ["gpu"])


def test_the_method_and_its_specs_are_part_of_the_key():
    plain = tb.Invocation("p", (1,), {})
    sharded = [tb.Invocation("p", (1,), {}, method="shard_map", mesh=m, in_specs="i", out_specs="o") for m in "ab"]
    assert len({inv.call_key for inv in (plain, *sharded)}) == 3


def test_shard_map_without_its_specs_names_the_missing_ones():
    with pytest.raises(tb.DefinitionError, match="in_specs, out_specs"):
        executor()(PerPlatform("p"), 1, method="shard_map", mesh="m")
    with pytest.raises(tb.DefinitionError, match="'pmap' is unknown"):
        executor()(PerPlatform("p"), 1, method="pmap")


def test_choose_config_chooses_as_a_call_would():
    assert executor().choose_config(Scale("scale"), [1]) == "guess"
    assert executor().choose_config(Scale("scale"), [1], cfg="mine") == "mine"


def test_compile_chooses_once():
    events = []
    run = executor(on_event=lambda event, **_: events.append(event))
    compiled = run.compile(Scale("scale"), [1, 2], factor=5)
    assert events == ["heuristics"]
    assert compiled([1, 2], factor=5) == ("run", "guess", [5, 10])
    assert compiled([3], factor=5) == ("run", "guess", [15])
    assert events == ["heuristics"]


@pytest.mark.parametrize("name", ["run", "heuristic_cfg", "fwd_with_residuals", "vjp", "create_shard_map_wrapper"])
def test_an_undefined_kernel_method_is_an_error_that_names_the_kernel(name):
    kernel = tb.Kernel("bare")
    arguments = {"run": {"cfg": 1}, "fwd_with_residuals": {"cfg": 1}, "vjp": {"residuals": 1, "dy": 1, "cfg": 1}}
    arguments |= {"heuristic_cfg": {"inv": None}, "create_shard_map_wrapper": {"fn": None}}
    with pytest.raises(tb.Unsupported, match="'bare'"):
        getattr(kernel, name)(**arguments[name])


def test_a_key_builder_makes_the_key():
    kernel = Scale("scale", key_builder=lambda inv: f"n={len(inv.args[0])}")
    inv = tb.Invocation("scale", ([1, 2],), {})
    assert kernel.problem(inv).call_key == inv.make_key(kernel.key_builder) == "n=2"
    assert inv.make_key() == inv.call_key


def test_a_key_builder_that_returns_no_string_is_refused():
    with pytest.raises(tb.DefinitionError, match="must return a str"):
        tb.Invocation("scale", (), {}).make_key(lambda inv: 3)


def test_a_kernel_without_a_name_is_refused():
    with pytest.raises(tb.DefinitionError, match="op_id"):
        tb.Kernel("")
