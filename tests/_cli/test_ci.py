"""`tunebook ci`: whether a book covers a command, in real processes, or a recording."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from cli_fixtures import OnABook, change_environment, stored

from tunebook._cli import main
from tunebook._report.run_log import RunEvent, shortfalls

KNOWN = ["--", sys.executable, "mykernels.py"]
UNKNOWN = ["--", sys.executable, "-c", "import mykernels as m; print('ran'); m.scale(9); m.scale(8)"]
COVERED = "tunebook: the book covers all of them\n"


class TestCi(OnABook):
    @pytest.fixture
    def ci(self, place, capfd, monkeypatch):
        """Return a function that runs the verb here, and its command in a process."""
        monkeypatch.setenv("PYTHONPATH", ":".join([str(place), *filter(None, sys.path)]))
        monkeypatch.delenv("TUNEBOOK_RUN", raising=False)

        def call(*words):
            code = main(["ci", *words])
            return code, *capfd.readouterr()

        return call

    @pytest.fixture
    def run(self, capfd):
        def call(*words):
            code = main(words)
            return code, *capfd.readouterr()

        return call

    @pytest.fixture
    def recording(self, ci, capfd):
        assert main(["run", "--record", "calls.json", *KNOWN]) == 0
        capfd.readouterr()
        return Path("calls.json")

    def test_a_command_whose_calls_are_in_the_book_is_covered(self, ci):
        code, _, err = ci(*KNOWN)
        assert (code, err.endswith(COVERED)) == (0, True), err
        assert "  found    6 problems in the book\n" in err

    @pytest.mark.parametrize(
        ("command", "code", "said"),
        [
            (UNKNOWN, 1, "tunebook: the book does not cover 1 problem:\n  guessed  scale@v0 "),
            (["--", "true"], 1, "tunebook: nothing was checked\n"),
            (["--", sys.executable, "-c", "import sys; sys.exit(7)"], 7, "nothing was checked"),
            (["--book", "nowhere", *KNOWN], 3, "tunebook: no book at nowhere"),
            (["--recording", "calls.json", *KNOWN], 2, "give a command or --recording, not both"),
            (
                [],
                2,
                "give a command, e.g. tunebook ci -- pytest tests/, or a recording: tunebook ci --recording calls.json",
            ),
            (["--recording", "missing.json"], 3, "cannot read the recording missing.json: No such file or directory\n"),
            (["--recording", "other_book.json"], 3, "is not a recording"),
            (["--trust", "near", "--recording", "other_book.json"], 2, "--trust near needs the program"),
        ],
    )
    def test_exit_codes(self, ci, command, code, said):
        found, _, err = ci(*command)
        assert (found, said in err) == (code, True), err

    def test_the_lines_name_the_call_and_nothing_is_tuned_or_written(self, ci, place):
        before = sorted(place.rglob("home/**/*.json"))
        _, out, err = ci(*UNKNOWN)
        assert re.search(r"  guessed  scale@v0 \w+: n=9\n", err)
        assert out == "ran\n"
        assert sorted(place.rglob("home/**/*.json")) == before

    def test_json_is_one_value_and_the_command_writes_to_standard_error(self, ci):
        code, out, err = ci("--json", *UNKNOWN)
        value = json.loads(out)
        assert (code, value["covered"], value["exit_code"], "ran" in err) == (1, False, 0, True)
        assert [(p["status"], p.get("trust")) for p in value["problems"]] == [("guessed", None), ("found", "exact")]
        assert [json.loads(p["detail"]) for p in value["not_covered"]] == [{"n": 9}]

    @pytest.mark.parametrize("form", ["book.db", "other_book.json", "home", "empty"])
    def test_a_pack_a_file_or_a_directory_can_be_checked(self, ci, place, monkeypatch, form, recording):
        assert main(["export", "book.db"]) == 0
        (place / "empty").mkdir()
        monkeypatch.setenv("TUNEBOOK_HOME", str(place / "another"))
        for words in (KNOWN, ["--recording", "calls.json"]):
            code, _, err = ci("--book", form, *words)
            assert code == (1 if form == "empty" else 0), err

    @pytest.mark.parametrize("words", [KNOWN, ["--recording", "calls.json"]], ids=["command", "recording"])
    def test_entries_of_other_versions_are_covered_only_if_trusted(self, ci, place, ids, recording, words):
        change_environment(place, ids["matmul@v0"][0], python="3.1")
        code, _, err = ci(*words)
        assert code == 1
        assert re.search(r"  found    matmul@v0 \w+: its entry is trusted as versions only\n", err)
        assert ci("--trust", "versions", *words)[0] == 0

    def test_a_recording_is_covered_if_the_book_has_an_entry_for_each_call(self, ci, place, ids, recording):
        code, _, err = ci("--recording", "calls.json")
        assert (code, err) == (0, f"tunebook: calls.json: 6 calls\n{COVERED}")
        key = stored(place, ids["scale@v0"][0]).problem.call_key
        next(place.glob(f"home/v1/*/*/{ids['scale@v0'][0]}.json")).unlink()
        code, _, err = ci("--recording", "calls.json")
        assert (code, f": n={json.loads(key)['n']}\n" in err) == (1, True), err
        value = json.loads((ci("--recording", "calls.json", "--json"))[1])
        assert [p["status"] for p in value["not_covered"]] == ["missing"]

    def test_a_recording_of_a_relative_is_covered_as_family(self, ci, recording):
        recording.write_text(re.sub(r"\d+ cores", "77 cores", recording.read_text()))
        assert ci("--recording", "calls.json")[0] == 1
        assert ci("--recording", "calls.json", "--trust", "family")[0] == 0


@pytest.mark.parametrize(
    ("trust", "short"),
    [("exact", "abcde"), ("versions", "acde"), ("family", "ade"), ("any", "ae")],
)
def test_a_shortfall_is_a_problem_without_an_entry_that_is_near_enough(trust, short):
    events = [
        RunEvent("guessed", 1, "k", "a", 0.0, ""),
        RunEvent("found", 1, "k", "b", 0.0, "versions"),
        RunEvent("found", 2, "k", "c", 0.0, "family"),
        RunEvent("found", 2, "k", "d", 0.0, "near"),
        RunEvent("tuned", 3, "k", "e", 1.0, ""),
        RunEvent("found", 3, "k", "f", 0.0, ""),
        RunEvent("taken", 3, "k", "", 0.0, ""),
        RunEvent("left", 3, "l", "", 0.0, "why"),
    ]
    assert "".join(event.problem for event in shortfalls([*events, *events], trust)) == short
