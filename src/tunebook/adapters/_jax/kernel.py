"""A call as a function of its arrays: flattened, jitted, on a mesh, and differentiated by jax or by the kernel."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import jax
import numpy as np

from tunebook._arrays.describe import is_array
from tunebook._base.errors import DefinitionError
from tunebook._kernel.kernel import Invocation, Kernel
from tunebook._memo.context_stack import Scope, scoped

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence


T = TypeVar("T")


def is_jax_array(x: object) -> bool:
    """Return whether jax takes this for an array: a jax or numpy array, a tracer, or a description of an array."""
    return isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) or is_array(x)


class FlatCall(NamedTuple):
    """The leaves of (args, kwargs), their tree, and the places of the arrays among the leaves."""

    leaves: list[Any]
    tree: Any
    places: tuple[int, ...]

    @classmethod
    def of(cls, args: Any, kwargs: Any, is_leaf_array: Callable[[Any], bool] = is_jax_array) -> Self:
        """Flatten the arguments of a call."""
        leaves, tree = jax.tree.flatten((args, dict(kwargs)))
        return cls(leaves, tree, tuple(i for i, leaf in enumerate(leaves) if is_leaf_array(leaf)))

    @property
    def arrays(self) -> list[Any]:
        """The arrays, in the order in which jax finds them."""
        return [self.leaves[i] for i in self.places]

    def without_arrays(self) -> Self:
        """Return the same call with None for each array: a cache that keeps it keeps no array alive."""
        return self.with_arrays([None] * len(self.places))

    def with_arrays(self, arrays: Iterable[Any]) -> Self:
        """Return the same call with other arrays in the same places."""
        leaves = list(self.leaves)
        for i, x in zip(self.places, arrays, strict=True):
            leaves[i] = x
        return self._replace(leaves=leaves)

    def fill(self, arrays: Iterable[Any]) -> Any:
        """Return (args, kwargs) of the same call with other arrays."""
        return jax.tree.unflatten(self.tree, self.with_arrays(arrays).leaves)

    def of_arrays(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that takes the arrays alone, and closes over the other arguments."""

        def flat(*arrays: Any) -> Any:
            args, kwargs = self.fill(arrays)
            return function(*args, **kwargs)

        return flat


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


def only_backward() -> bool:
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


def bind(kernel: Kernel[Any, Any], inv: Invocation[Any, Any], cfg: Any) -> Callable[..., Any]:
    """Return a function that runs a call with a configuration, and can be differentiated."""
    run = kernel.bind(inv, cfg)
    if inv.method == "shard_map" and type(kernel).create_shard_map_wrapper is Kernel.create_shard_map_wrapper:
        one = kernel.variant("run", inv)
        options = {"mesh": inv.mesh, "in_specs": inv.in_specs, "out_specs": inv.out_specs, "check_vma": inv.check_vma}

        def run(*args: Any, **kwargs: Any) -> Any:
            return jax.shard_map(partial(one, cfg=cfg, **kwargs), **options)(*args)

    return partial(_run_with_own_backward, kernel, inv, cfg, run) if kernel.has_backward(inv) else run


@partial(jax.tree_util.register_dataclass, data_fields=["residuals", "arrays"], meta_fields=["perturbed"])
class _Saved:
    """Values that the forward pass keeps for the backward pass; `perturbed` says which arrays need a gradient."""

    __slots__ = ("arrays", "perturbed", "residuals")

    def __init__(self, residuals: Any, arrays: Sequence[Any], perturbed: tuple[bool, ...]) -> None:
        self.residuals, self.arrays, self.perturbed = residuals, arrays, perturbed


def _run_with_own_backward(
    kernel: Kernel[Any, Any], inv: Invocation[Any, Any], cfg: Any, run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a kernel so that jax differentiates it by `fwd_with_residuals` and `vjp`."""
    # Arguments that are not arrays are closed over: they have no gradient, and need not be of a class that jax knows.
    flat = FlatCall.of(args, kwargs)

    def forward(*primals: Any) -> tuple[Any, _Saved]:
        arrays = [primal.value for primal in primals]
        given, named = flat.fill(arrays)
        out, residuals = kernel.variant("fwd_with_residuals", inv)(*given, cfg=cfg, **named)
        return out, _Saved(residuals, arrays, tuple(bool(primal.perturbed) for primal in primals))

    def backward(saved: _Saved, dy: Any) -> tuple[Any, ...]:
        given, named = flat.fill(saved.arrays)
        # Zeros for the gradient of an unused output: kernels should not have to know about symbols.
        dy = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype) if is_zero(x) else x, dy, is_leaf=is_zero)
        grads = kernel.variant("vjp", inv)(saved.residuals, dy, *given, cfg=cfg, **named)
        found = _gradients(kernel.op_id, grads, given, named, saved.perturbed)
        # jax takes None for zero; an array of integers must have None.
        return tuple(grad if is_inexact(x) else None for grad, x in zip(found, saved.arrays, strict=True))

    def is_zero(x: object) -> bool:
        return isinstance(x, jax.custom_derivatives.SymbolicZero)

    call = jax.custom_vjp(flat.of_arrays(run))
    call.defvjp(forward, backward, symbolic_zeros=True)
    return call(*flat.arrays)


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
    """Return `jax.jit` of a function, compiled once per set of arguments that are not arrays, if these have a hash."""
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


def labelled(function: Callable[..., T], label: str) -> Callable[..., T]:
    """Return a function whose operations carry a label in the compiled program."""

    def call(*args: Any, **kwargs: Any) -> T:
        with jax.named_scope(label):
            return function(*args, **kwargs)

    return call
