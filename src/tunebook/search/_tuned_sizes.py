"""The sizes that a model of times was learnt from: its errors there say nothing about sizes far from them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_USUAL: Final = 0.95  # of the tuned sizes have a neighbour within the usual distance
_FAR: Final = 2.0  # times the usual distance: from there on, no tuned size is near


class TunedSizes:
    """Says whether sizes are among those of the problems, which must not be empty."""

    def __init__(self, np: Any, problems: Sequence[Mapping[str, float]]) -> None:
        self._np = np
        names = [name for name in problems[0] if all(each.get(name, 0) > 0 for each in problems)]
        self._ranges: Final = {
            name: (min(each[name] for each in problems), max(each[name] for each in problems)) for name in names
        }
        # All sizes count here, also those that were equal at all problems: in other calls they may differ.
        self._logs: Final = np.log2(np.array([[each[name] for name in names] for each in problems]))
        squares = ((self._logs[:, None] - self._logs[None]) ** 2).sum(2)
        squares[np.diag_indices(len(squares))] = np.inf
        self._usual: Final = float(np.quantile(np.sqrt(squares.min(1)), _USUAL)) if len(problems) > 1 else 0.0

    def outside(self, sizes: Mapping[str, float]) -> str:
        """Return which size is beyond the tuned ones, or that none is near; else an empty text."""
        for name, (low, high) in self._ranges.items():
            if not low <= sizes.get(name, low) <= high:
                tuned = f"tuned from {low:.10g} to {high:.10g}" if low < high else f"always {low:.10g}"
                return f"{name} is {sizes[name]:.10g}, and was {tuned}"
        here = self._np.log2(self._np.array([sizes.get(name, low) for name, (low, _) in self._ranges.items()]))
        nearest = math.sqrt(((self._logs - here) ** 2).sum(1).min())
        if nearest <= _FAR * self._usual:
            return ""
        return f"the nearest tuned sizes are {nearest:.2g} doublings away, and usually within {self._usual:.2g}"
