"""One rank's part in deciding one problem: vote, then tune for the others or wait for them.

The first rank to arrive opens the log, collects votes for `vote_s`, and writes the result. A known configuration ends
the log; else the leader tunes, alone or after each rank of a split has measured a part. The others wait: when a rank
shows no heartbeat for a lease, another takes its place. After the deadline, one rank ends the log with its heuristic.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from tunebook._base.config_codec import encode, fingerprint_of
from tunebook._base.errors import CodecError, StoreError, warn_once
from tunebook._selection.single_flight import LEASE_S
from tunebook._selection.tiers import Found, Request, Skipped
from tunebook._space.space import Space
from tunebook._tuning.job import Budget
from tunebook.fleet._agreement.board import poll
from tunebook.fleet._agreement.log import LogEntry, Origin, Share, Vote, contenders, count_votes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tunebook._base.vocabulary import Json, Measurement
    from tunebook._selection.selector import LocalTiers
    from tunebook._selection.tiers import Tier
    from tunebook.fleet._agreement.log import Log

C = TypeVar("C")

# The leader's budget as a part of the deadline: in the rest, the other ranks receive the decision.
_TUNING: Final = 0.8


class AgreementOptions(NamedTuple):
    """Which ranks measure, and how long ranks wait for votes, for a decision, and for a rank without a heartbeat."""

    share: Share = "leader"
    vote_s: float = 1.0
    deadline_s: float = 300.0
    lease_s: float = LEASE_S


class Position(NamedTuple, Generic[C]):
    """This rank's vote, the answer that it knows, and the reason if it has no answer and may not tune."""

    vote: Vote
    own: Found[C] | None
    why: str


class AgreementRound(Generic[C]):
    """This rank's part in deciding one problem. `voters` are the ranks that voted last time, by operation."""

    def __init__(
        self,
        log: Log,
        request: Request[C],
        alone: LocalTiers[C],
        position: Position[C],
        *,
        by: str,
        options: AgreementOptions,
        voters: dict[str, frozenset[int]],
    ) -> None:
        self.log, self.request, self.alone = log, request, alone
        self.vote, self.own, self.why = position
        self.by, self.options, self.voters = by, options, voters
        self.board = log.board
        self.deadline_s = time.monotonic() + options.deadline_s

    def decide(self) -> LogEntry:
        """Vote, follow the log to its end, and return its last entry."""
        opening = self._entry("open")
        entry, turn = self.log.write(0, opening), 0
        if entry != opening:
            self.log.vote(self.vote)
        while not entry.is_last:
            mine = self._next_entry(entry, turn)
            entry = self._wait(entry, turn) if mine is None else self.log.write(turn + 1, mine)
            turn += 1
        return entry

    def _next_entry(self, entry: LogEntry, turn: int) -> LogEntry | None:
        """Do this rank's work for an entry, and return the entry that follows; None if another rank writes it."""
        if entry.kind == "open":
            return self._count(turn) if entry.by == self.by else None
        if self.own is not None:  # it came too late for the vote, but before the tuning's end
            return self._decision(self.own, "cache")
        if entry.kind == "left":
            return self._take_over()
        concerned = self.board.rank == entry.rank or self.board.rank in entry.split
        # A rank that was started again, or whose call failed, meets entries that were followed long ago.
        if not concerned or not self.vote.able or self.log.read(turn + 1, 0.0) is not None:
            return None
        if entry.rank == self.board.rank:
            return self._lead(entry, turn)
        self.log.post_part(self.request.problem, self._measure(entry))
        return None

    def _count(self, turn: int) -> LogEntry:
        """Wait for the expected votes, and return the entry that follows from them."""
        op = self.request.problem.op
        # Where only some ranks ever call a function (a pipeline's stages), the others are waited for at its first
        # problem, and not at each of hundreds.
        expected = self.voters.get(op) or frozenset(range(self.board.world))

        def look() -> dict[int, Vote] | None:
            votes = self.log.votes()
            return votes if expected <= votes.keys() | {self.board.rank} else None

        with self.log.heartbeat(turn, self.options.lease_s):
            votes = poll(look, self.options.vote_s) or self.log.votes()
        votes[self.board.rank] = self.vote
        self.voters[op] = frozenset(votes)
        parts = self.alone.autotune.parts_of(self.request) if self.options.share == "split" else 1
        counted = count_votes(votes, by=self.by, parts=parts)
        if isinstance(counted, LogEntry):
            return counted
        if counted.warn:
            warn_once("agreement", op, f"{op}: {counted.why}, so all take the heuristic")
        return self._fallback(self.why or counted.why)

    def _lead(self, entry: LogEntry, turn: int) -> LogEntry:
        """Tune for all ranks. An error on its way to the caller lets another rank lead."""
        with ExitStack() as on_error, self.log.heartbeat(turn, self.options.lease_s):
            on_error.callback(self._leave, turn)
            shared = self._gather(entry) if entry.split else ()
            answer = self.alone.autotune.ask(self.request, self._budget(), shared)
            on_error.pop_all()
        if isinstance(answer, Skipped):
            return self._fallback(answer.reason)
        self.own = answer
        record = self.alone.autotune.written(self.request)
        if record is not None:
            with suppress(CodecError):  # a book that cannot be read is warned about where it is read
                self.log.publish_record(record)
        return self._decision(answer, "tuned")

    def _leave(self, turn: int) -> None:
        with suppress(StoreError):
            self.log.write(turn + 1, self._entry("left"))

    def _budget(self) -> Budget:
        return Budget(seconds=max(_TUNING * (self.deadline_s - time.monotonic()), 0.001))

    def _measure(self, entry: LogEntry) -> tuple[Measurement, ...]:
        part, parts = entry.split.index(self.board.rank), len(entry.split)
        return self.alone.autotune.measure_part(self.request, part, parts, self._budget())

    def _gather(self, entry: LogEntry) -> tuple[Measurement, ...]:
        """Measure this rank's part, and return it with the parts that the other ranks have measured meanwhile."""
        began_s = time.monotonic()
        parts = {self.board.rank: self._measure(entry)}
        took_s = time.monotonic() - began_s

        def look() -> dict[int, tuple[Measurement, ...]] | None:
            parts.update(self.log.parts())
            return parts if parts.keys() >= set(entry.split) else None

        # Parts are about equal. A part that does not come in twice the time of this one is measured here, in the race.
        patience_s = min(self.options.vote_s + 2 * took_s, (self.deadline_s - time.monotonic()) / 2)
        poll(look, patience_s)
        return contenders(parts.values())

    def _wait(self, entry: LogEntry, turn: int) -> LogEntry:
        """Wait for another rank's next entry; take over from a dead rank, and give up after the deadline."""
        silent_s = self.log.watch(turn)
        lease_s = self.options.lease_s
        while True:
            left_s = self.deadline_s - time.monotonic()
            if left_s <= 0:
                return self._give_up(turn, f"rank {entry.rank} did not tune it in {self.options.deadline_s:g} s")
            found = self.log.read(turn + 1, min(lease_s / 2, left_s))
            if found is not None:
                return found
            silence_s = silent_s()
            if silence_s >= lease_s and (mine := self._take_over()) is not None:
                return self.log.write(turn + 1, mine)
            if silence_s >= 2 * lease_s:  # ranks that can do better had one more lease
                return self._give_up(turn, f"rank {entry.rank} shows no life, and no other rank that came may tune")

    def _take_over(self) -> LogEntry | None:
        """Return this rank's entry in place of a dead or failed rank; None if it neither knows nor may tune."""
        if self.own is not None:
            return self._decision(self.own, "cache")
        return self._entry("lead") if self.vote.able else None

    def _give_up(self, turn: int, why: str) -> LogEntry:
        """End the log with the heuristic, unless another rank has written something better by now."""
        mine = self._fallback(why)
        written = self.log.write(turn + 1, mine)
        if written == mine:  # one rank warns for all
            op = self.request.problem.op
            warn_once("agreement", op, f"{op}: {why}, so all ranks take the heuristic")
        return written

    def _entry(self, kind: Any, config: Json = None, origin: Origin = "", why: str = "") -> LogEntry:
        return LogEntry(kind, self.board.rank, self.by, config, origin, why)

    def _decision(self, answer: Found[C], origin: Origin) -> LogEntry:
        return self._entry("decided", encode(answer.config), origin)

    def _fallback(self, why: str) -> LogEntry:
        """Return this rank's heuristic, or its first candidate, as the decision for all."""
        found = first_found(self.alone.guesses, self.request)
        if found is None:
            return self._entry("nothing", why=why)
        return self._entry("decided", encode(found.config), "heuristics", why)


def first_found(tiers: Iterable[Tier[C]], request: Request[C]) -> Found[C] | None:
    """Return the answer of the first tier that has one."""
    answers = (tier.ask(request) for tier in tiers)
    return next((answer for answer in answers if isinstance(answer, Found)), None)


def find_candidate(request: Request[C], encoded: Json) -> C | None:
    """Return this rank's candidate, or heuristic, with an encoded configuration."""
    wanted = fingerprint_of(encoded)
    heuristic: Any = request.kernel.heuristic(request.inv)
    candidates: Any = request.kernel.candidates(request.inv)
    if isinstance(candidates, Space):  # of any size, so it is not listed
        candidates = (member,) if (member := candidates.decoded(encoded)) is not None else ()
    among = (*candidates, *(() if heuristic is None else (heuristic,)))
    return next((config for config in among if fingerprint_of(encode(config)) == wanted), None)
