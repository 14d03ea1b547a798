"""Long lists of configurations: searched, not compiled whole; and other shapes in the book show where to begin."""

# ruff: noqa: N803 - constexprs are written in capitals in Triton

from __future__ import annotations

import contextlib
import math
import os
from itertools import product
from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("numpy", reason="numpy is not installed")

import triton.language as tl  # noqa: E402 - after the check that it is there
from fake_gpu import FakeGpu, installed  # noqa: E402 - as above

import tunebook as tb  # noqa: E402 - as above
from tunebook._base.errors import LeftOut  # noqa: E402 - as above
from tunebook.adapters._triton import tuner  # noqa: E402 - as above
from tunebook.adapters._triton.candidate import Launch, LaunchConfig  # noqa: E402 - as above
from tunebook.adapters._triton.list_search import TRIALS, UNFORESEEN, CandidateList, list_search  # noqa: E402 - as above
from tunebook.adapters._triton.resources import TooLarge  # noqa: E402 - as above
from tunebook.adapters.triton import autotune  # noqa: E402 - as above
from tunebook.search import Observation  # noqa: E402 - as above


@triton.jit
def copy(x_ptr, n, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    at = tl.program_id(0) * BM + tl.arange(0, BM)
    tl.store(x_ptr + at, tl.load(x_ptr + at, at < n), at < n)


AXES = {"BM": (16, 32, 64, 128, 256), "BN": (16, 32, 64, 128, 256), "BK": (32, 64, 128)}
CONFIGS = [
    triton.Config(dict(zip(AXES, sizes, strict=True)), num_warps=warps, num_stages=stages)
    for sizes in product(*AXES.values())
    for warps in (2, 4, 8)
    for stages in (2, 3)
]


def seconds(config, n):
    """A pretended matmul: the best tile grows with the problem, and a tile that is too big does not run."""
    v = config if isinstance(config, dict) else config.all_kwargs()
    if v["BM"] * v["BN"] > 1 << 15:
        return None
    side = math.log2(n) / 2
    off = (math.log2(v["BM"]) - side - 1) ** 2 + (math.log2(v["BN"]) - side) ** 2 + (math.log2(v["BK"]) - 6) ** 2 / 2
    warps = abs(math.log2(v["num_warps"]) - math.log2(v["BM"] * v["BN"]) / 6)
    return n * 1e-8 * (1 + 0.15 * off + 0.1 * warps + 0.02 * (3 - v["num_stages"]))


class Compiled(list):
    """The values of the compiled candidates, and the pretended GPU."""


@pytest.fixture
def quick(monkeypatch):
    """Compiles nothing: the programs of 450 candidates take half a minute, and are not the question here."""
    compiled = Compiled()

    def warmup(*_args, grid, **values):
        compiled.append(tuple(values[name] for name in ("BM", "BN", "BK", "num_warps", "num_stages")))

    monkeypatch.setattr(copy, "warmup", warmup)

    def run(*args, grid, warmup, **values):
        found = seconds(values, args[1])
        if found is None:
            raise RuntimeError("out of resource: shared memory")
        gpu.clock_s += found

    monkeypatch.setattr(copy, "run", run)
    with installed(FakeGpu(lambda _facts: 0.0), copy) as gpu:
        compiled.gpu = gpu
        yield compiled


def tune(quick, n, **options):
    kernel = autotune(CONFIGS, key=["n"], **{"processes": False, **options})(copy)
    own = kernel.selector.tuner
    own.stopwatch = own.stopwatch._replace(clock_ns=lambda: round(quick.gpu.clock_s * 1e9))
    kernel[(1,)](torch.ones(16), n)
    best = min(found for config in CONFIGS if (found := seconds(config, n)) is not None)
    return kernel, seconds(kernel.best_config, n) / best - 1


def test_a_long_list_is_not_compiled_whole_and_the_choice_is_one_of_the_list(quick):
    kernel, behind = tune(quick, 1024)
    assert len(set(quick)) <= UNFORESEEN[0]
    assert kernel.best_config in CONFIGS
    assert behind <= 0.03


def test_three_near_shapes_in_the_book_leave_16_to_compile(quick):
    for n in (512, 1024, 4096):
        tune(quick, n)
    quick.clear()
    _, behind = tune(quick, 2048)
    assert 0 < len(set(quick)) <= 16
    assert behind <= 0.01


def test_far_shapes_in_the_book_leave_more_to_compile(quick):
    for n in (1, 2, 4):
        tune(quick, n)
    quick.clear()
    tune(quick, 4096)
    assert len(set(quick)) == UNFORESEEN[0]


class Foreseeing:
    """Forks that know which candidates do not fit, and that refuse tiles of one row for each thread's registers."""

    has_left_out = False

    def __init__(self, compile_one):
        self._compile_one = compile_one

    def __call__(self, candidate):
        return self._compile_one(candidate)

    def foresee(self, candidates):
        return [self._refusal(candidate.meta) for candidate in candidates]

    @staticmethod
    def _refusal(values):
        if values["BM"] * values["BN"] > 1 << 15:
            return TooLarge("not compiled: it does not fit")
        return LeftOut("not compiled: it would spill") if values["BK"] == 128 and values["num_warps"] == 2 else None


@pytest.fixture
def foreseen(quick, monkeypatch):
    """Lets the first stages of a compilation tell which candidates are not worth more."""
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    forks = lambda compile_one, *_args, **_options: contextlib.nullcontext(Foreseeing(compile_one))
    monkeypatch.setattr(tuner, "compile_forks", forks)
    return quick


def test_candidates_that_fail_or_spill_are_not_compiled_and_48_others_are_enough(foreseen):
    _, behind = tune(foreseen, 1024, processes=True)
    assert len(set(foreseen)) == TRIALS[0]
    assert not any(bm * bn > 1 << 15 or (bk == 128 and warps == 2) for bm, bn, bk, warps, _ in foreseen)
    assert behind <= 0.01


def test_a_tuning_names_the_candidates_that_were_not_compiled(foreseen):
    kernel = autotune(CONFIGS, key=["n"])(copy)
    tuned = kernel.tune(torch.ones(16), 1024, grid=(1,))
    assert set(tuned.left_out.values()) == {"not compiled: it would spill"}
    failures = {m.failure.message for m in tuned.measurements if m.failure is not None}
    assert failures == {"TooLarge: not compiled: it does not fit"}
    assert all(tuned.configs[name].meta["BK"] == 128 for name in tuned.left_out)


def test_a_search_leaves_out_fewer_warps_where_the_same_blocks_spill(foreseen, monkeypatch):
    ran = copy.run

    def run(*args, **options):
        ran(*args, **options)
        return SimpleNamespace(n_regs=255, n_spills=8)

    monkeypatch.setattr(copy, "run", run)
    tuned = autotune(CONFIGS, key=["n"])(copy).tune(torch.ones(16), 1024, grid=(1,))
    assert any("spill registers already" in reason for reason in tuned.left_out.values())


def test_three_near_shapes_leave_one_batch_of_16_to_compile(foreseen):
    for n in (512, 1024, 4096):
        tune(foreseen, n, processes=True)
    foreseen.clear()
    _, behind = tune(foreseen, 2048, processes=True)
    assert 0 < len(set(foreseen)) <= 16
    assert behind <= 0.01


def test_a_single_batch_waits_for_no_first_stages(foreseen, monkeypatch):
    for n in (512, 1024, 4096):
        tune(foreseen, n, processes=True)
    monkeypatch.setattr(Foreseeing, "foresee", lambda _self, some: pytest.fail(f"asked about {len(some)}"))
    _, behind = tune(foreseen, 2048, processes=True)
    assert behind <= 0.01


def test_a_batch_that_near_shapes_rank_wrongly_is_not_the_last(foreseen, monkeypatch):
    for n in (512, 1024, 4096):
        tune(foreseen, n, processes=True)
    foreseen.clear()
    here = seconds
    monkeypatch.setitem(globals(), "seconds", lambda config, n: (s := here(config, n)) and 1e-9 / s)
    tune(foreseen, 2048, processes=True)
    assert 16 < len(set(foreseen)) <= TRIALS[0]


def test_the_book_says_how_many_blocks_were_launched(quick):
    def grid(meta):
        return (triton.cdiv(meta["n"], meta["BM"]), meta["BN"])

    tuned = autotune(CONFIGS, key=["n"], processes=False)(copy).tune(torch.ones(16), 1024, grid=grid)
    blocks = {m.fingerprint: m.extra.get("blocks") for m in tuned.measurements if m.failure is None}
    meta = {name: tuned.configs[name].meta for name in blocks}
    assert blocks == {name: triton.cdiv(1024, meta[name]["BM"]) * meta[name]["BN"] for name in blocks}


def test_a_grid_that_fails_says_nothing_of_blocks(quick):
    kernel = autotune(CONFIGS, key=["n"], processes=False)(copy).kernel
    candidate = kernel.candidate(CONFIGS[0])
    of_names, fails = (Launch(grid, (torch.ones(16), 1024), {}) for grid in ((2, 3), lambda meta: (1 // 0,)))
    assert kernel.blocks_of(of_names, candidate) == 6
    assert kernel.blocks_of(fails, candidate) is None
    assert kernel.blocks_of(Launch(None, (), {}), candidate) is None


def test_an_exhaustive_search_and_a_short_list_try_everything(quick):
    kernel, behind = tune(quick, 1024, search="exhaustive")
    assert len(set(quick)) == len(CONFIGS)
    assert behind == 0
    assert kernel.kernel.search_cfgs(kernel.kernel.invocation(None), "exhaustive") is None


def test_the_next_process_finds_the_choice_of_a_search(quick):
    first, _ = tune(quick, 1024)
    quick.clear()
    second, _ = tune(quick, 1024)
    assert second.best_config is first.best_config
    assert quick == []


def test_a_tuning_on_demand_goes_on_where_the_search_ended(quick):
    kernel, _ = tune(quick, 1024)
    quick.clear()
    kernel.tune(torch.ones(16), 1024, grid=(1,))
    assert 0 < len(set(quick)) <= 8 + 16  # a batch more, and the finalists


def test_an_unknown_search_is_an_error_where_the_kernel_is_defined():
    with pytest.raises(tb.DefinitionError, match="guided"):
        autotune(CONFIGS, key=["n"], search="fast")


# -------------------------------------------------------------------------------------------------- lists as spaces


def test_members_keep_their_identity_and_may_differ_in_any_value():
    hook = lambda _arguments: None
    configs = [
        triton.Config({"B": 1}),
        triton.Config({"B": 1, "items": "x"}),
        triton.Config({"B": 1}, num_warps=8),
        triton.Config({"B": 1}, pre_hook=hook),
        triton.Config({"B": tl.float16}),
    ]
    candidates = [LaunchConfig(config) for config in configs]
    members = CandidateList(candidates)
    assert list(members) == candidates
    assert len(members.space()) == 5
    assert [members.member(members.point(candidate)) for candidate in candidates] == candidates


def test_a_search_proposes_members_only_each_once():
    candidates = [LaunchConfig(config) for config in CONFIGS]
    strategy = list_search(candidates, None).begin()
    proposed = []
    for _ in range(6):
        batch = strategy.propose(8)
        strategy.observe([Observation(c, seconds(c.config, 1024)) for c in batch])
        proposed += batch
    assert len(set(map(id, proposed))) == 6 * 8
    assert set(map(id, proposed)) <= set(map(id, candidates))
