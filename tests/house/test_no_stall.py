"""`bench/no_stall.py` without a GPU: the script runs, and its numbers are worked out as it says."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module("no_stall")


@pytest.fixture
def numbers(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module("no_stall_numbers")


@pytest.mark.timeout(600)
def test_a_dry_run_shows_every_number(bench, tmp_path):
    # Few steps: the numbers of a device that does not exist say nothing.
    short = ["--seconds", "60", "--steps", "40", "--requests", "400", "--settle", "0", "--rate", "100000"]
    places = ["--packages", str(tmp_path), "--out", str(tmp_path)]
    command = [sys.executable, str(ROOT / "bench" / "no_stall.py"), "--dry-run", *places, *short]
    source = os.pathsep.join([str(ROOT / "src"), str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in bench.TARGETS:
        assert name in done.stdout
    # Its numbers are never taken for those of a GPU.
    assert [path.name for path in tmp_path.glob("*.json")] == ["no_stall_dry_run.json"]
    # The host may work in the turns of its own process: by a clock that it shares with nobody.
    spent = re.findall(r"^live: the host spent ([\d.]+) s on (?:forks|steps of loading)$", done.stdout, re.MULTILINE)
    assert sum(map(float, spent)) > 0, done.stdout
    for side in ("live", "server-live"):
        for what in ("candidates", "not tried", "duels", "to load", "choices", "timed launches", "undecided for, s"):
            assert re.search(rf"^{side}: .*{what}\b", done.stdout, re.MULTILINE), (side, what, done.stdout)
    # A run that was killed: the last row of one side is cut short, and another side has none.
    rows = tmp_path / "no_stall-live.jsonl"
    rows.write_text(rows.read_text()[:-20])
    for path in tmp_path.glob("no_stall-offline*"):
        path.unlink()
    again = subprocess.run([*command, "--collect"], env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert "training: steps in the worst 5 s, beside fixed" in again.stdout
    assert "beside offline" not in again.stdout


def test_a_row_has_what_a_diagnosis_needs(bench, numbers, tmp_path):
    clock = [0.0]
    rows = bench.Rows(tmp_path / "rows.jsonl", lambda: clock[0])
    for step in range(25):
        clock[0] = step / 10
        rows.add(ends=clock[0], host_s=0.001, step_s=0.1)
    rows.write(states=["deciding"])
    facts, *found = numbers.read_rows(tmp_path / "rows.jsonl")
    assert "torch" in facts["facts"]["versions"]
    assert [row["counts"]["ends"] for row in found] == [11, 10, 4]
    assert found[0]["host_s"] == pytest.approx(0.001)
    assert found[0]["tuning"].keys() >= {"decided", "to compile", "to load", "to compare", "launches timed", "host"}
    assert found[-1]["states"] == ["deciding"]
    assert numbers.read_numbers(tmp_path / "rows.jsonl", "ends") == [step / 10 for step in range(25)]
    assert numbers.read_numbers(tmp_path / "rows.jsonl", "nothing") == []


def test_what_held_up_the_decisions_is_named(numbers):
    def row(decided, loading_s, left):
        tuning = {"sessions": 2, "decided": decided, "host": {"forks": 0.01, "steps of loading": loading_s}}
        return {"tuning": {**tuning, "to compile": 0, "to load": left, "to compare": 3}}

    found = numbers.limited_by([row(0, 0.02, 9), row(1, 0.05, 4), row(2, 0.06, 0)])
    assert found["undecided for, s"] == 2
    assert found["part of these seconds that the host has worked"] == pytest.approx(0.03)
    assert found["compiled and to be loaded at the end"] == 4
    assert numbers.limited_by([row(2, 0.06, 0)]) == {"undecided for, s": 0}


def test_sides_are_compared_in_the_same_seconds(numbers):
    fixed = [10 + step / 100 for step in range(2000)]  # to second 30
    slow = [*(12 + step / 100 for step in range(1000)), *(22 + step / 50 for step in range(400))]
    assert numbers.side_by_side(fixed, fixed) == 1.0
    assert numbers.side_by_side(slow, fixed) == pytest.approx(0.5, abs=0.02)
    # A machine that becomes slower for both.
    both = [*(10 + step / 100 for step in range(1000)), *(20 + step / 50 for step in range(500))]
    assert numbers.side_by_side(both, both) == 1.0


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


def test_the_worst_window_is_the_one_in_which_the_program_stood_still(numbers):
    ends_s = [*(step / 10 for step in range(100)), *(20 + step / 10 for step in range(100))]
    assert min(numbers.windows(ends_s, 5.0, 0.0)) <= 0.2
    assert min(numbers.windows([step / 10 for step in range(200)], 5.0, 0.0)) == pytest.approx(10, rel=0.05)


def test_live_training_is_compared_with_the_fixed_configuration_and_with_offline_tuning(numbers):
    every = lambda seconds, first: [first + step * seconds for step in range(1000)]
    ends = {
        "fixed": every(0.1, 10.0),
        "live": every(0.08, 12.0),
        "offline": every(0.08, 1.0),
        "triton": every(0.08, 99.0),
    }
    found = numbers.compare_training(ends)
    assert found["training: first step, beside fixed"] == pytest.approx(1.2)
    assert found["training: steps in the last 20 s, beside offline"] == pytest.approx(1.0, rel=0.01)
    assert found["training: steps in the last 20 s, beside fixed"] == pytest.approx(1.25, rel=0.01)
    assert found["training: steps in the worst 5 s, beside fixed"] == pytest.approx(1.25, rel=0.03)
    assert found["training: first step of triton.autotune, beside fixed"] == pytest.approx(9.9)


def test_requests_arrive_in_bursts_at_a_rate_and_shapes_take_turns(numbers):
    found = list(itertools.islice(numbers.arrivals(8, 1000.0), 40_000))
    assert found == list(itertools.islice(numbers.arrivals(8, 1000.0), 40_000))  # the same for both sides
    times = [at_s for at_s, _ in found]
    assert len(times) / times[-1] == pytest.approx(1000, rel=0.1)
    busy = Counter(int(at_s * 20) for at_s in times)
    assert max(busy.values()) > 2 * sum(busy.values()) / len(busy)
    first, last = Counter(s for at_s, s in found if at_s < 5), Counter(s for at_s, s in found if 20 <= at_s < 25)
    assert first.keys() == last.keys() == set(range(8))
    assert first.most_common(1)[0][0] != last.most_common(1)[0][0]


def test_slow_requests_are_counted_beside_the_fixed_sides_p99(numbers):
    fixed = [1.0] * 1000
    found = numbers.compare_serving({"fixed": fixed, "live": [1.0] * 995 + [5.0] * 5})
    assert found["server: p99, beside fixed"] == 1.0
    assert found["server: slow requests in 1,000"] == 5.0
