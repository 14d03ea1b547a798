"""One job per key: among the threads of a process by `Flights`, among processes by leases on a `LeaseBoard`.

A lease is a slip named `<id>.<generation>` that can be created once only. The process that creates the generation after
the highest, when the board is empty or all slips on it are dead, holds the lease. A slip is dead when its bytes do not
change for the lease's time by the waiter's own clock, or when a process of this host made it that has ended; its holder
changes them four times in that time. A slip that looks alive is never removed or renamed by another process: stealing
that way made two holders overlap in 9 % of kills, generations in none of 585. flock cannot replace this: a forked child
keeps it alive, and on many network mounts it means nothing.
"""

from __future__ import annotations

import copy
import os
import random
import threading
import time
import weakref
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Self, TypeVar

from tunebook._base.errors import TunebookError
from tunebook._base.locks import InterruptSafeLock
from tunebook.stores._files import FORKS, LARGEST_GENERATION, FaultsAreWarnings, Maker, maker_of, this_process

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from tunebook.stores._protocol import LeaseBoard

T = TypeVar("T")

LEASE_S: Final = 10.0  # how long a holder on another host is waited for after its last sign of life
_BEATS: Final = 4  # per lease time: three may be late or lost before anyone takes over
_POLL_S: Final = (0.005, 0.05)  # first and longest wait between two looks; a takeover costs one of them
# A slip that stays empty was made by a process that died before its one write. It may be passed over long before the
# lease's time, because its maker, if it only paused there, does not hold until it has found nobody ahead of it.
_EMPTY_S: Final = 0.25
_LOOK_S: Final = 0.1  # how often a thread that waits for another looks whether that waits for it

# The work that a context is part of: a thread, and the processes and threads that it starts with a copy of its context.
_works: ContextVar[tuple[_Flight[Any], ...]] = ContextVar("tunebook_leading", default=())


def _leads(scope: object, key: Hashable) -> bool:
    return any((scope, key) in flight.leading for flight in _works.get())


class _Flight(Generic[T]):
    """One run of the work for a key, entered by the thread that does it before others can find it.

    Leaving it twice does no harm. So it is entered twice: if an interrupt strikes while it is left, it is left again.
    """

    def __init__(self, up: dict[tuple[int, Hashable], _Flight[T]], key: Hashable) -> None:
        # With the number of forks, so that a forked child does not wait for its parent's threads.
        self.up, self.key = up, (len(FORKS), key)
        self.thread: Final = threading.get_ident()
        self.leading: Final[list[tuple[object, Hashable]]] = []  # emptied, for copies of the context that outlive it
        self.waits_for: Final[list[_Flight[Any]]] = []  # the flights that its work waits for
        self.stuck_at: object = None  # see `StuckWatch`
        self.landed: Final = threading.Event()
        self.result: T | None = None
        self.error: Exception | None = None

    def lead(self, scope: object, key: Hashable) -> None:
        """Let calls from within know that they are part of the work for a key."""
        self.leading.append((scope, key))
        if self not in _works.get():
            _works.set((*_works.get(), self))

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self.error = error
        self.leading.clear()
        _works.set(tuple(flight for flight in _works.get() if flight is not self))
        # Forgotten before it lands: a waiter that tries again must not find it still up.
        if self.up.get(self.key) is self:
            del self.up[self.key]
        # If the work forked, this may be the child, where a thread that no longer exists may own the event's lock.
        if self.key[0] == len(FORKS):
            self.landed.set()

    def waited_for(self) -> list[_Flight[Any]]:
        """Return this flight, the flights that its work waits for, the flights that theirs wait for, and so on."""
        found: list[_Flight[Any]] = [self]
        for flight in found:
            found += [each for each in tuple(flight.waits_for) if each not in found]
        return found

    def outcome(self) -> T | None:
        """Return the result, or None if the leader was interrupted and another thread must try again."""
        if isinstance(self.error, TunebookError):
            # Ours can be copied, as they can be pickled; others are shared. One object raised in 32 threads has a
            # traceback of them all.
            raise copy.copy(self.error) from self.error
        if self.error is not None:
            raise self.error
        return self.result


class FlightTurn(Generic[T]):
    """A caller's turn at the work of a key.

    If it `leads`, the caller does the work, publishes under the lease's `generation`, and sets `result` for all waiting
    threads. Else `result` comes from another thread or process; None if that is at work and the caller would not wait,
    or must not, because of a `ring`: that work waits for the caller.
    """

    def __init__(
        self, *, leads: bool = False, generation: int = 0, result: T | None = None, ring: bool = False
    ) -> None:
        self.leads, self.generation, self.result, self.ring = leads, generation, result, ring


class Flights(Generic[T]):
    """Work that many threads ask for and one does. In a forked child it starts empty."""

    def __init__(self) -> None:
        # No lock: `setdefault` and `pop` are atomic, and a lock that another thread held at a fork would stay locked
        # in the child.
        self._up: Final[dict[tuple[int, Hashable], _Flight[T]]] = {}

    @contextmanager
    def turn(
        self,
        key: Hashable,
        board: LeaseBoard | None = None,
        lease_id: str = "",
        *,
        look: Callable[[], T | None] = lambda: None,
        wait: bool = True,
        may_guess: Callable[[], bool] = lambda: False,
        ordered: bool = False,
        lease_s: float = LEASE_S,
    ) -> Iterator[FlightTurn[T]]:
        """Give the turn to do the work of a key, once among threads and, with a board, among processes.

        Another thread's or process's work is waited for; `look` returns the result of a process. An error of the
        leading thread is raised in every thread that waits, and then forgotten: the next call tries again.
        KeyboardInterrupt and the like end the leader's call only: a waiter leads then. A call from within the work
        would wait for itself: it leads too, without a lease. So does a call inside other work that has waited for a
        process for as long as a lease lasts, unless turns are taken in one order everywhere (`ordered`). If the work of
        another thread waits for the caller, the caller guesses if it may, else it leads.
        """
        if _leads(self, key) or (lease_id and _leads(Lease, lease_id)):
            yield FlightTurn(leads=True)
            return
        # Inside other work, a process that waits for that work would be waited for without end.
        inside = not ordered and any(flight.leading for flight in _works.get())
        turn: FlightTurn[T] | None = None
        while turn is None:
            mine: _Flight[T] = _Flight(self._up, key)
            with mine, mine, _Slips() as slips, slips:
                flight = self._up.setdefault(mine.key, mine)
                if flight is mine:
                    mine.lead(self, key)
                    patience_s = (lease_s if inside else None) if wait else 0.0
                    claimed = acquire(board, lease_id, look=look, lease_s=lease_s, deadline_s=patience_s, slips=slips)
                    if isinstance(claimed, Lease) or (inside and wait and isinstance(claimed, Busy)):
                        mine.lead(Lease, lease_id)
                        turn = FlightTurn(leads=True, generation=getattr(claimed, "generation", 0))
                    else:  # None if busy: threads that would wait longer than this one go on by themselves
                        turn = FlightTurn(result=getattr(claimed, "result", None))
                    yield turn
                    mine.result = turn.result
                    return
            turn = self._wait_for(flight, may_guess) if wait else FlightTurn()
        yield turn

    def _wait_for(self, flight: _Flight[T], may_guess: Callable[[], bool]) -> FlightTurn[T] | None:
        """Return the result of another thread's flight; None if its leader was interrupted."""
        from tunebook._measure.device_lock import StuckWatch, turns_put_down  # noqa: PLC0415 - for waits only

        led, watch, look_s = [each for each in _works.get() if each.leading], StuckWatch(LEASE_S), 0.0
        with ExitStack() as stack:
            for each in led:
                each.waits_for.append(flight)
                stack.callback(each.waits_for.remove, flight)
            while not flight.landed.wait(look_s):
                chain = flight.waited_for()
                # A flight of this very thread, in another context or left behind, cannot land while the thread waits.
                # The threads of a pool do not know for whose candidate they work: its thread waits for them.
                own = flight.thread == threading.get_ident() or any(each in led for each in chain)
                if own or watch.is_stuck(chain[-1]):
                    return FlightTurn(leads=not may_guess(), ring=True)
                if not look_s:
                    # The thread that leads the flight may wait for the device that this thread holds.
                    stack.enter_context(turns_put_down())
                    look_s = _LOOK_S
        result = flight.outcome()
        return None if result is None else FlightTurn(result=result)


class _LeaseFile:
    """A slip that this process made. Its heartbeat ends when it is withdrawn, lost, or forgotten by its owner."""

    def __init__(self, board: LeaseBoard, lease_id: str, generation: int, maker: Maker) -> None:
        self.generation: Final = generation
        self._board, self._lease_id, self._name = board, lease_id, f"{lease_id}.{generation}"
        self._signature: Final = f"{maker.host} {maker.pid} {maker.started} {os.urandom(8).hex()} ".encode()
        self._beats = 0
        self._posting = self._is_off = False
        self._forks: Final = len(FORKS)
        self._withdrawn: Final = threading.Event()
        self._lock: Final = InterruptSafeLock()  # a beat that ends after the removal could mark the next holder's slip

    def post(self) -> bool:
        """Put the slip on the board; False if another process did."""
        self._posting = True
        created = self._board.create(self._name, self.content())
        self._posting = False
        return created

    def keep(self, lease_s: float) -> None:
        """Beat in a thread from now on."""
        beat = threading.Thread(
            target=_keep_alive,
            args=(weakref.ref(self), self._withdrawn, lease_s / _BEATS),
            name=f"tunebook lease {self._name}",
            daemon=True,
        )
        # At interpreter exit no thread can be started. The lease may lapse then, which costs a second tuning at most.
        with suppress(RuntimeError):
            beat.start()

    def renew(self) -> bool:
        """Change the slip's bytes; False if it is not ours any more."""
        with self._lock:
            if self._withdrawn.is_set() or not self._is_ours():
                return False
            self._beats += 1
            return self._board.rewrite(self._name, self.content())

    def withdraw(self, *, lower: bool) -> None:
        """Take the slip off the board, after all lower generations if asked to; nothing in a forked child."""
        if self._forks != len(FORKS) or self._is_off:
            return
        self._withdrawn.set()
        with self._lock:
            if self._is_ours():
                # Ours goes last: while it is there no other process can hold the lease, so these are old slips.
                for generation in self._board.generations(self._lease_id) if lower else ():
                    if generation < self.generation:
                        self._board.remove(f"{self._lease_id}.{generation}")
                self._board.remove(self._name)
        self._is_off = True  # last: an interrupted withdrawal is not over

    def content(self) -> bytes:
        """Return the bytes that the slip has, or gets next."""
        return b"%s%012d\n" % (self._signature, self._beats)

    def _is_ours(self) -> bool:
        # Paused past its lease, taken over and released since, the name can belong to another holder's slip by now.
        content = self._board.read(self._name) or b""
        # An interrupt between the creation and the write leaves an empty slip. If another process is just making a slip
        # of this name, it does not find it again, and starts anew.
        return content.startswith(self._signature) or (self._posting and not content)


def _keep_alive(slip_ref: weakref.ref[_LeaseFile], withdrawn: threading.Event, every_s: float) -> None:
    while not withdrawn.wait(every_s):
        slip = slip_ref()
        if slip is None:
            return
        # A beat that fails is not worth a warning: the next may succeed, and a late record is refused.
        with suppress(OSError):
            if not slip.renew():
                return
        del slip


class AlreadyThere(NamedTuple, Generic[T]):
    """The result was there."""

    result: T


class Busy(NamedTuple):
    """Another process is at work, and the caller would not wait longer."""


class Lease(NamedTuple):
    """The lease, or the leave to go on without a lease (generation 0). Released when the result is published.

    A holder that takes over has the higher generation. After a release generations start again at 1, so a holder
    publishes under its own plus the generation of the record when the work began: when it publishes, that may be the
    record of the next holder, which must not be replaced.
    """

    generation: int
    slip: _LeaseFile | None = None

    def release(self) -> None:
        """Let other processes hold it. Does nothing the second time, nor in a forked child."""
        with FaultsAreWarnings("leases", after=" Others wait until the lease has lapsed."):
            if self.slip is not None:
                self.slip.withdraw(lower=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _Slips(list[_LeaseFile]):
    """The slips that this call has put on the board, or is about to. They come off when it is left, as often as it is.

    An interrupt may strike when the slip is on the board, and before anything else knows about it.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for slip in self:
            Lease(slip.generation, slip).release()


class _LeaseWatch:
    """A waiter's view of a lease: the slips on the board, and for how long it has seen each of them unchanged."""

    def __init__(
        self,
        *,
        board: LeaseBoard,
        lease_id: str,
        lease_s: float,
        clock: Callable[[], float],
        maker: Maker,
        is_gone: Callable[[Maker], bool],
        slips: list[_LeaseFile] | None = None,
    ) -> None:
        self.board, self.lease_id, self.lease_s = board, lease_id, lease_s
        self.clock, self.maker, self.is_gone = clock, maker, is_gone
        self.slips, self.looked_at_s = [] if slips is None else slips, 0.0
        self.still_s: dict[tuple[int, bytes], float] = {}

    def attempt(self) -> _LeaseFile | None:
        """Create the next generation if all slips are dead; None if another process holds the lease or was faster."""
        present = self._present()
        if not self._all_dead(present):
            return None
        highest = max(present, default=0)
        if highest == LARGEST_GENERATION:  # it was planted, and no slip can be above it
            self.board.remove(f"{self.lease_id}.{highest}")
            return None
        slip = _LeaseFile(self.board, self.lease_id, highest + 1, self.maker)
        self.slips[:] = [slip]
        if not slip.post():
            self.slips.clear()
            return None
        # Meanwhile another may have taken over, failed and released, and a third begun at generation 1 again: two
        # different names, both free. The later of the two sees the other here; without this look both would hold.
        if self._present() == {**present, slip.generation: slip.content()}:
            return slip
        slip.withdraw(lower=False)
        return None

    def _present(self) -> dict[int, bytes]:
        # A slip that is listed but cannot be read (removed just now, or a dangling link) counts as empty.
        present = self.board.generations(self.lease_id)
        return {generation: self.board.read(f"{self.lease_id}.{generation}") or b"" for generation in present}

    def _all_dead(self, present: dict[int, bytes]) -> bool:
        """Whether the lease is free. The highest slip may be of a process that was killed before it saw a lower one."""
        now = self.clock()
        # A longer gap counts like a single beat: if this process was stopped, perhaps the holder was too (a frozen
        # container), and must have the time to show that it lives.
        passed_s = min(now - self.looked_at_s, self.lease_s / _BEATS)
        self.looked_at_s = now
        known = self.still_s
        self.still_s = {slip: known[slip] + passed_s if slip in known else 0.0 for slip in present.items()}
        for (_, content), still_s in self.still_s.items():
            lapsed = still_s >= (self.lease_s if content else min(_EMPTY_S, self.lease_s))
            maker = maker_of(content)
            if not lapsed and (maker is None or not self.is_gone(maker)):
                return False
        return True


def acquire(
    board: LeaseBoard | None,
    lease_id: str,
    *,
    look: Callable[[], T | None],
    lease_s: float = LEASE_S,
    deadline_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    jitter: Callable[[], float] = random.random,
    maker: Maker | None = None,
    is_gone: Callable[[Maker], bool] = Maker.is_gone,
    slips: list[_LeaseFile] | None = None,
) -> Lease | AlreadyThere[T] | Busy:
    """Wait until `look` returns a result or the lease can be held, for `deadline_s` at most (None: as long as needed).

    `slips` gets the slip before it is on the board, so that the caller can withdraw it after an interrupt. Without a
    board, or if it fails (one warning), the caller goes on without a lease. A holder that asks again for its lease
    waits for itself.
    """
    if board is None:
        return _unless_found(Lease(0), look)
    claim = _LeaseWatch(
        board=board,
        lease_id=lease_id,
        lease_s=lease_s,
        clock=clock,
        maker=maker or this_process(),
        is_gone=is_gone,
        slips=slips,
    )
    wait_s, longest_s = _POLL_S
    give_up = None if deadline_s is None else clock() + deadline_s
    with ExitStack() as aside:
        while True:
            slip, works = None, False
            with FaultsAreWarnings("leases", after=" Meanwhile other processes may do the same work."):
                slip, works = claim.attempt(), True
            if not works:
                return _unless_found(Lease(0), look)
            if slip is not None:
                slip.keep(lease_s)
                return _unless_found(Lease(slip.generation, slip), look)
            if (found := look()) is not None:
                return AlreadyThere(found)
            if give_up is not None and clock() >= give_up:
                return Busy()
            if wait_s == _POLL_S[0] and _works.get():
                from tunebook._measure.device_lock import turns_put_down  # noqa: PLC0415 - for waits only

                # The holder of the lease may wait for the device that this process holds.
                aside.enter_context(turns_put_down())
            # Jittered, or a hundred waiters would all list the directory at the same moment.
            sleep(wait_s * (0.5 + jitter() / 2))
            wait_s = min(2 * wait_s, longest_s)


def _unless_found(held: Lease, look: Callable[[], T | None]) -> Lease | AlreadyThere[T]:
    """Look under the lease: a holder may have published and released just before it was obtained."""
    with ExitStack() as unless_returned:
        unless_returned.callback(held.release)
        if (found := look()) is not None:
            return AlreadyThere(found)
        unless_returned.pop_all()
    return held
