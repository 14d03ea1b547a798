"""Kernel, Executor and Tuner on jax arrays: own gradients, platforms, shard_map, backward timing."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from kernels import cpu_tuner
from limits import HANG_S
from test_jax_trace import python

import tunebook as tb
from tunebook.adapters import jax as tbx

X = jnp.linspace(0.1, 1.0, 12).reshape(3, 4)
W = jnp.linspace(-1.0, 1.0, 8).reshape(4, 2)


def executor(**policy):
    events = []
    chain = tb.ConfigSelectorChain(
        tb.ConfigCache(),
        tb.AutotunePolicy(**policy),
        cpu_tuner(),
        on_event=lambda event, **data: events.append((event, data)),
    )
    return tb.Executor(chain), events


class Scale(tb.Kernel):
    """x @ w * scale, with a gradient that says that it is its own: ten times the true one for w."""

    def run(self, x, w, *, cfg, scale=1.0):
        return x @ w * scale

    def heuristic_cfg(self, inv):
        return 1

    def candidate_cfgs(self, inv):
        return [1, 2]

    def fwd_with_residuals(self, x, w, *, cfg, scale=1.0):
        return x @ w * scale, (x, w)

    def vjp(self, residuals, dy, x, w, *, cfg, scale=1.0):
        x, w = residuals
        return dy @ w.T * scale, 10 * (x.T @ dy) * scale


def loss(run, kernel, **kwargs):
    return lambda x, w: (run(kernel, x, w, **kwargs) ** 2).sum()


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradients_come_from_the_kernels_own_vjp(wrap):
    run, _ = executor()
    dx, dw = wrap(jax.grad(loss(run, Scale("scale"), scale=3.0), argnums=(0, 1)))(X, W)
    ex, ew = jax.grad(lambda x, w: ((x @ w * 3.0) ** 2).sum(), argnums=(0, 1))(X, W)
    assert np.allclose(dx, ex, rtol=1e-4)
    assert np.allclose(dw, 10 * ew, rtol=1e-4)


def test_under_vmap_too():
    run, _ = executor()
    batch = jnp.stack([X, 2 * X])
    found = jax.vmap(jax.grad(loss(run, Scale("scale"))), in_axes=(0, None))(batch, W)
    expected = jax.vmap(jax.grad(lambda x, w: ((x @ w) ** 2).sum()), in_axes=(0, None))(batch, W)
    assert np.allclose(found, expected, rtol=1e-4)


class Params(NamedTuple):
    w: object
    steps: object


class Tree(tb.Kernel):
    """Takes a pytree, an array of integers, a plain value, and an array by keyword."""

    def run(self, params, index, mode, *, cfg, bias=None):
        out = params.w[index] * (2.0 if mode == "double" else 1.0)
        return {"out": out if bias is None else out + bias, "count": params.steps}

    def heuristic_cfg(self, inv):
        return 0

    def fwd_with_residuals(self, params, index, mode, *, cfg, bias=None):
        return self.run(params, index, mode, cfg=cfg, bias=bias), None

    def vjp(self, residuals, dy, params, index, mode, *, cfg, bias=None):
        dw = jnp.zeros_like(params.w).at[index].add(dy["out"] * 2.0)
        return (Params(dw, None), None, None, *([] if bias is None else [{"bias": dy["out"]}]))


def test_pytrees_integers_plain_values_and_keywords_have_the_right_gradients():
    run, _ = executor()
    params, index = Params(jnp.arange(4.0), jnp.arange(3)), jnp.array([1, 1, 3])

    def total(w, bias):
        return (run(Tree("tree"), Params(w, params.steps), index, "double", bias=bias)["out"] ** 2).sum()

    dw, db = jax.grad(total, argnums=(0, 1))(params.w, jnp.ones(3))
    ew, eb = jax.grad(lambda w, b: ((w[index] * 2 + b) ** 2).sum(), argnums=(0, 1))(params.w, jnp.ones(3))
    assert np.allclose(dw, ew)
    assert np.allclose(db, eb)


class Wrong(Scale):
    returns = ()

    def run(self, x, w, *, cfg, bias=0.0):
        return x @ w + bias

    def fwd_with_residuals(self, x, w, *, cfg, bias=0.0):
        return x @ w + bias, None

    def vjp(self, residuals, dy, x, w, *, cfg, bias=0.0):
        return self.returns


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ((None,), "returned 1 gradients for 2 positional arguments"),
        (({"x": 1.0}, None), "the gradient of argument 0 is not put together like the argument"),
    ],
)
def test_gradients_that_do_not_fit_say_so(returned, message):
    run, _ = executor()
    kernel = Wrong("wrong")
    kernel.returns = returned
    argument = {"y": X} if isinstance(returned[0], dict) else X
    kernel.run = lambda x, w, *, cfg: jnp.sum(W)
    kernel.fwd_with_residuals = lambda x, w, *, cfg: (jnp.sum(W), None)
    with pytest.raises(tb.DefinitionError, match=message):
        jax.grad(lambda x: run(kernel, x, W, cfg=1))(argument)


def test_none_is_a_zero_gradient():
    run, _ = executor()
    kernel = Wrong("none")
    kernel.returns = (None, None)
    assert not np.any(jax.grad(lambda x: run(kernel, x, W).sum())(X))


def test_a_keyword_that_is_differentiated_needs_its_gradient():
    run, _ = executor()
    kernel = Wrong("keyword")
    kernel.returns = (None, None)
    bias = jnp.ones((3, 2))
    assert not np.any(jax.grad(lambda x: run(kernel, x, W, bias=bias).sum())(X)), "not differentiated, not needed"
    with pytest.raises(tb.DefinitionError, match="returned no gradient for 'bias', which is differentiated"):
        jax.grad(lambda b: run(kernel, X, W, bias=b).sum())(bias)


def test_an_output_that_nothing_depends_on_has_zeros_for_its_gradient():
    class Two(Scale):
        def run(self, x, w, *, cfg):
            return x @ w, x + 1

        def fwd_with_residuals(self, x, w, *, cfg):
            return (x @ w, x + 1), None

        def vjp(self, residuals, dy, x, w, *, cfg):
            return dy[0] @ w.T + dy[1], x.T @ dy[0]

    run, _ = executor()
    found = jax.grad(lambda x: run(Two("two"), x, W)[0].sum())(X)
    assert np.allclose(found, jax.grad(lambda x: (x @ W).sum())(X))


def test_without_a_vjp_jax_differentiates_the_run_itself():
    class Plain(tb.Kernel):
        def run(self, x, *, cfg):
            return x**cfg

        def heuristic_cfg(self, inv):
            return 3

    run, _ = executor()
    assert np.allclose(jax.grad(lambda x: run(Plain("plain"), x).sum())(X), 3 * X**2, rtol=1e-4)


def test_a_backward_pass_may_have_its_own_space_and_key():
    chosen = []

    @tb.tunable(space=tb.Space(b=[1, 2]), name="backward", store=False)
    def backward(dy, w, *, config):
        chosen.append(config.b)
        return dy @ w.T

    class Own(Scale):
        def vjp(self, residuals, dy, x, w, *, cfg, scale=1.0):
            return backward(dy, w), None

    run, _ = executor()
    found = jax.jit(jax.grad(lambda x: run(Own("own"), x, W).sum()))(X)
    assert np.allclose(found, jax.grad(lambda x: (x @ W).sum())(X))
    assert len(backward.selector.cache.keys()) == 1
    assert set(chosen) == {1, 2}


# ------------------------------------------------------------------------------------------------------ backward timing


def slow(x, times=100_000):
    return lax.fori_loop(0, times, lambda i, v: v * 0.999 + 0.001, x)


def chosen(events):
    return next(data["cfg"] for event, data in reversed(events) if event == "autotune_finish")


class BackwardDecoy(tb.Kernel):
    """One candidate is faster forward and much slower backward."""

    def run(self, x, *, cfg):
        return self.fwd_with_residuals(x, cfg=cfg)[0]

    def candidate_cfgs(self, inv):
        return ["forward", "balanced"]

    def heuristic_cfg(self, inv):
        return "forward"

    def fwd_with_residuals(self, x, *, cfg):
        out = jnp.sin(x)
        if cfg == "balanced":
            out = out + 0.0 * slow(x, 1000)
        return out, x

    def vjp(self, residuals, dy, x, *, cfg):
        return (jnp.cos(x) * dy + (0.0 * slow(x) if cfg == "forward" else 0.0),)


@pytest.mark.parametrize("where", ["eager", "jit"])
def test_validate_backward_measures_both_passes_and_forward_only_one(where):
    wrap = jax.jit if where == "jit" else (lambda f: f)
    run, events = executor(validate_backward=True)
    wrap(lambda x: run(BackwardDecoy("decoy"), x))(X)
    assert chosen(events) == "balanced"
    run, events = executor(validate_backward=True)
    with tb.forward_autotune_only():
        wrap(lambda x: run(BackwardDecoy("decoy"), x))(X)
    assert chosen(events) == "forward"
    run, events = executor()
    wrap(lambda x: run(BackwardDecoy("decoy"), x))(X)
    assert chosen(events) == "forward"


def test_a_tunable_function_is_differentiated_by_jax_for_validate_backward():
    @jax.custom_vjp
    def decoy(x):
        return jnp.sin(x)

    decoy.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: (jnp.cos(x) * dy + 0.0 * slow(x),))
    options = {"space": tb.Space(way=["decoy", "good"]), "heuristic": {"way": "decoy"}, "store": False}
    options["tuner"] = cpu_tuner()

    def make(**policy):
        return tb.tunable(
            lambda x, *, config: (
                decoy(x) if config.way == "decoy" else jnp.sin(x) + 0.0 * slow(x, 1000)
            ),
            name="differentiated", policy=tb.AutotunePolicy(**policy), **options,
        )  # fmt: skip

    assert tb.tune(make(), X).config.way == "decoy"
    assert tb.tune(make(validate_backward=True), X).config.way == "good"


class BackwardOfThree(BackwardDecoy):
    """One candidate is the fastest forward, one backward, and one on the whole."""

    def candidate_cfgs(self, inv):
        return ["forward", "backward", "both"]

    def fwd_with_residuals(self, x, *, cfg):
        return jnp.sin(x) + 0.0 * slow(x, {"forward": 0, "both": 10_000, "backward": 100_000}[cfg]), x

    def vjp(self, residuals, dy, x, *, cfg):
        return (jnp.cos(x) * dy + 0.0 * slow(x + dy, {"forward": 100_000, "both": 10_000, "backward": 0}[cfg]),)


@pytest.mark.parametrize("where", [lambda f: f, jax.jit, jax.vmap], ids=["eager", "jit", "vmap"])
def test_forward_backward_and_both_are_objectives(where):
    blocks = {"forward": tb.forward_autotune_only, "backward": tbx.backward_autotune_only, "both": nullcontext}
    for best, block in blocks.items():
        run, events = executor(validate_backward=True)
        with block():
            where(lambda x, run=run: run(BackwardOfThree("three"), x))(X)
        assert chosen(events) == best


def test_times_of_the_backward_pass_are_not_compared_with_others():
    f = tb.tunable(
        lambda x, *, config: jnp.sin(x) * config.b, space=tb.Space(b=[1.0, 2.0]), name="passes", store=False,
        check=False, policy=tb.AutotunePolicy(validate_backward=True),
    )  # fmt: skip
    modes = []
    for block in (tb.forward_autotune_only, tbx.backward_autotune_only, nullcontext):
        with block():
            modes.append({m.policy.rpartition("/")[2] for m in tb.tune(f, X).measurements})
    assert modes == [{"forward"}, {"backward"}, {"forward+backward"}]


def test_the_backward_pass_does_not_repeat_the_forward_pass():
    from tunebook.adapters._jax.kernel import backward_alone

    program, given = backward_alone(lambda x, n: [jnp.exp(x) * n], [X, jnp.int32(2)])
    (gradient,) = program(*given)
    assert np.allclose(gradient, (jnp.exp(X) * 2) ** 2)
    primitives = {equation.primitive.name for equation in jax.make_jaxpr(program)(*given).eqns}
    assert "exp" not in primitives


def test_each_candidate_is_traced_once_and_equal_programs_are_compiled_once():
    traced, compiled = [], []

    class Alike(BackwardDecoy):
        def fwd_with_residuals(self, x, *, cfg):
            traced.append(cfg)
            return x * 2, ()

        def vjp(self, residuals, dy, x, *, cfg):
            return (dy * 2,)

    def note(event, seconds, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    run, _ = executor(validate_backward=True)
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        run.choose_config(Alike("alike"), X)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert sorted(traced) == ["balanced", "forward"]
    assert len(compiled) == 1


def test_a_function_without_a_gradient_is_measured_forward():
    f = tb.tunable(
        lambda x, *, config: x + config.b, space=tb.Space(b=[1, 2]), name="integers", store=False, check=False,
        policy=tb.AutotunePolicy(validate_backward=True),
    )  # fmt: skip
    assert {m.policy.rpartition("/")[2] for m in tb.tune(f, jnp.arange(4)).measurements} == {"forward"}


# -------------------------------------------------------------------------------------------------- Tuner and Executor


def test_measure_compiles_the_function_and_runs_it_on_real_arrays():
    seen = []

    def function(x, mode, *, scale):
        seen.append((type(x).__name__, mode, scale))
        return x * scale

    seconds = []
    jax.jit(lambda x: seconds.append(tb.Tuner().measure(function, x, "mode", scale=2)) or x)(X)
    assert 0 < seconds[0] < HANG_S
    assert seen == [("DynamicJaxprTracer", "mode", 2)], "traced once, and not in the user's trace"


def test_measure_of_a_function_that_cannot_be_traced_times_it_as_it_is():
    assert tb.Tuner().measure(lambda x: float(x.sum()), X) > 0


def test_autotune_inside_a_trace_measures_runs():
    def make(way):
        return lambda x: jnp.sin(x) + 0.0 * slow(x) if way == "decoy" else jnp.sin(x + 0.0 + 0.0)

    chosen = []
    program = lambda x: (chosen.append(cpu_tuner().autotune(make, (x,), {}, ["decoy", "good"])), x)[1]
    assert str(jax.make_jaxpr(program)(X)) == str(jax.make_jaxpr(lambda x: x)(X))
    assert chosen == ["good"]


@pytest.mark.parametrize("name", ["cpu", "gpu", "tpu"])
def test_platform_variants_are_used_in_a_trace(name):
    if jax.default_backend() != name:
        pytest.skip(f"there is no {name} here")

    class PerPlatform(tb.Kernel):
        def run(self, x, *, cfg):
            raise AssertionError("the variant for this platform should run")

        def run_here(self, x, *, cfg):
            return x * cfg

        def heuristic_here(self, inv):
            return 5

    setattr(PerPlatform, f"run_{name}", PerPlatform.run_here)
    setattr(PerPlatform, f"heuristic_cfg_{name}", PerPlatform.heuristic_here)
    run, _ = executor()
    assert np.allclose(jax.jit(lambda x: run(PerPlatform("p"), x))(X), 5 * X)


def test_compile_chooses_once_and_compiles():
    traces = []

    class Counts(Scale):
        def run(self, x, w, *, cfg, scale=1.0):
            traces.append(type(x).__name__)
            return x @ w * scale

    run, events = executor(cache_miss_fallback="heuristics")
    compiled = run.compile(Counts("counts"), X, W, scale=2.0)
    for _ in range(3):
        assert np.allclose(compiled(X, W, scale=2.0), X @ W * 2)
    assert (traces, len(events)) == (["DynamicJaxprTracer"], 1)
    assert np.allclose(compiled(X, W, scale=3.0), X @ W * 3)


def test_shard_map_runs_tunes_and_keys_by_mesh_and_specs():
    said = python("""
import jax, jax.numpy as jnp, json, tunebook as tb
from kernels import cpu_tuner
from jax.sharding import PartitionSpec as P, AxisType

class Total(tb.Kernel):
    def run(self, x, *, cfg):
        raise AssertionError("run_shard_map should run")
    def run_shard_map(self, x, *, cfg):
        local = x.sum(keepdims=True)
        if cfg == "decoy":
            local += 0.0 * jax.lax.fori_loop(0, 50_000, lambda i, v: v * 0.999 + 0.001, local)
        return jax.lax.psum(local, "d")
    def candidate_cfgs(self, inv):
        return ["decoy", "good"]

x = jnp.arange(16.0)
chain = tb.ConfigSelectorChain(tb.ConfigCache(), tuner=cpu_tuner())
run = tb.Executor(chain)
for size in (8, 4):
    mesh = jax.make_mesh((size,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])
    for wrap in (lambda f: f, jax.jit):
        out = wrap(lambda x: run(Total("t"), x, method="shard_map", mesh=mesh, in_specs=(P("d"),), out_specs=P()))(x)
        print(float(out[0]))
print([chain.cache.get(*p) for p in chain.cache.keys()])
    """)
    assert said == ["120.0"] * 4 + ["['good', 'good']"]


RECORDED = """
import sys, jax, jax.numpy as jnp, tunebook as tb
from kernels import cpu_tuner
from jax.sharding import PartitionSpec as P, AxisType

class Total(tb.Kernel):
    def run(self, x, *, cfg):
        raise AssertionError("run_shard_map should run")
    def run_shard_map(self, x, *, cfg):
        local = x.sum(keepdims=True)
        if cfg == "decoy":
            local += 0.0 * jax.lax.fori_loop(0, 50_000, lambda i, v: v * 0.999 + 0.001, local)
        return jax.lax.psum(local, "d")
    def candidate_cfgs(self, inv):
        return ["decoy", "good"]

chain = tb.ConfigSelectorChain(tb.ConfigCache(), tuner=cpu_tuner())
run, kernel = tb.Executor(chain), Total("recorded")
def program(size):
    mesh = jax.make_mesh((size,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])
    return run(kernel, jnp.arange(16.0), method="shard_map", mesh=mesh, in_specs=(P("d"),), out_specs=P())
"""


def test_recorded_calls_on_a_mesh_are_tuned_on_one_and_found_again():
    said = python(RECORDED + """
with tb.record() as problems:
    for size in (4, 2):
        program(size)
print(sorted(outcome.status for outcome in tb.tune_all(problems, selector=chain)))
with tb.policy_override(chain, allow_autotune=False, allow_heuristics=False):
    print([float(program(size)[0]) for size in (4, 2)])
print([chain.cache.get(*p) for p in chain.cache.keys()])
    """, devices=4)  # fmt: skip
    assert said == ["['tuned', 'tuned']", "[120.0, 120.0]", "['good', 'good']"]


def test_a_recording_of_calls_on_a_mesh_is_written_and_read(tmp_path):
    path = str(tmp_path / "calls.json")
    python(RECORDED + """
with tb.record() as problems:
    program(4)
problems.save(sys.argv[1])
    """, path, devices=4)  # fmt: skip
    tuning = (
        RECORDED
        + """
outcomes = tb.tune_all(tb.Recording.load(sys.argv[1]), selector=chain)
print([outcome.status for outcome in outcomes], [chain.cache.get(*p) for p in chain.cache.keys()])
if outcomes[0].status == "tuned":
    with tb.policy_override(chain, allow_autotune=False, allow_heuristics=False):
        print(float(program(4)[0]))
    """
    )
    assert python(tuning, path, devices=8) == ["['tuned'] ['good']", "120.0"]
    assert python(tuning, path, devices=2) == ["['failed'] []"], "there are not enough devices"


# --------------------------------------------------------------------------------- functions that jax cannot transform


def compiled(x=X):
    return jax.jit(lambda x: x * 2).lower(x).compile()


def refuse_tracers(x):
    if isinstance(x, jax.core.Tracer):
        raise RuntimeError("give me numbers")  # noqa: TRY004 - of any class
    return x * 2


UNTRACEABLE = {
    "precompiled": compiled(),
    "refuses tracers": refuse_tracers,
    "looks at values": lambda x: x * int(x.sum()),
}


def calls_of(function):
    """Return the function with a count of its calls on tracers, and on arrays that exist."""
    seen = {"traced": 0, "run": 0}

    def counted(x):
        seen["traced" if isinstance(x, jax.core.Tracer) else "run"] += 1
        return function(x)

    return counted, seen


@pytest.mark.parametrize("tagged", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", UNTRACEABLE)
def test_measure_times_a_function_that_cannot_be_transformed_as_it_is(name, tagged):
    function, seen = calls_of(UNTRACEABLE[name])
    function._ejk_validate_backward = tagged
    assert tb.Tuner(warmup=1, iters=3).measure(function, X) > 0
    assert seen["run"] >= 4, "the warm-up and three timed runs"


def test_measure_raises_the_functions_own_error():
    with pytest.raises(ZeroDivisionError, match="mine"):
        tb.Tuner().measure(lambda x: (_ for _ in ()).throw(ZeroDivisionError("mine")), X)


@pytest.mark.parametrize(("tagged", "block", "passes"), [(False, False, 0), (True, False, 1), (True, True, 0)])
def test_measure_differentiates_a_function_that_asks_for_it(tagged, block, passes):
    backward = []
    f = jax.custom_vjp(lambda x: x * 2)
    f.defvjp(lambda x: (x * 2, None), lambda _, dy: (backward.append(1) or dy * 2,))

    def function(x):
        return f(x)

    function._ejk_validate_backward = tagged
    with tb.forward_autotune_only() if block else nullcontext():
        tb.Tuner().measure(function, X)
    assert bool(backward) == bool(passes)


@pytest.mark.parametrize("tagged", [False, True])
def test_autotune_differentiates_functions_that_ask_for_it(tagged):
    backward = []

    def make_fn(_config):
        f = jax.custom_vjp(lambda x: x * 2)
        f.defvjp(lambda x: (x * 2, None), lambda _, dy: (backward.append(1) or dy * 2,))
        f._ejk_validate_backward = tagged
        return f

    assert tb.Tuner().autotune(make_fn, (X,), {}, [1, 2]) in {1, 2}
    assert bool(backward) == tagged


def test_measure_leaves_integers_out_of_the_gradient():
    def function(x, i):
        return x * i

    function._ejk_validate_backward = True
    assert tb.Tuner().measure(function, X, jnp.arange(4)) > 0
    assert tb.Tuner().measure(function, jnp.arange(4), jnp.arange(4)) > 0


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", UNTRACEABLE)
def test_candidates_that_cannot_be_transformed_are_tuned_all_the_same(name, backward):
    class Untraceable(tb.Kernel):
        def run(self, x, *, cfg):
            return UNTRACEABLE[name](x)

        def heuristic_cfg(self, inv):
            return 1

        def candidate_cfgs(self, inv):
            return [1, 2]

    run, events = executor(validate_backward=backward)
    run(Untraceable("untraceable"), X)
    finished = [data for event, data in events if event == "autotune_finish"]
    assert [(data["cfg"] in {1, 2}, data.get("error")) for data in finished] == [(True, None)]


class GradientInTheHeuristicAlone(tb.Kernel):
    """Its candidates run on the host, where jax finds no gradient; it wants no other measurement."""

    def run(self, x, *, cfg):
        if cfg == 0:
            return x * 2
        return jax.pure_callback(lambda x: np.asarray(x) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def heuristic_cfg(self, inv):
        return 0

    def candidate_cfgs(self, inv):
        return [1, 2]

    def measures_without_gradient(self):
        return False


@pytest.mark.parametrize("around", [jax.grad, lambda f: f], ids=["grad", "eager"])
def test_that_candidates_have_no_gradient_is_found_once_in_a_trace_too(around, monkeypatch):
    run, _ = executor(validate_backward=True)
    call = around(lambda x: run(GradientInTheHeuristicAlone("host"), x).sum())
    with pytest.warns(tb.TunebookWarning, match="host@v0 is not tuned: .*no gradient"):
        call(X)
    call(X)
    monkeypatch.setattr(tb.ConfigSelectorChain, "select", None)  # asking the tiers again would raise
    call(X)
