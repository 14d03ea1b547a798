"""Products of two sizes: threads in a block, or elements in a tile."""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tunebook._space.axis import Axis

# A model sees the products of all pairs of this many sizes: 15, with which it is still quick.
_MULTIPLIED: Final = 6


class Product(NamedTuple):
    """Two axes of sizes, whose product matters as much as each of them."""

    one: int
    other: int
    positions: list[list[float]]  # of the product on a scale of ratios from 0 to 1, by the indices on both axes


def _product(axes: Sequence[Axis], one: int, other: int) -> Product:
    rows, columns = ([math.log(v / axes[at].values[0]) for v in axes[at].values] for at in (one, other))
    length = rows[-1] + columns[-1]
    # Rounded, so that 2 x 64 and 4 x 32 are at the same place.
    return Product(one, other, [[round((row + column) / length, 9) for column in columns] for row in rows])


def products(axes: Sequence[Axis]) -> list[Product]:
    """Return the products of all pairs of sizes; of many sizes, the sizes with most values are paired."""
    sizes = [at for at, axis in enumerate(axes) if axis.kind == "log"]
    chosen = sorted(sizes, key=lambda at: -len(axes[at].values))[:_MULTIPLIED]
    return [_product(axes, one, other) for one, other in combinations(sorted(chosen), 2)]
