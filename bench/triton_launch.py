"""What a launch of a Triton kernel costs the host: a fixed configuration, `triton.autotune`, and tunebook.

    .venv/bin/python bench/triton_launch.py [--rounds 101]

Needs torch and Triton, and no GPU: the driver does nothing, so that all that is left is the way to it. Programs are
compiled for sm_90 by Triton's compiler. Each launch has the arguments that its caller would pass; all are tuned before.
"watched" is a kernel that was tuned by its own launches, whose winner is timed in one of 23 of them.
"""

# ruff: noqa: N803, PLW0108 - constexprs are written in capitals in Triton; programs bind the grid in each call

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import torch
import triton
import triton.language as tl
from fake_gpu import FakeGpu, installed
from interleaved import Case, Row, interleave, ratio, save, show

import tunebook as tb
from tunebook.adapters.triton import autotune

LIVE = tb.AutotunePolicy(cache_miss_fallback="incremental")
CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (64, 128) for warps in (1, 2)]


@triton.jit
def few(x_ptr, out_ptr, n, step, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at * step, at < n, 0.0) * factor, at < n)


@triton.jit
def many(
    q, k, v, g, h, out, do, dq, dk, dv, dg, dh, scale, T, H, K, V, B,
    USE_G: tl.constexpr, USE_H: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(q + at, at < T * H, 0.0) * scale, at < T * H)


def arguments_of(kernel):
    """Return the positional and the named arguments of a launch: 5 by position, or 21 by name."""
    x = torch.zeros(4096)
    if kernel is few:
        return (x, x, 4096, 1, 2.0), {}
    tensors = dict.fromkeys(kernel.arg_names[:12], x)
    return (), tensors | {"scale": 0.1, "T": 2048, "H": 16, "K": 128, "V": 128, "B": 4} | dict.fromkeys(
        ("USE_G", "USE_H", "CAUSAL"), True
    )


class IdleGpu(FakeGpu):
    """A GPU whose launches are over before the next one, and cost the host nothing."""

    def __init__(self):
        super().__init__(lambda facts: 1e-5 * (1 + facts["num_warps"]))
        self.behind = 2

    def _launcher(self, src, metadata):
        seconds = 1e-5 * (1 + metadata.num_warps)

        def launch(*_):
            self.count += 1
            self._clocks_s[0] += seconds

        return launch


def grid(meta):
    return (4096 // meta["BLOCK"],)


def cases_of(kernel):
    """Return the launches to compare, each tuned, by what tunes them."""
    args, named = arguments_of(kernel)
    key = [kernel.arg_names[2] if kernel is few else "T"]
    theirs = triton.autotune(CONFIGS, key=key)(kernel)
    ours = autotune(CONFIGS, key=key, store=False)(kernel)
    watched = autotune(CONFIGS, key=key, store=False, processes=False, policy=LIVE)(kernel)
    for tuned in (theirs, ours):
        tuned[grid](*args, **named)
    while "watching the winner" not in str(watched.explain(*args, grid=grid, **named)):
        for _ in range(1000):
            watched[grid](*args, **named)
    fixed = theirs.best_config.all_kwargs()
    called = (*args, *named.values())
    functions = {
        "fixed": lambda *values, **values_by_name: kernel[grid](*values, **values_by_name, **fixed),
        "triton.autotune": lambda *values, **values_by_name: theirs[grid](*values, **values_by_name),
        "tunebook": lambda *values, **values_by_name: ours[grid](*values, **values_by_name),
        "tunebook, watched": lambda *values, **values_by_name: watched[grid](*values, **values_by_name),
    }
    return [Case(name, function, [called], by_name=list(named)) for name, function in functions.items()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=101)
    options = parser.parse_args()
    rows, raw = [], {}
    with tempfile.TemporaryDirectory() as home:
        os.environ["TUNEBOOK_HOME"] = home
        for kernel, words in ((few, "5 arguments"), (many, "21 arguments by name")):
            with installed(IdleGpu(), kernel):
                measured = interleave(cases_of(kernel), options.rounds)
            raw[words] = measured
            us = sorted(measured["fixed"])[options.rounds // 2] * 1e-3
            rows.append(Row(what=f"{words}: a fixed configuration", measured=us, unit="us"))
            for name, most in (("triton.autotune", None), ("tunebook", 0.75), ("tunebook, watched", 0.8)):
                beside = ratio(measured, name, "fixed")
                rows.append(Row(what=f"{words}: {name} / fixed", measured=beside, unit="x", at_most=most))
    show(rows)
    save("triton_launch", rows, raw, ["torch", "triton"])
    return 0 if all(row.kept for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
