"""Kernels whose launches are recorded: a program's, and one of a library that does not know tunebook."""

# ruff: noqa: N803 - constexprs are written in capitals in Triton

from __future__ import annotations

import triton
import triton.language as tl

from tunebook.adapters.triton import autotune

WARPS = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (64, 128) for warps in (1, 4)]


@autotune(WARPS, key=["n"])
@triton.jit
def gather(x_ptr, index_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(index_ptr + at, at < n, other=0)
    tl.store(out_ptr + at, tl.load(x_ptr + index, at < n), at < n)


@triton.heuristics({"EVEN": lambda args: args["n"] % 128 == 0})
@triton.autotune(WARPS, key=["n"])
@triton.jit
def foreign(x_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < at + 1 if EVEN else at < n
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask) * 2, mask)


def blocks(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


@triton.jit
def twice(x):
    return x * 2
