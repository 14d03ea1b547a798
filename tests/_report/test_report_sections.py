"""Sections of a report: entries without a winner, causes of failures, sizes, rates, comparisons and commands."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from report_records import SPACE, measurement, record

import tunebook as tb
from tunebook._base.config_codec import fingerprint_of
from tunebook._base.record_format import Body
from tunebook._cli import main
from tunebook._cli.pin import choose, pin
from tunebook._report import report
from tunebook._report.detail import QUARTER, importances, quarter_importances
from tunebook._report.model import cause_of, short_names
from tunebook._report.tables import pin_command
from tunebook._report.tuning_charts import of_tuning
from tunebook.stores import DirectoryStore

CPU = "cpu:AuthenticAMD AMD EPYC 25/17/1 x86_64 2 cores isa-0edc9f61"


def data_in(page):
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def column(table, name):
    (found,) = [c for c in table if c["name"] == name]
    return [found["of"][at] if at is not None and "of" in found else at for at in found["at"]]


def at_time(made, when):
    """Return a record whose measurements and decision are of another time."""
    measured = tuple(m._replace(when=when) for m in made.body.measurements)
    return made.replace(body=replace(made.body, measurements=measured, provenance={**made.provenance, "when": when}))


class TestNoWinner:
    def test_entries_without_a_winner_are_named_and_listed_with_their_failure(self):
        made = report([record(), record(size=3, failing=SPACE), record(size=4, failing=SPACE, message="no room")])
        assert '<a href="#no-winner">2 of 3 entries have no winner</a>' in made.html
        table = data_in(made.html)["undecided"]
        assert column(table, "Call") == ["a=float32[3,64]", "a=float32[4,64]"]
        assert column(table, "First failure") == ["compile: too large", "compile: no room"]
        assert column(data_in(made.html)["entries"], "Configuration").count("no winner") == 2

    def test_the_words_are_the_words_of_explain_and_calls_without_a_heuristic_are_named(self):
        raised = record(size=3, failing=SPACE, kind="launch", message="AttributeError: no n")
        made = report([record(), raised])
        assert column(data_in(made.html)["undecided"], "First failure") == ["raised AttributeError: no n"]
        assert "of a kernel without a heuristic they raise NoConfig" in made.html
        assert column(data_in(made.html)["failures"], "Kind") == ["raised"]
        assert made.model.failure_kinds == (("raised", len(SPACE)),)

    def test_a_book_whose_entries_all_have_one_says_nothing(self):
        made = report([record(), record(size=3, failing=SPACE[:2])])
        assert "no winner" not in made.html
        assert 'id="no-winner"' not in made.html
        assert '<a href="#failures">2</a>' in made.html


def interrupted(size=7, tried=5):
    """Return a record as an interrupted tuning leaves it: some measurements, and no configuration."""
    whole = record(size=size)
    facts = {"when": 1100.0, "complete": False, "interrupted": True}
    body = Body(measurements=whole.body.measurements[:tried], provenance=facts)
    return whole.replace(head=replace(whole.head, config=None), body=body)


class TestInterrupted:
    def test_an_interrupted_tuning_is_not_told_as_failed_nor_as_cut_short_by_its_budget(self):
        made = report([record(), interrupted(tried=5)])
        assert "All candidates of these entries failed" not in made.html
        assert "the budget ended this tuning" not in made.html
        assert "no winner" not in made.html
        assert "1 entry has no decision yet: a tuning was interrupted, and the next one goes on." in made.html
        assert "No decision yet: a tuning was interrupted after 5 measurements, and the next one goes on." in made.html
        tables = data_in(made.html)
        assert column(tables["interrupted"], "Call") == ["a=float32[7,64]"]
        assert "interrupted" in column(tables["entries"], "Configuration")
        assert sorted(column(tables["entries"], "Origin")) == ["interrupted", "tuned"]
        assert "undecided" in tables
        assert column(tables["undecided"], "Kernel") == []

    def test_it_has_no_finalists(self):
        (detail,) = report([interrupted()]).model.details
        assert not [c for c in detail.candidates if c.role in ("finalist", "chosen")]
        assert "Samples of the finalists" not in report([interrupted()]).html

    def test_the_picture_says_it_too(self, tmp_path, monkeypatch):
        pytest.importorskip("matplotlib")
        from matplotlib.axes import Axes

        written, real = [], Axes.text

        def text(self, x, y, s, **settings):
            written.append(s)
            return real(self, x, y, s, **settings)

        monkeypatch.setattr(Axes, "text", text)
        report([interrupted()], tmp_path / "made.png")
        assert "1 entry has no decision yet: a tuning was interrupted, and the next one goes on." in written


class TestPinned:
    def test_a_pin_is_named_as_one_beside_the_measured_winner(self):
        won = record(size=7)
        page = report([pin(won, won.body.measurements[2].config)]).html
        about = page[page.index('<dl class="about">') :].partition("</dl>")[0]
        assert "<dt>pinned by hand</dt><dd><code>block=16, stages=2, order=&#x27;ij&#x27;</code> " in about
        assert "<dt>time</dt>" not in about
        assert "<dt>measured winner</dt><dd><code>block=64" in about
        assert "faster than the heuristic; fastest" in about
        assert "<dt>chosen</dt>" not in about
        assert "<dt>because</dt>" not in about
        assert "tunebook unpin " in about
        table = data_in(page)["detail0"]
        pinned = [config for config, remark in zip(column(table, "block"), column(table, "Remark"), strict=True)
                  if "pinned by hand" in remark]  # fmt: skip
        assert pinned == [16]

    def test_a_pin_is_no_gain_of_a_tuning_and_the_page_says_so(self):
        others = [record(size=3), record(size=5)]
        won = record(size=7)
        made = report([*others, pin(won, won.body.measurements[2].config)])
        assert made.model.speedups == report(others).model.speedups
        assert "1 entry is pinned by hand, and left out of the gains" in made.html
        assert "pinned by hand" in column(data_in(made.html)["entries"], "Doubt")

    @pytest.mark.parametrize("at", [0, 2, -1])  # the default, another, and a finalist
    def test_the_charts_of_the_tuning_stay_as_they_were_before_the_pin(self, at):
        won = record(size=7)
        (before,) = report([won]).model.details
        (after,) = report([pin(won, won.body.measurements[at].config)]).model.details
        assert after.best_so_far == before.best_so_far
        assert dict(of_tuning(after)) == dict(of_tuning(before))

    def test_a_pin_on_an_interrupted_tuning_claims_no_winner(self):
        page = report([pin(interrupted(), interrupted().body.measurements[0].config)]).html
        assert "pinned by hand" in page
        assert "measured winner" not in page
        assert "the budget ended" not in page


def test_the_importance_of_the_only_parameter_is_not_a_share():
    made = report([record(space=[{"block": 2**n} for n in range(9)], default={"block": 1})])
    assert "block: the only parameter, so it explains every difference" in made.html
    assert "block: 0% of all" not in made.html


def test_candidates_that_left_the_race_are_marked():
    made = record()
    table = data_in(report([made]).html)["detail0"]
    dropped = [m for m in made.body.measurements if m.dropped]
    marked = [remark for remark in column(table, "Remark") if remark]
    assert marked == ["eliminated"] * len(dropped)


@pytest.mark.parametrize(
    ("environment", "values_from", "said"),
    [
        ("here", "call", "Verified with the same versions: "),
        ("here", "random", "Verified with the same versions, on made-up arguments: "),
        ("before", "call", "Verified after a change of versions: "),
    ],
)
def test_a_verified_entry_says_under_which_versions_and_on_which_arguments(environment, values_from, said):
    verified = {"when": 2000.0, "environments": [environment], "values_from": values_from}
    (detail,) = report([record(verified=verified)]).model.details
    assert detail.notes[0] == f"{said}the finalists were measured again, and the choice still holds."


class TestTimeOfTuning:
    def test_compilers_are_named_only_where_something_was_compiled(self):
        made = [record(size=n) for n in (1, 2)]
        assert "Compiling and measuring" in report(made).html
        plain = []
        for each in made:
            measured = tuple(m._replace(compile_s=None) for m in each.body.measurements)
            facts = {**each.provenance, "waiting_s": 0.0}
            plain.append(each.replace(body=replace(each.body, measurements=measured, provenance=facts)))
        page = report(plain).html
        assert "<h2>Time of tuning</h2>" in page
        assert not re.search("compil", page.partition("<footer>")[0], re.IGNORECASE)


def test_parameters_stand_in_the_order_of_the_space_as_numbers_without_separators():
    space = [{"rows": 2048, "cols": n, "temp": False} for n in (16, 32)]
    made = report(
        [record(space=[{**c, "block": 64} for c in space], default=None, names=["temp", "rows", "cols", "block"])]
    )
    columns = data_in(made.html)["detail0"]
    assert [c["name"] for c in columns if c["name"] in space[0]] == ["temp", "rows", "cols"]
    assert [c["kind"] for c in columns if c["name"] in ("rows", "cols")] == ["number", "number"]


def test_each_chart_of_a_tuning_says_how_to_read_it():
    page = report([record(space=[{**c, "pack": p} for c in SPACE for p in (0, 1)])]).html
    for heading in ("Best so far", "Importance of the parameters", "Best time for each pair of values"):
        assert re.search(rf'<h3>{heading}</h3><p class="method">[A-Z]', page)


class TestFailures:
    def test_messages_that_differ_only_in_numbers_are_one_cause(self):
        messages = ["off by up to 0.0312 in 3 of 64 values", "off by up to 3.5e-07 in 12 of 64 values", "off"]
        records = [record(size=n, failing=SPACE[:1], message=message) for n, message in enumerate(messages)]
        failures = report(records).model.failures
        assert [(message, count) for _, _, message, count, _ in failures] == [(messages[0], 2), ("off", 1)]

    @pytest.mark.parametrize("names", ["float32", "sm_90", "v0.2beta"])
    def test_digits_of_names_stay(self, names):
        assert names.split(".")[0] in cause_of(f"not for {names}")


class TestDevices:
    def test_one_device_is_said_once(self):
        page = report([record(device=CPU, size=n) for n in range(1, 9)]).html
        assert page.count(CPU) == 1
        assert "AMD EPYC, 2 cores" in page
        assert [c["name"] for c in data_in(page)["entries"]][:3] == ["Id", "Kernel", "Call"]

    def test_several_devices_have_short_names_that_tell_them_apart(self):
        gpu, other = "cuda:NVIDIA H200:sm_90", CPU.replace("isa-0edc9f61", "isa-11111111")
        assert short_names([CPU, gpu]) == {CPU: "AMD EPYC, 2 cores", gpu: "NVIDIA H200"}
        assert short_names([CPU, other]) == {CPU: CPU, other: other}
        page = report([record(device=device, size=n) for device in (CPU, gpu) for n in (1, 2)]).html
        assert set(column(data_in(page)["entries"], "Device")) == {"AMD EPYC, 2 cores", "NVIDIA H200"}
        assert page.count(CPU) == page.count(gpu) == 1


class TestImportance:
    def test_one_terrible_value_does_not_hide_the_parameter_that_decides_among_the_good(self):
        points = [
            {"lanes": lanes, "pack": pack, "idle": idle}
            for lanes in (1, 2, 4, 8)
            for pack in (0, 1)
            for idle in range(3)
        ]
        times = [(100.0 if p["lanes"] == 1 else 1.0) * (1.0 if p["pack"] else 2.0) for p in points]
        overall, better = dict(importances(points, times)), quarter_importances(points, times)
        assert overall["lanes"] > 0.9
        assert overall["pack"] < 0.1
        assert better["pack"] > better["lanes"]
        assert better["idle"] == pytest.approx(0.0, abs=0.05)
        assert sum(better.values()) == pytest.approx(1.0)

    def test_a_parameter_that_does_nothing_has_none(self):
        points = [{"a": n % 2} for n in range(40)]
        assert quarter_importances(points, [1.0 + n // 2 for n in range(40)]) == {"a": 0.0}

    def test_too_few_candidates_have_none(self):
        assert quarter_importances([{"a": n} for n in range(QUARTER - 1)], [1.0] * (QUARTER - 1)) == {}


class TestGains:
    def test_a_default_that_seems_faster_than_the_winner_is_no_gain_and_the_page_says_why(self):
        found = {"best_s": 1e-3, "default_s": 0.8e-3, "tried": 3, "failed": {}, "compile_s": 0.0}
        made = report([record(found=found), record(size=3), record(size=5)])
        drifted = next(entry for entry in made.model.entries if entry.drift)
        assert (drifted.speedup, drifted.best_s, drifted.default_s) == (None, 1e-3, 0.8e-3)
        assert "1 entry is left out: its heuristic was eliminated early" in made.html
        assert "drift" in column(data_in(made.html)["entries"], "Doubt")

    def test_disturbed_gains_are_marked(self):
        made = report([record(disturbances=["other processes used 90% of the CPU"]), record(size=3)])
        assert "1 of 2 gains was measured while other work disturbed the machine. It may be far off." in made.html
        both = report([record(size=n, disturbances=["other processes used 90% of the CPU"]) for n in (3, 4)])
        assert "2 of 2 gains were measured while other work disturbed the machine. They may be far off." in both.html
        assert sorted(column(data_in(made.html)["entries"], "Doubt")) == ["", "disturbed"]

    def test_all_disturbances_of_a_tuning_are_one_remark(self):
        (detail,) = report([record(disturbances=["other work ran", "the clock was slow"])]).model.details
        (said,) = (note for note in detail.notes if "isturb" in note or "quiet" in note)
        assert said.startswith("Disturbed during measuring: other work ran; the clock was slow. On a quiet machine, ")

    def test_the_default_itself_is_as_fast_as_the_default(self):
        made = report([record(default=SPACE[-1])])
        assert ", as fast as the heuristic" in made.html

    def test_rates_are_shown_where_the_work_is_stated_also_without_a_peak(self):
        made = report([record(roofline={"flops": 2e6, "bytes": 4e6})])
        (entry,) = made.model.entries
        assert entry.flops_per_s == pytest.approx(2e6 / entry.best_s)
        assert re.search(r"<dd>2\d\.\d GFLOP/s, [34]\d\.?\d* GB/s</dd>|<dd>[\d.]+ GFLOP/s, [\d.]+ GB/s</dd>", made.html)
        assert [c["name"] for c in data_in(made.html)["entries"] if c["kind"] in ("flops", "bytes")] == [
            "Operations",
            "Bytes",
        ]


class TestSizes:
    def test_each_kernel_has_a_line_with_the_winner_of_each_size(self):
        sizes = {64: SPACE, 128: SPACE, 256: SPACE[:4], 4096: SPACE[:4]}
        (line,) = report([record(size=n, space=space) for n, space in sizes.items()]).model.by_size
        assert [point.size for point in line.points] == [64 * n for n in sizes]
        first, last = line.points[0].config, line.points[-1].config
        assert first != last
        assert dict(line.winners)[line.points[0].letter] == first
        assert "Winners by size" in report([record(size=n) for n in (1, 2)]).html

    def test_one_size_is_no_line(self):
        assert report([record()]).model.by_size == ()

    def test_many_sizes_share_points(self):
        (line,) = report([record(size=n, space=SPACE[:2]) for n in range(1, 300)]).model.by_size
        assert len(line.points) <= 24
        assert sum(point.entries for point in line.points) == 299


class TestCommands:
    def test_the_command_of_each_candidate_pins_exactly_that_candidate(self):
        made = record(failing=SPACE[:2])
        (detail,) = report([made]).model.details
        for candidate in detail.candidates:
            command = pin_command(detail, candidate)
            if candidate.failure:
                assert command is None
                continue
            _, verb, identifier, *words = shlex.split(command)
            assert (verb, identifier) == ("pin", detail.identifier[:8])
            chosen = choose(made, dict(word.split("=", 1) for word in words), force=False)
            (wanted,) = [m for m in made.body.measurements if m.fingerprint == fingerprint_of(chosen)]
            assert wanted.samples_s[0] in candidate.samples_s

    @pytest.mark.parametrize("evil", ["$(touch harm)", "a; touch harm", "\x1b[2J", "two\nlines"])
    def test_no_value_of_a_record_becomes_a_command(self, evil):
        (detail,) = report([record(space=[{"block": 64, "order": evil}, {"block": 32, "order": "ij"}])]).model.details
        for candidate in detail.candidates:
            command = pin_command(detail, candidate)
            assert command is None or all(word.isprintable() for word in shlex.split(command))
            assert command is None or len(shlex.split(command)) == 5

    def test_the_command_to_pin_is_written_as_the_command_line_writes_it_in_the_order_of_the_space(self):
        space = [{"tile": (32, size), "copy": True, "block": 1} for size in (64, 128)]
        (detail,) = report([record(space=space, default=None, names=["tile", "copy", "block"])]).model.details
        commands = [pin_command(detail, candidate) for candidate in detail.candidates]
        assert any(command.endswith(" tile=32,128 copy=True block=1") for command in commands)

    def test_the_page_has_the_commands_to_pin_to_reproduce_and_to_explain(self):
        page = report([record()]).html
        for name in ("tunebook pin ", "TUNEBOOK_PIN=", "tunebook explain "):
            assert re.search(rf'data-copy="{name}', page)


class TestComparisons:
    def test_two_books_stand_side_by_side(self):
        slower = measurement(SPACE[-1], (9e-4,) * 9)
        other = record(size=2)
        other = other.replace(body=Body(measurements=(slower,), provenance={"winner": slower.fingerprint}))
        here = [record(size=n) for n in (1, 2, 3)]
        made = report(here, compare=[record(size=1), other, record(size=9)])
        kinds = {change.call: change.kind for change in made.model.comparison.changes}
        assert kinds == {"a=float32[2,64]": "faster", "a=float32[3,64]": "new", "a=float32[9,64]": "gone"}
        assert made.model.comparison.same == 1
        assert "Compared with" in made.html
        assert len(column(data_in(made.html)["changes"], "Change")) == 3

    def test_books_of_two_devices_are_matched_by_kernel_and_call(self):
        made = report([record(device="cuda:a")], compare=[record(device="cuda:b", space=SPACE[:2])])
        (change,) = made.model.comparison.changes
        assert (change.kind, change.before.config) == ("faster", "block=16, stages=1, order='ji'")

    def test_a_book_at_two_dates_compares_with_the_measurements_before(self):
        old = at_time(record(space=SPACE[:2]), 500.0).body.measurements
        again = tuple(m._replace(environment="before") for m in old)
        now = record()
        both = now.replace(body=replace(now.body, measurements=(*again, *now.body.measurements)))
        made = report([both, at_time(record(size=3), 100.0), record(size=4)], since=900.0)
        kinds = {change.call: change.kind for change in made.model.comparison.changes}
        assert kinds == {"a=float32[64,64]": "faster", "a=float32[4,64]": "new"}
        assert made.model.comparison.same == 1
        assert "Compared with the time before 1970-01-01 00:15 UTC" in made.html

    def test_one_comparison_at_a_time(self):
        with pytest.raises(tb.DefinitionError, match="two comparisons"):
            report([record()], compare=[record()], since=1.0)


class TestTheVerb:
    @pytest.fixture
    def books(self, tmp_path):
        for name, size in (("one", 1), ("two", 2)):
            DirectoryStore(tmp_path / name).put_many([record(size=size)])
        return str(tmp_path / "one"), str(tmp_path / "two"), str(tmp_path / "page.html")

    def test_it_compares_two_books(self, books, capsys):
        one, two, page = books
        assert main(["report", "--book", one, "--compare", two, "-o", page]) == 0
        assert f"Compared with {two}" in Path(page).read_text(encoding="utf-8")

    @pytest.mark.parametrize("date", ["2026-03-31", "2026-03-31 18:00", "2026-03-31T18:00", "7d"])
    def test_it_compares_with_a_date(self, books, date):
        one, _, page = books
        assert main(["report", "--book", one, "--since", date, "-o", page]) == 0

    def test_an_invalid_date_and_two_comparisons_are_wrong_usage_and_a_missing_book_cannot_be_read(self, books, capsys):
        one, two, page = books
        with pytest.raises(SystemExit, match="2"):
            main(["report", "--book", one, "--since", "yesterday", "-o", page])
        assert "invalid date 'yesterday': write 2026-03-31, or an age, e.g. 7d" in capsys.readouterr().err
        assert main(["report", "--book", one, "--compare", "/nonexistent", "-o", page]) == 3
        assert main(["report", "--book", one, "--compare", two, "--since", "7d", "-o", page]) == 2
        assert "two comparisons" in capsys.readouterr().err

    def test_a_full_disk_leaves_the_old_page_and_exits_with_3(self, books, capsys, monkeypatch):
        one, _, page = books
        Path(page).write_text("old", encoding="utf-8")

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("tunebook.stores._files.os.write", full)
        assert main(["report", "--book", one, "-o", page]) == 3
        monkeypatch.undo()
        assert Path(page).read_text(encoding="utf-8") == "old"
        assert "No space left on device" in capsys.readouterr().err
