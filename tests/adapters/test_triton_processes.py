"""Triton kernels compiled in forks, and candidates that take a worker process with them instead of the user's."""

# ruff: noqa: N803 - constexprs are written in capitals in Triton

from __future__ import annotations

import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest
from limits import HANG_S

triton = pytest.importorskip("triton", reason="triton is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

import triton.language as tl  # noqa: E402 - after the check that it is there
from fake_gpu import FakeGpu, installed  # noqa: E402 - as above
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402 - as above

import tunebook as tb  # noqa: E402 - as above
from tunebook._measure.forked_worker import ForkedWorker, Reply  # noqa: E402 - as above
from tunebook._tuning import host_share, live_session  # noqa: E402 - as above
from tunebook.adapters._triton import compile_ahead, live  # noqa: E402 - as above
from tunebook.adapters._triton.candidate import LaunchConfig  # noqa: E402 - as above
from tunebook.adapters._triton.compile_ahead import longest_first  # noqa: E402 - as above
from tunebook.adapters._triton.kernel import TritonKernel  # noqa: E402 - as above
from tunebook.adapters._triton.remote_runs import SpawnedWorker  # noqa: E402 - as above
from tunebook.adapters._triton.resources import Spills  # noqa: E402 - as above
from tunebook.adapters.triton import autotune  # noqa: E402 - as above


@triton.jit
def scale(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, at < n) * 2, at < n)


@triton.jit
def double(x_desc, out_desc, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK
    block = x_desc.load([at, 0])
    out_desc.store([at, 0], tl.reshape(block, [BLOCK, 64]) * 2)


def fit_blocks(named):
    """Set the blocks of the descriptors, as Triton's own tutorial does, and clear an output."""
    for name in ("x_desc", "out_desc"):
        named[name].block_shape = [named["BLOCK"], 64]
    named["out_ptr"].zero_()


def grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def warps(*numbers):
    return [triton.Config({"BLOCK": 64}, num_warps=number) for number in numbers]


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # without it, Triton 3.9 warns that the default will change
    with installed(FakeGpu(lambda facts: facts["num_warps"] * 1e-5), scale, double) as fake:
        yield fake


# ---------------------------------------------------------------------------------------------------------- compiling


@pytest.fixture
def compiled_here(monkeypatch):
    """Whether each program that this process compiled or loaded was in the cache already."""
    found = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **facts: found.append(facts["cache_hit"]))
    monkeypatch.setattr(compile_ahead, "FEWEST_CORES", 1)
    monkeypatch.setattr(compile_ahead, "COLD_S", 0.0)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(compile_ahead, "SLOWEST_FORK_S", 600.0)  # however busy the machine is
    monkeypatch.setattr(compile_ahead, "_PATIENCE_S", 600.0)
    return found


MANY = [triton.Config({"BLOCK": 32 << i}, num_warps=w) for i in range(4) for w in (1, 2, 4)]


def test_many_candidates_are_compiled_in_forks_and_loaded_here(gpu, compiled_here):
    kernel = autotune(MANY, key=["n"])(scale)
    kernel[grid](torch.ones(256), 256)
    assert compiled_here == [True] * len(MANY)
    assert kernel.best_config.num_warps == 1


@pytest.mark.parametrize("in_forks", [True, False])
@pytest.mark.parametrize("way", ["autotune", "incremental"])
def test_programs_are_compiled_for_the_blocks_that_the_hook_of_a_configuration_sets(
    gpu, compiled_here, monkeypatch, in_forks, way
):
    """As `_swiglu_kernel_forward` of liger-kernel has it: all of its 32 candidates failed to compile."""
    monkeypatch.setattr(live_session, "HOST", host_share.HostShare(1e9))
    monkeypatch.setattr(live, "HOST", live_session.HOST)
    monkeypatch.setattr(gpu, "cost", lambda facts: 1 / facts["BLOCK"])
    gpu.behind = 2
    configs = [triton.Config({"BLOCK": 16 << i}, num_warps=w, pre_hook=fit_blocks) for i in range(4) for w in (4, 8)]
    x, out = torch.ones(256, 64), torch.zeros(256, 64)
    launched = [TensorDescriptor.from_tensor(each, [1, 64]) for each in (x, out)]
    policy = tb.AutotunePolicy(cache_miss_fallback=way)
    kernel = autotune(configs, key=[], processes=in_forks, policy=policy)(double)
    kernel[(1,)](*launched, out)
    ends_s = time.monotonic() + HANG_S
    while way == "incremental" and kernel.best_config.kwargs["BLOCK"] < 128 and time.monotonic() < ends_s:
        kernel[(1,)](*launched, out)
    assert kernel.best_config.kwargs["BLOCK"] == 128


def test_each_fork_begins_a_candidate_at_once_and_keeps_the_order(gpu, compiled_here, tmp_path):
    made, me = tmp_path / "compiled", os.getpid()
    made.mkdir()

    def compiles(config):
        if os.getpid() != me:
            (made / f"{MANY.index(config)}").touch()

    with compile_ahead.compile_forks(compiles, MANY) as compile_in_fork:
        while len(list(made.iterdir())) < 8:  # as many as cores, before any is asked for
            pass
        assert sorted(int(path.name) for path in made.iterdir()) == list(range(8))
        for config in reversed(MANY):  # in any order, each is compiled in a fork
            compile_in_fork(config)
        assert len(list(made.iterdir())) == len(MANY)


def test_a_candidate_that_would_spill_many_registers_is_left_out_and_its_compiler_stopped(
    gpu, compiled_here, monkeypatch
):
    me, compile_cfg = os.getpid(), TritonKernel.compile_cfg

    def compiles(kernel, inv, cfg):
        if os.getpid() != me and cfg.meta["num_warps"] < 4:
            signal.pause()  # until it is killed
        return compile_cfg(kernel, inv, cfg)

    monkeypatch.setattr(TritonKernel, "compile_cfg", compiles)
    monkeypatch.setattr(os, "cpu_count", lambda: len(MANY))  # or this process would compile those that find no fork
    monkeypatch.setattr(gpu, "load_binary", lambda *_: (object(), 1, 255, 100, 1024))
    tuned = autotune(MANY, key=["n"])(scale).tune(torch.ones(256), 256, grid=grid)
    assert [c.meta["num_warps"] for c, _ in tuned.ranking] == [4] * 4
    assert sorted(tuned.configs[name].meta["num_warps"] for name in tuned.left_out) == [1] * 4 + [2] * 4
    assert all("spill" in reason for reason in tuned.left_out.values())
    assert tuned.complete


def test_thorough_tuning_leaves_no_candidate_out(gpu, compiled_here, monkeypatch):
    monkeypatch.setattr(gpu, "load_binary", lambda *_: (object(), 1, 255, 100, 1024))
    tuned = autotune(MANY, key=["n"], thorough=True)(scale).tune(torch.ones(256), 256, grid=grid)
    assert len(tuned.measurements) == len(MANY)
    assert tuned.left_out == {}


def test_the_heuristic_and_the_candidates_are_compiled_once_each_and_at_once(gpu, compiled_here, monkeypatch, tmp_path):
    made, me, compile_cfg = tmp_path / "compiled", os.getpid(), TritonKernel.compile_cfg
    made.mkdir()

    def compiles(kernel, inv, cfg):
        if os.getpid() != me:
            with (made / f"{cfg.meta['BLOCK']}-{cfg.meta['num_warps']}").open("a") as file:
                file.write("x")
            while len(list(made.iterdir())) < len(MANY):  # the last one cannot wait for the first
                pass
        return compile_cfg(kernel, inv, cfg)

    monkeypatch.setattr(os, "cpu_count", lambda: len(MANY))
    monkeypatch.setattr(TritonKernel, "compile_cfg", compiles)
    again = triton.Config({"BLOCK": 64}, num_warps=4)  # equal to a candidate, and another object
    kernel = autotune(MANY, key=["n"], heuristic=again)(scale)
    tuned = kernel.tune(torch.ones(256), 256, grid=grid)
    assert [path.read_text() for path in made.iterdir()] == ["x"] * len(MANY)
    assert len(tuned.measurements) == len(MANY)
    assert tuned.default is not None


def spilling(warps, regs=255, spills=1, block=64, **more):
    return LaunchConfig(triton.Config({"BLOCK": block}, num_warps=warps, **more)), regs, spills


@pytest.mark.parametrize(
    ("ran", "block", "warps", "left_out"),
    [
        (spilling(4), 64, 2, True),
        (spilling(4), 64, 1, True),
        (spilling(4, num_stages=4), 64, 2, True),
        (spilling(4), 64, 4, False),  # it may have another number of stages, and spills as much
        (spilling(4), 64, 8, False),
        (spilling(4), 128, 2, False),
        (spilling(4, spills=0), 64, 2, False),
        (spilling(16, regs=128), 64, 8, False),  # which have twice the registers per thread
        (spilling(4, maxnreg=255), 64, 2, False),
    ],
)
def test_fewer_warps_are_left_out_only_where_the_same_blocks_spill_with_all_registers(ran, block, warps, left_out):
    spills, (candidate, regs, spilled) = Spills(), ran
    spills.note(candidate, SimpleNamespace(n_regs=regs, n_spills=spilled))
    asked, _, _ = spilling(warps, block=block)
    assert (spills.reason_against(asked) is not None) == left_out


def test_the_longest_candidates_are_compiled_first():
    candidates = [spilling(*pair)[0] for pair in ((8, 1), (1, 1), (4, 1))]
    candidates += [spilling(8, block=256, num_stages=4)[0], spilling(8, block=256, num_stages=2)[0]]
    ordered = [(c.meta["BLOCK"], c.meta["num_warps"], c.meta["num_stages"]) for c in longest_first(candidates)]
    assert ordered == [(64, 1, 3), (256, 8, 4), (256, 8, 2), (64, 4, 3), (64, 8, 3)]


def test_processes_false_forks_nothing(gpu, compiled_here):
    autotune(MANY, key=["n"], processes=False)(scale)[grid](torch.ones(256), 256)
    assert compiled_here.count(False) == len(MANY)


def test_a_fork_that_dies_costs_nothing_but_time(gpu, compiled_here):
    me = os.getpid()

    def dies(config):
        if os.getpid() != me:
            os.kill(os.getpid(), signal.SIGKILL)
        return config

    with compile_ahead.compile_forks(dies, MANY) as compile_in_fork:
        assert [compile_in_fork(config) for config in MANY] == MANY


def test_a_process_of_a_distributed_program_is_not_forked(gpu, compiled_here, monkeypatch):
    running = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "torch.distributed", running)
    assert not compile_ahead.may_fork(len(MANY))
    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace(is_available=lambda: False))
    assert compile_ahead.may_fork(len(MANY))


def test_one_fork_finds_that_the_candidates_are_in_the_cache(gpu, compiled_here, monkeypatch, tmp_path):
    monkeypatch.setattr(compile_ahead, "COLD_S", 600.0)
    monkeypatch.setattr(ForkedWorker, "has_answered", lambda _worker, _within_s: True)
    made = tmp_path / "compiled"

    def compiles(_config):
        with made.open("a") as file:
            file.write(f"{os.getpid()}\n")

    with compile_ahead.compile_forks(compiles, MANY) as compile_in_fork:
        for config in MANY:
            compile_in_fork(config)
    pids = made.read_text().split()
    assert len(set(pids)) == 2  # the fork's and this process'
    assert len(pids) == 2 * len(MANY)  # each in the fork, and then loaded here


# ----------------------------------------------------------------------------------------------------------- isolation


def isolated(configs, **options):
    policy = tb.AutotunePolicy(isolate="always", candidate_timeout_s=15.0)
    return autotune(configs, key=["n"], policy=policy, worker_setup="fake_gpu:install_dangerous", **options)(scale)


def test_candidates_that_crash_hang_or_poison_the_device_are_lost_and_tuning_goes_on(gpu):
    kernel = isolated(warps(1, 2, 4, 8, 16))
    x = torch.ones(256)
    tuned = kernel.tune(x, 256, grid=grid)
    kinds = {m.config["v"]["num_warps"]: m.failure.kind for m in tuned.measurements if m.failure is not None}
    assert kinds == {1: "crash", 2: "timeout", 8: "crash"}
    assert tuned.config.meta["num_warps"] == 4
    assert gpu.launches == []  # nothing ran in this process
    assert torch.equal(x, torch.ones(256))


def test_arguments_that_share_memory_share_it_in_the_worker_too(gpu):
    kernel = isolated(warps(4, 16))
    base = torch.arange(512.0)
    kernel[grid](base[::2], 256)
    assert kernel.best_config.num_warps == 4
    assert len(gpu.launches) == 1


def test_hooks_cannot_be_isolated_and_the_error_says_so(gpu):
    kernel = isolated(warps(4, 16), pre_hook=lambda *_args, **_kwargs: None)
    with pytest.raises(tb.Unsupported, match=r"hooks.*isolate='auto'"):
        kernel[grid](torch.ones(256), 256)


def test_kernels_that_cannot_be_isolated_run_here_with_isolate_auto(gpu):
    policy = tb.AutotunePolicy(isolate="auto")
    kernel = autotune(warps(4, 16), key=["n"], policy=policy, pre_hook=lambda *_args, **_kwargs: None)(scale)
    kernel[grid](torch.ones(256), 256)
    assert kernel.best_config.num_warps == 4


def echo():
    return lambda request: request


def test_a_worker_answers_is_lost_and_starts_anew():
    with SpawnedWorker("test_triton_processes:echo", (), 60.0) as worker:
        assert worker.ask({"a": 1}) == {"a": 1}
        worker._process.kill()
        lost = worker.ask("gone")
        assert isinstance(lost, Reply)
        assert lost.failure.kind == "crash"
        assert "SIGKILL" in lost.failure.message
        assert worker.ask("again") == "again"
        assert worker.starts == 2


def test_leaving_a_worker_leaves_no_process():
    with SpawnedWorker("test_triton_processes:echo", (), 60.0) as worker:
        pid = worker._process.pid
    with pytest.raises(ProcessLookupError, match="No such process"):
        os.kill(pid, 0)
