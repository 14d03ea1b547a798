"""Let Triton write its autotune cache without a GPU: all of it is Triton's, but the driver and the times."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Driver:
    """Answers in place of a GPU."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


CONFIGS = [triton.Config({"BLOCK": 128}, num_warps=8), triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 512})]


@triton.autotune(CONFIGS, key=["n"], do_bench=lambda *_: [1.0] * 3, cache_results=True)
@triton.jit
def scale(x, n, BLOCK: tl.constexpr):  # noqa: N803 - as constants of Triton kernels are named
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


def measure():
    scale.configs_timings = dict(zip(CONFIGS, ([0.5, 0.4, 0.6], [0.25, 0.2, 0.3], [float("inf")] * 3), strict=True))


if __name__ == "__main__":
    driver.set_active(Driver())
    scale.check_disk_cache((256, "torch.float32"), CONFIGS, measure)
