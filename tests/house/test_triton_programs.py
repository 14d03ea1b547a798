"""`bench/triton_programs.py` without a GPU: results of killed processes, merging of sides, and tables."""

from __future__ import annotations

import importlib
import json
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parents[2]
TIMES = {"tunebook": 25.0, "tunebook, second process": 0.4, "triton": 250.0, "triton, second process": 0.5}


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """The script, which writes to a folder of the test."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    script = importlib.import_module("triton_programs")
    monkeypatch.setattr(script.tables, "RESULTS", tmp_path)
    monkeypatch.setattr(script.tables, "PROGRAMS", tmp_path / "triton_programs.md")
    return script


@pytest.fixture
def options(tmp_path):
    return SimpleNamespace(packages=tmp_path, work=tmp_path / "work", limit=1.0, again=False, verbose=False)


def noted(side, *, second):
    kernels = {"made": 255, "launched": 10, "taken over": 10 if side == "tunebook" else 0, "left": []}
    first_s = TIMES[f"{side}, second process" if second else side]
    host = {"host_us": {"tunebook": [900.0, 980.0], "triton": [1000.0, 1000.0]}} if second else {"gpu_us": 2000.0}
    return {"first_s": first_s, **host, "kernels": kernels, "done": True}


def pretend_process(notes_of):
    """Return a function in place of waiting for a process: it writes notes and samples as the process would."""

    def wait(command, _environment):
        after = dict(pairwise(command))
        notes, failed = notes_of(after["--tuner"], "--second" in command)
        Path(after["--notes"]).write_text(json.dumps(notes))
        torch.save({"out": ([2], "torch.float32", torch.ones(2))}, after["--samples"])
        return failed

    return wait


def test_both_sides_are_run_compared_and_kept(bench, options, monkeypatch):
    run = bench.Run(options)
    monkeypatch.setattr(run, "_wait", pretend_process(lambda side, second: (noted(side, second=second), None)))
    for side in bench.SIDES:
        run.side("fla_gla", side)
    raw = bench.Run(options).raw  # read from the file
    assert {key: raw["fla_gla"][key]["first_s"] for key in TIMES} == TIMES
    assert raw["fla_gla"]["results"] == {"errors": {"out": 0.0}, "alike": True}
    rows = {what: (measured, kept) for what, measured, _target, kept in bench.table(raw)}
    assert rows["fla, gated linear attention: first step, triton.autotune / tunebook"] == ("10 x", True)
    assert rows["second process, tunebook / triton.autotune with its cache"] == ("0.8 x", True)
    assert rows["host time per step, tunebook / triton.autotune"] == ("0.94 x", True)
    assert rows["autotuned kernels that were launched and taken over"] == ("10 of 10", True)
    assert rows["first step after tuning a recording of another length"] == ("not measured", False)
    (line,) = [line for line in bench.page(raw).splitlines() if line.startswith("| fla-core |")]
    assert "| 250.0 | 25.0 | 10.0 x | 0.50 | 0.40 | 0.94 x | 2,000 | 2,000 | yes |" in line


def test_results_of_another_shape_are_not_alike(bench, options, tmp_path):
    run = bench.Run(options)
    for side, shape in zip(bench.SIDES, ([2], [3]), strict=True):
        torch.save({"kept": (shape, "torch.int64", torch.ones(2))}, tmp_path / "work" / f"conch {side}.pt")
    run.compare("conch")
    assert run.raw["conch"]["results"]["alike"] is False


def test_a_process_over_its_time_keeps_what_it_noted(bench, options, monkeypatch):
    run = bench.Run(options)
    monkeypatch.setattr(run, "_wait", pretend_process(lambda *_: ({"import_s": 1.0}, "over 1 s")))
    run.side("conch", "triton")
    assert run.raw["conch"] == {"triton": {"import_s": 1.0, "failed": "over 1 s"}}
    assert "over 1 s" in bench.page(run.raw)


def test_a_process_that_takes_too_long_is_ended(bench, options):
    options.limit = 0.2
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert bench.Run(options)._wait(command, {"PATH": "/usr/bin:/bin"}) == "over 0.2 s"


def test_every_library_of_the_programs_is_in_the_requirements(bench):
    required = (ROOT / "tests" / "compat_triton_requirements.txt").read_text()
    assert [p.package for p in bench.PROGRAMS.values() if f"\n{p.package}==" not in required] == []
