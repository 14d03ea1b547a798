"""Rounds of stress on a store in other processes, for the tests and for `bench/store.py`."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from limits import HANG_S

import tunebook
from tunebook.stores import open_store
from tunebook.testing import example_record

sys.path.insert(0, str(Path(__file__).parent))

from processes import config_of

SCRIPT = Path(__file__).with_name("processes.py")


def command(verb, *arguments):
    return [sys.executable, str(SCRIPT), verb, *map(str, arguments)]


def environment():
    """The children must find the same tunebook, installed or not."""
    source = str(Path(tunebook.__path__[0]).parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))}


def start(verb, *arguments):
    return subprocess.Popen(command(verb, *arguments), stdout=subprocess.PIPE, env=environment(), text=True)


def lost_by_writers(path, processes=8, count=50):
    """Let processes write together; return how many of their records cannot be read back as written."""
    writers = [start("put", path, f"w{n}-", count) for n in range(processes)]
    for writer in writers:
        writer.communicate(timeout=HANG_S)
        assert writer.returncode == 0
    store = open_store(Path(path))
    expected = [(f"w{n}-", number) for n in range(processes) for number in range(count)]
    return sum(not _has(store, prefix, number) for prefix, number in expected)


def lost_by_kills(path, rounds, seed=0):
    """Kill a writer at a random moment, many times; return (records acknowledged, records lost)."""
    moments = random.Random(seed)
    acknowledged = []
    for number in range(rounds):
        writer = start("put", path, f"k{number}-", 1_000_000)
        writer.stdout.readline()
        time.sleep(moments.uniform(0, 0.05))
        writer.kill()
        acknowledged += [(f"k{number}-", int(line)) for line in ["0", *writer.stdout.read().split()]]
        writer.wait()
        writer.stdout.close()
    store = open_store(Path(path))
    return len(acknowledged), sum(not _has(store, prefix, number) for prefix, number in acknowledged)


@contextmanager
def hammering(path, writers=4):
    """Let processes write the same four records over and over while the block runs."""
    running = [start("hammer", path, f"h{n}-") for n in range(writers)]
    try:
        for writer in running:
            assert writer.stdout.readline() == "ready\n"
        yield
    finally:
        for writer in running:
            writer.kill()
            writer.wait()
            writer.stdout.close()


def read_while_hammered(path, reads):
    """Return the seconds of each read and how many gave something else than a whole record."""
    store = open_store(Path(path))
    seconds, wrong = [], 0
    with hammering(path):
        for number in range(reads):
            problem = example_record(call_key=f"shared{number % 4}").problem
            began = time.perf_counter()
            record = store.get(problem)
            seconds.append(time.perf_counter() - began)
            config = record.head.config if record is not None else {"prefix": "", "number": -1}
            wrong += config != config_of(config["prefix"], config["number"])
            time.sleep(0.0005)  # a reader that spins would measure how the writers starve it
    return seconds, wrong


def _has(store, prefix, number):
    record = example_record(call_key=f"{prefix}{number}", config=config_of(prefix, number))
    return store.get(record.problem) == record
