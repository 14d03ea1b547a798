"""Run every benchmark, one after the other, and print one table: what `make bench` does.

    python bench/run_all.py [--quick] [--no-peers] [--spaces DIRECTORY]

Writes bench/results/summary.md beside the raw numbers, and the tables in docs/benchmarks.md and the README. A target
that is missed is printed; only a benchmark that breaks makes the exit status non-zero.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import tables as tables_of
from tables import HERE, RESULTS

# name, flags that make it shorter
BENCHMARKS = (
    ("hot_path", ["--rounds", "51"]),
    ("import_time", ["--runs", "15"]),
    ("store", ["--quick"]),
    ("leases", ["--quick"]),
    ("engine", ["--quick"]),
    ("pipeline", ["--quick"]),
    ("cli", ["--quick"]),
    ("report", ["--quick"]),
    ("agreement", ["--quick"]),
    ("shared", []),
    ("jax_trace", []),
    ("jax_hot_path", ["--rounds", "51"]),
    ("ejkernel_ops", ["--rounds", "11"]),
    ("first_prediction", ["--runs", "3"]),
    ("search", ["--quick"]),
)
WITH_PEERS = ("hot_path", "jax_trace", "jax_hot_path", "search")


def run(name: str, flags: list[str]) -> list[dict[str, object]] | None:
    """Run one benchmark, and return its table; None if it broke."""
    path = RESULTS / f"{name}.json"
    path.unlink(missing_ok=True)  # what an earlier run wrote must not pass for this one's
    print(f"\n== {name} ==", flush=True)
    subprocess.run([sys.executable, str(HERE / f"{name}.py"), *flags], check=False)
    return json.loads(path.read_text())["table"] if path.exists() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller books")
    parser.add_argument("--no-peers", action="store_true", help="without the packages that are only compared with")
    parser.add_argument("--spaces", type=Path, default=HERE / "spaces", help="recorded spaces, for bench/search.py")
    options = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    tables, broken = {}, []
    for name, shorter in BENCHMARKS:
        if name == "search" and not options.spaces.is_dir():
            print(f"\n== search ==\nleft out: there are no recorded spaces in {options.spaces}", flush=True)
            continue
        if name == "ejkernel_ops" and options.no_peers:
            continue
        peers = ["--no-peers"] if options.no_peers and name in WITH_PEERS else []
        where = ["--data", str(options.spaces)] if name == "search" else []
        table = run(name, [*(shorter if options.quick else []), *peers, *where])
        if table is None:
            broken.append(name)
        else:
            tables[name] = table
    if options.quick or options.no_peers:
        print(f"\n{tables_of.summary(tables)}")  # not what is to be kept
    else:
        tables_of.write(tables_of.read())
    missed = [f"{name}: {row['what']}" for name, rows in tables.items() for row in rows if not row["kept"]]
    print(f"\n{sum(map(len, tables.values()))} numbers; {len(missed)} targets missed")
    for line in missed:
        print(f"  missed   {line}")
    for name in broken:
        print(f"  broken   bench/{name}.py wrote no results")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
