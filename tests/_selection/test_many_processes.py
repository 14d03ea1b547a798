"""Traps 5 and 6 through the front door: many processes call tunable kernels, some are killed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from limits import HANG_S

SCRIPT = Path(__file__).parents[1] / "tuning_process.py"


def start(book, log, keys, seconds):
    return subprocess.Popen(
        [sys.executable, SCRIPT, str(book), str(log), str(keys), str(seconds)], stdout=subprocess.PIPE, text=True
    )


def lines(log):
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.promise("one-tuning-per-problem")
@pytest.mark.parametrize("book", ["book", "book.json"])
def test_each_key_is_tuned_once_among_processes(tmp_path, book):
    log = tmp_path / "log"
    processes = [start(tmp_path / book, log, 20, 0.002) for _ in range(6)]
    assert [p.communicate(timeout=HANG_S)[0] for p in processes] == ["done\n"] * 6
    begun = Counter(key for event, key in lines(log) if event == "begin")
    assert begun == {str(key): 1 for key in range(20)}


@pytest.mark.promise("killed-tuner")
def test_a_waiter_takes_over_from_a_killed_tuner(tmp_path):
    log = tmp_path / "log"
    first = start(tmp_path / "book", log, 1, 60)
    deadline = time.monotonic() + HANG_S
    while not lines(log) and time.monotonic() < deadline:
        time.sleep(0.01)
    second = start(tmp_path / "book", log, 1, 0.001)
    time.sleep(1.0)  # long enough to be waiting for the lease; if it is not yet, it finds a dead holder instead
    first.kill()
    first.communicate()
    assert second.communicate(timeout=HANG_S)[0] == "done\n"
    events = [event for event, *_ in lines(log)]
    assert events == ["begin", "begin", "end"]
