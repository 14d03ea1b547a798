"""A relaxation step compiled by Numba. The configuration picks the loops, and what Numba may do with them."""

from __future__ import annotations

import numba
import numpy as np
import showing

import tunebook as tb
from tunebook.adapters.numpy import specialised

space = tb.Space(order=["rows", "columns"], strip=[8, 64, 512], fastmath=[False, True])
default = tb.Config(order="rows", strip=512, fastmath=False)

QUARTER = np.float32(0.25)


@specialised
def compiled(config):
    """Return the loops of a configuration; Numba compiles what they close over as constants."""
    strip = config.strip

    def rows(old, new, change):
        height, width = old.shape[0] - 2, old.shape[1] - 2
        for start in range(0, width, strip):
            for i in range(height):
                # Slices that begin where the strip does: with an index that might be negative, nothing is vectorised.
                above, left, here = old[i, start + 1 :], old[i + 1, start:], old[i + 1, start + 1 :]
                right, below, out = old[i + 1, start + 2 :], old[i + 2, start + 1 :], new[i + 1, start + 1 :]
                total = 0.0
                for j in range(min(strip, width - start)):
                    value = QUARTER * (above[j] + left[j] + right[j] + below[j])
                    total += (value - here[j]) ** 2  # only fastmath may sum in another order, as vectors do
                    out[j] = value
                change[i] += total

    def columns(old, new, change):
        height, width = old.shape[0] - 2, old.shape[1] - 2
        for start in range(0, height, strip):
            for j in range(width):
                for i in range(start, min(start + strip, height)):
                    value = QUARTER * (old[i, j + 1] + old[i + 1, j] + old[i + 1, j + 2] + old[i + 2, j + 1])
                    change[i] += (value - old[i + 1, j + 1]) ** 2
                    new[i + 1, j + 1] = value

    loops = {"rows": rows, "columns": columns}[config.order]
    return numba.njit("void(float32[:, ::1], float32[:, ::1], float32[::1])", fastmath=config.fastmath)(loops)


def reference(grid):
    """Do the step with numpy."""
    new = grid.copy()
    new[1:-1, 1:-1] = QUARTER * (grid[:-2, 1:-1] + grid[1:-1, :-2] + grid[1:-1, 2:] + grid[2:, 1:-1])
    return new, np.sum((new - grid) ** 2, axis=1)[1:-1]


@tb.tunable(space=space, heuristic=default, reference=reference, compile=compiled)
def relax(grid, *, config):
    """Replace every inner value by the mean of its neighbours; return that, and the sum of squared changes per row."""
    new, change = np.empty_like(grid), np.zeros(grid.shape[0] - 2, np.float32)
    new[[0, -1]], new[:, [0, -1]] = grid[[0, -1]], grid[:, [0, -1]]
    compiled(config)(grid, new, change)
    return new, change


def operands(height, width, seed=0):
    """Return a grid."""
    return (np.random.default_rng(seed).random((height, width), np.float32),)


SHAPES = ((512, 512), (1024, 1024), (64, 8192))


def main(shapes=SHAPES):
    """Tune every shape."""
    showing.tune_and_show(relax, {" x ".join(map(str, shape)): operands(*shape) for shape in shapes}, default)


if __name__ == "__main__":
    main()
