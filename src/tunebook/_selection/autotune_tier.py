"""The tier that tunes: once per problem among threads and processes. It writes the result into the book."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from tunebook._arrays.describe import obstacle_to, tuning_site
from tunebook._base.config_codec import fingerprint, fingerprint_of
from tunebook._base.errors import TuningFailed, as_text, text_of
from tunebook._memo.answer_memo import CAPACITY, MEMO, BoundedDict
from tunebook._selection.bucket_tuning import MeasuredCall, callers_own, check_for_caller, measured_call
from tunebook._selection.deferred_tuning import DeferredTuning
from tunebook._selection.foreign_tuner import ForeignTuner
from tunebook._selection.recording import recordings
from tunebook._selection.single_flight import Flights
from tunebook._selection.tiers import (
    DEFERRED,
    NO_CANDIDATES,
    BookLookup,
    Found,
    Parts,
    Request,
    Skipped,
    Tier,
    has_log,
    key_of,
    off,
    tell_steps,
)
from tunebook._selection.trusted_entries import Refused, Trusted, generation_of, reach_of
from tunebook._selection.tuning_watch import tell_of_failures, tell_of_interrupt, told_if_kept, watched
from tunebook._space.space import Space
from tunebook._tuning.job import Budget, History, Job, Step, Tuned, lifetime_s
from tunebook._tuning.job_run import RunningCandidate
from tunebook._tuning.plan import REFERENCE, by_author, is_without_data, job_for, outline, search_for, values_for
from tunebook._tuning.reverify import Verified, finalists, verify
from tunebook._tuning.tuner import Tuner, shown_steps
from tunebook.stores import problem_id

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Combine, Json, Measurement, Problem
    from tunebook._selection.single_flight import FlightTurn
    from tunebook._selection.tiers import OfflineEntry
    from tunebook._selection.trusted_entries import EntryGuard

C = TypeVar("C")

# Failures that other processes wrote are not read again at every call. Seen too late, they cost a tuning that ends
# before it runs anything.
_LOOK_AGAIN_S: Final = 60.0
# After so many tunings, the keys of a kernel show whether an argument makes a new one each time.
_LOOK_AT_KEYS: Final = 8
WOULD_TUNE: Final = "would tune now"  # in a preview


class AutotuneTier(Tier[C]):
    name = "autotune"
    needs_agreement = True
    runs_candidates = True

    def __init__(self, parts: Parts[C]) -> None:
        super().__init__(parts)
        self.deferred: Final = DeferredTuning(self, parts)
        self._decided: BoundedDict[tuple[Problem, str], C] = BoundedDict(CAPACITY)
        # By problem, code, and whether the arguments were made up: a failure on these does not concern a caller's.
        self._failed: BoundedDict[tuple[Problem, str, bool], tuple[Exception | None, float]] = BoundedDict(CAPACITY)
        self._clock_s = time.monotonic
        self._flights: Flights[Any] = Flights()

    # Asked for anew each time, because a selector's attributes can be set.
    @property
    def _book(self) -> EntryGuard[C]:
        return self._parts.book

    @property
    def _tuner(self) -> Tuner | ForeignTuner:
        given = self._parts.tuner or Tuner()
        return given if isinstance(given, Tuner) else ForeignTuner(given)

    # ------------------------------------------------------------------------------------------------- for a call

    def ask(
        self,
        request: Request[C],
        budget: Budget = Budget(),  # noqa: B008 - immutable
        beside: Sequence[Measurement] = (),
    ) -> Found[C] | Skipped:
        """Return the known answer, or tune now. `beside` was measured elsewhere: its fastest candidates race again."""
        if (known := self._put_off(request) or self._known(request)) is not None:
            return known
        look = BookLookup(self._book, request)
        try:
            with self._turn(request, look) as turn:
                if turn.leads:  # another thread may have tuned it between the first look and this turn
                    turn.result = self._known(request) or self._reason_to_stop(request, look.entry)
                if turn.leads and turn.result is None:
                    with shown_steps(request.problem.op, request.on_step) as step:
                        tuned = self._tune(request, look.entry, turn.generation, budget, step, beside).tuned
                    turn.result = Found(config=tuned.config, event="autotune_finish", remember=True)
                    self._decided[key_of(request)] = tuned.config  # before the next thread gets its turn
        except TuningFailed as error:
            answer: Found[C] | Skipped = Skipped(str(error), error)
            if not is_without_data(request, error):
                return self.remember_failure(request, error)
        else:
            answer = self._take(request, turn)
        # Another thread tuned the same problem on made-up arguments: its failure says nothing about a caller's.
        error_of = answer.error if isinstance(answer, Skipped) else None
        return self.ask(request, budget, beside) if is_without_data(request, error_of) else answer

    def preview(self, request: Request[C]) -> Found[C] | Skipped:
        answer = self.at_once(request, silent=True) or Skipped(WOULD_TUNE)
        return answer._replace(reason=answer.reason + self._doubt(request)) if isinstance(answer, Skipped) else answer

    def at_once(self, request: Request[C], *, silent: bool = False) -> Found[C] | Skipped | None:
        """Return the answer that the caller does not wait for; None if the call has to be tuned now."""
        return self._put_off(request, silent=silent) or self.known(request)

    def _put_off(self, request: Request[C], *, silent: bool = False) -> Found[C] | Skipped | None:
        policy = request.policy
        if policy.cache_miss_fallback in DEFERRED:
            return self.deferred.ask(request, silent=silent)
        if not _asks_model(request):
            return None
        from tunebook._selection.predictions import sure_prediction  # noqa: PLC0415 - loaded late: few policies ask

        sure = sure_prediction(self._book, request, reach_of(policy, request.mode), policy.regret_limit)
        return None if sure is None else Skipped("not needed: the prediction is within policy.regret_limit")

    def _doubt(self, request: Request[C]) -> str:
        """Return why the model of times does not answer a call, for a preview."""
        if not _asks_model(request, "normal", "frozen"):
            return ""
        from tunebook._selection.predictions import why_unsure  # noqa: PLC0415 - loaded late: few policies ask

        policy = request.policy
        return why_unsure(self._book, request, reach_of(policy, request.mode), policy.regret_limit)

    @classmethod
    def ask_offline(cls, entry: OfflineEntry) -> Found[Any] | Skipped:
        if entry.record is not None and entry.outdated:
            return Found(config=entry.record.head.config, event="cache_hit", level="verification", remember=True)
        return Skipped("would tune, if the program lets it")

    def adopt(self, request: Request[C], tuned: Tuned[C], *, again: bool = False) -> Found[C] | Skipped:
        """Use and write down the result of a tuning in the user's calls, unless another caller was faster.

        `again`: it replaces a result of the same calls, which has become slower.
        """
        look = BookLookup(self._book, request)
        with self._turn_on_demand(request, "adopt") if again else self._turn(request, look) as turn:
            if turn.leads:
                if again:
                    look()
                config = self._publish(request, tuned, look.entry, turn.generation).config
                turn.result = Found(config=config, event="autotune_finish", remember=True)
        return self._take(request, turn)

    def reverify(self, request: Request[C], config: C) -> str:
        return self.deferred.reverify(request, config)

    def known(self, request: Request[C]) -> Found[C] | Skipped | None:
        """Return the answer that needs no tuning: a remembered decision or failure, or why tuning is off."""
        return self._known(request) or self._reason_to_stop(request, self._book.find(request))

    def _known(self, request: Request[C]) -> Found[C] | Skipped | None:
        """Return the same, from memory alone: neither the book is read, nor are candidates listed."""
        if self._parts.forbid_again and key_of(request) in self._decided:
            return Found(config=self._decided[key_of(request)], event="cache_hit", level="memory", remember=True)
        reason = self._reason_not_to(request) if request.mode == "normal" else off(request).reason
        if reason is not None:
            return Skipped(reason)
        if (obstacle := obstacle_to(request.inv, unseen=request.kernel.table is not None)) is not None:
            # It may be gone when the same call comes again: a CUDA graph is captured once, and then not any more.
            return Skipped(f"off: {obstacle}", transient=True)
        return self.failed_before(request, made_up=values_for(request) != "call")

    def failed_before(self, request: Request[C], *, made_up: bool) -> Skipped | None:
        """Return the remembered failure of a call, on its own arguments or on made-up ones."""
        error, expires = self._failed.get((*key_of(request), made_up), (None, 0.0))
        return Skipped(f"failed before: {error}", error) if error is not None and expires > self._clock_s() else None

    def _reason_not_to(self, request: Request[C]) -> str | None:
        if self._parts.tuner is None:
            return "no tuner given"
        if not request.policy.allow_autotune:
            return "off: policy.allow_autotune is False"
        if request.policy.cache_miss_fallback in {"heuristics", "nearest"}:
            return f"off: policy.cache_miss_fallback is {request.policy.cache_miss_fallback!r}"
        # A recording suspends the memo, so that without one this asks nothing.
        return "off: a recording is on" if MEMO.suspended and recordings() else None

    def _reason_to_stop(self, request: Request[C], entry: Trusted[C] | Refused[C]) -> Skipped | None:
        """Return why a call cannot be tuned, by its candidates and by the failures in its entry; None if it can."""
        candidates = request.kernel.candidates(request.inv)
        if not any(True for _ in candidates):
            # Its heuristic alone would be a guess written as a choice.
            every = f": `where` left out all {candidates.size} combinations" if isinstance(candidates, Space) else ""
            return Skipped(f"{NO_CANDIDATES}{every}")
        key = (*key_of(request), values_for(request) != "call")
        if self._failed.get(key, (None, 0.0))[1] > self._clock_s():
            return None
        history = self._book.history(request, entry.record)
        error = None
        if isinstance(self._tuner, Tuner) and any(m.failure is not None for m in history.measurements):
            try:
                error = self._tuner.foregone(outline(request, request.policy, history))
            except TuningFailed:
                error = None  # there is nothing to tune, which the tuning says better
        self._failed[key] = (error, self._clock_s() + _LOOK_AGAIN_S)
        return None if error is None else Skipped(f"failed before: {error}", error)

    def _turn(
        self, request: Request[C], look: Callable[[], Found[C] | None]
    ) -> AbstractContextManager[FlightTurn[Found[C] | Skipped]]:
        """Give the turn to answer a call, once among threads and processes."""
        wait = request.policy.while_tuning != "heuristics" or not request.policy.allow_heuristics
        key, lease_id = key_of(request), problem_id(request.problem)
        may_guess = partial(_may_guess, request)
        return self._flights.turn(key, self._book.leases(), lease_id, look=look, wait=wait, may_guess=may_guess)

    def _take(self, request: Request[C], turn: FlightTurn[Found[C] | Skipped]) -> Found[C] | Skipped:
        """Return the result of a turn, as the answer to this caller."""
        answer = turn.result
        if not isinstance(answer, Found):
            why = "that waits for this call" if turn.ring else "policy.while_tuning is 'heuristics'"
            return answer or Skipped(f"another caller is tuning this problem, and {why}", transient=True)
        self._decided[key_of(request)] = answer.config
        if turn.leads and len(self._decided) % _LOOK_AT_KEYS == 0:
            from tunebook._keys.key_advice import warn_of_many_values  # noqa: PLC0415 - not for every cold call

            op = request.problem.op
            warn_of_many_values(op, [problem.call_key for problem, _ in self._decided if problem.op == op])
        if not turn.leads and answer.level is None:
            return answer._replace(event="cache_hit", level="memory")  # the result of another thread
        return answer

    def remember_failure(self, request: Request[C], error: Exception) -> Skipped:
        """Tell of a failure, and do not try again for a while."""
        key = (*key_of(request), values_for(request) != "call")
        measured = error.measurements if isinstance(error, TuningFailed) else ()
        self._failed[key] = (as_text(error), self._clock_s() + lifetime_s(m.failure for m in measured))
        request.tell("autotune_finish", cfg=None, error=error)
        return Skipped(text_of(error), error)

    # --------------------------------------------------------------------------------------------------- on demand

    def tune(self, request: Request[C], *, budget: Budget, on_step: Callable[[Step], None] | None) -> Tuned[C]:
        """Tune though an answer may be known; another process that does so already is waited for."""
        with self._turn_on_demand(request, "again" if request.again else "tune") as turn:
            if turn.leads:
                entry = self._book.find(request)
                # A choice that stands can only be verified.
                stands = self._book.stands(request, entry, values_for(request)) is not None
                turn.result = self._tune(request, entry, turn.generation, budget, on_step, reverify=stands).tuned
        return cast("Tuned[C]", turn.result)

    def verify(self, request: Request[C], *, budget: Budget, on_step: Callable[[Step], None] | None) -> Verified[C]:
        """Measure the finalists of an entry again though it may be trusted; tune if it is missing or beaten."""
        with self._turn_on_demand(request, "verify") as turn:
            if turn.leads:
                entry = self._book.find(request)
                turn.result = self._tune(request, entry, turn.generation, budget, on_step, again=True)
        return cast("Verified[C]", turn.result)

    def tune_together(
        self,
        requests: Sequence[Request[C]],
        weights: Sequence[float],
        combine: Combine,
        *,
        budget: Budget,
        on_step: Callable[[Step], None] | None,
    ) -> Tuned[C]:
        """Find one configuration for several problems, and write it down for each."""
        with ExitStack() as turns:
            led: dict[str, FlightTurn[Tuned[C]]] = {}
            tuned: Tuned[C] | None = None
            # By their ids, so that two processes with some problems in common never wait for each other in a ring.
            for request in sorted(requests, key=lambda request: problem_id(request.problem)):
                turn = turns.enter_context(self._turn_on_demand(request, "tune", ordered=True))
                if not turn.leads:
                    tuned = turn.result
                    break
                led.setdefault(problem_id(request.problem), turn)
            if tuned is None:
                from tunebook._selection.joint_tuning import JointTuning  # noqa: PLC0415 - loaded late: for few programs

                joint = JointTuning(self._book, self._tuner, self._publish, requests, weights, combine)
                tuned = joint.tune({name: turn.generation for name, turn in led.items()}, budget, on_step)
            for turn in led.values():
                turn.result = tuned
        return tuned

    def _turn_on_demand(
        self, request: Request[C], verb: str, *, ordered: bool = False
    ) -> AbstractContextManager[FlightTurn[Any]]:
        lease_id = problem_id(request.problem)
        return self._flights.turn((verb, key_of(request)), self._book.leases(), lease_id, ordered=ordered)

    # -------------------------------------------------------------------------------------------- for an agreement

    def parts_of(self, request: Request[C]) -> int:
        """Return how many processes could each measure a part of the candidates; 1 if they cannot be told apart."""
        ours = isinstance(self._tuner, Tuner)
        if not ours or search_for(request.kernel, request.inv, request.strategy) is not None:
            return 1
        return max(1, len(list(request.kernel.candidates(request.inv))))

    def measure_part(self, request: Request[C], part: int, parts: int, budget: Budget) -> tuple[Measurement, ...]:
        """Measure one of so many parts of the candidates, and the heuristic; nothing is written down or decided."""
        history = self._book.history(request, self._book.find(request).record)
        step = tell_steps(request, request.on_step)
        try:
            call = measured_call(request)
            with tuning_site(call.measured.inv) as (site, there):
                job = there(job_for, call.measured, request.policy, history, budget, step, site)
                job = job._replace(conditions=job.conditions._replace(at=call.sizes))
                # By fingerprint: processes with another order of candidates leave none out, and measure none twice.
                mine = sorted(job.candidates, key=fingerprint)[part::parts]
                job = job._replace(candidates=mine, brief=True)  # the fastest of all parts race again
                request.tell("autotune_start", candidates=job.size, verifying=False)
                tuned: Tuned[C] = there(self._tuner.tune, job)
        except TuningFailed as error:
            return error.measurements
        return tuned.measurements

    @property
    def writes(self) -> bool:
        """Whether results are written down."""
        return self._book.writes

    def written(self, request: Request[C]) -> Record | None:
        """Return the record of a problem, for the books of other machines; None if it is missing."""
        return self._book.persistent.read(request.problem) if self.writes else None

    def write(self, request: Request[C], record: Record) -> None:
        """Write down a record of another machine, unless this machine's book has an answer of its own."""
        if self.writes and isinstance(self._book.find(request), Refused):
            self._book.persistent.write(record)

    # --------------------------------------------------------------------------------------------------- the tuning

    def _tune(
        self,
        request: Request[C],
        entry: Trusted[C] | Refused[C],
        generation: int,
        budget: Budget,
        on_step: Callable[[Step], None] | None,
        beside: Sequence[Measurement] = (),
        *,
        reverify: bool = True,
        again: bool = False,
    ) -> Verified[C]:
        """Measure, decide, write down. `reverify`: only an outdated entry's finalists; `again`: any entry's."""
        history = self._book.history(request, entry.record)
        if beside:
            history = history._replace(measurements=(*history.measurements, *beside), complete=False)
        outdated = self._book.to_verify(request, entry, again=again) if reverify else None
        step = tell_steps(request, on_step)
        kept: list[Measurement] = []  # by an interrupt

        work = entry, generation, budget, step, history, outdated, kept
        try:
            plain = request.kernel.table is None and not request.kernel.has_buckets
            call = MeasuredCall(request, request) if plain else measured_call(request)
            if call.is_rounded:
                try:
                    return self._tune_on(call, *work)
                except TuningFailed as error:  # the caller's own arguments may be valid
                    call = callers_own(call.callers, error)
            return self._tune_on(call, *work)
        except TuningFailed as error:
            self._book.publish_failures(request, error.measurements, entry.record, generation_of(entry) + generation)
            raise
        except KeyboardInterrupt as error:
            under = generation_of(entry) + generation
            if left := self._book.publish_failures(request, kept, entry.record, under, interrupted=True):
                tell_of_interrupt(error, request.problem, left, chosen=isinstance(entry, Trusted))
            raise

    def _tune_on(
        self,
        call: MeasuredCall[C],
        entry: Trusted[C] | Refused[C],
        generation: int,
        budget: Budget,
        step: Callable[[Step], None] | None,
        history: History,
        outdated: Trusted[C] | None,
        kept: list[Measurement],
    ) -> Verified[C]:
        """Measure on a call, decide, and write down for its caller."""
        measured, request = call.measured, call.callers
        with tuning_site(measured.inv) as (site, there), RunningCandidate(problem_id(request.problem)) as note:
            job: Job[C] = there(job_for, measured, measured.policy, history, budget, step, site)
            job = job._replace(conditions=job.conditions._replace(at=call.sizes))
            job = job._replace(on_interrupt=kept.extend, on_run=note.note, died=note.died)
            if job.search is not None:
                job = job._replace(search=self._book.start_for(request, job.search))
            elif outdated is None and not request.on_demand and request.policy.cache_miss_fallback == "predict":
                from tunebook._selection.predictions import worth_trying  # noqa: PLC0415 - loaded late: as above

                job = job._replace(candidates=worth_trying(self._book, request, job.candidates))
            keep = self._book.stands(request, entry, job.conditions.values_from) is not None
            try:
                if outdated is None or job.incumbent is None or not isinstance(self._tuner, Tuner):
                    because = _why_tuned(entry)
                    tuned: Tuned[C] = there(partial(self._tell_and_tune, because=because), request, job)
                    found = Verified(held=False, reason=because or "there was no choice to verify", tuned=tuned)
                else:
                    again = partial(self._verify_finalists, keep=keep, because=_why_tuned(entry))
                    found = there(again, request, job, outdated)
            except TuningFailed as error:
                inv = measured.inv if site is None else site.inv
                raise there(by_author, REFERENCE, request.kernel.blame, inv, error) from None
        if call.is_rounded and isinstance(self._tuner, Tuner):
            check_for_caller(self._tuner, request, found.config)
        tuned = found.tuned._replace(
            values_from=job.conditions.values_from,
            at={"sizes": call.sizes, "reason": call.reason} if call.sizes else {},
        )
        tuned = self._publish(request, tuned, entry, generation, verified=outdated if found.held else None)
        if tuned.stands and isinstance(entry, Trusted) and entry.is_pinned and tuned.verdict is not None:
            best = tuned.verdict.winner.measurement.fingerprint
            held = best == fingerprint_of(entry.record.head.config)
            reason = found.reason if held else f"the measured winner is {tuned.configs[best]!r}; the pin stands"
            found = found._replace(held=held, kept=not held, reason=reason)
        return found._replace(tuned=tuned)

    def _verify_finalists(
        self, request: Request[C], job: Job[C], outdated: Trusted[C], *, keep: bool, because: str
    ) -> Verified[C]:
        there = outdated.record.head.environment
        among = finalists(job.known, code=job.code, environment=there, winner=cast("str", job.incumbent))
        return verify(job, partial(self._tell_and_tune, request, because=because), among, keep=keep)

    def _tell_and_tune(
        self, request: Request[C], job: Job[C], *, because: str = "", verifying: bool = False
    ) -> Tuned[C]:
        request.tell("autotune_start", candidates=job.size, verifying=verifying)
        if job.died is not None or has_log():
            return watched(request, job, self._tuner.tune, because=because, verifying=verifying)
        tuned: Tuned[C] = self._tuner.tune(job)
        if any(m.failure is not None for m in tuned.measurements):
            tell_of_failures(request.problem, job, tuned)
        return tuned

    def _publish(
        self,
        request: Request[C],
        tuned: Tuned[C],
        entry: Trusted[C] | Refused[C],
        generation: int,
        *,
        verified: Trusted[C] | None = None,
        together: Mapping[str, Json] = MappingProxyType({}),
    ) -> Tuned[C]:
        """Write a result into the book, and return it with the configuration that stands."""
        tuned = tuned._replace(problem=request.problem)
        under = generation_of(entry) + generation
        if generation == 0 and self.writes:  # without a lease, others may have written meanwhile: a pin, say
            entry = self._book.find(request)
        config = self._book.publish(request, tuned, entry, under, verified=verified, together=together)
        if request.kernel.table is not None:
            MEMO.invalidate()  # the new entry may be nearer to other calls than the entry that answers them
        if not tuned.disturbances.quiet:
            request.tell("disturbed", cfg=config, measured=tuned.config, reasons=tuned.disturbances.reasons)
        pinned = isinstance(entry, Trusted) and entry.is_pinned
        stands = "" if config is tuned.config else f"the {'pin' if pinned else 'earlier choice'} stands"
        tuned = tuned._replace(config=config, stands=stands)
        return told_if_kept(request.problem, tuned) if stands else tuned


def _why_tuned(entry: Trusted[Any] | Refused[Any]) -> str:
    """Return why all candidates are tuned, instead of the finalists of an entry; "" if there is no choice yet."""
    if isinstance(entry, Trusted) or entry.record is None or not entry.record.head.decided:
        return ""
    return entry.reason


def _asks_model(request: Request[Any], *modes: str) -> bool:
    policy = request.policy
    return policy.cache_miss_fallback == "predict" and policy.allow_heuristics and request.mode in (modes or ["normal"])


def _may_guess(request: Request[Any]) -> bool:
    return request.policy.allow_heuristics and request.kernel.heuristic(request.inv) is not None
