"""A running program adopts new configurations when told to, and nothing else of it is traced again."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax
from limits import HANG_S
from test_jax_context import Traced, make
from test_jax_trace import compose, python

import tunebook as tb
from tunebook.adapters import jax as tbx
from tunebook.adapters._jax import programs

X = jnp.ones(4)


def adopt(k, b, x=X):
    """Have the book say something else from now on."""
    k.selector.cache.put(*k.problem(x), tb.Config(b=b))
    tbx.refresh()


WAYS = {
    "jit": jax.jit,
    "inner jit": lambda k: jax.jit(lambda x: jax.jit(k)(x) + 0),
    "scan": lambda k: jax.jit(lambda x: lax.scan(lambda c, _: (k(c), None), x, None, length=1)[0]),
    "while": lambda k: jax.jit(lambda x: lax.while_loop(lambda c: c[1] < 1, lambda c: (k(c[0]), c[1] + 1), (x, 0))[0]),
    "cond": lambda k: jax.jit(lambda x: lax.cond(x[0] > 0, k, lambda x: x, x)),
    "remat": lambda k: jax.jit(jax.checkpoint(k)),
    "vmap": lambda k: jax.jit(lambda x: jax.vmap(jax.jit(lambda row: k(x) + 0 * row))(x)[0]),
    "grad": lambda k: jax.jit(jax.grad(lambda x: k(x).sum())),
    "grad of jit": lambda k: jax.grad(jax.jit(lambda x: k(x).sum())),
    "linearize": lambda k: lambda x: jax.linearize(jax.jit(k), x)[1](x),
    "ours": tbx.jit,
    "donating": lambda k: lambda x: jax.jit(k, donate_argnums=0)(x + 0),
    "hidden in a function of jax": lambda k: jax.jit(lambda x: jnp.where(x > 0, k(x), 0)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_program_adopts_a_new_configuration_wherever_the_call_is(way):
    k = make()
    program = WAYS[way](k)
    assert float(program(X)[0]) == 1
    for b in (3, 2):
        adopt(k, b)
        assert float(program(X)[0]) == b


def test_a_body_that_jax_remembers_by_itself_is_traced_again_too():
    k = make()

    def body(carry, _):
        return k(carry), None

    def program(x):
        return lax.scan(body, x, None, length=1)[0]

    assert float(program(X)[0]) == 1
    adopt(k, 3)
    assert float(program(X)[0]) == 3


def own_rule(k, rule):
    """A function with a rule of its own, by which a gradient is multiplied by what `k` says."""
    if rule == "jvp":
        call = jax.custom_jvp(lambda x: x + 0)
        call.defjvp(lambda x, dx: (x[0], k(dx[0])))
        return call
    call = jax.custom_vjp(lambda x: k(x) if rule == "primal" else x + 0)
    if rule == "primal":
        call.defvjp(lambda x: jax.vjp(k, x), lambda pull, dy: pull(dy))
    elif rule == "forward":
        call.defvjp(lambda x: (x, k(x)), lambda kept, dy: (kept * dy,))
    else:
        call.defvjp(lambda x: (x, None), lambda _, dy: (k(dy),))
    return call


def total(f):
    return lambda x: f(x).sum()


@pytest.mark.parametrize("rule", ["jvp", "forward", "backward"])
@pytest.mark.parametrize(
    "around",
    [
        lambda f: jax.jit(jax.grad(total(f))),
        lambda f: jax.grad(total(jax.jit(f))),
        lambda f: jax.jit(jax.grad(total(jax.jit(jax.checkpoint(f))))),
        lambda f: jax.jit(jax.grad(total(lambda x: lax.map(f, x[None])[0]))),
        lambda f: jax.jit(jax.grad(total(lambda x: jax.vmap(f)(x[None])[0]))),
        lambda f: jax.jit(jax.grad(total(own_rule(f, "primal")))),
    ],
    ids=["jit", "grad of jit", "remat", "map", "vmap", "in another"],
)
def test_rules_of_differentiation_adopt_a_new_configuration(rule, around):
    k, seen = make(), []
    program = around(own_rule(lambda x: (seen.append(k.problem(x)), k(x))[1], rule))
    assert float(program(X)[0]) == 1
    for problem in set(seen):
        k.selector.cache.put(*problem, tb.Config(b=3))
    tbx.refresh()
    assert float(program(X)[0]) == 3


def test_a_rule_that_calls_a_jitted_function_adopts_a_new_configuration():
    k = make()
    inner = jax.jit(k)
    program = jax.jit(jax.grad(total(own_rule(inner, "backward"))))
    assert float(program(X)[0]) == 1
    adopt(k, 3)
    assert (float(program(X)[0]), float(inner(X)[0])) == (3, 3)


def test_a_function_that_only_calls_an_earlier_program_is_found():
    k = make()
    inner = Traced(k)
    inner()
    outer, beside = Traced(inner._jitted), Traced(lambda x: x * 2)
    assert (outer(), beside()) == (1, 2)
    assert inner.count == 1, "the trace of the inner one was part of the outer one without a call of ours"
    adopt(k, 3)
    assert (outer(), beside(), beside.count) == (3, 2, 1)


def test_a_kernel_run_by_an_executor_is_found():
    class Scale(tb.Kernel):
        def run(self, x, *, cfg):
            return x * cfg

        def heuristic_cfg(self, inv):
            return 1

        def candidate_cfgs(self, inv):
            return [1, 2]

    chain = tb.ConfigSelectorChain(tb.ConfigCache(), tb.AutotunePolicy(cache_miss_fallback="heuristics"))
    kernel, execute = Scale("scale"), tb.Executor(chain)
    f, unrelated = Traced(lambda x: execute(kernel, x)), Traced(lambda x: x + 1)
    assert (f(), unrelated()) == (1, 2)
    chain.cache.put(*kernel.problem(tb.Invocation("scale", (X,), {})), 3)
    tbx.refresh()
    assert (f(), unrelated(), f.count, unrelated.count) == (3, 2, 2, 1)


def test_a_function_whose_body_is_a_single_jax_function_is_found():
    k = tb.tunable(
        lambda x, *, config: jnp.clip(x, config.low, 9), space=tb.Space(low=[0, 5]), heuristic={"low": 0},
        name="clips", store=False, policy=tb.AutotunePolicy(cache_miss_fallback="heuristics"),
    )  # fmt: skip
    f = Traced(k)
    assert f() == 1
    k.selector.cache.put(*k.problem(X), tb.Config(low=5))
    tbx.refresh()
    assert f() == 5


TRANSFORMATIONS = st.lists(st.sampled_from(["jit", "vmap", "grad", "remat", "scan"]), max_size=5)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(TRANSFORMATIONS.filter(lambda names: names.count("grad") < 2))
def test_any_composition_adopts_a_new_configuration_and_leaves_others_alone(names):
    k, seen = make(), []
    x = jnp.ones((2,) * names.count("vmap") + (3,))
    program = compose(names)(lambda row: (seen.append(k.problem(row)), k(row))[1])
    unrelated = Traced(lambda x: compose(names)(lambda row: row * 2.0)(x).ravel())
    before = program(x), unrelated(x)
    for problem in set(seen):
        k.selector.cache.put(*problem, tb.Config(b=3))
    tbx.refresh()
    expected = compose(names)(lambda row: row * 3.0)(x)
    assert np.allclose(program(x), expected)
    assert (unrelated(x), unrelated.count) == (before[1], 1)
    assert not np.allclose(program(x), before[0])


# ------------------------------------------------------------------------------------------------ nothing but those


def test_functions_without_tunable_calls_are_never_traced_again():
    k = make()
    unrelated = [Traced(lambda x: x + 1), Traced(jnp.sin, tbx.jit), Traced(lambda x: jax.jit(jnp.cos)(x) + 1)]
    f = Traced(k)
    for b in (1, 2, 3, 2):
        adopt(k, b)
        assert f() == b
        for other in unrelated:
            other()
    assert [other.count for other in unrelated] == [1, 1, 1]


def test_a_program_that_was_compiled_is_not_compiled_again():
    k, compiled = make(), []
    f, unrelated = jax.jit(k), jax.jit(lambda x: x + 1)
    f(X), unrelated(X)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _seconds, **more: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    tbx.refresh()
    compiled.clear()  # a first refresh tries out whether it can be done
    unrelated(X)
    assert compiled == []
    f(X)
    assert compiled


def test_functions_are_left_alone_under_overlays_too():
    k = make()
    f, unrelated = Traced(k), Traced(lambda x: x + 1)
    for b in (2, 3):
        with k.overlay(tb.Config(b=7)):
            assert (f(), unrelated()) == (7, 2)
        adopt(k, b)
        assert (f(), unrelated()) == (b, 2)
    assert unrelated.count == 2, "in the overlay and outside of it"


# ------------------------------------------------------------------------------------------------- where all have to be


def test_a_number_that_a_program_is_made_by_is_adopted_with_everything():
    k = tb.tunable(
        lambda x, *, config: config.b, space=tb.Space(b=[1, 2, 3]), heuristic={"b": 1}, name="number", store=False,
        policy=tb.AutotunePolicy(cache_miss_fallback="heuristics"),
    )  # fmt: skip
    f, unrelated = Traced(lambda x: x * k(x)), Traced(lambda x: x + 1)
    assert (f(), unrelated()) == (1, 2)
    k.selector.cache.put(*k.problem(X), tb.Config(b=3))
    tbx.refresh(everything=True)
    assert (f(), unrelated(), f.count, unrelated.count) == (3, 2, 2, 2)


def test_a_trace_that_another_thread_is_making_does_not_keep_an_old_configuration():
    k = make()
    looked_up, refreshed = threading.Event(), threading.Event()

    def slow(x):
        out = k(x)
        looked_up.set()
        assert refreshed.wait(HANG_S)
        return out

    f = Traced(slow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(f)
        assert looked_up.wait(HANG_S)
        adopt(k, 3)
        refreshed.set()
        assert first.result() == 1
    assert (f(), f.count) == (3, 2)


def test_a_refresh_inside_a_trace_is_adopted_after_it():
    k = make()

    def program(x):
        out = k(x)
        if f.count == 1:
            adopt(k, 3)
        return out

    f = Traced(program)
    assert (f(), f()) == (1, 3)


def test_a_jax_that_keeps_its_programs_in_another_way_traces_all_of_them_again():
    said = python("""
import jax, jaxlib, tunebook as tb
from test_jax_context import Traced, make
from tunebook.adapters import jax as tbx
k = make()
f, unrelated = Traced(k), Traced(lambda x: x + 1)
f(), unrelated()
del jaxlib._jax.PjitFunctionCache
k.selector.cache.put(*k.problem(jax.numpy.ones(4)), tb.Config(b=3))
tbx.refresh()
print(f(), unrelated(), f.count, unrelated.count)
    """)
    assert said == ["3.0 2.0 2 2"]


def test_this_jax_keeps_its_programs_as_expected():
    assert programs._can_forget()
