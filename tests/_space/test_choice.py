"""Choosing among implementations."""

from __future__ import annotations

import numpy as np
import pytest

import tunebook as tb


def plain(a, b):
    return a @ b


def by_columns(a, b, *, config):
    return np.hstack([a @ b[:, i : i + config.step] for i in range(0, b.shape[1], config.step)])


def broken(a, b):
    raise OSError("no such library")


A, B = np.ones((8, 8)), np.ones((8, 8))


def made(ways, **options):
    return tb.tunable(ways, name="multiply", store=False, **options)


def tried(tuned):
    return {tuned.configs[m.fingerprint].way for m in tuned.measurements}


def test_the_fastest_way_that_is_right_is_taken_and_ways_may_have_spaces():
    ways = tb.choice(plain=plain, columns=tb.Option(by_columns, space=tb.Space(step=[2, 4])), broken=broken)
    multiply = made(ways)
    assert np.array_equal(multiply(A, B), A @ B)
    tuned = tb.tune(multiply, A, B, progress=False)
    assert len(tuned.measurements) == 4
    assert tried(tuned) == {"plain", "columns", "broken"}
    assert tuned.config.way in {"plain", "columns"}


def test_a_way_that_is_wrong_never_wins():
    multiply = made(tb.choice(plain=plain, wrong=lambda a, b: a), heuristic={"way": "plain"})
    tuned = tb.tune(multiply, A, 2 * B, progress=False)
    assert tuned.config == {"way": "plain"}


def test_a_group_is_tried_only_if_the_one_before_gave_nothing_right():
    ways = tb.choice(fast=tb.Option(plain), fallback=tb.Option(plain, group=1))
    assert tried(tb.tune(made(ways), A, B, progress=False)) == {"fast"}
    ways = tb.choice(fast=tb.Option(broken), fallback=tb.Option(plain, group=1), last=tb.Option(plain, group=2))
    tuned = tb.tune(made(ways), A, B, progress=False)
    assert tuned.config == {"way": "fallback"}
    assert tried(tuned) == {"fast", "fallback"}


def test_a_negative_priority_leaves_a_way_out_of_calls_that_it_is_not_for():
    ways = tb.choice(plain=plain, large=tb.Option(plain, priority=lambda a, b: 1 if a.shape[0] > 8 else -1))
    multiply = made(ways)
    assert tried(tb.tune(multiply, A, B, progress=False)) == {"plain"}
    assert tried(tb.tune(multiply, np.ones((16, 8)), B, progress=False)) == {"plain", "large"}


def test_the_first_way_runs_while_nothing_is_measured():
    policy = tb.AutotunePolicy(allow_autotune=False)
    multiply = made(tb.choice(plain=plain, other=broken), policy=policy)
    assert multiply.explain(A, B).selection.config == {"way": "plain"}
    space = tb.Space(step=[2, 4])
    first = tb.Option(by_columns, space=space, heuristic={"step": 4})
    multiply = made(tb.choice(columns=first, other=broken), policy=policy)
    assert multiply.explain(A, B).selection.config == {"way": "columns", "step": 4}


def test_editing_a_way_makes_it_another_kernel():
    def kernel(body):
        namespace = {}
        exec(f"def way(a, b):\n    return {body}", namespace)
        return made(tb.choice(plain=plain, way=namespace["way"])).kernel.code_checksum

    assert kernel("a @ b") == kernel("a @ b")
    assert kernel("a @ b") != kernel("b @ a")


def test_it_is_called_as_the_first_way_is():
    def scaled(a, b, *, factor=1.0):
        return (a @ b) * factor

    multiply = made(tb.choice(scaled=scaled, other=lambda a, b, factor=1.0: scaled(a, b, factor=factor)))
    assert multiply(A, b=B, factor=2.0)[0, 0] == 16.0
    with pytest.raises(TypeError, match="missing"):
        multiply(A)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (tb.choice, "fast=..."),
        (lambda: tb.choice(a=3), "cannot be called"),
        (lambda: tb.choice(a=tb.Option(plain, space=tb.Space(way=[1]))), "'way'"),
        (lambda: tb.tunable(tb.choice(a=plain)), "name="),
        (lambda: tb.tunable(tb.choice(a=plain), name="x", space=[{"n": 1}]), "Option"),
        (lambda: tb.tunable(tb.choice(a=max), name="x"), "first implementation"),
    ],
)
def test_an_invalid_choice_is_an_error_with_an_example(make, says):
    with pytest.raises(tb.DefinitionError, match=says.replace(".", r"\.")):
        make()
