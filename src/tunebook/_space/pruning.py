"""Leaving out candidates before anything is compiled: by the author's rule, and by a model of what they cost."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tunebook._base.errors import DefinitionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Pruning:
    """`prune(configs, *arguments)` returns those worth a try; of these the `keep` cheapest by `cost` stay.

    `cost(config, *arguments)` is any number that grows with the expected time. `keep` is how many, or a part below 1.
    """

    def __init__(
        self,
        op_id: str,
        prune: Callable[..., Iterable[Any]] | None,
        cost: Callable[..., float] | None,
        keep: float | None,
    ) -> None:
        if (cost is None) != (keep is None):
            raise DefinitionError(f"{op_id!r}: cost= ranks the candidates and keep= says how many stay; give both")
        if keep is not None and not keep > 0:
            raise DefinitionError(f"{op_id!r}: keep={keep!r}: write how many candidates stay, or a part such as 0.25")
        self._prune, self._cost, self._keep = prune, cost, keep

    def __call__(self, configs: Sequence[Any], spread: Callable[..., Any]) -> list[Any]:
        """`spread(function, first)` calls a function of the author's with `first` and the call's arguments."""
        left = list(configs) if self._prune is None else list(spread(self._prune, configs))
        if self._cost is None or self._keep is None:
            return left
        many = math.ceil(self._keep * len(left)) if self._keep < 1 else int(self._keep)
        costs = [float(spread(self._cost, config)) for config in left]
        # A cost that is no number is the model's way to say that it does not know: such candidates stay behind.
        order = sorted(range(len(left)), key=lambda i: math.inf if math.isnan(costs[i]) else costs[i])
        kept = set(order[:many])
        return [config for i, config in enumerate(left) if i in kept]
