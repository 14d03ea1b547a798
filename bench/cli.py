"""The command on a book of 100,000 entries: times of whole processes, from start to exit.

    python bench/cli.py [--quick]

Three books: 20 kernels on 5 devices with 1000 entries each; all 100,000 of one kernel on one device; and the first one
as a pack. Prints a table against the target, and writes the raw numbers to bench/results/cli.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tables import report

from tunebook._base.config_codec import encode, fingerprint_of
from tunebook._base.record_format import Body, Head, Record
from tunebook._base.vocabulary import Failure, Measurement, Problem
from tunebook.stores import DirectoryStore, problem_id, write_pack

ENVIRONMENT = '{"driver":"nvidia 570.86.10","jax":"0.6.0","numpy":"2.1.0","python":"cpython 3.11"}'
CONFIGS = [{"block_m": m, "block_n": n, "stages": s} for m in (32, 64, 128) for n in (32, 64) for s in (2, 3)]
ENCODED = [encode(config) for config in CONFIGS]
FINGERPRINTS = [fingerprint_of(config) for config in ENCODED]


def record(op, device, number, rng, now_s):
    """Return a record with twelve candidates, of which one failed."""
    shape = [2 ** rng.randrange(6, 13), number + 1]
    array = {"$array": ["jax", rng.choice(["bfloat16", "float32"]), shape, "C", "gpu"]}
    key = json.dumps({"a": array, "b": array, "causal": number % 2 == 0}, separators=(",", ":"), sort_keys=True)
    measured = []
    for i, (config, fingerprint) in enumerate(zip(ENCODED, FINGERPRINTS, strict=True)):
        samples = tuple(1e-4 * (1 + i / 10) * (1 + rng.random() / 50) for _ in range(8))
        failure = Failure("compile", "out of resource: shared memory, Required: 262144") if i == 11 else None
        measured.append(
            Measurement(
                config=config,
                fingerprint=fingerprint,
                code="c0de",
                policy="device-events/race/warmup=1/forward",
                environment=ENVIRONMENT,
                samples_s=() if failure else samples,
                failure=failure,
                when=now_s,
            )
        )
    head = Head(
        problem=Problem(device, op, key),
        config=ENCODED[0],
        checksum="5ca1ab1e",
        origin="tuned",
        environment=ENVIRONMENT,
        generation=1,
    )
    facts = {"when": now_s, "host": "node", "winner": FINGERPRINTS[0], "rule": "fastest", "ran": 12, "seconds": 2.5}
    return Record(head, Body(measurements=tuple(measured), provenance=facts))


def records(kernels, devices, each):
    """Yield the records of a book; the same for the same numbers."""
    rng, now_s = random.Random(8), time.time()
    for kernel in range(kernels):
        for device in range(devices):
            for number in range(each):
                yield record(f"kernel_{kernel}@v0", f"gpu:NVIDIA H{device}00", number, rng, now_s)


def make_book(root, kernels, devices, each):
    """Write a book without waiting for the disk."""
    store = DirectoryStore(root, sync=lambda _descriptor: None, sync_all=lambda _descriptor: True)
    store.put_many(records(kernels, devices, each))


def seconds(runs, *words):
    """Return the wall times and the processor times of a command, each run a new process."""
    wall, processor = [], []
    for _ in range(runs):
        before, started = os.times(), time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "tunebook", *words], capture_output=True, text=True, check=False)
        wall.append(time.perf_counter() - started)
        after = os.times()
        processor.append(after.children_user + after.children_system - before.children_user - before.children_system)
        assert done.returncode in (0, 1), done.stderr
        assert done.stdout, done.stderr
    return {"wall": [round(s, 3) for s in wall], "processor": [round(s, 3) for s in processor]}


def commands(book, first):
    """Return what is measured, by name."""
    there = ("--book", str(book))
    missing = first.problem.call_key.replace("jax", "torch")
    kernel, device = first.problem.op, first.problem.device
    return {
        "ls": ("ls", *there),
        "ls --summary": ("ls", "--summary", *there),
        "ls --kernel": ("ls", "--kernel", "kernel_0", *there),
        "explain ID": ("explain", problem_id(first.problem), *there),
        "explain KERNEL": ("explain", "kernel_0", *there),
        "explain --key, a miss": ("explain", kernel, "--device", device, "--key", missing, *there),
        "show ID": ("show", problem_id(first.problem), *there),
    }


def main() -> int:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="books of 2,000 entries")
    parser.add_argument("--keep", type=Path, help="where the books are, or are made; a minute less the next time")
    options = parser.parse_args()
    entries, runs = (2_000, 2) if options.quick else (100_000, 5)
    with tempfile.TemporaryDirectory(prefix="tunebook-bench-") as temporary:
        raw = measure_books(options.keep or Path(temporary), entries, runs)
    raw["tunebook --help"] = seconds(runs, "--help")
    return report("cli", table(raw), raw, quick=options.quick)


def measure_books(place, entries, runs):
    """Return the times of each command on each book."""
    raw = {}
    shapes = {f"{entries:,} of 20 kernels": (20, 5, entries // 100), f"{entries:,} of one kernel": (1, 1, entries)}
    for name, shape in shapes.items():
        book = place / f"{shape[0]}x{shape[1]}x{shape[2]}"
        if not book.exists():
            make_book(book, *shape)
        raw |= measure(name, book, next(records(*shape)), runs)
    pack, shape = place / "pack.db", (20, 5, entries // 100)
    if not pack.exists():
        write_pack(pack, records(*shape))
    return raw | measure(f"{entries:,} in a pack", pack, next(records(*shape)), runs)


def measure(name, book, first, runs):
    """Return the times of each command on a book."""
    return {f"{what}, {name}": seconds(runs, *words) for what, words in commands(book, first).items()}


def table(raw):
    """Return rows of what, measured, target, kept: by the clock, as the median of whole processes."""
    rows = []
    for what, times in raw.items():
        taken = statistics.median(times["wall"])
        rows.append((what, f"{taken:.2f} s", "< 1 s", taken < 1))
    return rows


if __name__ == "__main__":
    sys.exit(main())
