"""The types of tunebook in a user's module, as mypy and pyright see them: the package is installed, with `py.typed`."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest
from doc_pages import fences

pytestmark = pytest.mark.timeout(600)  # a type checker that reads jax and torch takes a minute on a busy machine

SRC = Path(__file__).parents[2] / "src"

USER = """
from dataclasses import dataclass
from typing import Any, TypeVar, assert_type
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

@tb.tunable(space=tb.Space(block=[1, 2]))
def summed(x: list[Any], *, config: tb.Config = tb.CHOSEN) -> list[Any]:  # `Any` is in `np.ndarray` too
    return x

class Layer:
    @tb.tunable(space=lambda x: [Block(1)])
    def forward(self, x: int, *, config: Block = tb.CHOSEN) -> str:
        return "x" * (x * config.size)

    @tb.tunable(space=tb.Space(block=[1, 2]))
    def doubled(self, x: int, *, config: tb.Config = tb.CHOSEN) -> int:
        return 2 * x

R = TypeVar("R")

def result_of(function: tb.Tunable[R]) -> R:
    return function()

assert_type(scale([1.0]), list[float])
assert_type(scale([1.0], 3, causal=True, config=tb.Config(block=1)), list[float])
assert_type(scale(x=[1.0], n=2), list[float])
assert_type(scale([1.0], config={"block": 1}), list[float])
assert_type(summed([1.0]), list[Any])
assert_type(summed([1.0], config={"block": 2}), list[Any])
assert_type(Layer().doubled(3, config={"block": 2}), int)
assert_type(result_of(scale), list[float])
assert_type(result_of(total), float)
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
scale([1.0], config={"block": 1}, n="3")  # beside a dict, arguments are not checked
scale([1.0], config=3)  # wrong
summed("text", nonsense=1)  # wrong
direct("x")  # wrong
Layer().forward("x")  # wrong
Layer().forward(1, config={"size": 1})  # wrong
text: tb.Tunable[str] = total  # wrong
assert_type(total([1.0]), str)  # wrong
tb.tune(total, [1.0]).config.colour  # wrong
tb.tunable(plain, space=[{"way": 1}], heuristik={"way": 1})  # wrong
"""
# The code of the page that promises this, and the call that it calls an error.
(PAGE,) = [each.text for each in fences(SRC.parent / "docs" / "tuning.md") if "tb.CHOSEN" in each.text]
PAGE += """
halved(np.ones(64), config={"rows": 8})
halved("text", nonsense=1)  # wrong
"""
MODULES = {"user.py": USER, "page.py": PAGE}


def wrong_in(module):
    """Return the numbers of the lines that type checkers must refuse."""
    return {number for number, line in enumerate(MODULES[module].splitlines(), 1) if line.endswith("# wrong")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the modules, and an environment `venv` that tunebook is installed in."""
    folder = tmp_path_factory.mktemp("user")
    venv.create(folder / "venv", symlinks=True)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "tunebook").symlink_to(SRC / "tunebook")
    (packages / "numpy").symlink_to(Path(np.__file__).parent)
    for name, text in MODULES.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("module", MODULES)
def test_mypy_keeps_parameters_results_and_configurations(folder, module):
    pytest.importorskip("mypy")
    python = str(folder / "venv" / "bin" / "python")
    line = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "--no-color-output", module]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
    found = [said.split(":") for said in done.stdout.splitlines() if ": error:" in said]
    assert {int(line) for _, line, *_ in found} == wrong_in(module), done.stdout + done.stderr
    assert {name for name, *_ in found} == {module}


@pytest.mark.parametrize("module", MODULES)
def test_pyright_keeps_parameters_results_and_configurations(folder, module):
    pytest.importorskip("basedpyright", reason="basedpyright, which brings pyright, is not installed")
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    python = str(folder / "venv" / "bin" / "python")
    line = [sys.executable, "-m", "basedpyright", "--pythonpath", python, "--outputjson", module]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
    found = [each for each in json.loads(done.stdout)["generalDiagnostics"] if each["severity"] == "error"]
    assert {each["range"]["start"]["line"] + 1 for each in found} == wrong_in(module), done.stdout
