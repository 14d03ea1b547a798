"""The board: the five operations through which ranks communicate.

Every job has a service that offers them: the coordination service of JAX, the store of torch.distributed, or a Redis
server. Votes, log entries, heartbeats and shared measurements all travel over the board. `RetryingBoard` outlasts a
short outage; after that, ranks fall back to their heuristics.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, ParamSpec, Protocol, TypeVar, runtime_checkable

from tunebook._base.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
P = ParamSpec("P")

# A server that restarts is back by then. An outage costs the first problem this long, and later problems nothing.
_RETRY_S: Final = 3.0
_PAUSES_S: Final = (0.05, 0.5)


@runtime_checkable
class Board(Protocol):
    """The shared state of all ranks of a job; safe to share between threads. Failures are `StoreError`s."""

    @property
    def rank(self) -> int:
        """This process's number in the job, from 0."""

    @property
    def world(self) -> int:
        """How many ranks the job has."""

    @property
    def where(self) -> str:
        """The name of the board in messages."""

    def first(self, key: str, value: str) -> str:
        """Write a value unless the key has one, and return the value of the key, which is the same for all ranks."""

    def wait(self, key: str, timeout_s: float) -> str | None:
        """Return the value of a key as soon as it has one; None after the timeout."""

    def post(self, topic: str, value: str) -> None:
        """Add a text without line breaks to a topic; of two texts by one rank, the board keeps the last or both."""

    def posted(self, topic: str) -> list[str]:
        """Return the texts of a topic so far, in any order."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return its value."""


class RetryingBoard:
    """Repeats each operation of a board for a while when it fails; every operation may safely run twice."""

    def __init__(self, board: Board) -> None:
        self.rank: Final = board.rank
        self.world: Final = board.world
        self.where: Final = board.where
        self.first: Final = _retrying(board.first)
        self.wait: Final = _retrying(board.wait)
        self.post: Final = _retrying(board.post)
        self.posted: Final = _retrying(board.posted)
        self.add: Final = _retrying(board.add)


def _retrying(call: Callable[P, T]) -> Callable[P, T]:
    def retry(*args: P.args, **kwargs: P.kwargs) -> T:
        gives_up_s = time.monotonic() + _RETRY_S
        pause_s, longest_s = _PAUSES_S
        while True:
            try:
                return call(*args, **kwargs)
            except StoreError:
                if time.monotonic() + pause_s > gives_up_s:
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    return retry


def poll(look: Callable[[], T | None], timeout_s: float) -> T | None:
    """Call `look` until it returns a value, ever less often; None after the timeout.

    A value is noticed late by at most a tenth of the time waited so far: a wait ten times as long costs 24 more calls.
    """
    began_s = time.monotonic()
    while (found := look()) is None:
        waited_s = time.monotonic() - began_s
        if waited_s >= timeout_s:
            return None
        time.sleep(min(max(waited_s / 10, 0.001), 1.0, timeout_s - waited_s))
    return found
