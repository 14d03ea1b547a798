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
        assert "tile=8,5 is not in the space; it has " in err
        nearest = next(line for line in err.splitlines() if line.startswith("  tunebook pin "))
        assert nearest.endswith(" tile=8,4 'way='\"'\"'j i'\"'\"'' align=2")
        assert conv(*shlex.split(nearest)[1:])[0] == 0

    def test_a_part_that_fits_several_gets_their_commands(self, conv):
        code, _, err = conv("pin", "conv", "tile=8,8", "align=1")
        assert code == 2
        assert "2 candidates have these values; name one:" in err
        assert sum(" tile=8,8 " in line for line in err.splitlines()) == 2

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

    def test_a_forced_tuple_is_a_tuple(self, conv):
        assert conv("pin", "conv", "tile=2,2", "way=ij", "align=1", "--force")[0] == 0
        assert json.loads(conv("ls", "--json")[1])[0]["config"]["tile"] == [2, 2]
