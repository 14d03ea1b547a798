"""Four Triton kernels of bench/record_shapes.py: their configurations, their shapes, their operands, the right outputs.

A configuration is the same at every shape, so blocks do not follow the sizes: layer norm and softmax loop over columns.
Sizes that only bound a mask are not specialised, and all others are multiples of 16: a kernel is compiled once for all
shapes (attention once per head dimension).
"""

# ruff: noqa: N803 - constexprs are written in capitals in Triton

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

import gpu_kernels
import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Callable

Config = dict[str, int]
Sizes = tuple[int, ...]

MOST_FLOPS = 1.2e11  # most launches stay under 300 us
MOST_ELEMENTS = 2**27

matmul = triton.jit(gpu_kernels.matmul.fn, do_not_specialize=["M"])
attention = triton.jit(gpu_kernels.attention.fn, do_not_specialize=["sequence"])


@triton.jit(do_not_specialize=["rows"])
def layer_norm(
    x_ptr, w_ptr, b_ptr, out_ptr, rows, columns, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    start = row.to(tl.int64) * stride
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, columns, BLOCK):
        inside = (row < rows) & (first + at < columns)
        x = tl.load(x_ptr + start + first + at, inside, other=0.0).to(tl.float32)
        total += x
        squares += x * x
    mean = tl.sum(total, 1)[:, None] / columns
    scale = tl.rsqrt(tl.sum(squares, 1)[:, None] / columns - mean * mean + 1e-5)
    for first in range(0, columns, BLOCK):
        inside = (row < rows) & (first + at < columns)
        x = tl.load(x_ptr + start + first + at, inside, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + first + at, first + at < columns, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + first + at, first + at < columns, other=0.0).to(tl.float32)
        y = (x - mean) * scale * w + b
        tl.store(out_ptr + start + first + at, y.to(out_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows"])
def softmax(x_ptr, out_ptr, rows, columns, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    start = row.to(tl.int64) * stride
    best = tl.full((ROWS, 1), -1e30, tl.float32)
    weight = tl.zeros((ROWS, 1), tl.float32)
    for first in range(0, columns, BLOCK):
        inside = (row < rows) & (first + at < columns)
        x = tl.load(x_ptr + start + first + at, inside, other=-1e30).to(tl.float32)
        now = tl.maximum(best, tl.max(x, 1)[:, None])
        weight = weight * tl.exp(best - now) + tl.sum(tl.exp(x - now), 1)[:, None]
        best = now
    for first in range(0, columns, BLOCK):
        inside = (row < rows) & (first + at < columns)
        x = tl.load(x_ptr + start + first + at, inside, other=-1e30).to(tl.float32)
        y = tl.exp(x - best) / weight
        tl.store(out_ptr + start + first + at, y.to(out_ptr.dtype.element_ty), inside)


def _matmul_configs() -> list[Config]:
    narrow, middle = ((16, 64), (16, 128), (32, 64), (32, 128)), ((64, 64), (64, 128), (128, 64))
    wide = ((128, 256), (256, 128), (64, 256))
    found = [
        *[(*tile, k, w, s) for tile in narrow for k in (64, 128) for w in (2, 4) for s in (3, 5)],
        *[(*tile, k, w, s) for tile in middle for k in (64, 128) for w in (4, 8) for s in (3, 4)],
        *[(128, 128, k, w, s) for k in (32, 64, 128) for w in (4, 8) for s in (3, 4)],
        *[(*tile, 64, 8, s) for tile in wide for s in (3, 4)],
    ]
    return [
        {"BM": m, "BN": n, "BK": k, "GROUP": 8, "num_warps": warps, "num_stages": stages}
        for m, n, k, warps, stages in found
    ]


def _row_configs() -> list[Config]:
    tiles = ((1, 512), (4, 128), (1, 1024), (4, 256), (1, 2048), (2, 1024), (8, 256), (1, 4096), (4, 1024), (1, 8192))
    return [
        {"ROWS": rows, "BLOCK": block, "num_warps": warps}
        for rows, block in tiles
        for warps in (1, 2, 4, 8, 16)
        if 8 <= rows * block // (32 * warps) <= 32
    ]


def _attention_configs() -> list[Config]:
    return [
        {"BM": m, "BN": n, "num_warps": warps, "num_stages": stages}
        for m in (16, 32, 64, 128)
        for n in (32, 64, 128)
        for warps in ((4,) if m <= 32 else (4, 8))
        for stages in (2, 3)
    ]


def _drawn(rng: random.Random, low: float, high: float, multiple: int = 1) -> int:
    """Return a size that is as likely to be small as large: `multiple` times two to a power from low to high."""
    return multiple * round(2 ** rng.uniform(low, high))


_HIDDEN = (768, 1024, 1536, 2048, 2304, 2560, 3072, 4096, 5120, 6144, 7168, 8192, 11008, 12288, 14336, 16384)


def _matmul_shape(rng: random.Random) -> Sizes:
    if rng.random() < 0.5:
        rows = rng.choice((1, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 777, 1000, 1024, 2048, 4096, 8192))
        return rows, rng.choice((*_HIDDEN, 32000)), rng.choice(_HIDDEN)
    return _drawn(rng, 0, 13), _drawn(rng, 1, 10, 16), _drawn(rng, 1, 10, 16)


def _rows_shape(rng: random.Random) -> Sizes:
    if rng.random() < 0.4:
        return rng.choice((1, 8, 64, 128, 512, 1000, 2048, 4096, 8192, 16384)), rng.choice((*_HIDDEN, 32000, 128256))
    return _drawn(rng, 0, 15), _drawn(rng, 2, 12, 16)


def _attention_shape(rng: random.Random) -> Sizes:
    dim = rng.choice((64, 128))
    if rng.random() < 0.4:
        heads = rng.choice((8, 12, 16, 24, 32, 40, 64)) * rng.choice((1, 1, 2, 4, 8))
        return heads, rng.choice((128, 197, 256, 384, 512, 577, 1024, 1500, 2048, 4096, 8192)), dim
    return _drawn(rng, 2, 9), _drawn(rng, 4, 13), dim


class Launcher(NamedTuple):
    """One kernel at one shape: the positional arguments of a launch, and its grid for a configuration."""

    kernel: Any
    arguments: tuple[Any, ...]
    grid: Callable[[Config], tuple[int, ...]]
    constants: Config
    outputs: Callable[[], tuple[Any, Any]]  # the kernel's and the right one, in float32

    def launch(self, config: Config) -> None:
        self.kernel[self.grid(config)](*self.arguments, **self.constants, **config)

    def compile(self, config: Config) -> None:
        """Compile a configuration into Triton's cache on disk; arguments are dtypes in the place of tensors."""
        types = tuple(a.dtype if isinstance(a, torch.Tensor) else a for a in self.arguments)
        self.kernel.warmup(*types, grid=(1,), **self.constants, **config)


Make = "Callable[..., torch.Tensor]"  # of a shape: a tensor of random numbers in bfloat16


def _on_matmul(make: Make, sizes: Sizes) -> Launcher:
    m, n, k = sizes
    a, b, c = make(m, k), make(k, n), make(m, n)
    return Launcher(
        matmul,
        (a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride()),
        lambda config: (triton.cdiv(m, config["BM"]) * triton.cdiv(n, config["BN"]),),
        {},
        lambda: (c.float(), a.float() @ b.float()),
    )


def _on_layer_norm(make: Make, sizes: Sizes) -> Launcher:
    rows, columns = sizes
    x, w, b, out = make(rows, columns), make(columns), make(columns), make(rows, columns)
    return Launcher(
        layer_norm,
        (x, w, b, out, rows, columns, columns),
        lambda config: (triton.cdiv(rows, config["ROWS"]),),
        {},
        lambda: (out.float(), torch.nn.functional.layer_norm(x.float(), (columns,), w.float(), b.float())),
    )


def _on_softmax(make: Make, sizes: Sizes) -> Launcher:
    rows, columns = sizes
    x, out = make(rows, columns), make(rows, columns)
    return Launcher(
        softmax,
        (x, out, rows, columns, columns),
        lambda config: (triton.cdiv(rows, config["ROWS"]),),
        {},
        lambda: (out.float(), torch.softmax(x.float(), 1)),
    )


def _on_attention(make: Make, sizes: Sizes) -> Launcher:
    heads, sequence, dim = sizes
    q, k, v, out = (make(heads, sequence, dim) for _ in range(4))
    return Launcher(
        attention,
        (q, k, v, out, dim**-0.5, sequence, sequence * dim, dim),
        lambda config: (triton.cdiv(sequence, config["BM"]), heads),
        {"DIM": dim},
        lambda: (
            out.float(),
            torch.softmax(q.float() @ k.float().transpose(1, 2) * dim**-0.5, 2) @ v.float(),
        ),
    )


class Recorded(NamedTuple):
    """A kernel to record: the names of its sizes, its configurations, and how shapes are drawn and prepared."""

    sizes: tuple[str, ...]
    configs: list[Config]
    draw: Callable[[random.Random], Sizes]
    fits: Callable[[Sizes], bool]
    on: Callable[[Any, Sizes], Launcher]
    checked_at: tuple[Sizes, ...]  # every way that a configuration is compiled; its outputs are checked there

    def shapes(self, many: int, seed: int) -> list[Sizes]:
        rng, found = random.Random(seed), dict[Sizes, None]()
        while len(found) < many:
            sizes = self.draw(rng)
            if self.fits(sizes):
                found[sizes] = None
        return list(found)


def _flops_fit(sizes: Sizes) -> bool:
    m, n, k = sizes
    return 2 * m * n * k <= MOST_FLOPS


def _elements_fit(sizes: Sizes) -> bool:
    return sizes[0] * sizes[1] <= MOST_ELEMENTS


def _attention_fits(sizes: Sizes) -> bool:
    heads, sequence, dim = sizes
    return 4 * heads * sequence**2 * dim <= MOST_FLOPS


_ROWS = ("rows", "columns")
ALL = {
    "matmul": Recorded(("m", "n", "k"), _matmul_configs(), _matmul_shape, _flops_fit, _on_matmul, ((77, 144, 112),)),
    "layer_norm": Recorded(_ROWS, _row_configs(), _rows_shape, _elements_fit, _on_layer_norm, ((19, 656),)),
    "softmax": Recorded(_ROWS, _row_configs(), _rows_shape, _elements_fit, _on_softmax, ((19, 656),)),
    "attention": Recorded(
        ("heads", "sequence", "dim"),
        _attention_configs(),
        _attention_shape,
        _attention_fits,
        _on_attention,
        ((3, 157, 64), (3, 157, 128)),
    ),
}
