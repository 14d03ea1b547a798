"""`bench/no_stall.py` without a GPU: the script runs, and its numbers are worked out as it says."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module("no_stall")


@pytest.mark.timeout(600)
def test_a_dry_run_shows_every_number(tmp_path):
    # Few steps: the numbers of a device that does not exist say nothing.
    short = ["--seconds", "60", "--steps", "40", "--requests", "400", "--settle", "0", "--rate", "100000"]
    command = [sys.executable, str(ROOT / "bench" / "no_stall.py"), "--dry-run", "--packages", str(tmp_path), *short]
    source = os.pathsep.join([str(ROOT / "src"), str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, "--results", str(tmp_path / "found.json")],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in json.loads((tmp_path / "found.json").read_text())["targets"]:
        assert name in done.stdout


def test_the_worst_window_is_the_one_in_which_the_program_stood_still(bench):
    ends_s = [*(step / 10 for step in range(100)), *(20 + step / 10 for step in range(100))]
    assert bench.worst_rate(ends_s, 5.0, 0.0) <= 0.2
    assert bench.worst_rate([step / 10 for step in range(200)], 5.0, 0.0) == pytest.approx(10, rel=0.05)


def test_live_training_is_compared_with_the_fixed_configuration_and_with_offline_tuning(bench):
    every = lambda seconds, first: [first + step * seconds for step in range(1000)]
    ends = {
        "fixed": every(0.1, 10.0),
        "live": every(0.08, 12.0),
        "offline": every(0.08, 1.0),
        "triton": every(0.08, 99.0),
    }
    found = bench.compare_training(ends)
    assert found["first step"] == pytest.approx(1.2)
    assert found["last 20 s beside offline"] == pytest.approx(1.0, rel=0.01)
    assert found["last 20 s beside fixed"] == pytest.approx(1.25, rel=0.01)
    assert found["worst 5 s"] == pytest.approx(1.25, rel=0.03)
    assert found["first step of triton.autotune"] == pytest.approx(9.9)


def test_slow_requests_are_counted_beside_the_fixed_sides_p99(bench):
    fixed = [1.0] * 1000
    found = bench.compare_serving({"fixed": fixed, "live": [1.0] * 995 + [5.0] * 5})
    assert found["p99"] == 1.0
    assert found["slow requests in 1,000"] == 5.0
