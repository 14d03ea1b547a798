"""Transposition in C: nothing is computed, so only the order of loads and stores counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import showing

import tunebook as tb
from tunebook.adapters.native import CLibrary, pointer

library = CLibrary(Path(__file__).with_name("transpose.c"))
space = tb.Space(ORDER=["read_rows", "write_rows"], ROWS=[1, 4, 8, 16, 64], COLUMNS=[1, 4, 8, 16, 64]).where(
    lambda c: c.ROWS * c.COLUMNS <= 1024  # of floats: 4 kB read and 4 kB written fit the first-level cache
)
default = tb.Config(ORDER="read_rows", ROWS=16, COLUMNS=16)  # one cache line each way


@tb.tunable(space=space, heuristic=default, reference=np.transpose, compile=library.compile)
def transpose(matrix, *, config):
    """Transpose a C-contiguous matrix of float32 into a new one."""
    if matrix.dtype != np.float32 or matrix.ndim != 2:
        raise ValueError(f"cannot transpose {matrix.dtype} {matrix.shape}")
    height, width = matrix.shape
    out = np.empty((width, height), np.float32)
    library(config).transpose(pointer(matrix), pointer(out), height, width)
    return out


def operands(height, width, seed=0):
    """Return a matrix."""
    return (np.random.default_rng(seed).random((height, width), np.float32),)


SHAPES = ((512, 512), (1024, 1024), (2000, 1000), (4096, 64))


def main(shapes=SHAPES):
    """Tune every shape."""
    showing.tune_and_show(transpose, {" x ".join(map(str, shape)): operands(*shape) for shape in shapes}, default)


if __name__ == "__main__":
    main()
