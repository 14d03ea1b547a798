"""A `Kernel` in a jax program: its own backward pass as a custom_vjp, and its place on a mesh."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax

from tunebook._base.errors import DefinitionError
from tunebook._kernel.kernel import Kernel
from tunebook.adapters._jax.facts import is_jax_array

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from tunebook._kernel.kernel import Invocation

T = TypeVar("T")


def bind(kernel: Kernel[Any, Any], inv: Invocation[Any, Any], cfg: Any) -> Callable[..., Any]:
    """Return what runs a call with a configuration, given its arguments, and can be differentiated."""
    run = kernel.bind(inv, cfg)
    if inv.method == "shard_map" and type(kernel).create_shard_map_wrapper is Kernel.create_shard_map_wrapper:
        run = partial(_in_shard_map, inv, partial(kernel.variant("run", inv), cfg=cfg))
    if not kernel.has_backward(inv):
        return run
    return partial(_with_own_backward, _Passes(kernel, inv, cfg, run))


def _in_shard_map(inv: Invocation[Any, Any], run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    wrapped = jax.shard_map(
        partial(run, **kwargs),
        mesh=inv.mesh,
        in_specs=inv.in_specs,
        out_specs=inv.out_specs,
        check_vma=inv.check_vma,
    )
    return wrapped(*args)


class _Passes(NamedTuple):
    kernel: Kernel[Any, Any]
    inv: Invocation[Any, Any]
    cfg: Any
    run: Callable[..., Any]

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        forward = self.kernel.variant("fwd_with_residuals", self.inv)
        return forward(*args, cfg=self.cfg, **kwargs)  # type: ignore[no-any-return]

    def backward(self, residuals: Any, dy: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self.kernel.variant("vjp", self.inv)(residuals, dy, *args, cfg=self.cfg, **kwargs)


@partial(jax.tree_util.register_dataclass, data_fields=["residuals", "arrays"], meta_fields=["perturbed"])
class _Saved:
    """What the backward pass gets from the forward pass; `perturbed` says which arrays a gradient is asked for."""

    __slots__ = ("arrays", "perturbed", "residuals")

    def __init__(self, residuals: Any, arrays: Sequence[Any], perturbed: tuple[bool, ...]) -> None:
        self.residuals, self.arrays, self.perturbed = residuals, arrays, perturbed


def _with_own_backward(passes: _Passes, *args: Any, **kwargs: Any) -> Any:
    """Run a kernel such that jax differentiates it by `fwd_with_residuals` and `vjp`.

    What is no array is closed over: it has no gradient, and need not be something that jax knows.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if is_jax_array(leaf)]

    def rebuilt(arrays: Sequence[Any]) -> Any:
        filled = list(leaves)
        for i, x in zip(places, arrays, strict=True):
            filled[i] = x
        return jax.tree.unflatten(tree, filled)

    def run(*arrays: Any) -> Any:
        given, named = rebuilt(arrays)
        return passes.run(*given, **named)

    def forward(*primals: Any) -> tuple[Any, _Saved]:
        arrays = [primal.value for primal in primals]
        given, named = rebuilt(arrays)
        out, residuals = passes.forward(*given, **named)
        return out, _Saved(residuals, arrays, tuple(bool(primal.perturbed) for primal in primals))

    def backward(saved: _Saved, dy: Any) -> tuple[Any, ...]:
        given, named = rebuilt(saved.arrays)
        grads = passes.backward(saved.residuals, jax.tree.map(_instantiated, dy, is_leaf=_is_zero), given, named)
        found = _gradients(passes.kernel.op_id, grads, given, named, saved.perturbed)
        return tuple(_fitting(gradient, x) for gradient, x in zip(found, saved.arrays, strict=True))

    call = jax.custom_vjp(run)
    call.defvjp(forward, backward, symbolic_zeros=True)
    return call(*(leaves[i] for i in places))


def _is_zero(x: object) -> bool:
    return isinstance(x, jax.custom_derivatives.SymbolicZero)


def _instantiated(dy: Any) -> Any:
    """Return zeros for an output that nothing depends on: kernels should not have to know of symbols."""
    return jax.numpy.zeros(dy.shape, dy.dtype) if _is_zero(dy) else dy


def _fitting(gradient: Any, x: Any) -> Any:
    """Return a gradient as jax takes it: None is zero, and what has no gradient gets none."""
    return gradient if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact) else None


def _gradients(
    op: str, grads: Any, args: Sequence[Any], kwargs: dict[str, Any], perturbed: Sequence[bool]
) -> list[Any]:
    """Return one gradient per array from what `vjp` returned: one per positional argument, and perhaps a dict."""
    given = tuple(grads) if isinstance(grads, (tuple, list)) else (grads,)
    named: dict[str, Any] | None = None
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
        missing = named is None or name not in named
        gradient = None if missing else named[name]  # type: ignore[index] # it is there
        mine = _of_argument(f"the vjp of {op!r}: the gradient of {name!r}", gradient, kwargs[name])
        if missing and any(perturbed[len(found) : len(found) + len(mine)]):
            raise DefinitionError(
                f"the vjp of {op!r} returned no gradient for {name!r}, which is differentiated; return "
                f"(*gradients, {{{name!r}: gradient}}), or pass it by position"
            )
        found += mine
    return found


def _of_argument(what: str, gradient: Any, argument: Any) -> list[Any]:
    leaves, tree = jax.tree.flatten(argument)
    try:
        parts = [None] * len(leaves) if gradient is None else tree.flatten_up_to(gradient)
    except ValueError as error:
        raise DefinitionError(f"{what} is not put together like the argument: {error}") from error
    return [part for part, leaf in zip(parts, leaves, strict=True) if is_jax_array(leaf)]


# ------------------------------------------------------------------------------------------------------------ compiling


def jitted(function: Callable[..., T]) -> Callable[..., T]:
    """Return `jax.jit` of a function, in which whatever is no array is a constant.

    It is compiled once per set of constants; arguments that cannot be told apart cheaply make it run as it is.
    """
    made: dict[Hashable, Callable[..., T]] = {}

    def call(*args: Any, **kwargs: Any) -> T:
        leaves, tree = jax.tree.flatten((args, kwargs))
        places = tuple(i for i, leaf in enumerate(leaves) if is_jax_array(leaf))
        constants = [None if i in places else leaf for i, leaf in enumerate(leaves)]
        key = tree, places, tuple((type(constant), constant) for constant in constants)
        try:
            found = made.get(key)
        except TypeError:
            return function(*args, **kwargs)
        if found is None:
            found = made[key] = jax.jit(_of_arrays(function, tree, constants, places))
        return found(*(leaves[i] for i in places))

    return call


def _of_arrays(
    function: Callable[..., T], tree: Any, constants: Sequence[Any], places: Sequence[int]
) -> Callable[..., T]:
    def flat(*arrays: Any) -> T:
        filled = list(constants)
        for i, x in zip(places, arrays, strict=True):
            filled[i] = x
        args, kwargs = jax.tree.unflatten(tree, filled)
        return function(*args, **kwargs)

    return flat
