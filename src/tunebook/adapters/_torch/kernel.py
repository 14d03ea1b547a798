"""A `Kernel` whose own backward pass is the one that torch's autograd runs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tunebook._base.errors import DefinitionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tunebook._kernel.kernel import Invocation, Kernel


def bind(kernel: Kernel[Any, Any], inv: Invocation[Any, Any], cfg: Any) -> Callable[..., Any]:
    """Return what runs a call with a configuration, and is differentiated by the kernel's `vjp` if it has one."""
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
    places = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor)]
    tensors = [args[i] for i in places]
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return run(*args, **kwargs)
    return _OwnBackward.apply(_TensorCall(kernel, inv, cfg, args, kwargs, places), *tensors)


class _TensorCall(NamedTuple):
    kernel: Kernel[Any, Any]
    inv: Invocation[Any, Any]
    cfg: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    places: Sequence[int]  # of the tensors among the arguments: only they have gradients

    def forward(self, tensors: Sequence[Any]) -> tuple[Any, Any]:
        forward = self.kernel.variant("fwd_with_residuals", self.inv)
        return forward(*self._with(tensors), cfg=self.cfg, **self.kwargs)  # type: ignore[no-any-return]

    def backward(self, residuals: Any, dy: Any, tensors: Sequence[Any]) -> list[Any]:
        vjp = self.kernel.variant("vjp", self.inv)
        found = vjp(residuals, dy, *self._with(tensors), cfg=self.cfg, **self.kwargs)
        grads = tuple(found) if isinstance(found, (tuple, list)) else (found,)
        if len(grads) != len(self.args):
            raise DefinitionError(
                f"the vjp of {self.kernel.op_id!r} returned {len(grads)} gradients for {len(self.args)} positional "
                "arguments; return one for each, None where there is none"
            )
        return [grads[i] for i in self.places]

    def _with(self, tensors: Sequence[Any]) -> list[Any]:
        given = list(self.args)
        for i, x in zip(self.places, tensors, strict=True):
            given[i] = x
        return given


class _OwnBackward(torch.autograd.Function):  # type: ignore[misc] # torch is not seen by the type checker
    """The forward pass keeps the tensors as torch keeps them, so that one changed in between is an error of torch's."""

    @staticmethod
    def forward(ctx: Any, call: _TensorCall, *tensors: Any) -> Any:
        out, ctx.residuals = call.forward(tensors)
        ctx.call = call._replace(args=tuple(None if i in call.places else x for i, x in enumerate(call.args)))
        ctx.save_for_backward(*tensors)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator] # as above
    def backward(ctx: Any, *dy: Any) -> Any:
        return None, *ctx.call.backward(ctx.residuals, dy[0] if len(dy) == 1 else dy, ctx.saved_tensors)
