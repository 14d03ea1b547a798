"""Tuning Triton kernels on a GPU, beside `triton.autotune`: checks results first, then times, then prints one table.

Each part runs in a process of its own with empty caches, so that cold is cold:

    python bench/gpu.py                  all parts, about 5 minutes on an H200; writes results/gpu.json
    python bench/gpu.py --only ours_48   one part, as JSON
    python bench/gpu.py --parts ours_480 ours_480_known    480 configurations; writes results/gpu_480.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gpu_480
import torch
import triton
from gpu_clock import Clock, check, log, matmul_problem, text_of, wake_up
from gpu_kernels import (
    ADDED,
    ATTENTION,
    DANGEROUS,
    DOUBLE,
    MATMUL_48,
    SMALL,
    SOFTMAX,
    attention,
    dangerous,
    double,
    matmul,
    matmul_grid,
    seconds,
    small,
    softmax,
    softmax_grid,
)
from tables import report

from tunebook import AutotunePolicy, NoConfig
from tunebook._arrays.device_fingerprint import gpu_driver
from tunebook.adapters._triton.candidate import Launch
from tunebook.adapters.triton import autotune

HERE = Path(__file__).parent
SHAPES = {
    "4096 cubed": (4096, 4096, 4096),
    "1024 cubed": (1024, 1024, 1024),
    "8192 cubed": (8192, 8192, 8192),
    "skinny: 64 x 8192 x 8192": (64, 8192, 8192),
    "thin: 8192 x 8192 x 256": (8192, 8192, 256),
    "odd: 2000 x 3000 x 1000": (2000, 3000, 1000),
}
FIRST, SECOND = "4096 cubed", "thin: 8192 x 8192 x 256"


# --------------------------------------------------------------------------------------------------- problems, results


def softmax_problem():
    x = torch.randn(16384, 3000, device="cuda", dtype=torch.bfloat16)
    out = torch.full_like(x, float("nan"))
    return x, out, (x, out, *x.shape, x.stride(0)), {"BLOCK": 4096}


def attention_problem():
    q, k, v = (torch.randn(4, 16, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out = torch.full_like(q, float("nan"))
    arguments = (q, k, v, out, 64**-0.5, q.shape[2], q.stride(1), q.stride(2))
    return (q, k, v), out, arguments, {"DIM": 64}


def attention_grid(meta):
    return (triton.cdiv(meta["sequence"], meta["BM"]), 64)


# ------------------------------------------------------------------------------------------------------------- clocks


def regret(fn, grid, arguments, constants, configs, best):
    """Return how much slower the choice is than the best of all, by a clock and samples of this benchmark's own."""
    clock = Clock()

    def run_of(config):
        return lambda: fn[grid](*arguments, **constants, **config.all_kwargs())

    rough = {}
    for config in configs:
        try:
            run_of(config)()
        except Exception:  # noqa: BLE001 - too many registers, too much shared memory: no candidate
            continue
        rough[config] = statistics.median(clock.samples_ms(run_of(config), 6))
    ranked = sorted(rough, key=rough.get)[:8]
    again = clock.rounds_ms({config: run_of(config) for config in {*ranked, best}}, rounds=8, each=5)
    fastest = min(again, key=again.get)
    return {
        "regret": again[best] / again[fastest] - 1,
        "winner_ms": again[best],
        "best_ms": again[fastest],
        "winner": text_of(best),
        "best": text_of(fastest),
        "worst_ms": max(rough.values()),
        "ran": len(rough),
    }


# -------------------------------------------------------------------------------------------------------------- parts


TUNERS = {"triton": triton.autotune, "ours": autotune}


def matmul_part(which, configs, shapes, *, measure):
    wake_up()
    kernel = TUNERS[which](configs, key=["M", "N", "K"])(matmul)
    rows = {}
    for shape in shapes:
        a, b, c, arguments = matmul_problem(*SHAPES[shape])
        took = seconds(lambda arguments=arguments: kernel[matmul_grid](*arguments))
        row = {
            "seconds": took,
            "error": check(f"matmul {shape}", c, a.double() @ b.double()),
            "winner": text_of(kernel.best_config),
        }
        if measure:
            row |= regret(matmul, matmul_grid, arguments, {}, configs, kernel.best_config)
            row["cublas_ms"] = statistics.median(Clock().samples_ms(lambda a=a, b=b: a @ b, 40))
        rows[shape] = row
        log(which, len(configs), shape, row)
    return rows


def raises(kind, run):
    try:
        run()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")


def correct():
    """Arguments are left alone, graphs and threads work."""
    wake_up()
    n = 1 << 20
    for options in ({}, {"restore_value": ["x_ptr"]}, {"use_cuda_graph": True}, {"processes": False}):
        x = torch.randn(n, device="cuda")
        before = x.clone()
        kernel = autotune(DOUBLE, key=["n"], store=False, **options)(double)
        kernel[double_grid](x, n)
        assert torch.equal(x, before * 2), options
    x = torch.full((n,), 3.0, device="cuda")
    autotune(DOUBLE, key=["n"], store=False, reset_to_zero=["x_ptr"])(double)[double_grid](x, n)
    assert torch.equal(x, torch.zeros_like(x))

    x, graph = torch.ones(n, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel[double_grid](x, n)  # known
        unknown = raises(NoConfig, lambda: kernel[double_grid](x, n - 1))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(x, torch.full_like(x, 2.0))
    assert "before the capture" in unknown

    # Inductor tunes the configurations itself, and restores what is declared only.
    kernel = autotune(DOUBLE, key=["n"], store=False, restore_value=["x_ptr"])(double)
    x = torch.ones(n, device="cuda")

    @torch.compile(fullgraph=True)
    def program(x):
        kernel[double_grid](x, x.numel())
        return x + 1

    assert torch.equal(program(x), torch.full_like(x, 3.0))

    xs = [torch.ones(n + 128 * i, device="cuda") for i in (0, 0, 1, 1, 2, 2, 3, 3)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda x: kernel[double_grid](x, len(x)), xs))
    torch.cuda.synchronize()
    assert all(torch.equal(x, torch.full_like(x, 2.0)) for x in xs)
    return {"checked": True}


def double_grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def isolation():
    """Illegal accesses, hangs and device-side asserts in a worker; the context of this process lives on."""
    wake_up()
    policy = AutotunePolicy(isolate="always", candidate_timeout_s=6.0)
    x, flag = torch.ones(1 << 16, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    kernel = autotune(DANGEROUS, key=["n"], policy=policy)(dangerous)
    start = time.perf_counter()
    tuned = kernel.tune(x, flag, len(x), grid=double_grid, debug=True)
    took = time.perf_counter() - start
    torch.cuda.synchronize()  # raises if this process's context were poisoned
    assert torch.equal(x, torch.ones_like(x))
    kinds = [(m.config["v"]["MODE"], m.failure.kind if m.failure else "") for m in tuned.measurements]
    row = {"seconds": took, "failures": sorted(kinds), "winner": text_of(tuned.config.config)}
    log("isolation", row, [m.failure.message for m in tuned.measurements if m.failure])
    assert sorted(kinds) == [(0, "")] * 2 + [(1, "crash")] * 2 + [(2, "timeout")] * 2 + [(3, "crash")] * 2
    kernel[double_grid](x, flag, len(x), debug=True)
    torch.cuda.synchronize()
    assert torch.equal(x, torch.full_like(x, 2.0))
    return row


def triton_48():
    return matmul_part("triton", MATMUL_48, [FIRST, SECOND], measure=False)


def ours_48():
    return matmul_part("ours", MATMUL_48, SHAPES, measure=True)


def ours_48_again():
    """Tune a second time in another process, with nothing remembered: is the choice the same?"""
    return matmul_part("ours", MATMUL_48, SHAPES, measure=False)


def warm():
    """A process that finds everything in the book, and one added configuration."""
    wake_up()
    a, b, c, arguments = matmul_problem(*SHAPES[FIRST])
    kernel = TUNERS["ours"](MATMUL_48, key=["M", "N", "K"])(matmul)
    inv = kernel.kernel.invocation(Launch(matmul_grid, arguments, {}))
    decision = seconds(lambda: kernel.selector.select(inv, kernel.kernel))
    launch = seconds(lambda: kernel[matmul_grid](*arguments))
    check("matmul from the book", c, a.double() @ b.double())
    grown = TUNERS["ours"]([*MATMUL_48, ADDED], key=["M", "N", "K"])(matmul)
    added = seconds(lambda: grown[matmul_grid](*arguments))
    return {"decision": decision, "launch": launch, "added": added, "winner": text_of(kernel.best_config)}


def others(which):
    wake_up()
    rows = {}
    x, out, arguments, constants = softmax_problem()
    kernel = TUNERS[which](SOFTMAX, key=["rows", "columns"])(softmax)
    took = seconds(lambda: kernel[softmax_grid](*arguments, **constants))
    rows["softmax"] = {"seconds": took, "error": check("softmax", out, torch.softmax(x.double(), -1))}
    if which == "ours":
        rows["softmax"] |= regret(softmax, softmax_grid, arguments, constants, SOFTMAX, kernel.best_config)
        rows["softmax"]["torch_ms"] = statistics.median(Clock().samples_ms(lambda: torch.softmax(x, -1), 40))
    log(which, "softmax", rows["softmax"])
    (q, k, v), out, arguments, constants = attention_problem()
    kernel = TUNERS[which](ATTENTION, key=["sequence", "DIM"])(attention)
    took = seconds(lambda: kernel[attention_grid](*arguments, **constants))
    expected = torch.nn.functional.scaled_dot_product_attention
    rows["attention"] = {"seconds": took, "error": check("attention", out, expected(q.float(), k.float(), v.float()))}
    if which == "ours":
        rows["attention"] |= regret(attention, attention_grid, arguments, constants, ATTENTION, kernel.best_config)
        rows["attention"]["torch_ms"] = statistics.median(Clock().samples_ms(lambda: expected(q, k, v), 40))
    log(which, "attention", rows["attention"])
    return rows


def others_triton():
    return others("triton")


def others_ours():
    return others("ours")


def host():
    """Microseconds of the host per launch: a fixed configuration, Triton's autotuner, ours."""
    wake_up()
    n = 4096
    x, y, out = (torch.ones(n, device="cuda") for _ in range(3))
    arguments = (x, y, out, n, 1.0, 2.0, 3.0, 4.0)

    def grid(meta):
        return (triton.cdiv(n, meta["BLOCK"]),)

    kernels = {which: TUNERS[which](SMALL, key=["n"])(small) for which in ("triton", "ours")}
    for kernel in kernels.values():
        kernel[grid](*arguments)
    best = kernels["ours"].best_config
    meta = best.all_kwargs()
    calls = {
        "fixed": lambda: small[grid](*arguments, **meta),
        **{which: lambda kernel=kernel: kernel[grid](*arguments) for which, kernel in kernels.items()},
    }
    found = {name: [] for name in calls}
    order, shuffle = list(calls), random.Random(0).shuffle
    for _ in range(60):
        shuffle(order)
        for name in order:
            call = calls[name]
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                call()
            found[name].append((time.perf_counter() - start) / 200 * 1e6)
    row = {name: statistics.median(samples) for name, samples in found.items()}
    log("host", row)
    return row


PARTS = {
    part.__name__: part
    for part in (
        correct,
        triton_48,
        ours_48,
        warm,
        ours_48_again,
        *gpu_480.PARTS.values(),
        others_triton,
        others_ours,
        host,
        isolation,
    )
}
SAME_CACHES = {"warm": "ours_48"}  # the part whose book and compiled programs it finds


# ------------------------------------------------------------------------------------------------------------- report


def run_part(name, caches, before):
    """Run a part in a process of its own, which gets the results of the parts before."""
    folder = Path(caches) / SAME_CACHES.get(name, name)
    folder.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TUNEBOOK_HOME": str(folder.with_name(gpu_480.SAME_BOOK.get(name, folder.name)) / "book"),
        "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    start = time.perf_counter()
    command = [sys.executable, str(HERE / "gpu.py"), "--only", name]
    options = {"input": json.dumps(before), "stdout": subprocess.PIPE, "text": True, "timeout": 240}
    try:
        done = subprocess.run(command, env=environment, check=False, **options)
    except subprocess.TimeoutExpired:
        return {"failed": "timeout"}
    log(name, f"took {time.perf_counter() - start:.1f} s")
    if done.returncode:
        return {"failed": done.returncode}
    return json.loads(done.stdout)


def table(raw):
    """Return rows of (what, measured, target, whether it is kept), from as many parts as there are."""
    rows = []

    def add(what, measured, target="", kept=True):
        rows.append((what, measured, target, kept))

    theirs, ours = raw["triton_48"], raw["ours_48"]
    cold = theirs[FIRST]["seconds"] / ours[FIRST]["seconds"]
    add("triton.autotune, 48 matmul configs, cold", f"{theirs[FIRST]['seconds']:.1f} s")
    add("tunebook, 48 matmul configs, cold", f"{ours[FIRST]['seconds']:.2f} s")
    add("cold: triton.autotune / tunebook", f"{cold:.1f} x", ">= 6 x", cold >= 6)
    new = theirs[SECOND]["seconds"] / ours[SECOND]["seconds"]
    add("triton.autotune, a new shape", f"{theirs[SECOND]['seconds']:.2f} s")
    add("tunebook, a new shape", f"{ours[SECOND]['seconds']:.2f} s")
    add("new shape: triton.autotune / tunebook", f"{new:.1f} x", ">= 10 x", new >= 10)
    many, limit = raw["ours_480"], theirs[FIRST]["seconds"]
    far = raw["all_480"]["regret"]["ours_480"]
    add("tunebook, 480 configs, cold", f"{many['seconds']:.1f} s", f"< {limit:.1f} s", many["seconds"] < limit)
    add("480 configs: regret", f"{far:.2%}", "<= 1 %", far <= 0.01)
    for shape, row in ours.items():
        words = (
            f"matmul {shape}: {row['seconds']:.2f} s, winner {row['winner_ms']:.3f} ms, cuBLAS {row['cublas_ms']:.3f}"
        )
        add(f"{words}: regret", f"{row['regret']:.2%}", "<= 1 %", row["regret"] <= 0.01)
    for name in ("softmax", "attention"):
        mine, other = raw["others_ours"][name], raw["others_triton"][name]
        words = f"{name}: {mine['seconds']:.2f} s, winner {mine['winner_ms']:.3f} ms, torch {mine['torch_ms']:.3f}"
        add(f"{words}: regret", f"{mine['regret']:.2%}", "<= 1 %", mine["regret"] <= 0.01)
        add(f"{name}: triton.autotune / tunebook, cold", f"{other['seconds'] / mine['seconds']:.1f} x")
    decision = raw["warm"]["decision"]
    add("a warm process: first decision", f"{decision * 1e3:.1f} ms", "< 50 ms", decision < 0.05)
    add("a warm process: one added config", f"{raw['warm']['added']:.2f} s")
    over = raw["host"]["ours"] - raw["host"]["fixed"]
    add("a launch: host time with a fixed config", f"{raw['host']['fixed']:.1f} us")
    add("a launch: triton.autotune adds", f"{raw['host']['triton'] - raw['host']['fixed']:.1f} us")
    add("a launch: tunebook adds", f"{over:.2f} us", "<= 2 us", over <= 2)
    lost = raw["isolation"]
    words = f"crashed or hung in the worker, of {len(lost['failures'])} candidates, in {lost['seconds']:.0f} s"
    add(words, str(sum(bool(kind) for _, kind in lost["failures"])))
    add("the same winner when tuned again, of 6 shapes", str(same_winners(raw)))
    return rows


def same_winners(raw):
    return sum(raw["ours_48"][shape]["winner"] == raw["ours_48_again"][shape]["winner"] for shape in SHAPES)


def facts():
    return {
        "gpu": torch.cuda.get_device_name(0),
        "driver": gpu_driver().get("driver", "").removeprefix("nvidia "),
        "versions": {"triton": triton.__version__, "torch": torch.__version__},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--raw", type=Path, help="where raw results are written after every part")
    options = parser.parse_args()
    if options.only:
        result = PARTS[options.only]()
        print(json.dumps(result))
        return 0
    needed = {more for name in options.parts for more in gpu_480.NEEDS.get(name, ())}
    raw = {}
    with tempfile.TemporaryDirectory() as caches:
        for name in (name for name in PARTS if name in {*options.parts, *needed}):
            raw[name] = run_part(name, caches, raw)
            if options.raw:
                options.raw.write_text(json.dumps(raw, indent=1))
    of_480 = {name: raw[name] for name in gpu_480.PARTS if name in raw}
    missed = report("gpu_480", gpu_480.table(of_480), of_480, quick=False, **facts()) if of_480 else 0
    if raw.keys() == of_480.keys():
        return missed
    if any("failed" in part for part in raw.values()) or raw.keys() != PARTS.keys():
        print(json.dumps(raw, indent=1))
        return 1
    return max(missed, report("gpu", table(raw), raw, quick=False, **facts()))


if __name__ == "__main__":
    sys.exit(main())
