"""A program that is tuned while it runs, beside a fixed configuration, `triton.autotune`, and tuning ahead.

Needs a GPU, and fla-core in a folder: `make compat-packages` fills `.compat-packages`.

    python bench/no_stall.py --packages .compat-packages       everything: about 20 minutes, 12 of them Triton's tuner
    python bench/no_stall.py --sides fixed,live,offline        without Triton's tuner; other results are kept
    python bench/no_stall.py --only server                     the server alone: 4 minutes, without any package
    python bench/no_stall.py --dry-run                         on a GPU that does not exist: shows that the script runs

Training: gated linear attention of fla, forward and backward, with three sequence lengths in turn. Each side runs in a
process of its own with empty caches. "fixed" has the first configuration of each kernel, "offline" is tuned before it
is measured. The processes take turns of a second, because the speed of a machine moves by 10 % within a minute; a
process counts the time of its own turns alone, and its compilers stop in between. Triton's tuner runs by itself.

Server: requests that arrive at their own times, with changing shapes, in one process that switches between a fixed
configuration and live tuning every few requests.

Results go to bench/results/no_stall.json after each side, so that a killed run keeps what it has.
"""

# ruff: noqa: N803 - constexprs are written in capitals in Triton

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import mmap
import operator
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import tables
import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner

import tunebook as tb
from tunebook._tuning.host_share import HOST
from tunebook._tuning.live_session import LiveSession
from tunebook.adapters.triton import autotune, install

HERE = Path(__file__).parent
SLICE_S = 1.0
SIDES = ("fixed", "live", "offline", "triton")
TARGETS = {
    "training: first step, beside fixed": "<= 1.3",
    "training: steps in the worst 5 s, beside fixed": ">= 0.95",
    "training: steps in the last 20 s, beside offline": ">= 0.99",
    "server: p99, beside fixed": "<= 1.01",
    "server: slow requests in 1,000": "<= 1",
}
LIVE = tb.AutotunePolicy(cache_miss_fallback="incremental")


# ----------------------------------------------------------------------------------------------------- a kernel of ours


@triton.jit
def normalise(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
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


def requests(device, seed=0):
    """Yield the tensors of requests, of four shapes that come in any order."""
    pick = random.Random(seed)
    made = [torch.randn(count, 4096, device=device) for count in (64, 256, 1024, 4096)]
    while True:
        yield pick.choice(made)


# -------------------------------------------------------------------------------------------------------- the training


def only_first_candidates():
    """Let `triton.autotune` have the first configuration of each kernel that is made from now on."""
    theirs = Autotuner.__init__

    def init(self, fn, arg_names, configs, *args, **kwargs):
        theirs(self, fn, arg_names, configs[:1] if configs else configs, *args, **kwargs)

    Autotuner.__init__ = init


def steps_of(options, device):
    """Return a training step per length."""
    if not options.dry_run:
        from triton_library_ops import gated_linear_attention  # noqa: PLC0415 - it needs a GPU

        return [gated_linear_attention(T=length) for length in map(int, options.lengths.split(","))]
    kernel = triton.autotune(CONFIGS, key=["columns"])(normalise)

    def step(columns):
        x = torch.randn(8, columns, device=device)
        kernel[rows](x, torch.empty_like(x), columns)

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
    """Run one side in this process; return the end of each step in its own seconds, and the work of live tuning."""
    if side == "fixed":
        only_first_candidates()
    elif side != "triton":
        install(policy=LIVE if side == "live" else None)
    path, _, place = options.turns.rpartition(":")
    with contextlib.closing(Turns(path, int(place))) as turns:
        ends_s = steps_in_turn(side, turns, options, device, wait)
    return {"ends": ends_s, **live_work()}


def live_work():
    """Return what became of the sessions of this process, and on what its host worked for them: why a bar is missed."""
    sessions = [each for each in gc.get_objects() if type(each) is LiveSession]
    watches = [each.race.watch for each in sessions]
    counts = {
        "sessions": len(sessions),
        "decided": sum(each.is_finished for each in sessions),
        "candidates": sum(each.candidates for each in sessions),
        "not tried": sum(len(each.not_tried) for each in sessions),
        "loaded": sum(each.loads for each in sessions),
        "duels": sum(each.duels for each in watches),
        "rollbacks": sum(each.rollbacks for each in sessions),
    }
    host = {work: {"times": times, "seconds": round(seconds, 4)} for work, (times, seconds) in HOST.spent.items()}
    return {"states": [str(each) for each in sessions], "counts": counts, "host": host}


def told(side, done):
    """Return the raw results that say how far the sessions of a side were, and print them."""
    if not done["states"]:
        return {}
    print(f"{side}:", ", ".join(f"{count} {what}" for what, count in done["counts"].items()))
    for work, spent in done["host"].items():
        print(f"{side}: the host spent {spent['seconds']:.3f} s on {spent['times']} {work}")
    names = {"states": "sessions at the end", "counts": "sessions in numbers", "host": "work of the host"}
    return {f"{name}, {side}": done[key] for key, name in names.items()}


def steps_in_turn(side, turns, options, device, wait):
    steps = steps_of(options, device)
    if side == "offline":
        with turns.turn():
            for step in steps:
                step()
            wait()
    HOST.use_clock(turns.own_s)  # what the host may spend is a part of this process's own time
    started_s, ends_s = turns.own_s(), []
    while not ends_s or (ends_s[-1] < options.seconds and len(ends_s) < options.steps):
        with turns.turn():
            until_s = turns.own_s() + SLICE_S
            while turns.own_s() < until_s and len(ends_s) < options.steps:
                steps[len(ends_s) % len(steps)]()
                wait()
                ends_s.append(turns.own_s() - started_s)
    return ends_s


def windows(ends_s, window_s, after_s):
    """Return the steps per second in each window that begins with the end of a step, from a time on."""
    kept = [end for end in ends_s if end >= after_s]
    rates, last = [], 0
    for first, end in enumerate(kept):
        while last < len(kept) and kept[last] < end + window_s:
            last += 1
        if last == len(kept):
            break
        rates.append((last - first) / window_s)
    return rates or [len(kept) / max(kept[-1] - after_s, 1e-9)]


def compare_training(ends):
    """Return the numbers of the issue, beside the fixed configuration and the offline tuning."""
    fixed, live, offline = ends["fixed"], ends["live"], ends["offline"]
    usual = (len(fixed) - 1) / max(fixed[-1] - fixed[0], 1e-9)

    def rate_at_end(each):
        late = [end for end in each if end >= each[-1] - 20]
        return len(late) / max(late[-1] - late[0], 1e-9)

    return {
        "training: first step, beside fixed": live[0] / fixed[0],
        "training: steps in the worst 5 s, beside fixed": min(windows(live, 5.0, live[1])) / usual,
        "training: the same of fixed itself": min(windows(fixed, 5.0, fixed[1])) / usual,
        "training: steps in the last 20 s, beside offline": rate_at_end(live) / rate_at_end(offline),
        "training: steps in the last 20 s, beside fixed": rate_at_end(live) / rate_at_end(fixed),
        **(
            {"training: first step of triton.autotune, beside fixed": ends["triton"][0] / fixed[0]}
            if "triton" in ends
            else {}
        ),
    }


# ---------------------------------------------------------------------------------------------------------- the server


def serve(options, device, wait):
    """Answer requests of both sides in turn; return latencies after the first minute by side, and the work for it."""
    live = autotune(CONFIGS, key=["columns"], bucket=None, policy=LIVE, store=False)(normalise)
    first = CONFIGS[0].all_kwargs()

    def answer(side, x):
        out = torch.empty_like(x)
        if side == "live":
            live[rows](x, out, x.shape[1])
        else:
            normalise[(x.shape[0],)](x, out, x.shape[1], **first)
        wait()

    pick, began_s = random.Random(1), time.perf_counter()
    latencies, due_s = {"fixed": [], "live": []}, 0.0
    for number, x in enumerate(requests(device)):
        now_s = time.perf_counter() - began_s
        if now_s > options.server_seconds or number >= options.requests:
            break
        due_s += pick.expovariate(options.rate)  # at its own time, whether the last request is answered or not
        if due_s > now_s:
            time.sleep(due_s - now_s)
        side = ("fixed", "live")[number // options.block % 2]
        answer(side, x)
        if now_s >= options.settle:
            latencies[side].append(time.perf_counter() - began_s - due_s)
    return {"latencies": latencies, **live_work()}


def compare_serving(latencies):
    """Return p99 of live tuning beside the fixed configuration's, and slow requests in 1,000."""

    def p99(values):
        return sorted(values)[int(0.99 * (len(values) - 1))]

    fixed, live = latencies["fixed"], latencies["live"]
    slow_s = 2 * p99(fixed)
    return {
        "server: p99, beside fixed": p99(live) / p99(fixed),
        "server: median, beside fixed": statistics.median(live) / statistics.median(fixed),
        "server: slow requests in 1,000": 1000 * sum(each > slow_s for each in live) / len(live),
        "server: slow requests in 1,000, fixed": 1000 * sum(each > slow_s for each in fixed) / len(fixed),
    }


# ----------------------------------------------------------------------------------------------------------- processes


def device_of(options, patches):
    """Return the torch device, and a function that waits for it; a dry run gets a GPU that does not exist."""
    if not options.dry_run:
        return "cuda", torch.cuda.synchronize
    sys.path.insert(0, str(HERE.parent / "tests"))
    from fake_gpu import FakeGpu, installed  # noqa: PLC0415 - of the tests, for a dry run

    fake = FakeGpu(lambda facts: 1e-5 * (1 + abs(facts["num_warps"] - 4)) * 4096 / facts["BLOCK"])
    fake.behind = 2
    patches.enter_context(installed(fake, normalise))
    return "cpu", lambda: None


def work(options):
    """Do the part of one process, and write its result to standard output."""
    with contextlib.ExitStack() as patches:
        device, wait = device_of(options, patches)
        result = (
            serve(options, device, wait) if options.side == "server" else train(options.side, options, device, wait)
        )
        sys.stdout.write(json.dumps(result))


def run_sides(sides, options):
    """Run sides in turn, and return their results."""
    with tempfile.NamedTemporaryFile() as shared, ThreadPoolExecutor(len(sides)) as pool:
        shared.write(bytes([0, *[1] * len(sides)]))
        shared.flush()
        asked = [pool.submit(run_side, side, options, f"{shared.name}:{i}") for i, side in enumerate(sides)]
        return dict(zip(sides, (each.result() for each in asked), strict=True))


def run_side(side, options, turns=""):
    """Run a side in a process with empty caches, and return its result."""
    with tempfile.TemporaryDirectory() as folder:
        places = [str(options.packages.absolute()), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, places)),
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "TUNEBOOK_HOME": f"{folder}/book",
        }
        command = [sys.executable, __file__, "--side", side, "--turns", turns, *options.passed_on]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.decode().splitlines()[-1])


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, default=Path(".compat-packages"))
    parser.add_argument("--only", choices=("training", "server"))
    parser.add_argument("--sides", default=",".join(SIDES), help="of the training")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument(
        "--lengths", default="2048,3072,4096", help="of sequences; below these, the GPU waits for the host"
    )
    parser.add_argument("--seconds", type=float, default=90.0, help="of training, for each side")
    parser.add_argument("--steps", type=int, default=10**9, help="of training, at most")
    parser.add_argument("--server-seconds", type=float, default=240.0)
    parser.add_argument("--settle", type=float, default=60.0, help="seconds of the server that are not counted")
    parser.add_argument("--requests", type=int, default=10**9, help="of the server, at most")
    parser.add_argument("--rate", type=float, default=2000.0, help="requests per second")
    parser.add_argument("--block", type=int, default=50, help="requests after which the server switches sides")
    parser.add_argument("--side", choices=(*SIDES, "server"), help=argparse.SUPPRESS)
    parser.add_argument("--turns", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.passed_on = [*arguments, "--packages", str(options.packages.absolute())]
    return options


def per_second(ends_s):
    """Return the steps in each second: the raw result, which would else have 40,000 numbers."""
    counts = Counter(int(end) for end in ends_s)
    return [counts[second] for second in range(int(ends_s[-1]) + 1)]


def publish(found, raw, options):
    """Print the table and write it; return the exit status."""
    compare = {"<=": operator.le, ">=": operator.ge}
    rows = []
    for name, value in found.items():
        sign, _, bound = TARGETS.get(name, "").partition(" ")
        rows.append((name, f"{value:.3f}", TARGETS.get(name, ""), not bound or compare[sign](value, float(bound))))
    if options.dry_run:
        for row in rows:
            print(*row)
        return 0
    gpu = {"gpu": torch.cuda.get_device_name(), "versions": {"torch": torch.__version__, "triton": triton.__version__}}
    return tables.report("no_stall", rows, {"measured": found, **raw}, quick=False, **gpu)


def main(arguments):
    options = parse(arguments)
    if options.side:
        work(options)
        return 0
    path = tables.RESULTS / "no_stall.json"
    raw = json.loads(path.read_text())["raw"] if path.exists() and not options.dry_run else {}
    found, ends, status = raw.pop("measured", {}), {}, 0
    sides = [] if options.only == "server" else options.sides.split(",")
    for together in ([side for side in sides if side != "triton"], [side for side in sides if side == "triton"]):
        done = run_sides(together, options) if together else {}
        ends |= {side: each["ends"] for side, each in done.items()}
        for side, each in done.items():
            raw |= told(side, each)
        raw |= {f"first step of {side}, s": ends[side][0] for side in together}
        raw |= {f"steps in each second, {side}": per_second(ends[side]) for side in together}
        if together and {"fixed", "live", "offline"} <= set(ends):
            found |= compare_training(ends)
            status = publish(found, raw, options)
    if options.only != "training":
        done = run_side("server", options)
        found |= compare_serving(done["latencies"])
        raw |= told("server", done)
        status = publish(found, raw, options)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
