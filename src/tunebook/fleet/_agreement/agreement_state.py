"""The decisions of a job in one rank, and the entry point of the selector.

`JobAgreement.ask` answers a decided problem from memory. A new problem starts an `AgreementRound` with the other ranks,
one per problem however many threads ask. If the board fails, this rank uses its heuristic for a while.
"""

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
from tunebook.fleet._agreement.board import Board, RetryingBoard
from tunebook.fleet._agreement.log import Log, LogEntry, Vote
from tunebook.fleet._agreement.round import AgreementOptions, AgreementRound, Position, find_candidate, first_found
from tunebook.stores import problem_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from tunebook._base.vocabulary import Json, Problem
    from tunebook._selection.selector import LocalTiers

C = TypeVar("C")

# A board that has failed is asked again after this; until then calls do not wait for it.
_LOST_S: Final = 30.0
# The problems that this thread, or a thread that works for it, is deciding.
_in_progress: ContextVar[tuple[Problem, ...]] = ContextVar("tunebook_agreeing", default=())


class AgreedDecision(NamedTuple):
    """The answer for a problem from now on, and its encoded configuration."""

    answer: Found[Any]
    config: Json


class JobAgreement:
    """The agreement of the ranks on one board; see `agree`."""

    def __init__(self, board: Board, options: AgreementOptions) -> None:
        self.board: Final = RetryingBoard(board)
        self.options: Final = options
        self.decisions: Final[dict[tuple[Problem, str], AgreedDecision]] = {}
        self.voters: Final[dict[str, frozenset[int]]] = {}
        self._by: Final = os.urandom(8).hex()
        self._calls: Final = itertools.count()
        self._flights: Final[Flights[Found[Any] | Skipped]] = Flights()
        self._lost_until_s = -math.inf

    def known(self, request: Request[Any]) -> Found[Any] | Skipped:
        decision = self.decisions.get(key_of(request))
        return Skipped("nothing is agreed on yet") if decision is None else decision.answer

    def ask(self, request: Request[C], alone: LocalTiers[C]) -> Found[C] | Skipped:
        decision = self.decisions.get(key_of(request))
        if decision is not None:
            return decision.answer
        if request.problem in _in_progress.get():
            # A candidate that calls the function it is a candidate of: the vote would wait for itself.
            return Skipped("it is being agreed on", transient=True)
        with self._flights.turn(request.problem) as turn:
            if turn.leads:
                turn.result = self._ask_ranks(request, alone)
        return turn.result or Skipped("the agreement was interrupted", transient=True)

    def _ask_ranks(self, request: Request[C], alone: LocalTiers[C]) -> Found[C] | Skipped:
        if time.monotonic() < self._lost_until_s:
            return Skipped(f"{self.board.where} does not answer", transient=True)
        log, op = Log(self.board, problem_id(request.problem)), request.problem.op
        token = _in_progress.set((*_in_progress.get(), request.problem))
        try:
            # A recorded call decides nothing: it may know shapes alone, and only one rank may record.
            return self._read(log, request, alone) if recordings() else self._decide(log, request, alone)
        except CodecError as error:
            said = f"the configuration cannot be serialised, so ranks cannot agree on it: {error}"
            warn_once("agreement", op, f"{op}: {said}; each rank uses its heuristic")
            return Skipped(said)
        except StoreError as error:
            self._lost_until_s = time.monotonic() + _LOST_S
            warn_once(
                "agreement",
                self.board.where,
                f"{error} Without it ranks cannot agree: every rank that cannot reach it takes its heuristic; "
                "fleet.assert_agreement() tells whether ranks differ",
            )
            return Skipped(str(error), transient=True)
        finally:
            _in_progress.reset(token)

    def _decide(self, log: Log, request: Request[C], alone: LocalTiers[C]) -> Found[C] | Skipped:
        # One name per call: a call that is repeated after an error must not take its old entries for new ones.
        by, position = f"{self._by}-{next(self._calls)}", self._position(request, alone)
        round_ = AgreementRound(log, request, alone, position, by=by, options=self.options, voters=self.voters)
        entry = round_.decide()
        answer = self._accept(entry, request, alone, round_.own)
        if entry.origin == "tuned" and round_.own is None and alone.autotune.writes:
            # With the leader's record in this book, the next job need not tune again, wherever it runs.
            with suppress(StoreError, CodecError):
                if (record := log.published_record()) is not None:
                    alone.autotune.write(request, record)
        return answer

    def _read(self, log: Log, request: Request[C], alone: LocalTiers[C]) -> Found[C] | Skipped:
        """Return the decision in the log without taking part; else the answer that this rank knows."""
        for turn in itertools.count():
            entry = log.read(turn, 0.0)
            if entry is None:
                break
            if entry.is_last:
                return self._accept(entry, request, alone, None)
        return first_found(alone.known, request) or Skipped("a recording is on")

    def _position(self, request: Request[C], alone: LocalTiers[C]) -> Position[C]:
        """Ask the tiers that need no tuning, and whether this rank could tune."""
        rank, candidates = self.board.rank, candidates_checksum(request.kernel.candidates(request.inv))
        asks: list[Callable[[Request[C]], Found[C] | Skipped | None]] = [tier.ask for tier in alone.known]
        asks.append(partial(_without_tuning, alone))
        found: Found[C] | Skipped | None = None
        for ask in asks:
            found = ask(request)
            # A configuration that is not a candidate (put into memory by hand, say) is useless to the other ranks.
            if isinstance(found, Found) and find_candidate(request, encoded := encode(found.config)) is not None:
                return Position(Vote(rank, encoded, able=False, candidates=candidates), found, "")
        why = found.reason if isinstance(found, Skipped) else ""
        return Position(Vote(rank, None, able=found is None, candidates=candidates), None, why)

    def _accept(
        self, entry: LogEntry, request: Request[C], alone: LocalTiers[C], own: Found[C] | None
    ) -> Found[C] | Skipped:
        """Use the last entry of a log from now on."""
        if entry.kind == "nothing":
            return Skipped(f"agreed that there is nothing to use: {entry.why}")
        found = _local_answer(entry, request, own)
        if found is None:
            op, config = request.problem.op, readable(entry.config)
            warn_once("agreement", op, f"{op}: rank {entry.rank} chose {config}, which is not a candidate in this rank")
            found = first_found(alone.guesses, request)
            if found is None:
                return Skipped("the agreed configuration is not a candidate in this rank")
        # Listeners hear of the decision once: asked again, it is a hit in memory.
        again = found._replace(event="cache_hit", level="memory", remember=False) if found.remember else found
        self.decisions[key_of(request)] = AgreedDecision(again, encode(found.config))
        return found


def _without_tuning(alone: LocalTiers[C], request: Request[C]) -> Found[C] | Skipped | None:
    """Return the immediate answer of the tier that tunes; None if it would tune now."""
    if request.policy.cache_miss_fallback == "incremental":
        return Skipped("policy.cache_miss_fallback is 'incremental', by which ranks would run different candidates")
    return alone.autotune.at_once(request)


def _local_answer(entry: LogEntry, request: Request[C], own: Found[C] | None) -> Found[C] | None:
    """Return the decision as this rank's answer; None if it is not a candidate here."""
    if own is not None and encode(own.config) == entry.config:
        return own
    config = find_candidate(request, entry.config)
    if config is None:
        return None
    if entry.origin == "heuristics":
        return Found(config=config, event="heuristics")
    return Found(config=config, event="cache_hit", level="agreement", remember=True)
