"""`install()`: kernels of `triton.autotune` are tuned here, whichever library made them, and `uninstall()`."""

# ruff: noqa: N803 - constexprs are written in capitals in Triton

from __future__ import annotations

import copy
import threading

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

import triton.language as tl  # noqa: E402 - after the check that it is there
from fake_gpu import FakeGpu, installed  # noqa: E402 - as above
from test_triton_same_as_triton import ROWS, observe, same  # noqa: E402 - as above
from triton.runtime.autotuner import Autotuner, autotune  # noqa: E402 - as above

import tunebook as tb  # noqa: E402 - as above
from tunebook._selection.listeners import EVERYWHERE  # noqa: E402 - as above
from tunebook.adapters.triton import autotune as our_autotune  # noqa: E402 - as above
from tunebook.adapters.triton import install, uninstall  # noqa: E402 - as above

pytestmark = pytest.mark.usefixtures("compiled_once")


@triton.jit
def double(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, at < n) * 2, at < n)


CONFIGS = [triton.Config({"BLOCK": block}, num_warps=4) for block in (64, 128, 256)]
COST = {64: 40e-6, 128: 20e-6, 256: 30e-6}


def methods():
    return {name: value for name, value in vars(Autotuner).items() if name != "__slotnames__"}  # which `copy` adds


THEIRS = methods()


def bench(call, quantiles):
    """Stand in for Triton's benchmarker, which the fake GPU does not have: a kernel that is left to Triton needs it."""
    call()
    return [1.0, 1.0, 1.0]


def made(**options):
    return autotune(CONFIGS, key=["n"], **options)(double)


made_before_any_test = made()


class Counting(Autotuner):
    """The way of other libraries: a `run` of its own, which calls Triton's."""

    launches = 0

    def run(self, *args, **kwargs):
        self.launches += 1
        return super().run(*args, **kwargs)


class Pruning(Autotuner):
    def prune_configs(self, kwargs):
        return self.configs[-1:]


def as_subclass(kind, **options):
    return kind(double, double.arg_names, CONFIGS, ["n"], None, None, **options)


@pytest.fixture(autouse=True)
def _nothing_left():
    yield
    uninstall()
    assert methods() == THEIRS
    assert EVERYWHERE.rare == []


@pytest.fixture
def gpu():
    with installed(FakeGpu(lambda facts: COST[facts["BLOCK"]]), double) as fake:
        yield fake


@pytest.fixture
def heard():
    """Return a list of the kernels that `install(on_kernel=heard.append)` tells of."""

    class Heard(list):
        def tell(self, *told):
            self.append(told)

    return Heard()


def grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def launch(kernel, n=1024):
    kernel[grid](torch.ones(n), n)


def blocks_run(gpu):
    ran = [facts["BLOCK"] for facts in gpu.launches]
    gpu.launches.clear()
    return ran


@pytest.mark.parametrize("kind", ["before", "after", "subclass", "heuristics above"])
def test_every_autotuner_is_taken_over_and_finds_its_choice_in_the_book(gpu, kind, heard):
    if kind == "before":
        made_before_any_test.cache.clear()
    kernels = {
        "before": lambda: made_before_any_test,
        "after": made,
        "subclass": lambda: as_subclass(Counting),
        "heuristics above": lambda: triton.heuristics({})(made()),
    }
    install(on_kernel=heard.tell)
    kernel = kernels[kind]()
    launch(kernel)
    assert set(blocks_run(gpu)) == {64, 128, 256}
    launch(kernel)
    assert blocks_run(gpu) == [128]
    launch(made())
    assert blocks_run(gpu) == [128], "another process would find it, too"
    assert [what for what, _, _ in heard] == ["taken", "taken"]


def taken_over(*given, **named):
    install(store=None if named.get("cache_results") else False)
    return autotune(*given, **named)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
def test_a_kernel_that_is_taken_over_does_as_before(row):
    before = observe(row, autotune)
    same(before, observe(row, taken_over))


def test_a_function_that_was_bound_to_a_grid_goes_on_after_uninstall(gpu):
    install()
    kernel = made()
    bound = kernel[(16,)]
    bound(torch.ones(1024), 1024)
    uninstall()
    blocks_run(gpu)
    for n in (1024, 2048):
        bound(torch.ones(n), n)
    assert blocks_run(gpu)[-1] == 128


def test_a_subclass_gets_each_of_its_launches(gpu):
    install()
    kernel = as_subclass(Counting)
    for _ in range(3):
        launch(kernel)
    assert kernel.launches == 3
    assert kernel.best_config is CONFIGS[1]


def test_a_direct_call_of_run_and_of_warmup_work_as_before(gpu):
    install()
    kernel = made()
    assert len(kernel.warmup(torch.ones(64), 64, grid=grid)) == 3
    assert kernel.run(torch.ones(64), 64, grid=grid, warmup=True).asm["cubin"]
    assert blocks_run(gpu) == []
    kernel.run(torch.ones(64), 64, grid=grid, warmup=False)
    assert blocks_run(gpu)[-1] == 128


@pytest.mark.parametrize("packages", [(__name__,), __name__, ("other", __name__)])
def test_kernels_of_the_packages_are_taken_over(gpu, packages, heard):
    install(packages, on_kernel=heard.tell)
    launch(made())
    assert heard == [("taken", f"{__name__}.double@v0", "")]


@pytest.mark.parametrize("packages", [(), ("other",), (__name__[:-1],)])
def test_kernels_of_other_packages_are_left_to_triton(gpu, packages, heard):
    install(packages, on_kernel=heard.tell)
    kernel = made(do_bench=bench)
    launch(kernel)
    assert heard == []
    assert kernel.best_config is CONFIGS[0], "of equal times, Triton takes the first"


def test_a_subclass_that_prunes_or_measures_itself_is_left_to_triton(gpu, heard):
    install(on_kernel=heard.tell)
    kernel = as_subclass(Pruning, do_bench=bench)
    launch(kernel)
    assert kernel.best_config is CONFIGS[-1]
    assert heard == [("left", f"{__name__}.double", "Pruning overrides prune_configs")]


def test_a_kernel_that_cannot_be_taken_over_warns_once_and_runs_with_triton(gpu, heard):
    install(on_kernel=heard.tell)
    kernel = made(do_bench=bench)
    del kernel.use_cuda_graph
    with pytest.warns(tb.TunebookWarning, match="double keeps Triton's own tuner: AttributeError"):
        launch(kernel)
    launch(kernel)
    assert [what for what, _, _ in heard] == ["left"]


def test_uninstall_lets_triton_tune_again_also_kernels_that_were_taken_over(gpu):
    kernel = made(do_bench=bench)
    before = set(vars(kernel))
    install()
    install()
    launch(kernel)
    uninstall()
    uninstall()
    assert methods() == THEIRS
    assert {name for name in vars(kernel) if "tunebook" in name} == set()
    assert before <= set(vars(kernel))
    blocks_run(gpu)
    launch(kernel)
    assert len(blocks_run(gpu)) == 1, "Triton has the choice in its cache"
    launch(kernel, n=512)
    assert kernel.best_config is CONFIGS[0], "of equal times, Triton takes the first"


def test_a_method_that_another_library_put_over_ours_stays_and_reaches_triton(gpu):
    install()
    ours, seen = Autotuner.run, []

    def over(kernel, *args, **kwargs):
        seen.append(kernel)
        return ours(kernel, *args, **kwargs)

    Autotuner.run = over
    try:
        uninstall()
        kernel = made(do_bench=bench)
        launch(kernel)
        assert seen == [kernel]
        assert kernel.best_config is CONFIGS[0], "of equal times, Triton takes the first"
    finally:
        Autotuner.run = THEIRS["run"]


def test_a_second_install_replaces_the_options(gpu, tmp_path):
    kernel = made()
    for name in ("a.json", "b.json"):
        install(store=tmp_path / name)
        launch(kernel)
    assert {path.name for path in tmp_path.iterdir()} >= {"a.json", "b.json"}


def test_a_copy_of_a_kernel_is_tuned_by_itself(gpu):
    install(store=False)
    kernel = made()
    launch(kernel)
    other = copy.copy(kernel)
    other.configs, other.cache = CONFIGS[:1], {}
    launch(other)
    assert blocks_run(gpu)[-1] == 64
    assert kernel.best_config is CONFIGS[1]


def test_a_choice_that_the_program_writes_into_the_cache_is_launched(gpu):
    install()
    kernel = as_subclass(Counting)
    kernel.cache[1024, "torch.float32"] = CONFIGS[2]
    launch(kernel)
    assert blocks_run(gpu) == [256]
    install(store=False)
    launch(kernel)
    assert blocks_run(gpu) == [256]


def test_our_own_kernels_keep_their_own_options(gpu, tmp_path):
    install(("another_package",))
    kernel = our_autotune(CONFIGS, key=["n"], store=tmp_path / "own.json")(double)
    launch(kernel)
    assert kernel.best_config is CONFIGS[1]
    assert (tmp_path / "own.json").exists()


def test_after_its_budget_a_process_runs_the_first_configuration_that_pruning_leaves(gpu):
    install(budget="0.001ms")
    drop_first = {"early_config_prune": lambda configs, named, **kwargs: configs[1:]}
    kernel = made(prune_configs_by=drop_first)
    launch(kernel, n=1024)
    assert len(blocks_run(gpu)) > 1
    launch(kernel, n=2048)
    assert blocks_run(gpu) == [128]
    launch(kernel, n=1024)
    assert kernel.best_config is CONFIGS[1]


@pytest.mark.parametrize("mode", ["frozen", "off"])
def test_a_mode_that_does_not_tune_runs_the_first_configuration(gpu, mode, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_MODE", mode)
    install()
    launch(made())
    assert blocks_run(gpu) == [64]


def test_a_launch_in_the_capture_of_a_graph_runs_the_first_configuration(gpu):
    install()
    gpu.capturing = True
    launch(made())
    assert blocks_run(gpu) == [64]


def test_a_budget_in_trials_is_refused_and_nothing_is_installed():
    with pytest.raises(tb.DefinitionError, match=r"invalid budget='9 trials': write a time"):
        install(budget="9 trials")
    assert methods() == THEIRS


def test_a_program_of_torch_compile_launches_kernels_that_are_taken_over(gpu, heard, monkeypatch):
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)  # it looks for a real GPU
    gpu.effect = lambda facts, arguments: arguments["x_ptr"].mul_(2)
    kernel = made()

    @torch.compile(backend="eager", fullgraph=True)
    def program(x):
        y = x.clone()
        kernel[(8,)](y, y.numel())
        return y

    install(on_kernel=heard.tell)
    assert program(torch.ones(512)).sum() == 1024, "arguments are put back after each candidate"
    assert [what for what, _, _ in heard] == ["taken"]
    assert kernel.best_config is CONFIGS[1]


def test_threads_that_launch_a_kernel_first_share_one_engine(gpu, heard):
    install(on_kernel=heard.tell)
    kernel, at_once = made(), threading.Barrier(4)

    def first():
        at_once.wait()
        launch(kernel)

    threads = [threading.Thread(target=first) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [what for what, _, _ in heard] == ["taken"]


def test_warm_launches_tell_nobody(gpu):
    told = []
    EVERYWHERE.listen_rarely(lambda event, **data: told.append((event, data.get("level"))))
    try:
        install()
        kernel = made()
        launch(kernel)
        launch(kernel)  # the second launch of a kind generates the code for the next ones
        assert told[0][0] == "autotune_start"
        told.clear()
        for _ in range(3):
            launch(kernel)
        assert told == []
        launch(made())
        assert told == [("cache_hit", "persistent")]
    finally:
        EVERYWHERE.rare.clear()
