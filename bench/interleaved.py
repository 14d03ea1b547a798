"""How the benchmarks of the hot path measure: thread CPU time, interleaved rounds, medians; and how they report."""

from __future__ import annotations

import json
import platform
import random
import statistics
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

RESULTS = Path(__file__).with_name("results")

_ROUND_NS = 300_000  # long against the clock's 0.2 us, short against the drift of a shared machine
_WARM_CALLS = 200  # CPython specialises bytecode within the first few dozen


@dataclass(frozen=True, slots=True)
class Case:
    """Calls to time: one after the other, again and again. `around` is entered before a round, outside of the time."""

    name: str
    function: Callable[..., object]
    calls: Sequence[tuple[Any, ...]]
    by_name: Sequence[str] = ()  # names of the last arguments, which are then passed by keyword
    around: Callable[[], AbstractContextManager[object]] = nullcontext


def loop_for(case: Case) -> Callable[[int], int]:
    """Return a loop over the calls, with call sites of its own: CPython specialises a site for the function it meets.

    A loop shared by all cases would meet them all, be specialised for none, and flatter the slower ones.
    """
    namespace: dict[str, Any] = {"f": case.function, "repeat": repeat, "clock": time.thread_time_ns}
    lines = []
    for i, arguments in enumerate(case.calls):
        names = [f"x{i}_{j}" for j in range(len(arguments))]
        namespace.update(zip(names, arguments, strict=True))
        unnamed = len(names) - len(case.by_name)
        passed = names[:unnamed] + [f"{k}={v}" for k, v in zip(case.by_name, names[unnamed:], strict=True)]
        lines.append(f"f({', '.join(passed)})")
    parameters = ", ".join(f"{name}={name}" for name in namespace)  # locals: what surrounds the calls costs 12 ns
    body = "\n  ".join(lines)
    source = (
        f"def loop(n, {parameters}):\n start = clock()\n for _ in repeat(None, n):\n  {body}\n return clock() - start"
    )
    exec(source, namespace)
    return namespace["loop"]


def interleave(cases: Sequence[Case], rounds: int) -> dict[str, list[float]]:
    """Return nanoseconds per call, one number per round. Every round times every case once, in a new order."""
    loops = {case.name: loop_for(case) for case in cases}
    counts = {}
    for case in cases:
        with case.around():
            loops[case.name](_WARM_CALLS)
            took = loops[case.name](20) / 20
        counts[case.name] = max(5, int(_ROUND_NS / max(took, 1)))
    measured: dict[str, list[float]] = {case.name: [] for case in cases}
    order, shuffle = list(cases), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for case in order:
            n = counts[case.name]
            with case.around():
                loops[case.name](3 + n // 10)  # what `around` emptied, and what other cases drove out of the caches
                took = loops[case.name](n)
            measured[case.name].append(took / n / len(case.calls))
    return measured


def ratio(measured: Mapping[str, Sequence[float]], name: str, base: str) -> float:
    """Return how many times the base a case takes: the median over rounds, so that drift cancels within each."""
    pairs = zip(measured[name], measured[base], strict=True)
    return statistics.median(one / other for one, other in pairs)


# -------------------------------------------------------------------------------------------------------- reporting


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number against its target; without a target it is there to be read."""

    what: str
    measured: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def kept(self) -> bool:
        low = self.at_least is None or self.measured >= self.at_least
        return low and (self.at_most is None or self.measured <= self.at_most)

    @property
    def cells(self) -> tuple[str, str, str, str]:
        bounds = [
            f"{sign} {bound:g} {self.unit}"
            for sign, bound in (("<=", self.at_most), (">=", self.at_least))
            if bound is not None
        ]
        said = "" if not bounds else "yes" if self.kept else "NO"
        return self.what, f"{self.measured:.4g} {self.unit}", " ".join(bounds), said


def show(rows: Iterable[Row]) -> None:
    table = [("what", "measured", "target", "met"), *(row.cells for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(4)]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def save(name: str, rows: Sequence[Row], raw: Mapping[str, object], packages: Iterable[str]) -> Path:
    """Write rows and raw numbers to `results/<name>.json`, with what they were taken on."""
    content = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in packages},
        "cpu": cpu_model(),
        "table": [dict(zip(("what", "measured", "target", "kept"), (*r.cells[:3], r.kept), strict=True)) for r in rows],
        "raw": raw,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def _version(package: str) -> str | None:
    module = sys.modules.get(package)
    try:
        return getattr(module, "__version__", None) or metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
