"""What times on other devices are worth on a device that was never tuned, with no run and after a few.

    python bench/other_devices.py --data DIRECTORY

DIRECTORY holds recorded spaces, as for `bench/search.py`. A device is left out, and the others are known whole. Without
a run, the device that is most alike by its properties chooses. With runs, a search that starts from all others is
compared with random search, and so is a search that knows one other device alone, which may mislead it.

A device's optimum is taken for transferable by what is known without the device: among the others there are two that
are no more alike than the device is to its likest, and the choices of all such two are within 3 % of the best on each
other. A prediction for a device without entries of its own is asked for too: it must state no bound.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from itertools import permutations
from pathlib import Path

import numpy as np
import search
import search_spaces
from tables import report

from tunebook._arrays.device_properties import likeness
from tunebook._base.config_codec import encode, fingerprint
from tunebook._base.record_format import Body, Head, Record
from tunebook._base.vocabulary import Measurement, Problem
from tunebook.search import Observation, Portfolio, Random
from tunebook.search._prediction import predict

RUNS = (8, 16)
SEEDS = 20
TRANSFERS = 0.03  # how much slower than the best a choice may be
RECORDED = 100  # configurations of another device in the book that a prediction is asked of
FAILED = 7.0  # how much slower than the best a configuration counts that failed


def left_out(bench, others):
    """Return how much slower than the best the choices for a device are that the others' times lead to."""
    here, known = slowness(bench.recorded), {other.recorded.device: slowness(other.recorded) for other in others}
    likest = max(known, key=lambda device: likeness(device, bench.recorded.device) or 0)
    choices = {device: min(each, key=each.get) for device, each in known.items()}
    # How the choices of the known devices do on each other: a bound would have to rest on that.
    pairs = {(a, b): known[b].get(choices[a], FAILED) for a, b in permutations(known, 2)}
    apart = likeness(likest, bench.recorded.device) or 0
    telling = [regret for (a, b), regret in pairs.items() if (likeness(a, b) or 0) <= apart]
    found = {"space": bench.recorded.name, "by": likest, "across": list(pairs.values())}
    found["taken_for_transferable"] = bool(telling) and max(telling) <= TRANSFERS
    found["is_predicted"] = is_predicted(bench, others)
    found["no_run"] = {device: here.get(choice, FAILED) for device, choice in choices.items()}
    found["random"] = after_runs(bench, here, lambda seed: Random(bench.recorded.space, seed=seed))
    found["all"] = after_runs(bench, here, from_devices(bench, others))
    found["one"] = {o.recorded.device: after_runs(bench, here, from_devices(bench, [o])) for o in others}
    return found


def is_predicted(bench, others):
    """Return whether the library predicts for a device from the entries of others, and so states a bound."""
    records = [record_of(other) for other in others]
    return predict(records, records[0].problem._replace(device=bench.recorded.device)) is not None


def record_of(bench):
    """Return the entry of a device in the book, with the fastest of its configurations."""
    slower = slowness(bench.recorded)
    measured = tuple(
        Measurement(encode(config), fingerprint(config), "", "", "", samples_s=(1.0 + slower[config],))
        for config in sorted(slower, key=slower.get)[:RECORDED]
    )
    problem = Problem(bench.recorded.device, bench.recorded.kernel, "{}")
    head = Head(problem=problem, config=measured[0].config, checksum="", origin="tuned")
    return Record(head, Body(measurements=measured))


def from_devices(bench, others):
    start = search.start_from(bench, [search.known_whole(other) for other in others])
    return lambda seed: Portfolio(bench.recorded.space, seed=seed, start=start)


def after_runs(bench, slower, make):
    """Return how much slower than the best the fastest is after some runs of a search, on the mean over seeds."""
    recorded, found = bench.recorded, []
    for seed in range(SEEDS):
        strategy, best, fastest = make(seed), [], math.inf
        for _ in range(max(RUNS)):
            (config,) = strategy.propose(1)
            ms = float(recorded.time_ms[recorded.row[config]])
            strategy.observe([Observation(config, ms / 1e3 if math.isfinite(ms) else None)])
            fastest = min(fastest, slower.get(config, FAILED))
            best.append(fastest)
        found.append(best)
    return [statistics.fmean(best[runs - 1] for best in found) for runs in RUNS]


def slowness(space):
    """Return how much slower than the best each configuration is, less those that failed."""
    best = float(np.nanmin(space.time_ms))
    each = zip(space.configs, space.time_ms, strict=True)
    return {config: float(ms) / best - 1 for config, ms in each if math.isfinite(ms)}


def rows_of(found):
    for row in found:
        first = row["no_run"][row["by"]]
        across = " and ".join(f"{regret:.0%}" for regret in row["across"])
        what = f"{row['space']}, by {row['by']}: no run (the others' choices on each other: {across})"
        yield what, f"{first:.2%}", "<= 3 %", first <= 0.03
        yield f"{row['space']}, from all others: 8; 16 runs", parts(row["all"]), "<= 1 %", row["all"][0] <= 0.01
        ahead = [
            all(a < r for a, r in zip(each, row["random"], strict=True)) for each in (row["all"], *row["one"].values())
        ]
        alone = ", ".join(f"{parts(each)} ({device})" for device, each in row["one"].items())
        yield (
            f"{row['space']}, from one other alone: 8; 16 runs",
            alone,
            f"< {parts(row['random'])}, random",
            all(ahead),
        )


def rows_of_all(found):
    """Return the rows of what is taken for transferable: its mean regrets, what is not, and whether that is told."""
    taken = [row for row in found if row["taken_for_transferable"]]
    others = ", ".join(row["space"] for row in found if not row["taken_for_transferable"])
    yield "taken for transferable by what the other devices say", f"{len(taken)} of {len(found)}", "", True
    if taken:
        no_run, after_8 = (statistics.fmean(each) for each in zip(*map(regrets_of, taken), strict=True))
        yield "of these: mean regret with no run", f"{no_run:.2%}", "<= 3 %", no_run <= TRANSFERS
        yield "of these: mean regret after 8 runs", f"{after_8:.2%}", "<= 1 %", after_8 <= 0.01
    if others:
        yield "not taken for transferable, and tuned", others, "", True
    in_truth = [row["space"] for row in found if regrets_of(row)[0] <= TRANSFERS]
    yield "of all, transferable in truth", ", ".join(in_truth) or "none", "", True
    stated = sum(row["is_predicted"] for row in found if not row["taken_for_transferable"])
    yield "bounds stated for devices without entries, not taken for transferable", f"{stated}", "0", not stated


def regrets_of(row):
    return row["no_run"][row["by"]], row["all"][0]


def parts(values):
    return "; ".join(f"{value:.2%}" for value in values)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a folder of Kernel Tuner's cache files")
    paths = sorted(parser.parse_args().data.glob("*.json.gz"))
    benches = [search.Bench(search_spaces.load(path), None, path) for path in paths]
    found = []
    for bench in benches:
        others = [b for b in benches if b.recorded.kernel == bench.recorded.kernel and b is not bench]
        found += [left_out(bench, others)] if others else []
        print(bench.recorded.name, "done", flush=True)
    return report("other_devices", [*rows_of_all(found), *rows_of(found)], found, quick=False)


if __name__ == "__main__":
    sys.exit(main())
