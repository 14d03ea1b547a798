"""Two Pallas kernels, a matrix product and a softmax: candidates by shape, interpreted on the CPU, compiled on a GPU.

A block that does not divide what is summed over is no error in Pallas: it adds what lies behind the block, or the same
values twice. Each candidate is checked against the reference, so that none of those can win.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import showing
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

import tunebook as tb

INTERPRETED = jax.default_backend() == "cpu"


def launched(kernel, config, **options):
    """Return a kernel as a function of arrays: compiled on a GPU, and interpreted elsewhere."""
    compiled = {"compiler_params": triton.CompilerParams(num_warps=config.warps, num_stages=config.stages)}
    return pl.pallas_call(kernel, interpret=INTERPRETED, **options, **({} if INTERPRETED else compiled))


# ---------------------------------------------------------------------------------------------------------- the product


def blocks(a, b):
    """Return the candidates for a product: no block larger than the matrices, and what only a GPU knows only there."""
    (m, k), n = a.shape, b.shape[1]
    sizes = [16, 32, 64, 128]
    space = tb.Space(
        m=[s for s in sizes if s <= m],
        n=[s for s in sizes if s <= n],
        k=[s for s in (32, 48, 64) if s <= k],
        warps=[4] if INTERPRETED else [4, 8],
        stages=[2] if INTERPRETED else [2, 3, 4],
    )
    return [c for c in space if INTERPRETED or c.m * c.n <= 128 * 128]


def multiply_blocks(a, b, out, *, block):
    """Multiply a row of blocks by a column of blocks."""

    def step(i, total):
        part = pl.ds(i * block, block)
        return total + jnp.dot(a[:, part], b[part, :], preferred_element_type=jnp.float32)

    zeros = jnp.zeros(out.shape, jnp.float32)
    out[...] = jax.lax.fori_loop(0, pl.cdiv(a.shape[1], block), step, zeros).astype(out.dtype)


@tb.tunable(space=blocks, heuristic={"m": 32, "n": 32, "k": 32, "warps": 4, "stages": 2}, reference=jnp.dot)
def matmul(a, b, *, config):
    """Multiply two matrices."""
    (m, k), n = a.shape, b.shape[1]
    return launched(
        partial(multiply_blocks, block=config.k),
        config,
        out_shape=jax.ShapeDtypeStruct((m, n), a.dtype),
        grid=(pl.cdiv(m, config.m), pl.cdiv(n, config.n)),
        in_specs=[pl.BlockSpec((config.m, k), lambda i, _: (i, 0)), pl.BlockSpec((k, config.n), lambda _, j: (0, j))],
        out_specs=pl.BlockSpec((config.m, config.n), lambda i, j: (i, j)),
    )(a, b)


# ---------------------------------------------------------------------------------------------------------- the softmax


def softmax_rows(x, out):
    """Do some rows."""
    rows = x[...].astype(jnp.float32)
    powers = jnp.exp(rows - jnp.max(rows, axis=1, keepdims=True))
    out[...] = (powers / jnp.sum(powers, axis=1, keepdims=True)).astype(out.dtype)


def rows_at_once(x):
    """Return the candidates for a softmax."""
    return tb.Space(rows=[r for r in (1, 2, 4, 8, 24, 64) if r <= x.shape[0]], warps=[4], stages=[1])


@tb.tunable(space=rows_at_once, heuristic={"rows": 1, "warps": 4, "stages": 1}, reference=jax.nn.softmax)
def softmax(x, *, config):
    """Return the softmax of every row."""
    block = pl.BlockSpec((config.rows, x.shape[1]), lambda i: (i, 0))
    return launched(
        softmax_rows,
        config,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(x.shape[0], config.rows),),
        in_specs=[block],
        out_specs=block,
    )(x)


# ----------------------------------------------------------------------------------------------------------------------


def random(*shape, seed=0):
    """Return an array; of the numbers that GPUs multiply fast on a GPU."""
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, jnp.float32 if INTERPRETED else jnp.bfloat16)


def main(size=None):
    """Tune both inside of a jitted function, and say what was tried."""
    n = size or (128 if INTERPRETED else 4096)
    a, b = random(n, n), random(n, n, seed=1)

    @jax.jit
    def attend(a, b):
        return softmax(matmul(a, b))  # tuned here, while it is traced

    jax.block_until_ready(attend(a, b))
    for kernel, arguments in ((matmul, (a, b)), (softmax, (matmul(a, b),))):
        tuned = tb.tune(kernel, *arguments)  # known by now: this is to look at
        times = showing.times_of(tuned)
        best, heuristic = (
            times[showing.spelled(tuned.config)],
            kernel.kernel.heuristic(kernel.kernel.invocation(arguments)),
        )
        print(f"{kernel.__name__} of {' and '.join(str(x.shape) for x in arguments)}")
        print(f"  best      {showing.spelled(tuned.config)}")
        print(
            f"  {showing.summary(best, times[showing.spelled(heuristic)], max(times.values()))}   best, default, worst"
        )
        failed = [m for m in tuned.measurements if m.failure is not None]
        print(f"  {len(tuned.measurements)} candidates, {len(failed)} of them failed")
        for kind, message in sorted({(m.failure.kind, m.failure.message.splitlines()[0][:70]) for m in failed})[:4]:
            print(f"    {kind}: {message}")


if __name__ == "__main__":
    main()
