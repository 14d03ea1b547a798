"""What `@tunable` has, Triton kernels have: several launches together, near shapes, learnt heuristics, events."""

# ruff: noqa: N803 - constexprs are written in capitals in Triton

from __future__ import annotations

import threading

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

import triton.language as tl  # noqa: E402 - after the check that it is there
from fake_gpu import FakeGpu, installed  # noqa: E402 - as above

import tunebook as tb  # noqa: E402 - as above
from tunebook._cli import main  # noqa: E402 - as above
from tunebook.adapters.triton import autotune  # noqa: E402 - as above

pytestmark = pytest.mark.usefixtures("compiled_once")


@triton.jit
def scale(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, at < n) * 2, at < n)


CONFIGS = [triton.Config({"BLOCK": size}, num_warps=4) for size in (64, 128, 256)]


class Sizes:
    """The best block is 64 for up to 512 elements, and 256 above; 128 is second everywhere."""

    n = 0

    def __call__(self, facts):
        ranks = (64, 128, 256) if self.n <= 512 else (256, 128, 64)
        return (1 + ranks.index(facts["BLOCK"])) * 1e-5


@pytest.fixture
def gpu():
    sizes = Sizes()

    class Sized(FakeGpu):
        def _run(self, facts, arguments):
            sizes.n = arguments["n"]
            super()._run(facts, arguments)

    with installed(Sized(sizes), scale) as fake:
        yield fake


def grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def tensor(n):
    return torch.ones(n), n


def block(config):
    return None if config is None else config.kwargs["BLOCK"]


def kernel_of(**options):
    return autotune(CONFIGS, key=["n"], **options)(scale)


# ------------------------------------------------------------------------------------------------------ one for several


@pytest.mark.parametrize(("weights", "best"), [([1, 3], 256), ([3, 1], 64)])
def test_several_launches_get_the_configuration_that_is_best_on_the_whole(gpu, weights, best):
    kernel = kernel_of()
    calls = [(grid, tensor(256)), (grid, tensor(1024))]
    tuned = kernel.tune_together(calls, weights=weights)
    assert block(tuned.config.config) == best
    gpu.launches.clear()
    for fresh in (kernel, kernel_of()):
        for _, args in calls:
            fresh[grid](*args)
    assert {facts["BLOCK"] for facts in gpu.launches} == {best}


def test_a_launch_is_tuned_again_from_scratch(gpu):
    kernel = kernel_of()
    kernel.tune(*tensor(256), grid=grid)
    gpu.launches.clear()
    kernel.tune(*tensor(256), grid=grid)
    assert not gpu.launches
    assert kernel.tune(*tensor(256), grid=grid, again=True).ran == len(CONFIGS)
    assert {facts["BLOCK"] for facts in gpu.launches} == {64, 128, 256}
    with pytest.raises(tb.DefinitionError, match=r"has methods of its own for this, as \.tune"):
        tb.tune(kernel, *tensor(256), grid=grid, again=True)


def test_times_of_launches_can_be_combined_in_other_ways(gpu):
    calls = [(grid, tensor(256)), (grid, tensor(1024))]
    assert block(kernel_of().tune_together(calls, combine="max").config.config) in (64, 128, 256)
    with pytest.raises(tb.DefinitionError, match="combine='worst': choose one of"):
        kernel_of().tune_together(calls, combine="worst")


def test_launches_that_are_tuned_together_leave_their_tensors_alone(gpu):
    gpu.effect = lambda _facts, arguments: arguments["x_ptr"].mul_(2)
    tensors = [tensor(256), tensor(1024)]
    kernel_of().tune_together([(grid, tensors[0]), (grid, tensors[1], {})])
    assert all(torch.equal(x, torch.ones(n)) for x, n in tensors)


@pytest.mark.parametrize("calls", [[(grid, torch.ones(4))], [(grid, tensor(256), {}, 1)]])
def test_a_launch_in_another_form_is_an_error(gpu, calls):
    with pytest.raises(tb.DefinitionError, match="write a launch as"):
        kernel_of().tune_together(calls)


def test_launches_in_buckets_are_tuned_together_at_their_representatives(gpu):
    seen = set()
    gpu.effect = lambda _facts, arguments: seen.add((arguments["n"], len(arguments["x_ptr"])))
    tuned = kernel_of(bucket={"n": tb.pow2}).tune_together([(grid, tensor(200)), (grid, tensor(900))])
    assert seen == {(256, 256), (1024, 1024)}
    assert tuned.measurements[0].policy.endswith("/at:n=256;n=1024")


# ----------------------------------------------------------------------------------------------- answers without a run


def test_the_configuration_of_a_launch_can_be_asked_for(gpu):
    kernel = kernel_of()
    assert kernel.config_for(*tensor(256)) is None
    assert gpu.launches == []
    kernel[grid](*tensor(256))
    ran = len(gpu.launches)
    assert kernel.config_for(*tensor(256)) is CONFIGS[0]
    assert kernel.config_for(*tensor(1024)) is None
    with kernel.overlay(CONFIGS[1]):
        assert kernel.config_for(*tensor(1024)) is CONFIGS[1]
    assert kernel_of().config_for(*tensor(256)) is CONFIGS[0]  # from the book
    assert len(gpu.launches) == ran


def test_with_a_grid_the_launch_is_tuned_first_and_not_launched_for_the_caller(gpu):
    gpu.effect = lambda _facts, arguments: arguments["x_ptr"].mul_(2)
    kernel, (x, n) = kernel_of(), tensor(1024)
    assert kernel.config_for(x, n, grid=grid) is CONFIGS[2]
    assert torch.equal(x, torch.ones(n))
    ran = len(gpu.launches)
    assert kernel.config_for(x, n, grid=grid) is CONFIGS[2]
    assert len(gpu.launches) == ran


def test_a_backward_pass_in_another_thread_gets_the_configuration_of_the_forward_pass(gpu):
    kernel, said = kernel_of(), []

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.config = kernel.config_for(x, x.numel(), grid=grid)
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            again = kernel.config_for(dy.contiguous(), dy.numel(), grid=grid)
            said.append((threading.get_ident(), ctx.config, again))
            return dy

    loss = Scaled.apply(torch.ones(1024, requires_grad=True)).sum()
    ran = len(gpu.launches)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    ((there, kept, again),) = said
    assert there != threading.get_ident()
    assert kept is again is CONFIGS[2]
    assert len(gpu.launches) == ran


def test_the_only_configuration_and_one_that_the_program_wrote_are_known(gpu):
    assert autotune(CONFIGS[1:2], key=["n"])(scale).config_for(*tensor(64)) is CONFIGS[1]
    kernel = kernel_of()
    kernel.cache[64, "torch.float32"] = CONFIGS[2]
    assert kernel.config_for(*tensor(64)) is CONFIGS[2]


def test_the_heuristic_is_the_answer_only_where_nothing_is_tuned(gpu):
    policy = tb.AutotunePolicy(cache_miss_fallback="heuristics")
    assert kernel_of(heuristic=CONFIGS[2]).config_for(*tensor(64)) is None
    assert kernel_of(heuristic=CONFIGS[2], policy=policy).config_for(*tensor(64)) is CONFIGS[2]


def test_a_near_shape_answers_where_the_policy_says_so(gpu):
    kernel = kernel_of()
    for n in (256, 1024):
        kernel[grid](*tensor(n))
    gpu.launches.clear()
    near = kernel_of(policy=tb.AutotunePolicy(cache_miss_fallback="nearest"))
    for n, best in ((200, 64), (2048, 256)):
        near[grid](*tensor(n))
        assert block(near.best_config) == best
        assert "from the nearest tuned problem" in str(near.explain(*tensor(n)))
    assert len(gpu.launches) == 2


def test_a_model_of_times_answers_or_leaves_few_to_try():
    many = [triton.Config({"BLOCK": 2**power}, num_warps=warps) for power in range(4, 10) for warps in (1, 2, 4)]
    predicting = lambda **limit: autotune(
        many, key=["n"], policy=tb.AutotunePolicy(cache_miss_fallback="predict", **limit)
    )(scale)
    waves = lambda facts: -(-facts["grid"][0] // 4) * (1 + facts["BLOCK"] / 50) * (1 + facts["num_warps"] / 10)
    with installed(FakeGpu(lambda facts: 1e-5 * waves(facts)), scale) as gpu:
        kernel = autotune(many, key=["n"])(scale)
        for n in (101, 901):
            kernel.tune(*tensor(n), grid=grid)
        gpu.launches.clear()
        predicting()[grid](*tensor(501))  # two sizes are too few for a bound
        assert 8 <= len({(launch["BLOCK"], launch["num_warps"]) for launch in gpu.launches}) <= 16 < len(many)
        for n in range(111, 900, 20):
            kernel.tune(*tensor(n), grid=grid)
        gpu.launches.clear()
        sure = predicting(regret_limit=1.0)
        sure[grid](*tensor(445))
        assert len(gpu.launches) == 1
        assert "in 95% of such calls; learnt from 43 tuned problems" in str(sure.explain(*tensor(445)))


# ---------------------------------------------------------------------------------------------------- learnt heuristics


@pytest.mark.parametrize("bucket", [None, {"n": tb.pow2}])
def test_a_heuristic_learnt_from_the_book_is_a_heuristic_of_the_kernel(gpu, bucket, tmp_path):
    kernel = kernel_of(bucket=bucket)
    for n in (64, 128, 256, 512, 1024, 2048, 4096):
        kernel[grid](*tensor(n))
    file = tmp_path / "learnt.py"
    assert main(["fit", kernel.kernel.op_id_v, "--output", str(file)]) == 0
    learnt = {}
    exec(file.read_text(), learnt)
    gpu.launches.clear()
    policy = tb.AutotunePolicy(cache_miss_fallback="heuristics")
    heuristic = kernel_of(heuristic=learnt["heuristic"], policy=policy, store=False)
    for n, best in ((100, 64), (3000, 256)):
        assert heuristic.config_for(*tensor(n)) is next(c for c in CONFIGS if block(c) == best)


@pytest.mark.parametrize(
    "heuristic",
    [
        CONFIGS[1],
        {"BLOCK": 128, "num_warps": 4},
        lambda arguments: CONFIGS[1] if arguments["n"] == 64 else CONFIGS[0],
        lambda n: {"BLOCK": 128, "num_warps": 4} if n == 64 else {},
        lambda n, x_ptr: {"BLOCK": 2 * n, "num_warps": 4} if len(x_ptr) == n else {},
    ],
)
def test_a_heuristic_may_be_values_and_may_take_arguments_by_name(gpu, heuristic):
    policy = tb.AutotunePolicy(cache_miss_fallback="heuristics")
    assert kernel_of(heuristic=heuristic, policy=policy).config_for(*tensor(64)) is CONFIGS[1]


# -------------------------------------------------------------------------------------------------- events and policies


def test_listeners_hear_each_choice(gpu):
    heard = []
    kernel = kernel_of(on_event=lambda event, **data: heard.append((event, data.get("level"), data["op_id"])))
    kernel[grid](*tensor(256))
    kernel[grid](*tensor(256))
    op = kernel.kernel.op_id_v
    assert [each for each in heard if each[0] != "autotune_progress"] == [
        ("autotune_start", None, op),
        ("autotune_finish", None, op),
        ("cache_hit", "memory", op),
    ]
