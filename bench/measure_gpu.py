"""The ways to measure of `tunebook.Measure`, on a GPU: RMS norm by PyTorch and by liger-kernel, which nobody edited.

Needs a GPU, and liger-kernel in a folder: `make compat-packages` fills `.compat-packages`.

    PYTHONPATH=src:.compat-packages python bench/measure_gpu.py        half a minute; writes results/measure_gpu.json
"""

from __future__ import annotations

import statistics
import sys

import torch
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from tables import report
from torch.nn import functional

import tunebook as tb
from tunebook._arrays.device_fingerprint import gpu_driver

WAYS = {
    "usual": tb.Measure(),
    "warm": tb.Measure(cache="warm"),
    "cold": tb.Measure(cache="cold"),
    "warm, graph": tb.Measure(cache="warm", launch="graph"),
    "warm, 8 inputs": tb.Measure(cache="warm", inputs=8),
    "host": tb.Measure(host=True),
}
SMALL, LARGE = 16, 4096  # rows: 128 KB, and 32 MB, which does not fit into the L2 cache of an H200 with its output


@tb.tunable(space=tb.Space(by=["torch", "liger"]), heuristic={"by": "torch"}, store=False)
def rms_norm(x, weight, *, config):
    if config.by == "torch":
        return functional.rms_norm(x, (x.shape[-1],), weight, 1e-6)
    return LigerRMSNormFunction.apply(x, weight, 1e-6)


def measured(rows):
    """Return the median of each candidate's samples in microseconds, by way to measure."""
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    found = {}
    for name, way in WAYS.items():
        tuned = tb.tune(rms_norm, x, weight, measure=way, budget="3s")
        found[name] = {
            "policy": sorted({each.policy for each in tuned.measurements}),
            "us": {
                each.config["v"]["by"]: 1e6 * statistics.median(each.samples_s)
                for each in tuned.measurements
                if each.samples_s
            },
        }
    return found


def row(what, value, target, kept):
    return what, f"{value:.2f} x", target, kept(value)


def main():
    raw = {rows: measured(rows) for rows in (SMALL, LARGE)}
    facts = {"gpu": torch.cuda.get_device_name(), "driver": gpu_driver().get("driver", "unknown")}
    return report("measure_gpu", table(raw), raw, quick=False, **facts)


def table(raw):
    """Return the rows with targets."""

    def ratio(rows, over, under, by="torch"):
        return raw[rows][over]["us"][by] / raw[rows][under]["us"][by]

    policies = [tuple(way["policy"]) for way in raw[SMALL].values()]
    return [
        row("128 KB, cold caches beside warm ones", ratio(SMALL, "cold", "warm"), "> 1.1 x", lambda x: x > 1.1),
        row("32 MB, the same", ratio(LARGE, "cold", "warm"), ">= 1 x", lambda x: x >= 1),
        row("128 KB, 8 inputs in turn beside one", ratio(SMALL, "warm, 8 inputs", "warm"), "", lambda _: True),
        row("128 KB, by the host's clock beside events", ratio(SMALL, "host", "warm"), "> 1 x", lambda x: x > 1),
        row("128 KB, eager beside a graph", ratio(SMALL, "warm", "warm, graph"), ">= 0.9 x", lambda x: x >= 0.9),
        ("ways that are told apart in the book", str(len(set(policies))), str(len(WAYS) - 1),
         len(set(policies)) >= len(WAYS) - 1),  # the usual one is warm or cold
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
