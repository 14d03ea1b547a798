"""`tunebook rm`, and `tunebook verify` of entries that are named as `explain` names them."""

from __future__ import annotations

import json

import pytest
from cli_fixtures import OnABook, python


def left(run):
    """Return the kernels of the entries in the book."""
    return [entry["kernel"] for entry in json.loads(run("ls", "--json")[1])]


class TestRm(OnABook):
    def test_an_entry_goes_by_its_id_and_is_named(self, place, run, ids):
        code, out, _ = run("rm", ids["scale@v0"][0][:6])
        assert code == 0
        assert ids["scale@v0"][0][:8] in out
        assert "removed 1 entry, " in out
        assert ids["scale@v0"][0] not in {entry["id"] for entry in json.loads(run("ls", "--json")[1])}

    def test_a_kernel_with_one_entry_goes_by_its_name_and_several_words_go_together(self, place, run, ids):
        assert run("rm", "matmul", ids["scale@v0"][0], ids["scale@v0"][0][:5], "--yes")[0] == 0
        assert left(run) == ["scale@v0"] * 4

    def test_of_several_entries_a_person_is_asked(self, place, run):
        code, _, err = run("rm", "scale")
        assert code == 1
        assert "Remove 5 entries" in err
        assert "add --yes to do it, or --dry-run" in err
        assert len(left(run)) == 6
        assert run("rm", "scale", "--yes")[0] == 0
        assert left(run) == ["matmul@v0"]

    def test_a_dry_run_says_which_entries_would_go(self, place, run, ids):
        code, out, _ = run("rm", "matmul", "--dry-run")
        assert code == 0
        assert ids["matmul@v0"][0][:8] in out
        assert "would remove 1 entry" in out
        assert len(left(run)) == 6

    def test_a_pinned_entry_goes_only_if_that_is_said(self, place, run, ids):
        run("pin", ids["scale@v0"][0], "step=2")
        code, _, err = run("rm", "scale", "--yes")
        assert code == 2
        assert f"pinned: {ids['scale@v0'][0][:8]}; add --pinned to remove" in err
        assert len(left(run)) == 6
        assert json.loads(run("rm", "scale", "--yes", "--pinned", "--json")[1])["removed"] == 5

    def test_an_unknown_name_removes_nothing(self, place, run):
        code, _, err = run("rm", "matmul", "scael")
        assert code == 1
        assert "Did you mean scale@v0?" in err
        assert len(left(run)) == 6

    def test_an_entry_of_a_pack_stays_with_its_library(self, place, run, ids):
        assert run("export", "home/v1/packs/theirs.db", "--kernel", "matmul")[0] == 0
        assert run("rm", "matmul")[0] == 0
        code, _, err = run("rm", "matmul")
        assert code == 1
        assert "'matmul' is in a pack, which stays as it was shipped: " in err
        assert "theirs.db" in err


class TestVerifyByName(OnABook):
    @pytest.mark.parametrize(("words", "count"), [(["scale"], 5), (["matmul", "scale"], 6), (["sca*", "scale"], 5)])
    def test_entries_of_the_named_kernels_are_verified(self, place, words, count):
        done = python("-m", "tunebook", "verify", *words, "--import", "mykernels", "--json", cwd=place)
        assert len(json.loads(done.stdout)) == count, done.stderr

    def test_an_entry_is_named_by_its_id(self, place, ids):
        one = ids["scale@v0"][2]
        done = python("-m", "tunebook", "verify", one[:6], "--import", "mykernels", "--json", cwd=place)
        assert [result["id"] for result in json.loads(done.stdout)] == [one], done.stderr

    def test_calls_of_a_recording_are_named_the_same_way(self, place, run, ids):
        program = "import mykernels as m; m.main()"
        assert python("-m", "tunebook", "run", "--record", "calls.json", "--", "-c", program, cwd=place).returncode == 0
        one = ids["scale@v0"][0]
        words = ("verify", "matmul", one[:8], "--recording", "calls.json", "--json")
        found = json.loads(python("-m", "tunebook", *words, cwd=place).stdout)
        assert {result["id"] for result in found} == {one, *ids["matmul@v0"]}

    def test_an_unknown_name_gets_the_nearest_suggested(self, place, run):
        code, _, err = run("verify", "scael", "--import", "json")
        assert code == 1
        assert "Did you mean scale@v0?" in err
