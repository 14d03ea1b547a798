"""A cache of the fastest of several implementations, with pending entries and checksums that are verified once."""

from __future__ import annotations

import os
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, TypeGuard

from tunebook._base.config_codec import decode, encode
from tunebook._base.errors import CodecError, DefinitionError, TunebookError, warn_once
from tunebook._base.record_format import Body, Head, Record, canonical_json
from tunebook._base.vocabulary import Json, Problem
from tunebook._selection.persistent_cache import default_book, store_at
from tunebook.stores._files import FaultsAreWarnings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tunebook.stores import Store


# Dataclasses and not NamedTuples: two empty tuples would be equal.
@dataclass(frozen=True, slots=True)
class Hit:
    """The fastest implementation is known."""

    fastest_index: int


@dataclass(frozen=True, slots=True)
class Unchecked:
    """The entry came from disk and its checksum is not validated yet: call `validate_checksum`."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A caller in this process is measuring the implementations."""


@dataclass(frozen=True, slots=True)
class Miss:
    """The key is unknown."""


@dataclass(frozen=True, slots=True)
class Match:
    """The entry was made by the same set of implementations."""


@dataclass(frozen=True, slots=True)
class NoMatch:
    """The entry was made by another set of implementations, and counts as a miss."""


@dataclass(frozen=True, slots=True)
class ToBeVerified:
    """The entry came from disk with a checksum that has not been compared yet."""

    checksum: str


Lookup: TypeAlias = Hit | Unchecked | Pending | Miss
ChecksumState: TypeAlias = Match | NoMatch | ToBeVerified


@dataclass(frozen=True, slots=True)
class AutotuneOutcome:
    """The times of an implementation: its name, its index, and the times of the computation in seconds."""

    name: str
    index: int
    computation: tuple[float, ...] = ()


class AutotuneError(TunebookError, RuntimeError):
    """The reason why an implementation has no time."""


class AutotuneResult(NamedTuple):
    """An outcome or an error."""

    outcome: AutotuneOutcome | AutotuneError

    @classmethod
    def success(cls, outcome: AutotuneOutcome) -> AutotuneResult:
        """Return the result of an implementation that ran."""
        return cls(outcome)

    @classmethod
    def error(cls, error: AutotuneError) -> AutotuneResult:
        """Return the result of an implementation that failed."""
        return cls(error)


class _Done(NamedTuple):
    checksum: ChecksumState
    fastest_index: int
    fresh: bool = False  # whether this process measured it, rather than read it


_caches: Final[weakref.WeakSet[TuneCache]] = weakref.WeakSet()


class TuneCache:
    """The fastest implementation by key. Safe to share between threads; an entry on disk is read when it is needed.

    A key is a string, or a value that may be part of a configuration. `root` is a directory or the file of a store,
    None for the user's own book.
    """

    def __init__(self, name: str, device_id: str, root: str | os.PathLike[str] | None = None) -> None:
        if not name or not device_id:
            raise DefinitionError(f"a tune cache needs a name and a device id; got {name!r}, {device_id!r}")
        self._op = f"tune-cache/{name}"
        self._device = device_id
        self._given = None if root is None else store_at(root)
        self._entries: dict[str, _Done | Pending] = {}
        self.renew_lock()
        _caches.add(self)

    def renew_lock(self) -> None:
        """Take a new lock, in a forked child."""
        self._lock = threading.RLock()  # re-entrant, for finalisers that look something up

    def fastest(self, key: object) -> Lookup:
        """Return the state of a key."""
        text = _text(key)
        with self._lock:
            entry = self._entries.get(text)
            if entry is None:
                record = self._record(text)
                entry = None if record is None else _entry(record)
                if entry is None:
                    return Miss()
                self._entries[text] = entry
        if isinstance(entry, Pending):
            return entry
        if isinstance(entry.checksum, Match):
            return Hit(entry.fastest_index)
        return Unchecked() if isinstance(entry.checksum, ToBeVerified) else Miss()

    def validate_checksum(self, key: object, checksum: str) -> ChecksumState | None:
        """Compare the checksum of an entry from disk, once; return its state, or None for an unknown key."""
        self.fastest(key)
        text = _text(key)
        with self._lock:
            entry = self._entries.get(text)
            if not isinstance(entry, _Done):
                return None
            if isinstance(entry.checksum, ToBeVerified):
                state = Match() if entry.checksum.checksum == checksum else NoMatch()
                entry = self._entries[text] = _Done(state, entry.fastest_index)
            return entry.checksum

    def mark_pending(self, key: object) -> None:
        """Mark a key as being measured in this process."""
        with self._lock:
            self._entries[_text(key)] = Pending()

    def cache_insert(self, key: object, fastest_index: int) -> None:
        """Keep a result in memory."""
        with self._lock:
            self._entries[_text(key)] = _Done(Match(), _index(fastest_index), fresh=True)

    def persistent_cache_insert(
        self, key: object, checksum: str, fastest_index: int, results: Sequence[AutotuneResult]
    ) -> None:
        """Write a result to disk with the times and errors of every implementation.

        Of two results for a key the first is kept. Two processes may well disagree, since machines are busy in
        different ways; within a process a second result is worth a warning.
        """
        text, index = _text(key), _index(fastest_index)
        with self._lock:
            known = self._entries.get(text)
            if isinstance(known, _Done) and known.fresh and known.fastest_index != index:
                first = known.fastest_index
                message = f"{self._op}: {text} was fastest with {first} and now with {index}; {first} is kept"
                warn_once("disagreement", f"{self._op}:{text}", message)
                return
            self._entries[text] = _Done(Match(), index, fresh=True)
        head = Head(problem=Problem(self._device, self._op, text), config=index, checksum=checksum, origin="tuned")
        written: list[Json] = [
            {"error": str(outcome)}
            if isinstance(outcome, AutotuneError)
            else {"name": outcome.name, "index": outcome.index, "computation": encode(list(outcome.computation))}
            for (outcome,) in results
        ]
        record = Record(head, Body(provenance={"when": time.time()}, extra={"results": written}))
        with self._guard():
            self._store.put(record)

    def results(self, key: object) -> list[AutotuneResult]:
        """Return the stored result of each implementation of a key."""
        record = self._record(_text(key))
        try:
            stored = [] if record is None else record.body.extra.get("results", [])
            return [_result_from(entry) for entry in stored] if isinstance(stored, list) else []
        except CodecError:
            return []

    def load(self) -> int:
        """Read every entry on disk now, instead of when it is needed; return their number."""
        count = 0
        with self._guard():
            for record in self._store.items(self._op):
                if record.problem.device == self._device and (entry := _entry(record)) is not None:
                    count += 1
                    with self._lock:
                        self._entries.setdefault(record.problem.call_key, entry)
        return count

    def _guard(self) -> FaultsAreWarnings:
        return FaultsAreWarnings(self._op, before=f"{self._op}: ")

    @property
    def _store(self) -> Store:
        return default_book() if self._given is None else self._given

    def _record(self, text: str) -> Record | None:
        with self._guard():
            return self._store.get(Problem(self._device, self._op, text))
        return None


def _text(key: object) -> str:
    return key if isinstance(key, str) else canonical_json(encode(key))


def _is_index(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _index(value: object) -> int:
    if not _is_index(value):
        raise DefinitionError(f"fastest_index must be 0 or more; got {value!r}")
    return value


def _entry(record: Record) -> _Done | None:
    index = record.head.config  # an invalid one is a miss
    return _Done(ToBeVerified(record.head.checksum), index) if _is_index(index) else None


def _result_from(entry: Json) -> AutotuneResult:
    match entry:
        case {"error": str(message)}:
            return AutotuneResult.error(AutotuneError(message))
        case {"name": str(name), "index": int(index), "computation": list(times)}:
            return AutotuneResult.success(AutotuneOutcome(name, index, tuple(decode(times))))
    raise CodecError(f"not a result: {str(entry)[:80]}")


def _renew_locks() -> None:
    for cache in _caches:
        cache.renew_lock()


os.register_at_fork(after_in_child=_renew_locks)
