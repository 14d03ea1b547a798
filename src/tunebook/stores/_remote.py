"""Books on other machines: the contract of their engines, signed records, errors without secrets, and calls cut short.

A shared book holds the bytes of a record (see `record_format`) and with a key one line more, `hmac-sha256 <64 hex
digits>`. A machine without a key reads signed records too: a signature keeps out writers that do not know the key, not
readers that do not ask for it.
"""

from __future__ import annotations

import hmac
import random
import re
import threading
import time
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar

from tunebook._base.errors import CodecError, StoreError, warn_once
from tunebook._base.record_format import Record
from tunebook.stores._protocol import LeaseBoard, Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from tunebook._base.vocabulary import Problem

T = TypeVar("T")

# Signed bytes begin with this, so that nothing signed with the same key for another purpose passes for a record.
_PURPOSE: Final = b"tunebook record 1\n"
_SEAL: Final = re.compile(rb"hmac-sha256 ([0-9a-f]{64})\n")
_SEAL_BYTES: Final = 77


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
        """Return the bytes that go to the shared book."""
        data = record.to_bytes()
        return data if self.key is None else b"%shmac-sha256 %s\n" % (data, _digest(data, self.key))

    def unseal(self, content: bytes) -> Record:
        """Return the record in bytes from the shared book; `CodecError` if damaged, `NotSigned` if not believed."""
        seal = _SEAL.fullmatch(content[-_SEAL_BYTES:])
        data = content if seal is None else content[:-_SEAL_BYTES]
        if self.key is not None and (seal is None or not hmac.compare_digest(seal[1], _digest(data, self.key))):
            found = "it is not signed at all" if seal is None else "it is signed with another key, or was altered"
            raise NotSigned(found)
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


def _digest(data: bytes, key: bytes) -> bytes:
    return hmac.new(key, _PURPOSE + data, "sha256").hexdigest().encode("ascii")


def fault(where: str, error: Exception) -> StoreError:
    """Return a client's error as a `StoreError`: its first line, since some clients append a page of internals."""
    said = str(error).partition("\n")[0][:300].rstrip(".") or type(error).__name__
    return StoreError("remote", where, f"the shared book at {where} cannot be used: {said}.")


def without_secrets(url: str) -> str:
    """Return an address without user, password and options."""
    scheme, _, rest = url.partition("://")
    # Up to the last @, and not as a parser would see it: a password with a slash in it belongs to the path then.
    return f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}"


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
