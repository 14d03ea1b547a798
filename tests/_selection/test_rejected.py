"""Every candidate was rejected: the call says so once, and fails if the policy is strict."""

from __future__ import annotations

import importlib.util
import itertools
import re
import traceback
from contextlib import suppress

import numpy as np
import pytest
from kernels import FakeClock, fake_tuner

import tunebook as tb
from tunebook._base.config_codec import encode
from tunebook._cli.pin import pin

X = np.ones(4)
STRICT = tb.AutotunePolicy(strict=True)


def make(path=False, *, out=lambda x: x, heuristic={"block": 1}, **options):  # noqa: B006 - not written to
    clock = FakeClock()

    def f(x, *, config):
        clock.spend(config.block)
        return out(x)

    space = tb.Space(block=[1, 2])
    return tb.tunable(f, space=space, heuristic=heuristic, name="f", store=path, tuner=fake_tuner(clock), **options)


def fails(_x):
    raise OSError("no such device")


def another():
    numbers = itertools.count(1)
    return lambda x: x + next(numbers)


REJECTED = {
    "wrong": (
        {"reference": lambda x: x + 1},
        r"all 2 candidates gave a wrong output: ValueError: output is off by up to 1 in 4 of 4",
        "unlike the reference. The call runs with the heuristic's Config(block=1), whose output is wrong too. Fix ",
    ),
    "raises": ({"out": fails}, r"all 2 candidates failed alike: OSError: no such device", "which failed too"),
    "returns nothing": (
        {"out": lambda _x: None, "reference": np.copy},
        r"the candidate returned nothing, and the reference returned its output",
        "whose output is wrong too",
    ),
    "reference raises": ({"reference": fails}, r"the reference failed: OSError: no such device", "was not checked"),
    "reference varies": (
        {"reference": another()},
        r"the reference returns another output each time.*check=",
        "whose output was not checked",
    ),
}


@pytest.mark.promise("all-rejected-warns")
@pytest.mark.parametrize("why", REJECTED)
def test_a_call_with_a_rejected_configuration_warns_once_and_says_what_to_type(why):
    options, reason, state = REJECTED[why]
    rejected = make(**options)

    def call_three_times():
        for _ in range(3):
            with suppress(OSError):  # the kernel's own error
                rejected(X)

    with pytest.warns(tb.TunebookWarning, match=rf"f@v0 is not tuned: .*{reason}") as warned:
        call_three_times()
    (warning,) = warned
    for part in ("heuristic's Config(block=1), ", state, "f.explain(...)", "AutotunePolicy(strict=True)"):
        assert part in str(warning.message)


@pytest.mark.promise("all-rejected-warns")
@pytest.mark.parametrize("why", REJECTED)
def test_a_strict_policy_raises_at_every_call(why):
    options, reason, _ = REJECTED[why]
    rejected = make(policy=STRICT, **options)
    for _ in range(2):
        with pytest.raises(tb.TuningFailed) as failed:
            rejected(X)
        assert failed.value.message.startswith("f@v0: ")
        assert failed.value.exceptions
        assert re.search(reason.split(": ")[-1].split(".*")[0], str(failed.value))


def test_a_call_that_can_be_tuned_neither_warns_nor_raises(recwarn):
    assert make(policy=STRICT, reference=np.copy)(X) is X
    assert not [w for w in recwarn if issubclass(w.category, tb.TunebookWarning)]


def test_a_later_process_that_finds_the_failures_in_the_book_warns_too(tmp_path):
    with pytest.warns(tb.TunebookWarning, match="is not tuned"):
        make(tmp_path, reference=lambda x: x + 1)(X)
    tb._base.errors.forget_warnings()
    with pytest.warns(tb.TunebookWarning, match=r"is not tuned: .*\(remembered from an earlier tuning\)"):
        make(tmp_path, reference=lambda x: x + 1)(X)
    with pytest.raises(tb.TuningFailed):
        make(tmp_path, reference=lambda x: x + 1, policy=STRICT)(X)


@pytest.mark.parametrize(
    "remedy", [{"reference": np.copy}, {"reference": lambda x: x + 1, "tolerance": 1}, {"reference": None}], ids=str
)
def test_after_a_change_of_the_check_rejected_candidates_are_tried_again(tmp_path, remedy):
    with pytest.warns(tb.TunebookWarning, match="is not tuned"):
        make(tmp_path, reference=lambda x: x + 1)(X)
    mended = make(tmp_path, policy=STRICT, **remedy)
    assert mended(X) is X
    assert mended.explain(X).record.head.decided


def test_a_varying_reference_leaves_no_failures_in_the_book(tmp_path):
    with pytest.warns(tb.TunebookWarning, match="another output each time"):
        make(tmp_path, reference=another())(X)
    assert make(tmp_path).explain(X).record is None


def test_without_a_heuristic_the_error_does_not_advise_to_allow_tuning():
    with pytest.raises(tb.NoConfig) as failed:
        make(out=fails, heuristic=None)(X)
    assert "allow tuning" not in str(failed.value)
    assert "a candidate that works" in str(failed.value)


def test_strict_is_a_policy_for_a_block_too():
    rejected = make(reference=lambda x: x + 1)
    with tb.policy_override(rejected.selector, strict=True), pytest.raises(tb.TuningFailed):
        rejected(X)
    with pytest.warns(tb.TunebookWarning, match="is not tuned"):
        rejected(X)


def pinned_kernel(tmp_path, code):
    """A kernel whose second candidate adds `code` to the right output."""
    clock = FakeClock()

    @tb.tunable(space=tb.Space(b=[1, 2]), reference=lambda n: n, store=tmp_path, name="mm", tuner=fake_tuner(clock))
    def matmul(n, *, config):
        clock.spend(1e-3)
        return n + code * (config.b == 2)

    return matmul


def rejected_kernel(tmp_path):
    """The same in a new process, after a tuning that rejected the candidate."""
    with pytest.warns(tb.TunebookWarning, match="gave a wrong output"):
        pinned_kernel(tmp_path, 1)(5)
    return pinned_kernel(tmp_path, 1)


def test_a_pin_to_a_candidate_that_was_rejected_warns_once(tmp_path, monkeypatch):
    matmul = rejected_kernel(tmp_path)
    monkeypatch.setenv("TUNEBOOK_PIN", "mm:b=2")
    assert matmul.explain(5).selection.source == "pinned"
    said = r"TUNEBOOK_PIN gives mm@v0 Config\(b=2\), which was rejected when it was tuned: output is 6, expected 5"
    with pytest.warns(tb.TunebookWarning, match=said) as caught:
        assert [matmul(5), matmul(5)] == [6, 6]
    assert len(caught) == 1
    assert pinned_kernel(tmp_path, 0)(5) == 5, "of other code nothing is known"


def test_a_pin_to_a_candidate_that_was_right_is_no_news(tmp_path, monkeypatch):
    matmul = rejected_kernel(tmp_path)
    monkeypatch.setenv("TUNEBOOK_PIN", "mm:b=1")
    assert matmul(5) == 5


def test_a_pin_in_the_book_to_a_candidate_that_was_rejected_warns(tmp_path):
    matmul = rejected_kernel(tmp_path)
    cache = matmul.selector.persistent
    cache.write(pin(cache.read(matmul.problem(5)), encode(tb.Config(b=2))))
    with pytest.warns(tb.TunebookWarning, match=r"`tunebook pin` gives mm@v0 Config\(b=2\), which was rejected"):
        assert matmul(5) == 6


def test_candidates_that_raise_alike_share_one_traceback_with_the_hint():
    @tb.tunable(space=tb.Space(rows=range(1, 13)), store=False)
    def total(n, *, config):
        return n * config.row

    with pytest.raises(tb.NoConfig) as caught:
        total(3)
    printed = "".join(traceback.format_exception(caught.value))
    with pytest.raises(tb.NoConfig) as again:  # a failure that is remembered
        total(3)
    for said in (str(caught.value), str(again.value)):
        assert re.findall(r"\n  autotune +.*all 12 candidates failed alike\n {21,}.*'row'; did you mean 'rows'\?", said)
        assert said.count("'row'") == 1
    assert printed.count("return n * config.row") == 1
    assert "tunebook.NoConfig: no configuration" in printed
    assert not re.findall(r"tunebook/_(?:measure|selection)/", printed), "the frames of this package say nothing"
    assert len(caught.value.__cause__.measurements) == 12


def test_a_failure_that_is_remembered_has_the_words_of_the_first():
    @tb.tunable(space=tb.Space(b=[1, 2]), store=False)
    def total(n, *, config):
        raise ValueError("no shared memory")

    for prefix in ("", "failed before: "):
        with pytest.raises(tb.NoConfig) as caught:
            total(3)
        below = " " * 21
        told = f"autotune         {prefix}all 2 candidates failed alike\n{below}ValueError: no shared memory\n"
        assert told in str(caught.value)
        assert type(caught.value.__cause__.exceptions[0]) is ValueError


def test_constraints_that_refuse_every_combination_are_named():
    kernel = tb.tunable(lambda n, *, config: n, space=tb.Space(t=[1, 2]).where(lambda c: c.t > 5), store=False)
    with pytest.raises(tb.NoConfig, match="`where` left out all 2 combinations") as caught:
        kernel(1)
    assert "allow tuning" not in str(caught.value)
    assert "Give the kernel a candidate" in str(caught.value)


class AxisError(ValueError):
    """As numpy's AxisError, of a class of its own."""


def test_a_reference_that_fails_is_to_be_mended_and_its_error_keeps_its_name():
    def reference(n):
        raise AxisError("axis 5 is out of bounds")

    kernel = tb.tunable(lambda n, *, config: n, space=tb.Space(t=[1, 2]), reference=reference, store=False)
    for _ in range(2):
        with pytest.raises(tb.NoConfig) as caught:
            kernel(1)
        assert "the reference failed\n                     AxisError: axis 5" in str(caught.value)
        assert str(caught.value).endswith("\nFix the kernel's reference=, or pass a configuration with the call.")


def test_outputs_that_all_differ_from_the_reference_blame_the_kernel_or_its_check():
    kernel = tb.tunable(lambda n, *, config: n, space=tb.Space(t=[1, 2]), reference=lambda n: n + 1, store=False)
    with pytest.raises(tb.NoConfig, match=r"\nFix the kernel, or its check with reference=, tolerance= or check=; or"):
        kernel(1)


def test_a_tuning_that_remembers_the_failures_of_all_candidates_says_it_as_the_first_did(tmp_path):
    @tb.tunable(space=tb.Space(b=[1, 2, 3]), store=tmp_path)
    def total(n, *, config):
        raise ValueError("no shared memory\nat all")

    for suffix in ("", " (remembered from an earlier tuning)"):
        with pytest.raises(tb.TuningFailed) as caught:
            tb.tune(total, 3)
        assert caught.value.summary == f"all 3 candidates failed alike: ValueError: no shared memory{suffix}"
        assert str(caught.value).count("at all") == 1


def sloppy(path, **options):
    """A kernel whose fastest candidate gives an output that is 5 % off; and the list of its runs."""
    clock, ran = FakeClock(), []

    def twice(x, *, config):
        ran.append(config.way)
        clock.spend({"right": 2, "slow": 3, "sloppy": 1}[config.way])
        return x * (1.9 if config.way == "sloppy" else 2)

    space = tb.Space(way=["right", "slow", "sloppy"])
    kernel = tb.tunable(
        twice, space=space, heuristic={"way": "right"}, name="twice", store=path, tuner=fake_tuner(clock), **options
    )
    return kernel, ran


class TestAChangedCheck:
    """A choice that passed another check is verified before it is used again."""

    @pytest.fixture(
        params=[{"tolerance": 1e-6}, {"reference": lambda x: x * 2}, {"check": "exact", "reference": lambda x: x * 2}],
        ids=str,
    )
    def stricter(self, request):
        return request.param

    @pytest.fixture
    def book(self, tmp_path):
        kernel, _ = sloppy(tmp_path, tolerance=0.5)
        kernel(X)
        assert kernel.config_for(X)["way"] == "sloppy"
        return tmp_path

    @pytest.mark.promise("check-changed")
    @pytest.mark.parametrize("on_demand", [False, True])
    @pytest.mark.filterwarnings("ignore::tunebook.TunebookWarning")
    def test_a_stricter_check_rejects_the_choice(self, book, stricter, on_demand):
        kernel, _ = sloppy(book, **stricter)
        if on_demand:
            assert tb.tune(kernel, X, progress=False).config["way"] == "right"
        assert kernel(X)[0] == 2
        later, ran = sloppy(book, **stricter)
        assert later(X)[0] == 2
        assert ran == ["right"], "it is known now: the call runs once"

    def test_a_choice_that_passes_is_kept_and_verified_once(self, book):
        kernel, ran = sloppy(book, tolerance=0.4)
        assert kernel(X)[0] == 1.9
        assert "sloppy" in ran
        later, ran = sloppy(book, tolerance=0.4)
        assert later(X)[0] == 1.9
        assert ran == ["sloppy"]

    @pytest.mark.filterwarnings("ignore::tunebook.TunebookWarning")
    def test_the_gain_is_that_of_the_candidates_that_pass_the_check_of_now(self, tmp_path):
        for options in ({"reference": lambda x: x * 2}, {"check": False}, {"reference": lambda x: x * 2}):
            kernel, _ = sloppy(tmp_path, **options)
            kernel(X)
        told = kernel.explain(X)
        assert (told.config["way"], told.verdict.winner.value_s, told.gain) == ("right", 2, 1)

    def test_a_frozen_program_says_that_the_check_has_changed(self, book, monkeypatch):
        monkeypatch.setenv("TUNEBOOK_MODE", "frozen")
        kernel, _ = sloppy(book, tolerance=1e-6)
        with pytest.warns(tb.TunebookWarning, match="outputs were checked in another way when the entry was made"):
            assert kernel(X)[0] == 1.9

    def test_a_pin_is_not_questioned(self, book):
        store = tb.stores.DirectoryStore(book)
        (record,) = store.items()
        store.put(pin(record, record.head.config))
        kernel, ran = sloppy(book, tolerance=1e-6)
        assert (kernel(X)[0], ran) == (1.9, ["sloppy"])

    def test_a_looser_check_tries_rejected_candidates_again(self, tmp_path):
        strict, _ = sloppy(tmp_path, reference=lambda x: x * 2)
        with pytest.warns(tb.TunebookWarning, match="gave a wrong output"):
            assert strict(X)[0] == 2
        loose, _ = sloppy(tmp_path, reference=lambda x: x * 2, tolerance=0.5)
        assert loose(X)[0] == 1.9
        assert not loose.explain(X).failures

    @pytest.mark.filterwarnings("ignore::tunebook.TunebookWarning")
    def test_a_check_that_was_broken_for_one_run_leaves_the_choice_and_its_times(self, book):
        broken, _ = sloppy(book, check=lambda _output, _right: False)
        assert broken(X)[0] == 2, "the heuristic's"
        again, ran = sloppy(book, tolerance=0.5)
        assert (again(X)[0], ran) == (1.9, ["sloppy"])
        told = again.explain(X)
        assert (told.verdict.winner.value_s, told.gain, told.failures) == (1, 2, ())

    def test_an_installed_package_has_the_check_of_its_checkout(self, tmp_path):
        source = (
            "import tunebook as tb\n"
            "def helper(x): return 2 * x\n"
            "def right(x): return helper(x)\n"
            "@tb.tunable(space=tb.Space(b=[1, 2]), reference=right, store=False)\n"
            "def twice(x, *, config): return 2 * x\n"
        )
        digests = []
        for place in ("checkout", "lib/site-packages"):
            path = tmp_path / place / "shipped_kernels.py"
            path.parent.mkdir(parents=True)
            path.write_text(source)
            spec = importlib.util.spec_from_file_location("shipped_kernels", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            digests.append(module.twice.kernel.check_checksum)
        assert digests[0] == digests[1]


@pytest.mark.filterwarnings("ignore::tunebook.TunebookWarning")
@pytest.mark.parametrize("on_demand", [False, True])
def test_a_heuristic_that_is_corrected_decides_what_is_right(tmp_path, monkeypatch, on_demand):
    def kernel(way):
        made, ran = sloppy(tmp_path)
        heuristic = {"heuristic": {"way": way}} if way else {}
        options = {"space": tb.Space(way=["right", "slow", "sloppy"]), "name": "twice", "store": tmp_path, **heuristic}
        return tb.tunable(made.__wrapped__, tuner=made.selector.tuner, **options), ran

    wrong, _ = kernel("sloppy")
    assert wrong(X)[0] == 1.9, "right by its own measure"
    monkeypatch.setenv("TUNEBOOK_MODE", "frozen")
    assert "has changed to a rejected configuration" in str(kernel("slow")[0].explain(X))
    monkeypatch.setenv("TUNEBOOK_MODE", "normal")
    corrected, _ = kernel("slow")
    if on_demand:
        assert tb.tune(corrected, X, progress=False).config["way"] == "right"
    assert corrected(X)[0] == 2
    assert not [m for m in corrected.explain(X).failures if "slow" in str(m.config)]
    later, ran = kernel("slow")
    assert (later(X)[0], ran) == (2, ["right"])
    same_outputs, ran = kernel("right")
    assert (same_outputs(X)[0], ran) == (2, ["right"]), "a heuristic with the same output changes nothing"
