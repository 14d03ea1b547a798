"""How the calls of a kernel are launched, timed and prepared for live tuning; adapters implement it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from tunebook._base.vocabulary import Failure
    from tunebook._kernel.kernel import Invocation

C = TypeVar("C")


class LaunchWindow(Protocol):
    """One launch between two events. `late`: the device waited for the host inside it; `host_s`: what events took."""

    late: bool
    host_s: float

    def seconds(self) -> float | None:
        """Return the time on the device, or None if the device has not passed it yet."""


class Build(NamedTuple):
    """The end of a compilation beside the program: equal programs have equal products.

    `in_memory`: a launch of other sizes has loaded the program, so that nothing is to be loaded. `left_out`: why there
    is no program, though the candidate has not failed.
    """

    name: str
    product: Hashable = None
    failure: Failure | None = None
    in_memory: bool = False
    left_out: str = ""


class Builds(Protocol):
    """Candidates that are compiled beside the program. `forks` counts the processes that were made for it."""

    forks: int

    def arrange(self, names: Sequence[str]) -> None:
        """Compile these next, in this order, and no others."""

    def poll(self, call: Any, *, may_fork: bool = True) -> Iterable[Build]:
        """Return the compilations that have ended since the last time, without waiting; start others, of this call.

        Without `may_fork`, no process is made: this call must not stand still.
        """

    def close(self) -> None:
        """Stop compiling."""


class LiveRuns(ABC, Generic[C]):
    """How the calls of a kernel are launched, timed and prepared. `clock` is part of the measurement policy."""

    clock: str

    @abstractmethod
    def may_try(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a candidate may run now: not on another device, and not while launches are captured into a graph."""

    @abstractmethod
    def sizes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
        """Return the sizes of a call; times of calls with other sizes do not compare."""

    def kind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:  # noqa: ARG002 - for compilers
        """Return the kind of a call: calls of the same kind share compiled programs."""
        return None

    @abstractmethod
    def run(self, config: C, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call with a configuration."""

    @abstractmethod
    def timed(self, config: C, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, LaunchWindow]:
        """Run a call between two events, and wait for neither."""

    def glance(self, config: C, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, LaunchWindow]:
        """Run a call of a winner that is watched, as `timed`, and with as little work of the host as possible."""
        return self.timed(config, args, kwargs)

    def first(self, config: C, leader: C, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, LaunchWindow]:  # noqa: ARG002 - for checks
        """Run a candidate for the first time, as `timed`; it may be checked against the leader."""
        return self.timed(config, args, kwargs)

    def builds(self, configs: Mapping[str, C]) -> Builds | None:  # noqa: ARG002 - for compilers
        """Compile candidates beside the program; None if nothing is compiled ahead. A half of a load is forgotten."""
        return None

    def load(self, config: C, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:  # noqa: ARG002 - for loaders
        """Prepare a candidate so that its launch takes no longer than any other; False if a later call must go on."""
        return True

    @abstractmethod
    def detached(self, inv: Invocation[C, Any]) -> Invocation[C, Any]:
        """Return a call without its arrays, to describe its problem for as long as it is tuned and watched."""

    def recover(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Put the arguments back after a candidate that failed."""
