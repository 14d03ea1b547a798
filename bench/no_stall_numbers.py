"""The arithmetic of bench/no_stall.py: numbers from the rows that its processes write, without a GPU or a clock.

A process writes a row, a line of JSON, after each second. So a run that is killed keeps what it has: see `read_rows`.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from array import array
from collections import Counter
from pathlib import Path

SLOW = 2.0  # times the fixed side's p99
BURSTS, BURST_S, BURST_FACTOR = 0.1, 0.05, 3.0  # part of the time, seconds, and times as many requests
TURN_S = 40.0  # in which each shape is popular once


def read_rows(path):
    """Return the rows of a process; the last line of one that was killed may be cut short."""
    rows = []
    for line in Path(path).read_text().splitlines() if Path(path).exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def read_numbers(path, name):
    """Return the numbers of a process under a name, in one list; of a killed one, those that are whole."""
    path = Path(f"{path}.{name}")
    found = array("d")
    if path.exists():
        raw = path.read_bytes()
        found.frombytes(raw[: len(raw) // found.itemsize * found.itemsize])
    return found.tolist()


def windows(ends_s, window_s, after_s):
    """Return the steps per second in each window that begins with the end of a step, from a time on."""
    kept = [end for end in ends_s if end >= after_s]
    rates, last = [], 0
    for first, end in enumerate(kept):
        while last < len(kept) and kept[last] < end + window_s:
            last += 1
        if last == len(kept):
            break
        rates.append((last - first) / window_s)
    return rates or [len(kept) / max(kept[-1] - after_s, 1e-9)]


def rate_at_end(ends_s, seconds=20):
    """Return the steps per second in the last seconds."""
    late = [end for end in ends_s if end >= ends_s[-1] - seconds]
    return (len(late) - 1) / max(late[-1] - late[0], 1e-9)


def per_second(ends_s):
    """Return the steps in each second."""
    counts = Counter(int(end) for end in ends_s)
    return [counts[second] for second in range(int(ends_s[-1]) + 1)]


def side_by_side(ends_s, beside_s, window=5):
    """Return the worst ratio of the steps of two sides in the same seconds, after the first steps of both.

    The sides take turns, so the same second of both is at about the same time, and a machine that slows down cancels.
    """
    ours, theirs = per_second(ends_s)[:-1], per_second(beside_s)[:-1]  # the last second is not whole
    first, last = int(max(ends_s[0], beside_s[0])) + 1, min(len(ours), len(theirs))
    starts = range(first, max(last - window, first) + 1)
    return min(sum(ours[at : at + window]) / max(sum(theirs[at : at + window]), 1) for at in starts)


def compare_training(ends):
    """Return the numbers that the sides allow, beside the fixed configuration and the offline tuning."""
    fixed, live, offline, theirs = (ends.get(side) for side in ("fixed", "live", "offline", "triton"))
    found = {}
    if fixed and live:
        usual = (len(fixed) - 1) / max(fixed[-1] - fixed[0], 1e-9)
        found |= {
            "training: first step, beside fixed": live[0] / fixed[0],
            "training: steps in the worst 5 s, beside fixed": min(windows(live, 5.0, live[1])) / usual,
            "training: the same of fixed itself": min(windows(fixed, 5.0, fixed[1])) / usual,
            "training: steps in the worst 5 s, beside fixed in the same 5 s": side_by_side(live, fixed),
            "training: steps in the last 20 s, beside fixed": rate_at_end(live) / rate_at_end(fixed),
        }
    if live and offline:
        found["training: steps in the last 20 s, beside offline"] = rate_at_end(live) / rate_at_end(offline)
    if fixed and theirs:
        found["training: first step of triton.autotune, beside fixed"] = theirs[0] / fixed[0]
    return found


def arrivals(shapes, rate, seed=1):
    """Yield when requests arrive and the number of the shape of each: in bursts, and each shape is popular in turn.

    Poisson with `rate` requests per second on average; a tenth of the time has three times as many.
    """
    pick = random.Random(seed)
    usual, now_s, burst, changes_s = rate / (1 + BURSTS * (BURST_FACTOR - 1)), 0.0, True, 0.0
    while True:
        if now_s >= changes_s:
            burst = not burst
            changes_s = now_s + pick.expovariate(1 / (BURST_S if burst else BURST_S * (1 / BURSTS - 1)))
        now_s += pick.expovariate(usual * (BURST_FACTOR if burst else 1))
        turn = 2 * math.pi * now_s / TURN_S
        weights = [math.exp(1.5 * math.sin(turn + 2 * math.pi * shape / shapes)) for shape in range(shapes)]
        yield now_s, pick.choices(range(shapes), weights)[0]


def collect_serving(paths, rows):
    """Return the numbers of a server from the files of its sides, and from the rows of the live one."""
    settled = {side: read_numbers(path, "latency") for side, path in paths.items()}
    fixed, live = settled["server-fixed"], settled["server-live"]
    if not (fixed and live and rows):
        return {}
    before = read_numbers(paths["server-live"], "latency-at-first")
    stalled = read_numbers(paths["server-live"], "stalled")
    tunings = [row["tuning"] for row in rows if row.get("tuning")]
    # A rollback begins another race, much later: it is no part of how long the first one took.
    decided = (each for each in tunings if each["sessions"] and each["decided"] == each["sessions"])
    first = next(decided, {"calls until decided": math.inf})
    return {
        **compare_serving({"fixed": fixed, "live": live}),
        "server: requests in 1,000 that stood still": 1000 * len(stalled) / (len(before) + len(live)),
        "server: calls until the last shape was decided": first["calls until decided"],
        "server: winners that were rolled back": tunings[-1]["rollbacks"],
    }


def compare_serving(latencies):
    """Return p99 of live tuning beside the fixed configuration's, and slow requests in 1,000."""

    def p99(values):
        return sorted(values)[int(0.99 * (len(values) - 1))]

    fixed, live = latencies["fixed"], latencies["live"]
    slow_s = SLOW * p99(fixed)
    return {
        "server: p99, beside fixed": p99(live) / p99(fixed),
        "server: median, beside fixed": statistics.median(live) / statistics.median(fixed),
        "server: slow requests in 1,000": 1000 * sum(each > slow_s for each in live) / len(live),
        "server: slow requests in 1,000, fixed": 1000 * sum(each > slow_s for each in fixed) / len(fixed),
    }


def limited_by(rows):
    """Return what held up live tuning until its last decision: the host's share, compilers, or rounds."""
    live = [row["tuning"] for row in rows if row.get("tuning")]
    undecided = [each for each in live if each["decided"] < each["sessions"]]
    if not undecided:
        return {"undecided for, s": 0}
    last = undecided[-1]
    return {
        "undecided for, s": len(undecided),
        "part of these seconds that the host has worked": sum(last["host"].values()) / max(len(undecided), 1),
        "to be compiled at the end": last["to compile"],
        "compiled and to be loaded at the end": last["to load"],
        "loaded and to be compared at the end": last["to compare"],
    }
