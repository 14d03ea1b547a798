"""Measure single flight among processes: what is tuned twice, and how long a killed tuner is waited for.

    python bench/leases.py [--quick]

Prints a table against the targets of the design, and writes the raw numbers to bench/results/leases.json. The book is
a directory of records in a temporary directory (TMPDIR chooses the disk), and tuning a key is a sleep.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from lease_processes import kill_holders, tune_each_key_once
from tables import report


def table(once, killed):
    """What was measured, what it should be, and whether it is."""
    name = f"{once['processes']} processes x {once['keys']} keys"
    kills = f"{killed['kills']} kills of a holder"
    wrong = once["duplicates"] + once["overlaps"] + once["unfinished"] + once["failed"]
    recoveries_ms = killed["recoveries_ms"]
    median_ms, longest_ms = statistics.median(recoveries_ms), max(recoveries_ms)
    return [
        (f"{name}: tuned", f"{once['begun']}", f"{once['keys']}", once["begun"] == once["keys"]),
        (f"{name}: duplicates, overlaps, failures", f"{wrong}", "0", wrong == 0),
        (f"{name}: seconds", f"{once['seconds']:.2f}", "< 10", once["seconds"] < 10),
        (f"{name}: seconds with process start", f"{once['seconds_with_start']:.2f}", "", True),
        (f"{kills}: duplicates", f"{killed['duplicates']}", "0", killed["duplicates"] == 0),
        (f"{kills}: overlaps", f"{killed['overlaps']}", "0", killed["overlaps"] == 0),
        (f"{kills}: keys left without result", f"{killed['unfinished']}", "0", killed["unfinished"] == 0),
        (f"{kills}: takeover, median", f"{median_ms:.1f} ms", "", True),
        (f"{kills}: takeover, longest", f"{longest_ms:.1f} ms", "< 500 ms", longest_ms < 500),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="6 x 40 and 10 kills: three seconds instead of fifteen")
    quick = parser.parse_args().quick
    once = tune_each_key_once(*((6, 40) if quick else (16, 200)))
    killed = kill_holders(10 if quick else 100)
    rows = table(once, killed)
    return report("leases", rows, {"exactly_once": once, "kills": killed}, quick=quick)


if __name__ == "__main__":
    sys.exit(main())
