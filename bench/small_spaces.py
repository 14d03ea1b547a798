"""Measure the search on small flat spaces: is it ever worse than random search, from the first run on?

    python bench/small_spaces.py [--data DIRECTORY] [--quick]

The spaces are made up (`made_up_spaces`). With recorded spaces in DIRECTORY, as for `bench/search.py`, these
are searched too, and parts of them in which one axis is fixed. The measure is the rank of the fastest
configuration so far, on the mean over seeds, divided by the mean rank that random search without replacement has after
as many runs, which is computed exactly. Below 1 is better than random. A ratio that is above 1.05 by three standard
errors is suspected to be worse than random: luck alone makes one ratio in 700 so, and there are 1341. So a suspect is
measured again with other seeds, three times as many, and counts as worse if it is so there too. Ranks are the measure
because the score of `bench/search.py` is made of mean ranks, and because they do not depend on how flat a space is.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import numpy as np  # noqa: E402 - after the number of threads is set
from made_up_spaces import KINDS, SMALLEST, Made, spaces  # noqa: E402
from search_spaces import Recorded, load  # noqa: E402
from tables import report  # noqa: E402

import tunebook as tb  # noqa: E402
from tunebook.search import Observation, Portfolio  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tunebook.search import Strategy

RUNS = (1, 2, 4, 8, 16, 30, 60, 120, 180)
# The first six of each kind were used to choose how a search begins; the rest is a check.
OF_EACH_KIND, QUICK_OF_EACH_KIND = 10, 2
SEEDS, QUICK_SEEDS = 40, 10
MORE_SEEDS = 3  # times as many, to measure a suspect again
ERRORS = 3.0  # a ratio that is so many standard errors too large is not luck
LEAST_GAP = 0.05  # a smaller difference does not matter


class Ratio(NamedTuple):
    """A mean rank divided by random search's, and its standard error over seeds."""

    mean: float
    error: float

    @property
    def is_worse(self) -> bool:
        return self.mean - ERRORS * self.error > 1 + LEAST_GAP


def ranks_of(times: np.ndarray) -> np.ndarray:
    """Return how many points are faster than each; a failure is slower than all others."""
    worked = np.sort(times[np.isfinite(times)])
    return np.searchsorted(worked, np.where(np.isfinite(times), times, np.inf)).astype(float)


def random_rank(ranks: np.ndarray, runs: int) -> float:
    """Return the mean rank of the best of some random points, drawn without replacement."""
    ordered, many = np.sort(ranks), len(ranks)
    # The best of all drawn is the one at place k if none of the k before it is drawn: choose(many - k, runs) ways.
    log_ways = [
        math.lgamma(left + 1) - math.lgamma(left - runs + 1) if left >= runs else -math.inf
        for left in range(many, -1, -1)
    ]
    none_before = np.exp(np.array(log_ways) - log_ways[0])
    return float((ordered * (none_before[:-1] - none_before[1:])).sum())


def best_ranks(
    strategy: Strategy, times: dict[tb.Config, float], ranks: dict[tb.Config, float], runs: int
) -> np.ndarray:
    """Return the rank of the best so far after each run."""
    found = []
    for _ in range(runs):
        (config,) = strategy.propose(1)
        found.append(ranks[config])
        strategy.observe([Observation(config, times[config] if math.isfinite(times[config]) else None)])
    return np.minimum.accumulate(found)


def ratios(
    space: Made, seeds: Sequence[int], runs_of: Sequence[int] = RUNS, make: Callable[..., Strategy] = Portfolio
) -> dict[int, Ratio]:
    """Return the ratio to random search after each number of runs."""
    ranks = ranks_of(space.times)
    times_by, ranks_by = (dict(zip(space.configs, each.tolist(), strict=True)) for each in (space.times, ranks))
    most = runs_of[-1]
    best = np.stack([best_ranks(make(space.space, seed=seed), times_by, ranks_by, most) for seed in seeds])
    found = {}
    for runs in runs_of:
        each = (best[:, runs - 1] + 1) / (random_rank(ranks, runs) + 1)
        found[runs] = Ratio(float(each.mean()), float(each.std(ddof=1) / math.sqrt(len(seeds))))
    return found


def parts_of(recorded: Recorded, number: int) -> list[Made]:
    """Return a recorded space, and for each axis the part of it in which the axis has its middle value."""
    axes = {axis.name: axis.values for axis in recorded.space.grid if len(axis.values) > 1}
    found = [part_of(recorded, recorded.name, number, {})]
    for name, values in axes.items():
        fixed = {name: values[len(values) // 2]}
        found.append(part_of(recorded, f"{recorded.name}, {name}={fixed[name]}", number, fixed))
    return [part for part in found if len(part.configs) >= SMALLEST]


def part_of(recorded: Recorded, name: str, number: int, fixed: dict[str, object]) -> Made:
    rows = [at for at, c in enumerate(recorded.configs) if all(c[n] == value for n, value in fixed.items())]
    configs = [recorded.configs[at] for at in rows]
    space = recorded.space if not fixed else tb.search.listed(configs)
    return Made(name, number, space, configs, recorded.time_ms[rows])


# ----------------------------------------------------------------------------------------------------------- results


def suspects_again(
    searched: Sequence[Made], found: dict[str, dict[str, dict[int, Ratio]]], seeds: int
) -> dict[tuple[str, int], Ratio]:
    """Return the suspects, by space and number of runs, as they are with other seeds."""
    spaces_by = {space.name if space.kind in KINDS else space.kind: space for space in searched}
    again = {}
    for each in found.values():
        for name, of in each.items():
            if suspected := [runs for runs, ratio in of.items() if ratio.is_worse]:
                new = ratios(spaces_by[name], range(seeds, (1 + MORE_SEEDS) * seeds), suspected)
                again |= {(name, runs): ratio for runs, ratio in new.items()}
    return again


def rows_of(
    found: dict[str, dict[str, dict[int, Ratio]]], again: dict[tuple[str, int], Ratio]
) -> list[tuple[str, str, str, bool]]:
    """Return a row for every kind and number of runs with the mean over its spaces, and one for each suspect."""
    rows = []
    for kind, each in found.items():
        means = {runs: float(np.mean([ratio[runs].mean for ratio in each.values()])) for runs in RUNS}
        shown = " / ".join(f"{mean:.2f}" for mean in means.values())
        rows.append((f"{kind}, {len(each)} spaces: rank beside random", shown, "", True))
    every = [(name, runs, r) for each in found.values() for name, of in each.items() for runs, r in of.items()]
    for runs in RUNS:
        mean = float(np.mean([ratio.mean for _, after, ratio in every if after == runs]))
        rows.append((f"all spaces after {runs} runs: rank beside random", f"{mean:.2f}", "<= 1.05", mean <= 1.05))
    for name, runs, ratio in every:
        if (new := again.get((name, runs))) is not None:
            shown = f"{ratio.mean:.2f} +- {ratio.error:.2f}; {new.mean:.2f} +- {new.error:.2f}"
            words = f"worse than random? {name} after {runs} runs; with other seeds"
            rows.append((words, shown, "<= 1.05", not new.is_worse))
    worse = sum(ratio.is_worse for ratio in again.values())
    rows.append((f"suspected to be worse than random, of {len(every)} ratios", f"{len(again)}", "", True))
    rows.append((f"worse than random, of {len(every)} ratios", f"{worse}", "0", not worse))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, help="a folder of Kernel Tuner's cache files, to search them and parts too"
    )
    parser.add_argument("--name", default="small_spaces", help="the name of the results")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SEEDS} seeds, {QUICK_OF_EACH_KIND} of each kind")
    options = parser.parse_args()
    seeds = QUICK_SEEDS if options.quick else options.seeds
    searched = spaces(QUICK_OF_EACH_KIND if options.quick else OF_EACH_KIND)
    for number, path in enumerate(sorted(options.data.glob("*.json.gz")) if options.data else []):
        searched += parts_of(load(path), number)
    found: dict[str, dict[str, dict[int, Ratio]]] = {}
    for space in searched:
        each = ratios(space, range(seeds))
        kind, name = (space.kind, space.name) if space.kind in KINDS else ("recorded", space.kind)
        found.setdefault(kind, {})[name] = each
        print(f"{name:<50}", *(f"{ratio.mean:5.2f}" for ratio in each.values()), flush=True)
    raw = {
        name: {"kind": kind, "ratios": {runs: list(ratio) for runs, ratio in each.items()}}
        for kind, of_kind in found.items()
        for name, each in of_kind.items()
    }
    again = suspects_again(searched, found, seeds)
    for (name, runs), ratio in again.items():
        raw[name].setdefault("other seeds", {})[runs] = list(ratio)
    return report(options.name, rows_of(found, again), raw, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
