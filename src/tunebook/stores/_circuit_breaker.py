"""Calls to a server that may be down or hung: each is cut short, and after a failure the server is left alone."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Final, TypeVar

from tunebook._base.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# How long a server is left alone after it failed: at first, and at most.
_PAUSES_S: Final = (1.0, 60.0)


def within(seconds: float, where: str, call: Callable[[], T]) -> T:
    """Return the result of a call; `StoreError` if it fails or takes longer, and then the call goes on in its thread.

    A timeout of a socket does not cover everything: looking up a name takes 10 s where the name server is away, and a
    server that sends a byte at a time is never late. A thread costs 0.1 ms, after a local miss.
    """
    answer: Future[T] = Future()
    thread = threading.Thread(target=_fetch, args=(answer, call), name="tunebook remote", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # at interpreter exit no thread can be started
        _fetch(answer, call)
    try:
        return answer.result(seconds)
    except (TimeoutError, CancelledError):
        message = f"the shared book at {where} did not answer within {seconds} s."
        raise StoreError("remote", where, message) from None
    finally:
        # An error holds the frames that it went through: with the future in them, and so the error itself, all of it
        # would stay, with everything that the caller had.
        del answer


def _fetch(answer: Future[T], call: Callable[[], T]) -> None:
    try:
        answer.set_result(call())
    except StoreError as error:
        answer.set_exception(error)
    finally:
        answer.cancel()  # after any other error nobody should wait; a finished future stays as it is
        del answer  # the same


class Breaker:
    """Says whether a server is asked. A failure opens it; only a caller that found the server answering closes it."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, jitter: Callable[[], float] = random.random
    ) -> None:
        self._clock, self._jitter = clock, jitter
        self._failures = 0
        self._closed_at_s = clock()
        self.is_open = False

    def trip(self) -> None:
        """Leave the server alone, longer each time."""
        # A server that comes and goes is left alone longer and longer too: each time costs a call 0.3 s.
        if not self.is_open and self._clock() - self._closed_at_s > _PAUSES_S[1]:
            self._failures = 0
        self._failures += 1
        self.is_open = True

    def close(self) -> None:
        """Ask the server again."""
        self._closed_at_s = self._clock()
        self.is_open = False

    def pause_s(self) -> float:
        """Return how long to wait before the next try; 0 if the server is not left alone."""
        if not self.is_open:
            return 0.0
        first_s, longest_s = _PAUSES_S
        # Jittered, or all machines of a fleet would knock at the same moment.
        return min(longest_s, first_s * 2.0 ** min(self._failures - 1, 10)) * (0.5 + self._jitter() / 2)
