"""What the parts of bench/gpu.py share: problems, checks of results, and clocks of the benchmark's own."""

from __future__ import annotations

import statistics
import sys

import torch
from gpu_kernels import small


def log(*facts):
    print("#", *facts, file=sys.stderr, flush=True)


def matmul_problem(m, n, k):
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(k, n, device="cuda", dtype=torch.bfloat16)
    c = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
    return a, b, c, (a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride())


def error_of(out, expected):
    """Relative to the size of the whole; bf16 operands land between 1e-3 and 1e-2, and a NaN is never small."""
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def check(name, out, expected):
    error = error_of(out, expected)
    assert error < 1e-2, f"{name} is wrong: relative error {error}"
    return error


class Clock:
    """Times by events with a cold L2, written apart from tunebook's so that neither flatters itself."""

    def __init__(self):
        self._cuda = torch.cuda
        self._buffer = torch.empty(256 << 20, dtype=torch.int8, device="cuda")

    def samples_ms(self, run, count):
        pairs = []
        for _ in range(count):
            self._buffer.zero_()
            start, end = self._cuda.Event(enable_timing=True), self._cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            pairs.append((start, end))
        self._cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    def rounds_ms(self, runs, rounds, each):
        """Return the median of each, taken in turn so that drift hits all alike."""
        found = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                found[name] += self.samples_ms(run, each)
        return {name: statistics.median(samples) for name, samples in found.items()}


def wake_up():
    """Load what every process loads once: the context, cuBLAS, Triton's driver and a first program."""
    x = torch.ones(1024, device="cuda")
    small[(8,)](x, x, x, 1024, 1.0, 1.0, 1.0, 1.0, BLOCK=128)
    big = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(50):
        torch.mm(big, big)
    torch.cuda.synchronize()


def text_of(config):
    return str(config).replace("num_", "")
