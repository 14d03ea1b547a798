"""How few tries find a configuration where three near shapes are in the book, on recorded times of a GPU.

    python bench/near_shapes.py results/shapes_h200.json.gz        a minute; `--only NAME` for one kernel

For each shape, three others are drawn whose sizes differ by a factor of 4 in all. Each was tuned before by the search
of a list, which has measured a third of the configurations there. The search of the list at the new shape proposes a
batch of 16, as on 16 cores, or four of 4, and is judged by all times recorded there. Beside it stand the same search
where nobody knows how many blocks a launch has, and random configurations.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from pathlib import Path

import numpy as np
import tables
from predict import examples_of

from tunebook._base.config_codec import encode, fingerprint
from tunebook._base.record_format import BLOCKS, Body, Head, Record
from tunebook._base.vocabulary import Measurement, Problem
from tunebook._space.space import Config
from tunebook.search import Observation
from tunebook.search._by_name import listed
from tunebook.search._listed import ListSearch
from tunebook.search._warm_start import distance, start_from

NEAR, KNOWN = 2.0, 3  # doublings in all; shapes in the book
PART, BATCH = 1 / 3, 8  # of the configurations, measured by the tuning of a shape in the book, so many at a time
TRIES = (1, 4, 8, 16)
WAYS = {"": (16, True), " on 4 cores": (4, True), " and blocks unknown": (16, False)}


def blocks_of(kernel, sizes, config):
    """Return how many blocks a launch has: the grids of bench/shape_kernels.py."""
    if kernel == "matmul":
        return math.ceil(sizes["m"] / config["BM"]) * math.ceil(sizes["n"] / config["BN"])
    if kernel == "attention":
        return math.ceil(sizes["sequence"] / config["BM"]) * int(sizes["heads"])
    return math.ceil(sizes["rows"] / config["ROWS"])


class Kernel:
    """A kernel's recorded times, and what a book has of them."""

    def __init__(self, name, examples, configs, device):
        self.name, self.device = name, f"gpu:{device}"
        self.configs = {key: Config(**values) for key, values in configs.items()}
        self.space = listed(list(self.configs.values()))
        self.examples = examples
        self.keys = [json.dumps({size: int(value) for size, value in e.sizes.items()}) for e in examples]
        self.seconds = [{self.configs[key]: s for key, s in e.seconds.items()} for e in examples]
        self._records = {}

    def near(self, at):
        """Return the shapes that are near one."""
        return [i for i, key in enumerate(self.keys) if i != at and distance(key, self.keys[at]) <= NEAR]

    def tuned(self, at):
        """Return the configurations that a search measures at a shape."""
        strategy, tried = ListSearch(self.space, seed=at), []
        while len(tried) < PART * len(self.configs):
            batch = strategy.propose(BATCH)
            tried += batch
            strategy.observe([Observation(config, self.seconds[at].get(config)) for config in batch])
        return tried

    def record(self, at, *, counted):
        """Return the entry of a shape in the book; `counted`: it has the numbers of blocks."""
        if (at, counted) not in self._records:
            sizes, seconds = self.examples[at].sizes, self.seconds[at]
            tried = self._records.setdefault((at, "tried"), None) or self.tuned(at)
            self._records[at, "tried"] = tried
            measured = [
                Measurement(
                    config=encode(config),
                    fingerprint=fingerprint(config),
                    code="",
                    policy="",
                    environment="",
                    samples_s=(seconds[config],),
                    extra={BLOCKS: blocks_of(self.name, sizes, config)} if counted else {},
                )
                for config in tried
                if config in seconds
            ]
            best = min(measured, key=lambda m: m.samples_s)
            problem = Problem(self.device, self.name, self.keys[at])
            head = Head(problem=problem, config=best.config, checksum="", origin="tuned")
            self._records[at, counted] = Record(head, Body(measurements=tuple(measured)))
        return self._records[at, counted]

    def regrets(self, at, tried):
        """Return how far the best of the first tries is from the best of all, by the number of tries."""
        slower = [self.seconds[at].get(config, math.inf) / min(self.seconds[at].values()) - 1 for config in tried]
        return [min(slower[:many]) for many in TRIES]

    def search(self, at, known, batch, *, counted):
        """Return the configurations that the library tries at a shape, in order."""
        records = [self.record(i, counted=counted) for i in known]
        problem, sizes = Problem(self.device, self.name, self.keys[at]), self.examples[at].sizes
        start = start_from(records, problem, self.space, lambda config: blocks_of(self.name, sizes, config))
        strategy, tried = ListSearch(self.space, seed=at, start=start), []
        while len(tried) < TRIES[-1]:
            proposed = strategy.propose(batch)
            tried += proposed
            strategy.observe([Observation(config, self.seconds[at].get(config)) for config in proposed])
        return tried


def replayed(kernel):
    """Return the regrets of all ways at all shapes with enough near ones."""
    rng, found = random.Random(0), {name: [] for name in (*WAYS, "random")}
    for at in range(len(kernel.examples)):
        near = kernel.near(at)
        if len(near) < KNOWN:
            continue
        known = rng.sample(near, KNOWN)
        for name, (batch, counted) in WAYS.items():
            found[name].append(kernel.regrets(at, kernel.search(at, known, batch, counted=counted)))
        found["random"].append(kernel.regrets(at, rng.sample(list(kernel.configs.values()), TRIES[-1])))
    return found


def rows_of(kernel, found):
    """Return the lines of the table about one kernel; the target is for 16 tries of what is known."""
    many_shapes = f"{len(found[''])}; {len(kernel.configs)}"
    rows = [(f"{kernel.name}: shapes with three near ones; configurations", many_shapes, "", True)]
    for name, regrets in found.items():
        words = "random configurations" if name == "random" else f"three near shapes known{name}"
        for place, many in enumerate(TRIES):
            column = [each[place] for each in regrets]
            mean, high = statistics.fmean(column), float(np.quantile(column, 0.95))
            target = ("<= 1 %", mean <= 0.01) if many == TRIES[-1] and not name else ("", True)
            tries = f"{many} tries" if many > 1 else "1 try"
            rows.append((f"{kernel.name}: {words}: {tries}, regret: mean; 95 %", f"{mean:.2%}; {high:.2%}", *target))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="*", default=("matmul", "attention"))
    options = parser.parse_args()
    every, configs, device = examples_of([options.file])
    rows, raw = [], {}
    for name in options.only:
        kernel = Kernel(name, every[name], configs[name], device)
        found = raw[name] = replayed(kernel)
        rows += rows_of(kernel, found)
    rounded = {n: {way: [[round(r, 5) for r in row] for row in rs] for way, rs in f.items()} for n, f in raw.items()}
    status = tables.report("near_shapes", rows, rounded, quick=False, device=device)
    tables.write(tables.read())
    return status


if __name__ == "__main__":
    sys.exit(main())
