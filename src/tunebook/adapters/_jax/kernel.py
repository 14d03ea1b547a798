"""A `Kernel` in a jax program: its own backward pass as a custom_vjp, and its place on a mesh."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from tunebook._base.errors import DefinitionError
from tunebook._kernel.kernel import Kernel
from tunebook.adapters._jax.flat_call import FlatCall, is_jax_array

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from tunebook._kernel.kernel import Invocation

T = TypeVar("T")


def bind(kernel: Kernel[Any, Any], inv: Invocation[Any, Any], cfg: Any) -> Callable[..., Any]:
    """Return a function that runs a call with a configuration, and can be differentiated."""
    run = kernel.bind(inv, cfg)
    if inv.method == "shard_map" and type(kernel).create_shard_map_wrapper is Kernel.create_shard_map_wrapper:
        run = partial(_in_shard_map, inv, partial(kernel.variant("run", inv), cfg=cfg))
    return partial(_run_with_own_backward, kernel, inv, cfg, run) if kernel.has_backward(inv) else run


def _in_shard_map(inv: Invocation[Any, Any], run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    wrapped = jax.shard_map(
        partial(run, **kwargs),
        mesh=inv.mesh,
        in_specs=inv.in_specs,
        out_specs=inv.out_specs,
        check_vma=inv.check_vma,
    )
    return wrapped(*args)


@partial(jax.tree_util.register_dataclass, data_fields=["residuals", "arrays"], meta_fields=["perturbed"])
class _Saved:
    """Values that the forward pass keeps for the backward pass; `perturbed` says which arrays need a gradient."""

    __slots__ = ("arrays", "perturbed", "residuals")

    def __init__(self, residuals: Any, arrays: Sequence[Any], perturbed: tuple[bool, ...]) -> None:
        self.residuals, self.arrays, self.perturbed = residuals, arrays, perturbed


def _run_with_own_backward(
    kernel: Kernel[Any, Any],
    inv: Invocation[Any, Any],
    cfg: Any,
    run: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a kernel so that jax differentiates it by `fwd_with_residuals` and `vjp`.

    Arguments that are not arrays are closed over: they have no gradient, and need not be of a class that jax knows.
    """
    flat = FlatCall.of(args, kwargs)

    def forward(*primals: Any) -> tuple[Any, _Saved]:
        arrays = [primal.value for primal in primals]
        given, named = flat.fill(arrays)
        out, residuals = kernel.variant("fwd_with_residuals", inv)(*given, cfg=cfg, **named)
        return out, _Saved(residuals, arrays, tuple(bool(primal.perturbed) for primal in primals))

    def backward(saved: _Saved, dy: Any) -> tuple[Any, ...]:
        given, named = flat.fill(saved.arrays)
        dy = jax.tree.map(_instantiate, dy, is_leaf=_is_zero)
        grads = kernel.variant("vjp", inv)(saved.residuals, dy, *given, cfg=cfg, **named)
        found = _gradients(kernel.op_id, grads, given, named, saved.perturbed)
        # jax takes None for zero; an array of integers must have None.
        inexact = [jax.numpy.issubdtype(x.dtype, jax.numpy.inexact) for x in saved.arrays]
        return tuple(grad if has_one else None for grad, has_one in zip(found, inexact, strict=True))

    call = jax.custom_vjp(flat.of_arrays(run))
    call.defvjp(forward, backward, symbolic_zeros=True)
    return call(*flat.arrays)


def _is_zero(x: object) -> bool:
    return isinstance(x, jax.custom_derivatives.SymbolicZero)


def _instantiate(dy: Any) -> Any:
    """Return zeros for the gradient of an unused output: kernels should not have to know about symbols."""
    return jax.numpy.zeros(dy.shape, dy.dtype) if _is_zero(dy) else dy


def _gradients(
    op: str, grads: Any, args: Sequence[Any], kwargs: dict[str, Any], perturbed: Sequence[bool]
) -> list[Any]:
    """Return one gradient per array from the result of `vjp`: one per positional argument, and perhaps a dict."""
    given = tuple(grads) if isinstance(grads, (tuple, list)) else (grads,)
    named: dict[str, Any] = {}
    if len(given) == len(args) + 1 and isinstance(given[-1], dict):
        *first, named = given
        given = tuple(first)
    if len(given) != len(args):
        raise DefinitionError(
            f"the vjp of {op!r} returned {len(given)} gradients for {len(args)} positional arguments; return one for "
            "each, None where there is none, and after them a dict for keyword arguments that have some"
        )
    found: list[Any] = []
    for position, (gradient, argument) in enumerate(zip(given, args, strict=True)):
        found += _of_argument(f"the vjp of {op!r}: the gradient of argument {position}", gradient, argument)
    for name in sorted(kwargs):
        mine = _of_argument(f"the vjp of {op!r}: the gradient of {name!r}", named.get(name), kwargs[name])
        if name not in named and any(perturbed[len(found) : len(found) + len(mine)]):
            raise DefinitionError(
                f"the vjp of {op!r} returned no gradient for {name!r}, which is differentiated; return "
                f"(*gradients, {{{name!r}: gradient}}), or pass it by position"
            )
        found += mine
    return found


def _of_argument(subject: str, gradient: Any, argument: Any) -> list[Any]:
    leaves, tree = jax.tree.flatten(argument)
    try:
        parts = [None] * len(leaves) if gradient is None else tree.flatten_up_to(gradient)
    except ValueError as error:
        raise DefinitionError(f"{subject} is not put together like the argument: {error}") from error
    return [part for part, leaf in zip(parts, leaves, strict=True) if is_jax_array(leaf)]


def jitted(function: Callable[..., T]) -> Callable[..., T]:
    """Return `jax.jit` of a function, with every argument that is not an array as a constant.

    It is compiled once per set of constants. With arguments that cannot be hashed, the function runs as it is.
    """
    made: dict[Hashable, Callable[..., T]] = {}

    def call(*args: Any, **kwargs: Any) -> T:
        flat = FlatCall.of(args, kwargs)
        constants = flat.without_arrays()
        key = flat.tree, flat.places, tuple((type(constant), constant) for constant in constants.leaves)
        try:
            found = made.get(key)
        except TypeError:
            return function(*args, **kwargs)
        if found is None:
            found = made[key] = jax.jit(constants.of_arrays(function))
        return found(*flat.arrays)

    return call
