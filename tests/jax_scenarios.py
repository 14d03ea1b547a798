"""The ways in which a jax program may call a tunable function; run with 8 devices by tests/adapters/test_jax_trace.py.

Each prints its outcome as one line of JSON. The decoy traces fast and runs slowly: a tuner that times tracing picks it.
"""

from __future__ import annotations

import json
import re
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from kernels import cpu_tuner

import tunebook as tb

X = jnp.arange(8 * 64, dtype=jnp.float32).reshape(8, 64) / 100
SPEC = jax.ShapeDtypeStruct(X.shape, X.dtype)


def work(x, way):
    if way == "decoy":
        slow = lax.fori_loop(0, 50_000, lambda i, v: v * 0.999 + 0.001, x)
        return jnp.sin(x) + 0.0 * slow
    for _ in range(40):
        x = x + 0.0
    return jnp.sin(x)


def kernel(**options):
    options = {"space": tb.Space(way=["decoy", "good"]), "heuristic": {"way": "decoy"}, "store": False, **options}

    @tb.tunable(name="k", tuner=cpu_tuner(), **options)
    def call(x, *, config):
        return work(x, config.way)

    return call


def call(x):
    """The expected result of a tuned call. It has the same name, because names stand in a program."""
    return work(x, "good")


def mesh(kind):
    return jax.make_mesh((8,), ("d",), axis_types=(kind,))


def sharded(f, **options):
    return jax.shard_map(f, mesh=mesh(AxisType.Auto), in_specs=P("d"), out_specs=P("d"), **options)


def with_own_gradient(f):
    call = jax.custom_vjp(f)
    call.defvjp(lambda x: (f(x), x), lambda x, dy: (jnp.cos(x) * dy,))
    return call


def total(f):
    return lambda x: f(x).sum()


def scanned(f):
    return lambda x: lax.scan(lambda carry, row: (carry, f(row)), 0.0, x)[1]


def explicit(f):
    with jax.set_mesh(mesh(AxisType.Explicit)):
        x = jax.device_put(X, P("d"))
        return jax.make_jaxpr(jax.jit(f))(x), jax.jit(f)(x)


def automatic(f):
    with jax.set_mesh(mesh(AxisType.Auto)):
        return jax.make_jaxpr(jax.jit(f))(X), jax.jit(f)(X)


def exported(f):
    done = export.export(jax.jit(f))(SPEC)
    return re.findall(r"stablehlo\.\w+", done.mlir_module()), done.call(X)


def traced(transform, f):
    """Return the program as equations, and its result; the equations are made before anything runs."""
    program = transform(f)
    return jax.make_jaxpr(program)(X), program(X)


SCENARIOS = {
    "eager": lambda f: ("", f(X)),
    "jit": partial(traced, jax.jit),
    "grad": partial(traced, lambda f: jax.grad(total(f))),
    "jit(grad)": partial(traced, lambda f: jax.jit(jax.grad(total(f)))),
    "vmap": partial(traced, jax.vmap),
    "jit(vmap)": partial(traced, lambda f: jax.jit(jax.vmap(f))),
    "scan": partial(traced, scanned),
    "cond": partial(traced, lambda f: lambda x: lax.cond(x[0, 0] < 1e9, f, lambda x: x, x)),
    "remat": partial(traced, lambda f: jax.grad(jax.checkpoint(total(f)))),
    "shard_map": partial(traced, sharded),
    "jit(shard_map)": partial(traced, lambda f: jax.jit(sharded(f))),
    "jit(shard_map), vma off": partial(traced, lambda f: jax.jit(sharded(f, check_vma=False))),
    "set_mesh, auto": automatic,
    "set_mesh, explicit": explicit,
    "custom_vjp": partial(traced, lambda f: jax.grad(total(with_own_gradient(f)))),
    "jit(vmap(grad(custom_vjp)))": partial(traced, lambda f: jax.jit(jax.vmap(jax.grad(total(with_own_gradient(f)))))),
    "export": exported,
    "eval_shape": lambda f: (jax.make_jaxpr(f)(SPEC), jax.eval_shape(f, SPEC)),
}


def outcome(scenario):
    f = kernel()
    equations, out = scenario(f)
    chosen = {f.selector.cache.get(*problem).way for problem in list(f.selector.cache.keys())}
    expected, right = scenario(call)
    same = out.shape == right.shape if isinstance(out, jax.ShapeDtypeStruct) else np.allclose(out, right, atol=1e-5)
    return {"chosen": sorted(chosen), "same_program": str(equations) == str(expected), "same_result": bool(same)}


if __name__ == "__main__":
    names = sys.argv[1:] or SCENARIOS
    for name in names:
        print(json.dumps({"scenario": name, **outcome(SCENARIOS[name])}), flush=True)
