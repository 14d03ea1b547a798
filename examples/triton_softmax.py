"""A softmax in Triton, some rows per program. Without a GPU, Triton's interpreter runs it on the CPU.

The interpreter takes milliseconds per program, so that there fewer and larger programs win. A GPU has another answer,
with its own entry in the book.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import triton
import triton.language as tl

from tunebook.adapters.triton import autotune

CONFIGS = [triton.Config({"ROWS": rows}, num_warps=warps) for rows in (1, 4, 16) for warps in (1, 4)]


def reference(x, *_others, **_constants):
    """Return what the launch is to write, from torch's own."""
    return torch.softmax(x, 1)


@autotune(configs=CONFIGS, key=["width"], reference=reference)
@triton.jit
def softmax_rows(x_ptr, out_ptr, height, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # noqa: N803 - constexprs
    """Write the softmax of each row."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    at = rows[:, None] * width + columns[None, :]
    inside = (rows[:, None] < height) & (columns[None, :] < width)
    x = tl.load(x_ptr + at, inside, other=-float("inf"))
    powers = tl.exp(x - tl.max(x, 1)[:, None])
    tl.store(out_ptr + at, powers / tl.sum(powers, 1)[:, None], inside)


def softmax(x):
    """Return the softmax of each row of a contiguous matrix."""
    out = torch.empty_like(x)
    height, width = x.shape
    softmax_rows[launch_grid](x, out, height, width, WIDTH=triton.next_power_of_2(width))
    return out


def launch_grid(meta):
    """Return how many programs cover all rows."""
    return (triton.cdiv(meta["height"], meta["ROWS"]),)


def main(height=128, width=200):
    """Tune one width, check the result, and say why."""
    x = torch.randn(height, width, device="cuda" if torch.cuda.is_available() else "cpu")
    torch.testing.assert_close(softmax(x), torch.softmax(x, 1))
    constant = {"WIDTH": triton.next_power_of_2(width)}
    print(softmax_rows.explain(x, torch.empty_like(x), height, width, **constant))
    print(f"\nFrom now on, launches of this width run with {softmax_rows.best_config}.")


if __name__ == "__main__":
    main()
