"""How many candidates live tuning tries with its outlook on recorded times, and how good the best of them is.

    python bench/outlook.py FILE.json.gz                a file of bench/record_shapes.py

A shape is tried as by live tuning: one candidate after another, whose times are known exactly, until the outlook says
that no other is worth a try. With `--elsewhere N`, the candidates within 10 % of the best at so many other shapes come
first. It needs no GPU. Without that option, the numbers go to bench/results/outlook.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import sys
from pathlib import Path

import tables
from interleaved import Row, save, show

from tunebook._space.space import Config
from tunebook.search._outlook import Outlook

NEAR = 1.1
WITHIN = 1.01


def times_at(row):
    """Return the seconds of each candidate that worked at a shape, by name."""
    _, times = row
    return {str(at): statistics.mean(each) for at, each in enumerate(times) if each}


def tried_by(configs, times, likely):
    """Return the candidates that are tried, in their order."""
    outlook, tried = Outlook({name: configs[name] for name in times}, likely), []
    while worth := outlook.worth_trying([n for n in times if n not in tried], {name: times[name] for name in tried}):
        tried.append(worth[0])
    return tried


def near_best(times):
    """Return the candidates near the best, the best first."""
    best = min(times.values())
    return sorted((name for name, each in times.items() if each <= NEAR * best), key=times.__getitem__)


def measure(kernel, options):
    """Return the part of a kernel's candidates that is tried, and by shape, how far the best of them is behind."""
    rng = random.Random(options.seed)
    configs = {str(at): Config(**config) for at, config in enumerate(kernel["configs"])}
    shapes = [times_at(row) for row in kernel["rows"]]
    tried, behind = 0, []
    for number, times in enumerate(shapes):
        others = rng.sample(shapes[:number] + shapes[number + 1 :], options.elsewhere)
        likely = dict.fromkeys(name for other in others for name in near_best(other))
        found = tried_by(configs, times, likely)
        tried += len(found)
        behind.append(min(times[name] for name in found) / min(times.values()))
    return tried / sum(map(len, shapes)), behind


def rows_of(name, tried, behind):
    """Return the rows of a kernel."""
    within = sum(each <= WITHIN for each in behind) / len(behind)
    what = f"{name}, {len(behind)} shapes on an H200"
    return [
        Row(what=f"{what}: candidates that are tried", measured=tried, unit="of 1"),
        Row(what=f"{what}: the best of them is within 1 % of all", measured=within, unit="of 1", at_least=0.95),
        Row(what=f"{what}: the best of them, at the worst shape", measured=max(behind), unit="x"),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--elsewhere", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kernels = json.loads(gzip.decompress(options.file.read_bytes()))["kernels"]
    found = {name: measure(kernel, options) for name, kernel in kernels.items()}
    rows = [row for name, measured in found.items() for row in rows_of(name, *measured)]
    show(rows)
    if not options.elsewhere:
        save("outlook", rows, {name: behind for name, (_, behind) in found.items()}, ["numpy"])
        tables.write(tables.read())
    return 0


if __name__ == "__main__":
    sys.exit(main())
