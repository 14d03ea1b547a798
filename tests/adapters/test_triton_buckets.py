"""`bucket=` of `tunebook.adapters.triton.autotune`: sizes that share an entry, tuned at a representative size."""

# ruff: noqa: N803 - constexprs are written in capitals in Triton

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

import triton.language as tl  # noqa: E402 - after the check that it is there
from fake_gpu import FakeGpu, installed  # noqa: E402 - as above

import tunebook as tb  # noqa: E402 - as above
from tunebook._keys.buckets import Buckets  # noqa: E402 - as above
from tunebook.adapters._triton.buckets import tuned_at  # noqa: E402 - as above
from tunebook.adapters._triton.candidate import Launch  # noqa: E402 - as above
from tunebook.adapters._triton.engine import More, engine_of  # noqa: E402 - as above
from tunebook.adapters.triton import autotune  # noqa: E402 - as above

pytestmark = pytest.mark.usefixtures("compiled_once")


@triton.jit
def rows(x_ptr, out_ptr, M, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, at < M * N), at < M * N)


CONFIGS = [triton.Config({"BLOCK": size}, num_warps=4) for size in (64, 128, 256)]
COST = {64: 40e-6, 128: 10e-6, 256: 20e-6}


@pytest.fixture
def seen():
    """The sizes that kernels ran with: M, and the rows of x."""
    return []


@pytest.fixture
def gpu(seen):
    effect = lambda _facts, arguments: seen.append((arguments["M"], arguments["x_ptr"].shape[0]))
    with installed(FakeGpu(lambda facts: COST[facts["BLOCK"]], effect), rows) as fake:
        yield fake


def launch(kernel, m, n=16):
    x, out = torch.ones(m, n), torch.zeros(m, n)
    grid = lambda meta: (triton.cdiv(m * n, meta["BLOCK"]),)
    kernel[grid](x, out, m, n)


def bucketed(**options):
    return autotune(CONFIGS, key=["M", "N"], **{"bucket": {"M": tb.pow2}, **options})(rows)


def blocks_of(gpu):
    return sorted({facts["BLOCK"] for facts in gpu.launches})


def test_launches_of_one_bucket_share_a_tuning_in_this_process_and_the_next(gpu):
    kernel = bucketed()
    launch(kernel, 100)
    assert blocks_of(gpu) == [64, 128, 256]
    for again in (kernel, bucketed()):
        for m in (101, 128, 65, 100):
            gpu.launches.clear()
            launch(again, m)
            assert blocks_of(gpu) == [128]
    launch(kernel, 129)
    assert blocks_of(gpu) == [64, 128, 256]


def test_a_bucket_is_tuned_at_its_representative_and_launched_at_the_callers_size(gpu, seen):
    launch(bucketed(), 100)
    assert set(seen[:-1]) == {(128, 128)}
    assert seen[-1] == (100, 100)
    assert {facts["grid"] for facts in gpu.launches[:-1] if facts["BLOCK"] == 128} == {(16, 1, 1)}


def test_the_record_says_at_which_size_a_bucket_was_measured(gpu):
    kernel = bucketed()
    x, out = torch.ones(100, 16), torch.zeros(100, 16)
    for grid, at in ((lambda meta: (100 * 16 // meta["BLOCK"],), "M=100"), (lambda meta: (meta["M"],), "M=128")):
        tuned = kernel.tune(x, out, 100, 16, grid=grid)
        assert tuned.measurements[-1].policy.endswith(f"/at:{at}")
        assert at in str(kernel.explain(x, out, 100, 16, grid=grid))


def test_a_bucket_that_stands_for_itself_runs_on_the_callers_tensors(gpu, seen):
    launch(bucketed(), 128)
    assert set(seen) == {(128, 128)}


def test_without_a_representative_the_first_launch_is_measured(gpu, seen):
    launch(bucketed(representative=False), 100)
    assert set(seen) == {(100, 100)}


def test_other_arguments_of_the_key_still_count(gpu):
    kernel = bucketed()
    launch(kernel, 100, 16)
    gpu.launches.clear()
    launch(kernel, 100, 32)
    assert blocks_of(gpu) == [64, 128, 256]


def test_pruning_sees_the_representative_so_that_a_bucket_has_one_list(gpu):
    asked = []

    def early(configs, named, **_keywords):
        asked.append(named["M"])
        return configs

    launch(bucketed(prune_configs_by={"early_config_prune": early}), 100)
    assert set(asked) == {128}


@pytest.mark.parametrize(
    ("bucket", "match"),
    [
        ({"K": tb.pow2}, "'K'.*'M', 'N'"),
        ({"M": {0: tb.pow2}}, "the key of a Triton kernel holds numbers"),
        ({"M": "pow2"}, "pow2"),
    ],
)
def test_a_wrong_bucket_is_an_error_where_the_kernel_is_defined(bucket, match):
    with pytest.raises(tb.DefinitionError, match=match):
        bucketed(bucket=bucket)


def test_buckets_for_many_kernels_may_name_arguments_that_one_does_not_have(gpu):
    theirs = triton.autotune(CONFIGS, key=["M", "N"])(rows)
    engine = engine_of(theirs, More(bucket={"M": tb.pow2, "T": tb.pow2}))
    for m in (100, 101):
        gpu.launches.clear()
        engine.run(torch.ones(m, 16), torch.zeros(m, 16), m, 16, grid=lambda meta: (meta["M"],))
    assert blocks_of(gpu) == [128]


def test_values_that_are_not_numbers_are_in_no_bucket(gpu):
    kernel = autotune(CONFIGS[:2], key=["M"], bucket={"M": [16, 64]})(rows)
    for m in (True, 1):
        gpu.launches.clear()
        kernel[(1,)](torch.ones(8, 8), torch.ones(8, 8), m, 8)
        assert blocks_of(gpu) == [64, 128]


# ------------------------------------------------------------------------------------------ the launch of another size

NAMES = ("x", "y", "M", "K", "s")


def resized(x, y, m=100, k=16, s=0, grid=None, free=1e9, bucket=tb.pow2):
    given = grid or (lambda meta: (meta["M"],))
    grid_of = lambda each: tuple(each.grid(each.positional(NAMES)) if callable(each.grid) else each.grid)
    return tuned_at(Launch(given, (x, y, m, k, s), {}), NAMES, Buckets({"M": bucket}), grid_of, free)


@pytest.mark.parametrize(
    ("x", "y", "shapes", "strides"),
    [
        (torch.ones(100, 16), torch.ones(16, 3), ((128, 16), (16, 3)), ((16, 1), (3, 1))),
        (torch.ones(100), torch.ones(7), ((128,), (7,)), ((1,), (1,))),
        (torch.ones(10, 10), torch.ones(100), ((128,), (128,)), ((1,), (1,))),  # M is the number of elements
        (torch.ones(16, 100).T, torch.ones(1), ((128, 16), (1,)), ((1, 128), (1,))),
        (torch.ones(100, 32)[:, :16], torch.ones(1), ((128, 16), (1,)), ((32, 1), (1,))),
        (torch.ones(2, 100, 16), torch.ones(100), ((2, 128, 16), (128,)), ((2048, 16, 1), (1,))),
    ],
)
def test_dimensions_that_equal_the_argument_grow_with_it(x, y, shapes, strides):
    found = resized(x, y)
    assert found.reason == ""
    made = found.launch.args[:2]
    assert (tuple(made[0].shape), tuple(made[1].shape)) == shapes
    assert (made[0].stride(), made[1].stride()) == strides
    assert found.launch.args[2] == 128


def test_strides_among_the_arguments_grow_too():
    found = resized(torch.ones(2, 100, 16), torch.ones(1), s=1600)
    assert found.launch.args[4] == 2048


def test_contents_are_repeated_and_the_callers_tensors_are_left_alone():
    x = torch.arange(100)
    made = resized(x, torch.zeros(1)).launch.args[0]
    assert made.tolist() == [*range(100), *range(28)]
    made.zero_()
    assert x.tolist() == list(range(100))


def test_a_tensor_whose_size_follows_in_another_way_has_room_for_it():
    made = resized(torch.ones(100), torch.ones(4)).launch.args[1]  # one number per block of 32, perhaps
    assert made.untyped_storage().nbytes() >= 2 * 4 * made.element_size()


def test_a_tensor_that_is_passed_twice_is_made_once():
    x = torch.ones(100)
    made = resized(x, x).launch.args
    assert made[0] is made[1]


def test_a_grid_sees_the_new_size_in_the_variables_it_closes_over():
    m, x = 100, torch.ones(100)
    found = resized(x, torch.ones(1), grid=lambda _meta: (m, x.shape[0]))
    assert found.launch.grid({}) == (128, 128)


def test_a_grid_that_rounds_both_sizes_to_the_same_blocks_follows_all_the_same():
    found = resized(torch.ones(100), torch.ones(1), grid=lambda meta: (triton.cdiv(meta["M"], 128),))
    assert found.reason == ""


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"k": 100}, "K has the same value"),
        ({"x": torch.ones(5)}, "no tensor follows it"),
        ({"grid": (4,)}, "the grid does not follow it"),
        ({"free": 1000}, "memory"),
        ({"x": torch.ones(4, 120, 16)[:, :100]}, "not contiguous"),
        ({"y": object()}, "y is an object"),
        ({"m": 1, "x": torch.ones(1), "bucket": lambda _size: 16}, "1 or less"),
    ],
)
def test_an_ambiguous_launch_is_tuned_at_the_callers_size(options, reason):
    found = resized(**{"x": torch.ones(100, 16), "y": torch.ones(1), **options})
    assert reason in found.reason
    assert found.launch.args[2] == options.get("m", 100)


# ------------------------------------------------------------------------------------------------ on a real computation

INTERPRETED = """
import torch, triton, triton.language as tl
import tunebook as tb
from tunebook.adapters.triton import autotune

# A wrong candidate leaves out the last column, and is faster by that: only the check can reject it.
configs = [triton.Config({"BLOCK": 16, "SKIP": skip}) for skip in (0, 1, 2)]

@autotune(configs, key=["M", "N"], bucket={"M": tb.pow2}, reference=lambda x, out, M, N, stride: {"out": 2 * x})
@triton.jit
def double(x, out, M, N, stride, BLOCK: tl.constexpr, SKIP: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < N - SKIP
    row = tl.program_id(0) * stride
    tl.store(out + row + at, tl.load(x + row + at, inside) * 2, inside)

def launch(m):
    x, out = torch.rand(m, 16), torch.zeros(m, 16)
    double[lambda meta: (m,)](x, out, m, 16, x.stride(0))
    assert torch.equal(out, 2 * x)

launch(5)
for m in (6, 7, 8):
    assert double.config_for(torch.rand(m, 16), torch.zeros(m, 16), m, 16, 16) is configs[0], m
    launch(m)
text = str(double.explain(torch.rand(5, 16), torch.zeros(5, 16), 5, 16, 16))
failed = text.partition("  failed ")[2]  # in one line, or each with its own numbers
assert "/at:M=8" in text and "wrong-result" in failed, text
assert [n for n in (0, 1, 2) if f"SKIP={n}," in failed] == [1, 2], text
"""


def test_a_real_kernel_is_tuned_at_the_representative_and_checked_there(tmp_path):
    script = tmp_path / "interpreted.py"
    script.write_text(INTERPRETED)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(tb.__file__).parents[1])}
    said = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
