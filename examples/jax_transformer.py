"""A training step of a small transformer: its tunable calls are found from shapes alone, tuned, and then used.

The calls are where they are in real programs: inside jit, under grad and remat, in a scan over layers, in a vmap over
the batch. Nothing of the step runs until everything is tuned.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import showing

import tunebook as tb
from tunebook.adapters import jax as tbx

LAYERS, HEADS, WIDTH = 2, 4, 32


def whole_attention(q, k, v):
    """Attend with all scores in memory at once; the reference, too."""
    scores = jnp.einsum("hqd,hkd->hqk", q, k) * q.shape[-1] ** -0.5
    length = q.shape[1]
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores), v)


def attention_in_blocks(q, k, v, block):
    """Attend to a block of keys at a time, with a running maximum, and for a block of queries at a time."""
    heads, length, width = q.shape
    q = q * width**-0.5

    def some_queries(start):
        mine = jax.lax.dynamic_slice_in_dim(q, start, block, 1)

        def some_keys(carry, at):
            total, weight, top = carry
            keys, values = (jax.lax.dynamic_slice_in_dim(x, at, block, 1) for x in (k, v))
            scores = jnp.einsum("hqd,hkd->hqk", mine, keys)
            after = (start + jnp.arange(block))[:, None] < (at + jnp.arange(block))[None, :]
            scores = jnp.where(after, -1e30, scores)
            new_top = jnp.maximum(top, scores.max(-1))
            powers, fade = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
            total = total * fade[..., None] + jnp.einsum("hqk,hkd->hqd", powers, values)
            return (total, weight * fade + powers.sum(-1), new_top), None

        empty = (jnp.zeros_like(mine), jnp.zeros((heads, block)), jnp.full((heads, block), -1e30))
        (total, weight, _), _ = jax.lax.scan(some_keys, empty, jnp.arange(0, length, block))
        return total / weight[..., None]

    blocks = jax.lax.map(some_queries, jnp.arange(0, length, block))
    return jnp.moveaxis(blocks, 0, 1).reshape(heads, length, width)


def ways_to_attend(q, *_others):
    """Return the candidates: all at once, or blocks that divide the length."""
    return [{"block": None}, *({"block": b} for b in (16, 32, 64, 128) if q.shape[1] % b == 0)]


@tb.tunable(space=ways_to_attend, heuristic={"block": None}, reference=whole_attention)
def attention(q, k, v, *, config):
    """Causal attention of some heads."""
    return whole_attention(q, k, v) if config.block is None else attention_in_blocks(q, k, v, config.block)


@tb.tunable(space=tb.Space(parts=[1, 2, 4, 8]), heuristic={"parts": 1})
def feed_forward(x, inner, outer, *, config):
    """Two layers, of which the inner one is so wide that it may be better made in parts."""
    parts = zip(jnp.split(inner, config.parts, 1), jnp.split(outer, config.parts, 0), strict=True)
    return sum(jax.nn.gelu(x @ i) @ o for i, o in parts)


def layer(x, weights):
    """Attend, then think."""
    length, width = x.shape
    q, k, v = (jnp.moveaxis((x @ w).reshape(length, HEADS, -1), 1, 0) for w in weights["qkv"])
    x = x + jnp.moveaxis(attention(q, k, v), 0, 1).reshape(length, width)
    return x + feed_forward(x, weights["inner"], weights["outer"])


def loss(weights, batch):
    """Return how far the model is from saying what it was told."""
    every_layer = jax.checkpoint(jax.vmap(layer, in_axes=(0, None)))
    out, _ = jax.lax.scan(lambda x, w: (every_layer(x, w), None), batch, weights)
    return jnp.mean((out - batch) ** 2)


@jax.jit
def train_step(weights, batch):
    """Return the loss, and weights that make it smaller."""
    value, slope = jax.value_and_grad(loss)(weights, batch)
    return value, jax.tree.map(lambda w, g: w - 0.01 * g, weights, slope)


def shapes(batch, length):
    """Return what a step takes, as shapes: no array is made."""
    width = HEADS * WIDTH
    weights = {
        "qkv": (LAYERS, 3, width, width),
        "inner": (LAYERS, width, 4 * width),
        "outer": (LAYERS, 4 * width, width),
    }
    specs = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in weights.items()}
    return specs, jax.ShapeDtypeStruct((batch, length, width), jnp.float32)


def random(spec, seed=0):
    """Return weights or data for a shape."""
    values = np.random.default_rng(seed).standard_normal(spec.shape)
    return jnp.asarray(values / np.sqrt(spec.shape[-1]), spec.dtype)


def _found(tuned):
    """Return what a tuning found; there is none for what was known already."""
    if tuned is None:
        return None
    times = sorted(seconds for _, seconds in tuned.ranking)
    return f"{showing.spelled(tuned.config)}  {showing.summary(times[0], times[-1])}  best, worst"


def main(batch=4, length=256):
    """Find the calls, tune them, and run."""
    specs = shapes(batch, length)
    problems = tbx.record(train_step, *specs)
    print(f"{len(problems)} tunable calls in the step:")
    for call in problems:
        print(f"  {call.problem.op}: {', '.join(str(x.shape) for x in call.args)}  {call.surroundings.get('@jax', '')}")
    for outcome in tb.tune_all(problems):
        print(f"  {outcome.status:<6} {outcome.call.problem.op}: {_found(outcome.tuned) or outcome.detail}")
    weights, data = jax.tree.map(random, specs)
    for _ in range(3):
        value, weights = train_step(weights, data)
        print(f"loss {float(value):.4f}")


if __name__ == "__main__":
    main()
