"""What ranks agree through: a few operations that the services of any job have."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, runtime_checkable

from tunebook._base.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# A server that restarts is back by then. Each problem costs no more than this where it is not, and only the first.
_PATIENCE_S: Final = 3.0
_PAUSES_S: Final = (0.05, 0.5)


@runtime_checkable
class Board(Protocol):
    """What all ranks of a job read and write; safe to share between threads. What fails is a `StoreError`."""

    @property
    def rank(self) -> int:
        """This process's number in the job, from 0."""

    @property
    def world(self) -> int:
        """How many ranks the job has."""

    @property
    def where(self) -> str:
        """What messages call it."""

    def first(self, key: str, value: str) -> str:
        """Write a value under a key unless there is one, and return the one that stands, which is the same for all."""

    def wait(self, key: str, timeout_s: float) -> str | None:
        """Return the value of a key as soon as there is one; None if there is none in time."""

    def post(self, topic: str, value: str) -> None:
        """Add a text without line breaks to those of a topic; of two by one rank either the last counts, or both."""

    def posted(self, topic: str) -> list[str]:
        """Return what was added to a topic so far, in any order."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return its value."""


class Patient:
    """A board that is tried again for a while when it fails. The same call twice does no harm on any."""

    def __init__(
        self,
        board: Board,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._board: Final = board
        self.rank: Final = board.rank
        self.world: Final = board.world
        self.where: Final = board.where
        self._clock_s, self._sleep = clock_s, sleep

    def first(self, key: str, value: str) -> str:
        return self._lasting(self._board.first, key, value)

    def wait(self, key: str, timeout_s: float) -> str | None:
        return self._lasting(self._board.wait, key, timeout_s)

    def post(self, topic: str, value: str) -> None:
        self._lasting(self._board.post, topic, value)

    def posted(self, topic: str) -> list[str]:
        return self._lasting(self._board.posted, topic)

    def add(self, key: str, amount: int) -> int:
        return self._lasting(self._board.add, key, amount)

    def _lasting(self, call: Callable[..., T], *args: Any) -> T:
        gives_up_s = self._clock_s() + _PATIENCE_S
        pause_s, longest_s = _PAUSES_S
        while True:
            try:
                return call(*args)
            except StoreError:
                if self._clock_s() + pause_s > gives_up_s:
                    raise
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)


def poll(
    look: Callable[[], T | None],
    timeout_s: float,
    clock_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T | None:
    """Return what `look` finds, asked ever less often: ten times as long a wait costs 24 more looks, up to a second.

    A tenth of the time waited so far is what a find may be late by.
    """
    began_s = clock_s()
    while (found := look()) is None:
        waited_s = clock_s() - began_s
        if waited_s >= timeout_s:
            return None
        sleep(min(max(waited_s / 10, 0.001), 1.0, timeout_s - waited_s))
    return found
