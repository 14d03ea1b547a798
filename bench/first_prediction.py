"""The first prediction of a process, for a size that was never tuned: with a kept model, and without one.

    python bench/first_prediction.py [--runs 7]

The book has 150 sizes of a made-up matmul with 72 configurations. Each run reads the book and asks once, in a process
of its own; runs of both kinds take turns. CPU seconds, less those of imports.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from tables import report

from tunebook._base.config_codec import fingerprint_of
from tunebook._base.record_format import Body, Head, Record
from tunebook._base.vocabulary import Measurement, Problem
from tunebook.stores import DirectoryStore

DEVICE, OP, CORES, SIZES = "gpu:NVIDIA H200", "matmul@v0", 132, 150
FACTS = {"code": "code", "policy": "host-clock", "environment": ""}
AXES = {"BM": (32, 64, 128), "BN": (32, 64, 128, 256), "BK": (32, 64, 128), "num_warps": (4, 8)}
CONFIGS = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
ASK = f"""
import json, pathlib, sys, time
import numpy
from tunebook.search import predict
from tunebook.stores import DirectoryStore
from tunebook._base.vocabulary import Problem
began = time.process_time()
found = predict(list(DirectoryStore(pathlib.Path(sys.argv[1])).items({OP!r})), Problem({DEVICE!r}, {OP!r}, sys.argv[2]))
print(json.dumps([time.process_time() - began, found.config, found.bound]))
"""


def seconds(m, n, k, config, rng):
    """Return the time of a matmul: waves of tiles on the cores, each with steps along k; and some noise."""
    tile = config["BM"] * config["BN"]
    waves = math.ceil(math.ceil(m / config["BM"]) * math.ceil(n / config["BN"]) / CORES)
    warps = abs(config["num_warps"] - (4 if tile < 8192 else 8))
    slower = 1 + 0.2 * abs(math.log2(tile / 8192)) + 0.05 * warps
    step_s = 2e-8 + 2 * tile * config["BK"] * slower / 5e12
    return (2e-6 + waves * (1e-6 + math.ceil(k / config["BK"]) * step_s)) * math.exp(rng.gauss(0, 0.003))


def key_of(rng):
    return json.dumps({name: round(2 ** rng.uniform(6, 13)) for name in "kmn"}, separators=(",", ":"))


def entry(rng):
    key = key_of(rng)
    times = [seconds(**json.loads(key), config=config, rng=rng) for config in CONFIGS]
    measured = [
        Measurement(config=config, fingerprint=fingerprint_of(config), samples_s=(time_s,) * 8, **FACTS)
        for config, time_s in zip(CONFIGS, times, strict=True)
    ]
    best = CONFIGS[times.index(min(times))]
    head = Head(problem=Problem(DEVICE, OP, key), config=best, checksum="code-", origin="tuned")
    return Record(head, Body(measurements=measured))


def ask(book, home, key):
    """Return the CPU seconds of a prediction in a process of its own, and the answer."""
    command = [sys.executable, "-c", ASK, str(book), key]
    done = subprocess.run(command, env=os.environ | {"TUNEBOOK_HOME": str(home)}, check=True, stdout=subprocess.PIPE)
    cpu_s, *answer = json.loads(done.stdout)
    return cpu_s, answer


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7, help="of each kind")
    options = parser.parse_args()
    rng, raw = random.Random(0), {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder:
        book, home = Path(folder, "book"), Path(folder, "home")
        DirectoryStore(book).put_many([entry(rng) for _ in range(SIZES)])
        asked = key_of(rng)
        for _ in range(options.runs):
            shutil.rmtree(home, ignore_errors=True)
            answers = []
            for kind, times in raw.items():
                cpu_s, answer = ask(book, home, asked)
                times.append(cpu_s)
                answers.append(answer)
                print(f"{kind} a kept model: {cpu_s:.2f} s")
            if answers[0] != answers[1]:
                sys.exit(f"a kept model answers otherwise: {answers}")
    without, kept = (statistics.median(times) for times in raw.values())
    what = f"first prediction of a process, {SIZES} sizes x {len(CONFIGS)} configurations: with a kept model / without"
    rows = [(what, f"{kept / without:.2f} ({kept:.2f} s / {without:.2f} s)", "<= 0.35", kept <= 0.35 * without)]
    return report("first_prediction", rows, {"cpu_s": raw, "answer": answers[0]}, quick=False, numpy=version("numpy"))


if __name__ == "__main__":
    sys.exit(main())
