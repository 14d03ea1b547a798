"""explain(): which tier answered, on what, and what nearly did."""

from __future__ import annotations

import numpy as np
import pytest
from kernels import FakeClock, fake_tuner

import tunebook as tb


def make(tmp_path, **options):
    clock = FakeClock()

    @tb.tunable(
        space=tb.Space(block=[1, 2, 3, 4]),
        heuristic={"block": 4},
        tuner=fake_tuner(clock),
        name="explained",
        store=tmp_path,
        **options,
    )
    def kernel(x, causal=False, *, config):
        if config.block == 3:
            raise ValueError("no such tile")
        clock.spend(config.block)
        return x

    return kernel


def test_before_tuning_it_says_that_it_would_tune_and_does_not(tmp_path):
    kernel = make(tmp_path)
    said = str(kernel.explain(np.ones((8, 4), np.float32)))
    assert "explained@v0 on cpu" in said
    assert "x: numpy float32[8, 4] C on cpu" in said
    assert "would tune now" in said
    assert "answer: Config(block=4) from heuristics" in said
    assert kernel.selector.cache.size() == 0


def test_after_tuning_it_shows_winner_runner_up_failures_and_tiers(tmp_path):
    kernel = make(tmp_path)
    kernel(np.ones(8))
    explanation = kernel.explain(np.ones(8))
    said = str(explanation)
    assert "answer: Config(block=1) from memory" in said
    assert "override    none given" in said
    assert "winner     1 s (to 1 s in 3 samples)  block=1" in said
    assert "runner-up  2 s (to 2 s in 3 samples)  block=2  2.00 x" in said
    assert "slowest    4 s (to 4 s in 3 samples)  block=4  4.0 x" in said
    assert "chosen as  fastest" in said
    assert "failed     block=3  launch: ValueError: no such tile" in said
    assert explanation.verdict.winner.value_s == 1.0


def test_a_new_process_explains_from_the_book(tmp_path):
    make(tmp_path)(np.ones(8))
    said = str(make(tmp_path).explain(np.ones(8)))
    assert "answer: Config(block=1) from persistent" in said
    assert "memory      no entry among 0" in said


def test_near_misses_are_told_field_by_field(tmp_path):
    kernel = make(tmp_path)
    kernel(np.ones((8, 4), np.float32))
    (miss,) = kernel.explain(np.ones((16, 4), np.float16), causal=True).near_misses
    text = "; ".join(miss.differences)
    assert all(part in text for part in ("float32", "float16", "8", "16", "causal"))


def test_an_entry_of_edited_code_is_explained_as_such(tmp_path):
    make(tmp_path)(np.ones(8))
    edited = tb.tunable(lambda x, causal=False, *, config: x, space=[{"b": 1}], name="explained", store=tmp_path)
    assert "other code" in str(edited.explain(np.ones(8)))


def test_a_config_that_is_no_candidate_is_a_miss_with_the_reason(tmp_path):
    kernel = make(tmp_path)
    problem = kernel.problem(np.ones(8))
    kernel.selector.persistent.put(*problem, tb.Config(block=999))
    assert "not among the kernel's candidates" in str(kernel.explain(np.ones(8)))
    kernel(np.ones(8))
    assert kernel.explain(np.ones(8)).selection.config.block == 1


def test_a_config_put_into_the_book_by_hand_is_used(tmp_path):
    kernel = make(tmp_path)
    problem = kernel.problem(np.ones(8))
    kernel.selector.persistent.put(*problem, tb.Config(block=2))
    selection = kernel.explain(np.ones(8)).selection
    assert (selection.config.block, selection.source) == (2, "persistent")


def test_the_explained_winner_of_a_tie_is_the_one_that_was_chosen(tmp_path):
    clock = FakeClock()

    @tb.tunable(space=tb.Space(b=[1, 2, 3]), heuristic={"b": 2}, tuner=fake_tuner(clock), name="tied", store=tmp_path)
    def tied(x, *, config):
        clock.spend(1.0)
        return x

    tied(np.ones(3))
    explanation = tied.explain(np.ones(3))
    assert explanation.selection.config.b == 2
    assert "winner     1 s (to 1 s in 3 samples)  b=2" in str(explanation)
    assert "chosen as  tie, kept the heuristic; 3 cannot be told apart" in str(explanation)


def test_other_versions_of_libraries_are_named(tmp_path, monkeypatch):
    make(tmp_path)(np.ones(8))
    monkeypatch.setattr(np, "__version__", "99.0")
    kernel = make(tmp_path)
    assert "99.0" in str(kernel.explain(np.ones(8)))
    assert "the entry was made under" in str(kernel.explain(np.ones(8)))


def test_failures_of_all_candidates_are_explained_in_another_process(tmp_path):
    def make_failing():
        @tb.tunable(
            space=tb.Space(b=[1, 2]), heuristic={"b": 2}, tuner=fake_tuner(FakeClock()), name="f", store=tmp_path
        )
        def failing(x, *, config):
            raise ValueError("no such tile")

        return failing

    with pytest.raises(ValueError, match="no such tile"):
        make_failing()(1)
    explanation = make_failing().explain(1)
    said = str(explanation)
    assert "answer: Config(b=2) from heuristics" in said
    assert "persistent  no decision, because every candidate failed" in said
    assert "autotune    failed before: all 2 candidates failed" in said
    assert "failed     b=1  launch: ValueError: no such tile (remembered until 2" in said
    assert make_failing().explain(2).near_misses == (), "there is no configuration in it"
