"""`tunebook pack`: the entries of a library's kernels in one file, to ship with its code."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli_fixtures import OnABook, python, stored

from tunebook._base.record_format import Body, Record
from tunebook.stores import PackStore, open_store

PACK = "lib/__tunebook__/cpu.db"


def change(place, identifier, **facts):
    """Change facts of an entry: of its head, or of its provenance."""
    record = stored(place, identifier)
    head = {name: facts.pop(name) for name in list(facts) if hasattr(record.head, name)}
    provenance = {**record.body.provenance, **facts}
    body = Body(measurements=record.body.measurements, provenance=provenance)
    open_store(place / "home").put(Record(replace(record.head, **head), body))


def check(run, *words):
    code, out, _ = run("pack", PACK, "--check", "--json", *words)
    return code, json.loads(out)


class TestPack(OnABook):
    def test_a_pack_has_the_entries_of_the_book_whole(self, place, run):
        code, out, err = run("pack", PACK)
        assert (code, err) == (0, "")
        assert sorted(PackStore(Path(PACK)).items(), key=repr) == sorted(open_store(place / "home").items(), key=repr)
        first, _, *rows = out.splitlines()
        assert first.startswith(f"wrote 6 entries to {PACK} (")
        assert [row.split()[0] for row in rows] == ["matmul@v0", "scale@v0"]
        assert "left out" not in out

    def test_filters_choose_the_entries(self, place, run):
        found = json.loads(run("pack", PACK, "--kernel", "sca*", "--device", "CPU", "--json")[1])
        assert found["entries"] == 5
        assert [(row["kernel"], row["problems"]) for row in found["kernels"]] == [("scale@v0", 5)]
        assert found["left_out"] == []
        code, out, err = run("pack", "other.db", "--device", "h200")
        assert (code, out, err.splitlines()[-1]) == (1, "", "nothing to pack")
        assert not Path("other.db").exists()

    @pytest.mark.parametrize(
        ("facts", "why"),
        [
            ({"config": None}, "no decision, because every candidate failed"),
            ({"complete": False}, "the budget ended the tuning; --unfinished packs it too"),
            ({"checksum": "0123-4567", "when": 1.0}, "made by other code than the newest entry of the kernel"),
        ],
    )
    def test_entries_that_would_not_answer_are_left_out_with_the_reason(self, place, run, ids, facts, why):
        change(place, ids["scale@v0"][0], **facts)
        code, out, _ = run("pack", PACK)
        assert code == 0
        *_, reason, entry = out.splitlines()
        assert reason == f"left out 1 entry: {why}"
        assert entry.startswith(f"  {ids['scale@v0'][0][:8]}  scale@v0  n=128  on cpu:")
        (left_out,) = json.loads(run("pack", PACK, "--json")[1])["left_out"]
        assert left_out == {"id": ids["scale@v0"][0], "kernel": "scale@v0", "why": why}
        assert run("pack", PACK, "--check")[1].splitlines()[-2:] == [reason, entry]
        assert len(list(PackStore(Path(PACK)).items())) == 5

    def test_unfinished_and_pinned_entries_can_be_packed(self, place, run, ids):
        for identifier in ids["scale@v0"][:2]:
            change(place, identifier, complete=False)
        assert run("pin", ids["scale@v0"][0], "step=2")[0] == 0
        assert json.loads(run("pack", PACK, "--json")[1])["entries"] == 5
        assert json.loads(run("pack", PACK, "--json", "--unfinished")[1])["entries"] == 6

    def test_the_code_of_an_imported_module_decides(self, place, run, ids):
        newest = ids["scale@v0"][0]
        change(place, newest, checksum="0123-4567", when=1e12)
        assert json.loads(run("pack", PACK, "--json", "--kernel", "scale")[1])["entries"] == 1
        words = ("pack", PACK, "--json", "--kernel", "scale", "--import", "mykernels")
        done = python("-m", "tunebook", *words, cwd=place)  # another process: the module defines kernels for good
        found = json.loads(done.stdout)
        assert found["entries"] == 4
        assert [left["why"] for left in found["left_out"]] == ["made by other code than the kernel has now"]

    def test_nothing_to_pack_says_why(self, place, run, ids):
        change(place, ids["matmul@v0"][0], config=None)
        code, out, err = run("pack", PACK, "--kernel", "matmul")
        assert (code, out) == (1, "")
        first, reason, entry = err.splitlines()
        assert (first, reason) == ("nothing to pack", "left out 1 entry: no decision, because every candidate failed")
        assert entry.startswith(f"  {ids['matmul@v0'][0][:8]}  matmul@v0  a=float32[8,4]")

    def test_of_many_entries_the_first_are_named_and_the_others_counted(self, place, run, ids, monkeypatch):
        monkeypatch.setattr("tunebook._cli.pack._NAMED", 2)
        for identifier in ids["scale@v0"]:
            change(place, identifier, complete=False)
        *_, reason, _, _, more = run("pack", PACK)[1].splitlines()
        assert reason.startswith("left out 5 entries: the budget ended the tuning")
        assert more == "  and 3 more; --json lists all"

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("pack", "tuned.json"), "its name must end in .db"),
            (("pack", PACK, "--import", "no_such_module"), "no module named 'no_such_module'"),
            (("pack", PACK, "--check"), f"no pack at {PACK}; write it first"),
        ],
    )
    def test_wrong_command_lines_are_refused(self, place, run, words, said):
        code, _, err = run(*words)
        assert code == 2
        assert said in err

    def test_check_tells_new_changed_and_gone_entries(self, place, run, ids):
        assert run("pack", PACK)[0] == 0
        before = Path(PACK).read_bytes()
        assert run("pack", PACK, "--check") == (0, f"{PACK} is up to date: 6 entries\n", "")
        first, second, *_ = ids["scale@v0"]
        assert run("pin", first, "step=2")[0] == 0
        change(place, second, complete=False)
        assert check(run) == (1, {"file": PACK, "outdated": True, "new": 0, "changed": 1, "gone": 1})
        assert check(run, "--kernel", "matmul")[1]["outdated"] is False
        assert Path(PACK).read_bytes() == before
        assert run("pack", PACK)[0] == 0
        change(place, second, complete=True)
        code, out, _ = run("pack", PACK, "--check")
        assert (code, out) == (1, f"{PACK} is outdated: 1 new\n")

    def test_measuring_again_does_not_make_a_pack_outdated(self, place, run, ids):
        assert run("pack", PACK)[0] == 0
        change(place, ids["matmul@v0"][0], when=5.0, generation=7)
        assert check(run)[1]["outdated"] is False

    @pytest.mark.parametrize("where", ["here", "on the path of Python"])
    def test_the_doctor_finds_packs_beside_code_and_counts_their_entries(self, where, place, run, monkeypatch):
        monkeypatch.setenv("COLUMNS", "500")
        # Verbs of earlier tests put their own folders on the path.
        path = [each for each in sys.path if not each.startswith(str(place.parents[1]))]
        monkeypatch.setattr(sys, "path", path)
        assert "none in the book, and none beside code here or on the path of Python" in run("doctor")[1]
        (place / "lib" / "mine" / "ops").mkdir(parents=True)
        assert run("pack", "lib/mine/ops/__tunebook__/all.db")[0] == 0
        monkeypatch.setattr(sys, "path", [*path, str(place / "lib")])
        monkeypatch.chdir(place / "lib" if where == "here" else "/usr")
        out = run("doctor")[1]
        assert re.search(rf"^✓ pack +{place}/lib/mine/ops/__tunebook__/all.db: 6 entries$", out, re.MULTILINE)
        assert out.count("all.db") == 1
        assert "none in the book" not in out

    def test_a_pack_that_only_programs_in_this_directory_find_is_no_pack_of_the_environment(
        self, place, run, monkeypatch
    ):
        monkeypatch.setenv("COLUMNS", "500")
        assert run("pack", PACK)[0] == 0
        monkeypatch.setattr(
            sys, "path", [str(place), *(p for p in sys.path if not p.startswith(str(place.parents[1])))]
        )
        said = "6 entries, for programs that import their code from this directory"
        assert re.search(rf"^· pack +{place}/{PACK}: {said}$", run("doctor")[1], re.MULTILINE)

    def test_entries_of_packs_that_the_book_is_read_with_are_not_packed_again(self, place, run, ids):
        assert run("export", "home/v1/packs/theirs.db", "--kernel", "matmul")[0] == 0
        (path,) = (place / "home").glob(f"v1/*/*/{ids['matmul@v0'][0]}.json")
        path.unlink()
        assert len(json.loads(run("ls", "--json")[1])) == 6
        assert json.loads(run("pack", PACK, "--json")[1])["entries"] == 5

    def test_a_signed_pack_is_imported_where_its_key_is_set(self, place, run, monkeypatch, tmp_path):
        book = ("--book", str(tmp_path / "other"))
        monkeypatch.setenv("TUNEBOOK_SIGNING_KEY", "one secret")
        assert ", signed)" in run("pack", PACK)[1]
        assert json.loads(run("pack", "unsigned.db", "--unsigned", "--json")[1])["signed"] is False
        assert sorted(PackStore(Path(PACK)).items(), key=repr) == sorted(open_store(place / "home").items(), key=repr)
        code, _, err = run("import", "unsigned.db", *book)
        assert code == 3
        assert "unsigned.db is not signed, and a key is set" in err
        assert run("import", PACK, *book)[0] == 0
        monkeypatch.setenv("TUNEBOOK_SIGNING_KEY", "another secret")
        code, _, err = run("import", PACK, *book)
        assert code == 3
        assert "signed with another key" in err
        assert run("import", PACK, "--allow-unsigned", *book)[0] == 0
        monkeypatch.delenv("TUNEBOOK_SIGNING_KEY")
        assert run("pack", PACK, "--check")[0] == 0
