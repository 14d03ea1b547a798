"""A GPU that does not exist, in real time: its launches queue up and take their time beside the host, as real ones do.

What the host does is real: Triton's launch path, forks that compile for sm_90, loading, events, choosing. Only the
times of kernels are made up, by their names and configurations. `bench/no_stall.py --dry-run` runs on it.
"""

from __future__ import annotations

import sys
import time
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import triton_packages
from triton.runtime import driver

LAUNCH_S = 2e-6  # of any kernel, on the device


class PretendEvent:
    def __init__(self, gpu):
        self._gpu, self.at_s = gpu, 0.0

    def record(self, stream=None):
        self.at_s = max(time.perf_counter(), self._gpu.free_s)

    def query(self):
        return time.perf_counter() >= self.at_s

    def elapsed_time(self, end):
        return (end.at_s - self.at_s) * 1e3


class PretendGpu(triton_packages.MadeUpH200):
    """Runs launches one after the other; `cost(name, constants, warps, grid)` returns the seconds of one."""

    def __init__(self, cost):
        super().__init__(cost, names=(triton_packages.H200.name,))
        self.free_s = 0.0

    def Event(self, enable_timing=True):  # noqa: N802 - torch's name
        return PretendEvent(self)

    def synchronize(self):
        while time.perf_counter() < self.free_s:
            time.sleep(0)  # other threads of the process run meanwhile, as beside CUDA's wait

    def _launcher(self, src, metadata):
        names, name, known = src.fn.arg_names, src.fn.__name__, {}
        constants = {names[path[0]]: value for path, value in src.constants.items() if len(path) == 1}

        def launch(x, y, z, *_):
            seconds = known.get((x, y, z))
            if seconds is None:
                seconds = known[x, y, z] = LAUNCH_S + self.cost(name, constants, metadata, (x, y, z))
            self.free_s = max(time.perf_counter(), self.free_s) + seconds

        return launch


def made_up_s(name, constants, metadata, grid):
    """Return the seconds of a kernel: each has a scale of its own, and configurations differ by up to 1.6 times."""
    config = repr((name, sorted(constants.items(), key=str), metadata.num_warps, metadata.num_stages))
    luck = zlib.crc32(config.encode()) / 2**32
    if name == "normalise":
        return 7e-9 * grid[0] * (1 + 0.3 * luck)  # 3 to 70 us for the rows of the server
    return (40e-6 + 80e-6 * (zlib.crc32(name.encode()) / 2**32)) * (1 + 0.6 * luck)


def install(patches):
    """Let torch and Triton have this GPU until `patches` is closed; return a function that waits for it."""
    triton_packages.pretend_gpu(patches)
    gpu = PretendGpu(made_up_s)
    before = driver.active
    driver.set_active(gpu)
    patches.callback(driver.set_active, before)
    return gpu.synchronize
