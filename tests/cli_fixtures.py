"""A book that two small kernels were tuned into, and ways to run the command on it."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tunebook._base.record_format import Record
from tunebook._cli import main

KERNELS = Path(__file__).with_name("cli_kernels.py")


def python(*words, **options):
    """Run Python in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path)), **options.pop("env", {})}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, env=environment, **options
    )


@cache
def tuned():
    """Return a directory with a book, `mykernels.py`, and the files of examples; made once per run of the tests."""
    place = Path(tempfile.mkdtemp(prefix="tunebook-cli-"))
    atexit.register(shutil.rmtree, place)
    shutil.copy(KERNELS, place / "mykernels.py")
    home = {"TUNEBOOK_HOME": str(place / "home")}
    assert python("mykernels.py", cwd=place, env=home).returncode == 0
    for name in ("other_book.json", "tuned.bundle.gz"):
        assert python("-m", "tunebook", "export", name, cwd=place, env=home).returncode == 0
    return place


class OnABook:
    """Tests of the command on a copy of that book."""

    @pytest.fixture
    def place(self, tmp_path, monkeypatch):
        """Return the copy: the working directory, with its book as the user's own."""
        copy = tmp_path / "work"
        shutil.copytree(tuned(), copy)
        monkeypatch.setenv("TUNEBOOK_HOME", str(copy / "home"))
        monkeypatch.chdir(copy)
        return copy

    @pytest.fixture
    def run(self, capsys):
        """Return a function that runs the command here, and returns its exit code, output and errors."""

        def call(*words):
            code = main(words)
            said = capsys.readouterr()
            return code, said.out, said.err

        return call

    @pytest.fixture
    def ids(self, place, run):
        """Return the ids of the entries by kernel, newest first."""
        found = {}
        for entry in json.loads(run("ls", "--json")[1]):
            found.setdefault(entry["kernel"], []).append(entry["id"])
        return found


def stored(place, identifier):
    """Return the record with an id, read from its file."""
    (path,) = (place / "home").glob(f"v1/*/*/{identifier}.json")
    return Record.from_bytes(path.read_bytes())


def change_environment(place, identifier, **versions):
    """Make an entry look as if it had been tuned under other versions."""
    record = stored(place, identifier)
    (path,) = (place / "home").glob(f"v1/*/*/{identifier}.json")
    head, body = record.to_fields()
    there = json.loads(head["environment"]) | versions
    head["environment"] = json.dumps(there, sort_keys=True, separators=(",", ":"))
    for m in body["measurements"]:
        m["environment"] = head["environment"]
    path.write_bytes(Record.from_fields(head, body).to_bytes())
