"""The persistent tier as the selector sees it: which entries may be trusted, and what is written after tuning."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from tunebook._codec import encode, fingerprint_of
from tunebook._errors import CodecError, warn_once
from tunebook._record import Body, Head, Record, identity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tunebook._kernel import Invocation, Kernel
    from tunebook._persistent import PersistentCache
    from tunebook._tuner import Tuned
    from tunebook._types import Json, Measurement, Problem

C = TypeVar("C")

# Measurements under other code or in other environments are kept, because a later one may return to them; but an
# entry that is tuned anew after every edit must not grow without end.
KEPT_MEASUREMENTS: Final = 2000
_INDEXES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[C]):
    """A call that needs a configuration, with what the tiers ask about it."""

    inv: Invocation[C, Any]
    kernel: Kernel[C, Any]
    problem: Problem


class Trusted(NamedTuple, Generic[C]):
    """An entry that may be used."""

    config: C
    record: Record


class Refused(NamedTuple):
    """Why there is no entry that may be used."""

    reason: str


class History(NamedTuple):
    """What is known about a problem: measurements under whatever conditions, the winner's fingerprint, a generation.

    `complete` is False if a budget ended the last tuning.
    """

    measurements: tuple[Measurement, ...] = ()
    winner: str | None = None
    generation: int = 0
    complete: bool = True


class Book(Generic[C]):
    """Reads and writes one `PersistentCache` on behalf of kernels."""

    def __init__(self, persistent: PersistentCache[C]) -> None:
        self.persistent: Final = persistent
        self._indexes: dict[str, dict[str, C]] = {}

    def find(self, call: Call[C]) -> Trusted[C] | Refused:
        """Return the entry of a call if it was made by this kernel, here, and is one of its candidates."""
        record = self.persistent.read(call.problem)
        if record is None:
            return Refused(f"no entry in {self.persistent.store.where}")
        head = record.head
        # An entry without a checksum was put there by hand or comes from another tool: its origin says so, and the
        # user who imported it vouches for it.
        checksum = call.kernel.checksum(call.inv)
        if head.checksum and head.checksum != checksum:
            return Refused("the entry was made by other code or other candidates, so it is tuned anew")
        environment = call.kernel.environment(call.inv)
        if head.environment and head.environment != environment:
            return Refused(f"the entry was made under {head.environment}; this is {environment}")
        try:
            return self._match(call, record, checksum)
        except CodecError as error:
            return Refused(f"the entry is not a configuration of this kernel: {error}")

    def _match(self, call: Call[C], record: Record, checksum: str) -> Trusted[C] | Refused:
        """Find the stored configuration among the live candidates.

        That is lossless whatever the class, and it is what a poisoned book fails at.
        """
        index = self._indexes.get(checksum)
        if index is None:
            if len(self._indexes) >= _INDEXES:
                self._indexes.clear()
            index = self._indexes[checksum] = self._index(call)
        if not index:
            return Trusted(self.persistent.config_of(record), record)
        found = index.get(fingerprint_of(record.head.config))
        if found is None and not record.head.checksum:
            found = index.get(fingerprint_of(encode(self.persistent.config_of(record))))
        if found is None:
            return Refused("the stored configuration is not among the kernel's candidates")
        return Trusted(found, record)

    def _index(self, call: Call[C]) -> dict[str, C]:
        candidates = list(call.kernel.candidates(call.inv))
        heuristic = call.kernel.heuristic(call.inv)
        if candidates and heuristic is not None:
            candidates.append(heuristic)  # it is in every race, so it may have won
        index: dict[str, C] = {}
        for config in candidates:
            try:
                index[fingerprint_of(self.persistent.encode(config))] = config
            except CodecError:
                continue  # what cannot be written cannot be in the book
        return index

    def history(self, call: Call[C]) -> History:
        """Return what is known about a call's problem before it is tuned."""
        record = self.persistent.read(call.problem)
        if record is None:
            return History()
        body = body_of(record)
        complete = body.provenance.get("complete") is not False
        return History(body.measurements, winner_of(body), record.head.generation, complete)

    def publish(self, call: Call[C], tuned: Tuned[C], generation: int) -> None:
        """Write what a tuning found; a configuration that cannot be written costs one warning and stays in memory.

        `generation` is that of the record as it was before the tuning, plus the lease's. A holder that was paused past
        its lease so comes out below the one that took over, and the store refuses its late record.
        """
        earlier = self.persistent.read(call.problem)
        try:
            config = self.persistent.encode(tuned.config)
        except CodecError as error:
            warn_once("unwritable", call.problem.op, f"{call.problem.op}: tuned, but not written down: {error}")
            return
        head = Head(
            problem=call.problem,
            config=config,
            checksum=call.kernel.checksum(call.inv),
            origin="tuned",
            environment=call.kernel.environment(call.inv),
            generation=generation,
        )
        known = () if earlier is None else body_of(earlier).measurements
        body = Body(measurements=_kept(known, tuned.measurements), provenance=_provenance(tuned))
        if earlier is not None:
            head, body = replace(head, extra=earlier.head.extra), replace(body, extra=body_of(earlier).extra)
        self.persistent.write(Record(head, body))


def body_of(record: Record) -> Body:
    """Return a record's body, or an empty one if it cannot be read: the head alone answers calls."""
    try:
        return record.body
    except CodecError:
        return Body()


def winner_of(body: Body) -> str | None:
    """Return the fingerprint of the configuration that was chosen on these measurements, if that was written down."""
    winner = body.provenance.get("winner")
    return winner if isinstance(winner, str) else None


def _kept(known: Sequence[Measurement], new: Sequence[Measurement]) -> tuple[Measurement, ...]:
    fresh = {identity(m) for m in new}
    older = sorted((m for m in known if identity(m) not in fresh), key=lambda m: m.when, reverse=True)
    return (*new, *older[: max(0, KEPT_MEASUREMENTS - len(new))])


def _provenance(tuned: Tuned[Any]) -> dict[str, Json]:
    facts: dict[str, Json] = {
        "when": time.time(),
        "host": os.uname().nodename,
        "seconds": tuned.seconds,
        "ran": tuned.ran,
        "complete": tuned.complete,
    }
    if tuned.verdict is not None:
        facts |= {"winner": tuned.verdict.winner.measurement.fingerprint, "rule": tuned.verdict.rule}
    return facts
