"""Our vmap: its axes are in the keys of calls also where a program is made before it is batched."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from jax import lax
from jax_scenarios import SPEC, X, kernel, with_own_gradient, work
from test_jax_trace import PROGRAMS, TRANSFORMATIONS, compose, keys, problem_in

import tunebook as tb
from tunebook.adapters import jax as tbx


def untuned():
    return kernel(policy=tb.AutotunePolicy(cache_miss_fallback="heuristics"))


def decoyed(x):
    """What an untuned call comes to: of the same name, which stands in a program."""
    return work(x, "decoy")


decoyed.__name__ = "call"


def recorded(program, *args):
    return [each.problem for each in tbx.record(program, *args)]


BETWEEN = {
    **PROGRAMS,
    "nothing": lambda g: g,
    "while": lambda g: lambda x: lax.while_loop(lambda c: c[1] < 1, lambda c: (g(c[0]), c[1] + 1), (x, 0))[0],
    "custom_vjp": lambda g: jax.jit(with_own_gradient(g)),
    "grad of jit": lambda g: jax.grad(lambda x: jax.jit(g)(x).sum()),
    "grad of custom_vjp": lambda g: jax.grad(lambda x: jax.jit(with_own_gradient(g))(x).sum()),
    "grad of scan": lambda g: jax.grad(lambda x: lax.scan(lambda c, y: (c + g(y).sum(), None), 0.0, x[None])[0]),
    "jit of grad of remat": lambda g: jax.jit(jax.grad(lambda x: jax.checkpoint(g)(x).sum())),
    "jvp": lambda g: lambda x: jax.jvp(jax.jit(g), (x,), (x,))[1],
}


@pytest.mark.parametrize("name", BETWEEN)
def test_our_vmap_is_seen_through_programs(name):
    f, between = untuned(), BETWEEN[name]
    program = tbx.vmap(between(f))
    assert np.allclose(program(X), jax.vmap(between(decoyed))(X), atol=1e-5)
    assert str(jax.make_jaxpr(program)(X)) == str(jax.make_jaxpr(jax.vmap(between(decoyed)))(X))
    assert recorded(program, SPEC) == [problem_in(jax.vmap, f, X)]


def test_a_call_inside_a_program_is_tuned_for_all_rows():
    shapes = set()

    def looked_at(x, way):
        shapes.add((type(x).__name__, way))
        return work(x, way)

    f = tb.tunable(
        lambda x, *, config: looked_at(x, config.way), space=tb.Space(way=["decoy", "good"]),
        heuristic={"way": "decoy"}, store=False, name="rows",
    )  # fmt: skip
    assert np.allclose(tbx.vmap(jax.jit(f))(X), jnp.sin(X), atol=1e-5)
    assert keys(f) == [problem_in(jax.vmap, f, X)]
    assert f.selector.cache.get(*keys(f)[0]).way == "good"
    assert {("BatchTracer", "decoy"), ("BatchTracer", "good")} <= shapes


def test_which_arrays_our_vmap_batches_is_seen_through_programs():
    @tb.tunable(space=[{"b": 1}, {"b": 2}], store=False, name="some", check=False)
    def f(x, y, z, *, config):
        return x + y + z * config.b

    step = jax.jit(lambda x, y, z: f(2 * y, x, jnp.sin(z)))
    (problem,) = recorded(tbx.vmap(step, in_axes=(1, None, 0), axis_name="rows"), X.T, X[0], X)
    batches = json.loads(problem.call_key)["@jax"]["vmap"]  # along which axis by then is for jax to say
    assert [(place, size, name) for place, _, _, size, name in batches] == [(1, 8, "rows"), (2, 8, "rows")]


def test_our_vmap_nests_with_itself_and_with_jaxs_vmap():
    f, x = untuned(), X.reshape(2, 4, 64)
    expected = problem_in(lambda g: jax.vmap(jax.vmap(g)), f, x)
    for program in (
        tbx.vmap(jax.jit(tbx.vmap(jax.jit(f)))),
        tbx.vmap(jax.jit(jax.vmap(jax.jit(f)))),
        tbx.vmap(tbx.vmap(f)),
        jax.vmap(tbx.vmap(f)),
        jax.jit(tbx.vmap(jax.jit(jax.vmap(f)))),
    ):
        assert recorded(program, x) == [expected]


def test_a_call_that_our_vmap_does_not_batch_keeps_its_key():
    f, weights = untuned(), X[0]
    assert recorded(tbx.vmap(jax.jit(lambda row: row + jax.jit(f)(weights))), X) == [f.problem(weights)]


def test_calls_that_look_alike_and_are_batched_differently_have_the_key_for_one_row():
    f = untuned()
    program = tbx.vmap(jax.jit(lambda x, y: f(x) + f(y)), in_axes=(0, 1))
    assert recorded(program, X[:, :8], X[:, :8]) == [f.problem(X[0, :8])]


def test_our_vmap_looks_for_axes_once_and_tunes_nothing_by_it():
    traced, events = [], []
    f = kernel(on_event=lambda event, **data: events.append((event, data["call_key"])))

    @jax.jit
    def inner(row):
        traced.append(1)
        return f(row)

    program = tbx.vmap(inner)
    for _ in range(3):
        program(X)
        tbx.vmap(inner)(X)
    assert len(traced) == 2, "once for its shapes, once to run it"
    assert {key for event, key in events if event == "autotune_start"} == {keys(f)[0].call_key}
    inner(X[0])
    assert len(traced) == 3, "alone it is another program"


def test_our_vmap_takes_arguments_that_are_not_arrays_where_it_maps_nothing():
    f = untuned()
    program = tbx.vmap(lambda x, way: jax.jit(f)(x) if way == "sin" else x, in_axes=(0, None))
    assert recorded(lambda x: program(x, "sin"), X) == [problem_in(jax.vmap, f, X)]


def test_a_recording_has_the_calls_of_our_vmap_once():
    f = untuned()
    program = jax.jit(tbx.vmap(jax.jit(f)))
    program(X)  # a trace that jit has is no reason not to see the call
    assert recorded(program, SPEC) == [problem_in(jax.vmap, f, X)]


def small():
    """A call that is made quickly, and what it comes to."""

    @tb.tunable(space=tb.Space(b=[1.0, 2.0]), heuristic={"b": 2.0}, store=False, name="small",
                policy=tb.AutotunePolicy(cache_miss_fallback="heuristics"))  # fmt: skip
    def call(x, *, config):
        return jnp.sin(x) * config.b

    tunable = call

    def call(x):
        return jnp.sin(x) * 2.0

    return tunable, call


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(TRANSFORMATIONS.filter(lambda names: "vmap" in names))
def test_in_any_composition_the_key_has_all_of_our_vmaps_and_nothing_else(names):
    (f, same), batched = small(), names.count("vmap")
    x = jnp.broadcast_to(X[0, :6], (*range(2, 2 + batched), 6)) + 0.1
    ours, plain = compose(names, tbx.vmap)(f), compose(names)(same)
    assert np.allclose(ours(x), plain(x), atol=1e-5)
    assert str(jax.make_jaxpr(ours)(x)) == str(jax.make_jaxpr(plain)(x))
    assert recorded(ours, x) == [problem_in(compose(["vmap"] * batched), f, x)]
