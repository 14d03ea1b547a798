"""Tunable calls in jax programs: tuned on real runs wherever they are traced, and leaving nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import export, lax
from jax_scenarios import SCENARIOS, SPEC, X, call, kernel

import tunebook as tb


def python(code_or_file, *args, devices=8, **environment):
    """Run a script with so many devices, and return its output by lines."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, **environment}
    where = [code_or_file] if str(code_or_file).endswith(".py") else ["-c", code_or_file]
    done = subprocess.run([sys.executable, *where, *args], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def outcomes():
    lines = python(str(Path(__file__).parents[1] / "jax_scenarios.py"))
    return {outcome.pop("scenario"): outcome for outcome in map(json.loads, lines)}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_right_candidate_wins_and_no_equation_is_left_behind(outcomes, scenario):
    assert outcomes[scenario] == {"chosen": ["good"], "same_program": True, "same_result": True}


# --------------------------------------------------------------------------------------------------------------- keys


def problem_in(transform, f, *args):
    seen = []
    transform(lambda *a: (seen.append(f.problem(*a)), jnp.sum(a[0]))[1])(*args)
    return seen[0]


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.checkpoint, lambda f: jax.jit(jax.value_and_grad(f))])
def test_a_call_has_the_same_key_in_a_trace_as_outside(transform):
    f = kernel()
    assert problem_in(transform, f, X) == f.problem(X) == f.problem(SPEC)


def test_one_tuning_serves_eager_calls_and_all_traces():
    starts = []
    f = kernel(on_event=lambda event, **_: starts.append(event) if event == "autotune_start" else None)
    f(X)
    jax.jit(f)(X)
    jax.jit(jax.grad(lambda x: f(x).sum()))(X)
    assert starts == ["autotune_start"]


SETTINGS = {
    "x64": lambda: jax.enable_x64(True),
    "precision": lambda: jax.default_matmul_precision("highest"),
    "other precision": lambda: jax.default_matmul_precision("bfloat16"),
    "random numbers": lambda: jax.default_prng_impl("rbg"),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("where", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_settings_that_change_the_program_are_part_of_the_key(name, where):
    f = kernel()
    outside = problem_in(where, f, X)
    with SETTINGS[name]():
        inside = problem_in(where, f, X)
    assert inside != outside
    assert problem_in(where, f, X) == outside


def test_hot_calls_notice_a_setting():
    f = tb.tunable(lambda x, *, config: config.b, space=tb.Space(b=[0]), name="hot", store=False)
    for i, setting in enumerate([None, *SETTINGS.values()]):
        with setting() if setting else jax.enable_x64(False):
            f.selector.cache.put(*f.problem(X), tb.Config(b=i))
    for _ in range(4):
        assert f(X) == 0
        for i, setting in enumerate(SETTINGS.values(), 1):
            with setting():
                assert f(X) == i


# ------------------------------------------------------------------------------------------------ what candidates see


def seen_by_candidates(read, *, call=None, **options):
    seen = []

    @tb.tunable(space=[{"b": 1}, {"b": 2}], heuristic={"b": 1}, store=False, name="looks", check=False, **options)
    def f(x, *, config):
        seen.append(read(x))
        return x + config.b

    (call or (lambda f: jax.jit(f)(X)))(f)
    return seen[:-1]  # the last is the user's own trace


@pytest.mark.parametrize(
    ("setting", "read", "expected"),
    [
        (lambda: jax.enable_x64(True), lambda x: jnp.ones(3).dtype.name, "float64"),
        (lambda: jax.default_matmul_precision("highest"), lambda x: jax.default_matmul_precision.value, "highest"),
        (lambda: jax.numpy_dtype_promotion("strict"), lambda x: str(jax.numpy_dtype_promotion.value), "strict"),
        (lambda: jax.default_prng_impl("rbg"), lambda x: str(jax.random.key(0).dtype), "key<rbg>"),
    ],
)
def test_candidates_are_traced_under_the_settings_of_the_caller(setting, read, expected):
    with setting():
        found = seen_by_candidates(read)
    assert found
    assert set(found) == {expected}


def test_candidates_run_under_the_callers_user_contexts():
    mode = jax.make_user_context("default")
    with mode("special"):
        found = seen_by_candidates(lambda x: mode.value)
    assert found
    assert set(found) == {"special"}


def test_a_program_without_user_contexts_is_not_searched_for_them(monkeypatch):
    from tunebook.adapters._jax import staging

    mode = jax.make_user_context("default")
    monkeypatch.setattr(staging.gc, "get_objects", lambda: 1 / 0)
    assert seen_by_candidates(lambda x: mode.value)
    with tb.forward_autotune_only():  # a user context of our own
        assert seen_by_candidates(lambda x: mode.value)
    with mode("special"), pytest.raises(ZeroDivisionError):
        seen_by_candidates(lambda x: mode.value)


def test_a_weak_type_stays_weak():
    found = seen_by_candidates(lambda x: x.aval.weak_type, call=lambda f: jax.jit(f)(2.0))
    assert found
    assert set(found) == {True}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64", "int32", "uint8", "float8_e4m3fn"])
def test_made_up_values_are_finite_and_never_zero(dtype):
    from tunebook.adapters._jax.staging import made_up

    values = np.asarray(made_up((64, 3), jnp.dtype(dtype), 0)).astype("complex64")
    assert np.all(values != 0)
    assert np.all(np.isfinite(values))
    assert len(np.unique(values)) > 1
    assert np.array_equal(values, np.asarray(made_up((64, 3), jnp.dtype(dtype), 0)).astype("complex64"))


def test_typed_random_keys_can_be_tuned_on():
    f = tb.tunable(
        lambda key, *, config: jax.random.normal(key, (config.n,)).sum(), space=tb.Space(n=[4, 8]), store=False,
        name="random", check=False,
    )  # fmt: skip
    jax.jit(f)(jax.random.key(0))
    assert len(f.selector.cache.keys()) == 1


def test_arguments_that_are_not_arrays_are_passed_as_they_are():
    seen = []

    @tb.tunable(space=[{"b": 1}], store=False, name="mixed")
    def f(x, mode, extra=None, *, config):
        seen.append((mode, sorted(extra), extra["n"]))
        return x + extra["y"]

    jax.jit(lambda x: f(x, "fast", extra={"n": 3, "y": x}))(X)
    assert set(map(str, seen)) == {str(("fast", ["n", "y"], 3))}


# ---------------------------------------------------------------------------------------------


def test_symbolic_shapes_get_the_heuristic_and_say_why():
    f = kernel()
    (b,) = export.symbolic_shape("b")
    explained = []
    program = jax.jit(lambda x: (explained.append(str(f.explain(x))), f(x))[1])
    done = export.export(program)(jax.ShapeDtypeStruct((b, 64), jnp.float32))
    assert np.allclose(done.call(X), jnp.sin(X))
    assert len(f.selector.cache.keys()) == 0
    assert "answer: Config(way='decoy') from heuristics" in explained[0]
    assert "(b, 64) is symbolic" in explained[0]


def test_a_function_that_looks_at_values_is_run_as_it_is():
    ran = set()

    @tb.tunable(space=[{"n": 1}, {"n": 3}], store=False, name="looks")
    def f(x, *, config):
        ran.add((config.n, type(x).__name__))
        return x * float(np.sum(np.asarray(x)) > 0)  # no tracer can answer this

    assert np.array_equal(f(X), X)
    assert {(1, "ArrayImpl"), (3, "ArrayImpl")} <= ran, "each was measured: none is taken for the same program"


def test_a_candidate_that_does_not_compile_is_one_candidate_lost():
    @tb.tunable(space=[{"n": 1}, {"n": 7}], store=False, name="fails", check=False)
    def f(x, *, config):
        return x.reshape(config.n, -1)

    assert jax.jit(f)(X).shape == (1, 512)


def test_all_candidates_failing_is_an_error_in_the_users_trace():
    f = tb.tunable(lambda x, *, config: x.reshape(7, -1), space=[{"n": 1}, {"n": 2}], store=False, name="all-fail")
    with pytest.raises(tb.NoConfig, match="reshape"):
        jax.jit(f)(X)


def test_equal_programs_are_measured_once():
    f = tb.tunable(
        lambda x, *, config: jnp.sin(x) * (2 if config.n else 1), space=tb.Space(n=[0, 1, 2, 3]), store=False,
        name="twins", check=False,
    )  # fmt: skip
    tuned = tb.tune(f, SPEC)
    programs = {m.extra["program"] for m in tuned.measurements}
    assert (len(tuned.measurements), len(programs)) == (4, 2)


def test_tuning_from_a_description_serves_the_real_call():
    f = kernel()
    assert tb.tune(f, SPEC).config.way == "good"
    with tb.policy_override(f.selector, allow_autotune=False, allow_heuristics=False):
        assert np.allclose(f(X), jnp.sin(X))


# ---------------------------------------------------------------------------------------------------------------- vmap


def keys(f):
    return list(f.selector.cache.keys())


def batches_of(f):
    return [json.loads(p.call_key).get("@jax", {}).get("vmap") for p in keys(f)]


def test_batch_axes_are_part_of_the_key():
    f = kernel()
    row = X[0]
    problems = {
        f.problem(row),
        problem_in(jax.vmap, f, X),
        problem_in(jax.vmap, f, X[:4]),
        problem_in(lambda g: jax.vmap(g, in_axes=1), f, X.T),
        problem_in(lambda g: jax.vmap(jax.vmap(g)), f, X.reshape(2, 4, 64)),
    }
    assert len(problems) == 5


def test_a_batched_call_has_the_same_key_inside_jit_and_under_grad():
    f = kernel()
    assert problem_in(jax.vmap, f, X) == problem_in(lambda g: jax.jit(jax.vmap(g)), f, X)
    assert problem_in(jax.vmap, f, X) == problem_in(lambda g: jax.vmap(jax.grad(g)), f, X)


def test_candidates_of_a_batched_call_run_batched():
    shapes = set()

    @tb.tunable(space=[{"b": 1}, {"b": 2}], store=False, name="batched", check=False)
    def f(x, y, *, config):
        shapes.add((x.shape, type(x).__name__, type(y).__name__))
        return x + lax.psum(y, "rows") * config.b

    jax.vmap(f, in_axes=(1, None), axis_name="rows")(X.T, 3.0 * X[0])
    assert {(shape, kind) for shape, kind, _ in shapes} == {((64,), "BatchTracer")}
    assert batches_of(f) == [[[0, 0, 1, 8, "rows"]]]


# What makes a program of a function before a vmap is applied to it: the call is part of that program, and the program
# is the same one that runs without the vmap. From inside it is not seen, and so `tbx.vmap` looks for it ahead.
PROGRAMS = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": lambda g: lambda x: lax.scan(lambda c, y: (c, g(y)), 0, x[None])[1][0],
    "cond": lambda g: lambda x: lax.cond(True, g, g, x),
    "fori_loop": lambda g: lambda x: lax.fori_loop(0, 1, lambda _, c: g(c), x),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_vmap_around_a_program_computes_the_right_thing_with_the_answer_for_one_row(name):
    f = kernel()
    assert np.allclose(jax.vmap(PROGRAMS[name](f))(X), jnp.sin(X), atol=1e-5)
    assert keys(f) == [f.problem(X[0])]
    assert f.selector.cache.get(*keys(f)[0]).way == "good"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_vmap_inside_a_program_is_seen(name):
    f = kernel()
    assert np.allclose(PROGRAMS[name](jax.vmap(f))(X), jnp.sin(X), atol=1e-5)
    assert batches_of(f) == [[[0, 0, 0, 8, None]]]


# ---------------------------------------------------------------------------------------------------- any composition


def compose(names, vmap=jax.vmap):
    """Compose transformations around a function of one row, given all rows."""
    steps = {
        "jit": jax.jit,
        "vmap": vmap,
        "grad": lambda g: jax.grad(lambda x: jnp.sum(g(x))),
        "remat": jax.checkpoint,
        "scan": lambda g: lambda x: lax.scan(lambda c, _: (c, g(x)), 0, None, length=2)[1][0],
    }

    def composed(g):
        for name in names:
            g = steps[name](g)
        return g

    return composed


TRANSFORMATIONS = st.lists(st.sampled_from(["jit", "vmap", "grad", "remat", "scan"]), max_size=4)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(TRANSFORMATIONS)
def test_any_composition_of_transformations_computes_the_same_as_the_plain_function(names):
    batched = names.count("vmap")
    x = jnp.broadcast_to(X[0, :6], (2,) * batched + (6,)) + 0.1
    f = kernel()
    expected = compose(names)(call)
    program = compose(names)(f)
    assert str(jax.make_jaxpr(program)(x)) == str(jax.make_jaxpr(expected)(x))
    assert np.allclose(program(x), expected(x), atol=1e-5)


def test_candidates_of_a_batched_call_are_checked_against_the_reference():
    @tb.tunable(space=[{"b": 1}, {"b": 2}], store=False, name="checked", reference=lambda x, y: {"sum": x + y})
    def f(x, y, *, config):
        return {"sum": x + y * config.b}

    g = jax.vmap(jax.vmap(f, in_axes=(1, None)), in_axes=(0, None))
    x = jnp.arange(24.0).reshape(2, 3, 4)
    assert np.allclose(g(x, jnp.ones(3))["sum"], jnp.swapaxes(x, 1, 2) + 1)
    assert [f.selector.cache.get(*p).b for p in keys(f)] == [1]


def test_the_author_may_make_the_arrays_that_traced_calls_are_tuned_on():
    tables = []

    def look(x, table):
        jax.debug.callback(lambda t: tables.append(t.tolist()), table)
        return x[table]

    @tb.tunable(space=[{"b": 1}], store=False, name="paged", inputs=lambda x, table: (x, jnp.arange(table.size)[::-1]))
    def f(x, table, *, config):
        return look(x, table)

    jax.eval_shape(f, X, jnp.zeros(4, int))
    jax.effects_barrier()
    assert tables
    assert set(map(tuple, tables)) == {(3, 2, 1, 0)}


def test_inputs_of_the_wrong_number_are_refused():
    f = tb.tunable(lambda x, *, config: x, space=[{"b": 1}], store=False, name="few", inputs=lambda x: ())
    with pytest.raises(tb.DefinitionError, match="returned 0 arguments; return one for each of x"):
        jax.eval_shape(f, X)


def test_tuning_does_not_use_up_arrays_that_a_kernel_donates():
    double = jax.jit(lambda x: x * 2.0, donate_argnums=0)
    f = tb.tunable(
        lambda x, *, config: double(x) + config.b, space=tb.Space(b=[0.0, 1.0]), heuristic={"b": 0.0}, store=False,
        name="donates", check=False,
    )  # fmt: skip
    x = X + 0
    tb.tune(f, x)
    assert not x.is_deleted()
    f(x)
    assert x.is_deleted(), "the user's own call does"


def test_the_program_that_a_candidate_is_measured_as_is_compiled_once():
    compiled = []

    @tb.tunable(space=[{"b": 1}, {"b": 2}], store=False, name="once", check=False)
    def f(x, *, config):
        compiled.append(config.b)
        return x + config.b

    jax.eval_shape(f, X)
    assert sorted(compiled[:-1]) == [1, 2], "and then the user's own trace"


def test_tunable_functions_may_call_each_other():
    seen = set()

    @tb.tunable(space=tb.Space(b=[1, 2]), heuristic={"b": 1}, store=False, name="inner", check=False)
    def inner(x, *, config):
        seen.add(config.b)
        return x * config.b

    @tb.tunable(space=tb.Space(rows=[1, 2]), store=False, name="outer", check=False)
    def outer(x, *, config):
        return jnp.concatenate([inner(part) for part in jnp.split(x, config.rows)])

    assert jax.jit(outer)(X).shape == X.shape
    assert len(keys(inner)) == 2, "for whole and for halves"
    assert len(keys(outer)) == 1
    seen.clear()
    with inner.overlay(tb.Config(b=7)):
        jax.jit(outer)(X[:4])
    assert seen == {7}, "also where candidates of the outer one are compiled"
