"""Books on other machines: what an engine is asked for, which address means which, and what its faults are called."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from tunebook._base.errors import CodecError, DefinitionError, StoreError, warn_once
from tunebook._base.optional import require
from tunebook.stores._open import OBJECT_SCHEMES, REDIS_SCHEMES
from tunebook.stores._protocol import LeaseBoard, Store
from tunebook.stores._signing import NotSigned, unsealed

if TYPE_CHECKING:
    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Problem


class RemoteStore(Store, Protocol):
    """A store on another machine. Whatever its client raises is a `StoreError` of kind "remote"."""

    def offer(self, record: Record) -> Record | None:
        """Put a record; return the one that stands in its place, if that has a higher generation."""

    def ping(self) -> None:
        """Ask for something small; `StoreError` if there is no answer."""

    def leases(self) -> LeaseBoard:
        """Return the board for single flight among machines."""


class Envelope(NamedTuple):
    """How one shared book's bytes are read: where they are from, and the key that they must be signed with."""

    where: str
    key: bytes | None = None

    def opened(self, content: bytes, problem: Problem | None = None) -> Record | None:
        """Return the record, or None after one warning if it is damaged, not believed, or another problem's."""
        try:
            record = unsealed(content, self.key)
            if problem is not None and record.problem != problem:
                raise CodecError(f"it holds a record of {record.problem.op[:80]!r} that belongs elsewhere")  # noqa: TRY301 - one way out
        except NotSigned as error:
            remedy = "Give every machine the same TUNEBOOK_SIGNING_KEY; what is tuned here replaces the record."
            warn_once("not-signed", self.where, f"a record in {self.where} is not used: {error}. {remedy}")
        except CodecError as error:
            message = f"an unreadable record in {self.where} is not used: {error}"
            warn_once("unreadable", self.where, f"{message[:300]}. What is tuned here replaces it.")
        else:
            return record
        return None


def fault(where: str, error: Exception) -> StoreError:
    """Return what a client raised as an error of ours: its first line, since some append a page of internals."""
    said = str(error).partition("\n")[0][:300].rstrip(".") or type(error).__name__
    return StoreError("remote", where, f"the shared book at {where} cannot be used: {said}.")


def open_remote(url: str, *, timeout_s: float, key: bytes | None = None) -> RemoteStore:
    """Return the store at an address, without connecting to it; an address that cannot be right is an error here.

    `timeout_s` bounds each exchange with the server. Errors and warnings name the address without its secrets.
    """
    scheme, separator, _ = url.partition("://")
    scheme = scheme.lower()
    if not separator:
        raise DefinitionError(f"{url!r} has lost a slash: give an address as text, not as a Path, which is for files")
    if scheme not in (*REDIS_SCHEMES, *OBJECT_SCHEMES):
        known = ", ".join(f"{name}://" for name in (*REDIS_SCHEMES, *OBJECT_SCHEMES))
        where = without_secrets(url)
        raise DefinitionError(f"no shared book has an address like {where!r}; it begins with one of {known}")
    module, extra, make = ("redis", "redis", _redis) if scheme in REDIS_SCHEMES else ("obstore", "object", _object)
    require(module, extra=extra, feature=f"a shared book at {scheme}://")
    return make(url, timeout_s, key)


def _redis(url: str, timeout_s: float, key: bytes | None) -> RemoteStore:
    from tunebook.stores._redis import RedisStore  # noqa: PLC0415 - redis takes 0.2 s, which only its users pay

    return RedisStore(url, timeout_s=timeout_s, key=key)


def _object(url: str, timeout_s: float, key: bytes | None) -> RemoteStore:
    from tunebook.stores._object import ObjectStore  # noqa: PLC0415 - as above

    return ObjectStore(url, timeout_s=timeout_s, key=key)


def without_secrets(url: str) -> str:
    """Return an address without user, password and options: it stands in messages and in logs."""
    scheme, _, rest = url.partition("://")
    # Up to the last @, and not as a parser would see it: a password with a slash in it belongs to the path then.
    return f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}"
