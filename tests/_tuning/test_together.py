"""`tune_together`: the ways to combine the times of several calls, against brute force on a pretend clock."""

from __future__ import annotations

import math
import re

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


# ------------------------------------------------------------------------------------------------------------- Ctrl-C


def interrupted_kernel(path, at):
    """A kernel of which candidate 0 fails, candidate 3 is very slow, and one run is interrupted."""
    clock, runs, limit = FakeClock(), [], Costs(at)

    @tb.tunable(space=tb.Space(c=list(CONFIGS)), name="joint", tuner=fake_tuner(clock), store=path)
    def kernel(n, *, config):
        runs.append((config.c, n))
        if len(runs) == limit.by_config:
            raise KeyboardInterrupt
        if config.c == 0:
            raise ValueError("no such tile")
        clock.spend([0, 1e-3, 2e-3, 0.5][config.c] * (1 + n))
        return n

    return kernel, runs


def last_first_run(path, combine):
    """Return the number of runs until every candidate has run once for the last time, on a kernel of its own."""
    kernel, runs = interrupted_kernel(path, -1)
    tb.tune_together(kernel, [(n,) for n in CALLS], combine=combine, progress=False)
    return 1 + max(runs.index(run) for run in set(runs)), len(runs)


@pytest.mark.parametrize("combine", ["mean", "relative"])
def test_an_interrupt_keeps_the_times_so_far_and_the_next_tuning_goes_on(tmp_path, combine):
    tried, whole = last_first_run(tmp_path / "other", combine)
    calls = [(n,) for n in CALLS]
    kernel, _ = interrupted_kernel(tmp_path, (tried + 3 * whole) // 4)  # in the last race
    with pytest.raises(KeyboardInterrupt) as caught:
        tb.tune_together(kernel, calls, combine=combine, progress=False)
    (note,) = caught.value.__notes__
    assert re.fullmatch(
        r"tunebook: joint@v0 is not tuned yet. \d+ measurements are kept; the next tune_together goes on from there.",
        note,
    )
    assert all("no decision yet: a tuning was interrupted" in str(kernel.explain(n)) for n in CALLS)
    again, runs = interrupted_kernel(tmp_path, -1)
    assert tb.tune_together(again, calls, combine=combine, progress=False).config.c == 1
    assert not {c for c, _ in runs} & {0, 3}, "a candidate that failed or was very slow is not run again"
    assert all("interrupted" not in str(again.explain(n)) for n in CALLS)


def test_an_interrupt_leaves_choices_as_they_were_and_does_not_concern_the_tuning_of_one_call(tmp_path):
    kernel, _ = interrupted_kernel(tmp_path, -1)
    for n in CALLS:
        tb.tune(kernel, n, progress=False)
    hurried, _ = interrupted_kernel(tmp_path, 30)
    with pytest.raises(KeyboardInterrupt) as caught:
        tb.tune_together(hurried, [(n,) for n in CALLS], progress=False)
    assert "joint@v0 keeps its choice. " in caught.value.__notes__[0]
    alone, runs = interrupted_kernel(tmp_path, -1)
    assert [alone.config_for(n).c for n in CALLS] == [1, 1, 1]
    tb.tune(alone, 0, progress=False)
    assert not runs, "the times of one call are complete"
    tb.tune_together(alone, [(n,) for n in CALLS], progress=False)
    assert {c for c, _ in runs} == {1, 2}
