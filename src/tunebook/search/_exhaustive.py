"""Everything, in the order of the space."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunebook.search._trial_history import Ledger, Start

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tunebook._space.space import Config, Space
    from tunebook.search._protocol import Observation


class Exhaustive:
    """Proposes every configuration; those to begin with first, those that failed elsewhere last."""

    def __init__(self, space: Space, *, seed: int = 0, start: Start = Start()) -> None:  # noqa: B008 - immutable
        self._ledger = Ledger(space, seed, start)

    def propose(self, n: int) -> list[Config]:
        """Return the next configurations."""
        return self._ledger.hand_out(n, self._ledger.next_in_order)

    def observe(self, observations: Iterable[Observation]) -> None:
        """Learn what needs no proposal."""
        self._ledger.note(observations)
