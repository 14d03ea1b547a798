"""Triton kernels find the packs that were shipped with their code: decorated by us, or taken over."""

from __future__ import annotations

import importlib
import sys

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

from fake_gpu import FakeGpu, installed  # noqa: E402 - after the check that they are there
from triton.runtime.autotuner import autotune  # noqa: E402 - as above

from tunebook.adapters.triton import autotune as our_autotune  # noqa: E402 - as above
from tunebook.adapters.triton import install, uninstall  # noqa: E402 - as above
from tunebook.stores import open_store, write_pack  # noqa: E402 - as above

pytestmark = pytest.mark.usefixtures("compiled_once")

LIBRARY = """
import triton
import triton.language as tl


@triton.jit
def double(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, at < n) * 2, at < n)
"""
COST = {64: 40e-6, 128: 20e-6, 256: 30e-6}
CONFIGS = [triton.Config({"BLOCK": block}, num_warps=4) for block in COST]


@pytest.fixture
def double(tmp_path, monkeypatch):
    """Return the kernel of a library `shipped_triton.ops.double`."""
    monkeypatch.syspath_prepend(tmp_path)
    for folder in ("shipped_triton", "shipped_triton/ops"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "shipped_triton" / "ops" / "double.py").write_text(LIBRARY)
    yield importlib.import_module("shipped_triton.ops.double").double
    uninstall()
    for name in [name for name in sys.modules if name.startswith("shipped_triton")]:
        del sys.modules[name]


def ours(store):
    return our_autotune(CONFIGS, key=["n"], store=store)


def taken_over(store):
    uninstall()
    install(store=store)
    return autotune(CONFIGS, key=["n"])


@pytest.mark.parametrize("decorator", [ours, taken_over])
@pytest.mark.parametrize("folder", ["shipped_triton", "shipped_triton/ops"])
def test_the_pack_beside_the_code_answers(double, tmp_path, decorator, folder):
    def launch(store):
        kernel = decorator(store)(double)
        kernel[lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)](torch.ones(1024), 1024)
        ran = [facts["BLOCK"] for facts in gpu.launches]
        gpu.launches.clear()
        return ran

    with installed(FakeGpu(lambda facts: COST[facts["BLOCK"]]), double) as gpu:
        assert set(launch(tmp_path / "author's book")) == {64, 128, 256}
        records = list(open_store(tmp_path / "author's book").items())
        assert write_pack(tmp_path / folder / "__tunebook__" / "h200.db", records) == 1
        assert launch(None) == [128]
