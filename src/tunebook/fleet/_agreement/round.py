"""One process's part in settling one problem: vote, then tune for the others or wait for them."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from tunebook._base.config_codec import encode, fingerprint_of
from tunebook._base.errors import CodecError, StoreError, warn_once
from tunebook._selection.single_flight import LEASE_S
from tunebook._selection.tiers import Found, Request, Skipped
from tunebook._space.space import Space
from tunebook._tuning.job import Budget
from tunebook.fleet._agreement.ballot import LogEntry, Share, Vote, contenders, count
from tunebook.fleet._agreement.board import poll

if TYPE_CHECKING:
    from collections.abc import Callable

    from tunebook._base.vocabulary import Json, Measurement
    from tunebook._selection.selector import LocalTiers
    from tunebook.fleet._agreement.log import Log

C = TypeVar("C")

# Of the deadline, what the one who tunes may use: the rest is for the others to hear of it.
_TUNING: Final = 0.8


class Terms(NamedTuple):
    """How ranks agree: who measures, and how long they wait for votes, for a decision, and for one that seems dead."""

    share: Share = "leader"
    vote_s: float = 1.0
    deadline_s: float = 300.0
    lease_s: float = LEASE_S


class Position(NamedTuple, Generic[C]):
    """What this process has to say about a problem: an answer that it knows, whether it could tune, why not."""

    vote: Vote
    answer: Found[C] | None
    why: str


class AgreementRound(Generic[C]):
    """This process's part in settling one problem."""

    def __init__(
        self,
        *,
        rank: int,
        by: str,
        terms: Terms,
        log: Log,
        request: Request[C],
        alone: LocalTiers[C],
        stand: Position[C],
        voters: Callable[[frozenset[int] | None], frozenset[int]],
        clock_s: Callable[[], float],
    ) -> None:
        self.rank, self.by, self.terms, self.log = rank, by, terms, log
        self.request, self.alone, self.stand = request, alone, stand
        self.voters, self.clock_s = voters, clock_s
        self.own = stand.answer
        self.deadline_s = clock_s() + terms.deadline_s

    def settle(self) -> LogEntry:
        """Vote, follow the log to its end, and return what stands there."""
        opening = LogEntry("open", self.rank, self.by)
        entry, turn = self.log.write(0, opening), 0
        if entry != opening:
            self.log.vote(self.stand.vote)
        while not entry.is_last:
            entry, turn = self._after(entry, turn), turn + 1
        return entry

    def _after(self, entry: LogEntry, turn: int) -> LogEntry:
        """Return what stands behind an entry, having done this process's part in it."""
        mine = self._my_part(entry, turn)
        return self._wait(entry, turn) if mine is None else self.log.write(turn + 1, mine)

    def _my_part(self, entry: LogEntry, turn: int) -> LogEntry | None:
        """Return what this process has to write behind an entry; None if that is for others to do."""
        if entry.kind == "open":
            return self._count(turn) if entry.by == self.by else None
        if self.own is not None:  # it came too late for the vote, but before the tuning's end
            return self._decided(self.own, "cache")
        if entry.kind == "left":
            return LogEntry("lead", self.rank, self.by) if self.stand.vote.able else None
        concerned = self.rank == entry.rank or self.rank in entry.split
        # A rank that was started again, or whose call failed, meets entries that were followed long ago.
        if not concerned or not self.stand.vote.able or self.log.read(turn + 1, 0.0) is not None:
            return None
        if entry.rank == self.rank:
            return self._lead(entry, turn)
        self.log.share(self.request.problem, self._measure(entry))
        return None

    # ----------------------------------------------------------------------------------------------------- the vote

    def _count(self, turn: int) -> LogEntry:
        """Wait for the votes that can be expected, and return what follows from them."""
        op = self.request.problem.op
        expected = self.voters(None)

        def all_in() -> dict[int, Vote] | None:
            votes = self.log.votes()
            return votes if expected <= votes.keys() | {self.rank} else None

        with self.log.pulse(turn, self.terms.lease_s):
            votes = poll(all_in, self.terms.vote_s, self.clock_s) or self.log.votes()
        votes[self.rank] = self.stand.vote
        self.voters(frozenset(votes))
        parts = self.alone.autotune.parts_of(self.request) if self.terms.share == "split" else 1
        counted = count(votes, by=self.by, parts=parts)
        if isinstance(counted, LogEntry):
            return counted
        if counted.odd:
            warn_once("agreement", op, f"{op}: {counted.why}, so all take the heuristic")
        return self._guess(self.stand.why or counted.why)

    # --------------------------------------------------------------------------------------------------- the tuning

    def _lead(self, entry: LogEntry, turn: int) -> LogEntry:
        """Tune for all."""
        with ExitStack() as unless_found, self.log.pulse(turn, self.terms.lease_s):
            unless_found.callback(self._leave, turn)
            beside = self._gather(entry) if entry.split else ()
            answer = self.alone.autotune.ask(self.request, self._budget(), beside)
            unless_found.pop_all()
        if isinstance(answer, Skipped):
            return self._guess(answer.reason)
        self.own = answer
        record = self.alone.autotune.written(self.request)
        if record is not None:
            with suppress(CodecError):  # a book that cannot be read is warned about where it is read
                self.log.hand_out(record)
        return self._decided(answer, "tuned")

    def _leave(self, turn: int) -> None:
        """Let another lead, at an error that is on its way to this process's caller."""
        with suppress(StoreError):
            self.log.write(turn + 1, LogEntry("left", self.rank, self.by))

    def _budget(self) -> Budget:
        return Budget(seconds=max(_TUNING * (self.deadline_s - self.clock_s()), 0.001))

    def _measure(self, entry: LogEntry) -> tuple[Measurement, ...]:
        part, parts = entry.split.index(self.rank), len(entry.split)
        return self.alone.autotune.measure_part(self.request, part, parts, self._budget())

    def _gather(self, entry: LogEntry) -> tuple[Measurement, ...]:
        """Measure this process's part, and return it with those that the others have measured meanwhile."""
        began_s = self.clock_s()
        parts = {self.rank: self._measure(entry)}
        took_s = self.clock_s() - began_s

        def all_in() -> dict[int, tuple[Measurement, ...]] | None:
            parts.update(self.log.shared())
            return parts if parts.keys() >= set(entry.split) else None

        # Parts are about equal. What does not come in twice the time of this one is measured here, in the race.
        patience_s = min(self.terms.vote_s + 2 * took_s, (self.deadline_s - self.clock_s()) / 2)
        poll(all_in, patience_s, self.clock_s)
        return contenders(parts.values())

    # -------------------------------------------------------------------------------------------------- the waiting

    def _wait(self, entry: LogEntry, turn: int) -> LogEntry:
        """Wait for what another process is to write behind an entry, but not for one that is dead, nor for ever."""
        watch = self.log.watch(turn, self.clock_s)
        lease_s = self.terms.lease_s
        while True:
            left_s = self.deadline_s - self.clock_s()
            if left_s <= 0:
                late = f"rank {entry.rank} did not tune it in {self.terms.deadline_s:g} s"
                return self._given_up(turn, late)
            found = self.log.read(turn + 1, min(lease_s / 2, left_s))
            if found is not None:
                return found
            silent_s = watch.silent_s()
            if silent_s >= lease_s and (going_on := self._go_on()) is not None:
                return self.log.write(turn + 1, going_on)
            if silent_s >= 2 * lease_s:  # those that can do better were given a lease more
                return self._given_up(turn, f"rank {entry.rank} shows no life, and no other rank that came may tune")

    def _go_on(self) -> LogEntry | None:
        """Return what this process does in place of one that is dead; None if it cannot do anything."""
        if self.own is not None:
            return self._decided(self.own, "cache")
        return LogEntry("lead", self.rank, self.by) if self.stand.vote.able else None

    def _given_up(self, turn: int, why: str) -> LogEntry:
        """Let all take the heuristic, unless there is something better by now."""
        mine = self._guess(why)
        stands = self.log.write(turn + 1, mine)
        if stands == mine:  # one rank says so for all
            op = self.request.problem.op
            warn_once("agreement", op, f"{op}: {why}, so all ranks take the heuristic")
        return stands

    # ------------------------------------------------------------------------------------------------------- entries

    def _decided(self, answer: Found[C], origin: Any) -> LogEntry:
        return LogEntry("decided", self.rank, self.by, encode(answer.config), origin)

    def _guess(self, why: str) -> LogEntry:
        """Return what all use where nobody knows better: the heuristic of who says so, or its first candidate."""
        found = guess(self.request, self.alone)
        if found is None:
            return LogEntry("nothing", self.rank, self.by, why=why)
        return LogEntry("decided", self.rank, self.by, encode(found.config), "heuristics", why)


def guess(request: Request[C], alone: LocalTiers[C]) -> Found[C] | None:
    """Return what this process would use without tuning."""
    answers = (source.ask(request) for source in alone.guesses)
    return next((answer for answer in answers if isinstance(answer, Found)), None)


def live(request: Request[C], encoded: Json) -> C | None:
    """Return the candidate here, or the heuristic, that is written so."""
    wanted = fingerprint_of(encoded)
    heuristic: Any = request.kernel.heuristic(request.inv)
    candidates: Any = request.kernel.candidates(request.inv)
    if isinstance(candidates, Space):  # of any size, so it is not listed
        candidates = (member,) if (member := candidates.decoded(encoded)) is not None else ()
    among = (*candidates, *(() if heuristic is None else (heuristic,)))
    return next((config for config in among if fingerprint_of(encode(config)) == wanted), None)
