"""Linear algebra in pieces so small that a BLAS library computes each on one thread.

The matrices of the models here have a few hundred rows. With two threads, every product waits for the other thread,
and on a busy machine this thread may not run for milliseconds: a fit of a `SizeModel` took 26 s instead of 2.9. The
number of threads belongs to the program, and other threads may need all of them right now, so it is not changed.
"""

from __future__ import annotations

from typing import Any, Final

# Multiplications in a product. OpenBLAS, which NumPy comes with, uses threads from 2**18 on.
ALONE: Final = 200_000
_ROWS: Final = 16  # in a piece, if possible: fewer take longer each
_BLOCK: Final = 32  # rows that are inverted at once


def product(np: Any, one: Any, other: Any) -> Any:
    """Return the matrix product of two arrays; dimensions before the last two are of a batch, as for `matmul`."""
    (rows, inner), columns = one.shape[-2:], other.shape[-1]
    if rows * inner * columns <= ALONE:
        return np.matmul(one, other)
    wide = min(columns, max(1, ALONE // (inner * _ROWS)))
    high = max(1, ALONE // (inner * wide))
    found = np.empty((*np.broadcast_shapes(one.shape[:-2], other.shape[:-2]), rows, columns), one.dtype)
    for top in range(0, rows, high):
        part = one[..., top : top + high, :]
        for left in range(0, columns, wide):
            found[..., top : top + high, left : left + wide] = np.matmul(part, other[..., left : left + wide])
    return found


def inverse(np: Any, matrices: Any) -> Any:
    """Return the inverses of symmetric positive definite matrices, by Gauss-Jordan elimination of blocks."""
    found = matrices.copy()
    for start in range(0, found.shape[-1], _BLOCK):
        block = slice(start, start + _BLOCK)
        pivot = np.linalg.inv(found[..., block, block])
        column = found[..., block].copy()
        row = product(np, pivot, found[..., block, :])
        found -= product(np, column, row)
        found[..., block, :] = row
        found[..., block] = -product(np, column, pivot)
        found[..., block, block] = pivot
    return found


def solve_lower(np: Any, root: Any, right: Any) -> Any:
    """Return the solution of a triangular system; `root` is the lower triangle, with zeros above."""
    found = right.copy()
    for start in range(0, len(root), _BLOCK):
        block = slice(start, start + _BLOCK)
        known = root[block, :start] @ found[:start]
        found[block] = np.linalg.solve(root[block, block], found[block] - known)
    return found
