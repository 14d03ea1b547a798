"""The arguments of a call as jax flattens them, and functions of the arrays among them alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax

from tunebook._arrays.describe import is_array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


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
        """Return (args, kwargs) with other arrays in the same places."""
        return jax.tree.unflatten(self.tree, self.with_arrays(arrays).leaves)

    def of_arrays(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that takes the arrays alone, and closes over the other arguments."""

        def flat(*arrays: Any) -> Any:
            args, kwargs = self.fill(arrays)
            return function(*args, **kwargs)

        return flat
