"""A program that is tuned while it runs, beside a fixed configuration, `triton.autotune`, and tuning ahead.

Needs a GPU, and fla-core in a folder: `make compat-packages` fills `.compat-packages`.

    python bench/no_stall.py --packages .compat-packages       everything: about 20 minutes, 12 of them Triton's tuner
    python bench/no_stall.py --only training --sides fixed,live,offline        six minutes, without Triton's tuner
    python bench/no_stall.py --only server                     the server alone: six minutes, without any package
    python bench/no_stall.py --collect --out FOLDER            the numbers of a run that was killed
    python bench/no_stall.py --dry-run [--cache FOLDER]        on a GPU that does not exist: what the host does is real

With `--cache`, all sides have one folder of compiled programs, and a second run finds all of them there: on a machine
with few cores, compilers would take most of the time.

Training: gated linear attention of fla, forward and backward, with three sequence lengths in turn. Each side runs in a
process of its own with empty caches. "fixed" has the first configuration of each kernel, "offline" is tuned before it
is measured. The processes take turns of a second, because the speed of a machine moves by 10 % within a minute; a
process counts the time of its own turns alone, and its compilers stop in between. Triton's tuner runs by itself.

Server: requests of eight shapes that arrive at their own times, in bursts, whether the last one is answered or not; the
shapes take turns in being popular. A process with a fixed configuration and one with live tuning get the same requests,
and take turns as above.

Each process writes a row after each second to FOLDER/no_stall-SIDE.jsonl: steps, how long the host and the GPU take for
one, how many candidates are compiled, loaded, compared and decided, and on what the host has worked. So a run that is
killed keeps what it has. `--out FOLDER` is bench/results unless told; results of other sides there are kept.
"""

# ruff: noqa: N803, SLF001 - constexprs are written in capitals in Triton; how far sessions are is nobody else's business

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import mmap
import operator
import os
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import tables
import torch
import triton
import triton.language as tl
from no_stall_numbers import arrivals, collect_serving, compare_training, limited_by, read_numbers, read_rows
from triton.runtime.autotuner import Autotuner

import tunebook as tb
from tunebook._tuning import live_session
from tunebook._tuning.host_share import HOST
from tunebook.adapters.triton import autotune, install

HERE = Path(__file__).parent
SLICE_S = 1.0
SIDES = ("fixed", "live", "offline", "triton")
SERVERS = ("server-fixed", "server-live")
ROWS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)  # of the tensors of requests
TARGETS = {
    "training: first step, beside fixed": "<= 1.3",
    "training: steps in the worst 5 s, beside fixed": ">= 0.95",
    "training: steps in the last 20 s, beside offline": ">= 0.99",
    "server: p99, beside fixed": "<= 1.01",
    "server: slow requests in 1,000": "<= 1",
    "server: requests in 1,000 that stood still": "<= 1",
    "server: calls until the last shape was decided": "<= 2000",
}
LIVE = tb.AutotunePolicy(cache_miss_fallback="incremental")
SERVER = tb.AutotunePolicy(cache_miss_fallback="incremental", calls_per_stall=1000)
GPU_TIMED_EVERY = 8  # steps: an event takes a microsecond


# ----------------------------------------------------------------------------------------------------- a kernel of ours


@triton.jit
def normalise(x_ptr, out_ptr, columns, count, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        part = tl.load(x_ptr + row * columns + start + at, start + at < columns, 0.0).to(tl.float32)
        total += part * part
    scale = 1 / tl.sqrt(tl.sum(total, 0) / columns + 1e-6)
    for start in range(0, columns, BLOCK):
        inside = start + at < columns
        part = tl.load(x_ptr + row * columns + start + at, inside, 0.0).to(tl.float32)
        tl.store(out_ptr + row * columns + start + at, part * scale, inside)


CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (256, 1024, 4096) for warps in (2, 4, 8)]


def rows(meta):
    return (meta["x_ptr"].shape[0],)


# -------------------------------------------------------------------------------------------------------- the training


def only_first_candidates():
    """Let `triton.autotune` have the first configuration of each kernel that is made from now on."""
    theirs = Autotuner.__init__

    def init(self, fn, arg_names, configs, *args, **kwargs):
        theirs(self, fn, arg_names, configs[:1] if configs else configs, *args, **kwargs)

    Autotuner.__init__ = init


def steps_of(options, device):
    """Return a training step per length."""
    lengths = [int(length) for length in options.lengths.split(",")]
    if not options.dry_run:
        from triton_library_ops import gated_linear_attention  # noqa: PLC0415 - it needs fla

        return [gated_linear_attention(T=length) for length in lengths]
    if importlib.util.find_spec("fla"):
        from triton_library_ops import CUDA, gated_linear_attention  # noqa: PLC0415 - as above

        CUDA["device"] = device  # what torch itself computes is small there
        return [gated_linear_attention(B=1, T=length // 32, H=1) for length in lengths]
    kernel = triton.autotune(CONFIGS, key=["columns"])(normalise)

    def step(columns):
        x = torch.randn(8, columns, device=device)
        kernel[rows](x, torch.empty_like(x), columns, x.shape[0])

    return [partial(step, columns) for columns in (256, 512, 1024)]


class Turns:
    """The turns of processes that share a file: whose turn it is, and then a byte per process that is still there."""

    def __init__(self, path, place):
        with Path(path).open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), 0)
        self._place, self._own_s, self._began_s = place, 0.0, None

    def own_s(self):
        """Return the seconds that this process has had."""
        return self._own_s + (0.0 if self._began_s is None else time.perf_counter() - self._began_s)

    @contextlib.contextmanager
    def turn(self):
        while self._shared[0] != self._place:
            time.sleep(5e-4)
        signal_children(signal.SIGCONT)
        self._began_s = time.perf_counter()
        yield
        self._own_s, self._began_s = self.own_s(), None
        signal_children(signal.SIGSTOP)
        self._pass_on()

    def _pass_on(self):
        count = len(self._shared) - 1
        following = [(self._place + 1 + i) % count for i in range(count)]
        self._shared[0] = next((place for place in following if self._shared[1 + place]), self._place)

    def close(self):
        """Leave: the others go on."""
        self._shared[1 + self._place] = 0
        time.sleep(0.1)  # another process may just have given its turn to this one
        if self._shared[0] == self._place:
            self._pass_on()
        signal_children(signal.SIGCONT)


def signal_children(number):
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                os.kill(int(folder.name), number)


def train(side, options, device, wait):
    """Run one side in this process, and write its rows: the end of each step in its own seconds, and more."""
    if side == "fixed":
        only_first_candidates()
    elif side != "triton":
        install(policy=LIVE if side == "live" else None)
    path, _, place = options.turns.rpartition(":")
    with contextlib.closing(Turns(path, int(place))) as turns:
        steps_in_turn(side, turns, options, device, wait)


def tuning():
    """Return how far the sessions of this process are, and how long its host has worked for them, by kind."""
    sessions = list(live_session._sessions)
    watches = [each.race.watch for each in sessions]
    return {
        "sessions": len(sessions),
        "decided": sum(each.is_finished for each in sessions),
        "candidates": sum(each.candidates for each in sessions),
        "not tried": sum(len(each.not_tried) for each in sessions),
        "to compile": sum(each.to_prepare[0] for each in sessions),
        "to load": sum(each.to_prepare[1] for each in sessions),
        "loaded": sum(each.loads for each in sessions),
        "to compare": sum(each.race.left - 1 for each in sessions if not each.is_finished),
        "launches timed": HOST.spent["timed launches"][0],
        "duels": sum(each.duels for each in watches),
        "calls until decided": max([each.race.decided_after or 0 for each in sessions], default=0),
        "rollbacks": sum(each.rollbacks for each in sessions),
        "host": {work: round(seconds, 4) for work, (_, seconds) in HOST.spent.items()},
    }


class Rows:
    """Writes a row after each second of a clock; `add` gets the numbers of its lists.

    Lists go to files of their own, as they are: to write 2,000 numbers as text would hold up the next request.
    """

    def __init__(self, path, clock_s):
        self._path, self._clock_s = Path(path), clock_s
        for old in self._path.parent.glob(f"{self._path.name}*"):
            old.unlink()
        self._second, self._lists = int(clock_s()), {}
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
        self._append({"facts": {**gpu, "versions": versions}})

    def _append(self, row):
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def add(self, **values):
        for name, value in values.items():
            self._lists.setdefault(name, array("d")).append(value)
        if int(self._clock_s()) > self._second:
            self.write()

    def write(self, **more):
        """Write what there is; `host_s`, `step_s` and `gpu_s` as their means."""
        row = {"second": self._second, "counts": {name: len(values) for name, values in self._lists.items()}, **more}
        for name, values in self._lists.items():
            if name.endswith("_s"):
                row[name] = sum(values) / len(values)
            else:
                with self._path.with_name(f"{self._path.name}.{name}").open("ab") as file:
                    values.tofile(file)
        self._append({**row, "tuning": tuning()})
        self._second, self._lists = int(self._clock_s()), {}


class GpuTime:
    """The time of a step on the GPU, of some steps, by events; nothing where there is no GPU."""

    def __init__(self, options):
        self._events = None if options.dry_run else [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def around(self, step, number):
        """Run a step; return whether it is timed."""
        if self._events is None or number % GPU_TIMED_EVERY:
            step()
            return False
        self._events[0].record()
        step()
        self._events[1].record()
        return True

    def seconds(self):
        """Return the time of the last step that was timed, which has ended."""
        return self._events[0].elapsed_time(self._events[1]) * 1e-3


def steps_in_turn(side, turns, options, device, wait):
    steps = steps_of(options, device)
    if side == "offline":
        with turns.turn():
            for step in steps:
                step()
            wait()
    HOST.use_clock(turns.own_s)  # what the host may spend is a part of this process's own time
    started_s, end_s, number, gpu = turns.own_s(), 0.0, 0, GpuTime(options)
    rows = Rows(options.rows, lambda: turns.own_s() - started_s)
    while not number or (end_s < options.seconds and number < options.steps):
        with turns.turn():
            until_s = turns.own_s() + SLICE_S
            while turns.own_s() < until_s and number < options.steps:
                began_s = turns.own_s()
                is_timed = gpu.around(steps[number % len(steps)], number)
                host_s = turns.own_s() - began_s
                wait()
                end_s, number = turns.own_s() - started_s, number + 1
                rows.add(ends=end_s, host_s=host_s, step_s=end_s + started_s - began_s)
                if is_timed:
                    rows.add(gpu_s=gpu.seconds())
    rows.write(states=list(map(str, live_session._sessions)))


# ---------------------------------------------------------------------------------------------------------- the server


def answers(side, device, wait):
    """Return a function that answers a request of a shape, by its number, and waits for the device."""
    live = autotune(CONFIGS, key=["columns", "count"], bucket=None, policy=SERVER, store=False)(normalise)
    made, first = [torch.randn(count, 4096, device=device) for count in ROWS], CONFIGS[0].all_kwargs()

    def answer(shape):
        x = made[shape]
        out = torch.empty_like(x)
        if side == "server-live":
            live[rows](x, out, x.shape[1], x.shape[0])
        else:
            normalise[(x.shape[0],)](x, out, x.shape[1], x.shape[0], **first)
        wait()

    return answer


def serve(side, options, device, wait):
    """Answer the requests of one side in this process, and write rows: latencies, and why requests stood still."""
    path, _, place = options.turns.rpartition(":")
    with contextlib.closing(Turns(path, int(place))) as turns:
        requests_in_turn(turns, options, answers(side, device, wait))


def requests_in_turn(turns, options, answer):
    HOST.use_clock(turns.own_s)
    written = Rows(options.rows, turns.own_s)
    coming = itertools.islice(arrivals(len(ROWS), options.rate), options.requests)
    following = next(coming, None)
    while following is not None and following[0] < options.server_seconds:
        with turns.turn():
            until_s = turns.own_s() + SLICE_S
            while following is not None and turns.own_s() < until_s:
                due_s, shape = following
                if due_s > turns.own_s():  # it comes at its own time, whether the last request is answered or not
                    time.sleep(max(min(due_s, until_s) - turns.own_s(), 0.0))
                    continue
                stalls = HOST.stalls
                answer(shape)
                latency_s = turns.own_s() - due_s
                written.add(**{"latency" if due_s >= options.settle else "latency-at-first": latency_s})
                if HOST.stalls > stalls:
                    written.add(stalled=latency_s)
                following = next(coming, None)
    written.write(states=list(map(str, live_session._sessions)))


# ----------------------------------------------------------------------------------------------------------- processes


def device_of(options, patches):
    """Return the torch device, and a function that waits for it; a dry run gets a GPU that does not exist."""
    if not options.dry_run:
        return "cuda", torch.cuda.synchronize
    import pretend_gpu  # noqa: PLC0415 - it takes parts of the tests

    torch.set_num_threads(1)
    return "cpu", pretend_gpu.install(patches)


def work(options):
    """Do the part of one process."""
    with contextlib.ExitStack() as patches:
        device, wait = device_of(options, patches)
        if options.side in SERVERS:
            serve(options.side, options, device, wait)
        else:
            train(options.side, options, device, wait)


def run_sides(sides, options):
    """Run sides in turn; return whether one has failed."""
    with tempfile.NamedTemporaryFile() as shared, ThreadPoolExecutor(len(sides)) as pool:
        shared.write(bytes([0, *[1] * len(sides)]))
        shared.flush()
        asked = [pool.submit(run_side, side, options, f"{shared.name}:{i}") for i, side in enumerate(sides)]
        return any(each.result() for each in asked)


def run_side(side, options, turns=""):
    """Run a side in a process with empty caches; return whether it has failed. The others go on."""
    with tempfile.TemporaryDirectory() as folder:
        places = [str(options.packages.absolute()), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, places)),
            "TRITON_CACHE_DIR": str(options.cache.absolute()) if options.cache else f"{folder}/triton",
            "TUNEBOOK_HOME": f"{folder}/book",
        }
        rows = ["--rows", str(rows_of(side, options).absolute())]
        command = [sys.executable, __file__, "--side", side, "--turns", turns, *rows, *options.passed_on]
        done = subprocess.run(command, env=environment, check=False)
    if done.returncode:
        print(f"{side}: ended with {done.returncode}")
    return done.returncode != 0


def rows_of(side, options):
    return options.out / f"no_stall-{side}.jsonl"


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, default=Path(".compat-packages"))
    parser.add_argument("--only", choices=("training", "server"))
    parser.add_argument("--sides", default=",".join(SIDES), help="of the training")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--cache", type=Path, help="a folder of compiled programs for all sides, instead of empty ones")
    parser.add_argument("--out", type=Path, help="the folder of the rows and the results")
    parser.add_argument("--collect", action="store_true", help="take the numbers from the rows in that folder")
    parser.add_argument(
        "--lengths", default="2048,3072,4096", help="of sequences; below these, the GPU waits for the host"
    )
    parser.add_argument("--seconds", type=float, default=90.0, help="of training, for each side")
    parser.add_argument("--steps", type=int, default=10**9, help="of training, at most")
    parser.add_argument("--server-seconds", type=float, default=180.0)
    parser.add_argument("--settle", type=float, default=60.0, help="seconds of the server that are not counted")
    parser.add_argument("--requests", type=int, default=10**9, help="of the server, at most")
    parser.add_argument("--rate", type=float, default=2000.0, help="requests per second")
    parser.add_argument("--side", choices=(*SIDES, *SERVERS), help=argparse.SUPPRESS)
    parser.add_argument("--turns", help=argparse.SUPPRESS)
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.out = options.out or (Path(tempfile.mkdtemp()) if options.dry_run else tables.RESULTS)
    options.passed_on = [*arguments, "--packages", str(options.packages.absolute())]
    return options


def publish(found, raw, facts, options):
    """Print the table and write it; return the exit status."""
    compare = {"<=": operator.le, ">=": operator.ge}
    # The targets are those of a GPU.
    targets = {} if options.dry_run else TARGETS
    rows = []
    for name, value in found.items():
        sign, _, bound = targets.get(name, "").partition(" ")
        rows.append((name, f"{value:.3f}", targets.get(name, ""), not bound or compare[sign](value, float(bound))))
    tables.RESULTS, name = options.out, "no_stall"
    if options.dry_run:
        name, facts = "no_stall_dry_run", {**facts, "gpu": "none: times are made up"}
    return tables.report(name, rows, {"measured": found, **raw}, quick=False, **facts)


def collect(options):
    """Take all numbers from the rows in a folder, also of sides that did not end; return the exit status."""
    rows = {side: read_rows(rows_of(side, options)) for side in (*SIDES, *SERVERS)}
    facts = next((each.pop(0)["facts"] for each in rows.values() if each), {})
    rows = {side: [row for row in each if "facts" not in row] for side, each in rows.items()}
    ends = {side: read_numbers(rows_of(side, options), "ends") for side in SIDES}
    found = compare_training({side: each for side, each in ends.items() if len(each) > 1})
    found |= collect_serving({side: rows_of(side, options) for side in SERVERS}, rows["server-live"])
    raw = {}
    for side in (side for side, each in rows.items() if each):
        raw |= {f"seconds, {side}": rows[side], f"held up, {side}": limited_by(rows[side])}
        raw |= {f"first step of {side}, s": ends[side][0]} if ends.get(side) else {}
        tell(side, rows[side])
    return publish(found, raw, facts, options) if found else 1


def tell(side, rows):
    """Print how far the sessions of a side were at the end, and on what its host worked."""
    last, limits = rows[-1]["tuning"], limited_by(rows)
    if last["sessions"]:
        counts = {what: count for what, count in last.items() if what != "host"}
        print(f"{side}:", ", ".join(f"{count} {what}" for what, count in counts.items()))
        for work, seconds in last["host"].items():
            print(f"{side}: the host spent {seconds:.3f} s on {work}")
        print(f"{side}: held up:", ", ".join(f"{what} {value:.3g}" for what, value in limits.items()))


def main(arguments):
    options = parse(arguments)
    if options.side:
        work(options)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    failed = False
    sides = [] if options.only == "server" else options.sides.split(",")
    for together in ([side for side in sides if side != "triton"], [side for side in sides if side == "triton"]):
        if together and not options.collect:
            failed |= run_sides(together, options)
    if options.only != "training" and not options.collect:
        failed |= run_sides(SERVERS, options)
    return collect(options) or int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
