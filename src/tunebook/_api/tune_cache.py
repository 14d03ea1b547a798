"""A cache of the fastest of several implementations, with pending entries and checksums that are verified once."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias, TypeGuard

from tunebook._base.config_codec import decode, encode
from tunebook._base.errors import CodecError, DefinitionError, TunebookError, warn_once
from tunebook._base.locks import InterruptSafeLock
from tunebook._base.record_format import Body, Head, Record, canonical_json
from tunebook._base.vocabulary import TUNE_CACHES, Json, Problem
from tunebook._selection.persistent_cache import default_book, store_at
from tunebook._selection.single_flight import Busy, Lease, acquire
from tunebook.stores import problem_id
from tunebook.stores._files import FaultsAreWarnings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tunebook.stores import LeaseBoard, Store

_log: Final = logging.getLogger("tunebook")
# A caller that keeps a result in memory writes it to disk next, if it does. Other processes wait for this long.
_GRACE_S: Final = 5.0


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
    """A caller is measuring the implementations: a thread of this process, or another process."""

    _wait: Callable[[float | None], bool] | None = field(default=None, repr=False, compare=False)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until that caller has a result or has given up, then look again; False if the time was up before."""
        return self._wait is None or self._wait(timeout_s)


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


TuneCacheResult: TypeAlias = Hit | Unchecked | Pending | Miss
"""The state of a key, as `fastest` and `validate_checksum` return it."""

ChecksumState: TypeAlias = Match | NoMatch | ToBeVerified
"""Whether an entry was made by the same set of implementations."""


@dataclass(frozen=True, slots=True)
class Done:
    """A result in memory: the fastest implementation, and whether the entry may be used."""

    checksum: ChecksumState
    fastest_index: int


CacheEntry: TypeAlias = Done | Pending
"""A key in memory: a result, or a claim."""


@dataclass(frozen=True, slots=True)
class AutotuneOutcome:
    """The times of an implementation: its name, its index, and the times of the computation in seconds."""

    name: str
    index: int
    computation: tuple[float, ...] = ()


class AutotuneError(TunebookError, RuntimeError):
    """The reason why an implementation has no time."""


@dataclass(frozen=True, slots=True, eq=False)
class AutotuneResult:
    """An outcome or an error. Outcomes are compared by their content; all errors are equal."""

    outcome: AutotuneOutcome | AutotuneError

    @classmethod
    def success(cls, outcome: AutotuneOutcome) -> AutotuneResult:
        """Return the result of an implementation that ran."""
        return cls(outcome)

    @classmethod
    def error(cls, error: AutotuneError) -> AutotuneResult:
        """Return the result of an implementation that failed."""
        return cls(error)

    def _compared(self) -> AutotuneOutcome | None:
        return None if isinstance(self.outcome, AutotuneError) else self.outcome

    def __eq__(self, other: object) -> bool:
        return self._compared() == other._compared() if isinstance(other, AutotuneResult) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._compared())


class _Claim:
    """A key that is being measured. `refused` is the checksum of an entry on disk that is not to be waited for."""

    def __init__(self, refused: str | None) -> None:
        self.refused: Final = refused
        self.landed: Final = threading.Event()
        self.is_remote = False
        self._pid: Final = os.getpid()

    @property
    def is_elsewhere(self) -> bool:
        """Whether another process measures it; in a forked child, that is its parent."""
        return self.is_remote or self._pid != os.getpid()


class TuneCache:
    """The fastest implementation by key. Safe to share between threads; an entry on disk is read when it is needed.

    A key is a string, or a value that may be part of a configuration. `root` is a directory or the file of a store,
    None for the user's own book. On disk an entry belongs to a key and a checksum, so that two versions of a program
    keep both of theirs.

    A caller that gets `Miss` calls `mark_pending`. The one caller that gets True measures, and then calls
    `cache_insert` and `persistent_cache_insert`, or `clear_pending` if it failed. All others get `Pending` from
    `fastest`, wait, and look again. Callers in other processes do too, where the store has leases.

    >>> from tempfile import TemporaryDirectory
    >>> root = TemporaryDirectory()
    >>> cache = TuneCache("matmul", "cpu", root.name)
    >>> cache.mark_pending("f32[64,64]"), cache.mark_pending("f32[64,64]")
    (True, False)
    >>> cache.cache_insert("f32[64,64]", 2)
    >>> cache.fastest("f32[64,64]")
    Hit(fastest_index=2)
    >>> root.cleanup()
    """

    def __init__(self, name: str, device_id: str, root: str | os.PathLike[str] | None = None) -> None:
        if not name or not device_id:
            raise DefinitionError(f"a tune cache needs a name and a device id; got {name!r}, {device_id!r}")
        # A key has one record that says that there is an entry, and one record for each checksum.
        self._op, self._versions = (f"{prefix}{name}" for prefix in TUNE_CACHES)
        self._device = device_id
        self._given = None if root is None else store_at(root)
        self._entries: dict[str, Done | _Claim] = {}
        self._leases: dict[str, Lease] = {}
        self._timers: dict[str, threading.Timer] = {}
        self._written: dict[tuple[str, str], int] = {}
        self._refused: dict[str, str] = {}
        self.renew_lock()
        _caches.add(self)

    def __repr__(self) -> str:
        return f"<TuneCache {self._op.partition('/')[2]}: {len(self._entries)} keys in memory>"

    def renew_lock(self) -> None:
        """Take a new lock, in a forked child: if another thread held it at the fork, it would stay locked."""
        self._lock = InterruptSafeLock()  # re-entrant, for finalisers that look something up

    def fastest(self, key: object) -> TuneCacheResult:
        """Return the state of a key."""
        text = _text(key)
        entry = self._entry(text)
        if entry is None:
            return Miss()
        if isinstance(entry, _Claim):
            return Pending(partial(self._wait, text, entry))
        if isinstance(entry.checksum, Match):
            return Hit(entry.fastest_index)
        return Unchecked() if isinstance(entry.checksum, ToBeVerified) else Miss()

    def validate_checksum(self, key: object, checksum: str) -> TuneCacheResult:
        """Compare the checksum of an entry from disk, once; return `Hit` if it is the same, else `Miss`."""
        text = _text(key)
        entry = self._entry(text)
        if isinstance(entry, Done) and isinstance(entry.checksum, ToBeVerified):
            index: Json = entry.fastest_index
            if entry.checksum.checksum != checksum:
                version = self._record(self._version(text, checksum))
                index = None if version is None else version.head.config
            verified = Done(Match(), index) if _is_index(index) else Done(NoMatch(), entry.fastest_index)
            with self._lock:
                if self._entries.get(text) is entry:
                    self._entries[text] = verified
                    self._refused[text] = entry.checksum.checksum
        return self.fastest(key)

    # ---------------------------------------------------------------------------------------------- one measures

    def mark_pending(self, key: object) -> bool:
        """Claim a key, to measure its implementations; False if a result is there, or another caller has claimed it."""
        text = _text(key)
        with self._lock:
            entry = self._entries.get(text)
            if isinstance(entry, _Claim) or (isinstance(entry, Done) and isinstance(entry.checksum, Match)):
                return False
            claim = self._entries[text] = _Claim(self._refused.get(text))
        got: object = None
        try:
            got = self._ask_for_lease(text, claim, 0.0)
        finally:  # also after an interrupt: nobody must wait for a claim that nobody has
            if isinstance(got, Lease):
                self._leases[text] = got
            else:
                claim.is_remote = isinstance(got, Busy)
                if not claim.is_remote:
                    self._drop(text, claim)
                claim.landed.set()
        return isinstance(got, Lease)

    def clear_pending(self, key: object) -> None:
        """Give up a claim without a result; one of the callers that wait for it may claim the key then."""
        text = _text(key)
        claim = self._entries.get(text)
        if isinstance(claim, _Claim) and not claim.is_elsewhere:
            self._release(text)
            self._drop(text, claim)
            claim.landed.set()

    def cache_insert(self, key: object, fastest_index: int) -> None:
        """Keep a result in memory, and wake the threads that wait for it."""
        text = _text(key)
        self._finish(text, Done(Match(), _index(fastest_index)))
        if text in self._leases:
            timer = self._timers[text] = threading.Timer(_GRACE_S, self._release, [text])
            timer.daemon = True
            try:
                timer.start()
            except RuntimeError:  # the interpreter is ending
                self._release(text)

    def persistent_cache_insert(
        self, key: object, checksum: str, fastest_index: int, results: Sequence[AutotuneResult]
    ) -> None:
        """Write a result to disk with the times and errors of every implementation; a claim of the key ends.

        Of two results for a key and a checksum the first is kept. Two processes may well disagree, since machines are
        busy in different ways; within a process a second result is worth a warning.
        """
        text, index = _text(key), _index(fastest_index)
        with self._lock:
            first = self._written.setdefault((text, checksum), index)
        if first != index:
            message = f"{self._op}: {text} was fastest with {first} and now with {index}; {first} is kept"
            warn_once("disagreement", f"{self._op}:{text}", message)
        elif self._record(self._version(text, checksum)) is None:
            self._write(text, checksum, index, results)
        if isinstance(self._entries.get(text), _Claim):
            self._finish(text, Done(Match(), first))
        self._release(text)

    def _write(self, text: str, checksum: str, index: int, results: Sequence[AutotuneResult]) -> None:
        head = Head(problem=self._version(text, checksum), config=index, checksum=checksum, origin="tuned")
        written: list[Json] = [
            {"error": str(outcome)}
            if isinstance(outcome, AutotuneError)
            else {"name": outcome.name, "index": outcome.index, "computation": encode(list(outcome.computation))}
            for outcome in (result.outcome for result in results)
        ]
        body = Body(provenance={"when": time.time()}, extra={"results": written})
        latest = replace(head, problem=Problem(self._device, self._op, text))
        with self._guard():
            self._store.put_many([Record(head, body), Record(latest, body)])

    def _finish(self, text: str, done: Done) -> None:
        with self._lock:
            claim = self._entries.get(text)
            self._entries[text] = done
        if isinstance(claim, _Claim):
            claim.landed.set()

    def _drop(self, text: str, claim: _Claim) -> None:
        with self._lock:
            if self._entries.get(text) is claim:
                del self._entries[text]

    def _release(self, text: str) -> None:
        lease, timer = self._leases.pop(text, None), self._timers.pop(text, None)
        if timer is not None:
            timer.cancel()
        if lease is not None:
            lease.release()

    # ----------------------------------------------------------------------------------------------- others wait

    def _wait(self, text: str, claim: _Claim, timeout_s: float | None) -> bool:
        return self._settle(text, claim, timeout_s) if claim.is_elsewhere else claim.landed.wait(timeout_s)

    def _settle(self, text: str, claim: _Claim, timeout_s: float | None) -> bool:
        """Forget the claim of another process when that has ended; False if it has not."""
        got = self._ask_for_lease(text, claim, timeout_s)
        if isinstance(got, Busy):
            return False
        if isinstance(got, Lease):
            got.release()  # its holder gave up, or is gone
        self._drop(text, claim)
        return True

    def _ask_for_lease(self, text: str, claim: _Claim, timeout_s: float | None) -> object:
        def look() -> Record | None:
            record = self._record(Problem(self._device, self._op, text))
            return None if record is None or record.head.checksum == claim.refused else record

        problem = Problem(self._device, self._op, text)
        return acquire(self._board(), problem_id(problem), look=look, deadline_s=timeout_s)

    def _board(self) -> LeaseBoard | None:
        with self._guard():
            return self._store.leases()
        return None

    # --------------------------------------------------------------------------------------------------- on disk

    def results(self, key: object, checksum: str | None = None) -> list[AutotuneResult]:
        """Return the stored result of each implementation of a key, for the latest or for a given checksum."""
        text = _text(key)
        latest = Problem(self._device, self._op, text)
        record = self._record(latest if checksum is None else self._version(text, checksum))
        try:
            stored = [] if record is None else record.body.extra.get("results", [])
            return [_result_from(entry) for entry in stored] if isinstance(stored, list) else []
        except CodecError:
            return []

    def load(self) -> int:
        """Read every entry on disk now, instead of when it is needed; return their number."""
        _log.info("%s: reading the entries for %s in %s", self._op, self._device, self._store.where)
        count = 0
        with self._guard():
            for record in self._store.items(self._op):
                if record.problem.device == self._device and (entry := _done(record)) is not None:
                    count += 1
                    with self._lock:
                        self._entries.setdefault(record.problem.call_key, entry)
        _log.info("%s: read %d entries", self._op, count)
        return count

    def _guard(self) -> FaultsAreWarnings:
        return FaultsAreWarnings(self._op, before=f"{self._op}: ")

    @property
    def _store(self) -> Store:
        return default_book() if self._given is None else self._given

    def _entry(self, text: str) -> Done | _Claim | None:
        entry = self._entries.get(text)
        if isinstance(entry, _Claim) and entry.is_elsewhere and self._settle(text, entry, 0.0):
            entry = self._entries.get(text)
        if entry is not None:
            return entry
        record = self._record(Problem(self._device, self._op, text))
        done = None if record is None else _done(record)
        if done is None:
            return None
        with self._lock:
            return self._entries.setdefault(text, done)

    def _version(self, text: str, checksum: str) -> Problem:
        return Problem(self._device, self._versions, canonical_json([text, checksum]))

    def _record(self, problem: Problem) -> Record | None:
        with self._guard():
            return self._store.get(problem)
        return None


_caches: Final[weakref.WeakSet[TuneCache]] = weakref.WeakSet()


def _renew_locks() -> None:
    for cache in _caches:
        cache.renew_lock()


os.register_at_fork(after_in_child=_renew_locks)


def _text(key: object) -> str:
    return key if isinstance(key, str) else canonical_json(encode(key))


def _is_index(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _index(value: object) -> int:
    if not _is_index(value):
        raise DefinitionError(f"fastest_index must be 0 or more; got {value!r}")
    return value


def _done(record: Record) -> Done | None:
    index = record.head.config  # an invalid one is a miss
    return Done(ToBeVerified(record.head.checksum), index) if _is_index(index) else None


def _result_from(entry: Json) -> AutotuneResult:
    match entry:
        case {"error": str(message)}:
            return AutotuneResult.error(AutotuneError(message))
        case {"name": str(name), "index": int(index), "computation": list(times)}:
            return AutotuneResult.success(AutotuneOutcome(name, index, tuple(decode(times))))
    raise CodecError(f"not a result: {str(entry)[:80]}")
