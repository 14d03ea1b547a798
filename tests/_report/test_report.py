"""What a report says: the values behind its pictures, and that nothing in a record can harm its page."""

from __future__ import annotations

import html
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_records import SPACE, measurement, record, time_of

import tunebook as tb
from tunebook._base.config_codec import encode
from tunebook._base.record_format import Body, Head, Record
from tunebook._base.vocabulary import Problem
from tunebook._report import report
from tunebook._report.charts import heat_map, heat_step, speedups
from tunebook._report.colours import STEPS, contrast, oklch, themes
from tunebook._report.detail import LEVELS, HeatMap, axes_of, explained, heat_maps, importances, levels
from tunebook._report.entry import entry_of
from tunebook._report.marks import DotMark, Scale, TextMark, linear_ticks, quantile
from tunebook._report.model import DETAILS, KernelGroup, model_of
from tunebook._report.page import svg_of, tag
from tunebook._report.tuning_charts import best_so_far, importance, samples, samples_range
from tunebook._selection.persistent_cache import PersistentCache
from tunebook.stores import MemoryStore, open_store

EVIL = '<script>alert("x")</script>&\u2028'


def model(*records):
    return report(list(records)).model


def data_in(page):
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def column(table, name):
    (found,) = [c for c in table if c["name"] == name]
    return [found["of"][at] if at is not None and "of" in found else at for at in found["at"]]


class TestWhatItIsAbout:
    def test_a_tuning_without_a_book_is_reported_with_its_default_and_its_time(self):
        @tb.tunable(space=[{"step": 1}, {"step": 50}], heuristic={"step": 50}, store=False, check=False)
        def scale(n, *, config):
            return sum(range(1000 * config.step))

        tuned = tb.tune(scale, 7)
        shown = report(tuned).model
        (entry,) = shown.entries
        assert entry.problem == tuned.problem == scale.problem(7)
        assert entry.seconds == tuned.seconds
        assert entry.config == "step=1"
        assert entry.default_s > entry.best_s
        candidates = shown.details[0].candidates
        assert [(c.config, c.role) for c in candidates] == [("step=1", "chosen"), ("step=50", "heuristic")]
        assert all(0 <= c.tried_s <= tuned.seconds for c in candidates)

    def test_a_store_a_path_and_the_users_own_book_say_the_same(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path))
        cache = PersistentCache("matmul", tmp_path)
        cache.store.put(record())
        reports = [
            report(what) for what in (None, tmp_path, str(tmp_path), cache, cache.store, list(cache.store.items()))
        ]
        assert all(each.model.entries == reports[0].model.entries for each in reports)
        assert reports[0].model.where == str(tmp_path)

    def test_an_explanation_is_about_its_record(self, tmp_path):
        @tb.tunable(space=[{"step": 1}, {"step": 2}], heuristic={"step": 2}, store=tmp_path)
        def scale(n, *, config):
            return n

        scale(7)
        explanation = scale.explain(7)
        assert report(explanation).model.entries[0].problem == explanation.problem
        assert explanation._repr_html_() == f"<pre>{html.escape(str(explanation))}</pre>"

    def test_the_choice_of_a_foreign_tuner_is_a_line_without_times(self):
        class First:
            def autotune(self, make_fn, args, kwargs, candidates):
                return next(iter(candidates))

        @tb.tunable(space=[{"step": 1}, {"step": 2}], heuristic={"step": 2}, store=False, tuner=First())
        def scale(n, *, config):
            return n

        shown = report(tb.tune(scale, 7))
        (entry,) = shown.model.entries
        assert (entry.config, entry.best_s) == ("step=1", None)
        assert "step=1" in shown.html

    def test_one_tuning_for_several_calls_is_reported_as_one(self):
        @tb.tunable(space=[{"step": 1}, {"step": 2}], heuristic={"step": 2}, store=False)
        def scale(n, *, config):
            return n

        (entry,) = report(tb.tune_together(scale, [(7,), (8,)])).model.entries
        assert entry.problem.op == "several calls"

    def test_outcomes_of_tune_all_are_its_tunings(self):
        @tb.tunable(space=[{"step": 1}, {"step": 2}], heuristic={"step": 2}, store=False)
        def scale(n, *, config):
            return n

        with tb.record() as calls:
            scale(7)
            scale(8)
        assert len(report(tb.tune_all(calls)).model.entries) == 2

    def test_an_empty_book_says_so(self):
        assert "This book has no entries yet" in report(MemoryStore()).html

    def test_entries_of_a_tune_cache_which_have_no_times_are_left_out(self, tmp_path):
        cache = tb.TuneCache("mean", "cpu", tmp_path)
        outcome = tb.AutotuneOutcome("by_slices", 0, (1e-3,))
        cache.persistent_cache_insert((1000, 4), "checksum", 0, [tb.AutotuneResult.success(outcome)])
        assert len(list(open_store(tmp_path).items())) == 2
        assert report(tmp_path).model.entries == ()
        assert report([record()], compare=tmp_path).model.comparison.changes[0].kind == "new"
        assert len(report([record()], compare=tmp_path).model.comparison.changes) == 1

    @pytest.mark.parametrize("what", [3, object(), [3], {"a": 1}])
    def test_an_unsupported_argument_is_an_error_that_names_supported_ones(self, what):
        with pytest.raises(tb.DefinitionError, match=r"tunebook\.tune"):
            report(what)

    def test_a_path_without_a_book_is_an_error(self, tmp_path):
        with pytest.raises(tb.DefinitionError, match="no book at"):
            report(tmp_path / "nowhere")


class TestEntries:
    def test_gain_is_the_default_over_the_chosen(self):
        (entry,) = model(record()).entries
        assert entry.config == "block=64, stages=3, order='ji'"
        assert entry.speedup == pytest.approx(4.4, rel=0.05)

    def test_failures_are_counted_by_kind_and_message(self):
        shown = model(record(failing=SPACE[:4]), record(size=128, failing=SPACE[:1], message="no room"))
        assert [(kind, message, count) for _, kind, message, count, _ in shown.failures] == [
            ("compile", "too large", 4),
            ("compile", "no room", 1),
        ]
        assert shown.failure_kinds == (("compile", 5),)
        assert shown.failures[0][4] == "block=16, stages=1, order='ij'"

    def test_an_entry_where_every_candidate_failed_has_no_time_and_is_shown(self):
        shown = report([record(failing=SPACE)])
        (entry,) = shown.model.entries
        assert (entry.best_s, entry.config, entry.origin) == (None, "", "failed")
        assert "failed" in column(data_in(shown.html)["entries"], "Origin")

    def test_only_measurements_under_the_conditions_of_the_choice_count(self):
        old = tuple(measurement(c, (9.0,), environment="before", when=1.0) for c in SPACE)
        now = record()
        both = now.replace(body=Body(measurements=(*old, *now.body.measurements), provenance=now.body.provenance))
        (entry,) = model(both).entries
        assert entry == model(now).entries[0]
        assert "18 measurements with other code, versions or arguments" in model(both).details[0].notes[0]

    def test_a_pinned_configuration_is_in_use_though_another_won(self):
        won = record()
        pinned = Head(problem=won.problem, config=encode(SPACE[0]), checksum="", origin="pinned", environment="here")
        (entry,) = model(won.replace(head=pinned)).entries
        assert entry.config == "block=16, stages=1, order='ij'"
        assert entry.best_s == entry.default_s
        assert entry.speedup is None

    def test_an_imported_entry_without_measurements_is_a_line_without_times(self):
        head = Head(problem=Problem("cpu:x", "op", "key"), config={"a": 1}, checksum="", origin="imported")
        shown = model(Record(head))
        assert (shown.entries[0].best_s, shown.entries[0].call, shown.details) == (None, "key", ())

    def test_the_part_of_the_roofline_is_the_least_time_over_the_best(self):
        facts = {"flops": 2e9, "bytes": 1e6, "flops_per_s": 1e14, "bytes_per_s": 1e12}
        (entry,) = model(record(roofline=facts)).entries
        assert entry.reached == pytest.approx(2e-5 / entry.best_s)
        assert "Roofline" in report([record(roofline=facts)]).html
        assert "Roofline" not in report([record()]).html

    def test_a_stated_amount_of_work_is_in_the_record(self, tmp_path):
        @tb.tunable(
            space=[{"step": 1}],
            heuristic={"step": 1},
            store=tmp_path,
            flops=lambda n: 1e3 * n,
            bytes=5,
            peak=tb.Peak(1e15, 1e14),
        )
        def scale(n, *, config):
            return n

        scale(7)
        (entry,) = report(tmp_path).model.entries
        assert entry.roofline == (7e3, 5.0, tb.Peak(1e15, 1e14))


class TestWithoutReadingMeasurements:
    def test_the_summary_a_tuning_writes_agrees_with_its_measurements(self, tmp_path):
        @tb.tunable(space=[{"step": n} for n in (-1, 1, 2, 3)], heuristic={"step": 2}, store=tmp_path, check=False)
        def scale(n, *, config):
            if config.step < 0:
                raise ValueError("a step is positive")
            return sum(range(100 * config.step))

        scale(7)
        (written,) = PersistentCache("scale", tmp_path).store.items()
        facts = {name: value for name, value in written.provenance.items() if name != "found"}
        counted = written.replace(body=Body(measurements=written.body.measurements, provenance=facts))
        assert model(written).entries == model(counted).entries
        assert model(written).entries[0].failed == {"launch": 1}

    @pytest.mark.parametrize(
        "facts",
        [
            {},
            {"found": {"tried": 3}},
            {"text": '],"provenance":{"a":1}'},
            {"nested": {"list": [1], "provenance": {"a": 1}}},
            {"list": [{"measurements": [], "provenance": {}}]},
        ],
        ids=str,
    )
    @pytest.mark.parametrize(
        "extra", [{}, {"zone": [1]}, {"rest": {"measurements": [], "provenance": {"b": 2}}}], ids=str
    )
    def test_the_provenance_alone_is_the_same(self, facts, extra):
        whole = Record(record().head, Body(measurements=record().body.measurements, provenance=facts, extra=extra))
        read = Record.from_bytes(whole.to_bytes())
        assert read.provenance == facts
        assert Record.from_bytes(whole.to_bytes()).body.provenance == facts

    def test_a_line_needs_no_measurements(self):
        found = {"tried": 18, "failed": {"compile": 2}, "compile_s": 1.0, "best_s": 1e-3, "default_s": 3e-3}
        read = Record.from_bytes(record(found=found).to_bytes())
        entry = entry_of(read)
        assert (entry.speedup, entry.measured, entry.failed) == (3.0, 18, {"compile": 2})
        assert read._body is None

    def test_messages_are_read_of_so_many_entries_and_the_page_says_so(self, monkeypatch):
        monkeypatch.setattr("tunebook._report.model.READ_FAILURES", 2)
        monkeypatch.setattr("tunebook._report.page.READ_FAILURES", 2)
        shown = report([record(size=n, failing=SPACE[:1]) for n in range(5)])
        assert shown.model.failures[0][3] == 2
        assert shown.model.failure_kinds == (("compile", 5),)
        assert "covers 2 of the 5 entries with failures" in shown.html


class TestDetails:
    def test_every_kernel_and_device_has_one_before_any_has_two(self):
        small = [record(op=f"kernel_{n}", space=SPACE[:9]) for n in range(DETAILS - 2)]
        shown = model(*(record(size=n) for n in range(1, 20)), *small)
        assert len(shown.details) == DETAILS
        assert len({d.entry.problem.op for d in shown.details}) == DETAILS - 1
        assert (
            f"{DETAILS} of {19 + len(small)} in detail"
            in report([*(record(size=n) for n in range(1, 20)), *small]).html
        )

    @pytest.mark.parametrize("seed", range(5))
    def test_they_are_the_same_in_whatever_order_the_book_is_read(self, seed):
        records = [record(op=f"kernel_{n % 30}", size=n, space=SPACE[: 6 + n % 12]) for n in range(90)]
        expected = [d.entry.problem for d in model(*records).details]
        Random(seed).shuffle(records)
        assert [d.entry.problem for d in model(*records).details] == expected

    def test_best_so_far_falls_and_ends_at_the_best(self):
        (detail,) = model(record()).details
        times = [seconds for _, seconds in detail.best_so_far]
        assert times == sorted(times, reverse=True)
        assert times[-1] == detail.candidates[0].value_s
        assert detail.best_so_far[0][0] == pytest.approx(2.0)  # the tuning began two seconds before its first trial

    def test_finalists_include_the_chosen_and_the_default_and_number_at_most_eight(self):
        (detail,) = model(record()).details
        assert {"chosen", "heuristic"} <= {c.role for c in detail.finalists}
        assert len(detail.finalists) <= 8

    def test_the_parameter_that_decides_is_the_most_important_and_one_that_does_nothing_is_not(self):
        (detail,) = model(record()).details
        shares = dict(detail.importances)
        assert next(iter(shares)) == "block"
        assert shares["block"] > 0.9
        assert shares["stages"] < 0.05

    def test_the_first_heat_map_is_of_the_two_most_important(self):
        (detail,) = model(record(failing=[c for c in SPACE if c["block"] == 64 and c["order"] == "ji"])).details
        first = detail.heat_maps[0]
        assert (first.x, first.y) == ("block", "order")
        assert (first.columns, first.rows) == (("16", "32", "64"), ("ij", "ji"))
        assert first.cells[0][0] == pytest.approx(time_of(SPACE[0]), rel=0.05)
        assert math.isnan(first.cells[1][2])


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.1, 10)), min_size=2))
def test_the_share_that_groups_explain_is_between_zero_and_one(points):
    groups, values = zip(*points, strict=True)
    assert 0.0 <= explained(groups, values) <= 1.0


def test_random_groups_explain_nothing_though_they_are_many():
    values = [math.sin(n * n) for n in range(200)]
    assert explained([n % 40 for n in range(200)], values) < 0.1
    assert explained([round(value, 1) for value in values], values) > 0.9


def test_an_axis_of_many_values_is_shown_in_ranges():
    labels, _ = levels(range(100))
    assert len(labels) == LEVELS
    assert labels[0] == "0\u20138"


def test_values_that_are_equal_but_of_other_types_stay_apart():
    assert levels([1, True, 1.0, "1"])[0] == ("1", "1", "1", "True")


def test_parameters_that_some_candidates_do_not_have_are_left_out():
    points = [{"a": n, "b": n} if n else {"a": n} for n in range(10)]
    assert [name for name, _ in importances(points, [1.0 + n for n in range(10)])] == ["a"]
    assert heat_maps(points, [1.0] * 10, [], 6) == []


@pytest.mark.parametrize("config", [3, "fast", (1, 2), None, {"a": {"b": (1, 2)}}])
def test_configurations_of_any_form_have_axes(config):
    assert axes_of(encode(config))


@pytest.fixture(scope="module")
def page():
    evil = record(op=EVIL, device=EVIL, failing=SPACE[:2], message=EVIL, rule=EVIL, disturbances=[EVIL])
    odd = record(op="other@v0", space=[{EVIL: n, "block": EVIL} for n in range(9)])
    return report([evil, odd], title=EVIL).html


class TestThePage:
    def test_nothing_in_a_record_becomes_markup(self, page):
        assert EVIL not in page
        assert page.count("<script") == 2  # the data, and ours
        assert "alert(" in page  # it is there, as text

    def test_its_text_reads_back_as_it_was(self, page):
        assert EVIL in column(data_in(page)["entries"], "Kernel")
        assert EVIL.strip("\u2028") in column(data_in(page)["failures"], "Message")

    def test_it_asks_for_nothing_from_outside(self, page):
        assert not re.search(r"""src\s*=|href\s*=\s*"(?!#)|url\(|@import|https?://(?!www\.w3\.org)""", page)
        assert "default-src &#x27;none&#x27;" in page

    def test_it_names_its_language_its_charset_and_its_title(self, page):
        assert page.startswith('<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>')
        assert f"<title>{html.escape(EVIL)} · tunebook</title>" in page

    def test_every_chart_has_a_title_for_screen_readers(self, page):
        charts = re.findall(r"<svg [^>]*class=\"chart\"[^>]*>(<title>[^<]+</title>)?", page)
        assert charts
        assert all(charts)

    def test_a_notebook_shows_it_in_a_frame_of_its_own(self):
        shown = report([record()])
        frame = shown._repr_html_()
        assert frame.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
        assert html.escape(shown.html) in frame
        assert "<script" not in frame

    def test_a_result_shows_itself_in_a_notebook(self):
        @tb.tunable(space=[{"step": 1}, {"step": 2}], heuristic={"step": 2}, store=False)
        def scale(n, *, config):
            return n

        assert tb.tune(scale, 7)._repr_html_().startswith("<iframe")

    def test_large_tables_are_packed(self):
        many = [record(space=SPACE[:1], op=f"{n}{'o' * 150}") for n in range(8000)]
        page = report(many).html
        assert 'type="application/gzip"' in page
        assert len(page) < 400_000

    def test_saving_writes_the_html_to_the_file(self, tmp_path):
        shown = report([record()], tmp_path / "report.html")
        assert (tmp_path / "report.html").read_text(encoding="utf-8") == shown.html
        assert repr(shown) == "Report('matmul@v0', 1 entry)"


@given(st.text(), st.text())
def test_whatever_is_written_into_an_element_stays_text(content, attribute):
    from html.parser import HTMLParser

    seen = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            seen.append((tag, attrs))

    Reader().feed(tag("p", content, title=attribute))
    ((name, attributes),) = seen
    assert name == "p"
    assert attributes == [("title", html.unescape(html.escape(attribute)))]


class TestPictures:
    def test_names_below_a_heat_map_are_whole_where_there_is_room(self):
        shown = HeatMap(x="ORDER", y="ROWS", columns=("read_rows", "write_rows"), rows=("1",), cells=((1.0, 2.0),))
        assert "write_rows" in [mark.shown for mark in heat_map(shown, 1.0, 2.0).marks if isinstance(mark, TextMark)]

    def test_the_mark_among_gains_is_the_number_beside_it(self):
        chart = speedups([KernelGroup("k@v0", "cpu", "", 2, 8, 0, (1.5, 6.0), (), 1.0, 0.0, 0.0)])
        drawn = svg_of(chart)
        left, right = (float(x) for x in re.findall(r'<circle[^>]* cx="([\d.]+)"', drawn))
        (mark,) = (float(x) for x in re.findall(r'<line x1="([\d.]+)"[^>]* class="middle"', drawn))
        assert mark == pytest.approx((left + right) / 2, abs=0.2), "on a log axis, the geometric mean is half way"
        assert ">3.00 " in drawn

    def test_png_shows_the_same(self, tmp_path):
        image = pytest.importorskip("matplotlib.image")
        evil = record(op="$x^2$ <script>", failing=SPACE[:2])
        for name, records in {"book": [evil, record(size=32)], "one": [record()], "none": []}.items():
            path = report(records).png(tmp_path / f"{name}.png")
            pixels = image.imread(path)
            assert pixels.shape[1] == 1680
            assert pixels[..., :3].std() > 0.01
        report([record()], tmp_path / "again.PNG")
        assert (tmp_path / "again.PNG").read_bytes().startswith(b"\x89PNG")

    def test_without_matplotlib_the_error_names_the_extra(self):
        code = (
            "import sys; sys.modules['matplotlib'] = sys.modules['matplotlib.backends'] = None\n"
            "from tunebook._report import report\nfrom tunebook import MissingDependency\n"
            "try: report([]).png('x.png')\nexcept MissingDependency as error: print(error)"
        )
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert said.stdout == (
            "a picture of a report needs 'matplotlib', which is not installed. Run: pip install 'tunebook[plot]'\n"
        )


class TestColours:
    @pytest.mark.parametrize("theme", themes(), ids=["light", "dark"])
    def test_text_has_contrast(self, theme):
        for name in ("ink", "muted", "chosen", "heuristic", "failed"):
            for ground in ("paper", "card", "hover"):
                assert contrast(theme[name], theme[ground]) >= 4.5, (name, ground)
        for step in range(STEPS):
            assert contrast(theme[f"t{step}"], theme[f"q{step}"]) >= 4.5

    @pytest.mark.parametrize("theme", themes(), ids=["light", "dark"])
    def test_the_scale_changes_lightness_at_every_step_and_never_turns(self, theme):
        greys = [contrast(theme[f"q{step}"], "#000000") for step in range(STEPS)]
        assert greys in (sorted(greys), sorted(greys, reverse=True))
        assert all(abs(a - b) > 0.1 for a, b in pairwise(greys))

    def test_colours_that_no_screen_has_come_out_paler(self):
        assert re.fullmatch("#[0-9a-f]{6}", oklch(0.5, 0.4, 150))


class TestScales:
    @given(st.floats(1e-9, 1e3), st.floats(1.001, 1e4), st.booleans())
    def test_ticks_are_inside_and_rise(self, low, factor, log):
        ticks = Scale(low, low * factor, 0, 100, log=log).ticks()
        assert ticks == sorted(set(ticks))
        assert 1 <= len(ticks) <= 12
        assert all(low * 0.99 <= tick <= low * factor * 1.01 for tick in ticks)

    @given(st.floats(-10, 10))
    def test_a_value_outside_the_scale_is_put_at_the_edge(self, value):
        assert 0 <= Scale(0.0, 1.0, 0, 100)(value) <= 100

    def test_a_range_of_one_value_is_its_middle(self):
        assert Scale(2.0, 2.0, 0, 100)(2.0) == 50
        assert linear_ticks(3.0, 3.0) == [3.0]

    @given(st.lists(st.floats(0, 1), min_size=1), st.floats(0, 1))
    def test_a_quantile_is_between_the_ends(self, values, part):
        ordered = sorted(values)
        assert ordered[0] <= quantile(ordered, part) <= ordered[-1]

    def test_a_disturbed_run_does_not_stretch_the_axis_of_samples(self):
        assert samples_range([[1.0, 1.01, 1.02, 50.0], [1.1, 1.11, 1.13]])[1] < 1.5
        assert samples_range([[1.0]]) == (1.0, 1.01)

    def test_candidates_that_are_slower_than_the_axis_of_the_best_so_far_are_counted(self):
        made = record(size=64)
        first, *others = made.body.measurements
        slow = first._replace(samples_s=tuple(100 * sample for sample in first.samples_s))
        for measured, slower in ((made.body.measurements, 0), ((slow, *others), 1)):
            changed = Record(made.head, replace(made.body, measurements=tuple(measured)))
            (detail,) = model_of([changed], title="", where="", made=0.0).details
            marks = best_so_far(detail).marks
            assert sum(isinstance(mark, DotMark) for mark in marks) == len(measured) - slower
            assert [mark.content for mark in marks if "↑" in getattr(mark, "content", "")] == ["+1 ↑"] * slower

    def test_importances_that_are_all_nothing_are_put_in_words(self):
        (detail,) = model_of([record(size=64)], title="", where="", made=0.0).details
        said = "over all candidates, no parameter explains the differences alone"
        nothing = tuple((name, 0.001) for name, _ in detail.importances)
        for found, count in ((detail.importances, 0), (nothing, 1)):
            chart = importance(detail._replace(importances=found))
            placed = [mark.y for mark in chart.marks if getattr(mark, "content", "") == said]
            assert len(placed) == count
            assert all(y < chart.height for y in placed)

    @pytest.mark.parametrize("beyond", [4, 18, 59])
    def test_the_number_of_samples_to_the_right_does_not_lie_on_a_sample(self, beyond):
        made = record(size=64)
        tail = (*[1e-4] * 60, 1.0399e-4, *[9e-4] * beyond)  # the axis ends at 1.04e-4
        measured = [m._replace(samples_s=tail) for m in made.body.measurements]
        changed = Record(made.head, replace(made.body, measurements=tuple(measured)))
        (detail,) = model_of([changed], title="", where="", made=0.0).details
        chart = samples(detail)
        ends = {mark.y: mark.x - 8 * len(mark.content) for mark in chart.marks if "→" in getattr(mark, "content", "")}
        assert len(ends) > 1
        dots = [mark for mark in chart.marks if isinstance(mark, DotMark)]
        assert len(dots) > 50
        for dot in dots:
            assert all(dot.x + dot.radius < x for y, x in ends.items() if abs(y - dot.y) < 20)
        assert max(dot.x for dot in dots) > 300

    @given(st.floats(1.0, 100.0))
    def test_a_slower_time_is_never_a_better_colour(self, ratio):
        assert heat_step(1.0, 1.0, 4.0) <= heat_step(ratio, 1.0, 4.0) <= STEPS - 1
