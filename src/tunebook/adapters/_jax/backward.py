"""Which passes of a differentiable function are measured: both, or the backward pass alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from tunebook._memo.context_stack import Scope, scoped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class _BackwardOnly:
    """Marks that forward passes are not measured."""

    def content(self) -> str:
        """Return what is equal for all of them."""
        return "backward only"


def backward_autotune_only() -> Scope:
    """Measure backward passes only inside a with-block, where `validate_backward` says that they are measured at all.

    For a kernel whose forward pass runs elsewhere, or is paid for once: by `jax.vjp`, whose result is called often.
    """
    return Scope(_BackwardOnly())


def is_backward_only() -> bool:
    """Whether this thread or task is inside such a block."""
    return any(scoped(_BackwardOnly))


def both(flat: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes gradients too, with respect to all arrays that have one."""

    def run(*arrays: Any) -> Any:
        out, pull = _differentiated(flat, arrays)
        # The output stands in for its own gradient: it has the right shape and dtype, and is no special value.
        return out, pull(out)

    return run


def backward_alone(flat: Callable[..., Any], arrays: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """Return a function that computes gradients alone, and what it is given: what the forward pass keeps."""
    trees: list[Any] = []

    def forward(*given: Any) -> Any:
        out, pull = _differentiated(flat, given)
        kept, tree = jax.tree.flatten(pull)
        trees.append(tree)
        return out, kept

    out, kept = jax.jit(forward)(*arrays)

    def backward(*given: Any) -> Any:
        return jax.tree.unflatten(trees[-1], given[len(out) :])(list(given[: len(out)]))

    return backward, [*out, *kept]


def _differentiated(flat: Callable[..., Any], arrays: Sequence[Any]) -> tuple[list[Any], Callable[..., Any]]:
    inexact = [i for i, x in enumerate(arrays) if is_inexact(x)]

    def forward(*chosen: Any) -> Any:
        given = list(arrays)
        for i, x in zip(inexact, chosen, strict=True):
            given[i] = x
        return [x for x in flat(*given) if is_inexact(x)]

    out, pull = jax.vjp(forward, *(arrays[i] for i in inexact))
    return out, pull


def is_inexact(x: Any) -> bool:
    """Return whether an array can have a gradient."""
    return bool(jax.numpy.issubdtype(x.dtype, np.inexact))
