"""A local book in front of one that many machines share.

The shared one is asked only after a local miss, for 0.3 s at most, and what it knows is kept locally. What is tuned
here goes into the local book and then to the shared one; if that does not answer, a mark on disk says that it is still
to be sent, and this process or another sends it later. A server that failed is not asked again by any call: a thread
behind the calls finds out when it is back.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Final, TypeVar, final

from tunebook._base.errors import CodecError, StoreError, warn_once
from tunebook._base.record_format import merge
from tunebook.stores._circuit_breaker import BackgroundThread, Breaker, within
from tunebook.stores._ids import problem_id
from tunebook.stores._shared_board import Looks, SharedBoard, Unanswered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Problem
    from tunebook.stores._outbox import Outbox
    from tunebook.stores._protocol import Store
    from tunebook.stores._remote import RemoteStore

T = TypeVar("T")
U = TypeVar("U")

HOT_S: Final = 0.29  # what one question of a call may take: with what is around it, 0.3 s
# After this the client gives up, whoever asked. Not the same: what a call did not wait for still makes a connection for
# the next one, and the thread behind the calls may send over a slow line.
PATIENT_S: Final = 5.0
# What the shared book did not know is not asked for again at every call that has to do without; whoever is about to
# tune asks anew, whatever was asked before.
_ABSENT_S: Final = 5.0
_URGENT_S: Final = 10.0
_LISTED_S: Final = 60.0
_LISTED_RECORDS: Final = 1000
_MEMO_LIMIT: Final = 4096  # a service that meets ever new problems must not grow without bound


class _ExpiringSet:
    """Names that hold for a time, so many at most."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends_s: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        if len(self._ends_s) >= _MEMO_LIMIT:
            self._ends_s.clear()
        self._ends_s[name] = self._clock() + seconds

    def drop(self, name: str) -> None:
        self._ends_s.pop(name, None)

    def holds(self, name: str) -> bool:
        return self._ends_s.get(name, 0.0) > self._clock()


@final
class SharedStore:
    """`front` before `remote`. Safe to share between threads and, if `remote` is, to carry over a fork.

    Nothing here raises for what is wrong with the shared book: that is one warning, and the front alone answers. While
    `may_write` says no, nothing that came from the shared book is kept in the front, and nothing that was left to be
    sent is sent.
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
        self._may_write = may_write
        self._clock = clock
        self._breaker = Breaker(clock)
        self._tender = BackgroundThread(f"tunebook {remote.where}")
        self._absent, self._urgent = _ExpiringSet(clock), _ExpiringSet(clock)
        self._listed: dict[str | None, tuple[float, tuple[Record, ...]]] = {}
        self._swept = False
        self._unsaid: StoreError | None = None
        self._gone = threading.Event()
        weakref.finalize(self, self._gone.set)
        self._board: SharedBoard | None = None

    @property
    def where(self) -> str:
        """Where both are."""
        return f"{self._front.where} and {self._remote.where}"

    def get(self, problem: Problem) -> Record | None:
        """Return the front's record of a problem; if it has none, or none that decides, the shared book's too."""
        local = self._local(problem)
        identifier = problem_id(problem)
        missing = (local is None or not local.head.decided) and not self._absent.holds(identifier)
        if not missing and not self._urgent.holds(identifier):
            return local
        self._urgent.drop(identifier)
        theirs = self.ask(lambda: self._remote.get(problem), None)
        if theirs is None:
            if not self._breaker.is_open:
                self._absent.add(identifier, _ABSENT_S)
            return local
        return self._kept(local, theirs)

    def put(self, record: Record) -> None:
        """Keep a record in the front, durably, and in the shared book, at once or later."""
        record.to_bytes()  # what cannot be written is refused before anything is marked
        token = self._outbox.add(record)
        try:
            self._front.put(record)
        finally:
            self._send(token, record)

    def put_many(self, records: Iterable[Record]) -> None:
        """Keep many records in the front; they are sent behind the calls."""
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
        """Remove a record from both, as far as the shared book answers; False if neither had one."""
        self._absent.drop(problem_id(problem))
        here = self._front.delete(problem)
        return self.ask(lambda: self._remote.delete(problem), otherwise=False) or here

    def items(self, op: str | None = None) -> Iterator[Record]:
        """Yield the front's records, then those of the shared book that it can list in a moment.

        Open the shared book by its own address to have them all.
        """
        seen: set[str] = set()
        for record in self._front.items(op):
            seen.add(problem_id(record.problem))
            yield record
        yield from (record for record in self._list(op) if problem_id(record.problem) not in seen)

    def leases(self) -> SharedBoard:
        """Return the shared book's board, which falls back on the front's."""
        if self._board is None:
            self._board = SharedBoard(self.ask, self._about_to_tune, self._front, self._remote, Looks(self._clock))
        return self._board

    def ask(self, call: Callable[[], T], otherwise: U) -> T | U:
        """Return what a call to the shared book returns; what is given `otherwise` if it fails or is left alone."""
        if self._breaker.is_open:
            self._tend()  # a thread that was about to end when the breaker opened, or a forked child's
            self._say(self._unsaid)
            return otherwise
        try:
            answer = within(HOT_S, self._remote.where, call)
        except StoreError as error:
            self._leave_alone(error)
            return otherwise
        if not self._swept:
            self._swept = True
            if self._may_write() and self._outbox:
                self._tend()
        return answer

    def _about_to_tune(self, identifier: str) -> None:
        """Let the next get of a problem ask the shared book, whatever is known: it may have been tuned just now.

        Also where the front has a record, since that is not good enough for whoever wants to tune: it may be of other
        code, and a machine that was faster may have replaced it in the shared book.
        """
        self._urgent.add(identifier, _URGENT_S)

    def tend(self) -> None:
        """See whether the shared book answers, and send what is to be sent; `StoreError` if it does not, or is slow."""
        quick = not self._breaker.is_open or self._is_quick()
        if quick:
            self._breaker.close()
        for mark in self._outbox.marks() if self._may_write() else ():
            # As it is in the front by now: what was put since must not be replaced by what was put before.
            record = self._local(mark.problem) or mark.record
            standing = None if record is None else self._remote.offer(record)
            self._outbox.done(mark.token)
            self._take_over(standing)
        if not quick:
            # It can be sent to, but no call could wait for it.
            raise StoreError("remote", self._remote.where, f"{self._remote.where} takes longer than {HOT_S} s.")

    def _is_quick(self) -> bool:
        self._remote.ping()  # makes the connection
        began_s = self._clock()
        self._remote.ping()
        return self._clock() - began_s < HOT_S

    def _local(self, problem: Problem) -> Record | None:
        try:
            return self._front.get(problem)
        except StoreError as error:  # the shared book may know, all the same
            warn_once(error.kind, error.path, str(error))
            return None

    def _kept(self, local: Record | None, theirs: Record) -> Record:
        """Return what is known in both, and keep it in the front."""
        try:
            # Not theirs alone: what was measured here need not be measured again.
            both = theirs if local is None else merge(local, theirs)
        except CodecError:  # a body that is whole, but none
            both = theirs
        if both != local:
            self._keep(both)
        return both

    def _keep(self, record: Record) -> None:
        if not self._may_write():
            return
        try:
            self._front.put(record)
        except StoreError as error:
            warn_once(error.kind, error.path, str(error))
        except CodecError:
            return  # too large with the measurements of both; each has its own

    def _take_over(self, standing: Record | None) -> None:
        """Keep what stands in the place of a record that was refused: a later holder's, which all machines use."""
        if standing is not None:
            local = self._local(standing.problem)
            # A local one of the same generation was put after the one that was refused.
            if local is None or local.head.generation < standing.head.generation:
                self._keep(standing)

    def _send(self, token: str, record: Record) -> None:
        standing = self.ask(lambda: self._remote.offer(record), Unanswered())
        if not isinstance(standing, Unanswered):
            self._outbox.done(token)
            self._take_over(standing)
        elif self._outbox.room() < 0:
            self._outbox.done(token)
            self._warn_of_overflow()

    def _warn_of_overflow(self) -> None:
        message = "more is waiting to be sent to it than is kept, so that what comes now stays on this machine."
        warn_once("overflow", self._remote.where, f"{self._remote.where}: {message}")

    def _list(self, op: str | None) -> tuple[Record, ...]:
        expires_s, known = self._listed.get(op, (0.0, ()))
        if expires_s > self._clock():
            return known
        found = self.ask(lambda: tuple(self._first_records(op)), ())
        if len(self._listed) >= 64:
            self._listed.clear()
        self._listed[op] = (self._clock() + _LISTED_S, found)
        return found

    def _first_records(self, op: str | None) -> Iterator[Record]:
        # Half the time, so that the exchange under way when it is over does not count as a fault.
        ends_s = self._clock() + HOT_S / 2
        for count, record in enumerate(self._remote.items(op), start=1):
            yield record
            if count >= _LISTED_RECORDS or self._clock() >= ends_s:
                return

    def _leave_alone(self, error: StoreError) -> None:
        # Many threads may find out at once; only the first makes the pause longer.
        if not self._breaker.is_open:
            self._breaker.trip()
        self._tend()
        self._say(error)

    def _say(self, error: StoreError | None) -> None:
        self._unsaid = None
        if error is not None:
            message = "Calls go on with the local book; what is tuned is sent when it answers again."
            warn_once(error.kind, error.path, f"{error} {message}")

    def _tend(self) -> None:
        self._tender.ensure(_tend_until_done, weakref.ref(self), self._gone)

    def pause_s(self) -> float:
        """Return how long the shared book is to be left alone; 0 if it answers."""
        return self._breaker.pause_s()

    def failed_again(self, error: StoreError) -> None:
        """Leave it alone for longer; the next call warns, since nobody reads what a thread behind the calls says."""
        self._breaker.trip()
        self._unsaid = error


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
