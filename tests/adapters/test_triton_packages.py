"""Every autotuned kernel of released packages, taken over: run by `make compat` against the packages as they are.

No GPU is needed. Each package is imported twice, in processes of their own: on Triton's tuner, and on tunebook's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "triton.md").read_text()
ROWS = re.findall(r"^\| ([\w.-]+ [\w.]+) \| `(\w+)` \| (\d+) \|$", PAGE, re.MULTILINE)
PACKAGES = {module: int(calls) for _, module, calls in ROWS}  # the calls of a tuner in the source code
# Kernels that Triton does not make here either, and why.
NOT_MADE = {
    "fla.ops.delta_rule.parallel": "imports a function that the package does not have",
    "fla.ops.deltaformer.parallel": "imports a module of another package",
    "torchao.prototype.mx_formats.kernels": "some of its kernels are made where the GPU is of a later generation",
    "torchao.prototype.moe_training.kernels.float8_rowwise": "Triton 3.9 refuses an unknown name in a key",
    "torchao.prototype.moe_training.kernels.jagged_float8_scales": "the same, in a module that it imports",
    "torchao.prototype.moe_training.nvfp4_training.hadamard_amax_triton": "the same",
    "torchao.prototype.moe_training.nvfp4_training.hadamard_quantize_row_col_triton": "the same",
    "torchao.prototype.moe_training.nvfp4_training.quantize_2d_triton": "the same",
}

pytestmark = pytest.mark.timeout(900)
installed = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "triton", *PACKAGES)),
    reason="the packages are not installed; `make compat` runs these tests with them",
)
each_package = lambda test: installed(pytest.mark.parametrize("package", PACKAGES)(test))


def test_the_page_names_the_releases_that_are_tested():
    required = (TESTS / "compat_triton_requirements.txt").read_text()
    assert len(ROWS) >= 10
    assert [name for name, *_ in ROWS if f"\n{name.replace(' ', '==')}\n" not in required] == []


@cache
def described(package):
    """Return the kernels of a package on both tuners."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "CCE_AUTOTUNE": "1", "TRITON_INTERPRET": "0"}

    def describe(tuner):
        command = [sys.executable, str(TESTS / "triton_packages.py"), package, tuner]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    with ThreadPoolExecutor(2) as threads:
        return tuple(threads.map(describe, ("triton", "tunebook")))


def by_place(kernels):
    return [(Path(kernel["path"]).name, kernel["line"], kernel["name"]) for kernel in kernels]


def differences(package, part):
    """Return the kernels whose part differs between the tuners, with both parts."""
    theirs, ours = (side["kernels"] for side in described(package))
    assert len(theirs) > 0
    return {
        kernel["name"]: (kernel[part], other[part])
        for kernel, other in zip(theirs, ours, strict=True)
        if kernel[part] != other[part]
    }


@each_package
def test_a_package_imports_as_with_triton(package):
    theirs, ours = described(package)
    assert ours["failed"] == theirs["failed"]
    assert set(theirs["failed"]) <= set(NOT_MADE)
    assert by_place(ours["kernels"]) == by_place(theirs["kernels"])


@each_package
def test_every_kernel_that_the_source_code_decorates_is_there(package):
    theirs, _ = described(package)
    made = [(kernel["path"], kernel["line"]) for kernel in theirs["kernels"]]
    decorated = {(module["path"], line): name for name, module in theirs["modules"].items() for line in module["lines"]}
    others = sum(module["other calls"] for module in theirs["modules"].values())
    assert len(decorated) + others == PACKAGES[package]
    assert {name for place, name in decorated.items() if place not in made} <= set(NOT_MADE)
    assert sum(place not in decorated for place in made) >= others  # such a call may wrap a function twice


@each_package
def test_every_kernel_is_taken_over(package):
    _, ours = described(package)
    assert ours["left"] == []
    assert ours["taken"] == len(ours["kernels"]) > 0


@each_package
def test_kernels_have_the_same_options(package):
    assert differences(package, "options") == {}


@each_package
def test_launches_have_the_same_keys(package):
    assert differences(package, "key") == {}


@each_package
def test_the_same_configurations_are_left_after_pruning(package):
    assert differences(package, "pruned") == {}


@installed
def test_pruners_are_compared_where_they_succeed():
    """A made-up argument that every pruner refuses would compare nothing."""
    pruning = [
        kernel
        for package in PACKAGES
        for kernel in described(package)[0]["kernels"]
        if any(kernel["options"]["prunes"][:2])
    ]
    compared = [k for k in pruning if any(isinstance(left, list) for left in k["pruned"].values())]
    assert len(compared) >= 0.8 * len(pruning) > 25


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "triton", "fla")), reason="fla is not installed"
)
def test_a_kernel_that_nobody_edited_is_tuned_while_its_program_runs(tmp_path):
    places = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": places, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(TESTS / "live_package.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["decided"]) == 1
    assert (found["first"], found["last"], found["waits"]) == (1, [4], 0)
    assert found["calls"] > 100
