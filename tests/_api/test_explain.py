"""explain(): which tier answered, on what, and what nearly did."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels import FakeClock, fake_tuner

import tunebook as tb
from tunebook._api.explain import Explanation, explain_entry
from tunebook._api.explanation_text import spread_of
from tunebook._api.versions import versions_differ
from tunebook._base.config_codec import decode
from tunebook._base.record_format import Body
from tunebook._base.vocabulary import Failure, Measurement, Problem
from tunebook._cli import main
from tunebook._selection.recorded_decision import measured_for_choice
from tunebook._selection.selector import NoSelection
from tunebook._statistics.decide import Ranked, decide
from tunebook.stores._listing import Catalogue


def make(tmp_path, **options):
    clock = FakeClock()

    @tb.tunable(
        name="explained",
        store=tmp_path,
        **{
            "space": tb.Space(block=[1, 2, 3, 4]),
            "heuristic": {"block": 4},
            "tuner": fake_tuner(clock),
            **options,
        },
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
    assert "answer: Config(block=4) from heuristics, but the call would be tuned now" in said
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
    assert "slowest    4 s (to 4 s in 3 samples)  block=4  4.00 x" in said
    assert "chosen as  fastest" in said
    assert "failed     block=3  raised ValueError: no such tile" in said
    assert explanation.verdict.winner.value_s == 1.0


@pytest.mark.filterwarnings("ignore::tunebook.TunebookWarning")  # about the book that cannot be written
@pytest.mark.parametrize("store", [False, "unwritable"])
def test_a_tuning_that_no_book_has_is_explained_by_the_process_that_measured_it(tmp_path, store):
    (tmp_path / "file").touch()
    kernel = make(tmp_path / "file" / "book" if store else False)
    assert "kept" not in str(kernel.explain(np.ones(8))), "nothing is measured yet"
    kernel(np.ones(8))
    explanation = kernel.explain(np.ones(8))
    said = str(explanation)
    assert "answer: Config(block=1) from memory" in said
    assert "winner     1 s (to 1 s in 3 samples)  block=1" in said
    assert "heuristic  block=4  4 s: the winner is 4.00 x faster" in said
    assert "failed     block=3  raised ValueError: no such tile" in said
    assert "kept       in this process only: no book has this tuning" in said
    assert explanation.gain == 4.0
    assert "kept" not in str(kernel.explain(np.ones(9))), "of another call nothing is known"


def test_a_tuning_that_is_in_the_book_is_explained_by_the_book(tmp_path):
    kernel = make(tmp_path)
    kernel.selector.persist_autotune = False
    kernel(np.ones(8))
    assert "kept       in this process only" in str(kernel.explain(np.ones(8)))
    kernel.selector.persist_autotune = True
    tb.tune(kernel, np.ones(8), progress=False)
    assert "kept" not in str(kernel.explain(np.ones(8)))


def test_a_new_process_explains_from_the_book(tmp_path):
    make(tmp_path)(np.ones(8))
    said = str(make(tmp_path).explain(np.ones(8)))
    assert "answer: Config(block=1) from persistent" in said
    assert "memory      no entry for this call and this code" in said


def test_near_misses_are_told_field_by_field(tmp_path):
    kernel = make(tmp_path)
    kernel(np.ones((8, 4), np.float32))
    (miss,) = kernel.explain(np.ones((16, 4), np.float16), causal=True).near_misses
    text = "; ".join(miss.differences)
    assert all(part in text for part in ("float32", "float16", "8", "16", "causal"))


def test_an_answer_from_the_nearest_sizes_says_how_sure_it_is_and_tunes_nothing(tmp_path):
    make(tmp_path)(np.ones((8, 4)))
    kernel = make(tmp_path, policy=tb.AutotunePolicy(cache_miss_fallback="nearest"))
    explanation = kernel.explain(np.ones((16, 4)))
    said = str(explanation)
    assert "answer: Config(block=1) from heuristics" in said
    assert "  a guess     50% of the best speed expected, from the nearest tuned problem (causal: False, x:" in said
    assert explanation.selection.guess.confidence == 0.5
    assert len(list(kernel.selector.persistent.store.items())) == 1


def test_the_authors_heuristic_is_not_reported_as_a_guess(tmp_path):
    kernel = make(tmp_path, policy=tb.AutotunePolicy(cache_miss_fallback="nearest"))
    said = str(kernel.explain(np.ones(8)))
    assert "answer: Config(block=4) from heuristics" in said
    assert "a guess" not in said


def test_the_explanation_says_that_an_entry_is_of_other_code(tmp_path):
    make(tmp_path)(np.ones(8))
    edited = tb.tunable(lambda x, causal=False, *, config: x, space=[{"b": 1}], name="explained", store=tmp_path)
    said = str(edited.explain(np.ones(8)))
    assert "the entry was made by other code (the kernel, or a function that it uses, was edited)" in said


def test_the_explanation_marks_configurations_that_are_not_candidates_any_more(tmp_path):
    make(tmp_path)(np.ones(8))
    told = make(tmp_path, space=tb.Space(block=[1, 3, 4, 5])).explain(np.ones(8))
    assert "the entry was made with other candidates\n" in str(told)
    assert re.search(r"runner-up  2 s .* block=2, not a candidate any more  2\.00 x\n", str(told))
    assert "block=1, not" not in str(told)
    assert not make(tmp_path).explain(np.ones(8)).former


def test_arguments_are_in_the_order_of_the_signature(tmp_path):
    @tb.tunable(space=[{"b": 1}], store=False)
    def attention(q, k, v, *, scale=1.0, config):
        return q

    lines = str(attention.explain(1, 2, 3)).splitlines()
    assert lines[1:5] == ["  q: 1", "  k: 2", "  v: 3", "  scale: 1.0"]


def test_the_configuration_of_the_answer_is_an_attribute(tmp_path):
    assert make(tmp_path).explain(np.ones(8)).config == tb.Config(block=4)
    assert make(tmp_path, heuristic=None, tuner=False).explain(np.ones(8)).config is None


def test_times_that_were_known_before_are_counted_apart(tmp_path):
    make(tmp_path)(np.ones(8))
    kernel = make(tmp_path, space=tb.Space(block=[1, 2, 3, 4, 5]))
    kernel(np.ones(8))
    assert re.search(r"; 2 tried in .*; 3 known from before; 1 failed", str(kernel.explain(np.ones(8))))


def test_configurations_of_the_same_program_are_not_runner_up_of_each_other(tmp_path):
    clock = FakeClock()
    space = tb.Space(flags=["-O2", "-O3", "-O3 -g"])

    @tb.tunable(space=space, tuner=fake_tuner(clock), store=tmp_path, compile=lambda config: config.flags[:3].encode())
    def convolve(x, *, config):
        clock.spend(1 if "-O3" in config.flags else 2)
        return x

    convolve(1)
    said = str(convolve.explain(1))
    assert re.search(r"runner-up  2 s .* flags='-O2'  2\.00 x\n", said)
    assert "chosen as  fastest; of the 2 configurations of this program: first by its values" in said
    assert re.search(r"identical  compiled to the same program: flags='-O3( -g)?'\n", said + "\n")
    assert "as good" not in said


@pytest.mark.parametrize("width", [40, 80])
def test_on_a_terminal_it_is_wrapped_below_its_text(tmp_path, monkeypatch, width):
    kernel = make(tmp_path)
    kernel(np.ones(8))
    told = kernel.explain(np.ones(8))
    plain = str(told)
    monkeypatch.setattr("sys.stdout", Screen())
    monkeypatch.setenv("COLUMNS", str(width + 1))
    rows = str(told).splitlines()
    assert max(map(len, rows)) <= width < max(map(len, plain.splitlines()))
    assert "".join(rows).replace(" ", "") == "".join(plain.split()), "nothing is lost"
    assert all(row.startswith("    ") for row in rows[1 : rows.index("  x: numpy float64[8] C on cpu")])


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("pin", ["", "explained:block=2"])
def test_measurements_of_the_code_before_an_edit_are_said_to_be_so_under_a_pin_too(tmp_path, monkeypatch, pin):
    def kernel(code):
        clock = FakeClock()

        @tb.tunable(space=tb.Space(block=[1, 2]), tuner=fake_tuner(clock), name="explained", store=tmp_path)
        def kernel(x, *, config):
            clock.spend(config.block * code)
            return x

        return kernel

    kernel(1)(3)
    monkeypatch.setenv("TUNEBOOK_PIN", pin)
    assert "changed    the kernel, or a function that it uses, was edited since" in str(kernel(2).explain(3))
    assert "edited since" not in str(kernel(1).explain(3))


@pytest.mark.parametrize("by_hand", [False, True])
def test_without_the_program_it_says_that_changed_code_tunes_anew_unless_it_answers_any_code(tmp_path, by_hand, capsys):
    kernel = make(tmp_path)
    if by_hand:
        kernel.selector.persistent.put(*kernel.problem(np.ones(8)), tb.Config(block=2))
    kernel(np.ones(8))
    assert "tunes anew" not in str(kernel.explain(np.ones(8)))
    assert main(["explain", "explained", "--book", str(tmp_path)]) == 0
    assert ("a program whose code has changed tunes anew" in capsys.readouterr().out) is not by_hand


@pytest.mark.promise("only-candidates")
def test_a_config_outside_the_candidates_is_a_miss_with_the_reason(tmp_path):
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


@pytest.mark.promise("explained-by-own-rule")
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
    assert "chosen as  one of 3 that are equally fast, within 0.0%: kept the heuristic" in str(explanation)
    assert "as good    b=1; b=3" in str(explanation)


def test_other_versions_of_libraries_are_named(tmp_path, monkeypatch):
    version = np.__version__
    make(tmp_path)(np.ones(8))
    monkeypatch.setattr(np, "__version__", "99.0")
    kernel = make(tmp_path)
    assert "99.0" in str(kernel.explain(np.ones(8)))
    said = str(kernel.explain(np.ones(8)))
    assert "the entry was made under" in said
    assert f"changed    numpy: {version} there, 99.0 here" in said
    assert "winner     1 s (to 1 s in 3 samples)  block=1" in said, "what was measured there is shown all the same"


def test_near_misses_name_other_versions_too(tmp_path, monkeypatch):
    version = np.__version__
    make(tmp_path)(np.ones(8))
    monkeypatch.setattr(np, "__version__", "99.0")
    (miss,) = make(tmp_path).explain(np.ones(16)).near_misses
    assert miss.differences == ("x: dim 0 is 8 there, 16 here", f"numpy: {version} there, 99.0 here")


@pytest.mark.filterwarnings("ignore:.*is not tuned")
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
    assert "failed     2 candidates raised ValueError: no such tile (remembered until 2" in said
    assert said.endswith("): b=1; b=2")
    assert make_failing().explain(2).near_misses == (), "there is no configuration in it"


# ---------------------------------------------------------------------------------------------------- without a program


def explained(tmp_path, problem):
    catalogue = Catalogue(tb.PersistentCache("k", tmp_path).store)
    return explain_entry(catalogue, problem, catalogue.store.get(problem))


def test_an_entry_is_explained_without_its_program(tmp_path):
    kernel = make(tmp_path)
    kernel(np.ones(8))
    problem = kernel.problem(np.ones(8))
    live, alone = kernel.explain(np.ones(8)), explained(tmp_path, problem)
    assert alone.verdict == live.verdict
    assert alone.selection.config == live.selection.config
    assert alone.selection.source == "persistent"
    assert alone.failures == live.failures


def test_a_missing_entry_has_near_misses_without_its_program(tmp_path):
    kernel = make(tmp_path)
    kernel(np.ones(8))
    explanation = explained(tmp_path, kernel.problem(np.ones(16)))
    assert isinstance(explanation.selection, NoSelection)
    assert explanation.near_misses[0].differences == ("x: dim 0 is 8 there, 16 here",)


def test_an_entry_of_another_version_would_be_verified(tmp_path):
    kernel = make(tmp_path)
    kernel(np.ones(8))
    problem, store = kernel.problem(np.ones(8)), tb.PersistentCache("k", tmp_path).store
    record = store.get(problem)
    there = record.head.environment.replace(np.__version__, "1.0")
    store.put(record.replace(head=replace(record.head, environment=there)))
    said = str(explained(tmp_path, problem))
    assert "from verification" in said
    assert f"numpy: 1.0 there, {np.__version__} here" in said


def test_unknown_versions_do_not_count_as_a_difference():
    assert versions_differ("", '{"driver":"580.12"}') == ()
    assert versions_differ("not json", '{"driver":"580.12"}') == ()
    assert versions_differ('{"driver":"570.86"}', '{"driver":"580.12"}') == ("driver: 570.86 there, 580.12 here",)


# ----------------------------------------------------------------------------------------------------- what is shown


def measurement(block, samples=(), failure=None, code="c", environment="e", when=0.0):
    return Measurement({"block": block}, str(block), code, "p", environment, tuple(samples), failure, when=when)


def failing(*messages):
    failures = [measurement(i, failure=Failure("compile", message)) for i, message in enumerate(messages)]
    problem = Problem("cpu", "k", "{}")
    return Explanation(problem=problem, selection=NoSelection(problem, ()), failures=tuple(failures))


def test_of_a_few_failures_each_message_is_told():
    explanation = failing("rows 16 do not fit", "rows 32 do not fit", "rows 16 do not fit")
    assert [(f.configs, f.reason) for f in explanation.failed] == [
        (("block=0", "block=2"), "compile: rows 16 do not fit"),
        (("block=1",), "compile: rows 32 do not fit"),
    ]


def test_the_message_of_several_failures_is_of_the_first_that_is_named():
    explanation = failing(*(f"rows {9 - n} do not fit" for n in range(8)))
    (group,) = replace(explanation, failures=explanation.failures[::-1]).failed
    assert group.reason == "compile: rows 9 do not fit (numbers of the first)"
    assert group.configs[0] == "block=0"


def test_every_wrong_output_has_the_hint_that_is_right_for_it():
    @tb.tunable(space=tb.Space(b=list(range(9))), reference=lambda x: x, store=False, name="rounded")
    def kernel(x, *, config):
        return x * (1 + config.b * (1e-3 if config.b % 2 else 1e-6))

    x = np.ones(8)
    with pytest.warns(tb.TunebookWarning, match="gave a wrong output"):
        tuned = tb.tune(kernel, x, progress=False)
    problem = Problem("cpu", "k", "{}")
    failures = tuple(m for m in tuned.measurements if m.failure is not None)
    explanation = Explanation(problem=problem, selection=NoSelection(problem, ()), failures=failures)
    hints = {
        config: re.search(r"give tolerance=[-\de]+", group.reason)[0]
        for group in explanation.failed
        for config in group.configs
    }
    own = {
        f"b={tuned.configs[m.fingerprint].b}": re.search(r"give tolerance=[-\de]+", m.failure.said)[0] for m in failures
    }
    assert len(set(own.values())) > 1
    assert hints == own
    assert len(explanation.failed) < len(failures), "some share a line"


def test_failures_are_grouped_by_reason_whatever_their_numbers_the_most_frequent_first():
    explanation = failing("no such tile", *(f"out of shared memory: {n} bytes" for n in range(6)))
    assert [(len(f.configs), f.reason) for f in explanation.failed] == [
        (6, "compile: out of shared memory: 0 bytes (numbers of the first)"),
        (1, "compile: no such tile"),
    ]
    said = str(explanation)
    first = "0 bytes (numbers of the first)"
    assert (
        f"6 candidates, compile: out of shared memory: {first}: block=1; block=2; block=3; block=4; and 2 more" in said
    )
    assert "failed     block=0  compile: no such tile" in said


def test_only_measurements_under_the_conditions_of_the_choice_are_shown():
    old = [measurement(1, [1.0], environment="old", when=1.0), measurement(2, [2.0], environment="old", when=1.0)]
    new = [measurement(2, [1.0], environment="new", when=2.0)]
    assert measured_for_choice(Body(measurements=(*old, *new), provenance={"winner": "1"})) == old
    assert measured_for_choice(Body(measurements=(*old, *new))) == new
    assert measured_for_choice(Body()) == []


def test_the_samples_of_winner_and_runner_up_are_drawn_on_one_scale():
    verdict = decide([measurement(1, [1.0, 1.0, 1.01, 1.0, 1.0]), measurement(2, [2.0, 2.0, 2.0, 1.99, 9.0])])
    first, second, scale = map(str, spread_of(verdict.winner, verdict.ranking[1]))
    assert first == "  spread     █·······················  winner"
    assert second.strip().startswith("·")
    assert scale.split() == ["1", "s", "9", "s"]


@given(st.lists(st.floats(1e-9, 1e3), min_size=5, max_size=60), st.lists(st.floats(1e-9, 1e3), min_size=5, max_size=60))
def test_drawings_are_as_wide_as_their_scale_for_any_samples(mine, theirs):
    lines = list(spread_of(Ranked(measurement(1, mine), mine[0]), Ranked(measurement(2, theirs), theirs[0])))
    assert len(lines) in (0, 3)
    assert all(line.role == "drawing" for line in lines)
    assert all(len(line.text.partition("  ")[0]) == 24 for line in lines[:2])


def test_the_runner_up_is_the_second_fastest_also_if_it_was_eliminated(tmp_path):
    kernel = make(tmp_path)
    kernel(np.ones(8))
    told = kernel.explain(np.ones(8))
    winner, second, third = told.verdict.ranking
    assert "eliminated" not in str(told)
    stayed = second._replace(measurement=second.measurement._replace(dropped=False))

    def with_time(seconds):
        early = third._replace(measurement=third.measurement._replace(dropped=True), value_s=seconds)
        return str(replace(told, verdict=told.verdict._replace(ranking=(winner, stayed, early))))

    assert re.search(
        r"runner-up  1\.5 s .* block=4  1\.50 x, eliminated after 3 samples\n  slowest    2 s .* block=2  2\.00 x",
        with_time(1.5),
    )
    since = "eliminated after 3 samples: the best was faster then, and the machine has become slower since"
    assert re.search(rf"runner-up  900 ms .* block=4  0\.90 x, {since}\n", with_time(0.9))


@pytest.mark.parametrize(
    ("heuristic", "said", "gain"),
    [
        (4, "block=4  4 s: the winner is 4.00 x faster", 4.0),
        (1, "block=1, the winner itself", 1.0),
        (3, "block=3, which failed", None),
    ],
)
def test_the_heuristic_and_the_gain_over_it_are_told_with_and_without_the_program(
    tmp_path, heuristic, said, gain, capsys
):
    kernel = make(tmp_path, heuristic={"block": heuristic})
    kernel(np.ones(8))
    told = kernel.explain(np.ones(8))
    assert f"\n  heuristic  {said}\n" in str(told)
    assert (decode(told.heuristic.config), told.gain) == ({"block": heuristic}, gain)
    for verb in ("explain", "show"):
        assert main([verb, "explained", "--book", str(tmp_path)]) == 0
        assert re.search(rf"heuristic +{re.escape(said)}", capsys.readouterr().out)
        assert main([verb, "explained", "--json", "--book", str(tmp_path)]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["heuristic"], shown["gain"]) == ({"block": heuristic}, gain)


def test_a_heuristic_that_left_a_faster_machine_has_no_gain(tmp_path):
    kernel = make(tmp_path)
    kernel(np.ones(8))
    told = kernel.explain(np.ones(8))
    *others, heuristic = told.verdict.ranking
    early = heuristic._replace(measurement=heuristic.measurement._replace(dropped=True), value_s=0.5)
    told = replace(told, verdict=told.verdict._replace(ranking=(*others, early)))
    assert told.gain is None
    assert "block=4, eliminated after 3 samples, before the machine became slower" in str(told)


def test_every_line_has_the_names_in_the_order_of_the_space_also_without_the_program(tmp_path, capsys):
    def command(*words):
        assert main([*words, "--book", str(tmp_path)]) == 0
        return capsys.readouterr().out

    clock = FakeClock()

    @tb.tunable(
        space=tb.Space(way=["view", "copy"], inner=[1, 2], bi=[1]),
        heuristic={"bi": 1, "inner": 1, "way": "copy"},
        store=tmp_path,
        tuner=fake_tuner(clock),
    )
    def conv(n, *, config):
        if config.inner == 2:
            raise ValueError("no such tile")
        clock.spend(1e-3 if config.way == "view" else 3e-3)
        return n

    conv(1)
    said = str(conv.explain(1))
    assert "Config(way='view', inner=1, bi=1)" in said
    assert "way='view', inner=1, bi=1" in said.replace("Config(way='view', inner=1, bi=1)", "")
    assert "way='copy', inner=2, bi=1" in said
    assert "bi=1, inner" not in said
    listed, shown = command("ls"), command("show", "conv")
    for text in (command("explain", "conv"), listed, shown):
        assert "way='view', inner=1, bi=1" in text
        assert "bi=1, inner" not in text
    assert "\n  names" not in shown
