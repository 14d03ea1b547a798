"""The verbs that change a book, or carry it about: pin, prune, merge, export, import, diff, fit, verify, completion."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from cli_fixtures import OnABook, change_environment, python, stored
from kernels import FakeClock, fake_tuner

import tunebook as tb
from tunebook._base.record_format import Record, merge
from tunebook._cli._formats import OWN
from tunebook._cli.pin import pin
from tunebook._cli.unpin import unpin
from tunebook.formats import FORMATS
from tunebook.stores import PackStore, open_store

PROGRAM = """
import json, sys
import numpy as np, tunebook as tb, mykernels
a, b = np.ones((8, 4), np.float32), np.ones((4, 8), np.float32)
found = {"call": mykernels.matmul.explain(a, b).selection.config.block}
found["tune"] = getattr(tb.tune(mykernels.matmul, a, b).config, "block")
found["verify"] = tb.verify(mykernels.matmul, a, b).config.block
mykernels.matmul.selector.cache.clear()
found["after"] = mykernels.matmul.explain(a, b).selection.config.block
print(json.dumps(found))
"""


class TestPin(OnABook):
    def test_a_pin_survives_calls_tuning_verifying_and_merging(self, place, run, ids):
        (identifier,) = ids["matmul@v0"]
        assert run("pin", "matmul", "block=64")[0] == 0
        done = python("-c", PROGRAM, cwd=place)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["call"] == found["after"] == 64
        assert run("merge", "other_book.json")[0] == 0
        assert run("import", "tuned.bundle.gz")[0] == 0
        record = stored(place, identifier)
        assert record.head.origin == "pinned"
        assert len(record.body.measurements) >= 4, "what was measured meanwhile is kept beside it"
        assert json.loads(run("ls", "--json", "--kernel", "matmul")[1])[0]["config"] == {"block": 64}

    def test_unpin_goes_back_to_the_measured_winner(self, place, run, ids):
        (identifier,) = ids["matmul@v0"]
        before = stored(place, identifier)
        run("pin", "matmul", "block=64")
        run("pin", "matmul", "block=32")
        code, out, _ = run("unpin", "matmul")
        assert code == 0
        assert f"unpinned matmul@v0 {identifier[:8]}: now block=16, tuned" in out
        assert stored(place, identifier).head == before.head
        assert stored(place, identifier).body.provenance == before.body.provenance

    def test_unpinning_an_entry_without_measurements_removes_it(self, tmp_path, run):
        cache = tb.PersistentCache("k", tmp_path / "book")
        cache.put("cpu", "k", "1", {"a": 1})
        record = cache.read(tb.Problem("cpu", "k", "1"))
        bare = pin(
            record.replace(head=type(record.head)(problem=record.problem, config=None, checksum="", origin="tuned")),
            {"a": 2},
        )
        open_store(tmp_path / "book").put(bare)
        code, out, _ = run("unpin", "k", "--book", str(tmp_path / "book"))
        assert code == 0
        assert "removed, since nothing was measured" in out
        assert cache.read(record.problem) is None

    def test_an_imported_configuration_comes_back(self, tmp_path, run):
        cache = tb.PersistentCache("k", tmp_path / "book")
        cache.put("cpu", "k", "1", {"a": 1})
        assert run("pin", "k", "a=2", "--book", str(tmp_path / "book"))[0] == 0
        assert cache.get("cpu", "k", "1") == {"a": 2}
        assert run("unpin", "k", "--book", str(tmp_path / "book"))[0] == 0
        assert cache.get("cpu", "k", "1") == {"a": 1}

    def test_a_value_that_no_candidate_has_is_refused_with_the_candidates(self, place, run):
        code, _, err = run("pin", "matmul", "block=48")
        assert code == 2
        assert "no working candidate has block=48: block=48 is not in the space; it has " in err
        assert "block=64" in err
        assert "block=128" not in err, "it failed"
        assert "--force" not in err, "a program would ignore the pin"
        assert run("pin", "matmul", "block=128")[0] == 2
        code, _, err = run("pin", "matmul", "block=48", "--force")
        assert (code, err) == (0, "it was never measured; it has an effect only if it is a candidate of the kernel\n")
        assert run("pin", "matmul", "block=64")[2] == ""

    @pytest.mark.parametrize("force", [(), ("--force",)])
    def test_a_misspelt_name_is_refused_with_the_nearest_one(self, place, run, force):
        code, _, err = run("pin", "matmul", "blok=32", *force)
        assert code == 2
        assert "unknown axis 'blok'; did you mean 'block'? Valid: block" in err

    def test_a_value_that_is_given_twice_is_an_error(self, place, run):
        code, _, err = run("pin", "matmul", "block=32", "block=16")
        assert code == 2
        assert "block is given twice, as 32 and as 16" in err

    def test_a_candidate_that_raised_is_refused_with_its_error(self, tmp_path, run):
        @tb.tunable(space=tb.Space(b=[1, 2]), heuristic={"b": 1}, store=tmp_path, name="mm")
        def mm(n, *, config):
            if config.b == 2:
                raise ValueError("no room")
            return n

        mm(1)
        code, _, err = run("pin", "mm", "b=2", "--book", str(tmp_path))
        assert code == 2
        assert "no working candidate has b=2: it raised ValueError: no room" in err
        assert "Use --force to pin it anyway." in err

    def test_an_entry_without_a_choice_has_no_winner_to_compare_with(self, tmp_path, run):
        @tb.tunable(space=tb.Space(b=[1, 2, 3]), heuristic={"b": 1}, store=tmp_path, name="mm")
        def mm(n, *, config):
            if config.b == 3:
                raise KeyboardInterrupt
            return n

        with pytest.raises(KeyboardInterrupt):
            mm(1)
        code, out, _ = run("pin", "mm", "b=2", "--book", str(tmp_path))
        assert code == 0
        assert "before: nothing was chosen yet\n" in out

    def test_a_candidate_that_was_rejected_is_not_pinned_by_force(self, tmp_path, run):
        @tb.tunable(space=tb.Space(b=[1, 2]), heuristic={"b": 1}, store=tmp_path, name="mm")
        def matmul(n, *, config):
            return n + (config.b == 2)

        matmul(1)
        assert "--force" not in run("pin", "mm", "b=2", "--book", str(tmp_path))[2]
        code, _, err = run("pin", "mm", "b=2", "--force", "--book", str(tmp_path))
        assert code == 2
        assert "--force does not change that" in err
        assert "b=2 was rejected: wrong-result: output is 2, expected 1" in err
        assert run("pin", "mm", "b=3", "--force", "--book", str(tmp_path))[0] == 0
        matmul.selector.cache.clear()
        matmul.selector.forbid_reautotune = False
        with pytest.warns(tb.TunebookWarning, match="mm@v0 is pinned to b=3, which is none of its candidates now"):
            matmul(1)

    def test_values_without_a_name_are_wrong_usage(self, place, run):
        assert run("pin", "matmul", "64") == (
            2,
            "",
            "tunebook: invalid value '64': write NAME=VALUE, e.g. block_m=64; a tuple without spaces: tile=4,4\n",
        )

    def test_dry_run_changes_nothing(self, place, run, ids):
        before = stored(place, ids["matmul@v0"][0])
        assert "would pin" in run("pin", "matmul", "block=32", "--dry-run")[1]
        assert stored(place, ids["matmul@v0"][0]) == before

    def test_unpinning_an_entry_that_is_not_pinned_exits_with_1(self, place, run):
        code, _, err = run("unpin", "matmul")
        assert code == 1
        assert "is not pinned; its origin is 'tuned'" in err

    def test_a_pin_wins_every_merge_and_its_measurements_stay(self, place, ids):
        record = stored(place, ids["matmul@v0"][0])
        pinned = pin(record, record.body.measurements[1].config)
        for merged in (merge(record, pinned), merge(pinned, record)):
            assert merged.head.config == pinned.head.config
            assert len(merged.body.measurements) == len(record.body.measurements)
        assert unpin(pinned).head == record.head

    def test_a_problem_that_is_being_tuned_is_waited_for_and_then_refused(self, place, run, ids, monkeypatch):
        monkeypatch.setattr("tunebook._cli.pin._WAIT_S", 0.05)
        from tunebook._selection.single_flight import acquire

        with acquire(open_store(place / "home").leases(), ids["matmul@v0"][0], look=lambda: None):
            code, _, err = run("pin", "matmul", "block=32")
        assert code == 3
        assert "is being tuned by another process" in err


class TestPrune(OnABook):
    def age(self, place, ids, kernel, seconds, used=None):
        for identifier in ids[kernel]:
            (path,) = (place / "home").glob(f"v1/*/*/{identifier}.json")
            written = time.time() - seconds
            os.utime(path, (written if used is None else time.time() - used, written))

    def test_by_age(self, place, run, ids):
        self.age(place, ids, "matmul@v0", 90 * 86400)
        code, out, _ = run("prune", "--older-than", "30d", "--yes")
        assert code == 0
        assert "written 90 d ago" in out
        assert [e["kernel"] for e in json.loads(run("ls", "--json")[1])] == ["scale@v0"] * 5

    def test_unused_counts_reads_by_programs_and_not_by_the_command(self, place, run, ids):
        self.age(place, ids, "scale@v0", 90 * 86400, used=10 * 86400)
        self.age(place, ids, "matmul@v0", 90 * 86400)
        for words in (("ls",), ("explain", "matmul"), ("show", "matmul"), ("doctor", "--full")):
            run(*words)
        found = json.loads(run("prune", "--unused", "30d", "--json", "--dry-run")[1])
        assert [entry["kernel"] for entry in found["entries"]] == ["matmul@v0"]
        assert json.loads(run("prune", "--unused", "5d", "--json", "--dry-run")[1])["entries"].__len__() == 6

    def test_by_size_the_longest_unused_go_first(self, place, run, ids):
        self.age(place, ids, "scale@v0", 5 * 86400)
        found = json.loads(run("prune", "--max-size", "9kB", "--json", "--yes")[1])
        assert found["removed"] == 4
        assert {entry["kernel"] for entry in found["entries"]} == {"scale@v0"}

    def test_by_version(self, place, run, ids):
        change_environment(place, ids["matmul@v0"][0], numpy="1.0")
        (entry,) = json.loads(run("prune", "--other-versions", "--json", "--dry-run")[1])["entries"]
        assert entry["why"] == f"numpy: 1.0 there, {np.__version__} here"

    def test_pinned_ones_stay_unless_asked_for(self, place, run, ids):
        run("pin", "matmul", "block=32")
        self.age(place, ids, "matmul@v0", 90 * 86400)
        assert run("prune", "--older-than", "30d", "--yes")[0] == 1
        assert run("prune", "--older-than", "30d", "--yes", "--pinned")[0] == 0

    def test_without_yes_and_without_a_person_nothing_goes(self, place, run, ids):
        self.age(place, ids, "matmul@v0", 90 * 86400)
        code, _, err = run("prune", "--older-than", "30d")
        assert code == 1
        assert "add --yes to do it, or --dry-run" in err
        assert len(json.loads(run("ls", "--json")[1])) == 6

    @pytest.mark.parametrize(("answer", "left"), [("y\n", 5), ("\n", 6), ("no\n", 6)])
    def test_a_person_is_asked(self, answer, left, place, run, ids):
        self.age(place, ids, "matmul@v0", 90 * 86400)
        command = f"{sys.executable} -m tunebook prune --older-than 30d"
        environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path)), "TERM": "dumb"}
        said = subprocess.run(
            ["script", "-qec", command, "/dev/null"],
            input=answer,
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
        assert "[y/N]" in said.stdout
        assert len(json.loads(run("ls", "--json")[1])) == left

    def test_a_criterion_must_be_given(self, place, run):
        code, _, err = run("prune", "--kernel", "scale", "--yes")
        assert code == 2
        assert "add a criterion: --older-than" in err

    def test_within_the_kernels_that_are_named(self, place, run, ids):
        for kernel in ids:
            self.age(place, ids, kernel, 90 * 86400)
        assert (
            json.loads(run("prune", "--older-than", "30d", "--kernel", "matmul", "--json", "--yes")[1])["removed"] == 1
        )


class TestCarryingAbout(OnABook):
    @pytest.mark.parametrize("name", ["x.bundle", "x.bundle.gz", "x.db", "x.json"])
    def test_exported_entries_are_imported_whole(self, name, place, run, tmp_path):
        assert run("export", name)[0] == 0
        there = str(tmp_path / "there")
        code, out, _ = run("import", name, "--book", there)
        assert (code, "6 new" in out) == (0, True)
        ours = {r.problem: r for r in open_store(place / "home").items()}
        assert {r.problem: r for r in open_store(tmp_path / "there").items()} == ours
        assert run("diff", name if name.endswith(("db", "json")) else there)[0] == 0

    @pytest.mark.parametrize("name", ["x.bundle", "x.db", "x.json"])
    def test_an_export_leaves_one_file(self, name, place, run):
        before = set(place.iterdir())
        assert run("export", name)[0] == 0
        assert set(place.iterdir()) - before == {place / name}

    @pytest.mark.parametrize("verb", ["merge", "diff"])
    def test_a_bundle_given_as_a_book_is_refused_with_the_command_that_reads_it(self, verb, place, run):
        code, out, err = run(verb, "tuned.bundle.gz")
        assert (code, out) == (2, "")
        assert "tuned.bundle.gz is a file, but not a .db pack or a .json file" in err
        assert err.endswith("tunebook import tuned.bundle.gz\n")

    def test_filters_choose_the_exported_entries(self, place, run):
        assert json.loads(run("export", "x.db", "--kernel", "matmul", "--json")[1])["entries"] == 1
        assert run("export", "y.db", "--kernel", "nothing")[0] == 1

    def test_a_signed_bundle_needs_its_key(self, place, run, tmp_path, monkeypatch):
        monkeypatch.setenv("TUNEBOOK_SIGNING_KEY", "one")
        assert "bundle, signed" in run("export", "x.bundle")[1]
        monkeypatch.setenv("TUNEBOOK_SIGNING_KEY", "two")
        there = ("--book", str(tmp_path / "there"))
        code, _, err = run("import", "x.bundle", *there)
        assert code == 3
        assert "signed with another key" in err
        assert run("import", "tuned.bundle.gz", *there)[0] == 3, "not signed at all"
        assert run("import", "tuned.bundle.gz", "--allow-unsigned", *there)[0] == 0

    @pytest.mark.promise("signed-only")
    @pytest.mark.parametrize(
        "words",
        [
            ("import", "tuned.bundle.gz"),
            ("import", "tuned.db"),
            ("import", "other_book.json"),
            ("import", "x.autotune.json", "--format", "triton"),
            ("merge", "other_book.json"),
            ("merge", "tuned.db"),
            ("merge", "home"),
        ],
    )
    def test_with_a_key_nothing_unsigned_comes_in_whatever_its_name(self, words, place, run, tmp_path, monkeypatch):
        files = Path(__file__).parents[1] / "formats" / "files"
        shutil.copy(files / "matmul_kernel.autotune.json", "x.autotune.json")
        assert run("export", "tuned.db")[0] == 0
        monkeypatch.setenv("TUNEBOOK_SIGNING_KEY", "secret")
        there = ("--book", str(tmp_path / "there"))
        code, out, err = run(*words, *there)
        assert (code, out) == (3, "")
        assert f"{words[1]} is not signed, and a key is set" in err
        assert "--allow-unsigned" in err
        assert not (tmp_path / "there").exists()
        code, out, err = run(*words, *there, "--allow-unsigned")
        assert (code, " new" in out) == (0, True), err

    def test_dry_runs_write_nothing(self, place, run, tmp_path):
        there = ("--book", str(tmp_path / "there"), "--dry-run")
        assert "would merge" in run("import", "tuned.bundle.gz", *there)[1]
        assert "6 new" in run("merge", "other_book.json", *there)[1]
        assert not (tmp_path / "there").exists()

    def test_an_export_to_a_book_that_exists_is_refused(self, place, run):
        code, _, err = run("export", "other_book.json")
        assert code == 2
        assert "other_book.json exists" in err

    def test_an_unknown_format_is_refused_with_the_known_formats(self, place, run):
        for words in (("export", "x", "--format", "nonsense"), ("import", "other_book.json", "--format", "nonsense")):
            code, _, err = run(*words)
            assert code == 2
            assert "unknown format 'nonsense'; choose one of bundle, pack, json, aiter" in err

    def test_another_tools_format_goes_through(self, place, run, tmp_path):
        (tmp_path / "E=8,N=64,device_name=NVIDIA_H200.json").write_text(json.dumps({"1": {"BLOCK_SIZE_M": 16}}))
        file = str(tmp_path / "E=8,N=64,device_name=NVIDIA_H200.json")
        code, out, err = run("import", file, "--format", "vllm", "--book", str(tmp_path / "there"))
        assert code == 0, err
        assert "1 new" in out

    @pytest.mark.parametrize("name", FORMATS)
    def test_each_tools_file_comes_in_and_goes_out_again(self, name, place, run, tmp_path):
        samples = Path(__file__).parents[1] / "formats" / "files"
        known = (samples / name, samples / f"{name}.json", samples / "matmul_kernel.autotune.json")
        file = str(next(path for path in known if path.exists()))
        book = ("--format", name, "--book", str(tmp_path / "there"))
        assert run("import", file, *book)[0] == 0
        assert run("export", str(tmp_path / "out"), *book)[0] == 0
        assert re.search(r"0 new, \d+ already known", run("import", str(tmp_path / "out"), *book)[1])

    def test_entries_keyed_on_arrays_are_written_by_a_map(self, place, run):
        words = ("export", "tables", "--format", "vllm", "--kernel", "matmul")
        code, _, err = run(*words)
        assert (code, "--map E=w1.shape[0]" in err) == (3, True)
        sizes = ("--map", "E=1", "--map", "N=b.shape[1]", "--map", "M=a.shape[0]", "--map", "dtype='f32'")
        assert run(*words, *sizes)[0] == 0
        (file,) = Path("tables").iterdir()
        assert re.fullmatch(r"E=1,N=8,device_name=.*,dtype=f32\.json", file.name)
        assert json.loads(file.read_text()) == {"8": {"block": 16}}

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--format", "vllm", "--map", "E"), "--map E should be like --map E=w1.shape[0]"),
            (("--map", "E=1"), "--map is for the formats of other tools"),
        ],
    )
    def test_a_map_that_cannot_be_used_is_wrong_usage(self, words, message, place, run):
        code, _, err = run("export", "out", *words)
        assert (code, message in err) == (2, True)

    def test_help_names_every_format_and_loads_none(self):
        code = "import sys; from tunebook._cli import export, import_, merge, prune; "
        code += "print([n for n in sys.modules if 'tunebook.formats._' in n])"
        assert python("-c", code).stdout == "[]\n"
        assert set(FORMATS) <= set(re.findall(r"\w+", python("-m", "tunebook", "export", "--help").stdout))

    def test_a_file_that_names_no_device_says_how_to_name_it(self, run, tmp_path):
        file = str(Path(__file__).parents[1] / "formats" / "files" / "t4.json")
        words = ("import", file, "--format", "t4", "--book", str(tmp_path / "there"))
        assert "1 without a device, because the file does not name it: add --as-device" in run(*words)[1]
        assert "without a device" not in run(*words, "--as-device", "gpu:NVIDIA H200")[1]

    def test_a_name_that_ends_in_db_is_a_pack(self, place, run):
        assert run("export", "tuned.db", "--kernel", "scale")[:2] == (0, "wrote 5 entries to tuned.db (pack)\n")
        assert len(list(PackStore(place / "tuned.db").items())) == 5

    @pytest.mark.parametrize("verb", ["import", "merge", "diff", "tune"])
    def test_a_file_that_is_not_there_cannot_be_read(self, verb, place, run):
        assert run(verb, "nowhere.json")[0] == 3

    def test_a_preview_of_a_merge_names_the_entries_that_would_change(self, place, run, ids):
        assert "would merge" in (out := run("merge", "other_book.json", "--dry-run")[1])
        assert len(out.splitlines()) == 1
        (scale, *_), (matmul,) = ids["scale@v0"], ids["matmul@v0"]
        run("rm", scale)
        run("pin", "matmul", "block=32")
        run("export", "theirs.json", "--kernel", "matmul")
        run("unpin", "matmul")
        out = run("merge", "other_book.json", "theirs.json", "--dry-run")[1]
        assert re.search(rf"^\+  {scale[:8]}  scale@v0 +n=\d+ +step=1$", out, re.MULTILINE)
        assert re.search(rf"^~  {matmul[:8]}  matmul@v0 .* block=16 → block=32$", out, re.MULTILINE)
        entries = json.loads(run("merge", "other_book.json", "theirs.json", "--dry-run", "--json")[1])["entries"]
        assert {(each["id"], each["change"]) for each in entries} == {(scale, "added"), (matmul, "changed")}

    def test_entries_of_a_file_are_imported_by_the_age_of_their_measurements(self, place, run, tmp_path):
        there = ("--book", str(tmp_path / "there"))
        code, _, err = run("import", "tuned.bundle.gz", "--older-than", "1y", *there)
        assert code == 1
        assert "no matching entry" in err
        assert "6 new" in run("import", "tuned.bundle.gz", "--newer-than", "1d", *there)[1]

    def test_an_import_counts_the_entries_that_will_be_verified(self, place, run, ids, tmp_path):
        change_environment(place, ids["matmul@v0"][0], numpy="1.0")
        run("export", "x.bundle")
        out = run("import", "x.bundle", "--book", str(tmp_path / "there"))[1]
        assert f"1 will be verified at their first call: numpy: 1.0 there, {np.__version__} here" in out


class TestDiff(OnABook):
    def test_books_are_compared_by_configuration(self, place, run, ids):
        assert run("diff", "other_book.json")[:2] == (0, "both have the same configurations\n")
        run("pin", "matmul", "block=32")
        run("prune", "--max-size", "20kB", "--yes", "--kernel", "scale")
        code, out, _ = run("diff", "other_book.json", "--json")
        changes = {entry["id"]: entry for entry in json.loads(out)}
        assert code == 1
        assert changes[ids["matmul@v0"][0]]["first"] == {"block": 16}
        assert changes[ids["matmul@v0"][0]]["second"] == {"block": 32}
        assert run("diff", "other_book.json")[1].count("\n") >= 3

    def test_two_entries_are_compared_field_by_field(self, place, run, ids):
        first, second = ids["scale@v0"][:2]
        code, out, _ = run("diff", first, second)
        assert code == 1
        assert f"n: 128 in {first[:8]}, 64 in {second[:8]}" in out
        assert not re.search("there|here", out)
        assert run("diff", first, first)[:2] == (0, "the same\n")
        other = json.loads(run("diff", first, ids["matmul@v0"][0], "--json")[1])
        assert {
            "what": "kernel",
            "difference": f"scale@v0 in {first[:8]}, matmul@v0 in {ids['matmul@v0'][0][:8]}",
        } in other

    def test_one_entry_is_not_enough(self, place, run, ids):
        for word in (ids["matmul@v0"][0][:4], "matmul"):
            code, _, err = run("diff", word)
            assert code == 2
            assert f"no book at {word}; to compare two entries, name both: tunebook diff {word} ID" in err


class TestFit(OnABook):
    def test_a_function_is_written_that_gives_the_winner(self, place, run, tmp_path):
        code, out, _ = run("fit", "scale", "--name", "guess")
        assert code == 0
        scope = {}
        exec(out, scope)
        assert scope["guess"](n=8) == {"step": 1}
        code, out, err = run("fit", "scale", "--output", str(tmp_path / "h.py"))
        assert (code, out) == (0, "")
        use = "from h import heuristic, and give the kernel heuristic=heuristic"
        assert err.startswith(f"wrote {tmp_path / 'h.py'}; to use it: {use}\n")
        assert (tmp_path / "h.py").read_text().startswith("def heuristic(**_):")

    def test_it_says_what_the_rule_gains_over_the_best_constant_and_its_bound(self, tmp_path, run):
        clock = FakeClock()

        def split(n, *, config):
            clock.spend(1e-3 * (1 + abs(config.half - (n > 500))))

        def same(n, *, config):
            clock.spend(1e-3 * (1 + config.half))

        for kernel in (split, same):
            tuned = tb.tunable(kernel, space=[{"half": 0}, {"half": 1}], store=tmp_path, tuner=fake_tuner(clock))
            for n in range(10, 1000, 40):
                tb.tune(tuned, n)
        book = ("--book", str(tmp_path))
        _, out, err = run("fit", "split", *book)
        said = re.search(
            r"([\d.]+)% +on calls that it was not learnt from \(at most ([\d.]+)% on 95% of them\)\n"
            r" +([\d.]+)% +on the same calls, with the best single configuration",
            err,
        )
        held_out, bound, constant = map(float, said.groups())
        assert held_out < constant
        assert held_out <= bound
        assert f"# At most {bound}% slower on 95% of held-out calls. " in out
        assert f" One configuration for all calls would be {constant}% slower on average." in out
        err = run("fit", "split", "--depth", "0", *book)[2]
        assert err.endswith("\n--depth 0 allows one configuration only; leave it out for a tree\n")
        assert "no tree is better" not in err
        _, out, err = run("fit", "same", *book)
        assert "no tree is better than this one configuration" in err
        assert "if " not in out
        assert "# At most 0.0% slower on 95% of held-out calls. No tree was better than one configuration." in out
        assert json.loads(run("fit", "same", "--json", *book)[1])["bound"] == 0

    def test_without_enough_sizes_the_bound_is_missing_and_said_to_be(self, place, run):
        assert "# Too few calls to give a bound. " in run("fit", "scale")[1]
        assert json.loads(run("fit", "scale", "--json")[1])["bound"] is None

    def test_an_output_that_cannot_be_written_exits_with_3(self, place, run):
        code, _, err = run("fit", "scale", "--output", "nowhere/h.py")
        assert code == 3
        assert err == "tunebook: --output nowhere/h.py: the directory nowhere does not exist\n"
        assert run("fit", "scale", "--output", ".")[::2] == (3, "tunebook: --output .: Is a directory\n")

    def test_too_few_calls_are_none_and_too_many_kernels_wrong_usage(self, place, run):
        code, _, err = run("fit", "matmul")
        assert (code, err) == (1, "tunebook: a heuristic needs at least 4 tuned problems; there is only 1\n")
        assert run("fit", "scale", "--name", "if")[0] == 2
        code, _, err = run("fit", "*")
        assert code == 2
        assert "matches 2 kernels: matmul@v0, scale@v0; name one" in err

    def test_names_stand_in_the_order_of_the_space(self, tmp_path, run):
        clock = FakeClock()

        @tb.tunable(name="tiled", space=tb.Space(tile=[1, 2], block=[3]), store=tmp_path, tuner=fake_tuner(clock))
        def tiled(n, *, config):
            clock.spend(config.tile * 1e-3)

        for n in range(4):
            tiled(n)
        assert "return {'tile': 1, 'block': 3}" in run("fit", "tiled", "--book", str(tmp_path))[1]


class TestVerify(OnABook):
    def test_entries_are_made_up_from_their_keys(self, place):
        done = python("-m", "tunebook", "verify", "--import", "mykernels", "--json", cwd=place)
        found = json.loads(done.stdout)
        assert {entry["status"] for entry in found} == {"holds"}, found
        assert done.returncode == 0
        assert len(found) == 6

    def test_a_kernel_with_another_book_is_skipped_and_the_message_names_the_variable_to_set(self, place):
        shutil.copytree(place / "home", place / "copy")
        done = python("-m", "tunebook", "verify", "--import", "mykernels", "--book", "copy", "--json", cwd=place)
        assert done.returncode == 1
        assert {entry["status"] for entry in json.loads(done.stdout)} == {"skipped"}
        assert f"set TUNEBOOK_HOME to {place}/copy" in done.stdout

    def test_a_recording_is_verified_too(self, place):
        code = "import mykernels, tunebook as tb\nwith tb.record() as calls:\n    mykernels.scale(8)\n"
        code += "calls.save('calls.json')"
        assert python("-c", code, cwd=place).returncode == 0
        words = ("verify", "--import", "mykernels", "--recording", "calls.json", "--json")
        (entry,) = json.loads(python("-m", "tunebook", *words, cwd=place).stdout)
        assert entry["kernel"] == "scale@v0"
        assert entry["status"] == "holds"

    def test_a_kernel_that_no_module_defines_is_skipped_and_exits_with_1(self, place, run):
        (place / "nothing.py").write_text("")
        # In a process of its own: in this one, other tests may have defined such a kernel.
        done = python("-m", "tunebook", "verify", "--import", "nothing", "--kernel", "matmul", cwd=place)
        assert done.returncode == 1
        assert "no imported module defines it" in done.stdout
        assert done.stdout.splitlines()[0].split() == ["id", "kernel", "call", "result"]

    def test_a_module_that_is_not_there_is_wrong_usage_and_output_of_a_module_goes_to_standard_error(self, place, run):
        assert run("verify", "--import", "nowhere")[0] == 2
        code, _, err = run("verify")
        assert code == 2
        assert "a book does not choose the code that runs here" in err
        (place / "chatty.py").write_text("from mykernels import *\nprint('hello')\n")
        done = python("-m", "tunebook", "verify", "scale", "--import", "chatty", "--json", cwd=place)
        assert done.stderr == "hello\n"
        assert {entry["status"] for entry in json.loads(done.stdout)} == {"holds"}

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("import surely_not_installed", "ModuleNotFoundError: No module named 'surely_not_installed' ({}, line 1)"),
            ("\nraise ValueError('no GPU\\nat all')", "ValueError: no GPU ({}, line 2)"),
            ("import json\njson.loads(1)", "TypeError: the JSON object must be str, bytes or bytearray, not int ({}"),
            ("assert False", "AssertionError ({}, line 1)"),
            ("x = (", "SyntaxError: '(' was never closed (broken.py, line 1)"),
        ],
    )
    def test_a_module_that_raises_is_one_line_with_its_place(self, place, text, said):
        (place / "broken.py").write_text(text)
        done = python("-m", "tunebook", "verify", "--import", "broken", cwd=place, env={"COLUMNS": "500"})
        assert done.returncode == 2
        assert done.stderr.startswith(f"tunebook: importing broken failed: {said.format(place / 'broken.py')}")
        assert done.stderr.count("\n") == 1

    def test_without_a_module_the_module_of_the_entries_is_suggested_after_the_names_are_found(self, place, run):
        (record,) = open_store(place / "home").items("matmul@v0")
        head, body = record.to_fields()
        open_store(place / "home").put(Record.from_fields({**head, "op": "pkg.layers.matmul@v0"}, body))
        code, _, err = run("verify", "pkg.layers.matmul")
        assert (code, err.endswith(", e.g. --import pkg.layers\n")) == (2, True)
        open_store(place / "home").put(Record.from_fields({**head, "op": "__main__.matmul@v0"}, body))
        assert run("verify")[2].endswith(", e.g. --import pkg.layers\n"), "__main__ cannot be imported"
        code, _, err = run("verify", "scale")
        assert (code, err.endswith(", e.g. --import mykernels\n")) == (2, True)
        for words in ((), ("--import", "nowhere")):
            code, _, err = run("verify", "nosuch", *words)
            assert (code, "no entry of 'nosuch'" in err) == (1, True)


class TestCompletion(OnABook):
    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            ("tunebook ex", {"explain", "export"}),
            ("tunebook ls --su", {"--summary"}),
            ("tunebook completion z", {"zsh"}),
            ("tunebook import x --format t", {"t4", "tokamax", "triton", "tunableop"}),
            ("tunebook export x --format j", {"json"}),
        ],
    )
    def test_in_a_real_bash(self, words, expected, tmp_path, run):
        (tmp_path / "c.bash").write_text(run("completion", "bash")[1])
        script = (
            f"source {tmp_path}/c.bash; COMP_WORDS=({words}); COMP_CWORD=$(({len(words.split())} - 1)); "
            '_tunebook; echo "${COMPREPLY[@]}"'
        )
        done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, check=True)
        assert set(done.stdout.split()) == expected
        assert done.stderr == ""

    @pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
    def test_in_a_real_fish(self, tmp_path, run):
        (tmp_path / "c.fish").write_text(run("completion", "fish")[1])
        asked = ["tunebook ex", "tunebook ls --su", "tunebook import x --format to"]
        script = f"source {tmp_path}/c.fish; " + "; ".join(f"complete -C '{words}'" for words in asked)
        done = subprocess.run(["fish", "--no-config", "-c", script], capture_output=True, text=True, check=True)
        found = [line.split("\t")[0] for line in done.stdout.splitlines()]
        assert found == ["explain", "export", "--summary", "tokamax"]

    @pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
    def test_a_real_zsh_takes_it_as_the_completion_of_tunebook(self, tmp_path, run):
        (tmp_path / "_tunebook").write_text(run("completion", "zsh")[1])
        script = f"autoload -U compinit; compinit -D -u; source {tmp_path}/_tunebook; print $_comps[tunebook]"
        done = subprocess.run(["zsh", "-fc", script], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "_tunebook\n", "")

    @pytest.mark.parametrize("shell", ["zsh", "fish"])
    def test_the_script_parses(self, shell, tmp_path, run):
        (tmp_path / "script").write_text(run("completion", shell)[1])
        if shutil.which(shell) is None:
            pytest.skip(f"{shell} is not installed")
        check = subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True, text=True, check=False)
        assert (check.returncode, check.stderr) == (0, "")

    def test_zsh_is_told_the_formats(self, run):
        formats = f":value:({' '.join((*OWN, *FORMATS))})"
        assert run("completion", "zsh")[1].count(formats) == 2  # export and import

    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_every_verb_and_every_option_is_in_it(self, shell, run):
        from tunebook._cli import VERBS, parser_of

        script = run("completion", shell)[1]
        for name in VERBS:
            assert name in script
            for action in parser_of(name)._actions:
                for option in action.option_strings:
                    assert option.startswith("--") is False or option.lstrip("-") in script


class TestDemo(OnABook):
    def test_it_tunes_shows_and_a_second_process_finds_it(self, tmp_path):
        done = python("-m", "tunebook", "demo", "--keep", str(tmp_path / "book"), env={"COLUMNS": "100"})
        assert done.returncode == 0, done.stderr
        for shown in ("How many primes", "chosen", "winner", "148,933 primes; the configuration was found in the book"):
            assert shown in done.stdout
        assert len(list(open_store(tmp_path / "book").items())) == 1

    def test_where_it_is_installed_the_second_process_finds_it_too(self, tmp_path):
        there = tmp_path / "site-packages"  # code in such a directory is not read as the user's own
        shutil.copytree(Path(tb.__file__).parent, there / "tunebook", ignore=shutil.ignore_patterns("__pycache__"))
        done = python("-m", "tunebook", "demo", cwd=tmp_path, env={"PYTHONPATH": str(there)})
        assert "the configuration was found in the book, without tuning" in done.stdout, done.stderr


class TestASharedBook(OnABook):
    def test_every_verb_takes_its_address(self, place, run, tmp_path):
        pytest.importorskip("redis")
        from servers import redis_server

        with redis_server(tmp_path / "redis") as server:
            assert "6 new" in run("merge", "other_book.json", "--book", server.url)[1]
            assert len(json.loads(run("ls", "--json", "--book", server.url)[1])) == 6
            assert "answer: Config(block=16)" in run("explain", "matmul", "--book", server.url)[1]
            assert run("diff", server.url)[0] == 0
            assert run("pin", "matmul", "block=32", "--book", server.url)[0] == 0
            assert run("diff", server.url)[0] == 1
        code, _, err = run("ls", "--book", server.url)
        assert code == 3
        assert "Connection refused" in err

    def test_doctor_asks_whether_it_answers(self, place, run, tmp_path, monkeypatch):
        pytest.importorskip("redis")
        from servers import redis_server

        with redis_server(tmp_path / "redis") as server:
            monkeypatch.setenv("TUNEBOOK_REMOTE", server.url)
            assert "answers in" in run("doctor")[1]
        code, out, _ = run("doctor")
        assert code == 1
        assert "Connection refused" in out
