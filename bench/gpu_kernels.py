"""The Triton kernels of bench/gpu.py, as tutorials write them, with the configurations to choose from."""

# ruff: noqa: N803 - constexprs are written in capitals in Triton

from __future__ import annotations

import time

import torch
import triton
import triton.language as tl


def seconds(run):
    """Return the seconds that a function takes, with its work on the GPU."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


@triton.jit
def matmul(
    a_ptr, b_ptr, c_ptr, M, N, K, sam, sak, sbk, sbn, scm, scn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = program // (GROUP * tiles_n)
    first = group * GROUP
    rows = min(tiles_m - first, GROUP)
    tile_m = first + (program % (GROUP * tiles_n)) % rows
    tile_n = (program % (GROUP * tiles_n)) // rows
    at_m = (tile_m * BM + tl.arange(0, BM)) % M
    at_n = (tile_n * BN + tl.arange(0, BN)) % N
    at_k = tl.arange(0, BK)
    a = a_ptr + at_m[:, None] * sam + at_k[None, :] * sak
    b = b_ptr + at_k[:, None] * sbk + at_n[None, :] * sbn
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(tl.cdiv(K, BK)):
        x = tl.load(a, mask=at_k[None, :] < K - k * BK, other=0.0)
        y = tl.load(b, mask=at_k[:, None] < K - k * BK, other=0.0)
        total = tl.dot(x, y, total)
        a += BK * sak
        b += BK * sbk
    out_m = tile_m * BM + tl.arange(0, BM)
    out_n = tile_n * BN + tl.arange(0, BN)
    inside = (out_m[:, None] < M) & (out_n[None, :] < N)
    tl.store(c_ptr + out_m[:, None] * scm + out_n[None, :] * scn, total.to(c_ptr.dtype.element_ty), inside)


def matmul_grid(meta):
    return (triton.cdiv(meta["M"], meta["BM"]) * triton.cdiv(meta["N"], meta["BN"]),)


def _matmul_config(m, n, k, group, warps, stages):
    return triton.Config({"BM": m, "BN": n, "BK": k, "GROUP": group}, num_warps=warps, num_stages=stages)


MATMUL_48 = [
    _matmul_config(m, n, k, 8, warps, stages)
    for m, n in ((64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128))
    for k in (32, 64)
    for warps in (4, 8)
    for stages in (3, 4)
]
ADDED = _matmul_config(128, 128, 128, 8, 8, 3)
MATMUL_480 = [
    _matmul_config(m, n, k, group, warps, stages)
    for m in (32, 64, 128, 256)
    for n in (32, 64, 128, 256)
    if (m, n) != (256, 256)
    for k in (32, 64)
    for group in (1, 8)
    for warps in (4, 8)
    for stages in (2, 3, 4, 5)
]


@triton.jit
def softmax(x_ptr, out_ptr, rows, columns, stride, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for i in range(ROWS):
        row = tl.program_id(0) * ROWS + i
        inside = (at < columns) & (row < rows)
        x = tl.load(x_ptr + row * stride + at, inside, other=-float("inf")).to(tl.float32)
        e = tl.exp(x - tl.max(x, 0))
        tl.store(out_ptr + row * stride + at, (e / tl.sum(e, 0)).to(out_ptr.dtype.element_ty), inside)


def softmax_grid(meta):
    return (triton.cdiv(meta["rows"], meta["ROWS"]),)


SOFTMAX = [
    triton.Config({"ROWS": rows}, num_warps=warps, num_stages=stages)
    for rows in (1, 2, 4, 8)
    for warps in (1, 2, 4, 8, 16)
    for stages in (1, 2)
]


@triton.jit
def attention(
    q_ptr, k_ptr, v_ptr, o_ptr, scale, sequence, stride_head, stride_row,
    DIM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    base = tl.program_id(1).to(tl.int64) * stride_head
    at_m = tl.program_id(0) * BM + tl.arange(0, BM)
    at_d, at_n = tl.arange(0, DIM), tl.arange(0, BN)
    rows = base + at_m[:, None] * stride_row + at_d[None, :]
    q = tl.load(q_ptr + rows, at_m[:, None] < sequence, other=0.0)
    best = tl.full((BM,), -float("inf"), tl.float32)
    weight = tl.zeros((BM,), tl.float32)
    out = tl.zeros((BM, DIM), tl.float32)
    for start in range(0, sequence, BN):
        columns = start + at_n
        k = tl.load(k_ptr + base + columns[None, :] * stride_row + at_d[:, None], columns[None, :] < sequence, 0.0)
        scores = tl.dot(q, k) * (scale * 1.44269504)
        scores = tl.where(columns[None, :] < sequence, scores, -float("inf"))
        now = tl.maximum(best, tl.max(scores, 1))
        p = tl.exp2(scores - now[:, None])
        shrink = tl.exp2(best - now)
        weight = weight * shrink + tl.sum(p, 1)
        v = tl.load(v_ptr + base + columns[:, None] * stride_row + at_d[None, :], columns[:, None] < sequence, 0.0)
        out = tl.dot(p.to(v.dtype), v, out * shrink[:, None])
        best = now
    tl.store(o_ptr + rows, (out / weight[:, None]).to(o_ptr.dtype.element_ty), at_m[:, None] < sequence)


ATTENTION = [
    triton.Config({"BM": m, "BN": n}, num_warps=warps, num_stages=stages)
    for m in (64, 128)
    for n in (32, 64, 128)
    for warps in (4, 8)
    for stages in (2, 3)
]


@triton.jit
def small(x_ptr, y_ptr, out_ptr, n, a, b, c, d, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, at < n) + tl.load(y_ptr + at, at < n) * (a + b + c + d), at < n)


SMALL = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (128, 256, 512) for warps in (2, 4)]


@triton.jit
def double(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, at < n) * 2, at < n)


DOUBLE = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (128, 1024) for warps in (1, 4)]


@triton.jit
def dangerous(x_ptr, flag_ptr, n, MODE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MODE == 1:  # an illegal memory access
        tl.store(x_ptr + at.to(tl.int64) * 1_000_000_007, tl.full((BLOCK,), 1.0, tl.float32))
    if MODE == 2:  # a hang
        while tl.load(flag_ptr, volatile=True) == 0:
            tl.debug_barrier()
    if MODE == 3:  # a device-side assert
        tl.device_assert(at < 0, "never true")
    tl.store(x_ptr + at, tl.load(x_ptr + at, at < n) * 2, at < n)


DANGEROUS = [triton.Config({"MODE": mode, "BLOCK": block}) for mode in (0, 1, 2, 3) for block in (256, 512)]
