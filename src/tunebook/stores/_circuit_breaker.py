"""Asking a server that may be down or hung: for a short time, and then not at all for a while."""

from __future__ import annotations

import os
import random
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from tunebook._base.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# How long a server is left alone after it failed: at first, and at most.
_PAUSES_S: Final = (1.0, 60.0)


class _CallOutcome(Generic[T]):
    """What a call in another thread came to. An object of its own, so that a late one goes nowhere."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._there: Final = threading.Event()
        self._result: tuple[T] | None = None
        self._error: StoreError | None = None

    def fetch(self) -> None:
        try:
            self._result = (self._call(),)
        except StoreError as error:
            self._error = error
        finally:
            self._there.set()

    def wait(self, seconds: float, where: str) -> T:
        self._there.wait(seconds)
        if self._result is not None:
            return self._result[0]
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # an error holds this frame: kept in it, both would stay, with all that the caller had
        raise StoreError("remote", where, f"the shared book at {where} did not answer within {seconds} s.")


def within(seconds: float, where: str, call: Callable[[], T]) -> T:
    """Return what a call returns or raises; `StoreError` if that takes longer, and the call goes on without us.

    In a thread, for what no timeout of a socket covers: looking up a name takes 10 s where the name server is away, and
    a server that sends a byte at a time is never late. A thread costs 0.1 ms, after a local miss.
    """
    answer = _CallOutcome(call)
    thread = threading.Thread(target=answer.fetch, name="tunebook remote", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # at interpreter exit no thread can be started
        answer.fetch()
    return answer.wait(seconds, where)


class Breaker:
    """Whether a server is asked. Opened by a fault; closed by whoever finds that it answers again, never by itself."""

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


class BackgroundThread:
    """A thread that is started when there is something to do, if it does not run; two at once do no harm."""

    def __init__(self, name: str) -> None:
        self._name = name
        # By process: a forked child has no thread of its parent's, nor a lock that one of them may hold.
        self._threads: dict[int, threading.Thread] = {}

    def ensure(self, target: Callable[..., None], *args: object) -> None:
        """Start the thread, unless it runs; at interpreter exit, when none can be started, the work is left."""
        running = self._threads.get(os.getpid())
        if running is not None and running.is_alive():
            return
        thread = threading.Thread(target=target, args=args, name=self._name, daemon=True)
        with suppress(RuntimeError):
            thread.start()
            self._threads[os.getpid()] = thread
