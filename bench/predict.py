"""How good predictions for sizes that were never tuned are, and whether their bound holds.

    python bench/predict.py --shapes FILE.json.gz [--shapes MORE.json.gz]

`FILE` is written by `bench/record_shapes.py` on a GPU, or by `bench/record_cpu_shapes.py`: every configuration at every
shape. The shapes are dealt into twenty parts. A model learns from all but one, finds its structure and its bound there,
and is judged on that one: no shape is judged by a model that has seen it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from tables import report

from tunebook._arrays.device_properties import cores_of
from tunebook.search import Example, SizeModel, fit

FOLDS = 20
FEW = (5, 10, 20, 40, 80, 160)  # problems to learn from
DRAWS = 12  # of so few problems: whether a bound holds varies from draw to draw
OTHERS = 200  # problems at most that a draw is judged by
TRIES = 8
AT_ONCE = 0.03  # the usual limit of a bound


def examples_of(paths):
    """Return the examples and the configurations of each kernel, and the device."""
    found, configs, devices = defaultdict(list), {}, set()
    for path in paths:
        content = json.loads(gzip.decompress(path.read_bytes()))
        devices.add(content["device"])
        for name, kernel in content["kernels"].items():
            keys = [" ".join(f"{axis}={value}" for axis, value in config.items()) for config in kernel["configs"]]
            configs[name] = dict(zip(keys, kernel["configs"], strict=True))
            for sizes, halves in kernel["rows"]:
                # The mean of two medians, in seconds.
                seconds = {key: sum(ns) / 2e9 for key, ns in zip(keys, halves, strict=True) if ns is not None}
                found[name].append(Example(dict(zip(kernel["sizes"], sizes, strict=True)), seconds))
    return found, configs, devices.pop()


def regret(example, key):
    return example.seconds[key] / min(example.seconds.values()) - 1 if key in example.seconds else 7.0


def judged(model, example):
    """Return the regret of a choice, its bound, its expected regret, and the regret after the tries worth it."""
    found = model.predict(example.sizes)
    numbers = {
        "regret": regret(example, found.keys[0]),
        "bound": found.bound,
        "expected": found.regret,
        "after_tries": min(regret(example, key) for key in found.keys),
        "after_8": min(regret(example, key) for key in found.keys[:TRIES]),
    }
    sizes = "x".join(f"{size:.0f}" for size in example.sizes.values())
    return {"sizes": sizes, "tried": len(found.keys)} | {name: round(value, 6) for name, value in numbers.items()}


def unseen_shapes(examples, configs, cores):
    """Return what became of each shape with a model that has not seen it, and the CPU seconds of each fit."""
    order = random.Random(0).sample(range(len(examples)), len(examples))
    rows, seconds = [], []
    for fold in range(FOLDS):
        known = [examples[at] for place, at in enumerate(order) if place % FOLDS != fold]
        began = time.process_time()
        model = SizeModel(known, configs, cores=cores)
        seconds.append(time.process_time() - began)
        rows += [judged(model, examples[at]) for at in order[fold::FOLDS]]
    return rows, seconds


def with_few(examples, configs, cores):
    """Return the mean regret on other shapes, and how often bounds hold, by the number of shapes learnt from."""
    found = {}
    for many in (many for many in FEW if 4 * many < 3 * len(examples)):
        draws = []
        for seed in range(DRAWS):
            order = random.Random(seed).sample(range(len(examples)), len(examples))
            model = SizeModel([examples[at] for at in order[:many]], configs, cores=cores)
            draws += [judged(model, examples[at]) for at in order[many : many + OTHERS]]
        found[many] = {name: statistics.fmean(row[name] for row in draws) for name in ("regret", "after_tries")}
        bounded = [row for row in draws if row["bound"] < math.inf]
        at_once = [row for row in bounded if row["bound"] <= AT_ONCE]
        found[many] |= {"held": held(bounded), "held_at_once": held(at_once), "at_once": len(at_once) / len(draws)}
    return found


def held(rows):
    """Return the part of shapes whose regret is within the stated bound; None without any."""
    return statistics.fmean(row["regret"] <= row["bound"] for row in rows) if rows else None


def part(values):
    return f"{values:.2%}"


def rows_of(name, judged_rows, examples, configs, seconds, *, on_gpu):
    """Return the lines of the table about one kernel; the targets of regrets are for GPUs."""
    regrets = [row["regret"] for row in judged_rows]
    holds = held(judged_rows)
    certain = [row for row in judged_rows if row["bound"] <= AT_ONCE]
    at_once = [row["regret"] for row in certain]
    mean, high = statistics.fmean(regrets), float(np.quantile(regrets, 0.95))
    tree = fit(examples, configs, depth=6)
    usual, most = (("<= 0.7 %", mean <= 0.007), ("<= 3 %", high <= 0.03)) if on_gpu else (("", True), ("", True))
    answered = f"{len(at_once) / len(regrets):.0%}, {part(statistics.fmean(at_once)) if at_once else 'none'} slower"
    return [
        (f"{name}: unseen shapes, mean regret, no run", part(mean), *usual),
        (f"{name}: 95th percentile of the regret", part(high), *most),
        (f"{name}: the 95 % bound holds", f"{holds:.1%}", "94 to 97 %", 0.94 <= holds <= 0.97),
        (f"{name}: answered at once (bound within 3 %)", answered, "", True),
        (f"{name}: the bound holds for these", part(held(certain)) if certain else "none", "", True),
        (f"{name}: after the tries worth it", part(statistics.fmean(r["after_tries"] for r in judged_rows)), "", True),
        (f"{name}: the best constant; a tree (`fit`)", f"{part(tree.constant)}; {part(tree.held_out)}", "", True),
        (f"{name}: CPU seconds of a fit", f"{statistics.median(seconds):.1f}", "", True),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=Path, action="append", required=True, metavar="FILE.json.gz")
    options = parser.parse_args()
    every, configs, device = examples_of(options.shapes)
    rows, raw, on_gpu = [], {"kernels": {}}, not device.startswith("cpu:")
    for name, examples in every.items():
        cores = cores_of(device)
        found, seconds = unseen_shapes(examples, configs[name], cores)
        few = with_few(examples, configs[name], cores)
        rows.append(
            (
                f"{name}: shapes; configurations",
                f"{len(examples)}; {len(configs[name])}",
                ">= 100",
                len(examples) >= 100,
            )
        )
        rows += rows_of(name, found, examples, configs[name], seconds, on_gpu=on_gpu)
        learnt = ", ".join(f"{part(each['regret'])} ({many})" for many, each in few.items())
        rows.append((f"{name}: mean regret by the number of tuned shapes", learnt, "", True))
        for words, which in (
            ("the bound holds", "held"),
            ("calls answered at once", "at_once"),
            ("the bound of these holds", "held_at_once"),
        ):
            shown = ", ".join(f"{each[which]:.1%} ({many})" for many, each in few.items() if each[which])
            rows.append((f"{name}: {words}, by the number of tuned shapes", shown, "", True))
        raw["kernels"][name] = {"unseen": found, "fit_s": seconds, "few": few}
        print(name, "done", flush=True)
    return report("predict" if on_gpu else "predict_cpu", rows, raw, quick=False, device=device)


if __name__ == "__main__":
    sys.exit(main())
