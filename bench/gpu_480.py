"""480 configurations of a matmul on a GPU: parts of bench/gpu.py, with results of their own.

    python bench/gpu.py --parts ours_480 ours_480_known     about two minutes on an H200; writes results/gpu_480.json

`ours_480` tunes 4096 cubed with an empty book. `ours_480_known` tunes it with three near shapes in the book, which
another process has tuned; nothing is compiled yet. `all_480`, which follows by itself, compiles the whole list,
measures it by the clock of the benchmark, and says how far the choices of both are from its best. Then it records the
list at other shapes, as many as it comes to, in `results/list_480.json.gz`, for `bench/list_search.py`.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import triton
from gpu_clock import Clock, check, log, matmul_problem, text_of, wake_up
from gpu_kernels import MATMUL_480, matmul, matmul_grid, seconds

from tunebook.adapters._triton.candidate import Launch, LaunchConfig
from tunebook.adapters._triton.compile_ahead import compile_forks, longest_first
from tunebook.adapters.triton import autotune

RECORDING = Path(__file__).parent / "results" / "list_480.json.gz"
SHAPE = (4096, 4096, 4096)
NEAR = ((4096, 4096, 2048), (2048, 4096, 4096), (8192, 4096, 4096))
WAYS = {"ours_480": "with an empty book", "ours_480_known": "with three near shapes in the book"}
# At most: configurations compiled, seconds, and regret.
TARGETS = {"ours_480": (48, 5.0, 0.01), "ours_480_known": (16, 1.5, 0.01)}
RANKED = 8  # of the whole list, measured again
# Shapes to record, of which each has three near ones: squares, and batches of a server. A start is better than nothing.
RECORDED = (
    *(SHAPE, *NEAR, (4096, 8192, 4096), (4096, 4096, 8192)),
    *((m, 4096, 4096) for m in (16, 32, 64, 128, 256, 512, 1024)),
    *((1024, 1024, 1024), (1024, 1024, 2048), (512, 1024, 1024), (2048, 1024, 1024), (1024, 2048, 1024)),
    *((m, 14336, 4096) for m in (16, 64, 256, 1024)),
)
RECORD_S = 45.0
FEW, MORE, SLOW = 3, 12, 1.5  # samples, and how many of a configuration that is not this much slower than the best


def compiled_matmuls():
    """Return when each matmul in Triton's cache was compiled to the end, whether or not it was measured."""
    return sorted(path.stat().st_mtime for path in Path(os.environ["TRITON_CACHE_DIR"]).rglob("matmul.cubin"))


def tune(shape):
    """Tune a shape by its first launch, check the result, and return the numbers."""
    a, b, c, arguments = matmul_problem(*shape)
    kernel = autotune(MATMUL_480, key=["M", "N", "K"])(matmul)
    before, began_s = len(compiled_matmuls()), time.time()
    took = seconds(lambda: kernel[matmul_grid](*arguments))
    compiled = compiled_matmuls()[before:]
    inv = kernel.kernel.invocation(Launch(matmul_grid, arguments, {}))
    measured = kernel.selector.persistent.read(kernel.kernel.problem(inv)).body.measurements
    row = {
        "shape": "x".join(map(str, shape)),
        "seconds": took,
        "compiled": len(compiled),
        "measured": sum(m.failure is None for m in measured),
        "failures": sum(m.failure is not None for m in measured),
        "error": check(f"matmul {shape}", c, a.double() @ b.double()),
        "winner": text_of(kernel.best_config),
        "compiled_at_s": [round(at_s - began_s, 3) for at_s in compiled],
        "compile_s": sorted(round(m.compile_s, 3) for m in measured if m.compile_s is not None),
    }
    log("480 configurations", row)
    return row


def ours_480():
    """Tune with an empty book."""
    wake_up()
    return tune(SHAPE)


def ours_480_near():
    """Tune the three near shapes, for the book."""
    wake_up()
    return {"shapes": [tune(shape) for shape in NEAR]}


def ours_480_known():
    """Tune with the three near shapes in the book, and an empty cache of programs."""
    wake_up()
    return tune(SHAPE)


def compile_all(candidates):
    """Compile the whole list on all cores, and return the seconds of each."""
    _, _, _, arguments = matmul_problem(*SHAPE)

    def compile_one(candidate):
        return matmul.warmup(*arguments, grid=matmul_grid, **candidate.meta)

    def timed(candidate):
        began_s = time.perf_counter()
        forks(candidate)
        return time.perf_counter() - began_s

    with (
        compile_forks(compile_one, candidates, ahead=False) as forks,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        return list(pool.map(timed, candidates))


def runs_of(candidates, arguments):
    """Return a launch for each configuration of the list."""
    return {each: lambda meta=each.meta: matmul[matmul_grid](*arguments, **meta) for each in candidates}


def times_ms(clock, candidates, shape):
    """Return samples of each configuration that runs at a shape, and the errors of the others."""
    _, _, _, arguments = matmul_problem(*shape)
    found, errors = {}, {}
    for candidate, run in runs_of(candidates, arguments).items():
        try:
            run()
        except Exception as error:  # noqa: BLE001 - too many registers, too much shared memory: no candidate
            errors[candidate] = f"{type(error).__name__}: {error}"[:200]
            continue
        found[candidate] = clock.samples_ms(run, FEW)
        if min(found[candidate]) < SLOW * min(map(min, found.values())):
            found[candidate] += clock.samples_ms(run, MORE)
    return found, errors


def write_recording(clock, candidates, compile_s):
    """Record the list at shapes, and write them after each; return the seconds of each shape."""
    places = {candidate: str(at) for at, candidate in enumerate(candidates)}
    content = {
        "device": torch.cuda.get_device_name(),
        "triton": triton.__version__,
        "unit": "ms",
        "space": [dict(each.meta) for each in candidates],
        "compile_s": {str(at): round(each_s, 3) for at, each_s in enumerate(compile_s)},
        "failed": {},
        "shapes": {},
    }
    took, began_s = {}, time.perf_counter()
    for shape in RECORDED:
        if time.perf_counter() - began_s > RECORD_S:
            break
        start_s = time.perf_counter()
        found, errors = times_ms(clock, candidates, shape)
        rows = {places[each]: {"t": [round(ms, 5) for ms in samples]} for each, samples in found.items()}
        content["shapes"]["x".join(map(str, shape))] = {"rows": rows}
        content["failed"] |= {places[each]: text for each, text in errors.items()}
        took[str(shape)] = time.perf_counter() - start_s
        RECORDING.write_bytes(gzip.compress(json.dumps(content).encode(), mtime=0))
    return took


def all_480():
    """Measure the whole list, and return how far the choices of the parts before, which stand in the input, are off."""
    before = json.loads("{}" if sys.stdin.isatty() else sys.stdin.read() or "{}")
    winners = {name: row["winner"] for name, row in before.items() if name in WAYS and "winner" in row}
    wake_up()
    candidates = longest_first(map(LaunchConfig, MATMUL_480))
    compile_s = compile_all(candidates)
    a, b, _, arguments = matmul_problem(*SHAPE)
    clock = Clock()
    rough, errors = times_ms(clock, candidates, SHAPE)
    rough_ms = {text_of(each.config): statistics.median(samples) for each, samples in rough.items()}
    ranked = sorted(rough_ms, key=rough_ms.get)[:RANKED]
    runs = {text_of(each.config): run for each, run in runs_of(candidates, arguments).items()}
    again = clock.rounds_ms({name: runs[name] for name in {*ranked, *winners.values()}}, rounds=10, each=5)
    best = min(again, key=again.get)
    return {
        "best": best,
        "best_ms": again[best],
        "failures": len(errors),
        "cublas_ms": statistics.median(clock.samples_ms(lambda: a @ b, 40)),
        "ms": again,
        "regret": {name: again[winner] / again[best] - 1 for name, winner in winners.items()},
        "recorded_s": write_recording(clock, candidates, compile_s),
    }


PARTS = {part.__name__: part for part in (ours_480, ours_480_near, ours_480_known, all_480)}
NEEDS = {"ours_480": ("all_480",), "ours_480_known": ("ours_480_near", "all_480")}  # the parts that are run along
SAME_BOOK = {"ours_480_known": "ours_480_near"}  # the part whose book it finds, but not its compiled programs


def table(raw):
    """Return rows of (what, measured, target, whether it is kept) of the parts that were run, or have failed."""
    rows, every = [], raw.get("all_480", {})
    for name, words in WAYS.items():
        row = raw.get(name)
        if row is None:
            continue
        compiled, took, far = TARGETS[name]
        start = f"480 matmul configs, 4096 cubed, {words}"
        if "failed" in row:
            rows.append((start, "failed", "", False))
            continue
        regret = every.get("regret", {}).get(name, math.inf)
        rows += [
            (f"{start}: compiled", str(row["compiled"]), f"<= {compiled}", row["compiled"] <= compiled),
            (f"{start}: the first launch", f"{row['seconds']:.2f} s", f"<= {took} s", row["seconds"] <= took),
            (f"{start}: regret", f"{regret:.2%}", "<= 1 %", regret <= far),
        ]
    for row in raw.get("ours_480_near", {}).get("shapes", ()):
        words = f"480 matmul configs, {row['shape']}, tuned before: compiled; the first launch"
        rows.append((words, f"{row['compiled']}; {row['seconds']:.2f} s", "", True))
    if "best_ms" in every:
        words = "480 matmul configs, 4096 cubed: the best of all; cuBLAS"
        rows.append((words, f"{every['best_ms']:.4f}; {every['cublas_ms']:.4f} ms", "", True))
    return rows
