"""The axes of a space: the kind of their values, the values next to each other, and their positions for a model."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, get_args

from tunebook._base.errors import DefinitionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Kind: TypeAlias = Literal["ordered", "log", "categorical", "permutation"]
KINDS: Final[tuple[str, ...]] = get_args(Kind)
# Values that span this factor are compared by their ratios: from 16 to 32 is as far as from 128 to 256.
_WIDE: Final = 4.0
# The largest value of an axis of sizes is at least this; numbers of stages or of unrolled steps are smaller.
_SIZE: Final = 16
# A multiple of this is as round as hardware asks for: the lanes of a warp or wavefront, or a cache line.
_ROUND: Final = 64
# On an axis with more values than this, a neighbour is at most a jump of a power of two away, not any other value.
_MANY: Final = 32


class Axis(NamedTuple):
    """One axis, its values in canonical order: ascending if they are ordered, else as they were given."""

    name: str
    values: tuple[Any, ...]
    kind: Kind

    @property
    def is_ordered(self) -> bool:
        """Whether one value is more than another."""
        return self.kind in {"ordered", "log"}

    def beside(self, index: int) -> Iterator[int]:
        """Yield the positions one step away: the next values, a swap of two neighbours, or any other category."""
        if self.is_ordered:
            yield from (at for at in (index - 1, index + 1) if 0 <= at < len(self.values))
        elif self.kind == "permutation":
            place, order = {value: at for at, value in enumerate(self.values)}, self.values[index]
            swaps = ((*order[:i], order[i + 1], order[i], *order[i + 2 :]) for i in range(len(order) - 1))
            yield from (at for swap in swaps if (at := place.get(swap, index)) != index)
        else:
            yield from (at for at in range(len(self.values)) if at != index)

    def others(self, index: int) -> Iterator[int]:
        """Yield the positions that one change of this axis can reach; not all, if there are many ordered values."""
        count = len(self.values)
        if count <= _MANY or not self.is_ordered:
            yield from (at for at in range(count) if at != index)
            return
        for jump in (2**i for i in range((count - 1).bit_length())):
            yield from (at for at in (index - jump, index + jump) if 0 <= at < count)

    def positions(self) -> list[tuple[float, ...]]:
        """Return the position of each value for a model: on a line of length 1, or a direction per category."""
        if len(self.values) == 1:
            return [(0.0,)]
        if not self.is_ordered and len(self.values) > 2:
            return [tuple(float(at == i) for i in range(len(self.values))) for at in range(len(self.values))]
        last = len(self.values) - 1
        ranks = [at / last for at in range(last + 1)]
        if self.kind != "log":
            return [(rank,) for rank in ranks]
        # Half by rank and half by ratio: neither alone spaces 16, 32, 48, ... 256 as kernels see them.
        low, high = math.log(self.values[0]), math.log(self.values[-1])
        return [((rank + (math.log(v) - low) / (high - low)) / 2,) for rank, v in zip(ranks, self.values, strict=True)]

    def roundness(self) -> list[tuple[float, ...]] | None:
        """Return how round each value is, from 0 to 1; None if its position on the axis says as much.

        A block of 96 fills warps and cache lines like a block of 64, unlike a block of 72; and 64 divides most problems
        without a rest, unlike 96. To a model that sees only the size, times would look like noise.
        """
        parts: list[list[float]] = []
        if self._has_counts() and self.values[-1] >= _SIZE and not all(v.bit_count() == 1 for v in self.values):
            halvings = [math.gcd(v, _ROUND).bit_length() for v in self.values]
            low, high = min(halvings), max(halvings)
            if low < high:
                parts.append([(count - low) / (high - low) for count in halvings])
        powers = self.powers_of_two()
        if powers is not None:
            parts.append(powers)
        return [tuple(value / math.sqrt(len(parts)) for value in values) for values in zip(*parts, strict=True)] or None

    def powers_of_two(self) -> list[float] | None:
        """Return 1 for each value that is a power of two, and 0 for the others; None if all are alike."""
        if len(self.values) < 3 or not self._has_counts():
            return None
        powers = [float(v.bit_count() == 1) for v in self.values]
        return powers if len(set(powers)) > 1 else None

    def nearest_powers_of_two(self) -> list[int]:
        """Return the position of the power of two for each value; its own, where none is within a factor of 1.42."""
        powers = [at for at, is_power in enumerate(self.powers_of_two() or []) if is_power]
        if not powers:
            return list(range(len(self.values)))
        away = [[abs(math.log2(self.values[to] / value)) for to in powers] for value in self.values]
        return [powers[each.index(min(each))] if min(each) <= 0.5 else at for at, each in enumerate(away)]

    def _has_counts(self) -> bool:
        return self.is_ordered and all(type(v) is int and v > 0 for v in self.values)


def axis_of(name: str, values: Sequence[Any], kind: str | None = None) -> Axis:
    """Return an axis; by default its kind follows from the values."""
    if kind is not None and kind not in KINDS:
        raise DefinitionError(f"{name!r} cannot be {kind!r}; an axis is one of {', '.join(KINDS)}")
    found = _kind_of(values)
    if kind in {"ordered", "log"} and found not in {"ordered", "log"}:
        raise DefinitionError(f"axis {name!r} has values that are not numbers, so it cannot be {kind!r}")
    if kind == "log" and min(values) <= 0:
        raise DefinitionError(f"axis {name!r} has values of zero or less, so it cannot be 'log'; write 'ordered'")
    if kind == "permutation" and found != "permutation":
        raise DefinitionError(f"axis {name!r} has values that are not all orders of the same things")
    chosen: Kind = kind or found  # type: ignore[assignment] # checked above
    return Axis(name, tuple(sorted(values)) if chosen in {"ordered", "log"} else tuple(values), chosen)


def _kind_of(values: Sequence[Any]) -> Kind:
    if all(type(v) in (int, float) and math.isfinite(v) for v in values):
        low, high = min(values), max(values)
        return "log" if low > 0 and high / low >= _WIDE else "ordered"
    if len(values) > 1 and all(isinstance(v, tuple) for v in values):
        first = Counter(values[0])
        if len(values[0]) > 1 and all(Counter(v) == first for v in values):
            return "permutation"
    return "categorical"
