"""A `Kernel` whose own backward pass torch's autograd runs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tunebook._base.errors import DefinitionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tunebook._kernel.kernel import Invocation, Kernel


def bind(kernel: Kernel[Any, Any], inv: Invocation[Any, Any], cfg: Any) -> Callable[..., Any]:
    """Return a function that runs a call with a configuration; autograd uses the kernel's `vjp`, if it has one."""
    run = kernel.bind(inv, cfg)
    return partial(_run, kernel, inv, cfg, run) if kernel.has_backward(inv) else run


def _run(
    kernel: Kernel[Any, Any],
    inv: Invocation[Any, Any],
    cfg: Any,
    run: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    places = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor)]  # only tensors have gradients
    tensors = [args[i] for i in places]
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return run(*args, **kwargs)
    # Without the tensors: autograd keeps these functions, and must not keep tensors alive by them.
    constants = [None if i in places else x for i, x in enumerate(args)]

    def fill(tensors: Sequence[Any]) -> list[Any]:
        given = list(constants)
        for i, x in zip(places, tensors, strict=True):
            given[i] = x
        return given

    def forward(tensors: Sequence[Any]) -> tuple[Any, Any]:
        return kernel.variant("fwd_with_residuals", inv)(*fill(tensors), cfg=cfg, **kwargs)  # type: ignore[no-any-return]

    def backward(residuals: Any, dy: Any, tensors: Sequence[Any]) -> list[Any]:
        found = kernel.variant("vjp", inv)(residuals, dy, *fill(tensors), cfg=cfg, **kwargs)
        grads = tuple(found) if isinstance(found, (tuple, list)) else (found,)
        if len(grads) != len(constants):
            raise DefinitionError(
                f"the vjp of {kernel.op_id!r} returned {len(grads)} gradients for {len(constants)} positional "
                "arguments; return one for each, or None for an argument without a gradient"
            )
        return [grads[i] for i in places]

    return _OwnBackward.apply(forward, backward, *tensors)


class _OwnBackward(torch.autograd.Function):  # type: ignore[misc] # torch is not seen by the type checker
    """The forward pass saves the tensors in torch's own way, so torch raises if one is changed before the backward."""

    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Any], backward: Callable[..., Any], *tensors: Any) -> Any:
        out, ctx.residuals = forward(tensors)
        ctx.own_backward = backward
        ctx.save_for_backward(*tensors)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator] # torch has no types
    def backward(ctx: Any, *dy: Any) -> Any:
        return None, None, *ctx.own_backward(ctx.residuals, dy[0] if len(dy) == 1 else dy, ctx.saved_tensors)
