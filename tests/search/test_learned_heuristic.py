"""Heuristics learnt from measured problems, as Python that can be read."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest
from kernels import FakeClock, fake_tuner

import tunebook as tb
from tunebook import DefinitionError
from tunebook.search import Example, fit, fit_book
from tunebook.search._learned_heuristic import Split

CONFIGS = {f"{bm}x{bn}": {"bm": bm, "bn": bn} for bm in (16, 32, 64, 128) for bn in (16, 32, 64, 128)}


def seconds(m, n, config):
    """Tiles as large as the matrix allows are best, up to 64."""
    both = zip((m, n), config, strict=True)
    return 1e-3 * math.prod(1 + 0.5 * abs(math.log2(min(size, 64) / block)) for size, block in both)


def examples():
    sizes = [(m, n) for m in (16, 32, 64, 128, 512, 2048) for n in (16, 32, 64, 128, 512, 2048, 8192)]
    return [Example({"m": m, "n": n}, {key: seconds(m, n, c.values()) for key, c in CONFIGS.items()}) for m, n in sizes]


def test_a_tree_is_learnt_that_holds_on_shapes_it_has_not_seen():
    found = fit(examples(), CONFIGS, name="blocks")
    assert found.problems == 42
    assert found.regret <= found.held_out < 0.10
    one = min(
        sum(e.seconds[key] / min(e.seconds.values()) - 1 for e in examples()) / len(examples()) for key in CONFIGS
    )
    assert found.regret < one / 2


def by_area():
    """Problems on which what counts is how many elements there are, not how many rows or columns."""
    sizes = [(m, n) for m in (32, 64, 128, 256, 512) for n in (32, 64, 128, 256, 512)]
    times = lambda m, n: {"small": 1.0 if m * n <= 128 * 128 else 2.0, "large": 2.0 if m * n <= 128 * 128 else 1.0}
    return [Example({"a.shape[0]": m, "a.shape[1]": n}, times(m, n)) for m, n in sizes]


def test_a_tree_may_ask_for_a_product_or_a_ratio_of_sizes():
    configs = {"small": {"b": 1}, "large": {"b": 2}}
    found = fit(by_area(), configs)
    assert found.held_out == 0
    assert "if a.shape[0] * a.shape[1] <= " in found.source
    flat = [e._replace(seconds={"small": 1.0, "large": 2.0 if m < n else 0.5}) for e in by_area()
            for m, n in (e.sizes.values(),)]  # fmt: skip
    by_ratio = fit(flat, configs)
    assert re.search(r"if a\.shape\[0\] <= [\d.]+ \* a\.shape\[1\]:", by_ratio.source)
    scope = {}
    exec(by_ratio.source, scope)
    assert scope["heuristic"](a=SimpleNamespace(shape=(0, 0)))["b"] in (1, 2), "an empty array divides nothing by zero"


def test_one_strange_time_does_not_outweigh_all_others():
    rows = [e._replace(seconds={**e.seconds, "large": 1e6}) if i == 24 else e for i, e in enumerate(by_area())]
    assert "'b': 2" in fit(rows, {"small": {"b": 1}, "large": {"b": 2}}).source


def test_the_generated_source_has_the_same_regret_as_the_tree():
    found = fit(examples(), CONFIGS, name="blocks")
    names = {}
    exec(found.source, names)
    for example in examples():
        config = names["blocks"](**example.sizes)
        key = f"{config['bm']}x{config['bn']}"
        assert example.seconds[key] / min(example.seconds.values()) - 1 < 1
    mean = sum(
        e.seconds["{bm}x{bn}".format(**names["blocks"](**e.sizes))] / min(e.seconds.values()) - 1 for e in examples()
    ) / len(examples())
    assert mean == pytest.approx(found.regret)
    assert "held-out" in found.source


def test_a_configuration_that_was_not_measured_everywhere_is_not_preferred_for_that():
    rows = examples()
    rare = [e._replace(seconds={**e.seconds, "rare": 1e-9}) if i == 0 else e for i, e in enumerate(rows)]
    found = fit(rare, {**CONFIGS, "rare": {"bm": 1, "bn": 1}}, depth=0)
    assert "'bm': 1," not in found.source


def test_too_few_problems_and_bad_names_are_errors():
    with pytest.raises(DefinitionError, match="at least 4 tuned problems; there are 3"):
        fit(examples()[:3], CONFIGS)
    with pytest.raises(DefinitionError, match="needs at least 4 tuned problems; there is only 1"):
        fit(examples()[:1], CONFIGS)
    with pytest.raises(DefinitionError, match="not a valid name for a function"):
        fit(examples(), CONFIGS, name="not a name")


def tuned_book(path, sizes):
    clock = FakeClock()

    @tb.tunable(space=tb.Space(block=[16, 32, 64, 128]), name="fitted", store=path, tuner=fake_tuner(clock))
    def kernel(n, *, config):
        clock.spend(1e-3 * (1 + abs(math.log2(min(n, 128) / config.block))))

    for n in sizes:
        tb.tune(kernel, n, progress=False)
    return kernel.selector.persistent.store


def test_a_heuristic_is_learnt_from_a_book_and_reads_the_kernel_s_own_arguments(tmp_path):
    store = tuned_book(tmp_path, [16, 24, 32, 48, 64, 96, 128, 256, 512, 1024])
    found = fit_book(store.items("fitted@v0"), name="block_for")
    assert found.source.startswith("def block_for(*, n, **_):")
    assert "if n <= " in found.source
    assert found.regret < 0.15


def test_a_kernel_takes_a_learnt_heuristic_as_it_is_whatever_the_order_of_its_arguments(tmp_path):
    clock = FakeClock()

    def late(x, k, *, config):  # a key has its arguments sorted: k, x
        clock.spend(1e-3 * (1 + abs(config.half - (x > 500))))
        return x

    space = tb.Space(half=[0, 1])
    kernel = tb.tunable(late, space=space, name="late", store=tmp_path, tuner=fake_tuner(clock))
    for x in (10, 20, 40, 80, 160, 320, 640, 1280, 2560, 5120):
        tb.tune(kernel, x, 700, progress=False)
    scope = {}
    exec(fit_book(kernel.selector.persistent.store.items("late@v0"), name="guess").source, scope)
    learnt = tb.tunable(late, space=space, name="late", store=False, heuristic=scope["guess"], policy="heuristics")
    assert [learnt.config_for(x, 3).half for x in (15, 3000)] == [0, 1]


def test_records_of_two_devices_are_not_learnt_from_together(tmp_path):
    records = list(tuned_book(tmp_path, [16, 32, 64, 128]).items("fitted@v0"))
    other = [r.replace(head=replace(r.head, problem=r.problem._replace(device="other"))) for r in records[:2]]
    with pytest.raises(DefinitionError, match="records are of 2 devices"):
        fit_book([*records, *other])


def test_of_noise_the_best_constant_is_learnt_and_a_real_rule_is_a_tree():
    rng = Random(0)
    times = [{f"c{n}": 1.0 + 0.05 * rng.random() for n in range(6)} for _ in range(30)]
    noise = [Example({"n": float(at)}, seconds) for at, seconds in enumerate(times)]
    configs = {f"c{n}": {"b": n} for n in range(6)}
    learnt = fit(noise, configs)
    assert isinstance(learnt.tree, str)
    assert learnt.held_out == learnt.constant
    ruled = [Example({"n": float(at)}, {"c0": 1.0 + (at >= 15), "c1": 1.0 + (at < 15)}) for at in range(30)]
    learnt = fit(ruled, configs)
    assert isinstance(learnt.tree, Split)
    assert learnt.held_out < learnt.constant


def test_the_source_says_its_bound_and_the_best_constant_s_regret():
    few, many = fit(examples()[::7], CONFIGS), fit(examples(), CONFIGS)
    assert few.bound == math.inf
    assert "# Too few calls to give a bound. " in few.source
    assert many.held_out < many.bound < math.inf
    bound = f"    # At most {many.bound:.1%} slower on 95% of held-out calls. "
    constant = f"One configuration for all calls would be {many.constant:.1%} slower on average."
    assert many.source.splitlines()[2] == bound + constant


def test_the_comment_follows_the_decision_for_a_tree():
    """One time that is far off makes a tree's mean regret larger than the constant's, though the tree is better."""
    rng = Random(0)
    for _ in range(200):
        examples = [
            Example({"n": n}, {key: math.exp(rng.gauss(0, 1.5)) for key in "ab"}) for n in rng.sample(range(1, 500), 12)
        ]
        learnt = fit(examples, {key: {"way": key} for key in "ab"})
        assert ("No tree" in learnt.source) == isinstance(learnt.tree, str)


def test_the_written_code_takes_arguments_of_any_name_and_asks_for_those_it_uses():
    examples = [Example({"_": n, "m": m}, {"a": 1.0 * n, "b": 100.0}) for n in (10, 50, 200, 400) for m in (3, 5)]
    learnt = fit(examples, {key: {"way": key} for key in "ab"})
    names = {}
    exec(learnt.source, names)
    assert [names["heuristic"](_=n) for n in (10, 400)] == [{"way": "a"}, {"way": "b"}]
    assert names["heuristic"](_=10, m=3, other=1) == {"way": "a"}


def test_entries_of_tunings_that_a_budget_ended_teach_nothing(tmp_path):
    """They may have measured the slowest candidate alone, which then seems to be the best."""
    clock = FakeClock()

    def work(n, *, config):
        clock.spend(1e-5 * n * (1 + (n > 100) * (config.way == "slow")))

    function = tb.tunable(
        work, space=tb.Space(way=["slow", "fast"]), name="cut", store=tmp_path, tuner=fake_tuner(clock), check=False,
        heuristic={"way": "slow"},
    )  # fmt: skip
    for n in range(10, 400, 10):
        tb.tune(function, n, budget="1 trials")
    records = list(function.selector.persistent.store.items(function.kernel.op_id_v))
    assert len(records) == 39
    with pytest.raises(DefinitionError, match="there are 0, and 39 whose tuning a budget ended: tune them again"):
        fit_book(records)
