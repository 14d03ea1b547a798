"""Books on other machines: the contract of their engines, signed records, and errors without secrets.

A shared book holds the bytes of a record (see `record_format`) and with a key one line more, `hmac-sha256 <64 hex
digits>`. A machine without a key reads signed records too: a signature keeps out writers that do not know the key, not
readers that do not ask for it.
"""

from __future__ import annotations

import hmac
import re
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from tunebook._base.errors import CodecError, StoreError, warn_once
from tunebook._base.record_format import Record
from tunebook.stores._protocol import LeaseBoard, Store

if TYPE_CHECKING:
    from tunebook._base.vocabulary import Problem

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
