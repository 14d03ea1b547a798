"""The interface of every strategy: it proposes configurations, and observes their times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tunebook._space.space import Config


class Observation(NamedTuple):
    """The seconds of a configuration, or None if it failed. Any unit works, if it is the same for all."""

    config: Mapping[str, Any]
    seconds: float | None


class Start(NamedTuple):
    """Where a search begins: with `first`; `last` are proposed when nothing else is left.

    `first` are configurations that were fast elsewhere, fastest first; from the seventh on they alternate with the
    strategy's own proposals. `last` are configurations that failed elsewhere. `elsewhere` are the times of other
    devices or problems, one list each: a strategy with a model predicts times here from them.
    """

    first: Sequence[Mapping[str, object]] = ()
    last: Sequence[Mapping[str, object]] = ()
    elsewhere: Sequence[Sequence[Observation]] = ()


class Strategy(Protocol):
    """Proposes configurations of a space. `tunebook.testing.StrategyContract` checks an implementation.

    It never proposes a configuration twice, nor an observed one, nor one outside the space. The same seed and the same
    calls give the same proposals. Observations need not be of its own proposals: to continue an interrupted search, a
    new strategy observes everything that is known. Not safe to share between threads.
    """

    def propose(self, n: int) -> list[Config]:
        """Return the next `n` configurations to measure; fewer only if fewer are left."""

    def observe(self, observations: Iterable[Observation]) -> None:
        """Learn the times of configurations, in any order."""
