"""The resources of programs, by the first stages of their compilation: too much memory, or too many registers."""

# ruff: noqa: N803 - constexprs are written in capitals in Triton

from __future__ import annotations

import os

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

import triton.language as tl  # noqa: E402 - after the check that it is there
from fake_gpu import FakeGpu, installed  # noqa: E402 - as above
from triton.backends.nvidia.compiler import CUDABackend  # noqa: E402 - as above

from tunebook._base.errors import LeftOut  # noqa: E402 - as above
from tunebook._base.vocabulary import Failure  # noqa: E402 - as above
from tunebook.adapters._triton.resources import (  # noqa: E402 - as above
    Resources,
    TooLarge,
    checked_compilation,
    refusal_in,
    resources_of,
)
from tunebook.adapters.triton import autotune  # noqa: E402 - as above

LIMIT = 232448  # the shared memory of a block on an H200


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, n, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    at_m, at_n, at_k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    a = a_ptr + at_m[:, None] * n + at_k[None, :]
    b = b_ptr + at_k[:, None] * n + at_n[None, :]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(tl.cdiv(n, BK)):
        total = tl.dot(tl.load(a), tl.load(b), total)
        a += BK
        b += BK * n
    tl.store(c_ptr + at_m[:, None] * n + at_n[None, :], total.to(tl.float16))


def config(bm, bn, bk, warps, stages):
    return triton.Config({"BM": bm, "BN": bn, "BK": bk}, num_warps=warps, num_stages=stages)


SMALL = config(32, 32, 32, 4, 2)
FITS = config(64, 32, 32, 4, 2)
SPILLS = config(128, 256, 32, 4, 2)  # 256 accumulators per thread
LARGE = config(64, 256, 128, 4, 3)


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # without it, Triton 3.9 warns that the default will change
    monkeypatch.setattr(os, "cpu_count", lambda: 4)  # so that forks compile
    with installed(FakeGpu(lambda facts: facts["BM"] * 1e-6), matmul) as fake:
        yield fake


def compile_one(chosen):
    tensor = torch.ones(256, 256, dtype=torch.float16)
    return matmul.warmup(tensor, tensor, tensor, 256, grid=(1,), **chosen.all_kwargs())


# ------------------------------------------------------------------------------------------------- reading a program


@pytest.mark.parametrize("chosen", [SMALL, FITS, config(16, 64, 64, 2, 4), config(64, 64, 64, 4, 3)])
def test_the_shared_memory_of_a_program_is_never_less_than_its_first_stages_say(gpu, chosen):
    program = compile_one(chosen)
    found = resources_of(program.asm["ttgir"])
    assert 0 < found.shared_bytes <= program.metadata.shared
    tile = chosen.kwargs["BM"] * chosen.kwargs["BN"] * 4
    assert found.carried_bytes == tile // (32 * chosen.num_warps)


ATTRIBUTES = '"ttg.num-ctas" = 1 : i32, "ttg.num-warps" = 4 : i32, "ttg.threads-per-warp" = 32 : i32'
ALLOCATED = "    %{0} = ttg.local_alloc : () -> !ttg.memdesc<2x64x64xf16, #shared, #smem, mutable> loc(#l)"
FREED = "    ttg.local_dealloc %{0} : !ttg.memdesc<2x64x64xf16, #shared, #smem, mutable> loc(#l)"
LOOP = "    %r:2 = scf.for %i = %c0 to %n step %c1 iter_args(%x = %a, %y = %b) -> ({})  : i32 {{"


@pytest.mark.parametrize(
    ("lines", "shared", "carried"),
    [
        ([ALLOCATED.format("x"), ALLOCATED.format("y"), FREED.format("y"), FREED.format("x")], 32768, 0),
        ([ALLOCATED.format("x"), FREED.format("x"), ALLOCATED.format("y"), FREED.format("y")], 16384, 0),
        ([ALLOCATED.format("x")], 0, 0),  # how long it exists is not known
        ([LOOP.format("tensor<64x128xf32, #mma>, i32")], 0, 256),
        ([LOOP.format("tensor<64x64xf32, #mma>, tensor<64x64xbf16, #mma>")], 0, 192),
        ([LOOP.format("tensor<64x64x!tt.ptr<f16>, #b>, tensor<64x64xi64, #b>")], 0, 0),
        ([LOOP.format("tensor<64x128xf32, #mma>, i32"), "ttg.warp_specialize()"], 0, 0),
    ],
)
def test_buffers_count_while_they_exist_and_floats_that_a_loop_carries(lines, shared, carried):
    program = "\n".join([f"module attributes {{{ATTRIBUTES}}} {{", *lines])
    assert resources_of(program) == Resources(shared, carried)


@pytest.mark.parametrize(("shared", "carried"), [(LIMIT, 1020), (0, 0)])
def test_a_program_that_fits_exactly_is_compiled(shared, carried):
    Resources(shared, carried).check(LIMIT)


def test_a_refusal_says_how_much_is_needed_and_how_much_there_is():
    with pytest.raises(TooLarge, match="not compiled: it needs 232449 bytes of shared memory, the device has 232448"):
        Resources(LIMIT + 1, 0).check(LIMIT)
    with pytest.raises(LeftOut, match="not compiled: a loop carries 1024 bytes per thread, registers hold 1020"):
        Resources(0, 1024).check(LIMIT)


def test_a_refusal_in_another_process_is_told_apart_from_other_failures():
    assert isinstance(refusal_in(Failure("compile", "TooLarge: it needs much")), TooLarge)
    assert str(refusal_in(Failure("compile", "LeftOut: it would spill: much"))) == "it would spill: much"
    assert refusal_in(Failure("compile", "CompileError: no")) is None
    assert refusal_in(None) is None


# -------------------------------------------------------------------------------------------------------- compilation


def test_a_checked_compilation_ends_after_the_first_stages(gpu, monkeypatch):
    monkeypatch.setattr(CUDABackend, "make_llir", lambda *_: pytest.fail("it went on"))
    with checked_compilation(LIMIT, whole=False):
        compile_one(SMALL)
    with pytest.raises(TooLarge), checked_compilation(LIMIT, whole=True):
        compile_one(LARGE)
    with pytest.raises(LeftOut), checked_compilation(LIMIT, whole=True):
        compile_one(SPILLS)


def test_a_checked_compilation_leaves_the_compiler_as_it_was(gpu):
    before = CUDABackend.add_stages
    with pytest.raises(TooLarge), checked_compilation(1, whole=True):
        compile_one(SMALL)
    assert CUDABackend.add_stages is before
    with checked_compilation(LIMIT, whole=True):
        assert compile_one(SMALL).asm["cubin"]


def arguments():
    tensor = torch.ones(256, 256, dtype=torch.float16)
    return tensor, tensor, tensor, 256


def tune(configs, **options):
    return autotune(configs, key=["n"], **options)(matmul).tune(*arguments(), grid=(1,))


def test_candidates_that_fail_or_spill_are_not_compiled_to_the_end(gpu, tmp_path):
    tuned = tune([SMALL, FITS, SPILLS, LARGE])
    assert [each.config for each, _ in tuned.ranking] == [SMALL, FITS]
    assert {tuned.configs[name].config: reason[:20] for name, reason in tuned.left_out.items()} == {
        SPILLS: "not compiled: a loop"
    }
    failed = {tuned.configs[m.fingerprint].config: m.failure for m in tuned.measurements if m.failure is not None}
    assert failed[LARGE].message.startswith("TooLarge: not compiled: it needs 245760 bytes of shared memory")
    assert len(list(tmp_path.rglob("*.cubin"))) == 2


def test_explain_says_why_candidates_were_not_compiled(gpu):
    kernel = autotune([SMALL, FITS, SPILLS, LARGE], key=["n"])(matmul)
    kernel[(1,)](*arguments())
    said = str(kernel.explain(*arguments(), grid=(1,)))
    assert "BK=32, BM=128, BN=256" in said
    assert "not compiled: a loop carries 1024 bytes per thread" in said
    assert "not compiled: it needs 245760 bytes of shared memory" in said


def test_candidates_are_measured_although_they_spill_if_no_other_runs(gpu):
    tuned = tune([SPILLS, config(128, 256, 64, 4, 2), LARGE, config(64, 256, 128, 4, 4)])
    assert tuned.config.config is SPILLS
    assert tuned.left_out == {}


def test_the_heuristic_and_a_thorough_tuning_are_not_refused(gpu):
    assert tune([SMALL, FITS, SPILLS, config(64, 64, 32, 4, 2)], heuristic=SPILLS).left_out == {}
    assert tune([SMALL, FITS, SPILLS, config(64, 64, 32, 4, 2)], thorough=True).left_out == {}


def test_the_limit_is_that_of_the_device(gpu, monkeypatch):
    monkeypatch.setattr(gpu, "get_device_properties", lambda _device: {"max_shared_mem": 4096})
    tuned = tune([SMALL, FITS, config(16, 32, 32, 4, 2), config(16, 16, 16, 4, 2)])
    assert any(m.failure is not None and "the device has 4096" in m.failure.message for m in tuned.measurements)
