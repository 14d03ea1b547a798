"""Matrix multiplication in C. The best tile differs from shape to shape: run this file to see by how much."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import showing

import tunebook as tb
from tunebook.adapters.native import CLibrary, pointer

library = CLibrary(Path(__file__).with_name("matmul.c"))
space = tb.Space(ROWS=[1, 2, 4, 8], VECTORS=[1, 2, 4], LANES=[4, 8, 16], PACK=[False, True]).where(
    lambda c: c.ROWS * c.VECTORS <= 16  # more sums than registers would be spilled to memory in the innermost loop
)
default = tb.Config(ROWS=4, VECTORS=2, LANES=8, PACK=False)  # fills the registers of AVX2, and wastes none of AVX-512


@tb.tunable(space=space, heuristic=default, reference=np.matmul, compile=library.compile)
def matmul(a, b, *, config):
    """Multiply two C-contiguous matrices of float32."""
    (m, k), (rows, n) = a.shape, b.shape
    if rows != k or not a.dtype == b.dtype == np.float32:
        raise ValueError(f"cannot multiply {a.dtype} {a.shape} by {b.dtype} {b.shape}")
    c = np.empty((m, n), np.float32)
    library(config).matmul(pointer(a), pointer(b), pointer(c), m, n, k)
    return c


def operands(m, n, k, seed=0):
    """Return matrices to multiply."""
    random = np.random.default_rng(seed)
    return random.random((m, k), np.float32), random.random((k, n), np.float32)


SHAPES = ((512, 512, 512), (64, 512, 512), (1000, 500, 300), (1024, 16, 1024), (1024, 1024, 16), (1, 2048, 2048))


def main(shapes=SHAPES):
    """Tune every shape."""
    showing.tune_and_show(matmul, {" x ".join(map(str, shape)): operands(*shape) for shape in shapes}, default)


if __name__ == "__main__":
    main()
