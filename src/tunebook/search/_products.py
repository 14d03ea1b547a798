"""Products of sizes: what two axes are together."""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tunebook._space.axis import Axis

# Of so many sizes, each with each, a model sees the products: 15, which it is still quick with.
_MULTIPLIED: Final = 6


class Product(NamedTuple):
    """Two axes of sizes, whose product matters as much as each: threads in a block, or elements in a tile."""

    one: int
    other: int
    positions: list[list[float]]  # by the index on the one, and on the other: from 0 to 1

    @classmethod
    def of(cls, axes: Sequence[Axis], one: int, other: int) -> Product:
        """Return the product of two axes; a model sees it by ratios."""
        rows, columns = ([math.log(v / axes[at].values[0]) for v in axes[at].values] for at in (one, other))
        length = rows[-1] + columns[-1]
        # Rounded, so that 2 x 64 and 4 x 32 are at the same place.
        return cls(one, other, [[round((row + column) / length, 9) for column in columns] for row in rows])


def products(axes: Sequence[Axis]) -> list[Product]:
    """Return the products of all pairs of sizes; of many sizes, only of those with most values."""
    sizes = [at for at, axis in enumerate(axes) if axis.kind == "log"]
    chosen = sorted(sizes, key=lambda at: -len(axes[at].values))[:_MULTIPLIED]
    return [Product.of(axes, one, other) for one, other in combinations(sorted(chosen), 2)]
