"""Add a multiple of one array to another in CUDA C++, through CuPy. Needs an NVIDIA GPU."""

from __future__ import annotations

import cupy
import numpy as np
import showing

import tunebook as tb
from tunebook.adapters.cupy import CudaModule

module = CudaModule(
    """
    template <int ITEMS> __global__ void saxpy(float a, const float *x, float *y, int n) {
        const int first = (blockIdx.x * blockDim.x + threadIdx.x) * ITEMS;
        for (int i = first; i < min(first + ITEMS, n); i++) y[i] += a * x[i];
    }
    """,
    templates={"saxpy": "saxpy<{ITEMS}>"},
)
space = tb.Space(ITEMS=[1, 2, 4, 8], BLOCK=[64, 128, 256, 512])
default = tb.Config(ITEMS=1, BLOCK=256)


@tb.tunable(space=space, heuristic=default, compile=module.compile, ignore=("a",), mutates=("y",))
def saxpy(a, x, y, *, config):
    """Add `a` times `x` to `y`."""
    blocks = -(-x.size // (config.ITEMS * config.BLOCK))
    module(config).saxpy((blocks,), (config.BLOCK,), (np.float32(a), x, y, np.int32(x.size)))


def operands(size):
    """Return a factor and two arrays."""
    return 2.0, cupy.ones(size, "float32"), cupy.ones(size, "float32")


SIZES = (10_000, 1_000_000, 100_000_000)


def main(sizes=SIZES):
    """Tune every size."""
    showing.tune_and_show(saxpy, {f"{size:,}": operands(size) for size in sizes}, default)


if __name__ == "__main__":
    main()
