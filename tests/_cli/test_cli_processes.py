"""The command as a process: closed and full outputs, narrow encodings, odd homes, and completion in a real shell."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_fixtures import OnABook, python
from mounts import needs_mounts

COMMAND = f"{shlex.quote(sys.executable)} -m tunebook"
FULL = Path("/dev/full")
on_linux = pytest.mark.skipif(not FULL.exists(), reason="only Linux has /dev/full")


def shell(line, encoding="utf-8", **environment):
    """Run a line in bash, where `tunebook` is the command, and return its exit code, output and errors."""
    line = re.sub(r"\btunebook\b(?=[ \n]|$)", COMMAND.replace("\\", r"\\"), line)
    here = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path)), **environment}
    done = subprocess.run(["bash", "-c", line], capture_output=True, encoding=encoding, check=False, env=here)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    return done.returncode, done.stdout, done.stderr


@needs_mounts
class TestOnAReadOnlyFileSystem(OnABook):
    def shell(self, line):
        read_only = 'mount --bind "$TUNEBOOK_HOME" "$TUNEBOOK_HOME" && mount -o remount,ro,bind "$TUNEBOOK_HOME"'
        return shell(f"unshare -m bash -c {shlex.quote(f'{read_only} && tunebook {line}')}", COLUMNS="200")

    @pytest.mark.parametrize("book", ["in use", "without an entry"])
    def test_the_doctor_says_to_mount_it_writable(self, place, book):
        if book == "without an entry":
            shutil.rmtree(place / "home" / "v1")
        out = self.shell("doctor")[1]
        assert re.search(r"^! writing +not writable: Read-only file system\. ", out, re.MULTILINE)
        assert "  Mount it writable, or choose another place with TUNEBOOK_HOME or --book.\n" in out
        assert "chmod" not in out

    def test_a_pin_gives_one_message_for_people_at_a_terminal(self, place):
        code, _, err = self.shell("pin matmul block=32")
        remedy = "Mount it writable, or choose another place with TUNEBOOK_HOME or --book."
        assert (code, err) == (3, f"tunebook: cannot write to {place}/home: Read-only file system. {remedy}\n")


class TestOutputs(OnABook):
    @pytest.mark.parametrize("words", ["ls", "ls --json", "show matmul", "--help", "ls --help", "--version", "help ls"])
    def test_a_closed_output_is_a_line_and_exit_code_3(self, words, place):
        code, _, err = shell(f"tunebook {words} >&-")
        assert (code, err) == (3, "tunebook: cannot write to standard output: it is closed\n")

    @on_linux
    @pytest.mark.parametrize("words", ["ls", "ls --json", "show matmul", "--help", "ls --help", "--version", "doctor"])
    def test_a_full_disk_is_a_line_and_exit_code_3(self, words, place):
        for buffered in ("", "1"):
            code, _, err = shell(f"tunebook {words} >/dev/full", PYTHONUNBUFFERED=buffered)
            assert (code, err) == (3, "tunebook: cannot write to standard output: No space left on device\n")

    @pytest.mark.parametrize("words", ["ls --json", "show matmul", "nonsense", "show nonsense", "ls --nonsense"])
    def test_closed_errors_change_neither_the_output_nor_the_exit_code(self, words, place):
        code, out, _ = shell(f"tunebook {words}")
        assert shell(f"tunebook {words} 2>&-") == (code, out, "")

    @pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
    @pytest.mark.parametrize("words", ["doctor", "explain matmul", "ls"])
    def test_an_output_that_cannot_encode_a_sign_gets_a_plainer_one(self, words, encoding, place):
        usual = shell(f"tunebook {words}", PYTHONIOENCODING="utf-8", COLUMNS="60")
        plain = shell(f"tunebook {words}", encoding, PYTHONIOENCODING=encoding, COLUMNS="60")
        assert plain[0] == usual[0]
        assert plain[1].encode(encoding)
        assert list(map(len, plain[1].splitlines())) == list(map(len, usual[1].splitlines()))

    def test_the_demo_runs_on_an_ascii_terminal(self, place):
        assert shell("tunebook demo", PYTHONIOENCODING="ascii")[0] == 0

    def test_an_explanation_is_printed_on_an_ascii_terminal(self, place):
        code = "import mykernels; print(mykernels.scale.explain(8))"
        done = python("-c", code, cwd=place, env={"PYTHONIOENCODING": "ascii"})
        assert done.returncode == 0, done.stderr
        assert "runner-up" in done.stdout

    def test_a_tuning_in_a_daemon_without_errors_shows_no_progress(self, place):
        code = "import sys, mykernels, tunebook as tb; sys.stderr = None; tb.tune(mykernels.scale, 5)"
        assert python("-c", code, cwd=place).returncode == 0

    def test_a_dumb_terminal_gets_no_colour(self, place):
        run = "script -qec 'tunebook ls' /dev/null"
        assert "\x1b[" in shell(run, TERM="xterm", NO_COLOR="")[1]
        assert "\x1b[" not in shell(run, TERM="dumb", NO_COLOR="")[1]


class TestOddPlaces(OnABook):
    def test_a_home_that_is_not_a_directory_is_a_line_with_a_remedy(self, place):
        code, _, err = shell("unset TUNEBOOK_HOME XDG_CACHE_HOME; tunebook ls", HOME="/dev/null")
        assert code == 3
        assert re.fullmatch(r"tunebook: no book can be at /dev/null/\S+: Not a directory; set TUNEBOOK_HOME .*\n", err)

    @pytest.mark.parametrize(
        "words", ["ls", "ls --summary", "show x", "explain x", "fit x", "export x.db", "prune --older-than 1d"]
    )
    def test_a_book_that_is_not_there_cannot_be_read(self, words, place):
        assert shell(f"tunebook {words} --book /nonexistent") == (3, "", "tunebook: no book at /nonexistent\n")

    @pytest.mark.parametrize("verb", ["ls", "show matmul"])
    @pytest.mark.parametrize("limit", ["-1", "2.5", "many"])
    def test_an_invalid_limit_is_wrong_usage(self, verb, limit, place):
        code, _, err = shell(f"tunebook {verb} --limit {limit}")
        assert code == 2
        assert f"invalid number '{limit}': write 0 for all, or how many, e.g. 20" in err

    def test_export_says_what_to_name_instead_of_a_directory(self, place):
        (place / "there").mkdir()
        for given in ("there", "new/"):
            code, _, err = shell(f"tunebook export {given}")
            assert code == 2
            assert f"is a directory; name a file in it, e.g. {given.rstrip('/')}/tuned.bundle.gz" in err

    def test_export_says_whether_a_bundle_is_signed(self, place):
        assert "(bundle, not signed)" in shell("tunebook export a.bundle.gz")[1]
        assert "(bundle, signed)" in shell("tunebook export b.bundle.gz", TUNEBOOK_SIGNING_KEY="0123456789abcdef")[1]

    @on_linux
    def test_a_file_on_a_full_disk_exits_with_3(self, place):
        code, _, err = shell("tunebook fit scale --output /dev/full")
        assert code == 3
        assert "--output /dev/full: No space left on device" in err
        assert "Results stay in memory" not in err


class TestHelp(OnABook):
    def test_help_of_a_verb_is_asked_for_in_two_ways(self, place):
        assert shell("tunebook help ls") == shell("tunebook ls --help")
        assert shell("tunebook help") == shell("tunebook --help")


@pytest.fixture
def bash(place, tmp_path):
    """Return a function that completes a line in a real bash, as Tab does."""
    command = tmp_path / "bin" / "tunebook"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {COMMAND} "$@"\n')
    command.chmod(0o755)
    paths = {"PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": ":".join(filter(None, sys.path))}
    script = python("-m", "tunebook", "completion", "bash").stdout

    def complete(*words):
        line = " ".join(map(shlex.quote, words))
        ask = f'COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _tunebook; printf "%s\\n" "${{COMPREPLY[@]}}"'
        done = subprocess.run(
            ["bash", "--norc"], input=f"{script}\n{ask}\n", capture_output=True, text=True, check=True,
            env={**os.environ, **paths}, cwd=place,
        )  # fmt: skip
        assert done.stderr == ""
        return done.stdout.split()

    return complete


class TestCompletion(OnABook):
    def test_bash_completes_verbs_options_kernels_and_ids(self, bash, ids):
        (matmul,) = ids["matmul@v0"]
        assert bash("tunebook", "exp") == ["explain", "export"]
        assert bash("tunebook", "help", "exp") == ["explain", "export"]
        assert bash("tunebook", "ls", "--sum") == ["--summary"]
        assert bash("tunebook", "ls", "--kernel", "mat") == ["matmul"]
        assert bash("tunebook", "show", "mat") == ["matmul"]
        assert bash("tunebook", "explain", matmul[:5]) == [matmul[:8]]
        assert bash("tunebook", "fit", "") == ["matmul", "scale"]
        assert bash("tunebook", "ls", "sc") == ["scale"]

    def test_bash_completes_from_the_book_of_the_line(self, bash):
        assert bash("tunebook", "fit", "--book", "/nonexistent", "") == []
        assert bash("tunebook", "show", "--book", "other_book.json", "sca") == ["scale"]

    @pytest.mark.parametrize("name", ["zsh", "fish"])
    def test_other_shells_ask_the_same_list(self, name, place):
        script = shell(f"tunebook completion {name}")[1]
        assert script.count("completion --list") >= 1
        assert "kernels" in script
        assert "entries" in script

    def test_the_list_has_kernels_and_ids_with_a_description(self, place, ids):
        listed = shell("tunebook completion --list entries -- tunebook show")[1].splitlines()
        assert listed[:2] == ["matmul", "scale"]
        (matmul,) = ids["matmul@v0"]
        assert f"{matmul[:8]}\tmatmul@v0 a=float32[8,4] b=float32[4,8] causal=False" in listed

    def test_a_missing_shell_is_wrong_usage(self, place):
        for words in ("", "tcsh", "bash zsh"):
            code, _, err = shell(f"tunebook completion {words}")
            assert code == 2
            given = f"no script for {words}; " if words else ""
            assert err.startswith(f"tunebook: {given}name the shell, one of bash, zsh, fish")


class TestJson(OnABook):
    def test_ls_and_show_have_one_form_without_json_in_strings(self, place, ids):
        listed = {entry["id"]: entry for entry in json.loads(shell("tunebook ls --json")[1])}
        for identifier, entry in listed.items():
            shown = json.loads(shell(f"tunebook show {identifier} --json")[1])
            assert {name: shown[name] for name in entry} == entry
            texts = list(strings_in(shown))
            assert len(texts) > 10
            assert [text for text in texts if text.lstrip().startswith(("{", "["))] == []

    def test_show_has_every_candidate_with_its_samples_or_its_failure(self, place):
        shown = json.loads(shell("tunebook show matmul --json")[1])
        assert shown["call_key"]["causal"] is False
        assert shown["environment"]["numpy"]
        by_block = {candidate["config"]["block"]: candidate for candidate in shown["candidates"]}
        assert by_block[16]["chosen"]
        assert len(by_block[16]["samples_s"]) > 1
        assert by_block[128]["failure"]["kind"] == "memory"

    def test_each_line_of_a_file_of_the_book_is_json_after_its_checksum(self, place, ids):
        (matmul,) = ids["matmul@v0"]
        head, body = map(json.loads, shell(f"cut -c10- {place}/home/v1/*/*/{matmul}.json")[1].splitlines())
        shown = json.loads(shell(f"tunebook show {matmul} --json")[1])
        assert json.loads(head["call_key"]) == shown["call_key"]
        assert len(body["measurements"]) == len(shown["candidates"])

    def test_a_key_from_show_is_a_key_for_explain(self, place):
        key = json.dumps(json.loads(shell("tunebook show matmul --json")[1])["call_key"])
        assert shell(f"tunebook explain matmul --key {shlex.quote(key)}")[0] == 0

    def test_three_digits_of_an_id_name_an_entry_and_fewer_say_so(self, place, ids):
        (matmul,) = ids["matmul@v0"]
        assert json.loads(shell(f"tunebook show {matmul[:3]} --json")[1])["id"] == matmul
        code, _, err = shell(f"tunebook show {matmul[:2]}")
        assert code == 1
        assert "To name an entry by its id, give at least 3 digits." in err


def strings_in(value):
    """Yield all texts of a JSON value."""
    if isinstance(value, str):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from strings_in(part)
