"""`reference=`, `check=` and `tolerance=` of `tunebook.adapters.triton.autotune`."""

# ruff: noqa: N803 - constexprs are written in capitals in Triton

from __future__ import annotations

import re

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

import triton.language as tl  # noqa: E402 - after the check that it is there
from fake_gpu import FakeGpu, installed  # noqa: E402 - as above

import tunebook as tb  # noqa: E402 - as above
from tunebook.adapters.triton import autotune  # noqa: E402 - as above

pytestmark = pytest.mark.usefixtures("compiled_once")


@triton.jit
def double(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, at < n) * 2, at < n)


CONFIGS = [triton.Config({"BLOCK": size}, num_warps=4) for size in (64, 128, 256)]
COST = {64: 40e-6, 128: 20e-6, 256: 10e-6}  # the wrong one is the fastest
WRONG = 256


def doubles(facts, arguments):
    factor = 2.5 if facts["BLOCK"] == WRONG else 2.0
    arguments["out_ptr"].copy_(arguments["x_ptr"] * factor)


@pytest.fixture
def gpu():
    with installed(FakeGpu(lambda facts: COST[facts["BLOCK"]], doubles), double) as fake:
        yield fake


def grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def arguments(n=1024):
    return torch.arange(float(n)), torch.zeros(n), n


def tuned(**options):
    kernel = autotune(CONFIGS, key=["n"], **options)(double)
    x, out, n = arguments()
    kernel[grid](x, out, n)
    return kernel, out


def by_name(x_ptr, out_ptr, n):
    return {"out_ptr": 2 * x_ptr}


@pytest.mark.parametrize(
    "options",
    [
        {"check": True},
        {"reference": "first"},
        {"reference": CONFIGS[1]},
        {"reference": lambda x_ptr, out_ptr, n: 2 * x_ptr},
        {"reference": lambda x_ptr, out_ptr, n: (2 * x_ptr,)},
        {"reference": by_name},
        {"tolerance": 1e-3},
        {"check": "exact"},
        {"check": lambda output, expected: torch.equal(output["out_ptr"], expected["out_ptr"])},
        {"check": True, "reset_to_zero": ["out_ptr"]},
        {"check": True, "restore_value": ["out_ptr"]},
    ],
)
def test_a_candidate_with_a_wrong_result_never_wins(gpu, options):
    kernel, out = tuned(**options)
    assert kernel.best_config.kwargs == {"BLOCK": 128}
    assert torch.equal(out, 2 * torch.arange(1024.0))
    assert "wrong-result" in str(kernel.explain(*arguments(), grid=grid))


@pytest.mark.parametrize("options", [{}, {"check": False}, {"tolerance": 0.5}])
def test_without_a_check_or_within_the_tolerance_the_fastest_wins(gpu, options):
    assert tuned(**options)[0].best_config.kwargs == {"BLOCK": WRONG}


def test_a_wrong_candidate_that_writes_to_its_input_does_not_harm_the_others(gpu):
    def scribbles(facts, given):
        doubles(facts, given)
        if facts["BLOCK"] == WRONG:
            given["x_ptr"].zero_()

    gpu.effect = scribbles
    kernel, out = tuned(check=True)
    assert kernel.best_config.kwargs == {"BLOCK": 128}
    assert torch.equal(out, 2 * torch.arange(1024.0))


@pytest.mark.parametrize("reference", ["first", by_name])
def test_a_candidate_that_leaves_out_a_part_is_not_saved_by_the_one_before_it(gpu, reference):
    def leaves_out(facts, given):
        part = slice(0, -1 if facts["BLOCK"] == WRONG else None)
        given["out_ptr"][part] = 2 * given["x_ptr"][part]

    gpu.effect = leaves_out
    assert tuned(reference=reference)[0].best_config.kwargs == {"BLOCK": 128}


def test_outputs_that_are_already_right_are_checked_all_the_same(gpu):
    kernel = autotune(CONFIGS, key=["n"], check=True)(double)
    x, _, n = arguments()
    kernel[grid](x, 2 * x, n)
    assert kernel.best_config.kwargs == {"BLOCK": 128}


def test_if_the_first_configuration_fails_the_next_is_the_reference(gpu):
    gpu.cost = lambda facts: RuntimeError("no") if facts["BLOCK"] == 64 else COST[facts["BLOCK"]]
    assert tuned(reference="first")[0].best_config.kwargs == {"BLOCK": 128}


def fails(*_args):
    raise ValueError("no such reference")


@pytest.mark.parametrize(
    ("reference", "match"),
    [
        (fails, "no such reference"),
        (triton.Config({"BLOCK": 100}), "reference failed"),
        (lambda *_args: {"y_ptr": 0}, "y_ptr.*not a tensor of this launch"),
        (lambda x_ptr, *_args: (x_ptr, x_ptr), r"returned 2 outputs.*wrote out_ptr"),
    ],
)
def test_a_reference_that_fails_is_the_reason_why_nothing_is_tuned(gpu, reference, match):
    with pytest.raises(tb.NoConfig) as caught:
        tuned(reference=reference)
    causes = caught.value.__cause__
    assert re.search(match, "\n".join([str(causes), *map(str, causes.exceptions)]))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"reference": "second"}, "'first', a triton.Config, or a function"),
        ({"reference": "first", "check": False}, "reference= is for checks"),
        ({"check": "exakt"}, "exakt"),
        ({"check": "exact", "tolerance": 0.1}, "tolerance"),
    ],
)
def test_a_wrong_option_is_an_error_where_the_kernel_is_defined(options, match):
    with pytest.raises(tb.DefinitionError, match=match):
        autotune(CONFIGS, key=["n"], **options)(double)


def test_a_changed_check_tries_rejected_candidates_again(gpu):
    tuned(check=True)
    kernel = autotune(CONFIGS, key=["n"], tolerance=0.5)(double)
    kernel.tune(*arguments(), grid=grid)
    kernel[grid](*arguments())
    assert kernel.best_config.kwargs == {"BLOCK": WRONG}


def test_a_check_and_isolation_together_are_refused_with_the_reason(gpu):
    policy = tb.AutotunePolicy(isolate="always")
    with pytest.raises(tb.Unsupported, match="its outputs are checked"):
        tuned(check=True, policy=policy)
    assert tuned(check=True, policy=tb.AutotunePolicy(isolate="auto"))[0].best_config.kwargs == {"BLOCK": 128}


def test_without_memory_only_declared_tensors_are_checked_and_a_warning_says_so(gpu, monkeypatch):
    monkeypatch.setattr(gpu, "mem_get_info", lambda: (0, 1 << 40))
    with pytest.warns(UserWarning, match="Only the tensors in reset_to_zero and restore_value are checked: out_ptr"):
        kernel, _ = tuned(check=True, restore_value=["out_ptr"])
    assert kernel.best_config.kwargs == {"BLOCK": 128}
