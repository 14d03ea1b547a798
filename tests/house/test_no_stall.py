"""`bench/no_stall.py` without a GPU: the script runs, and its numbers are worked out as it says."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import subprocess
import sys
import threading
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
def test_a_dry_run_shows_every_number(bench, tmp_path):
    # Few steps: the numbers of a device that does not exist say nothing.
    short = ["--seconds", "60", "--steps", "40", "--requests", "400", "--settle", "0", "--rate", "100000"]
    command = [sys.executable, str(ROOT / "bench" / "no_stall.py"), "--dry-run", "--packages", str(tmp_path), *short]
    source = os.pathsep.join([str(ROOT / "src"), str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in bench.TARGETS:
        assert name in done.stdout
    # The host may work in the turns of its own process: by a clock that it shares with nobody.
    assert re.search(
        r"^live: the host spent [\d.]+ s on [1-9]\d* (forks|steps of loading)$", done.stdout, re.MULTILINE
    ), done.stdout
    for side in ("live", "server"):
        for what in ("candidates", "not tried", "duels", "rollbacks", "steps of loading", "choices", "timed launches"):
            assert re.search(rf"^{side}: .*\d {what}\b", done.stdout, re.MULTILINE), (side, what, done.stdout)


def test_sides_take_turns(bench, tmp_path):
    shared = tmp_path / "turns"
    shared.write_bytes(bytes([0, 1, 1]))
    order, barrier = [], threading.Barrier(2)

    def side(place):
        with contextlib.closing(bench.Turns(shared, place)) as turns:
            barrier.wait()
            for _ in range(3):
                with turns.turn():
                    order.append(place)
            assert turns.own_s() < 60  # the time of others is not counted

    others = [threading.Thread(target=side, args=(place,)) for place in (0, 1)]
    for each in others:
        each.start()
    for each in others:
        each.join()
    assert order == [0, 1] * 3


def test_the_worst_window_is_the_one_in_which_the_program_stood_still(bench):
    ends_s = [*(step / 10 for step in range(100)), *(20 + step / 10 for step in range(100))]
    assert min(bench.windows(ends_s, 5.0, 0.0)) <= 0.2
    assert min(bench.windows([step / 10 for step in range(200)], 5.0, 0.0)) == pytest.approx(10, rel=0.05)


def test_live_training_is_compared_with_the_fixed_configuration_and_with_offline_tuning(bench):
    every = lambda seconds, first: [first + step * seconds for step in range(1000)]
    ends = {
        "fixed": every(0.1, 10.0),
        "live": every(0.08, 12.0),
        "offline": every(0.08, 1.0),
        "triton": every(0.08, 99.0),
    }
    found = bench.compare_training(ends)
    assert found["training: first step, beside fixed"] == pytest.approx(1.2)
    assert found["training: steps in the last 20 s, beside offline"] == pytest.approx(1.0, rel=0.01)
    assert found["training: steps in the last 20 s, beside fixed"] == pytest.approx(1.25, rel=0.01)
    assert found["training: steps in the worst 5 s, beside fixed"] == pytest.approx(1.25, rel=0.03)
    assert found["training: first step of triton.autotune, beside fixed"] == pytest.approx(9.9)


def test_slow_requests_are_counted_beside_the_fixed_sides_p99(bench):
    fixed = [1.0] * 1000
    found = bench.compare_serving({"fixed": fixed, "live": [1.0] * 995 + [5.0] * 5})
    assert found["server: p99, beside fixed"] == 1.0
    assert found["server: slow requests in 1,000"] == 5.0
