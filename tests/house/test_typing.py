"""The types of tunebook in a user's module, as mypy and pyright see them: the package is installed, with `py.typed`."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)  # a type checker that reads jax and torch takes a minute on a busy machine

SRC = Path(__file__).parents[2] / "src"

USER = """
from dataclasses import dataclass
from typing import assert_type
import tunebook as tb

@dataclass(frozen=True)
class Block:
    size: int

@tb.tunable(space=tb.Space(block=[1, 2]), heuristic={"block": 1})
def scale(x: list[float], n: int = 3, *, causal: bool = False, config: tb.Config = tb.CHOSEN) -> list[float]:
    return [config.block * n * each for each in x]

@tb.tunable(space=[Block(1), Block(2)])
def total(x: list[float], *, config: Block) -> float:  # without a default, arguments are not checked
    return sum(x) / config.size

def plain(x: int, *, config: tb.Config = tb.CHOSEN) -> str:
    return str(x)

direct = tb.tunable(plain, space=[{"way": 1}])

class Layer:
    @tb.tunable(space=lambda x: [Block(1)])
    def forward(self, x: int, *, config: Block = tb.CHOSEN) -> str:
        return "x" * (x * config.size)

assert_type(scale([1.0]), list[float])
assert_type(scale([1.0], 3, causal=True, config=tb.Config(block=1)), list[float])
assert_type(scale(x=[1.0], n=2), list[float])
assert_type(total([1.0]), float)
assert_type(direct(3), str)
assert_type(Layer().forward(3), str)
assert_type(tb.tune(scale, [1.0]).config, tb.Config)
assert_type(tb.tune(total, [1.0], budget="1s").config, Block)
assert_type(tb.tune(Layer().forward, 3).config, Block)
assert_type(tb.verify(total, [1.0]).config, Block)
assert_type(total.config_for([1.0]), Block)
with scale.overlay(block=1):
    print(scale.explain([1.0]))
loose: tb.Tunable[list[float]] = scale

scale("not an array", 3, nonsense=1)  # wrong
scale([1.0], "3")  # wrong
scale()  # wrong
direct("x")  # wrong
Layer().forward("x")  # wrong
assert_type(total([1.0]), str)  # wrong
tb.tune(total, [1.0]).config.colour  # wrong
tb.tunable(plain, space=[{"way": 1}], heuristik={"way": 1})  # wrong
"""
WRONG = {number for number, line in enumerate(USER.splitlines(), 1) if line.endswith("# wrong")}


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    """Return a user's module, and a Python that tunebook is installed in."""
    folder = tmp_path_factory.mktemp("user")
    venv.create(folder / "venv", symlinks=True)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "tunebook").symlink_to(SRC / "tunebook")
    (folder / "user.py").write_text(USER)
    return folder / "user.py", folder / "venv" / "bin" / "python"


def test_mypy_keeps_parameters_results_and_configurations(module):
    pytest.importorskip("mypy")
    path, python = module
    line = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--python-executable",
        str(python),
        "--no-color-output",
        path.name,
    ]
    done = subprocess.run(line, cwd=path.parent, capture_output=True, text=True, check=False)
    found = [said.split(":") for said in done.stdout.splitlines() if ": error:" in said]
    assert {int(line) for _, line, *_ in found} == WRONG, done.stdout + done.stderr
    assert {name for name, *_ in found} == {path.name}


def test_pyright_keeps_parameters_results_and_configurations(module):
    pytest.importorskip("basedpyright", reason="basedpyright, which brings pyright, is not installed")
    path, python = module
    (path.parent / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    line = [sys.executable, "-m", "basedpyright", "--pythonpath", str(python), "--outputjson", path.name]
    done = subprocess.run(line, cwd=path.parent, capture_output=True, text=True, check=False)
    found = [each for each in json.loads(done.stdout)["generalDiagnostics"] if each["severity"] == "error"]
    assert {each["range"]["start"]["line"] + 1 for each in found} == WRONG, done.stdout
