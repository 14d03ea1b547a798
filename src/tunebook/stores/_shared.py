"""A local book in front of a book that many machines share.

The shared book is asked only after a local miss, for 0.3 s at most, and its answer is kept locally. A tuned record goes
into the local book and then to the shared book. If that does not answer, a mark on disk says that the record is still
to be sent, and this process or another sends it later. A server that failed is not asked again by any call: a thread
behind the calls finds out when it is back.
"""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeVar, final

from tunebook._base.errors import CodecError, StoreError, warn_once
from tunebook._base.record_format import merge
from tunebook.stores._ids import problem_id
from tunebook.stores._shared_board import SharedBoard, Unanswered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Problem
    from tunebook.stores._outbox import Outbox
    from tunebook.stores._protocol import Store
    from tunebook.stores._remote import RemoteStore

T = TypeVar("T")
U = TypeVar("U")

HOT_S: Final = 0.29  # for one question of a call: with the work around it, 0.3 s
# For one exchange of the client. More than a call waits: an exchange that no call waits for still makes a connection
# for the next call, and the thread behind the calls may send over a slow line.
PATIENT_S: Final = 5.0
# A problem that the shared book does not know is not asked for again at every call that does without; a caller that is
# about to tune asks anew, whatever was asked before.
_ABSENT_S: Final = 5.0
_URGENT_S: Final = 10.0
_LISTED_S: Final = 60.0
_LISTED_RECORDS: Final = 1000
_LISTED_OPS: Final = 64
_MEMO_LIMIT: Final = 4096  # a service that meets ever new problems must not grow without bound


class _Expiring(Generic[T]):
    """Values that hold for a time, so many at most."""

    def __init__(self, clock: Callable[[], float], limit: int = _MEMO_LIMIT) -> None:
        self._clock, self._limit = clock, limit
        self._values: dict[str | None, tuple[float, T]] = {}

    def add(self, name: str | None, value: T, seconds: float) -> None:
        if len(self._values) >= self._limit:
            self._values.clear()
        self._values[name] = self._clock() + seconds, value

    def drop(self, name: str) -> None:
        self._values.pop(name, None)

    def get(self, name: str | None) -> T | None:
        ends_s, value = self._values.get(name, (0.0, None))
        return value if ends_s > self._clock() else None


@final
class SharedStore:
    """`front` before `remote`. Safe to share between threads and, if `remote` is, to carry over a fork.

    A fault of the shared book never raises: it is one warning, and the front alone answers. While `may_write` returns
    False, no record from the shared book is kept in the front, and no waiting record is sent.
    """

    def __init__(
        self,
        front: Store,
        remote: RemoteStore,
        *,
        outbox: Outbox,
        may_write: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._front, self._remote, self._outbox = front, remote, outbox
        self.where: Final = f"{front.where} and {remote.where}"
        self._may_write, self._clock = may_write, clock
        self._breaker = Breaker(clock)
        # By process: a forked child has no thread of its parent's, nor a lock that one of them may hold.
        self._tenders: dict[int, threading.Thread] = {}
        self._absent: _Expiring[bool] = _Expiring(clock)
        self._urgent: _Expiring[bool] = _Expiring(clock)
        self._listed: _Expiring[tuple[Record, ...]] = _Expiring(clock, _LISTED_OPS)
        self._swept = False
        self._unreported: StoreError | None = None
        self._gone = threading.Event()
        weakref.finalize(self, self._gone.set)
        self._board: SharedBoard | None = None

    def get(self, problem: Problem) -> Record | None:
        """Return the front's record of a problem; if that is missing or undecided, ask the shared book too."""
        local = self._local(problem)
        identifier = problem_id(problem)
        missing = (local is None or not local.head.decided) and not self._absent.get(identifier)
        if not missing and not self._urgent.get(identifier):
            return local
        self._urgent.drop(identifier)
        theirs = self.ask(lambda: self._remote.get(problem), None)
        if theirs is None:
            if not self._breaker.is_open:
                self._absent.add(identifier, True, _ABSENT_S)  # noqa: FBT003 - a value
            return local
        try:
            # Not theirs alone: the measurements made here need not be made again.
            both = theirs if local is None else merge(local, theirs)
        except CodecError:  # a whole body with invalid content
            both = theirs
        if both != local:
            self._keep(both)
        return both

    def put(self, record: Record) -> None:
        """Store a record in the front, durably, and in the shared book, at once or later."""
        record.to_bytes()  # an invalid record is refused before anything is marked
        token = self._outbox.add(record)
        try:
            self._front.put(record)
        finally:
            standing = self.ask(lambda: self._remote.offer(record), Unanswered())
            if not isinstance(standing, Unanswered):
                self._outbox.done(token)
                self._take_over(standing)
            elif self._outbox.room() < 0:
                self._outbox.done(token)
                self._warn_of_overflow()

    def put_many(self, records: Iterable[Record]) -> None:
        """Store many records in the front; they are sent behind the calls."""
        given = list(records)
        for record in given:
            record.to_bytes()
        room = self._outbox.room()
        for record in given[:room]:
            self._outbox.add(record)
        if room < len(given):
            self._warn_of_overflow()
        self._front.put_many(given)
        if given:
            self._tend()

    def delete(self, problem: Problem) -> bool:
        """Remove a record from both, as far as the shared book answers; False if both do not have it."""
        self._absent.drop(problem_id(problem))
        here = self._front.delete(problem)
        return self.ask(lambda: self._remote.delete(problem), otherwise=False) or here

    def items(self, op: str | None = None) -> Iterator[Record]:
        """Yield the front's records, then as many of the shared book's as it can list in a moment: not all of them."""
        seen: set[str] = set()
        for record in self._front.items(op):
            seen.add(problem_id(record.problem))
            yield record
        listed = self._listed.get(op)
        if listed is None:
            listed = self.ask(lambda: tuple(self._first_records(op)), ())
            self._listed.add(op, listed, _LISTED_S)
        yield from (record for record in listed if problem_id(record.problem) not in seen)

    def leases(self) -> SharedBoard:
        """Return the shared book's board, which falls back on the front's board."""
        if self._board is None:
            # A caller that is about to tune asks the shared book anew, whatever is known: it may have been tuned just
            # now. Also where the front has a record: that was not good enough for this caller. It may belong to other
            # code, and a faster machine may have replaced it in the shared book.
            about_to_tune = partial(self._urgent.add, value=True, seconds=_URGENT_S)
            self._board = SharedBoard(self.ask, about_to_tune, self._front, self._remote, self._clock)
        return self._board

    def ask(self, call: Callable[[], T], otherwise: U) -> T | U:
        """Return the result of a call to the shared book; `otherwise` if the call fails or the book is left alone."""
        if self._breaker.is_open:
            self._tend()  # a thread that was about to end when the breaker opened, or a forked child's
            self._warn(self._unreported)
            return otherwise
        try:
            answer = within(HOT_S, self._remote.where, call)
        except StoreError as error:
            # Many threads may find out at once; only the first makes the pause longer.
            if not self._breaker.is_open:
                self._breaker.trip()
            self._tend()
            self._warn(error)
            return otherwise
        if not self._swept:
            self._swept = True
            if self._may_write() and self._outbox:
                self._tend()
        return answer

    def tend(self) -> None:
        """Send the waiting records to the shared book, if it answers; `StoreError` if it does not, or is slow."""
        quick = True
        if self._breaker.is_open:
            self._remote.ping()  # makes the connection
            began_s = self._clock()
            self._remote.ping()
            quick = self._clock() - began_s < HOT_S
        if quick:
            self._breaker.close()
        for token, problem, ours in self._outbox.marks() if self._may_write() else ():
            # The front's record as it is now: a later put must not be replaced by an earlier one.
            record = self._local(problem) or ours
            standing = None if record is None else self._remote.offer(record)
            self._outbox.done(token)
            self._take_over(standing)
        if not quick:
            # Records can be sent to it, but no call could wait for it.
            raise StoreError("remote", self._remote.where, f"{self._remote.where} takes longer than {HOT_S} s.")

    def _local(self, problem: Problem) -> Record | None:
        try:
            return self._front.get(problem)
        except StoreError as error:  # the shared book may know, all the same
            warn_once(error.kind, error.path, str(error))
            return None

    def _keep(self, record: Record) -> None:
        if not self._may_write():
            return
        try:
            self._front.put(record)
        except StoreError as error:
            warn_once(error.kind, error.path, str(error))
        except CodecError:
            return  # too large with the measurements of both; each book has its own

    def _take_over(self, standing: Record | None) -> None:
        """Store the later holder's record, for which ours was refused, in the front: all machines use it."""
        if standing is not None:
            local = self._local(standing.problem)
            # A local record of the same generation was put after the refused record.
            if local is None or local.head.generation < standing.head.generation:
                self._keep(standing)

    def _warn_of_overflow(self) -> None:
        message = "too many records are waiting to be sent to it, so that a new record stays on this machine."
        warn_once("overflow", self._remote.where, f"{self._remote.where}: {message}")

    def _first_records(self, op: str | None) -> Iterator[Record]:
        # Half the time, so that the exchange under way when it is over does not count as a fault.
        ends_s = self._clock() + HOT_S / 2
        for count, record in enumerate(self._remote.items(op), start=1):
            yield record
            if count >= _LISTED_RECORDS or self._clock() >= ends_s:
                return

    def _warn(self, error: StoreError | None) -> None:
        self._unreported = None
        if error is not None:
            message = "Calls go on with the local book; tuned records are sent when it answers again."
            warn_once(error.kind, error.path, f"{error} {message}")

    def _tend(self) -> None:
        """Start the thread behind the calls, unless it runs; two at once do no harm."""
        running = self._tenders.get(os.getpid())
        if running is not None and running.is_alive():
            return
        target, name = partial(_tend_until_done, weakref.ref(self), self._gone), f"tunebook {self._remote.where}"
        thread = threading.Thread(target=target, name=name, daemon=True)
        with suppress(RuntimeError):  # at interpreter exit no thread can be started, and the work is left
            thread.start()
            self._tenders[os.getpid()] = thread

    def pause_s(self) -> float:
        """Return how long the shared book is to be left alone; 0 if it answers."""
        return self._breaker.pause_s()

    def failed_again(self, error: StoreError) -> None:
        """Leave it alone for longer; the next call warns, since nobody reads a warning of a thread behind the calls."""
        self._breaker.trip()
        self._unreported = error


def _tend_until_done(store_ref: weakref.ref[SharedStore], gone: threading.Event) -> None:
    """Look after a store until its shared book answers and has everything, or nobody uses the store any more."""
    while (store := store_ref()) is not None:
        pause_s = store.pause_s()
        del store
        if gone.wait(pause_s) or (store := store_ref()) is None:
            return
        try:
            store.tend()
        except StoreError as error:
            store.failed_again(error)
        else:
            return
        del store


# ------------------------------------------------------------------------------- a server that may be down or hung

# How long a server is left alone after it failed: at first, and at most.
_PAUSES_S: Final = (1.0, 60.0)


def within(seconds: float, where: str, call: Callable[[], T]) -> T:
    """Return the result of a call; `StoreError` if it fails or takes longer, and then the call goes on in its thread.

    A socket's timeout does not cover everything: looking up a name takes 10 s where the name server is away, and a
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
