"""Measure the book: how fast it answers, and what it loses under writers, kills and flipped bits.

    python bench/store.py [--quick]

Prints a table against the targets of the design, and writes the raw numbers to bench/results/store.json. All data is
made in a temporary directory (TMPDIR chooses the disk) and removed afterwards.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # rounds.py has its limit from there
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store_stress"))

from rounds import environment, lost_by_kills, lost_by_writers, read_while_hammered
from tables import report

from tunebook._base.errors import TunebookWarning
from tunebook.stores import DirectoryStore, PackStore, write_pack
from tunebook.testing import example_record

# Run in a fresh process, as a user's would be: nothing is warm but what the kernel has in its caches.
OPEN_AND_GET = """
import sys, time
from pathlib import Path
from tunebook.stores import DirectoryStore, PackStore
from tunebook.testing import example_record
began = time.perf_counter()
import sqlite3  # paid by the first pack of a process, and by its next ones not
loaded = time.perf_counter() - began
kind, path, key = sys.argv[1:]
problem = example_record(call_key=key).problem
began = time.perf_counter()
record = {"directory": DirectoryStore, "pack": PackStore}[kind](Path(path)).get(problem)
print(time.perf_counter() - began, loaded)
assert record.problem == problem
"""

# A library as its author ships it: the pack lies beside the code, and nothing announces it.
LIBRARY = """
import tunebook as tb

@tb.tunable(space=tb.Space(step=[1, 2, 4]), heuristic={"step": 1})
def scan(n, *, config):
    return n
"""
# The first call of a user who has no book yet: the pack is found, opened and asked, and its entry checked.
FIRST_CALL = """
import sqlite3, sys, time
sys.path.insert(0, sys.argv[1])
import shipped
began = time.perf_counter()
config = shipped.scan.config_for(int(sys.argv[2]))
print(time.perf_counter() - began)
assert config.step == 4
"""
WRITE_PACK = """
import sys
from pathlib import Path
import tunebook as tb
sys.path.insert(0, sys.argv[1])
import shipped
from tunebook._base.record_format import Head, Record
from tunebook.testing import example_record
kernel = shipped.scan.kernel
inv = kernel.call((0,), {})
head = dict(config={"step": 4}, checksum=kernel.checksum(inv), origin="tuned", environment=kernel.environment(inv))
problems = map(shipped.scan.problem, range(int(sys.argv[2])))
records = (Record(Head(problem=problem, **head), example_record().body) for problem in problems)
tb.write_pack(Path(sys.argv[1], "__tunebook__", "tuned.db"), records)
"""


def record_of(number: int):
    return example_record(call_key=str(number), config={"block_m": 64, "block_n": 128, "number": number})


def open_and_first_get(kind: str, path: Path, count: int, runs: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each run, and those that importing sqlite3 took before."""
    line = [sys.executable, "-c", OPEN_AND_GET, kind, str(path)]
    keys = [str(count * run // runs) for run in range(runs)]
    done = [subprocess.run([*line, key], env=environment(), capture_output=True, check=True) for key in keys]
    answered, loaded = zip(*(map(float, each.stdout.split()) for each in done), strict=True)
    return list(answered), list(loaded)


def seconds_of(call, problems) -> list[float]:
    seconds = []
    for problem in problems:
        began = time.perf_counter()
        call(problem)
        seconds.append(time.perf_counter() - began)
    return seconds


def measure_directories(scratch: Path, counts: list[int], runs: int) -> dict[str, object]:
    raw: dict[str, object] = {}
    for count in counts:
        root = scratch / f"book-{count}"
        store = DirectoryStore(root)
        store.put_many(map(record_of, range(count)))
        raw[f"open_and_first_get_s_at_{count}"], _ = open_and_first_get("directory", root, count, runs)
        known = [record_of(n * 7 % count).problem for n in range(2000)]
        unknown = [record_of(-1 - n).problem for n in range(2000)]
        raw[f"hit_s_at_{count}"] = seconds_of(store.get, known)
        raw[f"miss_s_at_{count}"] = seconds_of(store.get, unknown)
    return raw


def measure_puts(scratch: Path, puts: int) -> dict[str, object]:
    syncs = []

    def sync(descriptor: int) -> None:
        syncs.append(descriptor)
        os.fsync(descriptor)

    store = DirectoryStore(scratch / "puts", sync=sync)
    store.put(record_of(-1))  # makes the directories, whose syncs are paid once
    syncs.clear()
    seconds = seconds_of(store.put, map(record_of, range(puts)))
    return {"syncs_per_put": len(syncs) / puts, "put_s": seconds}


def measure_pack(scratch: Path, count: int, runs: int) -> dict[str, object]:
    path = scratch / "records.db"
    began = time.perf_counter()
    write_pack(path, map(record_of, range(count)))
    wrote_s = time.perf_counter() - began
    raw: dict[str, object] = {"pack_records": count, "pack_write_s": wrote_s, "pack_bytes": path.stat().st_size}
    raw["pack_open_and_get_s"], raw["sqlite3_import_s"] = open_and_first_get("pack", path, count, runs)
    store = PackStore(path)
    raw["pack_hit_s"] = seconds_of(store.get, [record_of(n * 7 % count).problem for n in range(2000)])
    return raw


def measure_shipped(scratch: Path, count: int, runs: int) -> dict[str, object]:
    """Return the seconds of the first call of a kernel in a fresh process, which a shipped pack answers."""
    folder = scratch / "library"
    folder.mkdir()
    (folder / "shipped.py").write_text(LIBRARY)
    variables = {**environment(), "TUNEBOOK_HOME": str(scratch / "nobody's book")}

    def run(code: str, number: int) -> str:
        line = [sys.executable, "-c", code, str(folder), str(number)]
        return subprocess.run(line, env=variables, capture_output=True, text=True, check=True).stdout

    run(WRITE_PACK, count)
    seconds = [float(run(FIRST_CALL, count * each // runs)) for each in range(runs)]
    return {"shipped_records": count, "shipped_first_call_s": seconds}


def measure_damage(scratch: Path) -> dict[str, object]:
    """Flip every bit of a record file and cut it at every length; count the answers that are wrong."""
    warnings.simplefilter("ignore", TunebookWarning)
    root = scratch / "damage"
    store = DirectoryStore(root)
    record = record_of(1)
    store.put(record)
    (path,) = (root / "v1" / "cpu").glob("*/*.json")
    data = record.to_bytes()
    wrong = tried = 0
    for position in range(len(data)):
        flipped = [data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :] for bit in range(8)]
        for content in (*flipped, data[:position]):
            path.write_bytes(content)
            wrong += store.get(record.problem) is not None
            tried += 1
    return {"damaged_files": tried, "damaged_wrong": wrong}


def measure_stress(scratch: Path, rounds: int, reads: int) -> dict[str, object]:
    seconds, wrong = read_while_hammered(scratch / "hammered", reads)
    acknowledged, lost = lost_by_kills(scratch / "killed", rounds)
    return {
        "hammered_read_s": seconds,
        "hammered_wrong": wrong,
        "writers_lost": lost_by_writers(scratch / "written"),
        "writers_lost_json": lost_by_writers(scratch / "written.json"),
        "kills": rounds,
        "kills_acknowledged": acknowledged,
        "kills_lost": lost,
    }


def percentile(seconds: list[float], percent: int) -> float:
    return sorted(seconds)[min(len(seconds) - 1, len(seconds) * percent // 100)]


def table(raw: dict, counts: list[int]) -> list[tuple[str, str, str, bool]]:
    """Return rows of what, measured, target, kept."""
    rows = []
    for count in counts:
        for name, unit, target in (("open_and_first_get", 1e3, 5), ("hit", 1e6, 60), ("miss", 1e6, 40)):
            value = statistics.median(raw[f"{name}_s_at_{count}"]) * unit
            sign = "ms" if unit == 1e3 else "us"
            what = f"{name.replace('_', ' ')} at {count:,} records"
            rows.append((what, f"{value:.3g} {sign}", f"< {target} {sign}", value < target))
    pack_ms = statistics.median(raw["pack_open_and_get_s"]) * 1e3
    import_ms = statistics.median(raw["sqlite3_import_s"]) * 1e3
    shipped_ms = statistics.median(raw["shipped_first_call_s"]) * 1e3
    shipped = f"first call of a library with a pack of {raw['shipped_records']:,} beside it, sqlite3 loaded"
    p99_ms = percentile(raw["hammered_read_s"], 99) * 1e3
    rows += [
        ("syncs per put", f"{raw['syncs_per_put']:.3g}", "<= 2", raw["syncs_per_put"] <= 2),
        ("reader p99, 4 writers hammering", f"{p99_ms:.3g} ms", "< 20 ms", p99_ms < 20),
        (f"pack of {raw['pack_records']:,}: open + get, sqlite3 loaded", f"{pack_ms:.3g} ms", "< 2 ms", pack_ms < 2),
        (shipped, f"{shipped_ms:.3g} ms", "< 5 ms", shipped_ms < 5),
        ("importing sqlite3, once per process that has packs", f"{import_ms:.3g} ms", "", True),
    ]
    for what, name in (
        ("torn records read meanwhile", "hammered_wrong"),
        ("lost of 8 processes x 50 puts", "writers_lost"),
        ("the same, one JSON file", "writers_lost_json"),
        (f"lost of {raw['kills_acknowledged']:,} acknowledged, {raw['kills']} x kill -9", "kills_lost"),
        (f"wrong values of {raw['damaged_files']:,} damaged files", "damaged_wrong"),
    ):
        rows.append((what, str(raw[name]), "0", raw[name] == 0))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller books and fewer rounds: a minute less")
    quick = parser.parse_args().quick
    counts = [10, 2_000] if quick else [10, 100_000]
    with tempfile.TemporaryDirectory(prefix="tunebook-bench-") as directory:
        scratch = Path(directory)
        raw = {
            **measure_directories(scratch, counts, runs=5 if quick else 15),
            **measure_puts(scratch, puts=20 if quick else 200),
            **measure_pack(scratch, count=20_000 if quick else 1_000_000, runs=5 if quick else 15),
            **measure_shipped(scratch, count=1_000 if quick else 10_000, runs=5 if quick else 15),
            **measure_damage(scratch),
            **measure_stress(scratch, rounds=5 if quick else 50, reads=500 if quick else 5_000),
        }
    rows = table(raw, counts)
    rounded = {name: _rounded(value) for name, value in raw.items()}
    return report("store", rows, rounded, quick=quick, sqlite=sqlite3.sqlite_version)


def _rounded(value: object) -> object:
    """Keep 100 samples at most, evenly spread, and no digits beyond 10 ns."""
    if not isinstance(value, list):
        return value
    step = max(1, len(value) // 100)
    return [round(seconds, 8) for seconds in sorted(value)[::step]]


if __name__ == "__main__":
    sys.exit(main())
