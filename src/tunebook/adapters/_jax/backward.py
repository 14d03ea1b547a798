"""Which passes of a differentiable function are measured: both, or the backward pass alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from tunebook._memo.context_stack import Scope, scoped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class _BackwardOnly:
    """Marks a block in which forward passes are not measured."""

    def content(self) -> str:
        """Return the same text for every block of this kind, so that they share traces."""
        return "backward only"


def backward_autotune_only() -> Scope:
    """Measure only backward passes inside a with-block, where `validate_backward` has them measured at all.

    For a kernel whose forward pass runs elsewhere, or is paid for once: by `jax.vjp`, whose result is called often.
    """
    return Scope(_BackwardOnly())


def is_backward_only() -> bool:
    """Return whether this thread or task is inside a block of `backward_autotune_only`."""
    return any(scoped(_BackwardOnly))


def both(flat: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that also computes gradients with respect to all arrays that have one."""

    def run(*arrays: Any) -> Any:
        out, pull = _vjp(flat, arrays)
        # The output stands in for its own gradient: it has the right shape and dtype, and ordinary values.
        return out, pull(out)

    return run


def backward_alone(flat: Callable[..., Any], arrays: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """Return a function that computes only gradients, and its arguments: outputs and residuals of the forward pass."""
    trees: list[Any] = []

    def forward(*given: Any) -> Any:
        out, pull = _vjp(flat, given)
        kept, tree = jax.tree.flatten(pull)
        trees.append(tree)
        return out, kept

    out, kept = jax.jit(forward)(*arrays)

    def backward(*given: Any) -> Any:
        return jax.tree.unflatten(trees[-1], given[len(out) :])(list(given[: len(out)]))

    return backward, [*out, *kept]


def _vjp(flat: Callable[..., Any], arrays: Sequence[Any]) -> tuple[list[Any], Callable[..., Any]]:
    """Return `jax.vjp` of a function with respect to the arrays that can have a gradient."""
    inexact = [i for i, x in enumerate(arrays) if is_inexact(x)]

    def forward(*chosen: Any) -> Any:
        given = list(arrays)
        for i, x in zip(inexact, chosen, strict=True):
            given[i] = x
        return [x for x in flat(*given) if is_inexact(x)]

    return jax.vjp(forward, *(arrays[i] for i in inexact))  # type: ignore[no-any-return] # jax is not seen by mypy


def is_inexact(x: Any) -> bool:
    """Return whether an array can have a gradient."""
    return bool(jax.numpy.issubdtype(x.dtype, np.inexact))
