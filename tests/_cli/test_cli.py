"""The command, as a user meets it: on a book that two small kernels were tuned into."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli_fixtures import OnABook, change_environment, python, stored

from tunebook import Config, StoreError, _cli
from tunebook._base.config_codec import decode
from tunebook._base.environment_variables import SETTINGS
from tunebook._base.record_format import Body, Record
from tunebook._cli import EXIT_CODES, GROUPS, SUMMARIES, VERBS, load, main, parser_of
from tunebook._cli._entries import config_text
from tunebook.stores import open_store

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


class TestTheCommand(OnABook):
    def test_help_lists_every_verb_with_its_summary(self, run):
        code, out, _ = run("--help")
        assert code == 0
        assert all(re.search(rf"^  {name} +{re.escape(SUMMARIES[name])}$", out, re.MULTILINE) for name in VERBS)
        assert run() == (0, out, "")

    def test_every_verb_is_in_one_group_and_has_a_module_of_its_name(self):
        assert len(VERBS) == sum(len(names) for names in GROUPS.values())
        modules = {path.stem for path in Path(_cli.__file__).parent.glob("[a-z]*.py")}
        assert modules == {"import_" if name == "import" else name for name in VERBS}
        assert {load(name).run.__module__ for name in VERBS} == {f"tunebook._cli.{module}" for module in modules}

    @pytest.mark.parametrize("name", VERBS)
    def test_help_of_each_verb_has_an_example_and_no_block_of_the_overview(self, name, capsys):
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        out = capsys.readouterr().out
        assert f"example:\n  {load(name).example}\n" in out
        assert "exit codes" not in out
        assert max(map(len, out.splitlines())) <= 80

    @pytest.mark.parametrize("name", VERBS)
    def test_the_example_of_each_verb_works(self, name, place, tmp_path):
        if name in ("tune", "demo", "run", "ci"):
            pytest.skip("its own tests run it")
        if name == "unpin":
            assert main(["pin", "matmul", "block=32"]) == 0
        if name == "prune":
            for path in (place / "home").glob("v1/*/*/*.json"):
                os.utime(path, (0, 0))
        command = tmp_path / "bin" / "tunebook"
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m tunebook "$@"\n')
        command.chmod(0o755)
        paths = {"PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": ":".join(filter(None, sys.path))}
        done = subprocess.run(
            ["bash", "-c", load(name).example], capture_output=True, text=True, check=False, env={**os.environ, **paths}
        )
        assert done.returncode == 0, done.stderr + done.stdout
        assert done.stdout or name == "completion"

    def test_options_before_the_verb_get_the_right_order(self, run):
        assert run("--book", "my books", "ls", "--limit", "2") == (
            2,
            "",
            "tunebook: options stand after the verb: tunebook ls --book 'my books' --limit 2\n",
        )
        assert "options stand after the verb: tunebook ls --book ..." in run("--book", "home")[2]

    def test_an_unknown_verb_gets_the_nearest_suggested(self, run):
        assert run("exlpain") == (2, "", "tunebook: unknown verb 'exlpain'. Did you mean `tunebook explain`?\n")
        code, _, err = run("zzz")
        assert code == 2
        assert "The verbs are: demo, ls" in err

    @pytest.mark.parametrize(
        ("words", "hint"),
        [
            (["ls", "--jsn"], "unrecognized arguments: --jsn; did you mean --json?"),
            (["prune", "--older-then=3d"], "did you mean --older-than?"),
            (["ls", "--foo"], "unrecognized arguments: --foo; `tunebook ls --help` lists the options"),
            (["ls", "--zzz"], "unrecognized arguments: --zzz; `tunebook ls --help` lists the options"),
        ],
    )
    def test_an_unknown_option_gets_the_nearest_suggested(self, words, hint, capsys):
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert hint in capsys.readouterr().err

    def test_an_unknown_option_is_wrong_usage(self):
        with pytest.raises(SystemExit, match="2"):
            main(["ls", "--colour"])

    def test_python_m_and_main_say_the_same_version(self, run):
        done = python("-m", "tunebook", "--version")
        assert run("--version") == (0, done.stdout, "")
        assert re.fullmatch(r"tunebook \d+\.\d+.*\n", done.stdout)

    def test_help_loads_no_framework_no_sqlite_and_none_of_the_work(self):
        code = "import sys; from tunebook._cli import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
        loaded = set(python("-c", code).stderr.split())
        heavy = {"numpy", "jax", "torch", "numba", "rich", "sqlite3", "gzip", "hashlib", "matplotlib", "redis"}
        assert loaded & heavy == set()
        assert not [
            name for name in loaded if name.startswith(("tunebook.formats._", "tunebook._report", "tunebook.fleet"))
        ]

    def test_a_closed_pipe_gives_no_traceback(self, place):
        done = subprocess.run(
            # The reader is gone before the first byte is written.
            ["bash", "-c", f"{sys.executable} -m tunebook ls --json | (exec 0<&-; sleep 1); exit ${{PIPESTATUS[0]}}"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))},
        )
        assert (done.returncode, done.stderr) == (0, "")


class TestLs(OnABook):
    def test_it_lists_entries_newest_first(self, place, run):
        code, out, _ = run("ls")
        lines = out.splitlines()
        assert code == 0
        assert lines[0].split() == ["id", "kernel", "config", "time", "call", "age"]
        assert [line.split()[1] for line in lines[1:7]] == ["scale@v0"] * 5 + ["matmul@v0"]
        assert "a=float32[8,4] b=float32[4,8] causal=False" in lines[6]
        assert re.fullmatch(r"6 entries of 2 kernels on cpu:.+", lines[-2])
        assert lines[-1] == f"in {place}/home"

    def test_names_of_kernels_choose_entries_as_the_option_does(self, place, run, ids):
        assert run("ls", "matmul")[1] == run("ls", "--kernel", "matmul")[1]
        assert run("ls", "matmul", "sca*", "--summary")[1] == run("ls", "--summary")[1]
        code, out, err = run("ls", "matmull")
        assert (code, out) == (1, "")
        assert "no entry of 'matmull' in " in err
        assert "Did you mean matmul@v0?" in err
        short = ids["matmul@v0"][0][:8]
        assert run("ls", short)[2] == f"tunebook: '{short}' is the id of an entry; `tunebook show {short}` shows it\n"

    def test_of_several_devices_each_entry_says_its_own(self, place, run):
        record = next(open_store(place / "home").items("matmul@v0"))
        head, body = record.to_fields()
        open_store(place / "home").put(Record.from_fields({**head, "device": "gpu:NVIDIA H200"}, body))
        out = run("ls")[1]
        assert out.splitlines()[0].split() == ["id", "kernel", "config", "time", "call", "device", "age"]
        assert "7 entries of 2 kernels on 2 devices" in out

    def test_of_a_long_name_the_end_is_shown_with_as_much_of_its_module_as_tells_it_apart(
        self, place, run, ids, monkeypatch
    ):
        record = next(open_store(place / "home").items("matmul@v0"))
        head, body = record.to_fields()
        long = "a_package.with.many.modules.in_it.matmul@v0"
        open_store(place / "home").put(Record.from_fields({**head, "op": long}, body))
        monkeypatch.setenv("COLUMNS", "80")
        assert re.search(r"…\S*in_it\.matmul@v0 ", run("ls")[1])
        run("rm", ids["matmul@v0"][0])
        assert re.search(r"^\w+  matmul@v0 ", run("ls")[1], re.MULTILINE)

    @pytest.mark.parametrize("width", [60, 80, 120])
    def test_an_entry_that_no_tuning_finished_says_so_at_any_width(self, width, place, run, monkeypatch, ids):
        monkeypatch.setenv("COLUMNS", str(width))
        assert not re.search("pinned|unfinished|tuned", run("ls")[1])
        run("pin", "matmul", "block=32")
        record = stored(place, ids["scale@v0"][0])
        facts = {**record.provenance, "complete": False}
        open_store(place / "home").put(record.replace(body=replace(record.body, provenance=facts)))
        assert re.findall(r" (pinned|unfinished|tuned)\b", run("ls")[1]) == ["unfinished", "pinned"]

    def test_a_layout_that_is_not_the_usual_one_is_part_of_the_call(self, place, run):
        record = next(open_store(place / "home").items("matmul@v0"))
        head, body = record.to_fields()
        open_store(place / "home").put(
            Record.from_fields({**head, "call_key": head["call_key"].replace('"C"', '"F"', 1)}, body)
        )
        out = run("ls", "--kernel", "matmul")[1]
        assert "a=float32[8,4] b=float32[4,8] causal=False" in out
        assert "a=float32[8,4]:F b=float32[4,8] causal=False" in out

    def test_a_kernel_goes_by_its_name_without_version_and_module(self, place, run):
        record = next(open_store(place / "home").items("matmul@v0"))
        head, body = record.to_fields()
        open_store(place / "home").put(Record.from_fields({**head, "op": "mylib.add@v0"}, body))
        for name in ("add", "add@v0", "mylib.add", "mylib.add@v0", "mylib.*", "ad*"):
            assert [entry["kernel"] for entry in json.loads(run("ls", "--json", "--kernel", name)[1])] == [
                "mylib.add@v0"
            ]
        assert run("explain", "add")[1].startswith("mylib.add@v0 on cpu")
        assert run("pin", "add", "block=32")[0] == 0
        assert "answer: Config(block=32) from persistent" in run("explain", "add")[1]

    def test_a_narrow_terminal_gets_fewer_columns_and_no_line_is_wider(self, place, run, monkeypatch):
        monkeypatch.setenv("COLUMNS", "40")
        out = run("ls")[1]
        table = out.partition("\n\n")[0]
        assert max(map(len, table.splitlines())) <= 40
        assert "block=16" in table
        assert "device" not in table

    @pytest.mark.parametrize("width", [40, 50])
    def test_a_narrow_terminal_tells_the_entries_of_a_kernel_apart(self, width, place, run, monkeypatch, ids):
        monkeypatch.setenv("COLUMNS", str(width))
        out = run("ls", "scale")[1]
        assert sorted(re.findall(r"\bn=\d+", out)) == sorted(f"n={n}" for n in (8, 16, 32, 64, 128))

    def test_the_help_says_what_the_age_is(self, capsys):
        with pytest.raises(SystemExit, match="0"):
            main(["ls", "--help"])
        said = " ".join(capsys.readouterr().out.split())
        assert "The age of an entry in a directory counts from the last write to its file" in said

    @pytest.mark.parametrize("width", [50, 60, 80, 100, 120])
    def test_tables_fit_any_width(self, width, place, run, monkeypatch):
        monkeypatch.setenv("COLUMNS", str(width))
        table = run("ls")[1].partition("\n\n")[0]
        assert max(map(len, table.splitlines())) <= width

    def test_filters_by_kernel_device_and_age(self, place, run):
        assert len(json.loads(run("ls", "--json", "--kernel", "mat*")[1])) == 1
        assert len(json.loads(run("ls", "--json", "--kernel", "scale")[1])) == 5
        assert len(json.loads(run("ls", "--json", "--device", "CPU")[1])) == 6
        assert run("ls", "--device", "h200")[0] == 1
        assert run("ls", "--older-than", "1h")[0] == 1
        assert len(json.loads(run("ls", "--json", "--newer-than", "1h")[1])) == 6

    def test_older_than_goes_by_the_files_time(self, place, run, ids):
        (path,) = (place / "home").glob(f"v1/*/*/{ids['matmul@v0'][0]}.json")
        os.utime(path, (0, 0))
        (entry,) = json.loads(run("ls", "--json", "--older-than", "10y")[1])
        assert entry["kernel"] == "matmul@v0"

    def test_limit_cuts_people_off_and_programs_only_if_asked(self, place, run):
        out = run("ls", "--limit", "2")[1]
        assert "only the 2 newest are shown: --limit 0 shows all" in out
        assert len(json.loads(run("ls", "--json")[1])) == 6
        assert len(json.loads(run("ls", "--json", "--limit", "2")[1])) == 2

    def test_json_has_config_origin_seconds_and_call_key(self, place, run):
        entry = next(e for e in json.loads(run("ls", "--json")[1]) if e["kernel"] == "matmul@v0")
        assert entry["config"] == {"block": 16}
        assert entry["origin"] == "tuned"
        assert entry["seconds"] > 0
        assert entry["call_key"]["causal"] is False

    def test_times_of_a_listing_come_from_the_summaries_that_tunings_wrote(self, place, run, monkeypatch):
        times = [entry["seconds"] for entry in json.loads(run("ls", "--json")[1])]
        monkeypatch.delattr("tunebook._cli._entries.verdict_of")  # 10,000 rankings take 20 s
        assert [entry["seconds"] for entry in json.loads(run("ls", "--json")[1])] == times
        assert all(times)

    @pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
    def test_a_configuration_is_never_cut(self, width, place, run, monkeypatch):
        record = next(open_store(place / "home").items("matmul@v0"))
        head, body = record.to_fields()
        config = {f"parameter_{n}": 1000 + n for n in range(6)}
        open_store(place / "home").put(Record.from_fields({**head, "config": config}, body))
        monkeypatch.setenv("COLUMNS", str(width))
        table = run("ls")[1].partition("\n\n")[0]
        shown = " ".join(table.split())
        assert ", ".join(f"{name}={value}" for name, value in config.items()) in shown
        assert max(map(len, table.splitlines())) <= width

    def test_summary_has_a_line_per_kernel(self, place, run):
        lines = run("ls", "--summary")[1].splitlines()
        assert [line.split()[0] for line in lines] == ["kernel", "matmul@v0", "scale@v0"]
        counts = {entry["kernel"]: entry["entries"] for entry in json.loads(run("ls", "--summary", "--json")[1])}
        assert counts == {"matmul@v0": 1, "scale@v0": 5}

    def test_an_invalid_age_is_wrong_usage(self, capsys):
        with pytest.raises(SystemExit, match="2"):
            main(["ls", "--older-than", "soon"])
        assert "invalid age 'soon': write a number and s, min, h, d, w or y" in capsys.readouterr().err

    def test_an_empty_book_exits_with_1_and_json_still_parses(self, run, tmp_path, monkeypatch):
        monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path / "none"))
        for words in (("ls",), ("ls", "--summary")):
            assert run(*words) == (1, "", f"no entries yet in {tmp_path}/none\n")
            assert run(*words, "--json")[1] == "[]\n"
        assert not (tmp_path / "none").exists(), "looking makes nothing"

    def test_terminal_colours_are_for_terminals(self, place):
        script = f"{sys.executable} -m tunebook ls"
        here = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path)), "TERM": "xterm"}
        here.pop("NO_COLOR", None)
        shown = subprocess.run(["script", "-qec", script, "/dev/null"], capture_output=True, check=False, env=here)
        plain = subprocess.run(
            ["script", "-qec", script, "/dev/null"], capture_output=True, check=False, env={**here, "NO_COLOR": "1"}
        )
        assert b"\x1b[36m" in shown.stdout
        assert b"\x1b[" not in plain.stdout
        assert "\x1b" not in python("-m", "tunebook", "ls").stdout


class TestBrokenBooks(OnABook):
    def test_a_broken_record_is_listed_as_unreadable_and_doctor_says_so(self, place, run, ids):
        (path,) = (place / "home").glob(f"v1/*/*/{ids['scale@v0'][0]}.json")
        path.write_bytes(b"not a record")
        assert "unreadable" in run("ls")[1]
        assert "1 cannot be read" in run("doctor", "--full")[1]
        assert run("show", ids["scale@v0"][0])[0] == 1

    def test_a_record_in_anothers_place_is_not_shown(self, place, run, ids):
        first, second = ((place / "home").glob(f"v1/*/*/{i}.json") for i in ids["scale@v0"][:2])
        shutil.copy(next(first), path := next(second))
        code, _, err = run("show", path.stem)
        assert code == 1
        assert "cannot be read" in err

    def test_a_book_that_others_can_write_to_exits_with_3(self, place, run):
        (place / "home").chmod(0o777)
        code, _, err = run("import", "tuned.bundle.gz")
        assert code == 3
        assert "chmod go-w" in err
        assert run("doctor")[0] == 1
        code, out, err = run("ls")
        assert (code, out) == (3, "")
        assert "lets others write to it" in err

    def test_a_file_in_the_way_exits_with_3(self, place, tmp_path, run):
        (tmp_path / "home").mkdir(mode=0o755)
        (tmp_path / "home" / "v1").write_text("in the way")
        code, _, err = run("import", "tuned.bundle.gz", "--book", str(tmp_path / "home"))
        assert code == 3
        assert "Move the file that is in the way" in err

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_an_unreadable_directory_exits_with_3(self, place, run):
        (place / "home" / "v1").chmod(0)
        assert run("ls")[0] == 3

    def test_importing_a_file_that_is_not_a_bundle_exits_with_3(self, tmp_path, run):
        (tmp_path / "x.bundle").write_text("nonsense")
        code, _, err = run("import", str(tmp_path / "x.bundle"))
        assert code == 3
        assert "x.bundle is not a bundle: it is not JSON" in err

    def test_a_file_that_is_not_a_book_is_wrong_usage(self, tmp_path, run):
        (tmp_path / "x.txt").write_text("")
        code, _, err = run("ls", "--book", str(tmp_path / "x.txt"))
        assert code == 2
        assert "not a .db pack or a .json file" in err

    def test_names_in_a_book_cannot_steer_the_terminal(self, tmp_path, run):
        from tunebook import PersistentCache

        PersistentCache("x", tmp_path / "book").put("cpu", "evil\x1b[2J", "\x1b]0;x\x07", Config(a="\x1b[31m"))
        for words in (("ls",), ("show", "evil*"), ("explain", "evil*"), ("ls", "--summary")):
            out = run(*words, "--book", str(tmp_path / "book"))[1]
            assert out
            assert "\x1b" not in out
            assert "\x07" not in out


EXPLAINED = """\
matmul@v0 on DEVICE
  a: numpy float32[8, 4] C on cpu
  b: numpy float32[4, 8] C on cpu
  causal: False
answer: Config(block=16) from persistent
  code        this is the record in the book; a program whose code has changed tunes anew
  override    only the program knows: config= of a call
  overlay     only the program knows: overlays around the call
  pinned      not in TUNEBOOK_PIN
  memory      empty in a new process
measured DAY on HOST under VERSIONS
  how        host-clock/race/warmup=1/forward; 4 tried in TIME; 1 failed
  on         the caller's arguments
  winner     160 us (to 160 us in 22 samples)  block=16
  runner-up  320 us (to 320 us in 22 samples)  block=32  2.00 x
  slowest    640 us (to 640 us in 22 samples)  block=64  4.00 x
  spread     █·······················  winner
             ·······················█  runner-up
             160 us            320 us
  heuristic  block=16, the winner itself
  chosen as  fastest
  failed     block=128  memory: ValueError: out of resource: shared memory, Required: 262144, limit: 232448
"""


class TestShowAndExplain(OnABook):
    def test_a_golden_explanation(self, place, run):
        out = run("explain", "matmul")[1]
        out = re.sub(r"(?<=v0 on ).*", "DEVICE", out)
        out = re.sub(r"(?<=measured ).* on \S+ under .*", "DAY on HOST under VERSIONS", out)
        out = re.sub(r"(?<=4 tried in ).*(?=; 1)", "TIME", out)
        out = re.sub(r" \(remembered until .*\)", "", out)
        assert "\n".join(line for line in out.splitlines() if "disturbed" not in line) + "\n" == EXPLAINED

    def test_show_ranks_the_candidates(self, place, run):
        code, out, _ = run("show", "matmul")
        assert code == 0
        assert re.search(r"1 +\S+ [mu]s +1\.00 x +\d+ +block=16 +chosen, heuristic", out)
        assert re.search(r"failed +block=128 +memory: ValueError: out of resource", out)

    def test_show_gives_no_place_to_an_eliminated_candidate_and_says_why_it_stands_below(self, place, run, ids):
        record = stored(place, ids["matmul@v0"][0])

        def shown(early):
            measured = tuple(m._replace(dropped=config_text(m.config, ()) == early) for m in record.body.measurements)
            open_store(place / "home").put(Record(record.head, replace(record.body, measurements=measured)))
            return run("show", "matmul")[1]

        assert "An eliminated candidate" not in shown(None)
        out = shown("block=32")
        assert re.search(r"2 +640 us +4.00 x +\d+ +block=64", out)
        assert re.search(r"\n +out +320 us +2.00 x +\d+ +block=32\n", out), "a mark would widen the table"
        assert "out: eliminated. An eliminated candidate was clearly slower" in out

    @pytest.mark.parametrize("width", [60, 80, 120])
    def test_show_cuts_no_configuration_and_no_reason(self, width, place, run, monkeypatch):
        monkeypatch.setenv("COLUMNS", str(width))
        record = next(open_store(place / "home").items("matmul@v0"))
        head, body = record.to_fields()
        for m in body["measurements"]:
            m["config"] = {**decode(m["config"]), "a_long_name_of_an_axis": 1024, "another_long_name": "fast"}
        open_store(place / "home").put(Record.from_fields(head, body))
        out = run("show", "matmul")[1]
        assert "…" not in out
        assert max(map(len, out.splitlines())) <= width
        for block in (32, 64, 128):
            assert f"block={block}" in out
        assert "shared memory, Required: 262144, limit: 232448" in re.sub(r"\s+", " ", out)

    def test_show_names_the_state_of_an_entry_as_ls_does(self, place, run, ids):
        record = stored(place, ids["matmul@v0"][0])
        facts = {**record.provenance, "complete": False}
        open_store(place / "home").put(record.replace(body=replace(record.body, provenance=facts)))
        out = run("show", "matmul")[1]
        assert re.search(r"^  origin +tuned .*; unfinished: the next tuning goes on$", out, re.MULTILINE)
        assert not re.search(r"^  complete ", out, re.MULTILINE)
        head = replace(record.head, config=None)
        failed = tuple(m for m in record.body.measurements if m.failure is not None)
        store = open_store(place / "home")
        store.delete(record.problem)
        store.put(Record(head, Body(measurements=failed, provenance={"when": record.provenance["when"]})))
        assert re.search(r"^  origin +failed ", run("show", "matmul")[1], re.MULTILINE)
        assert json.loads(run("show", "matmul", "--json")[1])["origin"] == "failed"

    def test_show_json_has_every_part_of_the_record(self, place, run, ids):
        shown, record = json.loads(run("show", "matmul", "--json")[1]), stored(place, ids["matmul@v0"][0])
        assert shown["provenance"] == record.body.provenance
        assert [tuple(c["samples_s"]) for c in shown["candidates"]] == [m.samples_s for m in record.body.measurements]
        assert (shown["checksum"], shown["generation"]) == (record.head.checksum, record.head.generation)

    def test_of_many_entries_the_newest_is_shown_with_a_note(self, place, run):
        code, out, err = run("show", "scale")
        assert code == 0
        assert "n: 128" in out
        assert "the newest of 5 entries of 'scale'; `tunebook ls scale` lists them" in err

    def test_explain_says_tiers_measurements_and_failures(self, place, run):
        code, out, _ = run("explain", "matmul")
        assert code == 0
        for line in (
            "answer: Config(block=16) from persistent",
            "  memory      empty in a new process",
            "  a: numpy float32[8, 4] C on cpu",
            "  chosen as  fastest",
        ):
            assert line in out.splitlines()
        assert re.search(r"failed +block=128 +memory: ValueError", out)

    def test_an_unknown_call_gets_near_misses_field_by_field_and_exits_with_1(self, place, run, ids):
        key = json.dumps(json.loads(run("show", "matmul", "--json")[1])["call_key"])
        code, out, _ = run("explain", "matmul", "--key", key.replace("float32", "float16").replace("false", "true"))
        assert code == 1
        assert "answer: none" in out
        assert "a: dtype float32 there, float16 here; b: dtype float32 there, float16 here; causal: False there" in out

    def test_an_entry_made_under_other_versions_says_which(self, place, run, ids):
        change_environment(place, ids["matmul@v0"][0], numpy="1.0")
        out = run("explain", "matmul")[1]
        assert "answer: Config(block=16) from verification" in out
        assert re.search(r"persistent +numpy: 1\.0 there, \S+ here: its finalists are measured again first", out)

    def test_a_pin_in_the_environment_is_the_answer(self, place, run, monkeypatch):
        monkeypatch.setenv("TUNEBOOK_PIN", "matmul:block=64")
        assert "answer: block=64 from pinned" in run("explain", "matmul")[1]

    def test_explain_json_has_ranking_with_samples(self, place, run):
        found = json.loads(run("explain", "matmul", "--json")[1])
        assert found["answer"] == {"block": 16}
        assert found["source"] == "persistent"
        assert found["ranking"][0]["config"] == {"block": 16}
        assert len(found["ranking"][0]["samples"]) >= 2
        assert found["failures"][0]["configs"] == ["block=128"]

    def test_the_samples_of_both_are_drawn_one_above_the_other(self, place, run):
        record = next(open_store(place / "home").items("matmul@v0"))
        many = [m._replace(samples_s=(*m.samples_s * 9, 3e-4)) for m in record.body.measurements]
        open_store(place / "home").put(Record(record.head, replace(record.body, measurements=tuple(many))))
        lines = run("explain", "matmul")[1].splitlines()
        first = next(i for i, line in enumerate(lines) if line.startswith("  spread  "))
        assert lines[first].index("winner") == lines[first + 1].index("runner-up")

    def test_a_configuration_pinned_by_hand_is_shown(self, place, run):
        assert run("pin", "matmul", "block=32")[0] == 0
        said = run("explain", "matmul")[1]
        assert "  pinned     by hand: block=32, measured at 2.00 x of the winner" in said
        assert "  pinned      not in TUNEBOOK_PIN; the entry is pinned by hand" in said

    def test_explain_fits_a_narrow_terminal(self, place, run, monkeypatch):
        monkeypatch.setenv("COLUMNS", "40")
        assert max(map(len, run("explain", "matmul")[1].splitlines())) <= 40

    def test_an_unknown_kernel_gets_the_nearest_suggested(self, place, run):
        code, _, err = run("explain", "matmull")
        assert code == 1
        assert "Did you mean matmul@v0?" in err

    def test_an_ambiguous_id_lists_the_entries(self, place, run, ids, monkeypatch):
        code, _, err = run("pin", "scale", "step=2")
        assert code == 2
        assert "'scale' matches 5 entries; give an id (TUNEBOOK_PIN pins all of them, for one run):" in err
        assert all(identifier[:8] in err for identifier in ids["scale@v0"])
        record = next(open_store(place / "home").items("scale@v0"))
        head, body = record.to_fields()
        open_store(place / "home").put(Record.from_fields({**head, "device": "gpu:NVIDIA H200"}, body))
        assert "'scale' matches 6 entries; give an id, or --device:" in run("unpin", "scale")[2]

    def test_of_many_kernels_the_message_says_how_many_more_there_are(self, place, run):
        record = next(open_store(place / "home").items("scale@v0"))
        head, body = record.to_fields()
        for number in range(12):
            open_store(place / "home").put(Record.from_fields({**head, "op": f"op{number}@v0"}, body))
        assert " and 4 more.\n" in run("show", "nosuch_______")[2]


class TestDoctor(OnABook):
    def test_a_healthy_book_exits_with_0(self, place, run):
        code, out, _ = run("doctor", "--full")
        assert code == 0
        assert re.search(r"^✓ entries +6 of 2 kernels", out, re.MULTILINE)
        assert re.search(r"^✓ records +all can be read", out, re.MULTILINE)
        assert re.search(r"^✓ device +cpu:", out, re.MULTILINE)

    def test_wrong_settings_are_found_and_secrets_are_not_shown(self, place, run, monkeypatch):
        monkeypatch.setenv("TUNEBOOK_MODE", "sometimes")
        monkeypatch.setenv("TUNEBOOK_SIGNING_KEY", "hunter2")
        monkeypatch.setenv("TUNEBOOK_REMOTE", "redis://user:hunter2@127.0.0.1:1/0")
        code, out, _ = run("doctor")
        assert code == 1
        assert "invalid TUNEBOOK_MODE='sometimes'" in out
        assert "hunter2" not in out

    @pytest.mark.promise("no-secrets-shown")
    @pytest.mark.parametrize(
        "url",
        [
            "redis://:hunt/er2@127.0.0.1:1/0",
            "redis://:hunt?er2@127.0.0.1:1/0",
            "redis://:hunt#er2@127.0.0.1:1/0",
            "redis://er2:hunt@hunt:er2@127.0.0.1:1/0",
            "redis://127.0.0.1:1/0?password=hunter2",
            "redis://127.0.0.1:1/0?password=hunt@er2",
            "redis:/:hunter2@127.0.0.1:1/0",
            "er2:hunter2@127.0.0.1:1",
            "s3://hunter2:hunter2@bucket/path",
            "nonsense://:hunt/er2@host",
        ],
    )
    def test_no_part_of_a_password_is_shown_however_it_is_written(self, place, run, monkeypatch, url):
        monkeypatch.setenv("TUNEBOOK_REMOTE", url)
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        for words in [("doctor",), ("doctor", "--json"), ("ls", "--book", url)][: 3 if ":/" in url else 2]:
            assert not re.search("hunt|er2", str(run(*words)))

    def test_quarantined_records_are_counted(self, place, run, ids):
        (path,) = (place / "home").glob(f"v1/*/*/{ids['matmul@v0'][0]}.json")
        path.write_bytes(path.read_bytes()[:-20])
        store = open_store(place / "home")
        with pytest.warns(UserWarning, match="unreadable record"):
            list(store.items())
        out = run("doctor")[1]
        assert re.search(r"^! quarantine +1 unreadable record, ", out, re.MULTILINE)

    def test_leases_of_dead_processes_are_told_from_live_ones(self, place, run):
        from tunebook._selection.single_flight import Lease, acquire

        board = open_store(place / "home").leases()
        board.create("a.1", b"elsewhere 1 1 0123456789abcdef 000000000000\n")
        for slip in (place / "home" / "v1" / "leases").glob("*/a.1"):
            os.utime(slip, (0, 0))
        lease = acquire(board, "b", look=lambda: None)
        assert isinstance(lease, Lease)
        with lease:
            assert "1 tuning in progress; 1 left by dead processes" in run("doctor")[1]

    def test_leases_that_cannot_be_listed_are_a_warning(self, place, run):
        leases = place / "home" / "v1" / "leases"
        shutil.rmtree(leases, ignore_errors=True)
        leases.write_text("not a directory")
        code, out, _ = run("doctor")
        assert code == 0
        assert re.search(r"^! leases +cannot be listed: Not a directory", out, re.MULTILINE)

    def test_json_has_levels(self, place, run):
        levels = {entry["what"]: entry["level"] for entry in json.loads(run("doctor", "--json")[1])}
        assert levels["book"] == levels["writing"] == "good"

    def test_a_missing_book_is_not_an_error(self, run, tmp_path):
        code, out, _ = run("doctor", "--book", str(tmp_path / "new"))
        assert code == 0
        assert "does not exist yet; the first tuning creates it" in out
        assert not (tmp_path / "new").exists()


class TestPath(OnABook):
    def test_store_errors_exit_with_3_from_any_verb(self, run, monkeypatch):
        def fail(_options):
            raise StoreError("io", "x", "the disk is gone")

        monkeypatch.setattr("tunebook._cli.path.open_book", fail)
        assert run("path") == (3, "", "tunebook: the disk is gone\n")

    def test_it_is_where_the_book_is(self, place, run):
        assert run("path") == (0, f"{place}/home\n", "")
        assert json.loads(run("path", "--json")[1]) == {"path": f"{place}/home"}

    def test_no_home_is_wrong_usage(self, run, monkeypatch):
        monkeypatch.setattr("tunebook._cli._filters.book_root", lambda: None)
        code, _, err = run("path")
        assert code == 2
        assert "set TUNEBOOK_HOME" in err


def test_the_parsers_know_no_option_twice_and_explain_each():
    for name in VERBS:
        for action in parser_of(name)._actions:
            assert action.help, f"{name} {action.option_strings}"


class TestThePage:
    @pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse writes its help a little differently since")
    def test_it_has_the_help_of_every_verb_as_it_is_now(self, monkeypatch):
        monkeypatch.syspath_prepend(PAGE.parent)
        from cli_help import filled

        page = PAGE.read_text()
        assert filled(page) == page, "run: python docs/cli_help.py"
        assert all(f"<!-- help: {name} -->" in page for name in ("tunebook", *VERBS))

    def test_the_page_of_the_environment_has_every_variable_as_it_is_now(self, monkeypatch):
        monkeypatch.syspath_prepend(PAGE.parent)
        from cli_help import filled

        page = PAGE.with_name("environment.md").read_text()
        assert filled(page) == page, "run: python docs/cli_help.py"
        assert all(f"| `{setting.name}` |" in page for setting in SETTINGS)

    def test_it_has_every_exit_code(self):
        codes = re.findall(r"^  (\d)  (.*)$", EXIT_CODES, re.MULTILINE)
        assert [code for code, _ in codes] == ["0", "1", "2", "3"]
        assert all(f"| {code} | {said}" in PAGE.read_text() for code, said in codes)
