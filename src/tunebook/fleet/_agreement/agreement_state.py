"""One decision per problem for all ranks of a job, as one of them holds it."""

from __future__ import annotations

import itertools
import math
import os
import time
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from tunebook._base.config_codec import encode, readable
from tunebook._base.errors import CodecError, StoreError, warn_once
from tunebook._code.checksum import candidates_checksum
from tunebook._selection.recording import recordings
from tunebook._selection.single_flight import Flights
from tunebook._selection.tiers import Found, Request, Skipped, key_of
from tunebook.fleet._agreement.ballot import LogEntry, Vote
from tunebook.fleet._agreement.board import Board, Patient
from tunebook.fleet._agreement.log import Log
from tunebook.fleet._agreement.round import AgreementRound, Position, Terms, guess, live
from tunebook.stores import problem_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from tunebook._base.vocabulary import Json, Problem
    from tunebook._selection.selector import LocalTiers

C = TypeVar("C")

# A board that has failed is asked again after this; until then calls do not wait for it.
_LOST_S: Final = 30.0
# The problems that this thread, or one that works for it, is settling.
_settling: ContextVar[tuple[Problem, ...]] = ContextVar("tunebook_settling", default=())


class Settled(NamedTuple):
    """What is used for a problem from now on, and how it is written."""

    answer: Found[Any]
    config: Json


class JobAgreement:
    """The agreement of the processes on one board; see `agree`."""

    def __init__(self, board: Board, terms: Terms = Terms(), clock_s: Callable[[], float] = time.monotonic) -> None:  # noqa: B008 - immutable
        self.board: Final = Patient(board)
        self.terms: Final = terms
        self.settled: Final[dict[tuple[Problem, str], Settled]] = {}
        self._by: Final = os.urandom(8).hex()
        self._calls: Final = itertools.count()
        self._clock_s: Final = clock_s
        self._flights: Final[Flights[Found[Any] | Skipped]] = Flights()
        # Who votes on an operation. Where only some ranks ever call it (a pipeline's stages), the others are waited for
        # at its first problem, and not at each of hundreds.
        self._voters: Final[dict[str, frozenset[int]]] = {}
        self._lost_until_s = -math.inf

    def known(self, request: Request[Any]) -> Found[Any] | Skipped:
        settled = self.settled.get(key_of(request))
        return Skipped("nothing is agreed on yet") if settled is None else settled.answer

    def ask(self, request: Request[C], alone: LocalTiers[C]) -> Found[C] | Skipped:
        settled = self.settled.get(key_of(request))
        if settled is not None:
            return settled.answer
        if request.problem in _settling.get():
            # A candidate that calls the function it is a candidate of: the vote would wait for itself.
            return Skipped("it is being agreed on", transient=True)
        with self._flights.turn(request.problem) as turn:
            if turn.leads:
                settling = _settling.set((*_settling.get(), request.problem))
                try:
                    turn.result = self._ask_the_others(request, alone)
                finally:
                    _settling.reset(settling)
        return turn.result or Skipped("the agreement was interrupted", transient=True)

    def _ask_the_others(self, request: Request[C], alone: LocalTiers[C]) -> Found[C] | Skipped:
        if self._clock_s() < self._lost_until_s:
            return Skipped(f"{self.board.where} does not answer", transient=True)
        log, op = Log(self.board, problem_id(request.problem)), request.problem.op
        try:
            if recordings():  # what is only written down, perhaps from shapes alone and by one rank, settles nothing
                return self._as_it_stands(log, request, alone)
            return self._settle(log, request, alone)
        except CodecError as error:
            warn_once("agreement", op, f"{op}: every rank guesses, for what cannot be written is not voted on: {error}")
            return Skipped(f"what cannot be written cannot be agreed on: {error}")
        except StoreError as error:
            self._lost_until_s = self._clock_s() + _LOST_S
            warn_once(
                "agreement",
                self.board.where,
                f"{error} Without it ranks cannot agree: this one takes its heuristic, as the others do that cannot "
                "reach it; fleet.assert_agreement() tells whether they differ",
            )
            return Skipped(str(error), transient=True)

    def _settle(self, log: Log, request: Request[C], alone: LocalTiers[C]) -> Found[C] | Skipped:
        turn = AgreementRound(
            rank=self.board.rank,
            # One for each time: a call that is made again after an error must not take its old entries for new ones.
            by=f"{self._by}-{next(self._calls)}",
            terms=self.terms,
            log=log,
            request=request,
            alone=alone,
            stand=self._stand(request, alone),
            voters=partial(self.voters_of, request.problem.op),
            clock_s=self._clock_s,
        )
        entry = turn.settle()
        answer = self._take(entry, request, alone, turn.own)
        if entry.origin == "tuned" and turn.own is None and alone.autotune.writes:
            # The next job is not to tune it again, wherever it runs. If it has to, nothing else is lost.
            with suppress(StoreError, CodecError):
                if (record := log.handed_out()) is not None:
                    alone.autotune.write(request, record)
        return answer

    def _as_it_stands(self, log: Log, request: Request[C], alone: LocalTiers[C]) -> Found[C] | Skipped:
        turn = 0
        while (entry := log.read(turn, 0.0)) is not None:
            if entry.is_last:
                return self._take(entry, request, alone, None)
            turn += 1
        return next((f for s in alone.known if isinstance(f := s.ask(request), Found)), Skipped("a recording is on"))

    def _stand(self, request: Request[C], alone: LocalTiers[C]) -> Position[C]:
        """Ask the tiers that need no tuning, and whether it could be done."""
        rank, candidates = self.board.rank, candidates_checksum(request.kernel.candidates(request.inv))
        tiers: list[Callable[[Request[C]], Found[C] | Skipped | None]] = [source.ask for source in alone.known]
        tiers.append(partial(_at_once, alone))
        early: Found[C] | Skipped | None = None
        for ask in tiers:
            early = ask(request)
            # What is no candidate (put into memory by hand, say) would be none for the others either.
            if isinstance(early, Found) and live(request, encoded := encode(early.config)) is not None:
                return Position(Vote(rank, encoded, able=False, candidates=candidates), early, "")
        why = early.reason if isinstance(early, Skipped) else ""
        return Position(Vote(rank, None, able=early is None, candidates=candidates), None, why)

    def voters_of(self, op: str, votes: frozenset[int] | None) -> frozenset[int]:
        """Return whose votes are waited for; after a vote, that is who voted."""
        if votes is not None:
            self._voters[op] = votes
        return self._voters.get(op) or frozenset(range(self.board.world))

    def _take(
        self, entry: LogEntry, request: Request[C], alone: LocalTiers[C], own: Found[C] | None
    ) -> Found[C] | Skipped:
        """Use what stands from now on."""
        if entry.kind == "nothing":
            return Skipped(f"agreed that there is nothing to use: {entry.why}")
        found = _answer(entry, request, own)
        if found is None:
            op = request.problem.op
            warn_once(
                "agreement", op, f"{op}: rank {entry.rank} chose {readable(entry.config)}, which is no candidate here"
            )
            found = guess(request, alone)
            if found is None:
                return Skipped("what was agreed on is no candidate here")
        # Asked again, it is no news.
        again = found._replace(event="cache_hit", level="memory", remember=False) if found.remember else found
        self.settled[key_of(request)] = Settled(again, encode(found.config))
        return found


def _at_once(alone: LocalTiers[C], request: Request[C]) -> Found[C] | Skipped | None:
    """Return what the tier that tunes says without delay; None if it would tune now."""
    if request.policy.cache_miss_fallback == "incremental":
        return Skipped("policy.cache_miss_fallback is 'incremental', by which ranks would run different candidates")
    return alone.autotune.at_once(request)


def _answer(entry: LogEntry, request: Request[C], own: Found[C] | None) -> Found[C] | None:
    """Return what stands as an answer here; None if it is no candidate."""
    if own is not None and encode(own.config) == entry.config:
        return own
    config = live(request, entry.config)
    if config is None:
        return None
    if entry.origin == "heuristics":
        return Found(config=config, event="heuristics")
    return Found(config=config, event="cache_hit", level="agreement", remember=True)
