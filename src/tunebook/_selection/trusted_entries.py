"""Which entries of a book may be trusted, and the record of a tuning."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar, cast

from tunebook._arrays.device_properties import NOTED, noted_properties
from tunebook._base.config_codec import TAG, encode, fingerprint_of, readable
from tunebook._base.environment_variables import trust_setting
from tunebook._base.errors import CodecError, warn_once
from tunebook._base.record_format import CHECKED_BY, Body, Head, Record, from_whole_tuning, identity
from tunebook._base.vocabulary import LIVE, Problem
from tunebook._memo.answer_memo import BoundedDict
from tunebook._selection.recorded_decision import (
    CHECKED_OTHERWISE,
    HEURISTIC_WAS_REJECTED,
    OF_CHECKS,
    REJECTED_SOME,
    carried_over,
    environments_verified,
    heuristic_was_rejected,
    is_checked_otherwise,
    is_finished,
    is_live,
    marked_unfinished,
    measured_so_far,
    of_candidates,
    restamped,
    unmarked,
    values_of,
    why_tuned_anew,
    why_undecided,
    winner_of,
)
from tunebook._space.space import Config, Space
from tunebook._statistics.decide import OBJECTIVES
from tunebook._tuning.job import DIED, REJECTED, History, host_name, is_believed
from tunebook._tuning.plan import TOGETHER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tunebook._base.environment_variables import Mode
    from tunebook._base.vocabulary import Json, Measurement, Trust
    from tunebook._kernel.policy import AutotunePolicy
    from tunebook._selection.persistent_cache import PersistentCache
    from tunebook._tuning.job import Call, Tuned
    from tunebook.search import Nearest, Search
    from tunebook.stores import LeaseBoard

C = TypeVar("C")

# Measurements under other code or in other environments are kept, because a later one may return to them; but an
# entry that is tuned anew after every edit must not grow without end.
KEPT_MEASUREMENTS: Final = 2000
_INDEXES: Final = 64
_UNWRITTEN: Final = 64
_LISTED_S: Final = 30.0


class Trusted(NamedTuple, Generic[C]):
    """An entry that may be used."""

    config: C
    record: Record

    @property
    def is_pinned(self) -> bool:
        return self.record.head.origin == "pinned"


class Refused(NamedTuple, Generic[C]):
    """Why no entry may be used. `record` is in the book; `outdated` is the entry if only its environment differs."""

    reason: str
    record: Record | None = None
    outdated: Trusted[C] | None = None


def generation_of(entry: Trusted[Any] | Refused[Any]) -> int:
    """Return the generation of an entry's record; 0 without one."""
    return 0 if entry.record is None else entry.record.head.generation


def reach_of(policy: AutotunePolicy, mode: Mode) -> Trust:
    """Return how far an entry may be from a call: by `TUNEBOOK_TRUST`, by the policy, or by the mode."""
    given = trust_setting() or policy.trust
    if given is not None:
        return given
    if mode in ("frozen", "replay"):
        return "family"
    in_call = policy.allow_autotune and policy.cache_miss_fallback in ("autotune", "incremental", "predict")
    return "exact" if in_call else "code"  # the call's own entry, outdated, is a better answer than a guess


class EntryGuard(Generic[C]):
    """Reads and writes one `PersistentCache` on behalf of kernels; without one it is empty and takes nothing."""

    def __init__(
        self, persistent: PersistentCache[C] | None, *, writes: bool = True, now_s: Callable[[], float] = time.time
    ) -> None:
        self._given: Final = persistent
        self.writes: Final = writes and persistent is not None
        self._now_s = now_s
        self._indexes: dict[str, dict[str, C]] = {}
        self._listed: dict[str, tuple[float, list[Record]]] = {}
        # The tunings of this process that no store has, for explanations.
        self.unwritten: Final[BoundedDict[Problem, Tuned[C]]] = BoundedDict(_UNWRITTEN)

    @property
    def persistent(self) -> PersistentCache[C]:
        """The cache, where there is one."""
        return cast("PersistentCache[C]", self._given)

    def leases(self) -> LeaseBoard | None:
        """Return the board of leases; None if results are not written, because other processes cannot find them."""
        return self.persistent.leases() if self.writes else None

    def state(self, problem: Problem) -> object | None:
        """Return a value that changes whenever the entry of a problem changes; None if that cannot be known."""
        return () if self._given is None else self._given.state(problem)

    def find(self, call: Call[C]) -> Trusted[C] | Refused[C]:
        """Return the entry of a call if it was made by this kernel, here, and is one of its candidates."""
        record = None if self._given is None else self._given.read(call.problem)
        if record is None:
            return Refused("none given" if self._given is None else f"no entry in {self._given.where}")
        head = record.head
        if not head.decided:
            return Refused(why_undecided(record), record)
        try:
            checksum = call.kernel.checksum(call.inv)
            # An entry without a checksum was put there by hand or comes from another tool: its origin says so, and the
            # user vouches for it.
            if head.checksum and head.checksum != checksum:
                so_far = len(self._so_far(call, record))
                return Refused(why_tuned_anew(head, checksum, call.kernel.code_checksum, so_far), record)
            entry = self.match(call, record, checksum)
        except CodecError as error:
            return Refused(f"the entry is not a configuration of this kernel: {error}", record)
        environment = call.kernel.environment(call.inv)
        if heuristic_was_rejected(record, call):
            entry = Refused(HEURISTIC_WAS_REJECTED, record)
        reason = CHECKED_OTHERWISE if is_checked_otherwise(head, call.kernel.check_checksum) else ""
        if head.environment not in {"", environment}:
            reason = f"the entry was made under {head.environment}; this is {environment}"
        if isinstance(entry, Trusted) and reason:
            return Refused(f"{reason}, so it must be verified first", record, entry)
        return entry

    def match(self, call: Call[C], record: Record, checksum: str) -> Trusted[C] | Refused[C]:
        """Find the stored configuration among the live candidates: it keeps their class, and forged entries fail."""
        candidates = call.kernel.candidates(call.inv)
        if isinstance(candidates, Space):
            # It may have any size, and need not be listed to tell whether a configuration is in it.
            member: Any = candidates.decoded(record.head.config)
            if member is not None:
                return Trusted(member, record)
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
        if found is None and record.head.origin == "pinned":
            pin = f"{call.problem.op} is pinned to {readable(record.head.config)}, which is none of its candidates now"
            warn_once("pin", call.problem.op, f"{pin}, so the pin has no effect: `tunebook unpin`, or pin a candidate")
        if found is None:
            return Refused("the stored configuration is not among the kernel's candidates", record)
        return Trusted(found, record)

    def _index(self, call: Call[C]) -> dict[str, C]:
        given = call.kernel.candidates(call.inv)
        # Whether a configuration is in a space is known without a list; only the heuristic may have won besides.
        candidates = list(islice(given, 1)) if isinstance(given, Space) else list(given)
        heuristic = call.kernel.heuristic(call.inv)
        if candidates and heuristic is not None:
            candidates.append(heuristic)  # it is in every race, so it may have won
        index: dict[str, C] = {}
        for config in candidates:
            try:
                index[fingerprint_of(self.persistent.encode(config))] = config
            except CodecError:
                continue  # it cannot be in the book
        return index

    def history(self, call: Call[C], record: Record | None, *, joint: bool = False) -> History:
        """Return the measurements in a record of a call's problem, as far as a tuning may reuse them.

        `joint`: together with other calls, whose times never compare with those of one call.
        """
        if record is None:
            return History()
        body = record.body
        so_far = [m for m in self._so_far(call, record) if (TOGETHER in m.policy) is joint]
        if call.again or heuristic_was_rejected(record, call):  # a candidate that ended the process would do so again
            fatal = tuple(m for m in body.measurements if m.failure is not None and m.failure.message == DIED)
            return History(fatal, winner_of(body), record.head.generation)
        complete = is_finished(body) and not so_far
        known = tuple(map(unmarked, filter(is_believed, body.measurements)))
        if record.head.environment == (environment := call.kernel.environment(call.inv)):
            known += tuple(carried_over(known, environments_verified(body), environment))
        return History(known, winner_of(body), record.head.generation, complete, len(so_far))

    @staticmethod
    def _so_far(call: Call[C], record: Record) -> list[Measurement]:
        return measured_so_far(record, call.kernel.code_checksum, call.kernel.environment(call.inv))

    def start_for(self, call: Call[C], search: Search) -> Search:
        """Return a search that starts from the book's entries of the same kernel on other shapes and devices."""
        from tunebook.search._warm_start import start_from  # noqa: PLC0415 - loaded late: for big spaces

        records = [] if self._given is None else self._given.records(call.problem.op)
        return search._replace(start=start_from(records, call.problem, search.space, search.blocks))

    def records(self, op: str) -> list[Record]:
        """Return the records of a kernel, as they were at most half a minute ago: listing a big book takes a while."""
        if self._given is None:
            return []
        listed_s, records = self._listed.get(op, (-math.inf, []))
        if time.monotonic() - listed_s > _LISTED_S:
            records = self._given.records(op)
            self._listed[op] = time.monotonic(), records
        return records

    def nearest(self, call: Call[C], records: Iterable[Record] | None = None) -> tuple[C, Nearest] | None:
        """Return the candidate that was best for the nearest sizes (of `records`), with how sure that is, or None."""
        from tunebook.search._warm_start import nearest, nearest_entry  # noqa: PLC0415 - loaded late: few policies ask

        those, table = self.records(call.problem.op) if records is None else records, call.kernel.table
        found = nearest(those, call.problem) if table is None else nearest_entry(those, call.problem, table.distance)
        if found is None:
            return None
        key = fingerprint_of(found.config)
        member = self.members(call, {key: found.config}).get(key)
        return None if member is None else (member, found)

    def members(self, call: Call[C], configs: Mapping[str, Json]) -> dict[str, C]:
        """Return the candidates among encoded configurations, by their fingerprints."""
        candidates = call.kernel.candidates(call.inv)
        if not isinstance(candidates, Space):
            index = self._index(call)
            return {key: index[key] for key in configs if key in index}
        decoded: dict[str, Any] = {key: candidates.decoded(config) for key, config in configs.items()}
        return {key: config for key, config in decoded.items() if config is not None}

    def to_verify(self, call: Call[C], entry: Trusted[C] | Refused[C], *, again: bool = False) -> Trusted[C] | None:
        """Return the outdated entry (`again`: any) of which the finalists may be measured again; else None."""
        found = entry if isinstance(entry, Trusted) else entry.outdated
        if found is None:
            return None
        own = [m for m in found.record.body.measurements if m.code == call.kernel.code_checksum]
        valid = [m for m in own if m.failure is None]
        here = {m.fingerprint for m in valid if m.environment == call.kernel.environment(call.inv)}
        is_outdated = not here.issuperset(m.fingerprint for m in valid)
        if is_checked_otherwise(found.record.head, call.kernel.check_checksum):
            # A candidate that was rejected may be right now: if there is one, all are tried.
            is_outdated = not any(m.failure is not None and m.failure.kind in REJECTED for m in own)
        return found if winner_of(found.record.body) is not None and (is_outdated or again) else None

    def stands(self, call: Call[C], entry: Trusted[C] | Refused[C], values_from: str) -> Trusted[C] | None:
        """Return the entry, made on a caller's arguments, whose choice a tuning on `values_from` must not replace.

        A trace has no arguments to wait for, so a choice that was made under other versions does not bind it.
        """
        found = entry if isinstance(entry, Trusted) else None if call.inv.values_from == "call" else entry.outdated
        if values_from == "call" or found is None:
            return None
        body = found.record.body
        return found if winner_of(body) is not None and values_of(body) in {None, "call"} else None

    def publish(
        self,
        call: Call[C],
        tuned: Tuned[C],
        entry: Trusted[C] | Refused[C],
        generation: int,
        *,
        verified: Trusted[C] | None = None,
        together: Mapping[str, Json] = MappingProxyType({}),
    ) -> C:
        """Write the result of a tuning, and return the configuration that stands.

        The configuration of `entry`, which was there before, stands if it is pinned, if it was chosen on a caller's
        arguments and this tuning had made-up ones, if something disturbed this tuning or its budget ended it, and the
        earlier one was undisturbed and complete, or if it was raced and this one was found in the calls of a program.
        `verified` is the entry whose choice was found to hold here too.
        `generation` is that of the record before the tuning, plus the lease's: a holder that was paused past its lease
        so comes out below the next holder, and the store refuses its late record.
        """
        self.unwritten.pop(call.problem, None)
        if not self.writes:
            self.unwritten[call.problem] = tuned
            return tuned.config
        if (standing := self.stands(call, entry, tuned.values_from)) is not None:
            if verified is not None:
                self._write_verified(call, standing.record, tuned, generation)
            return standing.config
        if isinstance(entry, Trusted) and _says_less(tuned, entry.record.body, again=call.again):
            return cast("C", entry.config)
        if (record := entry.record) is not None and record.head.origin == "pinned":
            beside = {**record.body.provenance, **_decision(tuned), "values_from": tuned.values_from}
            beside |= self._former(call, tuned, record)
            self._write(replace(record.head, generation=generation), tuned.measurements, beside, record)
            # A pin outside of the candidates has no effect, but only `tunebook unpin` removes it.
            return cast("C", entry.config) if isinstance(entry, Trusted) else tuned.config
        try:
            head = self._head(call, self.persistent.encode(tuned.config), generation)
            if any(m.failure is not None and m.failure.kind in REJECTED for m in tuned.measurements):
                head = replace(head, extra={**head.extra, REJECTED_SOME: True})
        except CodecError as error:
            warn_once("unwritable", call.problem.op, f"{call.problem.op}: tuned, but not written down: {error}")
            self.unwritten[call.problem] = tuned
            return tuned.config
        provenance = _provenance(tuned, self._now_s())
        if verified is not None:
            provenance |= restamped(verified.record, tuned, self._now_s())
            provenance["found"] = _found(tuned, of_candidates(verified.record.body))
        provenance |= {**together, **self._former(call, tuned, entry.record)}
        if not self._write(head, tuned.measurements, provenance, entry.record):
            self.unwritten[call.problem] = tuned
        return tuned.config

    def _former(self, call: Call[C], tuned: Tuned[C], earlier: Record | None) -> dict[str, Json]:
        """Return which configurations in a record are not candidates any more: they must not be shown as the winner."""
        before = Body() if earlier is None else earlier.body
        others = {m.fingerprint: m.config for m in before.measurements if m.fingerprint not in tuned.configs}
        gone = sorted(others.keys() - self.members(call, others).keys()) if others else []
        return {"former": [*gone]} if gone or "former" in before.provenance else {}

    def _write_verified(self, call: Call[C], record: Record, tuned: Tuned[C], generation: int) -> None:
        """Write down that a choice holds on made-up arguments too; it still rests on the caller's."""
        here = call.kernel.environment(call.inv) if record.head.environment else ""
        provenance = {**record.body.provenance, **restamped(record, tuned, self._now_s())}
        extra = {**record.head.extra, CHECKED_BY: call.kernel.check_checksum}
        head = replace(record.head, environment=here, generation=generation, extra=extra)
        self._write(head, tuned.measurements, provenance, record)

    def publish_failures(
        self,
        call: Call[C],
        measurements: Sequence[Measurement],
        earlier: Record | None,
        generation: int,
        *,
        interrupted: bool = False,
    ) -> Sequence[Measurement]:
        """Write down how every candidate failed. That is not a decision, and an earlier one stays as it is.

        Failures on made-up arguments are notes for later tunings on such arguments; a decided entry gets none. Of a
        tuning that was interrupted, the times are kept for the next one, unless the entry has better ones: of an
        edited kernel, it has none. Return the measurements that the next tuning goes on from.
        """
        if earlier is not None and earlier.head.decided:
            if interrupted:
                better = {identity(m) for m in earlier.body.measurements if from_whole_tuning(m)}
                measurements = [marked_unfinished(m) for m in measurements if identity(m) not in better]
            else:
                measurements = [m for m in measurements if m.failure is not None]
                if any(m.values_from != "call" for m in measurements):
                    return ()
            head, provenance = replace(earlier.head, generation=generation), dict(earlier.body.provenance)
        else:
            try:
                head, provenance = self._head(call, None, generation), _when_and_where(self._now_s())
            except CodecError:
                return ()  # it could not be told from another candidate later
            provenance |= {"complete": False, "interrupted": True} if interrupted else {}
        if measurements and self.writes:
            self._write(head, measurements, provenance, earlier)
        return measurements if interrupted and self.writes else ()

    def _head(self, call: Call[C], config: Json, generation: int) -> Head:
        return Head(
            problem=call.problem,
            config=config,
            checksum=call.kernel.checksum(call.inv),
            origin="tuned",
            environment=call.kernel.environment(call.inv),
            generation=generation,
            extra={CHECKED_BY: digest} if (digest := call.kernel.check_checksum) else {},
        )

    def _write(
        self, head: Head, new: Iterable[Measurement], provenance: dict[str, Json], earlier: Record | None
    ) -> bool:
        before = Body() if earlier is None else earlier.body
        # An unwritable configuration is named by its place in a list, which may change.
        written = [m for m in new if not (isinstance(m.config, dict) and m.config.get(TAG) == "unwritable")]
        fresh = {identity(m) for m in written}
        known = sorted((m for m in before.measurements if identity(m) not in fresh), key=lambda m: m.when, reverse=True)
        kept = (*written, *known[: max(0, KEPT_MEASUREMENTS - len(written))])
        body = Body(measurements=kept, provenance=provenance, extra=before.extra)
        extra = {} if earlier is None else {n: value for n, value in earlier.head.extra.items() if n not in OF_CHECKS}
        record = Record(replace(head, extra={**extra, **head.extra}), body)
        self._listed.pop(head.problem.op, None)
        return self.persistent.write(record.fitted())


def _says_less(tuned: Tuned[Any], earlier: Body, *, again: bool) -> bool:
    """Whether a tuning was disturbed or cut short and the earlier one was not, or was found in calls and that raced."""
    live, winner = _is_live(tuned), winner_of(earlier)
    now = next((m for m in tuned.measurements if m.fingerprint == winner), None)
    # A verification may have shown that the choice is beaten, or fails now, before its budget ended.
    cut = not (tuned.complete or live or winner is None) and (now is None or (again and now.failure is None))
    return (live and not is_live(earlier)) or ((cut or not tuned.disturbances.quiet) and is_finished(earlier))


def _is_live(tuned: Tuned[Any]) -> bool:
    return tuned.verdict is not None and LIVE in tuned.verdict.winner.measurement.policy


def _when_and_where(now_s: float) -> dict[str, Json]:
    return {"when": now_s, "host": host_name()}


def _provenance(tuned: Tuned[Any], now_s: float) -> dict[str, Json]:
    facts = _when_and_where(now_s)
    facts |= {"seconds": tuned.seconds, "ran": tuned.ran, "complete": tuned.complete, "waiting_s": tuned.waiting_s}
    facts |= {"values_from": tuned.values_from, **({"at": dict(tuned.at)} if tuned.at else {})}
    # Encoded configurations have their names sorted. The last one is the space's own; the heuristic is the first.
    last = next(reversed(list(tuned.configs.values())), None)
    names = list(map(str, last)) if isinstance(last, Config) else []
    facts |= {"names": [*names]} if names != sorted(names) else {}
    if (roofline := tuned.roofline) is not None:
        amounts = {"flops": roofline.flops, "bytes": roofline.bytes_moved, **roofline.peak._asdict()}
        known = {name: amount for name, amount in amounts.items() if amount is not None and math.isfinite(amount)}
        facts["roofline"] = {name: float(amount) for name, amount in known.items()}  # it may be a number of numpy's
    facts |= {"live": True} if _is_live(tuned) else {}
    if tuned.problem is not None and tuned.problem.device in NOTED:
        facts["device"] = noted_properties(tuned.problem.device)
    if tuned.left_out:
        facts["not_tried"] = [encode(tuned.configs[name]) for name in tuned.left_out]
        facts["why_not_tried"] = next(iter(tuned.left_out.values()))
    if not tuned.disturbances.quiet:
        facts["disturbances"] = list(tuned.disturbances.reasons)
    return facts | _decision(tuned)


def _decision(tuned: Tuned[Any]) -> dict[str, Json]:
    """Return all that `verdict_of` needs beside the measurements, and its numbers."""
    facts: dict[str, Json] = {"found": _found(tuned)}
    facts |= {} if tuned.default is None else {"default": tuned.default}
    if (verdict := tuned.verdict) is None:
        return facts
    best = verdict.winner.measurement
    facts |= {"winner": best.fingerprint, "rule": verdict.rule, "objective": verdict.objective}
    facts |= {"code": best.code, CHECKED_BY: best.extra.get(CHECKED_BY, "")}
    if verdict.objective not in OBJECTIVES:  # the author's own function: others cannot call it
        finite = (r for r in verdict.ranking if math.isfinite(r.value_s))
        facts |= {"band": verdict.band, "values": {r.measurement.fingerprint: r.value_s for r in finite}}
    return facts


def _found(tuned: Tuned[Any], earlier: Iterable[Measurement] = ()) -> dict[str, Json]:
    """Return a tuning in a few numbers, so that a list of many need not read their measurements.

    Of `earlier` measurements those count that were taken under the same conditions, and not again.
    """
    fresh = {identity(m) for m in tuned.measurements}
    conditions = {each[1:] for each in fresh}
    before = [m for m in earlier if from_whole_tuning(m) and identity(m)[1:] in conditions and identity(m) not in fresh]
    measured = [*tuned.measurements, *before]
    kinds = Counter(m.failure.kind for m in measured if m.failure is not None)
    failed: dict[str, Json] = {str(kind): count for kind, count in kinds.items()}
    compile_s = math.fsum(m.compile_s for m in measured if m.compile_s)
    found: dict[str, Json] = {"tried": len(measured), "failed": failed, "compile_s": compile_s}
    if tuned.verdict is not None:
        values = {ranked.measurement.fingerprint: ranked.value_s for ranked in tuned.verdict.ranking}
        found["best_s"] = tuned.verdict.winner.value_s
        if (default_s := values.get(tuned.default or "")) is not None:
            found["default_s"] = default_s
    return found


def record_of_tuning(tuned: Tuned[Any]) -> Record:
    """Return the result of a tuning as a record, to be shown; it is not for a store."""
    best = None if tuned.verdict is None else tuned.verdict.winner.measurement
    try:
        config = encode(tuned.config) if best is None else best.config
    except CodecError:
        config = repr(tuned.config)
    head = Head(
        problem=tuned.problem or Problem("", "several calls", ""),
        config=config,
        checksum="",
        origin="tuned",
        environment="" if best is None else best.environment,
    )
    return Record(head, Body(measurements=tuned.measurements, provenance=_provenance(tuned, tuned.when)))
