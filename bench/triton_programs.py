"""Programs of released libraries that nobody edited, on `triton.autotune` and on tunebook: results, and times.

Needs a GPU, and the libraries in a folder: `make compat-packages` fills `.compat-packages`. Each side of each program
runs in processes of its own, with caches that are empty at first. A process imports its library while the process
before it is measured; only one of them uses the GPU at a time:

    python bench/triton_programs.py --packages .compat-packages            all of them; Triton's side takes 15 minutes
    python bench/triton_programs.py --only gemlite,mlstm                   some of them; other results are kept
    python bench/triton_programs.py --only fla_gla --sides tunebook        one side; the other side's results are kept
    python bench/triton_programs.py --only second                          the second processes of fla_gla alone, in 2
                                                                           minutes: Triton tunes what we compiled
    python bench/triton_programs.py --tables                               the tables of earlier results, and the pages

Results go to bench/results/triton_programs.json after every process, so that a killed run keeps what it has. A side
that has results is not run again without `--again`.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import numpy as np
import tables
import torch
from gpu_kernels import seconds
from torch.profiler import ProfilerActivity, profile, supported_activities
from triton import knobs
from triton.runtime.autotuner import Autotuner
from triton_library_ops import PROGRAMS

import tunebook as tb
from tunebook._arrays.device_fingerprint import gpu_driver

HERE = Path(__file__).parent
NAME = "triton_programs"
SIDES = ("tunebook", "triton")
SECOND = {"tunebook": "tunebook, second process", "triton": "triton, second process"}
# A recording of gated linear attention at one problem, and how much faster the first step at another one must be. After
# another length nothing is compiled; another head size compiles everything anew, as without a recording.
RECORDED = {
    "another length": ({"B": 2, "T": 1024, "H": 8, "D": 128}, 14),
    "another head size": ({"B": 2, "T": 1024, "H": 8, "D": 64}, 8),
}
FLAGSHIP = "fla_gla"
AT_ONCE = 3  # processes: one is measured, the others import


# ------------------------------------------------------------------------------------------------------------ a process


class Notes:
    """The results of a process, in a file that is whole after every line."""

    def __init__(self, path):
        self._path, self._facts = Path(path), {}

    def add(self, **facts):
        self._facts |= facts
        self._path.write_text(json.dumps(self._facts))


def wake_up():
    """Load what every process loads once, whoever tunes: the context, and cuBLAS."""
    big = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (big @ big).sum().backward()
    torch.cuda.synchronize()


class Kernels:
    """Counts the autotuned kernels of a process: made, launched, and taken over."""

    def __init__(self):
        self.made, self.launched, self.taken, self.left = 0, set(), [], []
        self._run, init = Autotuner.run, Autotuner.__init__

        def count(autotuner, *args, **kwargs):
            init(autotuner, *args, **kwargs)
            self.made += 1

        def launch(autotuner, *args, **kwargs):
            self.launched.add(id(autotuner))
            return self._run(autotuner, *args, **kwargs)

        Autotuner.__init__, self._launch = count, launch

    def take_over(self):
        from tunebook.adapters.triton import install  # noqa: PLC0415 - not in a process that Triton tunes

        def note(what, kernel, why):
            (self.taken if what == "taken" else self.left).append([kernel, why])

        install(on_kernel=note)

    @contextlib.contextmanager
    def counted_launches(self):
        """Count the kernels that Triton tunes; not longer than needed, because a wrapped method costs time."""
        Autotuner.run = self._launch
        yield
        Autotuner.run = self._run

    def facts(self):
        launched = len(self.launched) or len(self.taken) + len(self.left)
        return {"made": self.made, "launched": launched, "taken over": len(self.taken), "left": self.left}


def launches_of(run):
    """Return the kernels that a function launches."""
    count = 0

    def note(_metadata):
        nonlocal count
        count += 1

    knobs.runtime.launch_enter_hook.add(note)
    try:
        took = seconds(run)
    finally:
        knobs.runtime.launch_enter_hook.remove(note)
    return count, took


def beside_each_other(step, rounds=12):
    """Return the host's time for a step by side, one number per round: tunebook and Triton in turn, in one process."""
    from tunebook.adapters.triton import install, uninstall  # noqa: PLC0415 - as above

    found = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES if number % 2 else SIDES[::-1]:
            # Triton finds the configurations that tunebook leaves in `kernel.cache`; tunebook finds them in its book.
            (install if side == "tunebook" else uninstall)()
            for _ in range(5):
                step()
            found[side].append(host_us(step, 25))
    return found


def host_us(step, count):
    """Return the median of the host's time for a step, which waits for nothing."""
    found = []
    for _ in range(count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return 1e6 * statistics.median(found)


def gpu_us(step, rounds=3, count=20):
    """Return the GPU's time for a step, the least of a few rounds, and whether the profiler or events took it."""
    sums = [profiled_us(step, count) for _ in range(rounds)] if cuda_profiler() else [0.0]
    if min(sums) > 0:
        return {"gpu_us": min(sums), "gpu_us_by": "profiler"}
    return {"gpu_us": min(between_events_us(step, count) for _ in range(rounds)), "gpu_us_by": "events"}


def cuda_profiler():
    return ProfilerActivity.CUDA in supported_activities()


def profiled_us(step, count):
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiled.key_averages()) / count


def between_events_us(step, count):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        step()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / count


def keep_samples(results, path):
    """Save up to 65,536 elements of each tensor, for a comparison with the other side."""
    kept = {}
    for name, tensor in results.items():
        flat = tensor.detach().reshape(-1)
        kept[name] = (list(tensor.shape), str(tensor.dtype), flat[:: max(1, flat.numel() // 65536)].float().cpu())
    torch.save(kept, path)


@contextlib.contextmanager
def turn(path):
    """Wait for the turn of this process, and keep it until the end of the block."""
    with Path(path).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def child(options):
    """Run one program on one tuner, and note its times."""
    notes = Notes(options.notes)
    wake_up()
    kernels = Kernels()
    if options.tuner == "tunebook":
        kernels.take_over()
    program = PROGRAMS[options.child]
    sizes = json.loads(options.sizes)
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - stk draws its masks from this one
    start = time.perf_counter()
    step = program.make(**sizes)
    notes.add(import_s=time.perf_counter() - start)
    with turn(options.turn):
        if options.record:
            record(step, options.record, notes)
        elif options.second:
            second_process(step, options, notes)
        else:
            first_process(step, options, notes, kernels)


def first_process(step, options, notes, kernels):
    results, program = {}, PROGRAMS[options.child]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", tb.TunebookWarning)
        with kernels.counted_launches() if options.tuner == "triton" else contextlib.nullcontext():
            notes.add(first_s=seconds(lambda: results.update(step())))
    said = [str(each.message) for each in told if issubclass(each.category, tb.TunebookWarning)]
    notes.add(kernels=kernels.facts(), warnings=said)
    keep_samples(results, options.samples)
    if program.other and not options.brief:
        torch.manual_seed(0)
        notes.add(other_s=seconds(program.make(**program.other)))
    for _ in range(5):
        step()
    notes.add(**gpu_us(step), done=True)


def second_process(step, options, notes):
    launches, first_s = launches_of(step)
    usual, _ = launches_of(step)
    notes.add(first_s=first_s, benchmark_launches=launches - usual, done=True)
    if options.tuner == "tunebook":
        notes.add(host_us=beside_each_other(step))


def record(step, path, notes):
    """Record the launches of a step, which tunes nothing."""
    with tb.record() as calls:
        step()
    calls.save(path)
    notes.add(recorded=len(calls), done=True)


# ------------------------------------------------------------------------------------------------------------ the runs


class Run:
    """Runs the processes that were asked for, and keeps results."""

    def __init__(self, options):
        self._options = options
        self.raw = earlier().get("raw", {})
        self._saving = threading.Lock()
        self._work = Path(options.work).resolve()
        self._work.mkdir(parents=True, exist_ok=True)

    def process(self, name, side, place, *, sizes=None, second=False, brief=False, record=None, caches="caches"):
        """Run one program in a new process, and return its notes. `brief` leaves other sizes out."""
        place.mkdir(parents=True, exist_ok=True)
        notes = place / f"notes {time.monotonic_ns()}.json"
        samples = self._work / f"{name} {side}{' second' if second else ''}.pt"
        command = [sys.executable, __file__, "--child", name, "--tuner", side, "--notes", str(notes)]
        command += ["--sizes", json.dumps(sizes or {}), "--samples", str(samples)]
        command += ["--turn", str(self._work / "turn"), *["--second"] * second, *["--brief"] * bool(brief or sizes)]
        command += ["--record", str(record)] if record else []
        failed = self._wait(command, self.environment(place, PROGRAMS[name], caches))
        found = json.loads(notes.read_text()) if notes.exists() else {}
        return found if failed is None else {**found, "failed": failed}

    def environment(self, place, program, caches):
        own = [str(HERE), str(HERE.parent / "src"), str(Path(self._options.packages).resolve())]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*own, os.environ.get("PYTHONPATH", "")]),
            "TRITON_CACHE_DIR": str(place / caches / "triton"),
            "TUNEBOOK_HOME": str(place / "book"),
            "TRITON_CACHE_AUTOTUNING": "1",
            "HOME": str(place),  # some libraries keep a cache there
            **program.environment,
        }

    def _wait(self, command, environment):
        """Run a command; return None, or why it failed."""
        try:
            done = subprocess.run(
                command, env=environment, timeout=self._options.limit, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            return f"over {self._options.limit:g} s"
        if self._options.verbose:
            print(done.stdout, done.stderr, file=sys.stderr)
        return None if done.returncode == 0 else f"exit status {done.returncode}: {done.stderr[-1500:]}"

    def side(self, name, side):
        """Run one side of a program: a process with empty caches, and a second one."""
        with tempfile.TemporaryDirectory() as place:
            for key, second in ((side, False), (SECOND[side], True)):
                found = self.process(name, side, Path(place), second=second)
                self.save(name, key, found)
                if "failed" in found and "first_s" not in found:
                    break
        self.compare(name)

    def second(self):
        """Run the second processes of gated linear attention, whose programs tunebook has compiled for both."""
        with tempfile.TemporaryDirectory() as place:
            for side in SIDES:
                self.process(FLAGSHIP, side, Path(place), brief=True)
            for side in SIDES:
                self.save(FLAGSHIP, SECOND[side], self.process(FLAGSHIP, side, Path(place), second=True))

    def recorded(self):
        """Record gated linear attention at other problems, tune these, and take the first step at the usual one."""
        for what, (sizes, _) in RECORDED.items():
            if what in self.raw.get(FLAGSHIP, {}) and not self._options.again:
                continue
            with tempfile.TemporaryDirectory() as folder:
                place = Path(folder)
                calls = place / "calls.json"
                found = self.process(FLAGSHIP, "tunebook", place, sizes=sizes, record=calls)
                if "failed" not in found:
                    recorded, start = found["recorded"], time.perf_counter()
                    failed = self.tune(calls, place)
                    tune_s = time.perf_counter() - start
                    # Programs of the other problem are of no use here: they are compiled for their own sizes.
                    found = self.process(FLAGSHIP, "tunebook", place, brief=True, caches="new caches")
                    found |= {"recorded": recorded, "tune_s": tune_s, **({"failed": failed} if failed else {})}
            self.save(FLAGSHIP, what, found)

    def tune(self, calls, place):
        command = [sys.executable, "-m", "tunebook", "tune", str(calls)]
        return self._wait(command, self.environment(place, PROGRAMS[FLAGSHIP], "caches"))

    def compare(self, name):
        """Compare the results of both sides, where both have run."""
        paths = [self._work / f"{name} {side}.pt" for side in SIDES]
        if not all(path.exists() for path in paths):
            return
        ours, theirs = (torch.load(path) for path in paths)
        errors = {}
        for key, (shape, dtype, expected) in theirs.items():
            other = ours[key]
            alike = other[:2] == (shape, dtype)
            errors[key] = float((other[2] - expected).norm() / (expected.norm() + 1e-12)) if alike else "another shape"
        worst = max((e for e in errors.values() if not isinstance(e, str)), default=0.0)
        alike = not any(isinstance(e, str) for e in errors.values()) and worst <= PROGRAMS[name].tolerance
        self.save(name, "results", {"errors": errors, "alike": alike})

    def save(self, name, key, found):
        """Keep a result, write all of them, and say what is new."""
        with self._saving:
            self.raw.setdefault(name, {})[key] = found
            print(f"{name}, {key}: {json.dumps({**found, 'kernels': None})[:2000]}", flush=True)
            with contextlib.redirect_stdout(io.StringIO()):  # the table is printed at the end
                publish(self.raw)


def earlier():
    """Return the content of the file of results, or nothing."""
    path = tables.RESULTS / f"{NAME}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def publish(raw):
    """Write results and tables; return the exit status."""
    known = facts()
    status = tables.report(NAME, table(raw), raw, quick=False, **known)
    tables.PROGRAMS.write_text(f"{taken_on(known)}\n\n{page(raw)}")
    return status


def taken_on(known):
    versions, date = known["versions"], known.get("date", datetime.now(UTC).isoformat())
    return (
        f"Taken on an {known['gpu']}, {date[:10]}, with torch {versions['torch']}, Triton {versions['triton']} and "
        "empty caches, by `bench/triton_programs.py`:"
    )


def facts():
    """Return what the numbers were taken on; a machine without a GPU keeps what was said."""
    before = earlier()
    if not torch.cuda.is_available() and before:
        return {key: before[key] for key in ("date", "python", "machine", "gpu", "driver", "versions") if key in before}
    versions = {}
    for package in ["torch", "triton", *sorted({program.package for program in PROGRAMS.values()})]:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = before.get("versions", {}).get(package, "not installed")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "driver": gpu_driver().get("driver", "unknown"), "versions": versions}


# ----------------------------------------------------------------------------------------------------------- the tables


def ratio(part, over, under, key="first_s"):
    """Return the ratio of two times, or None where one is not there."""
    above, below = part.get(over, {}).get(key), part.get(under, {}).get(key)
    return above / below if above and below else None


def row(what, value, target, kept, unit="x"):
    if value is None:
        return (what, "not measured", target, False)
    return (what, f"{value:.3g} {unit}".strip(), target, kept(value))


def table(raw):
    """Return the rows with targets."""
    part = raw.get(FLAGSHIP, {})
    ours, theirs = SIDES
    rows = [
        row("fla, gated linear attention: first step, triton.autotune / tunebook",
            ratio(part, theirs, ours), ">= 10 x", lambda x: x >= 10),
        row("the same at another head size", ratio(part, theirs, ours, "other_s"), ">= 8 x", lambda x: x >= 8),
        row("second process, tunebook / triton.autotune with its cache",
            ratio(part, SECOND[ours], SECOND[theirs]), "<= 1 x", lambda x: x <= 1),
        row("host time per step, tunebook / triton.autotune", host_ratio(part), "<= 1 x", lambda x: x <= 1),
        row("GPU time per step, tunebook / triton.autotune",
            ratio(part, ours, theirs, "gpu_us"), "<= 1.01 x", lambda x: x <= 1.01),
    ]  # fmt: skip
    worst = max((ratio(each, ours, theirs, "gpu_us") or 0 for each in raw.values()), default=None)
    rows.append(row("the same, the largest of all programs", worst, "<= 1.05 x", lambda x: x <= 1.05))
    first = part.get(theirs, {}).get("first_s")
    for what, (_, least) in RECORDED.items():
        took = part.get(what, {}).get("first_s")
        rows.append(
            row(f"first step after tuning a recording of {what}", first / took if first and took else None,
                f">= {least} x", lambda x, least=least: x >= least)
        )  # fmt: skip
    return rows + totals(raw)


def host_ratio(part):
    """Return the host's time on tunebook beside Triton's: the median of the ratios within a round."""
    times = part.get(SECOND["tunebook"], {}).get("host_us")
    if not isinstance(times, dict):
        return None
    return statistics.median(ours / theirs for ours, theirs in zip(*(times[side] for side in SIDES), strict=True))


def totals(raw):
    ran = [name for name in PROGRAMS if all(raw.get(name, {}).get(side, {}).get("done") for side in SIDES)]
    same = [name for name in ran if raw[name].get("results", {}).get("alike")]
    kernels = [raw[name]["tunebook"]["kernels"] for name in ran]
    taken, launched = (sum(k[key] for k in kernels) for key in ("taken over", "launched"))
    again = sum(raw[name].get(SECOND["tunebook"], {}).get("benchmark_launches", 0) for name in ran)
    packages = {PROGRAMS[name].package for name in ran}
    every = {program.package for program in PROGRAMS.values()}
    return [
        ("packages that ran on both tuners", f"{len(packages)} of {len(every)}", ">= 10", len(packages) >= 10),
        ("programs with the same results", f"{len(same)} of {len(PROGRAMS)}", "all", len(same) == len(PROGRAMS)),
        ("autotuned kernels that were launched and taken over", f"{taken} of {launched}", "all", 0 < taken == launched),
        ("launches for benchmarks in the second process", f"{again}", "0", again == 0),
    ]


def page(raw):
    """Return the table for the documentation: a line per program."""
    columns = [
        "library", "operation", "kernels", "first step, s: Triton", "tunebook", "", "second process, s: Triton, cached",
        "tunebook", "host, tunebook / Triton", "GPU, us: Triton", "tunebook", "same results",
    ]  # fmt: skip
    rules = ["---", "---", *["---:"] * 9, "---"]
    lines = [f"| {' | '.join(line)} |" for line in (columns, rules)]
    for name, program in PROGRAMS.items():
        part = raw.get(name)
        if part:
            lines.append(f"| {' | '.join(cells(program, part))} |")
    return "\n".join(lines) + "\n"


def cells(program, part):
    ours, theirs = SIDES
    operation = program.make.__name__.replace("_", " ") + ("" if program.backward else ", forward only")
    kernels = part.get(ours, {}).get("kernels", {}).get("taken over", "")
    faster, host = ratio(part, theirs, ours), host_ratio(part)
    same = {True: "yes", False: "**no**", None: ""}[part.get("results", {}).get("alike")]
    return [
        program.package, operation, str(kernels), number(part.get(theirs, {}), "first_s", 1),
        number(part.get(ours, {}), "first_s", 1), f"{faster:.1f} x" if faster else "",
        number(part.get(SECOND[theirs], {}), "first_s", 2), number(part.get(SECOND[ours], {}), "first_s", 2),
        f"{host:.2f} x" if host else "", number(part.get(theirs, {}), "gpu_us", 0),
        number(part.get(ours, {}), "gpu_us", 0), same,
    ]  # fmt: skip


def number(notes, key, digits):
    if key in notes:
        return f"{notes[key]:,.{digits}f}"
    return notes.get("failed", "").partition(":")[0]


# ------------------------------------------------------------------------------------------------------------ arguments


def parsed():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", default=HERE.parent / ".compat-packages", help="the folder with the libraries")
    parser.add_argument("--only", default="", help="programs, e.g. fla_gla,gemlite,recorded,second")
    parser.add_argument("--sides", default=",".join(SIDES), help="tunebook, triton, or both")
    parser.add_argument("--limit", type=float, default=420, help="seconds that one process may take")
    parser.add_argument("--again", action="store_true", help="run again what has results")
    parser.add_argument("--work", default=HERE.parent / ".compat-work", help="where results are kept for comparison")
    parser.add_argument("--tables", action="store_true", help="write the tables of earlier results, and run nothing")
    parser.add_argument("--verbose", action="store_true", help="print what the processes print")
    for name in ("child", "tuner", "notes", "samples", "record", "turn"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", default="{}", help=argparse.SUPPRESS)
    parser.add_argument("--second", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--brief", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = parsed()
    if options.child:
        child(options)
        return 0
    names = options.only.split(",") if options.only else [*PROGRAMS, "recorded"]
    unknown = set(names) - {*PROGRAMS, "recorded", "second"}
    if unknown:
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(PROGRAMS)}, recorded, second")
    sys.path.append(str(options.packages))  # the versions are read there
    run = Run(options)
    if options.tables:
        status = publish(run.raw)
        tables.write(tables.read())
        return status
    for name in ("second", "recorded"):
        if name in names:
            getattr(run, name)()
    wanted = [
        (name, side) for name in names if name in PROGRAMS for side in options.sides.split(",")
        if options.again or not run.raw.get(name, {}).get(SECOND[side], {}).get("done")
    ]  # fmt: skip
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda each: run.side(*each), wanted))
    return publish(run.raw)


if __name__ == "__main__":
    sys.exit(main())
