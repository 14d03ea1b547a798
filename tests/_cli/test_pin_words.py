"""`tunebook pin`, `unpin`, `show` and `diff`: tuples as people type them, and names in the order of the space."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from cli_fixtures import OnABook
from kernels import FakeClock, fake_tuner

import tunebook as tb


def tune(book):
    """Tune a kernel whose names are not in the alphabet's order; its best candidate is the first."""
    clock = FakeClock()
    space = tb.Space(tile=[(4, 4), (8, 4), (8, 8)], way=["ij", "j i"], align=[1, 2])

    @tb.tunable(space=space, name="conv", store=book, tuner=fake_tuner(clock), check=False)
    def conv(n, *, config):
        clock.spend((config.tile[0] + len(config.way) + config.align) * 1e-3)

    conv(1)


class TestWords(OnABook):
    @pytest.fixture
    def conv(self, tmp_path, run):
        """Return a function that runs a verb on the book of the kernel."""
        tune(tmp_path / "book")
        return lambda *words: run(*words, "--book", str(tmp_path / "book"))

    @pytest.mark.parametrize("words", [["tile=8,4", "way=ij", "align=2"], ["align=2,tile=(8, 4),way='ij'"]])
    def test_a_tuple_needs_neither_brackets_nor_quotes_and_names_keep_their_order(self, conv, words):
        code, out, _ = conv("pin", "conv", *words)
        assert code == 0
        first, before, _ = out.splitlines()
        assert first.endswith(" to tile=(8, 4), way='ij', align=2")
        assert before.startswith("  before: tile=(4, 4), way='ij', align=1, tuned")
        assert re.search(r"instead of +tile=\(4, 4\), way='ij', align=1, tuned", conv("show", "conv")[1])
        assert conv("unpin", "conv")[1].endswith(": now tile=(4, 4), way='ij', align=1, tuned\n")

    def test_values_that_fit_nothing_get_the_commands_of_the_nearest_candidates(self, conv):
        code, _, err = conv("pin", "conv", "tile=8,5", "way=j i", "align=2")
        assert code == 2
        assert "tile=8,5 is not in the space; it has (4, 4), (8, 4), (8, 8)." in err
        assert err.count("  tunebook pin ") == 3
        assert "\n  and 9 more\n" in err
        nearest = next(line for line in err.splitlines() if line.startswith("  tunebook pin "))
        assert nearest.endswith(" tile=8,4 'way='\"'\"'j i'\"'\"'' align=2")
        assert conv(*shlex.split(nearest)[1:])[0] == 0

    def test_a_misspelt_name_is_corrected_in_the_commands_and_keeps_its_value(self, conv):
        code, _, err = conv("pin", "conv", "tlie=8,8", "way=ij", "align=2")
        assert code == 2
        assert "unknown axis 'tlie'; did you mean 'tile'? Valid: tile, way, align. The nearest:" in err
        nearest = next(line for line in err.splitlines() if line.startswith("  tunebook pin "))
        assert nearest.endswith(" tile=8,8 way=ij align=2")

    def test_a_part_that_fits_several_gets_their_commands(self, conv):
        code, _, err = conv("pin", "conv", "tile=8,8", "align=1")
        assert code == 2
        assert "2 candidates have these values; name one:" in err
        assert sum(" tile=8,8 " in line for line in err.splitlines()) == 2
        named = re.findall(r"tunebook pin \w+ (.*)", conv("pin", "conv", "align=1")[2])
        assert named == [
            "tile=4,4 way=ij align=1",
            "tile=4,4 'way='\"'\"'j i'\"'\"'' align=1",
            "tile=8,4 way=ij align=1",
        ]

    def test_a_word_without_a_name_gets_a_hint_about_the_comma(self, conv):
        code, _, err = conv("pin", "conv", "tile=8,", "4")
        assert code == 2
        assert "invalid value '4': write NAME=VALUE, e.g. block_m=64; a tuple without spaces: tile=4,4" in err

    def test_diff_has_the_names_in_their_order(self, conv, tmp_path, run):
        conv("export", str(tmp_path / "before.json"))
        conv("pin", "conv", "tile=8,4,way=ij,align=2")
        out = run("diff", str(tmp_path / "before.json"), str(tmp_path / "book"))[1]
        assert "tile=(4, 4), way='ij', align=1" in out
        assert "tile=(8, 4), way='ij', align=2" in out

    def test_axes_are_named_in_the_order_of_the_space_and_numbers_by_size(self, conv):
        assert "Valid: tile, way, align" in conv("pin", "conv", "tille=8,4")[2]
        assert "align=3 is not in the space; it has 1, 2" in conv("pin", "conv", "align=3", "tile=8,8")[2]

    @pytest.mark.parametrize("written", ["true", "True", "TRUE"])
    def test_a_truth_value_may_be_written_in_any_case(self, written, tmp_path, run):
        clock = FakeClock()

        @tb.tunable(
            name="fold", space=tb.Space(wide=[1, 2], temp=[False, True]), store=tmp_path, tuner=fake_tuner(clock)
        )
        def fold(n, *, config):
            clock.spend(config.wide * 1e-3)

        fold(1)
        book = ("--book", str(tmp_path))
        assert run("pin", "fold", f"temp={written}", "wide=2", *book)[1].startswith("pinned fold@v0")
        assert json.loads(run("show", "fold", "--json", *book)[1])["config"] == {"temp": True, "wide": 2}
        assert run("pin", "fold", f"temp={written}", "wide=9", "--force", *book)[0] == 0
        assert json.loads(run("show", "fold", "--json", *book)[1])["config"] == {"temp": True, "wide": 9}

    def test_what_it_says_is_wrapped_but_no_command_is(self, conv, monkeypatch):
        monkeypatch.setenv("COLUMNS", "40")
        out = conv("pin", "conv", "tile=8,4,way=ij,align=2")[1]
        assert max(map(len, out.splitlines())) <= 40
        assert "x the\n    winner's time" in out
        err = conv("pin", "conv", "tile=8,5")[2]
        assert err.startswith("tunebook: no working candidate has\ntile=8,5: ")
        commands = [line for line in err.splitlines() if line.startswith(" ")]
        assert max(map(len, set(err.splitlines()) - set(commands))) <= 40
        assert any(line.endswith(" tile=8,4 way=ij align=1") and len(line) > 40 for line in commands)

    def test_a_forced_tuple_is_a_tuple(self, conv):
        assert conv("pin", "conv", "tile=2,2", "way=ij", "align=1", "--force")[0] == 0
        assert json.loads(conv("ls", "--json")[1])[0]["config"]["tile"] == [2, 2]

    def test_explain_compares_a_pin_of_the_environment_with_the_candidates(self, conv, monkeypatch):
        monkeypatch.setenv("TUNEBOOK_PIN", "conv:tile=8,8,align=1")
        code, out, _ = conv("explain", "conv")
        assert code == 0
        assert "answer: none\n" in out
        said = "tile=8,8, align=1 fits 2 candidates: a program stops with an error; name one exactly"
        assert f"  pinned      {said}\n" in out
        monkeypatch.setenv("TUNEBOOK_PIN", "conv:align=1,tile=8,8,way=ij")
        assert "answer: tile=(8, 8), way='ij', align=1 from pinned\n" in conv("explain", "conv")[1]
        monkeypatch.setenv("TUNEBOOK_PIN", "conv:align=3")
        assert "  pinned      align=3 is not in the space; it has 1, 2; a program stops" in conv("explain", "conv")[1]

    def test_a_key_that_is_no_json_is_refused_if_the_others_are(self, conv):
        code, _, err = conv("explain", "conv", "--key", "{a")
        assert code == 2
        assert "--key {a: the keys of conv@v0 are JSON, and this is not: " in err
        assert conv("explain", "conv", "--key", '{"a": 1}')[0] == 1
