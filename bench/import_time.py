"""Measure `import tunebook` in fresh processes, apart from the start of the interpreter.

    python bench/import_time.py [--runs 21] [--explain]

Prints a table against the target, and writes bench/results/import_time.json. `--explain` lists what the time goes to.
The bytecode is compiled beforehand, as installers do, into a directory of its own: an environment may forbid to write
it beside the sources, and compiling takes as long again as importing.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

from interleaved import Row, save, show

# What a kernel library may have beside us, and must not have because of us. Packages of one's own choice, none of the
# standard library.
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

IMPORT = """
import sys, time
before = set(sys.modules)
cpu, wall = time.process_time_ns(), time.perf_counter_ns()
import tunebook
cpu, wall = time.process_time_ns() - cpu, time.perf_counter_ns() - wall
print(cpu, wall, *{name.partition(".")[0] for name in set(sys.modules) - before})
"""

NOTHING = "import time; print(time.process_time_ns())"  # since the process began: what the interpreter took to start


def python(bytecode: str, code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = bytecode
    line = [sys.executable, *flags, "-c", code]
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=True)


def measure(runs: int, bytecode: str) -> tuple[dict[str, list[float]], set[str]]:
    """Return milliseconds, one number per process, and the packages that were imported."""
    measured: dict[str, list[float]] = {name: [] for name in ("start cpu", "start wall", "import cpu", "import wall")}
    packages: set[str] = set()
    python(bytecode, "import tunebook")  # compiles
    for _ in range(runs):
        began = time.perf_counter_ns()
        started = python(bytecode, NOTHING).stdout
        measured["start wall"].append((time.perf_counter_ns() - began) / 1e6)
        measured["start cpu"].append(int(started) / 1e6)
        cpu, wall, *imported = python(bytecode, IMPORT).stdout.split()
        measured["import cpu"].append(int(cpu) / 1e6)
        measured["import wall"].append(int(wall) / 1e6)
        packages.update(imported)
    return measured, packages


def explain(bytecode: str) -> None:
    """Print the modules that take the most time by themselves."""
    lines = python(bytecode, "import tunebook", "-X", "importtime").stderr.splitlines()
    found = [re.match(r"import time:\s+(\d+) \|\s+(\d+) \|\s+(\S+)", line) for line in lines]
    own = sorted(((int(m[1]), m[3]) for m in found if m), reverse=True)
    print("\nmicroseconds by module, without what it imports (a tracing run: slower than the above)")
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
    ms = {name: statistics.median(each) for name, each in measured.items()}
    frameworks = sorted(packages & set(FRAMEWORKS))
    rows = [
        Row(what="import tunebook, CPU time", measured=ms["import cpu"], unit="ms", at_most=60),
        Row(what="import tunebook, wall time", measured=ms["import wall"], unit="ms", at_most=60),
        Row(what="frameworks imported by it", measured=len(frameworks), unit="packages", at_most=0),
        Row(what="interpreter start, apart, CPU time", measured=ms["start cpu"], unit="ms"),
        Row(what="interpreter start, apart, wall time", measured=ms["start wall"], unit="ms"),
    ]
    show(rows)
    if frameworks:
        print(f"imported: {', '.join(frameworks)}")
    raw = {"median_ms": ms, "runs_ms": measured, "frameworks": frameworks}
    print(f"\nwritten to {save('import_time', rows, raw, ['tunebook'])}")


if __name__ == "__main__":
    sys.exit(main())
