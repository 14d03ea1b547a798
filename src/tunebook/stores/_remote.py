"""Books on other machines: the contract of their engines, signed records, calls cut short, and leases.

A shared book holds the bytes of a record (see `record_format`) and with a key one line more, `hmac-sha256 <64 hex
digits>`. A machine without a key reads signed records too: a signature keeps out writers that do not know the key, not
readers that do not ask for it.
"""

from __future__ import annotations

import hmac
import re
import threading
import time
from concurrent.futures import CancelledError, Future
from random import SystemRandom
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar, final

from tunebook._base.errors import CodecError, StoreError, warn_once
from tunebook._base.record_format import Record, unsealed
from tunebook.stores._protocol import LeaseBoard, Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from tunebook._base.vocabulary import Problem

T = TypeVar("T")

# Signed bytes begin with this, so that nothing signed with the same key for another purpose passes for a record.
_PURPOSE: Final = b"tunebook record 1\n"


class RemoteStore(Store, Protocol):
    """A store on another machine. Every error of its client becomes a `StoreError` of kind "remote"."""

    def offer(self, record: Record) -> Record | None:
        """Put a record; if a record of a higher generation stands in its place, return that record instead."""

    def ping(self) -> None:
        """Ask for something small; `StoreError` if no answer comes."""

    def leases(self) -> LeaseBoard:
        """Return the board for single flight among machines."""


class NotSigned(CodecError):  # noqa: N818 - named after the fault, as in `errors`
    """A record that may be whole, but is not signed with our key: another machine may well be able to use it."""


class Envelope(NamedTuple):
    """Signs and checks the records of a shared book; without a key nothing is signed, and every record believed."""

    where: str
    key: bytes | None = None

    def seal(self, record: Record) -> bytes:
        data = record.to_bytes()
        return data if self.key is None else data + _signature(data, self.key)

    def unseal(self, content: bytes) -> Record:
        """Return the record in bytes from the shared book; `CodecError` if damaged, `NotSigned` if not believed."""
        data = unsealed(content)
        seal = content[len(data) :]
        if self.key is not None and not hmac.compare_digest(seal, _signature(data, self.key)):
            raise NotSigned("it is signed with another key, or was altered" if seal else "it is not signed at all")
        return Record.from_bytes(data)

    def open(self, content: bytes | None, problem: Problem | None = None) -> Record | None:
        """Return the record, or None after one warning if it is damaged, not believed, or of another problem."""
        if content is None:
            return None
        try:
            record = self.unseal(content)
            if problem is not None and record.problem != problem:
                raise CodecError(f"it holds a record of {record.problem.op[:80]!r} that belongs elsewhere")  # noqa: TRY301 - one way out
        except NotSigned as error:
            remedy = "Give every machine the same TUNEBOOK_SIGNING_KEY; a tuning here replaces the record."
            warn_once("not-signed", self.where, f"a record in {self.where} is not used: {error}. {remedy}")
        except CodecError as error:
            message = f"an unreadable record in {self.where} is not used: {error}"
            warn_once("unreadable", self.where, f"{message[:300]}. A tuning here replaces it.")
        else:
            return record
        return None


def _signature(data: bytes, key: bytes) -> bytes:
    return f"hmac-sha256 {hmac.new(key, _PURPOSE + data, 'sha256').hexdigest()}\n".encode("ascii")


def fault(where: str, error: Exception) -> StoreError:
    """Return a client's error as a `StoreError`: its first line, since some clients append a page of internals."""
    said = str(error).partition("\n")[0][:300].rstrip(".") or type(error).__name__
    return StoreError("remote", where, f"the shared book at {where} cannot be used: {said}.")


def without_secrets(url: str) -> str:
    """Return an address without user, password and options.

    >>> without_secrets("redis://user:pass/word@host:6379/0?ssl_cert_reqs=none")
    'redis://host:6379/0'
    """
    scheme = re.match(r"[\w+]+:/+|", url)
    # Up to the last @, and not as a parser would see it: a password with a slash in it belongs to the path then.
    login, _, place = url[scheme.end() if scheme else 0 :].rpartition("@")
    # A question mark before the @ is of a password, or the @ is of an option: either may be a secret.
    shown = "..." if "?" in login else place.partition("?")[0]
    return f"{scheme[0] if scheme else ''}{shown}"


# ------------------------------------------------------------------------------- a server that may be down or hung

# How long a server is left alone after it failed: at first, and at most.
_PAUSES_S: Final = (1.0, 60.0)
_jitter: Final = SystemRandom().random  # the program's own random numbers stay as its seed makes them


def within(seconds: float, where: str, call: Callable[[], T]) -> T:
    """Return the result of a call, or raise its error; `StoreError` if it takes longer, and goes on in its thread.

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
    except (OSError, ValueError) as error:
        answer.set_exception(error)
    finally:
        answer.cancel()  # after any other error nobody should wait; a finished future stays as it is
        del answer  # the same


class Breaker:
    """Says whether a server is asked. A failure opens it; only a caller that found the server answering closes it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, jitter: Callable[[], float] = _jitter) -> None:
        self._clock, self._jitter = clock, jitter
        self._failures = 0
        self._closed_at_s = clock()
        self.is_open = False

    def trip(self) -> None:
        """Leave the server alone, longer each time: also one that comes and goes, as each time costs a call 0.3 s."""
        if not self.is_open and self._clock() - self._closed_at_s > _PAUSES_S[1]:
            self._failures = 0
        self._failures += 1
        self.is_open = True

    def close(self) -> None:
        self._closed_at_s = self._clock()
        self.is_open = False

    def pause_s(self) -> float:
        """Return how long to wait before the next try; 0 if the server is not left alone."""
        if not self.is_open:
            return 0.0
        first_s, longest_s = _PAUSES_S
        # Jittered, or all machines of a fleet would knock at the same moment.
        return min(longest_s, first_s * 2.0 ** min(self._failures - 1, 10)) * (0.5 + self._jitter() / 2)


# ------------------------------------------------------------- leases, which fall back on the local book's leases

_LONGEST_PAUSE_S: Final = 1.0  # between two looks of a waiter at the leases
_LIMIT: Final = 4096  # a service that meets ever new problems must not grow without bound


class Unanswered(NamedTuple):
    """The shared book did not answer."""


class _Look(NamedTuple):
    """The last sight of a lease that others hold, by a wait that began at `since_s`; it is good until `until_s`.

    It is good for a tenth of the time that the wait has lasted, and a second at most: at the 50 ms of a local book, a
    thousand machines that wait for one tuning would ask a server 60,000 times a second. A slip changes every 2.5 s, so
    that a second does not hide its signs of life. Nothing here sleeps: the caller may be a call that will not wait.
    """

    since_s: float
    until_s: float
    generations: tuple[int, ...]
    slips: dict[str, bytes | None]


@final
class SharedBoard:
    """The shared book's leases while it answers, else the front's, which keep the processes of this machine apart.

    A lease that this process holds stays on the board where it was made, or its holder could neither keep it alive nor
    give it back when the server comes or goes meanwhile.
    """

    def __init__(
        self,
        ask: Callable[[Callable[[], Any], Any], Any],
        about_to_tune: Callable[[str], None],
        front: Store,
        remote: RemoteStore,
        clock: Callable[[], float],
    ) -> None:
        self._ask, self._about_to_tune, self._clock = ask, about_to_tune, clock
        self._front, self._remote, self._where = front, remote.leases(), remote.where
        self._looks: dict[str, _Look] = {}  # by lease
        self._held: dict[str, tuple[str, bool]] = {}  # by lease: our slip, and whether it is the shared book's

    def create(self, name: str, content: bytes) -> bool:
        made, shared = self._on_either(name, lambda board: board.create(name, content))
        if made:
            self._held[_lease_of(name)] = (name, shared)
        return made

    def read(self, name: str) -> bytes | None:
        look = self._last_look(_lease_of(name))
        if look is not None and name in look.slips:
            return look.slips[name]
        content, _ = self._on_either(name, lambda board: board.read(name))
        if look is not None:
            look.slips[name] = content
        return content

    def rewrite(self, name: str, content: bytes) -> bool:
        return self._on_either(name, lambda board: board.rewrite(name, content))[0]

    def remove(self, name: str) -> None:
        self._looks.pop(_lease_of(name), None)
        try:
            self._on_either(name, lambda board: board.remove(name))
        finally:
            if self._held.get(_lease_of(name), ("", False))[0] == name:
                self._held.pop(_lease_of(name), None)

    def generations(self, lease_id: str) -> list[int]:
        look = self._last_look(lease_id)
        if look is not None:
            return list(look.generations)
        self._about_to_tune(lease_id)
        found, shared = self._on_either(f"{lease_id}.", lambda board: board.generations(lease_id))
        if shared and found:
            now_s, before = self._clock(), self._looks.get(lease_id)
            ongoing = before is not None and now_s - before.until_s < _LONGEST_PAUSE_S
            since_s = before.since_s if before is not None and ongoing else now_s
            if len(self._looks) >= _LIMIT:
                self._looks.clear()
            until_s = now_s + min(_LONGEST_PAUSE_S, (now_s - since_s) / 10)
            self._looks[lease_id] = _Look(since_s, until_s, tuple(found), {})
        elif shared:
            self._looks.pop(lease_id, None)
        return found

    def _last_look(self, lease_id: str) -> _Look | None:
        """Return the last sight of a lease, if it is still good and others hold the lease."""
        look = None if lease_id in self._held else self._looks.get(lease_id)
        return look if look is not None and self._clock() < look.until_s else None

    def _on_either(self, name: str, step: Callable[[LeaseBoard], T]) -> tuple[T, bool]:
        """Take a step on the board of a lease; return its result, and whether the board was the shared book's."""
        held = self._held.get(_lease_of(name))
        if held is None or held[1]:
            answer = self._ask(lambda: step(self._remote), Unanswered())
            if not isinstance(answer, Unanswered):
                return answer, True
        local = self._front.leases() if held is None or not held[1] else None
        if local is None:
            message = f"the leases of the shared book at {self._where} cannot be reached."
            raise StoreError("remote", self._where, message)
        return step(local), False


def _lease_of(name: str) -> str:
    return name.rpartition(".")[0]
