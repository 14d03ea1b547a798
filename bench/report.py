"""Measure a report on a large book: how long it takes, and how large the page is.

    python bench/report.py [--quick]

Makes a book of 100,000 entries, each with four measured candidates, as a pack and as a directory; prints a table
against the targets, and writes the raw numbers to bench/results/report.json. All is made in a temporary directory and
removed afterwards.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from tables import report

from tunebook._base.config_codec import fingerprint_of
from tunebook._base.record_format import Body, Head, Record
from tunebook._base.vocabulary import Failure, Measurement, Problem
from tunebook.stores import DirectoryStore, write_pack

CANDIDATES = 4
KERNELS, DEVICES = 40, ("cuda:NVIDIA H200:sm_90", "cuda:NVIDIA A100-SXM4-80GB:sm_80", "cpu:AMD EPYC 9654")
CODE, ENVIRONMENT = "184ab73916107b557bf99ad768f16381", '{"python":"cpython 3.11","torch":"2.9.1","triton":"3.6.0"}'
CONFIGS = [
    {"$": "custom", "t": "tunebook.Config", "v": {"block_m": m, "block_n": n, "stages": s, "warps": w}}
    for m in (32, 64, 128)
    for n in (32, 64, 128)
    for s in (2, 3, 4)
    for w in (4, 8)
]
FINGERPRINTS = [fingerprint_of(config) for config in CONFIGS]
# In a process of its own, as a user's would be.
MAKE = """
import resource, sys, time
from tunebook._report import report
began = time.perf_counter()
made = report(sys.argv[1], sys.argv[2])
took = time.perf_counter() - began
print(took, time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, len(made.model.entries))
"""


def candidate(rng: random.Random, choice: int, when: float, base_s: float) -> Measurement:
    failure = None
    samples: tuple[float, ...] = ()
    if rng.random() < 0.05:
        failure = Failure(
            "compile", f"out of resource: shared memory, required {rng.randrange(10) * 16384}", when + 6e5
        )
    else:
        typical = base_s * (1 + choice % 7 * 0.2)
        samples = tuple(round(typical * rng.lognormvariate(0.0, 0.02), 9) for _ in range(5))
    return Measurement(
        config=CONFIGS[choice],
        fingerprint=FINGERPRINTS[choice],
        code=CODE,
        policy="device-events/race/warmup=1/forward",
        environment=ENVIRONMENT,
        samples_s=samples,
        failure=failure,
        compile_s=round(rng.uniform(0.2, 2.0), 3),
        when=when,
    )


def record_of(number: int) -> Record:
    rng = random.Random(number)
    shape = [1 << rng.randrange(6, 14), number, 1 << rng.randrange(6, 14)]
    arrays = [f'"{name}":{{"$array":["torch","float16",{shape},"C","cuda"]}}' for name in ("a", "b")]
    problem = Problem(
        DEVICES[number // KERNELS % len(DEVICES)],
        f"library.kernel_{number % KERNELS}@v1",
        f'{{{",".join(arrays)},"causal":true}}'.replace(" ", ""),
    )
    when = 1.79e9 + 60 * number
    chosen = rng.sample(range(len(CONFIGS)), CANDIDATES)
    measured = [candidate(rng, c, when + at, 1e-6 * (1 + number % 1000)) for at, c in enumerate(chosen)]
    working = [m for m in measured if m.failure is None] or measured
    winner = min(working, key=lambda m: m.samples_s)
    head = Head(
        problem=problem, config=winner.config, checksum=CODE, origin="tuned", environment=ENVIRONMENT, generation=1
    )
    facts = {"when": when + 8, "host": "node", "seconds": 8.0, "waiting_s": 3.0, "ran": CANDIDATES, "complete": True}
    facts |= {"winner": winner.fingerprint, "rule": "fastest", "default": working[-1].fingerprint}
    failed = sum(m.failure is not None for m in measured)
    facts["found"] = {
        "tried": CANDIDATES,
        "failed": {"compile": failed} if failed else {},
        "compile_s": sum(m.compile_s for m in measured),
        "best_s": min(winner.samples_s, default=0.0),
        "default_s": min(working[-1].samples_s, default=0.0),
    }
    return Record(head, Body(measurements=tuple(measured), provenance=facts))


def measure(book: Path, page: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", MAKE, str(book), str(page)], capture_output=True, text=True, check=True
    )
    seconds, cpu_s, memory_bytes, entries = map(float, done.stdout.split())
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "memory_bytes": memory_bytes,
        "entries": entries,
        "page_bytes": page.stat().st_size,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the entries")
    quick = parser.parse_args().quick
    entries = 10_000 if quick else 100_000
    with tempfile.TemporaryDirectory(prefix="tunebook-bench-") as directory:
        scratch = Path(directory)
        write_pack(scratch / "book.db", map(record_of, range(entries)))
        DirectoryStore(scratch / "book").put_many(map(record_of, range(entries)))
        raw = {kind: measure(scratch / kind, scratch / "report.html") for kind in ("book.db", "book")}
    assert all(each["entries"] == entries for each in raw.values())
    rows = []
    for kind, name in (("book.db", "pack"), ("book", "directory")):
        seconds, size = raw[kind]["seconds"], raw[kind]["page_bytes"] / 1e6
        rows.append((f"report on a {name} of {entries:,} entries", f"{seconds:.1f} s", "< 10 s", seconds < 10))
        rows.append((f"its page, {name}", f"{size:.2f} MB", "< 10 MB", size < 10))
    return report("report", rows, raw, quick=quick, candidates_per_entry=str(CANDIDATES))


if __name__ == "__main__":
    sys.exit(main())
