"""A module of kernels, as a user of the command would have one: copied beside a test's book as `mykernels.py`."""

from __future__ import annotations

import numpy as np
from kernels import FakeClock, fake_tuner

import tunebook as tb

CLOCK = FakeClock()


@tb.tunable(name="matmul", space=tb.Space(block=[16, 32, 64, 128]), heuristic={"block": 16}, tuner=fake_tuner(CLOCK))
def matmul(a, b, causal=False, *, config):
    """Take a time in proportion to the block, and fail with the largest."""
    if config.block == 128:
        raise ValueError("out of resource: shared memory, Required: 262144, limit: 232448")
    CLOCK.spend(config.block * 1e-5)
    return a @ b


@tb.tunable(name="scale", space=tb.Space(step=[1, 2]), heuristic={"step": 1}, tuner=fake_tuner(CLOCK))
def scale(n, *, config):
    """Take a time in proportion to the step."""
    CLOCK.spend(config.step * 1e-3)
    return n


def main():
    """Tune one call of the one and five of the other."""
    matmul(np.ones((8, 4), np.float32), np.ones((4, 8), np.float32))
    for n in (8, 16, 32, 64, 128):
        scale(n)


if __name__ == "__main__":
    main()
