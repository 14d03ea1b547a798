"""`bucket=` of `@tunable`: a bucket is tuned at its representative size, whichever call comes first."""

from __future__ import annotations

import numpy as np
import pytest
from kernels import FakeClock, fake_tuner

import tunebook as tb
from tunebook._arrays.describe import describe
from tunebook._arrays.made_up import resized
from tunebook._cli import main


class Rows:
    """A kernel on a fake clock: few rows are fastest with `way=0`, and many rows with `way=1`."""

    def __init__(self, store=False, *, valid=lambda x, way: True, **options):
        self.clock, self.seen = FakeClock(), []
        options = {"bucket": {"x": {0: tb.pow2}}, "check": False, **options}

        @tb.tunable(space=tb.Space(way=[0, 1]), heuristic={"way": 0}, store=store, name="rows",
                    tuner=fake_tuner(self.clock), **options)  # fmt: skip
        def rows(x, *, config):
            self.seen.append(x.shape[0])
            if not valid(x, config.way):
                raise ValueError(f"{x.shape[0]} rows are not valid")
            n = x.shape[0]
            self.clock.spend((0.01 * n, 1.0)[config.way])
            return config.way

        self.call = rows

    def record(self, x):
        return self.call.selector.persistent.read(self.call.problem(x))


def rows(n):
    return np.arange(n * 2.0).reshape(n, 2)


@pytest.mark.promise("buckets-agree")
@pytest.mark.parametrize("first", [65, 90, 100, 127, 128])
def test_the_choice_of_a_bucket_does_not_depend_on_its_first_call(tmp_path, first):
    kernel = Rows(tmp_path / str(first))
    assert kernel.call(rows(first)) == 1, "at 128 rows; at the size of the first call, way=0 is faster up to 99"
    assert {*kernel.seen} <= {first, 128}
    (policy,) = {m.policy for m in kernel.record(rows(first)).body.measurements}
    assert policy == "host-clock/race/warmup=1/forward/at:x=128x2"


def test_the_callers_values_are_repeated_and_its_arguments_stay_as_they_are(tmp_path):
    x, got = rows(3), []
    kernel = Rows(tmp_path, valid=lambda x, _way: got.append(x.copy()) is None)
    kernel.call(x)
    assert np.array_equal(x, rows(3))
    large = next(each for each in got if each.shape == (4, 2))
    assert np.array_equal(large, x[[0, 1, 2, 0]])


def test_the_record_and_explain_say_at_which_size_it_was_measured(tmp_path):
    kernel = Rows(tmp_path)
    kernel.call(rows(100))
    assert kernel.record(rows(100)).body.provenance["at"] == {"sizes": "x=128x2", "reason": ""}
    assert "  at         x=128x2: the representative of its bucket" in str(kernel.call.explain(rows(100)))
    assert tb.tune(kernel.call, rows(70)).at["sizes"] == "x=128x2"


def test_the_command_shows_at_which_size_it_was_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path))
    Rows(None).call(rows(100))
    assert main(["show", "rows"]) == 0
    assert "measured at" in (said := capsys.readouterr().out)
    assert "x=128x2: the representative of its bucket" in said


@pytest.mark.promise("buckets-agree")
def test_a_failure_at_the_representative_falls_back_to_the_callers_arguments(tmp_path):
    kernel = Rows(tmp_path, valid=lambda x, _way: x.shape[0] == 90)
    assert kernel.call(rows(90)) == 0
    record = kernel.record(rows(90))
    assert record.head.decided
    assert {m.failure for m in record.body.measurements} == {None}, "the failures were met on made-up arguments"
    said = str(kernel.call.explain(rows(90)))
    assert "at         x=90x2: the caller's own size, because arguments of the representative size failed: " in said
    assert "128 rows are not valid" in said


def test_failures_on_the_callers_own_arguments_are_remembered(tmp_path):
    with pytest.warns(tb.TunebookWarning, match="90 rows are not valid"), pytest.raises(ValueError, match="90 rows"):
        Rows(tmp_path, valid=lambda _x, _way: False).call(rows(90))
    again = Rows(tmp_path, valid=lambda _x, _way: False)
    with pytest.raises(ValueError, match="90 rows are not valid"):
        again.call(rows(90))
    assert again.seen == [90], "the next process does not try again, and runs the heuristic's"


def test_a_winner_that_is_not_valid_at_the_callers_size_does_not_win(tmp_path):
    kernel = Rows(tmp_path, valid=lambda x, way: way == 0 or x.shape[0] % 64 == 0)
    assert kernel.call(rows(100)) == 0
    assert "its winner Config(way=1) fails at the caller's size" in str(kernel.call.explain(rows(100)))
    assert Rows(tmp_path / "another", valid=lambda x, way: way == 0 or x.shape[0] % 64 == 0).call(rows(128)) == 1


def test_a_fault_in_making_the_representative_never_fails_a_call(tmp_path, monkeypatch):
    def fail(*_args, **_options):
        raise RuntimeError("an array library that cannot do this")

    monkeypatch.setattr("tunebook._kernel.rounded_call.rounded_call", fail)
    kernel = Rows(tmp_path)
    assert kernel.call(rows(90)) == 0
    assert kernel.record(rows(90)).head.decided


def test_without_a_representative_the_first_call_is_measured(tmp_path):
    kernel = Rows(tmp_path, representative=False)
    assert kernel.call(rows(90)) == 0
    assert {*kernel.seen} == {90}
    assert "x=90x2: the caller's own size, because representative=False" in str(kernel.call.explain(rows(90)))


def test_the_authors_inputs_are_made_at_the_representative_size(tmp_path):
    kernel = Rows(
        tmp_path, inputs=lambda x: (np.full_like(x, 7.0),), valid=lambda x, _way: x.shape[0] < 128 or x[0, 0] == 7
    )
    kernel.call(rows(100))
    assert kernel.record(rows(100)).body.provenance["values_from"] == "inputs"
    assert "on         arguments made by inputs=" in str(kernel.call.explain(rows(100)))


@pytest.mark.parametrize("inputs", [lambda x: 1 / 0, lambda x: (x[:5],)], ids=["raises", "another key"])
def test_inputs_that_fail_leave_the_callers_arguments(tmp_path, inputs):
    kernel = Rows(tmp_path, inputs=inputs)
    assert kernel.call(rows(90)) == 0
    assert {*kernel.seen} == {90}
    assert kernel.record(rows(90)).body.provenance["values_from"] == "call"


def test_a_choice_on_made_up_inputs_of_another_release_of_the_code_is_replaced(tmp_path):
    kernel = Rows(tmp_path, inputs=lambda x: (x,))
    kernel.call.kernel.environment = lambda _: "old"
    kernel.call(rows(100))
    later = Rows(tmp_path, inputs=lambda x: (x,))
    later.call.kernel.environment = lambda _: "new"
    later.call(rows(90))
    assert later.record(rows(90)).head.environment == "new"


def test_measurements_at_different_sizes_of_a_bucket_are_not_compared(tmp_path):
    Rows(tmp_path, representative=False).call(rows(90))
    kernel = Rows(tmp_path)
    assert tb.tune(kernel.call, rows(90)).config.way == 1
    assert {m.policy.rpartition("at:")[2] for m in kernel.record(rows(90)).body.measurements} == {"x=90x2", "x=128x2"}


# ----------------------------------------------------------------------------------- which arguments follow the sizes


def made_from(function, *args):
    inv = function.kernel.call(args, {})
    found, said = function.kernel.rounded(inv)
    return dict(zip(function.kernel.parameters, found.args, strict=True)), said


def tunable(**options):
    return tb.tunable(space=tb.Space(way=[0, 1]), heuristic={"way": 0}, store=False, check=False, **options)


def test_arguments_outside_of_the_key_follow_the_sizes():
    @tunable(bucket={"x": {0: tb.pow2}, "n": tb.pow2}, ignore=("out", "label"))
    def f(x, n, out, label, *, config):
        return None

    made, said = made_from(f, rows(100), 100, np.zeros((100, 7)), "text")
    assert {name: getattr(value, "shape", value) for name, value in made.items()} == {
        "x": (128, 2), "n": 128, "out": (128, 7), "label": "text",
    }  # fmt: skip
    assert said.sizes == "x=128x2,n=128"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((rows(100), 100), "other has the same value as a size, and is not in the key"),
        ((np.zeros((100, 50)), np.zeros((2, 100))), ""),
        ((np.zeros((0, 2)), None), ""),
    ],
)
def test_an_ambiguous_role_leaves_the_call_at_its_own_size(arguments, reason):
    @tunable(bucket={"x": {0: tb.pow2}}, ignore=("other",))
    def f(x, other, *, config):
        return None

    made, said = made_from(f, *arguments)
    assert said.reason == reason
    assert (made["x"] is arguments[0]) == bool(reason or not arguments[0].size)


def test_integers_may_be_indices_so_that_their_call_does_not_shrink():
    @tunable(bucket={"x": {0: [16, 64]}, "index": {0: [16, 64]}})
    def gather(x, index, *, config):
        return x[index]

    with pytest.warns(tb.TunebookWarning, match="above the largest bucket"):
        _, said = made_from(gather, rows(100), np.arange(100))
    assert said.reason == "index holds integers, which may be indices, and a size shrinks"
    made, said = made_from(gather, rows(50), np.arange(50))
    assert (made["x"].shape, made["index"].max(), said.reason) == ((64, 2), 49, "")


def test_candidates_that_depend_on_the_size_are_tuned_at_the_callers():
    @tb.tunable(space=lambda x: [{"way": n} for n in range(x.shape[0])], store=False, bucket={"x": {0: tb.pow2}})
    def f(x, *, config):
        return None

    made, said = made_from(f, rows(3))
    assert (made["x"].shape, said.reason) == ((3, 2), "its candidates depend on the size")


def test_a_bucket_that_is_too_large_is_tuned_at_the_callers_size():
    @tunable(bucket={"x": {0: lambda n: 1 << 40}})
    def f(x, *, config):
        return None

    _, said = made_from(f, rows(3))
    assert said.reason.startswith("the arrays would take")


def test_the_sizes_of_a_thousand_arrays_are_a_short_text_that_still_tells_them_apart():
    @tunable(bucket={"xs": tb.pow2})
    def f(xs, *, config):
        return None

    one, other = ([np.ones(n) for n in (*[3] * 999, last)] for last in (2, 4))
    texts = {f.kernel.own_sizes(f.kernel.call((xs,), {})) for xs in (one, other)}
    assert len(texts) == 2
    assert max(map(len, texts)) < 250
    made, _ = made_from(f, one)
    assert [x.shape for x in made["xs"]] == [(4,)] * 999 + [(2,)]


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("layout", ["C", "F", "view"])
def test_arrays_of_every_library_grow_and_shrink_in_their_layout(library, layout):
    if library == "jax" and layout != "C":
        pytest.skip("jax has no layouts")
    x = rows(3) if layout == "C" else np.asfortranarray(rows(3)) if layout == "F" else np.zeros((3, 4))[:, ::2]
    x[...] = rows(3)
    if library == "torch":
        x = pytest.importorskip("torch").from_numpy(x)
    elif library == "jax":
        x = pytest.importorskip("jax.numpy").asarray(x)
    for n in (2, 5):
        made = resized(x, (n, 2))
        assert describe(made).layout == describe(x).layout
        assert np.array_equal(np.asarray(made), rows(3)[np.arange(n) % 3])


def test_in_a_trace_of_jax_the_bucket_is_tuned_at_its_representative_too(tmp_path):
    jax = pytest.importorskip("jax")
    shapes = set()

    @tb.tunable(space=tb.Space(way=[1, 2]), heuristic={"way": 1}, store=tmp_path, bucket={"x": {0: tb.pow2}})
    def double(x, *, config):
        shapes.add(x.shape)
        return x * 2

    x = jax.numpy.ones((100, 3))
    assert jax.jit(double)(x).shape == (100, 3)
    assert shapes == {(100, 3), (128, 3)}
    said = str(double.explain(x))
    assert "at         x=128x3: the representative of its bucket" in said
    assert "on         made-up arguments: random floats" in said
