"""Matrix multiplication in OpenCL C, on whatever device there is: a GPU, or the CPU through PoCL.

Each work-item computes a tile of the result in its registers. Its size, and that of a group, are macros.
"""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pyopencl.array
import showing

import tunebook as tb
from tunebook.adapters.opencl import CLProgram

SOURCE = """
inline void tile(__global const float *a, __global const float *b, __global float *c,
                 int n, int k, int rows, int columns) {
    float sums[ROWS][COLUMNS] = {{0}};
    for (int l = 0; l < k; l++)
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < columns; j++)
                sums[i][j] += a[i * k + l] * b[l * n + j];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++)
            c[i * n + j] = sums[i][j];
}

__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void matmul(__global const float *a, __global const float *b, __global float *c, int m, int n, int k) {
    const int column = get_global_id(0) * COLUMNS, row = get_global_id(1) * ROWS;
    a += row * k, b += column, c += row * n + column;
    if (row + ROWS <= m && column + COLUMNS <= n)
        tile(a, b, c, n, k, ROWS, COLUMNS);  // constants, so that the loops are unrolled
    else if (row < m && column < n)
        tile(a, b, c, n, k, min(ROWS, m - row), min(COLUMNS, n - column));
}
"""

context = cl.create_some_context(interactive=False)
queue = cl.CommandQueue(context, properties=cl.command_queue_properties.PROFILING_ENABLE)
program = CLProgram(context, SOURCE)
space = tb.Space(ROWS=[1, 2, 4, 8], COLUMNS=[1, 4, 8], GROUP=[1, 8])
default = tb.Config(ROWS=1, COLUMNS=1, GROUP=8)  # what one writes first


def reference(a, b):
    """Multiply on the host."""
    return a.get() @ b.get()


@tb.tunable(space=space, heuristic=default, reference=reference, compile=program.compile)
def matmul(a, b, *, config):
    """Multiply two C-contiguous matrices of float32."""
    (m, k), n = a.shape, b.shape[1]
    c = cl.array.empty(a.queue, (m, n), np.float32)
    groups = -(-n // (config.COLUMNS * config.GROUP))
    size = groups * config.GROUP, -(-m // config.ROWS)
    sizes = map(np.int32, (m, n, k))
    program(config).matmul(a.queue, size, (config.GROUP, 1), a.data, b.data, c.data, *sizes)
    return c


def operands(m, n, k, seed=0):
    """Return matrices to multiply."""
    random = np.random.default_rng(seed)
    return tuple(cl.array.to_device(queue, random.random(shape, np.float32)) for shape in ((m, k), (k, n)))


SHAPES = ((256, 256, 256), (16, 512, 256), (512, 16, 256))


def main(shapes=SHAPES):
    """Tune every shape."""
    showing.tune_and_show(matmul, {" x ".join(map(str, shape)): operands(*shape) for shape in shapes}, default)


if __name__ == "__main__":
    main()
