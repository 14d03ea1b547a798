"""Pallas kernels tuned inside `jax.jit` on a GPU, by the profiler's device time and by the host's clock.

    python bench/jax_gpu.py [--out FILE] [--size 4096] [--limit 100] [--all]

The kernels are those of examples/jax_pallas.py. Results are checked first. Each kernel is then tuned while a jitted
function is traced, once by each clock, among a few dozen candidates (--all: every one of the example). The default,
both winners and the next best are compiled again and timed on the device, in turns: how far is each winner from the
best of these? After --limit seconds no further kernel is begun. On a CPU, kernels are interpreted, and there is no
device time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import tunebook as tb
from tunebook._arrays.describe import timer_for
from tunebook._base.config_codec import classes_of, decode
from tunebook._measure.stopwatch import Stopwatch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import jax_pallas

NEXT_BEST = 3
ROUNDS = 15


class HostClock(Stopwatch):
    """The host's clock, also where a device has its own."""


class Case(NamedTuple):
    """A kernel, its arguments, what is right, and which candidates to try."""

    name: str
    kernel: Any
    arguments: tuple[Any, ...]
    reference: Any
    candidates: list[Any]


def cases(size, *, everything):
    a, b = jax_pallas.random(size, size), jax_pallas.random(size, size, seed=1)
    rows = jax_pallas.random(size, min(size, 2048))
    few = jax_pallas.random(max(size // 64, 8), min(size, 1024))
    blocks = [c for c in jax_pallas.blocks(a, b) if everything or (min(c.m, c.n) >= min(64, size) and c.stages != 3)]
    heuristic = tb.Config(m=32, n=32, k=32, warps=4, stages=2)
    some = [*blocks, *([] if heuristic in blocks else [heuristic])]
    yield Case(f"matmul {size} cubed", jax_pallas.matmul, (a, b), jnp.dot, some)
    for x in (rows, few):
        name = f"softmax {x.shape[0]} x {x.shape[1]}"
        yield Case(name, jax_pallas.softmax, (x,), jax.nn.softmax, list(jax_pallas.rows_at_once(x)))


def heuristic_of(case):
    return case.kernel.kernel.heuristic(case.kernel.kernel.invocation(case.arguments))


def check(case):
    """Return how far the default's result is from the right one, relative to its size; raise if that is far."""
    want = np.asarray(jax.jit(case.reference)(*case.arguments), np.float64)
    have = np.asarray(jax.jit(lambda *x: case.kernel(*x, config=heuristic_of(case)))(*case.arguments), np.float64)
    error = float(np.max(np.abs(have - want)) / np.max(np.abs(want)))
    if not error < 0.02:
        raise SystemExit(f"{case.name}: the default's result is off by {error:.3g}; no time is worth anything")
    return error


def tuned_in_jit(case, stopwatch):
    """Tune a kernel while a jitted function is traced; return what came of it, and what the first call took."""
    tuner = None if stopwatch is None else tb.Tuner(stopwatch=stopwatch)
    kernel = tb.tunable(
        case.kernel.kernel.function, space=case.candidates, heuristic=heuristic_of(case), reference=case.reference,
        name=case.kernel.__name__, store=False, tuner=tuner,
    )  # fmt: skip
    start = time.perf_counter()
    jax.block_until_ready(jax.jit(kernel)(*case.arguments))
    took_s = time.perf_counter() - start
    return tb.tune(kernel, *case.arguments), took_s  # known by now: this is to look at


def device_times(case, configs, timer):
    """Return the median seconds per configuration on the device, sampled in turns; by the host's clock without one."""
    watch = HostClock() if timer is None else Stopwatch().by(timer)
    programs = {c: jax.jit(lambda *x, c=c: case.kernel(*x, config=c)).lower(*case.arguments).compile() for c in configs}
    samples: dict[Any, list[float]] = {c: [] for c in configs}
    for program in programs.values():
        jax.block_until_ready(program(*case.arguments))
    for _ in range(ROUNDS):
        for config, program in programs.items():
            samples[config].append(watch.sample_s(lambda program=program: program(*case.arguments)))
    return {config: statistics.median(found) for config, found in samples.items()}, samples


def spread(samples):
    """Return half of the distance between the quartiles, relative to the median."""
    first, median, third = statistics.quantiles(samples, n=4)
    return (third - first) / 2 / median


def tuning_row(tuned, took_s, times):
    """Return one clock's part of the result."""
    failed = [m for m in tuned.measurements if m.failure is not None]
    best = min(times.values())
    return {
        "chosen": str(dict(tuned.config)),
        "tuning_s": round(took_s, 3),
        "candidates": len(tuned.measurements),
        "failed": sorted({f"{m.failure.kind}: {m.failure.message.splitlines()[0][:80]}" for m in failed})[:4],
        "policy": tuned.measurements[0].policy,
        "us": times[tuned.config] * 1e6,
        "over_best": times[tuned.config] / best,
    }


def fastest(tuned, count):
    works = [m for m in tuned.measurements if m.failure is None]
    ordered = sorted(works, key=lambda m: statistics.median(m.samples_s))
    return [decode(m.config, classes_of([tuned.config])) for m in ordered[:count]]


def without_config(reference, *arguments, config):
    """Run what has no configuration."""
    return reference(*arguments)


def measure(case, timer):
    error = check(case)
    clocks = {"host-clock": HostClock()} | ({} if timer is None else {"device-profiler": None})
    outcomes = {name: tuned_in_jit(case, stopwatch) for name, stopwatch in clocks.items()}
    default = tb.Config(**heuristic_of(case))
    winners = [tuned.config for tuned, _ in outcomes.values()]
    others = [config for tuned, _ in outcomes.values() for config in fastest(tuned, NEXT_BEST)]
    finalists = dict.fromkeys([default, *winners, *others])
    times, samples = device_times(case, list(finalists), timer)
    host, host_samples = device_times(case, [default], None)
    best = min(times, key=times.get)
    xla = case._replace(kernel=partial(without_config, case.reference))
    return {
        "error": error,
        "clocks": {name: tuning_row(*outcome, times) for name, outcome in outcomes.items()},
        "best": {"config": str(dict(best)), "us": times[best] * 1e6},
        "default_us": times[default] * 1e6,
        "default_by_host_us": host[default] * 1e6,
        "xla_us": device_times(xla, [default], timer)[0][default] * 1e6,
        "spread": {"timed": spread(samples[default]), "by_host": spread(host_samples[default])},
    }


def cost_of_a_sample(timer):
    """Return the seconds that one sample takes, most of which is the profile."""
    x = jnp.ones(1024)
    run = jax.jit(lambda x: x + 1)
    jax.block_until_ready(run(x))
    timer.sample_s(lambda: run(x), 1)
    start = time.perf_counter()
    for _ in range(5):
        timer.sample_s(lambda: run(x), 1)
    return (time.perf_counter() - start) / 5


def show(found):
    print(f"{found['device']}, jax {found['jax']}, a sample by the profiler takes {found['profile_ms']} ms")
    columns = "{:<24} {:<16} {:>9} {:>10} {:>8} {:>10} {:>10} {:>10}"
    print(columns.format("kernel", "tuned by", "tuning s", "chosen us", "/ best", "best us", "default us", "XLA us"))
    for name, case in found["cases"].items():
        for clock, row in case["clocks"].items():
            numbers = (row["us"], row["over_best"], case["best"]["us"], case["default_us"], case["xla_us"])
            print(columns.format(name, clock, row["tuning_s"], *(f"{n:.4g}" for n in numbers)))
        print(f"  default by the host's clock {case['default_by_host_us']:.4g} us; spread {case['spread']}")
        for clock, row in case["clocks"].items():
            print(f"  {clock}: {row['chosen']} of {row['candidates']}; failures: {row['failed']}")


def table(found):
    """Return the rows for bench/results/summary.md."""
    rows = []
    for name, case in found["cases"].items():
        what = f"{name} in Pallas, {found['device']}"
        for clock, row in case["clocks"].items():
            rows.append((f"{what}: tuned in jit by the {clock}, beside the best", f"{row['over_best']:.3f} x"))
        rows.append((f"{what}: tuned", f"{case['best']['us']:.4g} us"))
        rows.append((f"{what}: default", f"{case['default_us']:.4g} us"))
        rows.append((f"{what}: XLA's own", f"{case['xla_us']:.4g} us"))
    return [{"what": what, "measured": measured, "target": "", "kept": True} for what, measured in rows]


def main(arguments=None) -> int:
    """Measure what there is time for, print a table, and write it all down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--size", type=int, default=64 if jax_pallas.INTERPRETED else 4096)
    parser.add_argument("--limit", type=float, default=100.0)
    parser.add_argument("--all", action="store_true", dest="everything")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    timer = timer_for((jnp.ones(4),))
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": tb.device_fingerprint(jax.devices()[0]),
        "jax": jax.__version__,
        "profile_ms": None if timer is None else round(cost_of_a_sample(timer) * 1e3, 2),
        "cases": {},
    }
    for case in cases(options.size, everything=options.everything):
        if found["cases"] and time.monotonic() - start > options.limit:
            print(f"no time was left for {case.name}", file=sys.stderr)
            continue
        found["cases"][case.name] = measure(case, timer)
        if options.out is not None:
            found["table"] = table(found)
            options.out.write_text(json.dumps(found, indent=1))  # after each: a run that is cut off says what it has
    show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
