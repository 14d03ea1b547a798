"""One function says which candidate won, from the record alone: explain, ls, unpin and report agree with the answer."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from kernels import FakeClock, fake_tuner

import tunebook as tb
from tunebook._base.config_codec import encode, readable
from tunebook._base.record_format import Body, Head, Record
from tunebook._cli import main
from tunebook._report.entry import entry_of, facts_of
from tunebook._selection.recorded_decision import verdict_of
from tunebook.stores import DirectoryStore


def slowest(samples):
    return max(samples)


def make(path, objective):
    """A kernel with a candidate that is fast in every second run only, and one that always takes the same."""
    clock, runs = FakeClock(), itertools.count(1)

    @tb.tunable(
        space=[{"w": "spiky"}, {"w": "steady"}],
        heuristic={"w": "spiky"},
        tuner=fake_tuner(clock, iters=12),
        objective=objective,
        name="k",
        store=path,
    )
    def kernel(x, *, config):
        clock.spend(1.1 if config.w == "steady" else 1.5 if next(runs) % 2 == 0 else 1.0)
        return x

    return kernel


@pytest.fixture(params=["p95", "mean", slowest])
def tuned(tmp_path, request):
    kernel = make(tmp_path, request.param)
    kernel(np.ones(4))
    return kernel


def record_in(path):
    (record,) = DirectoryStore(path).items()
    return record


@pytest.mark.promise("explained-by-own-rule")
def test_explain_names_the_answer_as_the_winner(tuned):
    said = str(tuned.explain(np.ones(4)))
    assert "answer: Config(w='steady') from memory" in said
    winner = next(line for line in said.splitlines() if line.startswith("  winner"))
    assert winner.endswith("w='steady'")


@pytest.mark.promise("explained-by-own-rule")
def test_the_record_holds_all_that_decided(tuned, tmp_path):
    record = record_in(tmp_path)
    asked = tuned.kernel.objective
    facts = record.body.provenance
    assert facts["default"] != facts["winner"]
    assert facts["objective"] == asked if isinstance(asked, str) else facts["objective"] not in ("", "typical")
    verdict = verdict_of(record)
    assert verdict.winner.measurement.config == record.head.config
    assert [readable(r.measurement.config) for r in verdict.ranking] == ["w='steady'", "w='spiky'"]
    assert verdict.winner.value_s == 1.1 < verdict.ranking[1].value_s


def test_ls_shows_the_time_by_the_objective(tuned, tmp_path, capsys):
    assert main(["ls", "--book", str(tmp_path), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["config"], entry["seconds"]) == ({"w": "steady"}, 1.1)


def test_unpin_goes_back_to_the_configuration_that_won(tuned, tmp_path, capsys):
    assert main(["pin", "k", "w=spiky", "--book", str(tmp_path)]) == 0
    assert main(["unpin", "k", "--book", str(tmp_path)]) == 0
    record = record_in(tmp_path)
    assert (readable(record.head.config), record.head.origin) == ("w='steady'", "tuned")
    assert "steady" in capsys.readouterr().out.splitlines()[-1]


def test_a_report_takes_the_times_by_the_objective(tuned, tmp_path):
    record = record_in(tmp_path)
    facts = facts_of(record)
    by_record = {readable(m.config): facts.values_s()[m.fingerprint] for m in facts.current}
    assert by_record["w='steady'"] == 1.1 == entry_of(record).best_s
    assert by_record["w='spiky'"] == entry_of(record).default_s > 1.1


def test_a_record_without_an_objective_is_decided_by_the_typical_time(tmp_path):
    make(tmp_path, "typical")(np.ones(4))
    verdict = verdict_of(record_in(tmp_path))
    assert readable(verdict.winner.measurement.config) == "w='spiky'"


def test_measurements_of_several_calls_together_do_not_decide_about_one(tmp_path):
    kernel = make(tmp_path, "typical")
    kernel(np.ones(4))
    tb.tune_together(kernel, [(np.ones(4),), (np.ones(8),)], weights=[1.0, 3.0])
    for record in DirectoryStore(tmp_path).items():
        verdict = verdict_of(record)
        assert len({r.measurement.policy for r in verdict.ranking}) == 1
        assert sorted(record.body.provenance["weights"].values()) == [0.25, 0.75]


def test_a_tuning_beside_a_pin_writes_down_its_decision_for_unpin(tmp_path):
    kernel = make(tmp_path, "p95")
    store = DirectoryStore(tmp_path)
    problem = kernel.problem(np.ones(4))
    store.put(Record(Head(problem=problem, config=encode(tb.Config(w="spiky")), checksum="", origin="pinned"), Body()))
    tb.tune(kernel, np.ones(4))
    assert main(["unpin", "k", "--book", str(tmp_path)]) == 0
    assert readable(record_in(tmp_path).head.config) == "w='steady'"


def test_a_pin_that_no_candidate_fits_warns_and_stays_until_it_is_taken_away(tmp_path):
    problem = make(tmp_path, "p95").problem(np.ones(4))
    pin = encode(tb.Config(w="gone"))
    DirectoryStore(tmp_path).put(Record(Head(problem=problem, config=pin, checksum="", origin="pinned"), Body()))
    with pytest.warns(tb.TunebookWarning, match="none of its candidates now, so the pin has no effect"):
        make(tmp_path, "p95")(np.ones(4))
    assert (record_in(tmp_path).head.config, record_in(tmp_path).head.origin) == (pin, "pinned")
    assert tb.tune(make(tmp_path, "p95"), np.ones(4)).ran == 0, "its measurements are in the entry of the pin"
    assert main(["unpin", "k", "--book", str(tmp_path)]) == 0
    assert (readable(record_in(tmp_path).head.config), record_in(tmp_path).head.origin) == ("w='steady'", "tuned")


def naps(path, *seconds):
    clock = FakeClock()

    def nap(x, *, config):
        clock.spend(config.s)
        return x

    space, heuristic = tb.Space(s=list(seconds)), {"s": seconds[-1]}
    return tb.tunable(nap, name="nap", space=space, heuristic=heuristic, tuner=fake_tuner(clock), store=path)


def test_after_an_edit_is_undone_the_times_of_the_old_code_are_shown(tmp_path, capsys):
    def kernel(costs):
        clock = FakeClock()

        def edited(x, *, config, _costs=tuple(costs)):
            clock.spend(_costs[config.w])
            return x

        options = {"space": tb.Space(w=[0, 1, 2]), "heuristic": {"w": 2}, "tuner": fake_tuner(clock)}
        return tb.tunable(lambda x, *, config: edited(x, config=config), name="k", store=tmp_path, **options)

    for costs in ([2, 6, 20], [20, 6, 2], [2, 6, 20]):
        kernel(costs)(np.ones(4))
    record = record_in(tmp_path)
    assert verdict_of(record).winner.value_s == entry_of(record).best_s == 2
    assert readable(verdict_of(record).winner.measurement.config) == readable(record.head.config) == "w=0"


def test_the_gain_is_over_the_heuristic_of_now(tmp_path):
    naps(tmp_path, 10, 20, 40)(np.ones(4))
    changed = naps(tmp_path, 10, 40, 20)
    changed(np.ones(4))
    assert changed.explain(np.ones(4)).gain == pytest.approx(2)
    assert "heuristic  s=20  20 s: the winner is 2.00 x faster" in str(changed.explain(np.ones(4)))


class TestACandidateThatIsGone:
    @pytest.fixture
    def kernel(self, tmp_path):
        """A kernel whose winner was taken out of its space after it was tuned."""
        naps(tmp_path, 10, 20, 30)(np.ones(4))
        kernel = naps(tmp_path, 20, 30)
        kernel(np.ones(4))
        return kernel

    def test_explain_names_the_answer_as_the_winner_and_its_own_gain(self, kernel):
        told = kernel.explain(np.ones(4))
        assert told.verdict.winner.value_s == 20
        assert told.gain == pytest.approx(1.5)
        assert "heuristic  s=30  30 s: the winner is 1.50 x faster" in str(told)
        assert "s=10" not in str(told)

    def test_show_and_the_report_name_the_same_winner(self, kernel, tmp_path, capsys):
        main(["show", "nap", "--book", str(tmp_path)])
        shown = capsys.readouterr().out
        assert "s=10" not in shown
        record = record_in(tmp_path)
        assert verdict_of(record).winner.value_s == entry_of(record).best_s == 20
        assert len(facts_of(record).values_s()) == 2

    def test_it_cannot_be_pinned(self, kernel, tmp_path, capsys):
        assert main(["pin", "nap", "s=10", "--book", str(tmp_path)]) == 2
        assert "no working candidate has s=10" in capsys.readouterr().err

    def test_it_counts_again_when_it_is_back(self, kernel, tmp_path):
        back = naps(tmp_path, 10, 20, 30)
        back(np.ones(4))
        assert back.explain(np.ones(4)).verdict.winner.value_s == 10
        assert "former" not in record_in(tmp_path).provenance or not record_in(tmp_path).provenance["former"]

    def test_a_pin_to_it_is_said_to_have_no_effect(self, tmp_path, capsys):
        naps(tmp_path, 10, 20, 30)(np.ones(4))
        main(["pin", "nap", "s=20", "--book", str(tmp_path)])
        kernel = naps(tmp_path, 10, 30)
        with pytest.warns(tb.TunebookWarning, match="so the pin has no effect"):
            kernel(np.ones(4))
        said = str(kernel.explain(np.ones(4)))
        assert "answer: Config(s=10) from memory\n" in said
        assert "pinned     by hand: s=20, which is not a candidate any more, so the pin has no effect" in said
        capsys.readouterr()
        main(["explain", "nap", "--book", str(tmp_path)])
        assert "if it is a candidate again; until then the measured winner\n" in capsys.readouterr().out
