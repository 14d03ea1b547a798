"""Attention on torch's tensors, a block of queries at a time; tuned, compiled into a program, and as an operator.

A block of scores that fits the caches need not go through memory; one that is too small wastes the matrix product.
"""

from __future__ import annotations

import showing
import torch

import tunebook as tb
from tunebook.adapters.torch import custom_op

space = tb.Space(rows=[8, 32, 128, 512, 2048], fold=[False, True])
default = tb.Config(rows=2048, fold=False)  # all at once, as one writes it first


def reference(q, k, v):
    """Do it with torch's own."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


@tb.tunable(space=space, heuristic=default, reference=reference)
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, config) -> torch.Tensor:
    """Return softmax(q kᵀ / √d) v."""
    scale = q.shape[-1] ** -0.5
    q, scale = (q * scale, 1.0) if config.fold else (q, scale)
    scores = (block @ k.transpose(-1, -2) * scale for block in q.split(config.rows, dim=-2))
    return torch.cat([block.softmax(-1) @ v for block in scores], dim=-2)


# An operator looks its configuration up at every run, also inside of a compiled program.
attention_op = custom_op("tunebook_examples::attention", attention)


def operands(heads, length, width, seed=0):
    """Return queries, keys and values."""
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(heads, length, width, generator=random) for _ in range(3))


SHAPES = ((4, 512, 64), (1, 2048, 64), (64, 64, 64))


def main(shapes=SHAPES, backend="eager"):
    """Tune every shape, and compile a program with the first one."""
    showing.tune_and_show(attention, {" x ".join(map(str, shape)): operands(*shape) for shape in shapes}, default)
    q, k, v = operands(*shapes[0])
    for function in (attention, attention_op):
        program = torch.compile(lambda q, k, v, f=function: f(q, k, v).relu(), fullgraph=True, backend=backend)
        print("compiled, it differs by", float((program(q, k, v) - reference(q, k, v).relu()).abs().max()))


if __name__ == "__main__":
    main()
