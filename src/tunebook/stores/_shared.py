"""A local book in front of a book that many machines share.

The shared book is asked only after a local miss, for 0.3 s at most, and its answer is kept locally. A tuned record goes
into the local book and then to the shared book. If that does not answer, a mark on disk says that the record is still
to be sent, and this process or another sends it later. A server that failed is not asked again by any call: a thread
behind the calls finds out when it is back.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeVar, final

from tunebook._base.errors import CodecError, StoreError, warn_once
from tunebook._base.record_format import blake2b, merge
from tunebook._base.vocabulary import Problem, ShownByPlace
from tunebook.stores._files import FaultsAreWarnings, make_directory, problem_id, read_file, write_file
from tunebook.stores._layered import shipped_in
from tunebook.stores._remote import Breaker, SharedBoard, Unanswered, within

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from tunebook._base.record_format import Record
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
_SENDING_S: Final = 60.0  # the thread behind the calls may still be sending a record that was deleted so long ago
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
class SharedStore(ShownByPlace):
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
        self.breaker = Breaker(clock)
        # By process: a forked child has no thread of its parent's, nor a lock that one of them may hold.
        self._tenders: dict[int, threading.Thread] = {}
        self._absent: _Expiring[bool] = _Expiring(clock)
        self._urgent: _Expiring[bool] = _Expiring(clock)
        self._deleted: _Expiring[bool] = _Expiring(clock)
        self._listed: _Expiring[tuple[Record, ...]] = _Expiring(clock, limit=64)
        self._swept = False
        self.unreported: StoreError | None = None
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
            if not self.breaker.is_open:
                self._absent.add(identifier, True, _ABSENT_S)  # noqa: FBT003 - a value
            return local
        try:
            # Not theirs alone: the measurements made here need not be made again.
            both = theirs if local is None else merge(local, theirs)
        except CodecError:  # unknown fields that are nested too deeply to be written again
            both = theirs
        if both != local:
            self._keep(both)
        return both

    def shipped_in(self, problem: Problem) -> str:
        return shipped_in(self._front, problem)

    def put(self, record: Record) -> None:
        """Store a record in the front, durably, and in the shared book, at once or later."""
        record.to_bytes()  # an invalid record is refused before anything is marked
        self._deleted.drop(problem_id(record.problem))
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
            self._deleted.drop(problem_id(record.problem))
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
        self._deleted.add(problem_id(problem), True, _SENDING_S)  # noqa: FBT003 - a value
        for token, marked, _ in list(self._outbox.marks()):
            if marked == problem:  # a put that waits to be sent would bring the record back
                self._outbox.done(token)
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
            self._listed.add(op, listed, seconds=60.0)
        yield from (record for record in listed if problem_id(record.problem) not in seen)

    def leases(self) -> SharedBoard:
        if self._board is None:
            # A caller that is about to tune asks the shared book anew, whatever is known: it may have been tuned just
            # now. Also where the front has a record: that was not good enough for this caller. It may belong to other
            # code, and a faster machine may have replaced it in the shared book.
            about_to_tune = partial(self._urgent.add, value=True, seconds=_URGENT_S)
            self._board = SharedBoard(self.ask, about_to_tune, self._front, self._remote, self._clock)
        return self._board

    def ask(self, call: Callable[[], T], otherwise: U) -> T | U:
        """Return the result of a call to the shared book; `otherwise` if the call fails or the book is left alone."""
        if self.breaker.is_open:
            self._tend()  # a thread that was about to end when the breaker opened, or a forked child's
            self._warn(self.unreported)
            return otherwise
        try:
            answer = within(HOT_S, self._remote.where, call)
        except (OSError, ValueError) as error:
            if not isinstance(error, StoreError) or error.kind != "remote":
                # The server answers: something is wrong with one record of many.
                with FaultsAreWarnings(self._remote.where):
                    raise
                return otherwise
            # Many threads may find out at once; only the first makes the pause longer.
            if not self.breaker.is_open:
                self.breaker.trip()
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
        if self.breaker.is_open:
            self._remote.ping()  # makes the connection
            began_s = self._clock()
            self._remote.ping()
            quick = self._clock() - began_s < HOT_S
        if quick:
            self.breaker.close()
        for token, problem, ours in self._outbox.marks() if self._may_write() else ():
            # The front's record as it is now: a later put must not be replaced by an earlier one.
            record = self._local(problem) or ours
            standing = None if record is None else self._remote.offer(record)
            if self._deleted.get(problem_id(problem)) and self._local(problem) is None:  # while it was sent
                self._remote.delete(problem)
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
            if count >= 1000 or self._clock() >= ends_s:
                return

    def _warn(self, error: StoreError | None) -> None:
        self.unreported = None
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


def _tend_until_done(store_ref: weakref.ref[SharedStore], gone: threading.Event) -> None:
    """Look after a store until its shared book answers and has everything, or nobody uses the store any more."""
    while (store := store_ref()) is not None:
        pause_s = store.breaker.pause_s()
        del store
        if gone.wait(pause_s) or (store := store_ref()) is None:
            return
        try:
            store.tend()
        except StoreError as error:
            store.breaker.trip()
            store.unreported = error  # the next call warns: nobody reads a warning of a thread behind the calls
        else:
            return
        del store


# ------------------------------------------------------------------------------------- the records still to be sent

_OUTBOX_LIMIT: Final = 10_000  # a machine that is cut off for weeks keeps its book, and sends this much of it
_LIMIT_IN_MEMORY: Final = 1000


class Outbox:
    """Marks of records to be sent, on disk beside the book, so that a mark outlives its process.

    <root>/v1/outbox/<digest of the address>/<id>.<random>    one mark: the problem of a record in the local book

    Each put has a name of its own, so that nobody removes the mark of another put. `root` is the local book's, None if
    it is in memory. `where` has no secrets: records are still sent after the password was changed.
    """

    def __init__(self, root: Path | None, where: str) -> None:
        name = blake2b(where.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        self._directory = None if root is None else root.absolute() / "v1" / "outbox" / name
        self._ours: dict[str, Record] = {}

    def add(self, record: Record) -> str:
        """Mark a record, before it is put into the local book: a mark without record does no harm. Return its token."""
        token = f"{problem_id(record.problem)}.{os.urandom(6).hex()}"
        if self._directory is None or len(self._ours) < _LIMIT_IN_MEMORY:
            self._ours[token] = record
        if self._directory is not None:
            # Nothing is synced: a power loss may cost the sharing of this record, and not the record.
            with suppress(OSError):
                if not self._directory.is_dir():
                    make_directory(self._directory, lambda _descriptor: None)
                write_file(self._directory / token, encode_problem(record.problem), sync=None, mode=0o600)
        return token

    def done(self, token: str) -> None:
        self._ours.pop(token, None)
        if self._directory is not None:
            with suppress(OSError):
                (self._directory / token).unlink()

    def room(self) -> int:
        """Return how many marks may be added; negative if the outbox is overfull."""
        if self._directory is None:
            return _LIMIT_IN_MEMORY - len(self._ours)
        return _OUTBOX_LIMIT - len(self._tokens())

    def marks(self) -> Iterator[tuple[str, Problem, Record | None]]:
        """Yield token, problem and record of our marks, then of other processes' marks, which have no record here."""
        for token in dict.fromkeys((*self._ours, *self._tokens())):
            record = self._ours.get(token)
            problem = self._problem(token) if record is None else record.problem
            if problem is not None:
                yield token, problem, record

    def __bool__(self) -> bool:
        return bool(self._ours or self._tokens())

    def _tokens(self) -> list[str]:
        try:
            return [] if self._directory is None else os.listdir(self._directory)  # noqa: PTH208 - names, not objects
        except OSError:
            return []

    def _problem(self, token: str) -> Problem | None:
        if self._directory is None:
            return None
        try:
            content = read_file(str(self._directory / token), limit_bytes=1 << 20)
        except (CodecError, OSError):
            content = b""
        if content is None:
            return None  # another process has sent it meanwhile
        problem = decode_problem(content)
        if problem is None or not token.startswith(problem_id(problem)):
            self.done(token)  # it is damaged
            return None
        return problem


def encode_problem(problem: Problem) -> bytes:
    """Return the content of a mark: lengths first, as in the ids, because a name may hold any character."""
    parts = [part.encode("utf-8", "surrogatepass") for part in problem]
    return b" ".join(b"%d" % len(part) for part in parts) + b"\n" + b"".join(parts)


def decode_problem(content: bytes) -> Problem | None:
    """Return the problem that a mark names, or None if it is not exactly the content of a mark."""
    lengths, _, rest = content.partition(b"\n")
    parts = []
    try:
        for size in map(int, lengths.split(b" ")):
            parts.append(rest[:size].decode("utf-8", "surrogatepass"))
            rest = rest[size:]
    except ValueError:
        return None
    problem = Problem(*parts) if len(parts) == 3 else None
    return problem if problem is not None and encode_problem(problem) == content else None
