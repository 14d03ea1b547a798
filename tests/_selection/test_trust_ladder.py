"""The ladder of trust: which outdated or foreign entries answer a call, in which mode, and how that is told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kernels import Costs, FakeClock, fake_tuner
from limits import HANG_S

import tunebook as tb
from tunebook._api.explain import explain_entry
from tunebook._arrays.device_families import family_of
from tunebook._base.errors import TunebookWarning
from tunebook._base.record_format import Body, Record
from tunebook.stores._listing import Catalogue

BEST = 4


def make_kernel(book, steps=(1, 2, BEST), *, code="same", policy=None):
    """Return a kernel that is always called "scale"; another `code` makes it another version of the same kernel."""

    @tb.tunable(
        space=tb.Space(step=list(steps)), heuristic={"step": 1}, store=book, name="scale", policy=policy, check=False
    )
    def scale(x, *, config):
        return np.add(config.step, 0), code  # reads numpy, of which a release is not an edit

    return scale


@pytest.fixture
def book(tmp_path):
    """A book with one entry of `make_kernel`, whose winner is not the heuristic's configuration."""
    kernel = make_kernel(tmp_path)
    kernel(np.ones(8))
    _rewrite(kernel, lambda head: replace(head, config={**head.config, "v": {"step": BEST}}))
    return tmp_path


def _rewrite(kernel, change):
    store = kernel.selector.persistent.store
    (record,) = store.items("scale@v0")
    store.delete(record.head.problem)
    store.put(Record(change(record.head), Body()))  # without times, which would decide on the nearest entry


def _other_versions(book, patch):
    patch.setattr(np, "__version__", "99.0")
    return make_kernel(book), np.ones(8)


def _other_candidates(book, _patch):
    return make_kernel(book, (1, 2, BEST, 8)), np.ones(8)


def _other_code(book, _patch):
    return make_kernel(book, code="edited"), np.ones(8)


def _other_device(book, _patch):
    kernel = make_kernel(book)
    _rewrite(kernel, lambda head: replace(head, problem=head.problem._replace(device=_sibling(head.problem.device))))
    return kernel, np.ones(8)


def _sibling(device):
    return device.replace(" cores ", "0 cores ")


def _other_size(book, _patch):
    return make_kernel(book), np.ones(16)


def _other_size_and_device(book, patch):
    kernel, _ = _other_device(book, patch)
    _rewrite(kernel, lambda head: replace(head, problem=head.problem._replace(device="gpu:Another")))
    return kernel, np.ones(16)


CHANGES = {
    "versions": _other_versions,
    "candidates": _other_candidates,
    "code": _other_code,
    "family": _other_device,
    "near": _other_size,
    "any": _other_size_and_device,
}
RUNGS = ["exact", *CHANGES]


@pytest.mark.parametrize("rung", CHANGES)
@pytest.mark.parametrize("reach", RUNGS)
def test_an_entry_answers_exactly_when_trust_reaches_its_rung(rung, reach, book, monkeypatch):
    kernel, x = CHANGES[rung](book, monkeypatch)
    monkeypatch.setenv("TUNEBOOK_MODE", "frozen")
    monkeypatch.setenv("TUNEBOOK_TRUST", reach)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TunebookWarning)
        step, _ = kernel(x)
    assert step == (BEST if RUNGS.index(rung) <= RUNGS.index(reach) else 1)


@pytest.mark.promise("frozen-serves-the-stored-winner")
@pytest.mark.parametrize("mode", ["frozen", "replay"])
@pytest.mark.parametrize("rung", ["versions", "candidates", "code", "family"])
def test_frozen_serving_keeps_the_stored_winner_and_says_its_rung(mode, rung, book, monkeypatch):
    kernel, x = CHANGES[rung](book, monkeypatch)
    monkeypatch.setenv("TUNEBOOK_MODE", mode)
    heard = []
    kernel.selector.listen(lambda event, **data: heard.append((event, data.get("trust"))))
    with pytest.warns(TunebookWarning, match=f"trusted as '{rung}'") as told:
        answers = {kernel(x)[0] for _ in range(5)}
    assert answers == {BEST}
    assert len(told) == 1
    assert heard == [("cache_hit", rung)] * 5
    assert f"trusted     as '{rung}': " in str(kernel.explain(x))


def test_a_configuration_that_the_kernel_does_not_have_any_more_is_not_served(book, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_MODE", "frozen")
    monkeypatch.setenv("TUNEBOOK_TRUST", "any")
    assert make_kernel(book, (1, 2))(np.ones(8))[0] == 1


def test_normal_mode_measures_an_outdated_entry_unless_the_policy_trusts_it(book):
    trusting = make_kernel(book, (1, 2, BEST, 8), policy=tb.AutotunePolicy(trust="candidates"))
    with pytest.warns(TunebookWarning, match="trusted as 'candidates'"):
        assert trusting(np.ones(8))[0] == BEST
    kernel = make_kernel(book, (1, 2, BEST, 8))
    events = []
    kernel.selector.listen(lambda event, **_: events.append(event))
    kernel(np.ones(8))
    assert "autotune_start" in events


def test_the_nearest_size_does_not_answer_for_an_outdated_entry_of_the_call_itself(book):
    make_kernel(book)(np.ones(9))  # a neighbour, whose winner is another configuration
    kernel = make_kernel(book, code="edited", policy=tb.AutotunePolicy(cache_miss_fallback="nearest"))
    with pytest.warns(TunebookWarning, match="trusted as 'code'"):
        assert kernel(np.ones(8))[0] == BEST


@pytest.mark.parametrize("policy", [{"cache_miss_fallback": "heuristics"}, {"allow_autotune": False}])
def test_where_nothing_is_tuned_the_outdated_entry_beats_the_heuristic(policy, book):
    kernel = make_kernel(book, code="edited", policy=tb.AutotunePolicy(**policy))
    with pytest.warns(TunebookWarning, match="trusted as 'code'"):
        assert kernel(np.ones(8))[0] == BEST


def test_while_a_background_tuning_runs_the_outdated_entry_answers(book):
    kernel = make_kernel(book, code="edited", policy=tb.AutotunePolicy(cache_miss_fallback="background"))
    with pytest.warns(TunebookWarning, match="trusted as 'code'"):
        assert kernel(np.ones(8))[0] == BEST


def test_turning_trust_off_takes_effect_at_the_next_call(book, monkeypatch):
    kernel = make_kernel(book, code="edited")
    monkeypatch.setenv("TUNEBOOK_MODE", "frozen")
    with pytest.warns(TunebookWarning, match="trusted as 'code'"):
        assert kernel(np.ones(8))[0] == BEST
    monkeypatch.setenv("TUNEBOOK_TRUST", "exact")
    assert kernel(np.ones(8))[0] == 1


def test_an_alias_makes_two_devices_relatives(monkeypatch):
    monkeypatch.setattr("tunebook._arrays.device_families._alike", {})
    assert family_of("gpu:ACME H100-like") == "NVIDIA Hopper"
    assert family_of("gpu:ACME 1") != family_of("gpu:NVIDIA H200")
    tb.device_alias("ACME 1", "gpu:NVIDIA H100 80GB HBM3")
    assert family_of("gpu:ACME 1") == family_of("gpu:NVIDIA H200")
    with pytest.raises(tb.DefinitionError, match="tunebook ls"):
        tb.device_alias("", "NVIDIA H200")


def test_an_alias_counts_from_the_next_call_on(tmp_path, monkeypatch):
    monkeypatch.setattr("tunebook._arrays.device_families._alike", {})
    asked = {"space": tb.Space(n=[1, 2]), "key": ("rows",), "heuristic": {"n": 1}, "store": tmp_path}
    there, here = (tb.table("asked", device=f"gpu:{name}", **asked) for name in ("NVIDIA H200", "ACME 1"))
    there.selector.persistent.put(*there.problem(5), tb.Config(n=2))
    monkeypatch.setenv("TUNEBOOK_MODE", "frozen")
    assert [here(5).n for _ in range(3)] == [1, 1, 1]
    tb.device_alias("ACME 1", like="NVIDIA H200")
    with pytest.warns(TunebookWarning, match="trusted as 'family'"):
        assert here(5).n == 2


def test_a_pattern_makes_many_devices_relatives_and_exact_names_go_first(monkeypatch):
    monkeypatch.setattr("tunebook._arrays.device_families._alike", {})
    tb.device_alias("ACME ?00*", like="NVIDIA H200")
    tb.device_alias("ACME 300 [old]", like="NVIDIA A100-SXM4-40GB")
    assert {family_of(f"gpu:ACME {name}") for name in ("100", "200 80GB")} == {"NVIDIA Hopper"}
    assert family_of("gpu:ACME 300 [old]") == "NVIDIA Ampere, data centre"
    assert family_of("gpu:ACME 10") == "ACME 10"
    tb.device_alias("ACME 1*", like="AMD Instinct MI300X")
    assert family_of("gpu:ACME 100") == "AMD CDNA 3", "the latest pattern counts"


@pytest.mark.parametrize("wrong", ["version", "EXACT"])
def test_a_wrong_rung_is_an_error_that_lists_the_rungs(wrong, monkeypatch, tmp_path):
    with pytest.raises(tb.DefinitionError, match="'versions'"):
        tb.AutotunePolicy(trust=wrong)
    monkeypatch.setenv("TUNEBOOK_TRUST", wrong)
    with pytest.raises(tb.DefinitionError, match="'versions', 'candidates'"):
        make_kernel(tmp_path)(np.ones(8))


def test_metrics_count_answers_by_rung(book, monkeypatch):
    from tunebook._report.metrics import Counts

    counts = Counts()
    kernel = make_kernel(book, code="edited")
    kernel.selector.listen(counts.hear)
    monkeypatch.setenv("TUNEBOOK_MODE", "frozen")
    with pytest.warns(TunebookWarning, match="trusted"):
        kernel(np.ones(8))
    kernel(np.ones(8))
    assert 'rung="code"} 2' in counts.text()
    assert "tunebook_hits_total" in counts.text()


def test_a_warm_call_does_not_climb_again(book, monkeypatch):
    kernel = make_kernel(book, code="edited")
    monkeypatch.setenv("TUNEBOOK_MODE", "frozen")
    with pytest.warns(TunebookWarning, match="trusted"):
        kernel(np.ones(8))
    monkeypatch.setattr("tunebook._selection.trust.climb", lambda *_: pytest.fail("the answer was not memoised"))
    assert kernel(np.ones(8))[0] == BEST


def test_only_rungs_that_may_answer_are_looked_at(book, monkeypatch):
    kernel = make_kernel(book)
    monkeypatch.setenv("TUNEBOOK_MODE", "frozen")  # up to "family"
    monkeypatch.setattr("tunebook.search._warm_start.nearest", lambda *_: pytest.fail("no rung needs it"))
    assert kernel(np.ones(16))[0] == 1


def test_an_explanation_without_the_program_trusts_as_the_mode_does(book, monkeypatch):
    store = make_kernel(book).selector.persistent.store
    (record,) = store.items("scale@v0")
    record = Record(replace(record.head, environment='{"numpy":"0.1"}'), record.body)
    explained = lambda: explain_entry(Catalogue(store), record.head.problem, record).selection
    assert explained().level == "verification"
    monkeypatch.setenv("TUNEBOOK_MODE", "frozen")
    assert (explained().level, explained().trust[0]) == ("persistent", "versions")


# --------------------------------------------------------------------- when an entry that is trusted is measured here


class Scale:
    """The kernel of `book` on a fake clock, in which the entry's winner is not the fastest any more."""

    def __init__(self, book, steps=(1, 2, BEST, 8), **policy):
        self.clock, self.ran_in = FakeClock(), []
        costs, ran_in = Costs({1: 0.004, 2: 0.001, BEST: 0.003, 8: 0.002}), self.ran_in

        @tb.tunable(
            space=tb.Space(step=list(steps)), heuristic={"step": 1}, store=book, name="scale", check=False,
            tuner=fake_tuner(self.clock), policy=tb.AutotunePolicy(trust="any", **policy),
        )  # fmt: skip
        def scale(x, *, config):
            ran_in.append(threading.current_thread().name)
            self.clock.spend(costs.by_config[config.step])
            return config.step

        self.call = scale


@pytest.mark.promise("trusted-then-measured")
@pytest.mark.parametrize("size", [8, 16], ids=["its own entry", "the nearest entry"])
def test_an_entry_of_a_lower_rung_answers_at_once_and_is_measured_behind_the_call(book, size):
    kernel, x = Scale(book, reverify="behind"), np.ones(size)
    with pytest.warns(TunebookWarning, match="It is measured behind this call"):
        assert kernel.call(x) == BEST
    assert tb.wait_for_background(HANG_S)
    assert {*kernel.ran_in} == {threading.current_thread().name, "tunebook background"}
    assert kernel.call(x) == 2
    record = kernel.call.selector.persistent.read(kernel.call.problem(x))
    assert record.body.provenance["values_from"] == "random"
    kernel.ran_in.clear()
    assert Scale(book, reverify="behind").call(x) == 2
    assert kernel.ran_in == []


def test_explain_says_how_far_the_measurement_behind_the_call_is(book):
    kernel, x = Scale(book, reverify="behind"), np.ones(8)
    assert "trusted     as 'code': the kernel had other code then; to be measured behind a call" in str(
        kernel.call.explain(x)
    )
    assert kernel.ran_in == []
    with pytest.warns(TunebookWarning):
        kernel.call(x)
    assert tb.wait_for_background(HANG_S)
    assert "trusted" not in str(kernel.call.explain(x))


def test_a_failure_behind_the_call_leaves_the_trusted_answer_and_is_told_once(book):
    kernel, x = Scale(book, reverify="behind"), np.ones(8)
    run = kernel.call.kernel.runner

    def fail(x, config):
        if threading.current_thread().name == "tunebook background":
            raise ValueError("not on made-up arguments")
        return run(x, config)

    kernel.call.kernel.runner = fail
    with pytest.warns(TunebookWarning) as told:
        answers = [kernel.call(x), tb.wait_for_background(HANG_S), kernel.call(x), tb.wait_for_background(HANG_S)]
    assert answers == [BEST, True, BEST, True]
    assert ["not on made-up arguments" in str(warning.message) for warning in told] == [False, True]


def test_what_another_thread_cannot_make_up_is_served_and_not_measured(book):
    @tb.tunable(
        space=tb.Space(step=[1, 2, BEST, 8]), heuristic={"step": 1}, store=book, name="scale", ignore=("other",),
        policy=tb.AutotunePolicy(trust="code", reverify="behind"), check=False,
    )  # fmt: skip
    def scale(x, other, *, config):
        return config.step

    with pytest.warns(TunebookWarning) as told:
        assert scale(np.ones(8), threading.Lock()) == BEST
    assert any(
        "is not measured behind the call: one of its arguments is a _thread.lock" in str(w.message) for w in told
    )


@pytest.mark.parametrize(("reverify", "status", "best"), [("tuning", "tuned", 2), ("never", "known", BEST)])
def test_the_next_tuning_measures_it_unless_the_policy_never_does(book, reverify, status, best):
    kernel, x = Scale(book, reverify=reverify), np.ones(8)
    with pytest.warns(TunebookWarning, match="trusted as 'code'"), tb.record() as calls:
        assert kernel.call(x) == BEST
    assert len(kernel.ran_in) == 1
    (outcome,) = tb.tune_all(calls)
    assert (outcome.status, outcome.config.step) == (status, best)
    assert kernel.call(x) == best


def test_in_frozen_mode_nothing_is_measured_behind_a_call(book, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_MODE", "frozen")
    kernel = Scale(book, reverify="behind")
    with pytest.warns(TunebookWarning, match="run `tunebook verify`"):
        assert kernel.call(np.ones(8)) == BEST
    assert tb.wait_for_background(HANG_S)
    assert len(kernel.ran_in) == 1
    assert "not measured behind the call: off: TUNEBOOK_MODE is frozen" in str(kernel.call.explain(np.ones(8)))


def test_a_wrong_value_of_reverify_is_an_error():
    with pytest.raises(tb.DefinitionError, match="invalid reverify='later'; use one of 'never', 'tuning', 'behind'"):
        tb.AutotunePolicy(reverify="later")


# ------------------------------------------------------------------------------------ two interpreters, for real

PROGRAM = """
import json, os, sys, warnings
from collections import Counter
import tunebook as tb
from kernels import FakeClock, fake_tuner

STEPS, CLOCK = json.loads(sys.argv[1]), FakeClock()


@tb.tunable(space=tb.Space(step=STEPS), heuristic={"step": 1}, tuner=fake_tuner(CLOCK), check=False)
def scan(n, *, config):
    CLOCK.spend(abs(config.step - n) + 1)
    return config.step


heard = Counter()
scan.selector.listen(lambda event, **data: heard.update([f"{event} {data.get('trust')}"]))
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    answers = [[scan(n) for _ in range(20)] for n in (2, 4, 8)]
ours = [each for each in told if issubclass(each.category, tb.TunebookWarning)]
print(json.dumps([sys.version_info.minor, answers, heard, len(ours)]))
"""


def _other_pythons():
    """Return an interpreter for each other minor version of Python that is installed here and that tunebook runs on."""
    here, found = sys.version_info.minor, {}
    for minor in range(11, 16):
        beside = sorted(Path(sys.base_prefix).parent.glob(f"3.{minor}.*/bin/python"))  # as pyenv places them
        installed = [shutil.which(f"python3.{minor}"), *beside]
        for each in filter(None, installed):
            asked = subprocess.run(
                [each, "-c", "import sys; print(sys.version_info.minor)"], capture_output=True, check=False
            )
            if minor != here and asked.stdout.split() == [str(minor).encode()]:
                found[minor] = each
    return found


@pytest.mark.promise("frozen-serves-the-stored-winner")
def test_another_minor_version_of_python_and_an_added_candidate_get_the_stored_winner(tmp_path):
    pythons = _other_pythons()
    if not pythons:
        pytest.skip("no other minor version of Python from 3.11 on is installed here")
    (tmp_path / "program.py").write_text(PROGRAM)
    places = os.pathsep.join([str(Path(tb.__file__).parents[1]), str(Path(__file__).parents[1])])
    env = {**os.environ, "TUNEBOOK_HOME": str(tmp_path / "book"), "PYTHONPATH": places}

    def run(python, steps, **variables):
        line = [python, "program.py", json.dumps(steps)]
        done = subprocess.run(line, cwd=tmp_path, env={**env, **variables}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    winners = [[n] * 20 for n in (2, 4, 8)]
    assert run(sys.executable, [1, 2, 4, 8])[1] == winners
    for minor, python in pythons.items():
        for steps, rung in (([1, 2, 4, 8], "versions"), ([1, 2, 4, 8, 16], "candidates")):
            assert run(python, steps, TUNEBOOK_MODE="frozen") == [minor, winners, {f"cache_hit {rung}": 60}, 1]
