"""Whole programs: recording them from shapes, tuning what was found, and plain functions with hyperparameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from kernels import cpu_tuner
from test_jax_trace import python

import tunebook as tb
from tunebook.adapters import jax as tbx

SPEC = jax.ShapeDtypeStruct((8, 16), jnp.float32)
X = jnp.ones((8, 16))


def kernel(name, **options):
    def function(x, *, config):
        if config.way == "decoy":
            return jnp.sin(x) + 0.0 * lax.fori_loop(0, 50_000, lambda i, v: v * 0.999 + 0.001, x)
        return jnp.sin(x)

    options = {"heuristic": {"way": "decoy"}, "tuner": cpu_tuner(), **options}
    return tb.tunable(function, space=tb.Space(way=["decoy", "good"]), name=name, **options)


class Program:
    """A training step that calls a tunable function in every way there is."""

    def __init__(self, **options):
        self.plain, self.mapped = kernel("plain", **options), kernel("mapped", **options)
        self.scanned, self.saved = kernel("scanned", **options), kernel("saved", **options)
        inner = jax.jit(self.plain)

        def loss(x):
            x = inner(x) + jax.vmap(self.mapped)(x)
            x = lax.scan(lambda c, row: (c, self.scanned(row)), 0.0, x)[1]
            return jax.checkpoint(self.saved)(x).sum()

        self.step = jax.jit(jax.value_and_grad(loss))

    @property
    def kernels(self):
        return [self.plain, self.mapped, self.scanned, self.saved]


def names(recording):
    return sorted(call.problem.op.partition("@")[0] for call in recording)


def test_every_call_of_a_program_is_found_from_shapes_alone():
    program = Program(store=False)
    assert names(tbx.record(program.step, SPEC)) == ["mapped", "plain", "saved", "scanned"]
    assert all(k.selector.cache.size() == 0 for k in program.kernels), "nothing was tuned"


def test_a_program_that_was_traced_before_is_recorded_all_the_same():
    program = Program(store=False, policy=tb.AutotunePolicy(cache_miss_fallback="heuristics"))
    program.step(X)
    for _ in range(2):
        assert len(tbx.record(program.step, SPEC)) == 4


def test_recorded_calls_are_tuned_and_the_results_used():
    events = []
    program = Program(store=False, on_event=lambda event, **_: events.append(event))
    outcomes = tb.tune_all(tbx.record(program.step, SPEC))
    assert [outcome.status for outcome in outcomes] == ["tuned"] * 4
    assert {outcome.tuned.config.way for outcome in outcomes} == {"good"}
    events.clear()
    program.step(X)
    assert set(events) == {"cache_hit"}
    assert {o.status for o in tb.tune_all(tbx.record(program.step, SPEC))} == {"known"}


def test_a_saved_recording_is_tuned_in_another_process(tmp_path):
    tbx.record(Program(store=tmp_path / "book").step, SPEC).save(tmp_path / "calls.json")
    again = Program(store=tmp_path / "book")  # as another process would define it
    recording = tb.Recording.load(tmp_path / "calls.json")
    assert [o.status for o in tb.tune_all(recording)] == ["tuned"] * 4
    with_hits = Program(store=tmp_path / "book", policy=tb.AutotunePolicy(allow_autotune=False, allow_heuristics=False))
    assert np.isfinite(with_hits.step(X)[0])
    assert again.kernels


def test_settings_and_meshes_of_recorded_calls_are_there_again_when_they_are_tuned():
    said = python("""
import jax, jax.numpy as jnp, tunebook as tb
from jax.sharding import PartitionSpec as P, AxisType
from tunebook.adapters import jax as tbx
seen = set()
@tb.tunable(space=tb.Space(b=[1, 2]), heuristic={"b": 1}, name="k", store=False, check=False)
def k(x, *, config):
    seen.add((jax.default_matmul_precision.value, x.shape))
    return x * config.b + jax.lax.psum(x, "d")
mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
step = jax.jit(jax.shard_map(k, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
with jax.default_matmul_precision("highest"):
    found = tbx.record(step, jax.ShapeDtypeStruct((8, 16), jnp.float32))
seen.clear()
print([o.status for o in tb.tune_all(found)], seen)
known_only = tb.policy_override(k.selector, allow_autotune=False, allow_heuristics=False)
with jax.default_matmul_precision("highest"), known_only:
    print(step(jnp.ones((8, 16))).shape)
    """)
    assert said == ["['tuned'] {('highest', (2, 16))}", "(8, 16)"]


# ------------------------------------------------------------------------------------------------------ hyperparameters


def scale(x, *, way="decoy", times=1):
    slow = 0.0 * lax.fori_loop(0, 50_000, lambda i, v: v * 0.999 + 0.001, x) if way == "decoy" else 0.0
    return x * times / times + slow


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_plain_function_chooses_its_hyperparameters(wrap):
    tuned = tbx.tune(scale, hyperparams={"way": ["decoy", "good"], "times": [1]}, store=False, tuner=cpu_tuner())
    assert np.allclose(wrap(tuned)(X), X)
    assert [tuned.selector.cache.get(*p) for p in list(tuned.selector.cache.keys())] == [tb.Config(way="good", times=1)]


def test_the_defaults_are_the_heuristic():
    tuned = tbx.tune(scale, hyperparams={"way": ["good"]}, store=False, policy=tb.AutotunePolicy(allow_autotune=False))
    assert tuned.explain(X).selection.config == tb.Config(way="decoy")


def test_it_is_remembered_by_the_next_process(tmp_path):
    make = lambda **options: tbx.tune(scale, hyperparams={"way": ["decoy", "good"]}, store=tmp_path, **options)
    make()(X)
    again = make(policy=tb.AutotunePolicy(allow_autotune=False, allow_heuristics=False))
    assert again.explain(X).selection.source == "persistent"


def test_values_that_go_together_are_tried_together():
    tried = []

    def f(x, *, a, b, c=0):
        tried.append((a, b, c))
        return x

    tbx.tune(f, hyperparams={("a", "b"): [(1, 2), (3, 4)], "c": [5, 6]}, store=False)(X)
    assert set(tried) == {(1, 2, 5), (1, 2, 6), (3, 4, 5), (3, 4, 6)}


def test_hyperparameters_between_other_arguments_are_left_out_of_calls():
    def f(x, block, y=2, *, flag=False, **more):
        return x * y + (100 if flag else 0) + more.get("extra", 0)

    tuned = tbx.tune(f, hyperparams={"block": [1]}, store=False)
    assert float(tuned(X, 3, flag=True, extra=7)[0, 0]) == 110
    assert float(tuned(X, y=4)[0, 0]) == 4
    assert float(tuned(X, config=tb.Config(block=9))[0, 0]) == 2


def test_it_works_as_a_decorator_of_a_jitted_function():
    @tbx.tune(hyperparams={"n": [1, 2]}, store=False, name="decorated", check=False)
    @jax.jit
    def f(x, *, n=1):
        return x * n

    assert float(f(X)[0, 0]) in (1.0, 2.0)


@pytest.mark.parametrize(
    ("hyperparams", "message"),
    [
        ({"wya": [1]}, "takes no keyword argument 'wya'; hyperparams names some of x, way, times"),
        ({}, "it names none"),
        ({"way": ["good"], ("way", "times"): [("good", 1)]}, "it names way, way, times"),
    ],
)
def test_hyperparameters_that_are_none_are_refused_where_they_are_named(hyperparams, message):
    with pytest.raises(tb.DefinitionError, match=message):
        tbx.tune(scale, hyperparams=hyperparams)
