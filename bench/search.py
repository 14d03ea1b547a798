"""Measure the search: how soon it finds the best configuration of recorded spaces, beside the peers.

    python bench/search.py --data DIRECTORY [--quick] [--processes N] [--no-peers | --keep-peers] [--only TEXT]

DIRECTORY holds cache files of Kernel Tuner's (`kernel_device.json.gz`), every configuration of a space measured. Each
tuner is replayed 20 times under the clock of the records. The score is 0 for random search and 1 for the optimum at the
first moment (see `search_spaces`); the intervals are 95 % over the runs, by bootstrap, with the spaces given. Prints a
table against the targets of the design, and writes the raw numbers to bench/results/search.json, or NAME.json.

Cold is a search that knows nothing. With the race, runs of a configuration end as soon as it is clearly behind, and it
is never the best then. Warm knows every other device that the kernel was recorded on, as the book would: all that was
recorded there, or what a search with the usual number of trials found there. Peers, where they are installed, are
costed by the same clock; Optuna only where it is asked for a few hundred proposals.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import multiprocessing
import os
import random
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

# Linear algebra stays on one core: all that is compared here does. Read when numpy is loaded, which peers do too.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import numpy as np  # noqa: E402 - after the number of threads is set
import search_peers  # noqa: E402
from search_spaces import RACE, Clock, Recorded, Run, Score, clock_of, load, score  # noqa: E402
from tables import HERE, RESULTS, report  # noqa: E402

import tunebook as tb  # noqa: E402
from tunebook._arrays.device_properties import likeness  # noqa: E402
from tunebook._tuning.plan import TRIALS  # noqa: E402
from tunebook._tuning.search_run import BATCH  # noqa: E402
from tunebook.search import Evolution, Local, Observation, Portfolio, Random, Start  # noqa: E402
from tunebook.search._warm_start import FROM_EACH, thin  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
        began = time.thread_time()  # processor time: others may use the machine too
        proposed = strategy.propose(1)
        thinking_s += time.thread_time() - began
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
        began = time.thread_time()
        strategy.observe([Observation(proposed[0], value / 1e3 if math.isfinite(value) else None)])
        thinking_s += time.thread_time() - began
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


class Known(NamedTuple):
    """What is in the book about one device: rows in the order of their times, and those that failed."""

    recorded: Recorded
    ranked: list[int]
    failed: list[int]


def known_whole(bench: Bench) -> Known:
    """Return all that was recorded: what a brute force leaves in the book."""
    return known_of(bench.recorded, range(len(bench.recorded.configs)))


def known_by_search(bench: Bench, seed: int) -> Known:
    """Return what a search from nothing leaves in the book, with as many trials as the library takes by itself."""
    recorded = bench.recorded
    strategy = Portfolio(recorded.space, seed=1000 + seed)
    rows: list[int] = []
    while len(rows) < TRIALS and (batch := strategy.propose(BATCH)):
        tried = [recorded.row[config] for config in batch]
        rows += tried
        times = [float(recorded.time_ms[row]) for row in tried]
        strategy.observe([Observation(c, t if math.isfinite(t) else None) for c, t in zip(batch, times, strict=True)])
    return known_of(recorded, rows)


def known_of(recorded: Recorded, rows: Iterable[int]) -> Known:
    worked = [row for row in rows if np.isfinite(recorded.time_ms[row])]
    failed = [row for row in rows if not np.isfinite(recorded.time_ms[row])]
    return Known(recorded, sorted(worked, key=lambda row: recorded.time_ms[row]), failed)


def start_from(bench: Bench, known: list[Known]) -> Start:
    """Return where a search begins that knows other devices, as the library would: see `search._warm_start`."""
    known = sorted(known, key=lambda k: -(likeness(k.recorded.device, bench.recorded.device) or 0))
    in_turn = [(place, k) for place in range(FROM_EACH) for k in known if place < len(k.ranked)]
    first = [k.recorded.configs[k.ranked[place]] for place, k in in_turn]
    worked = {k.recorded.configs[row] for k in known for row in k.ranked}
    last = [config for k in known for row in k.failed if (config := k.recorded.configs[row]) not in worked]
    tables = [
        [Observation(k.recorded.configs[row], float(k.recorded.time_ms[row]) / 1e3) for row in thin(k.ranked)]
        for k in known
    ]
    here = bench.recorded.row
    return Start([c for c in dict.fromkeys(first) if c in here], [c for c in dict.fromkeys(last) if c in here], tables)


# ------------------------------------------------------------------------------------------------------------ scores


class Tuner(NamedTuple):
    """What is compared. `run` replays one seed; `applies` says on which spaces."""

    name: str
    run: Callable[[Bench, int], Run]
    applies: Callable[[Bench], bool] = lambda _bench: True


def ours(benches: list[Bench]) -> list[Tuner]:
    def others(bench: Bench) -> list[Bench]:
        return [b for b in benches if b.recorded.kernel == bench.recorded.kernel and b is not bench]

    def warm(bench: Bench, seed: int, devices: int, *, searched: bool = False) -> Run:
        among = random.Random(seed).sample(others(bench), min(devices, len(others(bench))))
        known = [known_by_search(other, seed) if searched else known_whole(other) for other in among]
        return replay(bench, Portfolio(bench.recorded.space, seed=seed, start=start_from(bench, known)))

    def plain(make: Callable[..., Strategy], *, race: bool = False) -> Callable[[Bench, int], Run]:
        return lambda bench, seed: replay(bench, make(bench.recorded.space, seed=seed), race=race)

    has_others: Callable[[Bench], bool] = lambda bench: bool(others(bench))  # noqa: E731 - beside its use
    return [
        Tuner("tunebook, cold", plain(Portfolio)),
        Tuner("tunebook, with the race", plain(Portfolio, race=True)),
        Tuner("tunebook, warm from all other devices", lambda b, seed: warm(b, seed, 99), has_others),
        Tuner("tunebook, warm from one other device", lambda b, seed: warm(b, seed, 1), has_others),
        Tuner(
            "tunebook, warm from searches on all other devices", lambda b, s: warm(b, s, 99, searched=True), has_others
        ),
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


# What the processes that replay share: they are forked, because neither can be sent.
_TUNERS: list[Tuner] = []
_BENCHES: list[Bench] = []


def replayed(job: tuple[int, int, int]) -> Run:
    tuner, bench, seed = job
    return _TUNERS[tuner].run(_BENCHES[bench], seed)


def all_runs(tuner: Tuner, benches: list[Bench], seeds: int, processes: int) -> list[list[Run]]:
    """Return the runs on each space, from as many processes as asked for."""
    _TUNERS.append(tuner)
    number = len(_TUNERS) - 1
    _BENCHES[:] = benches
    jobs = [(number, at, seed) for at in range(len(benches)) for seed in range(seeds)]
    if processes == 1:
        runs = [replayed(job) for job in jobs]
    else:
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            runs = pool.map(replayed, jobs, chunksize=1)
    return [runs[at * seeds : (at + 1) * seeds] for at in range(len(benches))]


def scores(tuner: Tuner, benches: list[Bench], seeds: int, processes: int) -> Result:
    benches = list(filter(tuner.applies, benches))
    runs = all_runs(tuner, benches, seeds, processes)
    found = {b.recorded.name: score(b.recorded, b.clock, own) for b, own in zip(benches, runs, strict=True)}
    # The spaces are given and the runs are drawn: so the interval is over runs that are drawn again, in every space.
    means = np.mean([s.drawn for s in found.values()], axis=0)
    low, high = (float(q) for q in np.quantile(means, (0.025, 0.975)))
    mean = float(np.mean([s.score for s in found.values()]))
    within = float(np.mean([s.within for s in found.values()]))
    flat = [run for own in runs for run in own]
    ms = 1e3 * sum(run.thinking_s for run in flat) / max(sum(run.asked for run in flat), 1)
    result = Result(found, mean, low, high, within, ms)
    each = "  ".join(f"{name} {s.score:.2f}" for name, s in found.items())
    print(f"{tuner.name:<50} {mean:6.3f} [{low:.3f}, {high:.3f}] {within:4.0%} {ms:7.2f} ms   {each}", flush=True)
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


def is_peer(name: str) -> bool:
    """Whether results are of another package, and do not change with this one."""
    return not name.startswith("tunebook")


def earlier(run: str) -> dict[str, Result]:
    """Return the results of the last run."""
    raw = json.loads((RESULTS / f"{run}.json").read_text())["raw"]
    return {
        name: Result(**{**fields, "spaces": {space: Score(**s) for space, s in fields["spaces"].items()}})
        for name, fields in raw.items()
    }


def told(found: Score) -> dict[str, object]:
    return {name: value for name, value in found._asdict().items() if name != "drawn"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=HERE / "spaces", help="a folder of Kernel Tuner's cache files")
    parser.add_argument("--name", default="search", help="what the results are called: of other spaces, another name")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SEEDS} seeds instead of {SEEDS}")
    parser.add_argument("--no-peers", action="store_true", help="without the packages that are only compared with")
    parser.add_argument("--keep-peers", action="store_true", help="take the peers' scores from the last results")
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="tuners with this in their names; the others' scores are the last ones",
    )
    parser.add_argument("--processes", type=int, default=1, help="how many replay at once; the clock is the records'")
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
        tuners = [t for t in tuners if not options.only or any(text in t.name for text in options.only)]
        results = {tuner.name: scores(tuner, benches, seeds, options.processes) for tuner in tuners}
    if options.only:
        results = earlier(options.name) | results
    elif options.keep_peers:
        results |= {name: result for name, result in earlier(options.name).items() if is_peer(name)}
    raw = {
        name: {**result._asdict(), "spaces": {space: told(found) for space, found in result.spaces.items()}}
        for name, result in results.items()
    }
    print()
    return report(options.name, rows_of(results, big_space()), raw, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
