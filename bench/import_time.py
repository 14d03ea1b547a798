"""Measure `import tunebook` beside `import asyncio`: CPU time in fresh processes, in turn.

    python bench/import_time.py [--runs 21] [--explain]

Prints a table against the target, and writes bench/results/import_time.json. `--explain` lists the modules that the
first use of `@tunable` loads. The bytecode is compiled beforehand, as installers do, into a directory of its own: an
environment may forbid writing it beside the sources, and compiling takes as long again as importing.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile

from interleaved import Row, save, show

# Packages that a kernel library may load, and tunebook must not. None is part of the standard library.
FRAMEWORKS = (
    "numpy",
    "jax",
    "jaxlib",
    "torch",
    "triton",
    "cupy",
    "numba",
    "pyopencl",
    "scipy",
    "ml_dtypes",
    "pydantic",
)

# Public names load when they are first used, so the import alone is not all that a program pays.
CASES = {
    "asyncio": "import asyncio",
    "tunebook": "import tunebook",
    "first tunable": "import tunebook; tunebook.tunable",
}
TIMED = """
import sys, time
before = set(sys.modules)
start = time.process_time_ns()
{}
took = time.process_time_ns() - start
print(took, *{{name.partition(".")[0] for name in set(sys.modules) - before}})
"""


def python(bytecode: str, code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = bytecode
    line = [sys.executable, *flags, "-c", code]
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=True)


def measure(runs: int, bytecode: str) -> tuple[dict[str, list[float]], set[str]]:
    """Return milliseconds of CPU time, one number per process, and the packages that tunebook imported."""
    measured: dict[str, list[float]] = {name: [] for name in CASES}
    packages: set[str] = set()
    for run in range(-1, runs):  # the first round compiles
        for name, code in CASES.items():
            took_ns, *imported = python(bytecode, TIMED.format(code)).stdout.split()
            packages.update(imported)
            if run >= 0:
                measured[name].append(int(took_ns) / 1e6)
    return measured, packages


def explain(bytecode: str) -> None:
    """Print the modules that take the most time by themselves."""
    lines = python(bytecode, CASES["first tunable"], "-X", "importtime").stderr.splitlines()
    found = [re.match(r"import time:\s+(\d+) \|\s+(\d+) \|\s+(\S+)", line) for line in lines]
    own = sorted(((int(m[1]), m[3]) for m in found if m), reverse=True)
    print("\nmicroseconds per module, without its imports (tracing slows this run)")
    for us, name in own[:40]:
        print(f"{us:7d}  {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--explain", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tunebook-bytecode-") as bytecode:
        measured, packages = measure(options.runs, bytecode)
        report(measured, packages)
        if options.explain:
            explain(bytecode)
    return 0


def report(measured: dict[str, list[float]], packages: set[str]) -> None:
    median = {name: statistics.median(each) for name, each in measured.items()}
    least = {name: min(each) for name, each in measured.items()}
    frameworks = sorted(packages & set(FRAMEWORKS))
    rows = [
        Row(
            what="import tunebook, CPU time, beside import asyncio",
            measured=median["tunebook"] / median["asyncio"],
            unit="x",
            at_most=1,
        ),
        Row(what="the same, fastest run of each", measured=least["tunebook"] / least["asyncio"], unit="x", at_most=1),
        Row(what="import tunebook, CPU time", measured=median["tunebook"], unit="ms"),
        Row(what="import asyncio, CPU time", measured=median["asyncio"], unit="ms"),
        Row(what="import and first use of @tunable, CPU time", measured=median["first tunable"], unit="ms"),
        Row(
            what="import and first use of @tunable, beside import asyncio",
            measured=median["first tunable"] / median["asyncio"],
            unit="x",
        ),
        Row(what="frameworks imported by it", measured=len(frameworks), unit="packages", at_most=0),
    ]
    show(rows)
    if frameworks:
        print(f"imported: {', '.join(frameworks)}")
    raw = {"median_ms": median, "least_ms": least, "runs_ms": measured, "frameworks": frameworks}
    print(f"\nwritten to {save('import_time', rows, raw, ['tunebook'])}")


if __name__ == "__main__":
    sys.exit(main())
