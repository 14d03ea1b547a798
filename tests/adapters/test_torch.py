"""Tunable functions on torch's tensors: keys, tuning, gradients, torch.compile and operators of torch's own."""

from __future__ import annotations

import gc
import importlib
import math
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import HANG_S

import tunebook as tb
from tunebook._arrays.describe import describe, timer_for
from tunebook._arrays.library import ArraySpec
from tunebook._arrays.made_up import materialise
from tunebook._base.errors import DefinitionError, Unsupported
from tunebook._kernel.output_check import Comparison, difference
from tunebook._keys.call_key import fast_key_of
from tunebook._measure.argument_restore import Restorer

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'tunebook[torch]'")

from tunebook.adapters.torch import CudaTimer, custom_op  # noqa: E402 - after the skip

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch could use")


def rows(x, y, scale=1.0, *, config):
    """Multiply in blocks of rows."""
    return torch.cat([part @ y for part in x.split(config.rows)]) * scale


def multiply(x, y, scale=1.0):
    return x @ y * scale


def multiplying(**options):
    options = {"space": tb.Space(rows=[4, 8, 16]), "heuristic": {"rows": 4}, "store": False, **options}
    return tb.tunable(rows, name="rows", **options)


def operands(n=16, **options):
    torch.manual_seed(0)
    return torch.randn(n, n, **options), torch.randn(n, n)


# -------------------------------------------------------------------------------------------------------------- keys


def kinds():
    x = torch.ones(8, 8)
    return {
        "plain": x,
        "transposed": x.t(),
        "with gaps": torch.ones(8, 16)[:, ::2],
        "of rows with a pitch": torch.ones(8, 16)[:, :8],
        "broadcast": torch.ones(8).expand(8, 8),
        "of another dtype": x.to(torch.bfloat16),
        "of another shape": torch.ones(64),
        "with a gradient": torch.ones(8, 8, requires_grad=True),
        "sparse": torch.eye(8).to_sparse(),
        "on no device": torch.ones(8, 8, device="meta"),
    }


def test_calls_that_a_kernel_can_tell_apart_have_different_keys():
    kernel = multiplying()
    problems = {name: kernel.problem(x, x) for name, x in kinds().items()}
    assert len(set(problems.values())) == len(problems)
    assert kernel.problem(torch.ones(8, 8), torch.ones(8, 8)) == problems["plain"]
    assert problems["plain"].device == tb.device_fingerprint()


def test_a_gradient_counts_only_where_it_is_asked_for():
    kernel = multiplying()
    plain, learned = torch.ones(8, 8), torch.nn.Parameter(torch.ones(8, 8))
    assert kernel.problem(learned, plain) != kernel.problem(plain, plain) != kernel.problem(plain, learned)
    with torch.no_grad():
        assert kernel.problem(learned, plain) == kernel.problem(plain, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_part_of_the_key_with_its_dtype(dtype):
    kernel = multiplying()
    outside = kernel.problem(*operands())
    with torch.autocast("cpu", dtype):
        inside = kernel.problem(*operands())
    assert str(dtype) in inside.call_key
    assert inside != outside == kernel.problem(*operands())


def test_the_precision_of_matrix_products_is_part_of_the_key():
    kernel = multiplying()
    before = kernel.problem(*operands())
    torch.set_float32_matmul_precision("medium")
    try:
        assert kernel.problem(*operands()) != before
    finally:
        torch.set_float32_matmul_precision("highest")
    assert kernel.problem(*operands()) == before


def test_hot_calls_find_the_answer_of_their_own_kind():
    def run(x, *, config):
        return config.n

    kernel = tb.tunable(run, space=tb.Space(n=[0]), name="hot", store=False)
    tensors = [x for name, x in kinds().items() if name != "on no device"]
    for n, x in enumerate(tensors):
        kernel.selector.cache.put(*kernel.problem(x), tb.Config(n=n))
    for _ in range(4):
        assert [kernel(x) for x in tensors] == list(range(len(tensors)))


def test_hot_calls_notice_gradients_autocast_and_precision():
    kernel = tb.tunable(lambda x, *, config: config.n, space=tb.Space(n=[0]), name="hot", store=False)
    x = torch.nn.Parameter(torch.ones(4, 4))

    def answers(number):
        if number is not None:
            kernel.selector.cache.put(*kernel.problem(x), tb.Config(n=number))
        return [kernel(x) for _ in range(3)]

    blocks = [nullcontext, torch.no_grad]
    blocks += [lambda dtype=dtype: torch.autocast("cpu", dtype) for dtype in (torch.bfloat16, torch.float16)]
    for number in (0, None):
        for n, block in enumerate(blocks):
            with block():
                assert set(answers(None if number is None else n)) == {n}
    torch.set_float32_matmul_precision("high")
    try:
        assert set(answers(9)) == {9}
    finally:
        torch.set_float32_matmul_precision("highest")
    assert set(answers(None)) == {0}


@given(st.permutations(sorted(kinds())))
@settings(max_examples=20, deadline=None)
def test_leaves_are_equal_only_if_keys_are(names):
    kernel = multiplying()
    one, two = (kinds()[name] for name in names[:2])
    assert fast_key_of(one) != fast_key_of(two)
    assert kernel.problem(one, one) != kernel.problem(two, two)
    assert fast_key_of(one) == fast_key_of(kinds()[names[0]])


# ------------------------------------------------------------------------------------------------------------ tuning


def test_a_call_is_tuned_once_and_gives_the_right_result():
    events = []
    kernel = multiplying(reference=multiply, on_event=lambda event, **_: events.append(event))
    x, y = operands()
    for _ in range(3):
        assert torch.allclose(kernel(x, y), x @ y, atol=1e-5)
    assert events.count("autotune_finish") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float64], ids=str)
def test_wrong_results_are_found_in_every_dtype(dtype):
    @tb.tunable(space=tb.Space(error=[0, 1]), reference=lambda x: x * 2, store=False)
    def double(x, *, config):
        return x * (2 + config.error)

    tuned = tb.tune(double, torch.ones(8, dtype=dtype, requires_grad=True))
    assert tuned.config.error == 0
    assert [m.failure.kind for m in tuned.measurements if m.failure is not None] == ["wrong-result"]


def test_rounding_that_its_dtype_explains_is_not_wrong():
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    assert difference(x @ x, (x.double() @ x.double()).to(torch.bfloat16)) is None
    assert difference((x @ x).float(), x.double() @ x.double()) is not None


@given(
    st.lists(
        st.sampled_from([0.0, 1.0, -1.0, 1.0005, 1.002, 1.01, 1.1, 1e30, math.inf, -math.inf, math.nan]), min_size=2
    ),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.float16]),
)
@settings(max_examples=200, deadline=None)
def test_torch_compares_tensors_like_the_check_on_the_host(values, dtype):
    half = len(values) // 2
    one, two = (torch.tensor(part, dtype=dtype) for part in (values[:half], values[half : 2 * half]))
    tolerance = {"float32": 1e-3, "float64": 1e-3, "float16": 1e-3, "bfloat16": 1e-3}
    by_numpy = Comparison(tolerance)(one.double().numpy(), two.double().numpy())
    by_torch = Comparison(tolerance)(one, two)
    assert (by_torch is None) == (by_numpy is None)


def test_tensors_that_runs_write_to_are_put_back():
    @tb.tunable(space=tb.Space(n=[1, 2, 3]), heuristic={"n": 1}, store=False)
    def double(x, *, config):
        x.mul_(2)

    x = torch.ones(100)
    double(x)
    assert (x == 2).all()
    double(x)
    assert (x == 4).all()


def test_a_parameter_that_is_updated_in_place_is_updated_once():
    @tb.tunable(space=tb.Space(n=[1, 2, 3]), heuristic={"n": 1}, mutates=("weight",), store=False)
    def step(weight, gradient, *, config):
        with torch.no_grad():
            weight.sub_(gradient)

    weight = torch.nn.Parameter(torch.ones(8))
    step(weight, torch.full((8,), 0.25))
    assert (weight == 0.75).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64], ids=str)
@pytest.mark.parametrize("part", [np.s_[:], np.s_[2:4], np.s_[:, ::2], np.s_[1:, 1:3], np.s_[0, 0]], ids=str)
def test_views_are_copied_compared_and_put_back(dtype, part):
    whole = (torch.arange(24).reshape(4, 6) % 2).to(dtype)
    before, view = whole.clone(), whole[part]
    restorer = Restorer({"deep": [view]})
    restorer.notice()
    assert not restorer.has_changes
    view.copy_((view == 0).to(dtype))
    restorer.notice()
    assert restorer.has_changes
    assert torch.equal(whole, before)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), 2.0))

    @tb.tunable(space=tb.Space(n=[1, 2]), heuristic={"n": 1}, store=False, ignore=("self",))
    def scale(self, x, *, config):
        return x * self.weight

    def forward(self, x):
        return self.scale(x) + 1


def test_a_tunable_method_is_compiled_without_a_graph_break():
    layer, x = Layer(), torch.ones(3)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    try:
        found = compiled(x)
    except torch._dynamo.exc.InternalTorchDynamoError as error:
        if "is not a constant" not in str(error):
            raise
        pytest.skip("the compiler of this torch cannot take a module for a constant")
    assert found.tolist() == layer(x).tolist() == [3, 3, 3]
    assert layer.scale.explain(x).selection.source == "memory"


class Tagged(torch.Tensor):
    """A tensor that adds something to every operator."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapper(torch.Tensor):
    """A tensor whose values are in another tensor, as quantised tensors are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        out = func(*(x.inner if isinstance(x, Wrapper) else x for x in args), **(kwargs or {}))
        return Wrapper(out) if isinstance(out, torch.Tensor) else out


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.as_subclass(Tagged),
        Wrapper,
        torch.nn.Parameter,
        lambda x: x[:1].expand(4, 3),
        lambda x: x[:, ::2],
    ],
    ids=["a subclass", "a wrapper", "a parameter", "an expanded view", "a strided view"],
)
def test_a_tensor_of_any_class_is_put_back(make):
    base = torch.zeros(4, 3)
    x = make(base)
    restorer = Restorer([x])
    base.add_(1)
    assert restorer.written()
    restorer.notice()
    assert restorer.has_changes
    assert (base[0, ::2] == 0).all()


def test_a_nan_counts_as_unchanged_and_minus_zero_as_a_change():
    x = torch.tensor([float("nan"), 0.0])
    restorer = Restorer((x,))
    restorer.notice()
    assert not restorer.has_changes
    x[1] = -0.0
    restorer.notice()
    assert restorer.has_changes
    assert not x[1].signbit()


def test_conjugated_views_inference_tensors_and_broadcast_tensors_work():
    with torch.inference_mode():
        inferred = torch.ones(4)
    conjugated = torch.ones(4, dtype=torch.complex64).conj()
    restorer = Restorer((inferred, conjugated, torch.ones(1).expand(4), torch.eye(3).to_sparse()), None)
    with torch.inference_mode():
        inferred.add_(1)
    restorer.notice()
    assert (inferred == 1).all()


def test_candidates_that_are_compiled_run_in_this_process_which_torchs_threads_are_in():
    processes = []
    kernel = tb.tunable(
        lambda x, *, config: processes.append(os.getpid()),
        space=tb.Space(n=[1, 2]),
        name="pid",
        policy=tb.AutotunePolicy(isolate="auto"),
        compile=id,
        store=False,
    )
    kernel(torch.ones(4))
    assert set(processes) == {os.getpid()}


def test_tuning_leaves_nothing_of_its_runs_alive():
    kernel = multiplying()
    x, y = operands(23, requires_grad=True)
    kernel(x, y)
    gc.collect()
    alive = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.shape == (23, 23)]
    assert {id(o) for o in alive} == {id(x), id(y)}


# --------------------------------------------------------------------------------------------------------- gradients


def test_gradients_flow_through_a_tuned_call():
    kernel = multiplying()
    x, y = operands(requires_grad=True)
    kernel(x, y, 2.0).sum().backward()
    assert torch.allclose(x.grad, 2 * y.sum(1).expand(16, 16), atol=1e-5)


def test_the_backward_pass_is_measured_if_the_policy_says_so():
    policy = tb.AutotunePolicy(validate_backward=True)
    passes = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            passes.append(dy.shape)
            return dy * 2

    @tb.tunable(space=tb.Space(n=[1, 2]), policy=policy, store=False)
    def kernel(x, *, config):
        return Watched.apply(x)

    tuned = tb.tune(kernel, torch.ones(4, requires_grad=True))
    assert {m.policy.rpartition("/")[2] for m in tuned.measurements} == {"forward+backward"}
    assert len(passes) >= 4
    assert {m.policy.rpartition("/")[2] for m in tb.tune(kernel, torch.ones(4)).measurements} == {"forward"}


class Squared(tb.Kernel):
    """A kernel with a backward pass of its own, which is wrong by a factor so that it can be told."""

    def run(self, x, bias, *, cfg):
        return x * x + bias

    def candidate_cfgs(self, inv):
        return [1, 2]

    def fwd_with_residuals(self, x, bias, *, cfg):
        return self.run(x, bias, cfg=cfg), (x,)

    def vjp(self, residuals, dy, x, bias, *, cfg):
        return 10 * dy * residuals[0], None


def executor():
    return tb.Executor(tb.ConfigSelectorChain(tb.ConfigCache(), tuner=tb.Tuner()))


def test_a_kernel_is_differentiated_by_its_own_backward_pass():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    executor()(Squared("squared"), x, 3.0).sum().backward()
    assert x.grad.tolist() == [10.0, 20.0]
    assert executor()(Squared("squared"), x.detach(), 3.0).tolist() == [4.0, 7.0]


def test_a_backward_pass_with_too_few_gradients_says_so():
    class Wrong(Squared):
        def vjp(self, residuals, dy, x, bias, *, cfg):
            return (dy,)

    out = executor()(Wrong("wrong"), torch.ones(2, requires_grad=True), 3.0)
    with pytest.raises(DefinitionError, match=r"the vjp of 'wrong' returned 1 gradients for 2 positional arguments"):
        out.sum().backward()


# ------------------------------------------------------------------------------------------------------ made-up ones


@pytest.mark.parametrize("layout", ["C", "F", "P102", "S012g", "S01*2", "S012"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8", "bool", "complex64"])
def test_a_tensor_that_is_made_up_has_the_description_it_was_made_from(dtype, layout):
    spec = ArraySpec("torch", dtype, (3, 4, 5), layout, "cpu")
    made = materialise(spec, 1)
    assert describe(made) == spec
    assert difference(made, materialise(spec, 1)) is None
    assert dtype == "bool" or bool((made.to(torch.complex64) != 0).all())


def test_a_gradient_is_asked_of_a_made_up_tensor_too():
    spec = ArraySpec("torch", "float32", (3, 4), "C", "cpu", grad=True)
    assert describe(materialise(spec)) == spec
    assert materialise(spec).is_leaf


@pytest.mark.parametrize("spec", [("float32", "sparse_csr"), ("quint9", "C"), ("float32", "S-01")])
def test_a_tensor_that_cannot_be_made_up_is_an_error(spec):
    dtype, layout = spec
    with pytest.raises(Unsupported, match=r"pass a live"):
        materialise(ArraySpec("torch", dtype, (3, 4), layout, "cpu"))


def test_recorded_calls_are_tuned_later_under_the_settings_of_the_call():
    kernel = multiplying()
    x, y = operands(requires_grad=True)
    with tb.record() as calls, torch.autocast("cpu", torch.bfloat16):
        kernel(x, y)
    (outcome,) = tb.tune_all(calls)
    assert outcome.status == "tuned", outcome.detail
    with torch.autocast("cpu", torch.bfloat16):
        assert kernel.explain(x, y).selection.source == "memory"


def test_a_recording_is_read_again_from_its_file(tmp_path):
    kernel = multiplying()
    with tb.record() as calls:
        kernel(*operands(requires_grad=True))
    calls.save(tmp_path / "calls.json")
    (call,) = tb.Recording.load(tmp_path / "calls.json")
    assert [spec.grad for spec in call.args[:2]] == [True, False]
    assert tb.tune_all(tb.Recording.load(tmp_path / "calls.json"))[0].status == "tuned"


def test_tuning_in_the_background_serves_the_heuristic_meanwhile():
    kernel = multiplying(policy=tb.AutotunePolicy(cache_miss_fallback="background"))
    x, y = operands(requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert kernel(x, y).dtype is torch.bfloat16
        assert tb.wait_for_background(HANG_S)
        assert kernel.explain(x, y).selection.source == "memory"


# --------------------------------------------------------------------------------------------- where nothing may run


def test_on_tensors_without_values_the_heuristic_answers_and_is_not_memoised():
    events = []
    kernel = multiplying(on_event=lambda event, **_: events.append(event))
    nowhere = torch.ones(16, 16, device="meta")
    for _ in range(3):
        assert kernel(nowhere, nowhere).shape == (16, 16)
    assert "has no values" in str(kernel.explain(nowhere, nowhere))
    assert set(events) == {"heuristics"}
    kernel(*operands())
    assert "autotune_finish" in events


def test_inside_vmap_the_heuristic_answers_and_later_calls_are_tuned():
    events = []
    kernel = multiplying(on_event=lambda event, **_: events.append(event))
    x, y = operands()
    batched = torch.func.vmap(kernel, in_dims=(0, None))(torch.stack([x, x + 1]), y)
    assert torch.allclose(batched[0], x @ y, atol=1e-5)
    assert "autotune_finish" not in events
    kernel(x, y)
    assert "autotune_finish" in events


def test_under_fake_tensors_a_call_is_tuned_on_made_up_ones():
    from torch._subclasses.fake_tensor import FakeTensorMode

    events = []
    kernel = multiplying(reference=multiply, on_event=lambda event, **_: events.append(event))
    with FakeTensorMode() as mode:
        out = kernel(*(mode.from_tensor(x) for x in operands()))
    assert type(out).__name__ == "FakeTensor"
    assert events.count("autotune_finish") == 1


def test_an_exported_program_holds_the_tuned_choice():
    events = []
    kernel = multiplying(on_event=lambda event, **_: events.append(event))

    class Layer(torch.nn.Module):
        def forward(self, x, y):
            return kernel(x, y)

    x, y = operands()
    program = torch.export.export(Layer(), (x, y))
    assert torch.allclose(program.module()(x, y), x @ y, atol=1e-5)
    assert events.count("autotune_finish") == 1


# ----------------------------------------------------------------------------------------------------- torch.compile


class Counting:
    """A backend of torch.compile that runs programs as they are, and counts them."""

    def __init__(self):
        self.programs = []

    def __call__(self, program, example):
        self.programs.append(program)
        return program


@pytest.fixture
def compiled():
    torch.compiler.reset()
    backend = Counting()
    yield lambda function: torch.compile(function, fullgraph=True, backend=backend), backend
    torch.compiler.reset()


@pytest.mark.parametrize("called_before", [False, True])
def test_a_compiled_program_holds_the_choice_as_a_constant(compiled, called_before):
    events = []
    kernel = multiplying(reference=multiply, on_event=lambda event, **_: events.append(event))
    x, y = operands()
    if called_before:
        kernel(x, y, 3.0)
    compile_, backend = compiled
    program = compile_(lambda x, y: kernel(x.relu(), y, scale=3.0) + 1)
    for _ in range(3):
        assert torch.allclose(program(x, y), x.relu() @ y * 3 + 1, atol=1e-4)
    kernel(x, y, 3.0)
    program(x, y)
    assert len(backend.programs) == 1, "compiled once, and not again because of calls elsewhere"
    assert events.count("autotune_finish") == 1
    chosen = kernel.explain(x, y, 3.0).selection.config.rows
    splits = [node for node in backend.programs[0].graph.nodes if "split" in str(node.target)]
    assert [node.args[1] for node in splits] == [chosen]


@pytest.mark.parametrize("read", ["attribute", "item", "spread"])
def test_a_configuration_is_read_in_every_way_while_it_is_compiled(compiled, read):
    def spread(x, *, rows):
        return x * rows

    ways = {
        "attribute": lambda x, config: x * config.rows,
        "item": lambda x, config: x * config["rows"],
        "spread": lambda x, config: spread(x, **config),
    }
    way = ways[read]
    if read == "spread" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
        pytest.skip("torch.compile of 2.11 does not spread a mapping that is no dict")

    def run(x, *, config):
        return way(x, config)

    kernel = tb.tunable(run, space=tb.Space(rows=[7]), name="read", store=False)
    compile_, _ = compiled
    assert (compile_(kernel)(torch.ones(3)) == 7).all()


class Pair(NamedTuple):
    left: object
    right: object


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("kind", [list, tuple, lambda parts: {"a": parts[0], "b": [parts[1]]}, lambda p: Pair(*p)])
def test_tensors_in_containers_are_compiled_too(compiled, kind, called_before):
    def flat(value):
        inside = value.values() if isinstance(value, dict) else value
        return [value] if isinstance(value, torch.Tensor) else [x for part in inside for x in flat(part)]

    @tb.tunable(space=tb.Space(n=[1, 2]), store=False)
    def total(parts, *, config):
        return sum(x * (config.n // config.n) for x in flat(parts))

    parts = kind([torch.ones(3), torch.ones(3)])
    if called_before:
        total(parts)
    compile_, _ = compiled
    assert (compile_(total)(parts) == 2).all()
    assert total.explain(parts).selection.source == "memory"


def test_a_compiled_program_takes_gradients(compiled):
    kernel = multiplying()
    x, y = operands(requires_grad=True)
    torch.compile(lambda x, y: kernel(x, y, 2.0).sum(), fullgraph=True, backend="aot_eager")(x, y).backward()
    assert torch.allclose(x.grad, 2 * y.sum(1).expand(16, 16), atol=1e-5)


def test_a_configuration_given_with_the_call_is_compiled_in(compiled):
    kernel = multiplying()
    compile_, backend = compiled
    x, y = operands()
    assert torch.allclose(compile_(lambda x, y: kernel(x, y, config={"rows": 4}))(x, y), x @ y, atol=1e-5)
    (split,) = [node for node in backend.programs[0].graph.nodes if "split" in str(node.target)]
    assert split.args[1] == 4


def test_an_overlay_around_the_compilation_is_compiled_in(compiled):
    kernel = multiplying()
    compile_, backend = compiled
    with kernel.overlay(tb.Config(rows=16)):
        compile_(kernel)(*operands())
    assert "split" in str(backend.programs[0].graph)
    assert ", 16" in str(backend.programs[0].graph)


def test_calls_are_recorded_while_they_are_compiled(compiled):
    kernel = multiplying()
    compile_, _ = compiled
    with tb.record() as calls:
        compile_(kernel)(*operands())
    assert [call.problem for call in calls] == [kernel.problem(*operands())]


def test_candidates_that_are_tried_in_calls_are_not_tried_in_a_program(compiled):
    kernel = multiplying(policy=tb.AutotunePolicy(cache_miss_fallback="incremental"))
    compile_, backend = compiled
    x, y = operands()
    for _ in range(2):
        assert torch.allclose(kernel(x, y), x @ y, atol=1e-5)
    assert torch.allclose(compile_(kernel)(x, y), x @ y, atol=1e-5)
    assert ", 4" in str(backend.programs[0].graph), "the heuristic"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # what torch's own compiler warns about
def test_a_program_compiled_to_machine_code_gives_the_right_result():
    torch.compiler.reset()
    kernel = multiplying(reference=multiply)
    x, y = operands(requires_grad=True)
    program = torch.compile(lambda x, y: kernel(x.relu(), y) + 1, fullgraph=True)
    out = program(x, y)
    out.sum().backward()
    assert torch.allclose(out, x.relu() @ y + 1, atol=1e-4)
    assert torch.allclose(x.grad, y.sum(1).expand(16, 16) * (x > 0), atol=1e-4)


# --------------------------------------------------------------------------------------------------------- operators


def annotated(x: torch.Tensor, factor: float, *, config) -> torch.Tensor:
    return x * factor * (config.n // config.n)


def scaling_op(name):
    kernel = tb.tunable(annotated, space=tb.Space(n=[1, 2]), name=name, store=False)
    return kernel, custom_op(f"tunebook_tests::{name}", kernel, fake=lambda x, factor: torch.empty_like(x))


def test_an_operator_runs_the_tuned_call_and_passes_torchs_own_checks():
    kernel, scale = scaling_op("checked")
    x = torch.randn(5)
    assert torch.equal(scale(x, 3.0), x * 3)
    assert kernel.explain(x, 3.0).selection.source == "memory"
    torch.library.opcheck(scale, (x, 3.0), test_utils=("test_schema", "test_faketensor"))


def test_a_program_holds_the_operator_which_looks_up_its_configuration(compiled):
    kernel, scale = scaling_op("whole")
    _, backend = compiled
    program = torch.compile(lambda x: scale(x, 2.0) + 1, fullgraph=True, backend=backend, dynamic=True)
    for n in (4, 6, 9):
        assert (program(torch.ones(n)) == 3).all()
        assert kernel.explain(torch.ones(n), 2.0).selection.source == "memory"
    assert len(backend.programs) == 1
    assert "tunebook_tests.whole" in str(backend.programs[0].graph)


def test_mutated_arguments_are_declared_to_torch():
    def fill(out: torch.Tensor, value: float, *, config) -> None:
        out.fill_(value)

    kernel = tb.tunable(fill, space=tb.Space(n=[1, 2]), name="fill", mutates=("out",), store=False)
    operator = custom_op("tunebook_tests::fill", kernel, fake=lambda out, value: None)
    out = torch.zeros(3)
    operator(out, 2.0)
    assert (out == 2).all()
    assert "Tensor(a0!) out" in str(operator._opoverload._schema)


def test_the_reference_makes_outputs_without_values():
    def reference(x, factor):
        return x * factor

    kernel = tb.tunable(annotated, space=tb.Space(n=[1]), name="by-reference", reference=reference, store=False)
    scale = custom_op("tunebook_tests::by_reference", kernel)
    assert scale(torch.ones(3, device="meta"), 2.0).shape == (3,)


def test_an_operator_needs_annotations_an_output_and_a_tunable_function():
    with pytest.raises(DefinitionError, match=r"needs an annotation for x, y, scale, return"):
        custom_op("tunebook_tests::bare", multiplying(reference=multiply))
    with pytest.raises(DefinitionError, match=r"fake=lambda x: torch\.empty_like\(x\)\), or give .* a reference="):
        custom_op("tunebook_tests::fakeless", multiplying())
    with pytest.raises(DefinitionError, match=r"is not tunable; decorate it"):
        custom_op("tunebook_tests::plain", multiply)


def test_the_example_tunes_compiles_and_is_right(capsys, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    example = importlib.import_module("torch_attention")
    torch.compiler.reset()
    q, k, v = example.operands(2, 40, 8)
    for config in example.space:
        assert difference(example.attention(q, k, v, config=config), example.reference(q, k, v)) is None
    example.main([(2, 40, 8)])
    printed = capsys.readouterr().out
    for shown in ("best", "default", "worst", " x ", "Why", "winner", "From now on"):
        assert shown in printed
    assert [float(line.split()[-1]) < 1e-5 for line in printed.splitlines() if "differs by" in line] == [True, True]


# ---------------------------------------------------------------------------------------------------------- the clock


def test_on_the_host_runs_are_timed_by_its_clock():
    assert timer_for(operands()) is None
    assert all(m.policy.startswith("host-clock/") for m in tb.tune(multiplying(), *operands()).measurements)


def test_on_a_gpu_runs_are_timed_by_its_events_on_the_device_of_the_tensors():
    now, devices, waits = [0.0], [], []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            assert devices[-1] == "cuda:1"
            self.at_ms = now[0]

        def query(self):
            return False

        def elapsed_time(self, end):
            return end.at_ms - self.at_ms

    def device(name):
        devices.append(name)
        return nullcontext()

    cuda = SimpleNamespace(Event=Event, device=device, synchronize=lambda: waits.append(now[0]))
    cache = SimpleNamespace(zero_=lambda: now.__setitem__(0, now[0] + 7.0))
    timer = CudaTimer("cuda:1", cuda, lambda: cache)
    assert timer.sample_s(lambda: now.__setitem__(0, now[0] + 2.0), 3) == pytest.approx(2e-3)
    timer.wait(None)
    assert waits[-1] == now[0]
    assert timer.name.startswith("device-events/cold-l2")


@gpu
def test_on_a_gpu_a_call_is_tuned_by_its_clock_and_right():
    kernel = multiplying(reference=multiply)
    x, y = (t.cuda() for t in operands(256))
    tuned = tb.tune(kernel, x, y)
    assert torch.allclose(kernel(x, y), x @ y, atol=1e-2)
    assert all(m.policy.startswith("device-events/") for m in tuned.measurements)
    assert kernel.problem(x, y).device.startswith("gpu:")
    assert kernel.problem(x, y) != kernel.problem(x.cpu(), y.cpu())


@gpu
def test_on_a_gpu_tensors_that_runs_write_to_are_put_back_also_from_the_host(monkeypatch):
    import tunebook.adapters.torch as adapter

    for free in (1 << 40, 0):
        monkeypatch.setattr(adapter, "_free_bytes", lambda _device, free=free: free)
        x = torch.ones(1000, device="cuda")
        restorer = Restorer((x,))
        x.add_(1)
        restorer.notice()
        assert restorer.has_changes
        assert (x == 1).all()


@gpu
def test_while_a_graph_is_captured_nothing_is_tuned_and_later_it_is():
    events = []
    kernel = multiplying(on_event=lambda event, **_: events.append(event))
    x, y = (t.cuda() for t in operands())
    x @ y  # what cuBLAS sets up at its first use cannot be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(x, y)
    graph.replay()
    assert torch.allclose(out, x @ y, atol=1e-2)
    assert "autotune_start" not in events
    kernel(x, y)
    assert "autotune_finish" in events


@gpu
def test_on_a_gpu_recorded_calls_are_tuned_later():
    kernel = multiplying()
    x, y = (t.cuda() for t in operands())
    with tb.record() as calls:
        kernel(x, y)
    assert tb.tune_all(calls)[0].status == "tuned"
    assert kernel.explain(x, y).selection.source == "memory"
