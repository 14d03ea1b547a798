"""Recorded search spaces: reading them, replaying a tuner under their clock, and scoring it.

The score is that of the community's methodology for comparing such searches: 0 is random search, 1 is the optimum from
the first moment. The clock is what was recorded: compiling, checking, and all runs of a configuration, in turn.
"""

from __future__ import annotations

import gzip
import json
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import tunebook as tb

if TYPE_CHECKING:
    from pathlib import Path

# The budget ends where random search has covered this part of the way from the median to the optimum, and the score
# begins where it has covered the first hundredth. A tuner runs a tenth longer, so that the last moment is covered.
BEGIN, END, MARGIN = 0.01, 0.95, 0.10
MOMENTS = 1000
RANDOM_RUNS = 400
# A race lets a configuration go as soon as its fastest run of so many is this far behind the best. After one run that
# is far: the first may take 3.3 times the mean.
RACE = ((1, 3.0), (3, 0.25), (6, 0.10), (12, 0.05), (20, 0.03))


class Recorded(NamedTuple):
    """One kernel on one device: rows of configurations, their times in ms, and what measuring them cost in seconds."""

    kernel: str
    device: str
    space: tb.Space
    configs: list[tb.Config]
    row: dict[tb.Config, int]
    time_ms: np.ndarray
    cost_s: np.ndarray
    compile_s: np.ndarray
    samples_ms: list[np.ndarray]

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.device}"


class Clock(NamedTuple):
    """When a space is scored, and what random search has by then."""

    moments_s: np.ndarray
    budget_s: float
    baseline_ms: np.ndarray
    sorted_ms: np.ndarray


class Run(NamedTuple):
    """One replay: which rows were measured to the end, and when each was known."""

    rows: list[int]
    when_s: list[float]
    asked: int = 0
    thinking_s: float = 0.0


def read(path: Path) -> dict:
    """Return a cache file of Kernel Tuner's; one that a crash left without its closing brackets too."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    for cut, end in ((0, ""), (0, "}}"), (1, "}}")):
        try:
            return json.loads(text.rstrip()[: len(text.rstrip()) - cut] + end)
        except json.JSONDecodeError:
            continue
    raise ValueError(f"{path} is not a cache file of Kernel Tuner's")


def load(path: Path) -> Recorded:
    kernel, device = path.name.split(".")[0].rsplit("_", 1)
    document = read(path)
    names = document["tune_params_keys"]
    entries = list(document["cache"].values())
    used = {name: {entry[name] for entry in entries} for name in names}
    axes = {name: [v for v in document["tune_params"][name] if v in used[name]] for name in names}
    configs = [tb.Config(**{name: entry[name] for name in names}) for entry in entries]
    row = {config: i for i, config in enumerate(configs)}
    times = [entry.get("time") for entry in entries]
    valid = [isinstance(t, (int, float)) and math.isfinite(t) and t < 1e20 for t in times]
    samples = [_samples(entry) if ok else np.array([]) for entry, ok in zip(entries, valid, strict=True)]
    steps = ("compile", "verification", "framework")
    parts = np.array([[entry.get(f"{step}_time") or 0.0 for step in steps] for entry in entries])
    running = np.array([s.sum() for s in samples])
    return Recorded(
        kernel,
        device,
        tb.Space(**axes).where(row.__contains__),
        configs,
        row,
        np.array([t if ok else np.nan for t, ok in zip(times, valid, strict=True)]),
        (parts.sum(1) + running) / 1e3,
        parts.sum(1) / 1e3,
        samples,
    )


def _samples(entry: dict) -> np.ndarray:
    # Files from AMD cards hold pairs of a zero and the time.
    return np.array([max(t) if isinstance(t, list) else t for t in entry.get("times") or []], dtype=float)


def clock_of(recorded: Recorded, runs: int = RANDOM_RUNS) -> Clock:
    """Return the clock; the baseline is random search without replacement, at the true costs."""
    ordered = np.sort(recorded.time_ms[np.isfinite(recorded.time_ms)])
    usual_s = float(np.median(recorded.cost_s))
    begin, end = _evaluations(ordered, BEGIN), _evaluations(ordered, END)
    moments = np.linspace(begin * usual_s, max(end, begin + 2) * usual_s, MOMENTS)
    budget = float(moments[-1]) * (1 + MARGIN)
    rng = np.random.default_rng(12345)
    many = min(len(recorded.configs), int(3 * budget / usual_s) + 20)
    clock = Clock(moments, budget, moments, ordered)
    ranks = np.zeros(MOMENTS)
    for _ in range(runs):
        rows = rng.permutation(len(recorded.configs))[:many]
        ranks += ranks_over_time(recorded, clock, Run(rows.tolist(), np.cumsum(recorded.cost_s[rows]).tolist()))
    return clock._replace(baseline_ms=ordered[np.round(ranks / runs).astype(int)])


def _evaluations(ordered: np.ndarray, part: float) -> int:
    """Return after how many random configurations a part of the way from the median to the optimum is covered."""
    slowest_first = ordered[::-1]
    target = ordered[0] + (np.median(ordered) - ordered[0]) * (1 - part)
    at = int(np.argmax(slowest_first <= target))
    if slowest_first[at] == ordered[0]:
        at -= 1
    return math.ceil(at / (len(ordered) + 1 - at))


def ranks_over_time(recorded: Recorded, clock: Clock, run: Run) -> np.ndarray:
    """Return the rank of the best configuration known at each moment; before the first, that of the first."""
    values = recorded.time_ms[run.rows]
    known = np.isfinite(values)
    if not known.any():
        return np.full(MOMENTS, len(clock.sorted_ms) - 1.0)
    best = np.minimum.accumulate(values[known])
    at = np.searchsorted(np.array(run.when_s)[known], clock.moments_s, side="right") - 1
    return np.searchsorted(clock.sorted_ms, best[np.clip(at, 0, None)]).astype(float)


class Score(NamedTuple):
    score: float
    low: float
    high: float
    within: float  # the part of the runs that end within 1 % of the optimum
    runs: list[float]
    drawn: tuple[float, ...] = ()  # scores of runs drawn again from these, with replacement


def score(recorded: Recorded, clock: Clock, runs: list[Run], resamples: int = 400) -> Score:
    """Return the score of some runs, with its 95 % interval over them."""
    ranks = np.stack([ranks_over_time(recorded, clock, run) for run in runs])
    best = clock.sorted_ms[0]
    gap = clock.baseline_ms - best
    gap = np.where(gap > 0, gap, np.inf)

    def of(chosen: np.ndarray) -> float:
        curve = clock.sorted_ms[np.round(chosen.mean(0)).astype(int)]
        return float(((clock.baseline_ms - curve) / gap).mean())

    rng = np.random.default_rng([*recorded.name.encode()])  # spaces are drawn from one by one
    drawn = [of(ranks[rng.integers(0, len(runs), len(runs))]) for _ in range(resamples)]
    final = clock.sorted_ms[ranks[:, -1].astype(int)] / best
    return Score(
        of(ranks),
        *(float(q) for q in np.quantile(drawn, (0.025, 0.975))),
        float((final <= 1.01).mean()),
        [of(r[None]) for r in ranks],
        tuple(drawn),
    )
