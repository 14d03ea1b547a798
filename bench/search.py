"""Measure the search: how soon it finds the best configuration of recorded spaces, beside the peers.

    python bench/search.py --data DIRECTORY [--quick] [--no-peers | --keep-peers]

DIRECTORY holds cache files of Kernel Tuner's (`kernel_device.json.gz`), every configuration of a space measured. Each
tuner is replayed 20 times under the clock of the records. The score is 0 for random search and 1 for the optimum at the
first moment (see `search_spaces`); the intervals are 95 % over the runs. Prints a table against the targets of the
design, and writes the raw numbers to bench/results/search.json.

Cold is a search that knows nothing. With the race, runs of a configuration end as soon as it is clearly behind, and it
is never the best then. Warm begins with the fastest of every other device that the kernel was recorded on, as the book
would know them. Peers, where they are installed, are costed by the same clock; Optuna only where it is asked for a
few hundred proposals.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import random
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import search_peers

search_peers.quiet_threads()

import numpy as np  # noqa: E402 - after the number of threads is set
from search_spaces import RACE, Clock, Recorded, Run, Score, clock_of, load, score  # noqa: E402
from tables import HERE, RESULTS, report  # noqa: E402

import tunebook as tb  # noqa: E402
from tunebook.search import Evolution, Local, Observation, Portfolio, Random, Start  # noqa: E402
from tunebook.search._elsewhere import FROM_EACH  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from tunebook.search import Strategy

SEEDS, QUICK_SEEDS = 20, 5


class Bench(NamedTuple):
    recorded: Recorded
    clock: Clock
    path: Path


# ------------------------------------------------------------------------------------------------------------ replay


def replay(bench: Bench, strategy: Strategy, *, race: bool = False) -> Run:
    """Run a strategy under the recorded clock, one proposal at a time."""
    recorded, budget_s = bench.recorded, bench.clock.budget_s
    rows: list[int] = []
    when_s: list[float] = []
    spent_s, thinking_s, asked, best = 0.0, 0.0, 0, math.inf
    while spent_s < budget_s:
        began = time.perf_counter()
        proposed = strategy.propose(1)
        thinking_s += time.perf_counter() - began
        if not proposed:
            break
        asked += 1
        row = recorded.row[proposed[0]]
        value, cost_s, whole = measured(recorded, row, best if race else math.inf)
        spent_s += cost_s
        if whole:
            best = min(best, value)
            rows.append(row)
            when_s.append(spent_s)
        began = time.perf_counter()
        strategy.observe([Observation(proposed[0], value / 1e3 if math.isfinite(value) else None)])
        thinking_s += time.perf_counter() - began
    return Run(rows, when_s, asked, thinking_s)


def measured(recorded: Recorded, row: int, best: float) -> tuple[float, float, bool]:
    """Return the time of a configuration in ms, what that cost in seconds, and whether all runs were made for it."""
    samples, value = recorded.samples_ms[row], float(recorded.time_ms[row])
    if not math.isfinite(value):
        return math.inf, float(recorded.cost_s[row]), True
    for runs, margin in RACE:
        if runs < len(samples) and samples[:runs].min() > best * (1 + margin):
            return float(samples[:runs].mean()), float(recorded.compile_s[row] + samples[:runs].sum() / 1e3), False
    return value, float(recorded.cost_s[row]), True


def known_elsewhere(bench: Bench, others: list[Bench]) -> list[tb.Config]:
    """Return the fastest configurations of other devices, best first of each, as the book would know them."""
    ranked = [np.argsort(other.recorded.time_ms)[:FROM_EACH] for other in others]  # NaN goes last
    in_turn = [(place, number) for place in range(FROM_EACH) for number in range(len(others))]
    found = [others[number].recorded.configs[ranked[number][place]] for place, number in in_turn]
    return [config for config in dict.fromkeys(found) if config in bench.recorded.row]


# ------------------------------------------------------------------------------------------------------------ scores


class Tuner(NamedTuple):
    """What is compared. `run` replays one seed; `applies` says on which spaces."""

    name: str
    run: Callable[[Bench, int], Run]
    applies: Callable[[Bench], bool] = lambda _bench: True


def ours(benches: list[Bench]) -> list[Tuner]:
    def others(bench: Bench) -> list[Bench]:
        return [b for b in benches if b.recorded.kernel == bench.recorded.kernel and b is not bench]

    def warm(bench: Bench, seed: int, devices: int) -> Run:
        among = random.Random(seed).sample(others(bench), min(devices, len(others(bench))))
        start = Start(first=known_elsewhere(bench, among))
        return replay(bench, Portfolio(bench.recorded.space, seed=seed, start=start))

    def plain(make: Callable[..., Strategy], *, race: bool = False) -> Callable[[Bench, int], Run]:
        return lambda bench, seed: replay(bench, make(bench.recorded.space, seed=seed), race=race)

    has_others: Callable[[Bench], bool] = lambda bench: bool(others(bench))  # noqa: E731 - beside its use
    return [
        Tuner("tunebook, cold", plain(Portfolio)),
        Tuner("tunebook, with the race", plain(Portfolio, race=True)),
        Tuner("tunebook, warm from all other devices", lambda b, seed: warm(b, seed, 99), has_others),
        Tuner("tunebook, warm from one other device", lambda b, seed: warm(b, seed, 1), has_others),
        Tuner("tunebook, local search alone", plain(Local)),
        Tuner("tunebook, evolution alone", plain(Evolution)),
        Tuner("tunebook, random alone", plain(Random)),
    ]


def peers(folder: Path) -> list[Tuner]:
    found: list[Tuner] = []

    def kernel_tuner(strategy: str) -> Callable[[Bench, int], Run]:
        def run(bench: Bench, seed: int) -> Run:
            plain = search_peers.plain_file(bench.path, folder)
            return search_peers.kernel_tuner_run(bench.recorded, bench.clock, plain, strategy, seed)

        return run

    if importlib.util.find_spec("kernel_tuner") is not None:
        found += [Tuner(f"kernel_tuner {name}", kernel_tuner(name)) for name in search_peers.KERNEL_TUNER]
    if importlib.util.find_spec("optuna") is not None:
        run: Callable[[Bench, int], Run] = lambda b, seed: search_peers.optuna_run(b.recorded, b.clock, seed)  # noqa: E731
        found.append(Tuner("optuna TPE", run, lambda b: search_peers.is_small(b.recorded, b.clock)))
    return found


class Result(NamedTuple):
    """The scores of one tuner on each space, and over all of them."""

    spaces: dict[str, Score]
    mean: float
    low: float
    high: float
    within: float
    ms: float


def scores(tuner: Tuner, benches: list[Bench], seeds: int) -> Result:
    found: dict[str, Score] = {}
    asked, thinking_s = 0, 0.0
    for bench in filter(tuner.applies, benches):
        runs = [tuner.run(bench, seed) for seed in range(seeds)]
        found[bench.recorded.name] = score(bench.recorded, bench.clock, runs)
        asked += sum(run.asked for run in runs)
        thinking_s += sum(run.thinking_s for run in runs)
    # The spaces are given, the runs are drawn: so the mean's spread is that of the runs in each.
    spread = math.sqrt(sum(((s.high - s.low) / 2) ** 2 for s in found.values())) / len(found)
    mean = float(np.mean([s.score for s in found.values()]))
    within = float(np.mean([s.within for s in found.values()]))
    result = Result(found, mean, mean - spread, mean + spread, within, 1e3 * thinking_s / max(asked, 1))
    each = "  ".join(f"{name} {s.score:.2f}" for name, s in found.items())
    bounds = f"[{result.low:.3f}, {result.high:.3f}]"
    print(f"{tuner.name:<40} {mean:6.3f} {bounds}  {result.ms:7.2f} ms   {each}", flush=True)
    return result


# ------------------------------------------------------------------------------------------------------ a big space


def big_space() -> dict[str, float]:
    """Build a space of a million configurations under constraints, and ask the default for the first ten."""
    tracemalloc.start()
    began = time.perf_counter()
    space = (
        tb.Space(
            bm=[16, 32, 64, 128, 256],
            bn=[16, 32, 64, 128, 256],
            bk=[16, 32, 64, 128],
            warps=[1, 2, 4, 8, 16],
            stages=range(1, 9),
            group=[1, 2, 4, 8, 16],
            split=range(1, 17),
            order=["mnk", "nmk", "kmn"],
            swizzle=[False, True],
            vector=[1, 2, 4, 8],
        )
        .where(lambda c: c.bm * c.bn <= 32 * 1024 and c.bm * c.bn >= 32 * c.warps)
        .where(lambda c: (c.bm + c.bn) * c.bk * c.stages * 2 <= 228 * 1024)
    )
    strategy = Portfolio(space, seed=0)
    first = strategy.propose(10)
    strategy.observe([Observation(config, 1.0 + i) for i, config in enumerate(first)])
    strategy.propose(10)
    ready_s = time.perf_counter() - began
    megabytes = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    began = time.perf_counter()
    count = len(space)
    return {"count": count, "ready_s": ready_s, "megabytes": megabytes, "count_s": time.perf_counter() - began}


# ----------------------------------------------------------------------------------------------------------- results


def rows_of(results: dict[str, Result], big: dict[str, float]) -> list[tuple[str, str, str, bool]]:
    cold, raced = results["tunebook, cold"], results["tunebook, with the race"]
    warm = results["tunebook, warm from all other devices"]
    kernels: dict[str, list[float]] = {}
    for name, found in cold.spaces.items():
        kernels.setdefault(name.split()[0], []).append(found.score)
    worst = min(float(np.mean(values)) for values in kernels.values())
    rows = [
        ("recorded spaces, cold: score", f"{cold.mean:.2f}", ">= 0.70", cold.mean >= 0.70),
        ("recorded spaces, cold: lower bound", f"{cold.low:.2f}", "> 0.64", cold.low > 0.64),
        ("recorded spaces, cold: worst kernel", f"{worst:.2f}", ">= 0", worst >= 0),
        ("recorded spaces, cold: runs within 1 %", f"{cold.within:.0%}", ">= 85 %", cold.within >= 0.85),
        ("recorded spaces, with the race: score", f"{raced.mean:.2f}", ">= 0.75", raced.mean >= 0.75),
        ("recorded spaces, warm from other devices: score", f"{warm.mean:.2f}", ">= 0.95", warm.mean >= 0.95),
        ("a proposal of the default", f"{cold.ms:.2f} ms", "< 1 ms", cold.ms < 1),
        (f"a space of {big['count']:,.0f}, constrained: ready", f"{big['ready_s']:.2f} s", "< 1 s", big["ready_s"] < 1),
        ("the same: memory", f"{big['megabytes']:.0f} MB", "< 100 MB", big["megabytes"] < 100),
        ("the same: counted exactly", f"{big['count_s']:.2f} s", "", True),
    ]
    shown = [(name, result) for name, result in results.items() if name.partition(",")[0] != "tunebook"]
    rows += [(f"recorded spaces, {name}: score", f"{result.mean:.2f}", "", True) for name, result in shown]
    return rows


def earlier_peers() -> dict[str, Result]:
    """Return the peers' results of the last run: they do not change with our code."""
    raw = json.loads((RESULTS / "search.json").read_text())["raw"]
    found = {name: fields for name, fields in raw.items() if not name.startswith("tunebook")}
    return {
        name: Result(**{**fields, "spaces": {space: Score(**s) for space, s in fields["spaces"].items()}})
        for name, fields in found.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=HERE / "spaces", help="a folder of Kernel Tuner's cache files")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SEEDS} seeds instead of {SEEDS}")
    parser.add_argument("--no-peers", action="store_true", help="without the packages that are only compared with")
    parser.add_argument("--keep-peers", action="store_true", help="take the peers' scores from the last results")
    options = parser.parse_args()
    paths = sorted(options.data.glob("*.json.gz"))
    if not paths:
        print(
            f"there are no recorded spaces in {options.data}. They are cache files of Kernel Tuner's, such as those of "
            "the FAIR benchmark hub for auto-tuning (DOI 10.5281/zenodo.15364124).\n"
            "Type: python bench/search.py --data DIRECTORY"
        )
        return 2
    recorded = [(load(path), path) for path in paths]
    benches = [Bench(space, clock_of(space), path) for space, path in recorded]
    seeds = QUICK_SEEDS if options.quick else SEEDS
    with tempfile.TemporaryDirectory() as folder:
        tuners = ours(benches) + ([] if options.no_peers or options.keep_peers else peers(Path(folder)))
        results = {tuner.name: scores(tuner, benches, seeds) for tuner in tuners}
    if options.keep_peers:
        results |= earlier_peers()
    raw = {
        name: {**result._asdict(), "spaces": {space: found._asdict() for space, found in result.spaces.items()}}
        for name, result in results.items()
    }
    print()
    return report("search", rows_of(results, big_space()), raw, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
