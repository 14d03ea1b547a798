"""Every example is in the gallery, and runs as the gallery says."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
from doc_pages import ROOT, commands, run

GALLERY = ROOT / "docs" / "gallery.md"
NEEDED = {
    "cupy_saxpy": "cupy", "jax_pallas": "jax", "jax_transformer": "jax", "numba_stencil": "numba",
    "opencl_matmul": "pyopencl", "torch_attention": "torch", "triton_softmax": "triton",
}  # fmt: skip
QUICK = {"triton_softmax", "implementations"}  # smaller sizes of the others: test_examples.py, tests/adapters
NAMES = [Path(line.split()[1]).stem for line in commands(GALLERY)]


def test_every_example_is_in_the_gallery():
    files = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"demo", "showing"}
    assert set(NAMES) == files
    assert set(re.findall(r"^\| `(\w+)\.py` \|", GALLERY.read_text(), re.MULTILINE)) == files


@pytest.mark.timeout(600)  # a busy machine takes five times as long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NAMES]
)
def test_an_example_runs_by_itself(name, tmp_path):
    package = NEEDED.get(name, "numpy")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if name == "cupy_saxpy" and not Path("/proc/driver/nvidia/version").exists():
        pytest.skip("there is no NVIDIA GPU")
    done = run(f"python examples/{name}.py", ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 5


def test_the_demo_installs_only_the_packages_that_it_runs(tmp_path):
    command = ["make", "--dry-run", "--always-make", f"DEMO={tmp_path}/new", "demo"]
    plan = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"--editable '(\S+)'", plan) == [".[numpy,rich]"]
    assert "requirement" not in plan
