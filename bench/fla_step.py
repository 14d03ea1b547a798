"""The first step of gated linear attention of fla-core, forward and backward, beside `triton.autotune`.

fla-core and einops must be importable, and a GPU must be there. Each part runs in processes of its own, with caches
that are empty at first:

    python bench/fla_step.py                      both tuners: first step, another head size, second process
    python bench/fla_step.py --only ours          ours alone, with a table of where the time went
    python bench/fla_step.py --json out.json      also writes every candidate's compilation and run times
"""

# ruff: noqa: PLC0415 - each process imports only its part, and on the clock

from __future__ import annotations

import time

STARTED_S = time.perf_counter()

import argparse  # noqa: E402 - the clock starts first
import json  # noqa: E402 - as above
import os  # noqa: E402 - as above
import subprocess  # noqa: E402 - as above
import sys  # noqa: E402 - as above
import tempfile  # noqa: E402 - as above
from pathlib import Path  # noqa: E402 - as above

SIZES = {"head size 128": 128, "head size 64": 64}


def step_of(size):
    """Return a function that makes one step, B=4 T=2048 H=16 in bfloat16, and returns the output."""
    import torch
    from fla.ops.gla import chunk_gla

    torch.manual_seed(0)
    shape = (4, 2048, 16, size)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    g = torch.nn.functional.logsigmoid(torch.randn(shape, device="cuda", dtype=torch.bfloat16)).requires_grad_()
    grad = torch.randn_like(v)

    def step():
        o, _ = chunk_gla(q, k, v, g)
        o.backward(grad)
        return o

    return step


def take_over(log):
    """Tune the launches of every autotuner of Triton's, and log each tuning."""
    from tunebook.adapters._triton.tuner import DeviceTuner
    from tunebook.adapters.triton import install

    install()
    tune = DeviceTuner.tune

    def timed(self, job):
        start = time.perf_counter()
        tuned = tune(self, job)
        log.append((self._kernel.op_id, len(job.candidates), time.perf_counter() - start, tuned))
        return tuned

    DeviceTuner.tune = timed


def gpu_seconds(step):
    """Return the median seconds of a step by the GPU's clock, and of the host's part."""
    import torch

    found, host = [], []
    for _ in range(40):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        began = time.perf_counter()
        step()
        host.append(time.perf_counter() - began)
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1e-3)
    return sorted(found)[20], sorted(host)[20]


def child(part, sizes):
    """Run one process: its sizes one after the other, and print the times as JSON."""
    log, facts = [], {}
    import torch

    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    loaded_s = time.perf_counter()
    if part == "ours":
        take_over(log)
    for size in sizes:
        start = time.perf_counter()
        step = step_of(SIZES[size])
        made = time.perf_counter()
        step()
        torch.cuda.synchronize()
        done = time.perf_counter()
        gpu_s, host_s = gpu_seconds(step)
        facts[size] = {"import": made - start, "first step": done - made, "gpu": gpu_s, "host": host_s}
    facts["start of torch and CUDA"] = loaded_s - STARTED_S
    facts["tunings"] = [as_row(*entry) for entry in log]
    print("\n" + json.dumps(facts))


def as_row(op, candidates, seconds, tuned):
    """Return one tuning as plain values: its sums, and every candidate."""
    measured = [m for m in tuned.measurements if m.failure is None]
    return {
        "op": op,
        "candidates": candidates,
        "measured": len(measured),
        "ran": tuned.ran,
        "failed": len(tuned.measurements) - len(measured),
        "left out": [repr(tuned.configs[name]) for name in tuned.left_out],
        "seconds": seconds,
        "waiting for compilers": tuned.waiting_s,
        "compilation": sum(m.compile_s or 0.0 for m in measured),
        "longest": max((m.compile_s or 0.0 for m in measured), default=0.0),
        "best": min((min(m.samples_s) for m in measured if m.samples_s), default=None),
        "each": [[m.config, m.compile_s, sorted(m.samples_s)[:9], m.dropped, m.extra] for m in tuned.measurements],
    }


def run_child(part, sizes, place):
    """Run a part in a process of its own, with caches in a place, and return its times."""
    variables = {
        "TRITON_CACHE_DIR": f"{place}/triton",
        "TUNEBOOK_HOME": f"{place}/book",
        "TRITON_CACHE_AUTOTUNING": "1",
        "FLA_CACHE_RESULTS": "1",
    }
    command = [sys.executable, __file__, "--child", part, "--sizes", *sizes]
    done = subprocess.run(command, env={**os.environ, **variables}, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def show(part, name, facts):
    """Print the times of a process."""
    for size in SIZES:
        if size in facts:
            print(
                f"{part:7} {name:16} {size:14} first step {facts[size]['first step']:7.2f} s, import "
                f"{facts[size]['import']:5.2f} s, then {facts[size]['gpu'] * 1e3:7.3f} ms GPU, "
                f"{facts[size]['host'] * 1e3:6.3f} ms host"
            )
    for t in facts["tunings"]:
        print(
            f"    {t['op'].rpartition('.')[2][:42]:42} {t['candidates']:3} candidates, {t['measured']:3} measured, "
            f"{len(t['left out']):2} left out, {t['seconds']:6.2f} s: waiting {t['waiting for compilers']:6.2f}, other "
            f"{t['seconds'] - t['waiting for compilers']:6.2f}; compilers {t['compilation']:6.1f}, longest "
            f"{t['longest']:5.2f}"
        )


def main():
    """Run the parts that were asked for, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["ours", "triton"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child")
    parser.add_argument("--sizes", nargs="*", default=list(SIZES))
    options = parser.parse_args()
    if options.child:
        child(options.child, options.sizes)
        return
    results = {}
    for part in [options.only] if options.only else ["ours", "triton"]:
        with tempfile.TemporaryDirectory() as place:
            for name in ("first process", "second process", "third process"):
                facts = run_child(part, options.sizes, place)
                show(part, name, facts)
                results[f"{part}, {name}"] = facts
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
