"""`tune_together`: the ways to combine the times of several calls, against brute force on a pretend clock."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import Costs, FakeClock, fake_tuner

import tunebook as tb
from tunebook._measure.stopwatch import combined_s
from tunebook._tuning.job import Budget

CONFIGS, CALLS = range(4), range(3)
# By configuration, the milliseconds of each call.
tables = st.lists(
    st.lists(st.integers(1, 40), min_size=len(CALLS), max_size=len(CALLS)), min_size=len(CONFIGS), max_size=len(CONFIGS)
)
weights = st.lists(st.integers(1, 5), min_size=len(CALLS), max_size=len(CALLS))


def kernel_of(table, clock, **options):
    costs = Costs(table)

    @tb.tunable(space=tb.Space(c=list(CONFIGS)), name="joint", tuner=fake_tuner(clock), **{"store": False, **options})
    def kernel(n, *, config):
        clock.spend(costs.by_config[config.c][n] * 1e-3)
        return n

    return kernel


def values(combine, table, shares):
    """Return the time of each configuration over all calls, by the definition in the docs."""
    best = [min(row[n] for row in table) for n in CALLS]
    total = sum(shares)
    formulas = {
        "mean": lambda row: sum(w * t for w, t in zip(shares, row, strict=True)) / total,
        "geomean": lambda row: math.prod(t**w for w, t in zip(shares, row, strict=True)) ** (1 / total),
        "relative": lambda row: sum(w * t / b for w, t, b in zip(shares, row, best, strict=True)) / total,
        "max": lambda row: max(t / b for t, b in zip(row, best, strict=True)),
    }
    return [formulas[combine](row) for row in table]


@pytest.mark.parametrize("combine", ["mean", "geomean", "relative", "max"])
@settings(max_examples=15, deadline=None)
@given(table=tables, shares=weights)
def test_the_choice_has_the_least_time_by_brute_force(combine, table, shares):
    shares = [1, 1, 1] if combine == "max" else shares
    given_weights = None if combine == "max" else shares
    kernel = kernel_of(table, FakeClock())
    tuned = tb.tune_together(kernel, [(n,) for n in CALLS], combine=combine, weights=given_weights, progress=False)
    found = values(combine, table, shares)
    assert found[tuned.config.c] <= 1.02 * min(found), "up to the width of a tie"


def test_the_four_ways_differ():
    table = [[10, 10, 100], [1, 1000, 60], [11, 14, 50], [100, 9, 49]]
    chosen = {}
    for combine in ("mean", "geomean", "relative", "max"):
        found = values(combine, table, [1, 1, 1])
        kernel = kernel_of(table, FakeClock())
        chosen[combine] = tb.tune_together(kernel, [(n,) for n in CALLS], combine=combine, progress=False).config.c
        assert chosen[combine] == found.index(min(found))
    assert len(set(chosen.values())) > 1


@given(
    seconds=st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=5),
    factor=st.floats(0.1, 10.0),
    combine=st.sampled_from(["mean", "geomean", "max", "relative"]),
)
def test_equal_times_make_that_time_and_longer_times_a_longer_one(seconds, factor, combine):
    shares = [1 / len(seconds)] * len(seconds)
    whole = combined_s(combine, seconds, shares)
    assert min(seconds) * (1 - 1e-9) <= whole <= max(seconds) * (1 + 1e-9)
    assert combined_s(combine, [factor * each for each in seconds], shares) == pytest.approx(factor * whole)


def test_a_time_below_a_tick_of_the_clock_is_not_an_error():
    assert combined_s("geomean", [0.0, 1.0], [0.5, 0.5]) == 0.0


def test_times_alone_are_kept_and_not_taken_again(tmp_path):
    clock, calls = FakeClock(), [(n,) for n in CALLS]
    kernel = kernel_of([[5, 9, 2], [3, 30, 8], [9, 9, 9], [4, 4, 40]], clock, store=tmp_path)
    tuned = tb.tune_together(kernel, calls, combine="relative", progress=False)
    record = kernel.explain(0).record
    assert record.body.provenance["combine"] == "relative"
    assert {"/together=" in m.policy for m in record.body.measurements} == {True, False}
    before = clock.ns
    again = tb.tune_together(kernel, calls, combine="relative", progress=False)
    assert (again.config, clock.ns) == (tuned.config, before)
    anew = tb.tune_together(kernel, calls, combine="relative", progress=False, again=True)
    assert (anew.config, anew.ran) == (tuned.config, len(CONFIGS))
    before = clock.ns
    tb.tune_together(kernel, calls, combine="geomean", progress=False)
    assert clock.ns > before, "times of one way do not compare with times of another"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"combine": "worst"}, "combine='worst': choose one of 'mean', 'geomean', 'max', 'relative'"),
        ({"combine": "max", "weights": [1, 2, 3]}, 'combine="max" takes no weights'),
    ],
)
def test_a_way_that_does_not_exist_or_weights_without_effect_are_an_error(options, said):
    with pytest.raises(tb.DefinitionError, match=said):
        tb.tune_together(kernel_of([[1] * 3] * 4, FakeClock()), [(n,) for n in CALLS], **options)


def test_a_budget_is_split_over_all_jobs():
    assert Budget(8.0, None).split(4) == Budget(2.0, None)
    assert Budget(None, 3).split(4) == Budget(None, 1)
    ran, table = [], [[5, 9, 2], [3, 30, 8], [9, 9, 9], [4, 4, 40]]
    kernel = kernel_of(table, FakeClock(), on_event=lambda event, **_: ran.append(event))
    tuned = tb.tune_together(kernel, [(n,) for n in CALLS], combine="max", budget="8 trials", progress=False)
    assert not tuned.complete
    assert (ran.count("autotune_start"), ran.count("autotune_finish")) == (3, 3)
