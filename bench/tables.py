"""Results: written by each benchmark, and as tables for bench/results/summary.md, docs/benchmarks.md and the README."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PROGRAMS = RESULTS / "triton_programs.md"  # written by triton_programs.py
README = HERE.parent / "README.md"
PAGE = HERE.parent / "docs" / "benchmarks.md"
START, END = "<!-- numbers: written by make bench -->\n", "<!-- end of numbers -->"

HEADER = ("| | measured | target | kept |", "| --- | --- | --- | --- |")

Tables = dict[str, list[dict[str, Any]]]

# The numbers that the README keeps, in its own words.
FIRST = {
    "default / hand-written key of the same facts (with contiguity)": (
        "time of a tuned call with 3 numpy arrays and 2 scalars, whose key is made in C, compared with a key, a dict "
        "lookup and a call written by hand in Python"
    ),
    "hit at 100,000 records": "an answer from disk, in a book of 100,000 entries",
    "cv 10 %: tunings over 2 % slower, of 2000": (
        "choices more than 2 % slower than the best, of 2,000 tunings at 10 % noise"
    ),
    "cold: triton.autotune / tunebook": "tuning 48 Triton matmuls on an H200, times faster than `triton.autotune`",
    "a launch: tunebook adds": "a tuned Triton launch: host time that tunebook adds",
}

# The numbers at the top of docs/benchmarks.md, in its own words.
SHOWN = {
    "default / hand-written key of the same facts (with contiguity)": (
        "a tuned call: 3 numpy arrays and 2 scalars, beside a hand-written key, dict and call"
    ),
    "layout=False / hand-written key of the same facts": "the same without the memory layout in the key",
    "pure Python: default / hand-written key of the same facts (with contiguity)": "the first of these in pure Python",
    "default / hand-written key without contiguity": (
        "the default, beside a hand-written key that does not look at the layout"
    ),
    "two shapes in turn / one shape": "two shapes in turn, beside one shape",
    "warm hit, 12 arguments: 6 arrays + 6 scalars": "a tuned call with 6 arrays and 6 scalars",
    "warm hit, 12 arguments: all of them arrays": "a tuned call with 12 arrays",
    "an overlay elsewhere / plain warm hit": "while another thread has an overlay",
    "a listener / plain warm hit": "while somebody listens to every hit",
    "a new kernel object per call, jax arrays: ejkernel's executor / tunebook's Executor": (
        "an `Executor`, faster than ejkernel's, with a new kernel object in each call, on jax arrays"
    ),
    "ejkernel's executor with a new kernel object per call / a tunable function, the same jax arrays": (
        "a tuned function, which needs no kernel object, faster than that executor of ejkernel"
    ),
    "ejkernel's executor / tunebook, numpy arrays, default": (
        "a tuned function on numpy arrays, faster than ejkernel's executor with one kernel object, on jax arrays"
    ),
    "ejkernel's executor / tunebook, numpy arrays, layout=False": "the same without the memory layout in the key",
    "ejkernel's executor / tunebook, numpy arrays, key=('a', 'flag')": "the same where the author names what matters",
    "pure Python: ejkernel's executor / tunebook, numpy arrays, default": "on numpy arrays in pure Python",
    "ejkernel's executor / hand-written lookup, numpy arrays": "and a hand-written lookup",
    "import tunebook, CPU time, beside import asyncio": "`import tunebook`, CPU time, beside `import asyncio`",
    "import and first use of @tunable, beside import asyncio": "the same, with the first use of `@tunable`",
    "open and first get at 100,000 records": "open a book of 100,000 records, and first answer",
    "hit at 100,000 records": "an answer from disk",
    "miss at 100,000 records": "a miss on disk",
    "syncs per put": "syncs for a durable write",
    "reader p99, 4 writers hammering": "99 % of reads while 4 processes write",
    "pack of 1,000,000: open + get, sqlite3 loaded": "open a pack of 1,000,000 records, and first answer",
    "lost of 8 processes x 50 puts": "lost, of 8 processes x 50 writes",
    "wrong values of 5,652 damaged files": "wrong answers, of 5,652 damaged records",
    "16 processes x 200 keys: duplicates, overlaps, failures": "tuned twice, of 16 processes x 200 problems",
    "16 processes x 200 keys: seconds": "seconds for that",
    "100 kills of a holder: takeover, longest": "longest takeover, of 100 tuners killed with -9",
    "matmul in C, 66 configs: sequential / tunebook": "tuning 66 C matmuls, faster than 100 samples each",
    "matmul in C, 66 configs: regret, worst of 5": "how much slower than the best its winner is, worst of 5 tunings",
    "cv 1 %: worst of 5 problems, same config of 20": "same choice in 20 tunings, at 1 % noise, 10 % spikes, 5 % drift",
    "cv 5 %: worst of 5 problems, same config of 20": "the same at 5 % noise",
    "cv 10 %: worst of 5 problems, same config of 20": "the same at 10 % noise",
    "cv 10 %: tunings over 2 % slower, of 2000": "choices over 2 % slower than the best, of 2,000 at 10 % noise",
    "recorded samples, default budget: tunings over 2 % slower, of 2000": "the same with samples recorded on 3 GPUs",
    "kernels of 1 to 3 us that are alike: the heuristic wins": (
        "the heuristic wins among kernels of 1 to 3 us that are alike"
    ),
    "17 of 83 hang, crash or are wrong: told apart": "hanging, crashing or wrong, of 83 candidates: told apart",
    "17 of 83 hang, crash or are wrong: regret of the winner": "how much slower than the best the winner among them is",
    "one candidate added to 65: candidates that ran (it and the incumbent)": "candidates run when one is added to 65",
    "candidates tried while others compile, of all": "candidates tried while others are still compiled",
    "1,000 ranks, all miss: messages per rank": "messages of a rank until 1,000 agree on a problem",
    "1,000 ranks, one hits: messages per rank": "the same where one rank knows the answer",
    "1,000 ranks, all miss: CPU time per rank": "CPU time of a rank for that",
    "1,000 ranks, assert_agreement over 11 problems: messages per rank": (
        "messages of a rank to prove that all hold the same"
    ),
    "messages per rank, 1,000 ranks beside 100": "messages of a rank among 1,000, beside 100",
    "ranks with another configuration than the rest": "ranks that used another configuration",
}


def report(name: str, rows: Sequence[tuple[str, str, str, bool]], raw: object, *, quick: bool, **facts: str) -> int:
    """Print what was measured, write it to results/, and return the exit status: 1 if a target was missed."""
    wide = max(len(what) for what, *_ in rows)
    for what, measured, target, kept in rows:
        print(f"{what:<{wide}} {measured:>10}   {target:<9} {'' if kept else 'MISSED'}")
    content = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        **facts,
        "table": [{"what": w, "measured": m, "target": t, "kept": k} for w, m, t, k in rows],
        "raw": raw,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    return 0 if all(kept for *_, kept in rows) else 1


def read() -> Tables:
    """Return the tables of the last run."""
    return {path.stem: json.loads(path.read_text())["table"] for path in sorted(RESULTS.glob("*.json"))}


def summary(tables: Tables) -> str:
    lines = [*HEADER]
    for name, rows in tables.items():
        lines.append(f"| **{name.replace('_', ' ')}** | | | |")
        lines.extend(_line(row, row["what"]) for row in rows)
    if "triton_programs" in tables:
        lines += ["", "Programs of other libraries, a line for each:", "", PROGRAMS.read_text().rstrip("\n")]
    return "\n".join(lines) + "\n"


def for_readme(tables: Tables) -> str:
    """Return the README's part on numbers."""
    rows = _by_name(tables)
    return "\n".join([*HEADER, *(_line(_rounded(rows[what]), words) for what, words in FIRST.items())]) + "\n"


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose ratio has two digits after the point."""
    number, _, unit = row["measured"].partition(" ")
    return {**row, "measured": f"{float(number):.2f} x"} if unit == "x" else row


def for_page(tables: Tables) -> str:
    """Return the part of docs/benchmarks.md on the numbers that matter to a user."""
    rows = _by_name(tables)
    facts = json.loads((RESULTS / "hot_path.json").read_text())
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if name != "tunebook")
    taken = f"Taken {facts['date'][:10]} on 2 cores of an {facts['cpu']}, Python {facts['python']}, {versions}."
    lines = [f"{taken} `make bench` takes them again.", "", *HEADER]
    lines.extend(_line(rows[what], words) for what, words in SHOWN.items() if what in rows)
    return "\n".join([*lines, *_of_gpu(tables)]) + "\n"


def _by_name(tables: Tables) -> dict[str, dict[str, Any]]:
    return {row["what"]: row for table in tables.values() for row in table}


def _of_gpu(tables: Tables) -> list[str]:
    """Return the table of `gpu.py`, which was taken on another machine."""
    if "gpu" not in tables:
        return []
    facts = json.loads((RESULTS / "gpu.json").read_text())
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    taken = f"Triton kernels on an {facts['gpu']}, {facts['date'][:10]}, {versions}, driver {facts['driver']}."
    again = "`python bench/gpu.py` takes them again, on a machine that has one."
    return ["", taken, again, "", *HEADER, *_rows_of(tables["gpu"])]


def _rows_of(table: list[dict[str, Any]]) -> list[str]:
    return [_line(row, row["what"]) for row in table]


def _line(row: dict[str, Any], words: str) -> str:
    kept = "" if not row["target"] else "yes" if row["kept"] else "**no**"
    return f"| {words} | {row['measured']} | {row['target']} | {kept} |"


def split(path: Path) -> tuple[str, str, str]:
    """Return a page before its numbers, the numbers, and the rest."""
    before, _, rest = path.read_text().partition(START)
    numbers, _, after = rest.partition(END)
    return before + START, numbers, END + after


def write(tables: Tables) -> None:
    """Write the summary, and the numbers of the README and of docs/benchmarks.md."""
    (RESULTS / "summary.md").write_text(summary(tables))
    for path, numbers in ((README, for_readme(tables)), (PAGE, for_page(tables))):
        before, _, after = split(path)
        path.write_text(before + numbers + after)
