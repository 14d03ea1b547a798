"""Gives a process that imports it a GPU that does not exist, on which fewer warps are faster."""

from __future__ import annotations

from fake_gpu import FakeGpu
from triton.runtime import driver

driver.set_active(FakeGpu(lambda facts: facts["num_warps"] * 1e-5, names=("Fake GPU",)))
