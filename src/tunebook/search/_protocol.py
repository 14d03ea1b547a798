"""What every strategy is: something that proposes configurations and is told what came of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tunebook._space.space import Config


class Observation(NamedTuple):
    """What came of a configuration: its seconds, or None if it failed. Any unit will do, if it is one for all."""

    config: Mapping[str, Any]
    seconds: float | None


class Strategy(Protocol):
    """Proposes configurations of one space.

    No configuration is proposed twice, nor after it was observed; what is not in the space is never proposed. The same
    seed and the same calls give the same proposals. To go on after a break, a new strategy is told everything that is
    known: observations need not be of its own proposals. Not safe to share between threads.
    """

    def propose(self, n: int) -> list[Config]:
        """Return the next `n` configurations to measure; fewer only if fewer are left."""

    def observe(self, observations: Iterable[Observation]) -> None:
        """Learn what came of configurations, in whatever order."""
