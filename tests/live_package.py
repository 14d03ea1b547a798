"""Launches a kernel of fla-core, which nobody edited, on a made-up GPU until it is tuned live; prints facts as JSON.

    python tests/live_package.py

Candidates are compiled for real, in forks beside the program. Fewer than three warps are slow on this GPU.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time

import torch
from triton.runtime import driver
from triton_packages import pretend_gpu

import tunebook as tb
from tunebook.adapters.triton import install

LONGEST_S = 120.0


def main():
    decided = []
    with contextlib.ExitStack() as patches:
        pretend_gpu(patches)
        gpu = driver.active
        gpu.behind, gpu.cost = 2, lambda facts: (1 + abs(facts["num_warps"] - 4)) * 1e-5
        install("fla", policy=tb.AutotunePolicy(cache_miss_fallback="incremental"))
        tb.metrics.on()
        from fla.ops.utils.cumsum import chunk_local_cumsum_scalar

        gate, began_s = torch.randn(1, 256, 4), time.monotonic()
        first = None
        while not decided and time.monotonic() - began_s < LONGEST_S:
            chunk_local_cumsum_scalar(gate, 64)
            first = first or gpu.launches[0]["num_warps"]
            if len(gpu.launches) % 100 == 0:
                decided = [k for (k, *_), n in tb.metrics.counts()["tunebook_tunings"].items() if n]
        gpu.launches.clear()
        for _ in range(100):
            chunk_local_cumsum_scalar(gate, 64)
        last = sorted({facts["num_warps"] for facts in gpu.launches})
        waits, calls = gpu.waits, sum(tb.metrics.counts()["tunebook_live_calls"].values())
    sys.stdout.write(json.dumps({"decided": decided, "first": first, "last": last, "waits": waits, "calls": calls}))


if __name__ == "__main__":
    main()
