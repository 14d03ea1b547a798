"""The tier that tunes: once per problem, among threads and among processes, and what it found is written down."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from tunebook._arrays.describe import at_tuning_site, obstacle_to
from tunebook._base.config_codec import fingerprint
from tunebook._base.errors import TuningFailed
from tunebook._selection.recording import recordings
from tunebook._selection.single_flight import Flights, single_flight
from tunebook._selection.tiers import Found, Request, Skipped, key_of, off
from tunebook._selection.trusted_entries import EntryGuard, Refused, Trusted
from tunebook._tuning.job import FAILURE_LIFETIME_S, Budget, History, Job, Step, Tuned
from tunebook._tuning.plan import job_for, outline, search_for, together
from tunebook._tuning.reverify import Verified, finalists, verify
from tunebook._tuning.tuner import Tuner
from tunebook.stores import problem_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tunebook._arrays.library import TuningSite
    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Measurement, Problem
    from tunebook.stores import LeaseBoard

C = TypeVar("C")

# What other processes wrote about failures is not read again at every call. Seen too late, it costs a tuning that ends
# before it runs anything.
_LOOK_AGAIN_S: Final = 60.0


class AnyTuner(Protocol):
    """What the selector needs of a tuner. Ours does more: it measures on what is known, and says why it chose."""

    def autotune(
        self,
        make_fn: Callable[[Any], Callable[..., object]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        candidates: Iterable[Any],
    ) -> Any:
        """Return the best candidate."""


class AutotuneTier(Generic[C]):
    name: Final = "autotune"

    def __init__(
        self, tuner: AnyTuner | None, book: EntryGuard[C] | None, *, persist: bool, forbid_again: bool
    ) -> None:
        self._tuner = tuner
        self._book = book
        self._persist = persist
        self._forbid_again = forbid_again
        self._decided: dict[tuple[Problem, str], C] = {}
        self._failed: dict[tuple[Problem, str], tuple[Exception | None, float]] = {}
        self._clock_s = time.monotonic
        self._flights: Flights[Any] = Flights()
        self._explicit: Flights[Any] = Flights()
        self._verifying: Flights[Any] = Flights()

    def ask(
        self,
        request: Request[C],
        budget: Budget = Budget(),  # noqa: B008 - immutable
        beside: Sequence[Measurement] = (),
    ) -> Found[C] | Skipped:
        """Return what is known or found. `beside` was measured elsewhere: those that were ahead there race again."""
        known = self.known(request)
        if known is not None:
            return known
        find = partial(self._renew, request, budget=budget, beside=beside, on_step=request.on_step)
        return self.settle(request, find)

    def settle(self, request: Request[C], find: Callable[..., Tuned[C]]) -> Found[C] | Skipped:
        """Use what `find(generation=...)` finds and writes down, unless another thread or process is faster."""
        try:
            answer = self._find_once(request, find)
        except TuningFailed as error:
            self.remember_failure(request, error)
            return Skipped(str(error), error)
        if isinstance(answer, Found):
            self._decided[key_of(request)] = answer.config
        return answer

    def adopt(self, request: Request[C], tuned: Tuned[C]) -> Found[C] | Skipped:
        """Use and write down what was found by other means."""

        def find(*, generation: int) -> Tuned[C]:
            history = History() if self._book is None else self._book.history(request)
            return self._written(request, tuned, history.generation + generation)

        return self.settle(request, find)

    def parts_of(self, request: Request[C]) -> int:
        """Return how many processes could each measure a part of the candidates; 1 if they cannot be told apart."""
        if not isinstance(self._tuner, Tuner) or search_for(request.kernel, request.inv, request.strategy) is not None:
            return 1
        return max(1, len(list(request.kernel.candidates(request.inv))))

    def measure_part(self, request: Request[C], part: int, parts: int, budget: Budget) -> tuple[Measurement, ...]:
        """Measure one of so many parts of the candidates, and the heuristic; nothing is written down or decided."""
        history = History() if self._book is None else self._book.history(request)

        def measure(stage: TuningSite | None) -> tuple[Measurement, ...]:
            job = job_for(request, request.policy, history, budget, request.on_step, stage)
            # By fingerprint: processes that list them in another order leave none out, and measure none twice.
            mine = sorted(job.candidates, key=fingerprint)[part::parts]
            job = job._replace(candidates=mine, brief=True)  # those ahead race again, against those of other parts
            request.tell("autotune_start", candidates=job.size, verifying=False)
            return _tune(self._tuner or Tuner(), _telling(request, job)).measurements

        try:
            return at_tuning_site(request.inv, measure)
        except TuningFailed as error:
            return error.measurements

    @property
    def writes(self) -> bool:
        """Whether what is found is written down."""
        return self._book is not None and self._persist

    def written(self, request: Request[C]) -> Record | None:
        """Return what is written down about a problem, for the books of other machines; None if nothing is."""
        return self._book.persistent.read(request.problem) if self._book is not None and self._persist else None

    def write(self, request: Request[C], record: Record) -> None:
        """Write down what another machine has, unless this one's book has an answer of its own."""
        if self._book is not None and self._persist and isinstance(self._book.find(request), Refused):
            self._book.persistent.write(record)

    def remember_failure(self, request: Request[C], error: Exception) -> None:
        """Do not try again for a while, and tell."""
        self._failed[key_of(request)] = (error, self._clock_s() + FAILURE_LIFETIME_S)
        request.tell("autotune_finish", cfg=None, error=error)

    def known(self, request: Request[C]) -> Found[C] | Skipped | None:
        """Return the answer that needs no tuning: a remembered decision or failure, or why tuning is off."""
        if self._forbid_again and key_of(request) in self._decided:
            return Found(config=self._decided[key_of(request)], event="cache_hit", level="memory", remember=True)
        reason = self._reason_not_to(request) if request.mode == "normal" else off(request).reason
        if reason is not None:
            return Skipped(reason)
        obstacle = obstacle_to(request.inv)
        if obstacle is not None:
            # It may be gone when such a call comes again: a CUDA graph is captured once, and then not any more.
            return Skipped(f"off: {obstacle}", transient=True)
        error, expires = self._failed.get(key_of(request), (None, 0.0))
        if expires <= self._clock_s():
            error = self._failed_elsewhere(request)
            self._failed[key_of(request)] = (error, self._clock_s() + _LOOK_AGAIN_S)
        return None if error is None else Skipped(f"failed before: {error}", error)

    def _failed_elsewhere(self, request: Request[C]) -> TuningFailed | None:
        """Return how every candidate failed in another process, if that wrote it down and none has expired since."""
        history = History() if self._book is None else self._book.history(request)
        if not isinstance(self._tuner, Tuner) or all(m.failure is None for m in history.measurements):
            return None
        try:
            return self._tuner.foregone(outline(request, request.policy, history))
        except TuningFailed:
            return None  # there is nothing to tune, which is for the tuning to say

    def _reason_not_to(self, request: Request[C]) -> str | None:
        if self._tuner is None:
            return "no tuner given"
        if not request.policy.allow_autotune:
            return "off: policy.allow_autotune is False"
        if request.policy.cache_miss_fallback in {"heuristics", "nearest"}:
            return f"off: policy.cache_miss_fallback is {request.policy.cache_miss_fallback!r}"
        if recordings():
            return "off: a recording is on"
        if not any(True for _ in request.kernel.candidates(request.inv)):
            return "the kernel has no candidates"  # and its heuristic alone would be a guess, written down as a choice
        return None

    def _find_once(self, request: Request[C], find: Callable[..., Tuned[C]]) -> Found[C] | Skipped:
        """Tune, unless another thread or process does so first: then take what that one found."""
        led = False

        def look() -> Found[C] | None:
            entry = Refused("") if self._book is None else self._book.find(request)
            if isinstance(entry, Refused):
                return None
            return Found(config=entry.config, event="cache_hit", level="persistent", remember=True)

        def work(generation: int) -> Found[C]:
            nonlocal led
            led = True
            return Found(config=find(generation=generation).config, event="autotune_finish", remember=True)

        busy = "another caller is tuning this problem, and policy.while_tuning is 'heuristics'"
        may_leave = request.policy.while_tuning == "heuristics" and request.policy.allow_heuristics
        answer: Found[C] | Skipped = single_flight(
            self._flights,
            key_of(request),
            self._board(),
            problem_id(request.problem),
            look=look,
            work=work,
            instead=(lambda: Skipped(busy, transient=True)) if may_leave else None,
        )
        if isinstance(answer, Found) and not led and answer.level is None:
            return answer._replace(event="cache_hit", level="memory")  # another thread's result, waited for
        return answer

    def tune(self, request: Request[C], *, budget: Budget, on_step: Callable[[Step], None] | None) -> Tuned[C]:
        """Tune though an answer may be known; another process that does so already is waited for."""

        def work(generation: int) -> Tuned[C]:
            return self._run(request, generation=generation, budget=budget, on_step=on_step)

        lease = problem_id(request.problem)
        tuned: Tuned[C] = single_flight(
            self._explicit, key_of(request), self._board(), lease, look=lambda: None, work=work
        )
        return tuned

    def tune_together(
        self,
        requests: Sequence[Request[C]],
        weights: Sequence[float],
        *,
        budget: Budget,
        on_step: Callable[[Step], None] | None,
    ) -> Tuned[C]:
        """Find one configuration for several problems, and write it down for each."""
        # By their ids, so that two processes with some problems in common never wait for each other in a ring.
        order = sorted(range(len(requests)), key=lambda i: problem_id(requests[i].problem))

        def lead(generations: dict[int, int]) -> Tuned[C]:
            if len(generations) == len(order):
                return self._run_together(requests, weights, generations, budget, on_step)
            at = order[len(generations)]
            lease = problem_id(requests[at].problem)
            tuned: Tuned[C] = single_flight(
                self._explicit,
                key_of(requests[at]),
                self._board(),
                lease,
                look=lambda: None,
                work=lambda generation: lead({**generations, at: generation}),
            )
            return tuned

        return lead({})

    def _run_together(
        self,
        requests: Sequence[Request[C]],
        weights: Sequence[float],
        generations: Mapping[int, int],
        budget: Budget,
        on_step: Callable[[Step], None] | None,
    ) -> Tuned[C]:
        histories = [History() if self._book is None else self._book.history(request) for request in requests]

        def measure(stages: list[TuningSite | None]) -> Tuned[C]:
            if len(stages) < len(requests):
                return at_tuning_site(requests[len(stages)].inv, lambda stage: measure([*stages, stage]))
            asked = zip(requests, histories, stages, strict=True)
            jobs = [job_for(r, r.policy, history, budget, on_step, stage) for r, history, stage in asked]
            job = together([request.problem for request in requests], jobs, weights)
            for request in requests:
                request.tell("autotune_start", candidates=job.size, verifying=False)
            return _tune(self._tuner or Tuner(), _telling(requests[0], job))

        tuned = measure([])
        for at, (request, history) in enumerate(zip(requests, histories, strict=True)):
            self._written(request, tuned, history.generation + generations[at])
        return tuned

    def verify(self, request: Request[C], *, budget: Budget, on_step: Callable[[Step], None] | None) -> Verified[C]:
        """Measure the finalists of an entry again though it may be trusted; tune if there is none, or it is beaten."""

        def work(generation: int) -> Verified[C]:
            entry = None if self._book is None else self._book.to_verify(request, again=True)
            return self._verified(request, entry, generation=generation, budget=budget, on_step=on_step)

        lease = problem_id(request.problem)
        verified: Verified[C] = single_flight(
            self._verifying, key_of(request), self._board(), lease, look=lambda: None, work=work
        )
        return verified

    def _board(self) -> LeaseBoard | None:
        # What is not written down cannot be found by another process, so there is no point in making it wait.
        return self._book.persistent.leases() if self._book is not None and self._persist else None

    def _run(
        self,
        request: Request[C],
        *,
        generation: int,
        budget: Budget = Budget(),  # noqa: B008 - immutable
        on_step: Callable[[Step], None] | None = None,
    ) -> Tuned[C]:
        """Measure what is not known, decide, and write it down."""
        return self._verified(request, None, generation=generation, budget=budget, on_step=on_step).tuned

    def _renew(
        self,
        request: Request[C],
        *,
        generation: int,
        budget: Budget,
        beside: Sequence[Measurement],
        on_step: Callable[[Step], None] | None,
    ) -> Tuned[C]:
        """Measure the finalists of an entry that was made under other versions, or else what is not known."""
        entry = None if self._book is None else self._book.to_verify(request)
        return self._verified(
            request, entry, generation=generation, budget=budget, beside=beside, on_step=on_step
        ).tuned

    def _verified(
        self,
        request: Request[C],
        entry: Trusted[C] | None,
        *,
        generation: int,
        budget: Budget,
        on_step: Callable[[Step], None] | None,
        beside: Sequence[Measurement] = (),
    ) -> Verified[C]:
        history = History() if self._book is None else self._book.history(request)
        generation += history.generation
        if beside:
            history = history._replace(measurements=(*history.measurements, *beside), complete=False)

        def measure(stage: TuningSite | None) -> Verified[C]:
            job = job_for(request, request.policy, history, budget, on_step, stage)
            if job.search is not None and self._book is not None:
                job = job._replace(search=self._book.start_for(request, job.search))
            return self._measured(request, job, entry)

        try:
            found = at_tuning_site(request.inv, measure)
        except TuningFailed as error:
            if self._book is not None and self._persist:
                self._book.publish_failures(request, error.measurements, generation)
            raise
        tuned = self._written(request, found.tuned, generation, entry if found.held else None)
        return found._replace(tuned=tuned)

    def _measured(self, request: Request[C], job: Job[C], entry: Trusted[C] | None) -> Verified[C]:
        tuner = self._tuner or Tuner()

        def tune(job: Job[C], *, verifying: bool = False) -> Tuned[C]:
            request.tell("autotune_start", candidates=job.size, verifying=verifying)
            return _tune(tuner, _telling(request, job))

        if entry is None or job.incumbent is None or not isinstance(tuner, Tuner):
            return Verified(held=False, reason="there was no choice to verify", tuned=tune(job))
        made_under = entry.record.head.environment
        among = finalists(job.known, code=job.code, environment=made_under, winner=job.incumbent)
        return verify(job, tune, among)

    def _written(
        self, request: Request[C], tuned: Tuned[C], generation: int, verified: Trusted[C] | None = None
    ) -> Tuned[C]:
        tuned = tuned._replace(problem=request.problem)
        config = tuned.config
        if self._book is not None and self._persist:
            config = self._book.publish(request, tuned, generation, verified=verified)
        if not tuned.disturbances.quiet:
            request.tell("disturbed", cfg=config, measured=tuned.config, reasons=tuned.disturbances.reasons)
        return tuned._replace(config=config)


def _telling(request: Request[Any], job: Job[C]) -> Job[C]:
    """Return a job that tells every step to those who listen to events, too."""
    if not request.heard:
        return job

    def step(step: Step) -> None:
        request.tell("autotune_progress", step=step)
        if job.on_step is not None:
            job.on_step(step)

    return job._replace(on_step=step)


def _tune(tuner: AnyTuner, job: Job[C]) -> Tuned[C]:
    if isinstance(tuner, Tuner):
        return tuner.tune(job)
    candidates = job.candidates if job.search is None else job.search.first(job.size)
    config: C = tuner.autotune(*job.parts[0][:3], candidates)
    return Tuned(
        config=config, verdict=None, measurements=(), ran=len(candidates), complete=True, seconds=0.0, configs={}
    )
