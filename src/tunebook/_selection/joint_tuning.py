"""One configuration for several problems: measures their calls together, and writes the result down for each."""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import reduce
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tunebook._arrays.describe import tuning_site
from tunebook._selection.bucket_tuning import ready
from tunebook._selection.tiers import tell_steps
from tunebook._selection.trusted_entries import Trusted, generation_of
from tunebook._selection.tuning_watch import tell_of_interrupt
from tunebook._tuning.job import Budget
from tunebook._tuning.plan import best_s, job_for, together
from tunebook.stores import problem_id

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tunebook._base.vocabulary import Combine, Measurement
    from tunebook._selection.foreign_tuner import ForeignTuner
    from tunebook._selection.tiers import Request
    from tunebook._selection.trusted_entries import EntryGuard
    from tunebook._tuning.job import Job, Step, Tuned
    from tunebook._tuning.tuner import Tuner

C = TypeVar("C")


class JointTuning(Generic[C]):
    """The tuning of several calls for one configuration. `publish` writes a result into the entry of a call."""

    def __init__(
        self,
        book: EntryGuard[C],
        tuner: Tuner | ForeignTuner,
        publish: Callable[..., object],
        requests: Sequence[Request[C]],
        weights: Sequence[float],
        combine: Combine,
    ) -> None:
        self._book, self._tuner, self._publish = book, tuner, publish
        self._requests, self._weights, self._combine = requests, weights, combine
        self._entries = [book.find(request) for request in requests]
        self._alone: list[Tuned[C]] = []  # the calls tuned one by one, if the times of each are needed
        self._kept: list[list[Measurement]] = [[] for _ in requests]  # by an interrupt, for each call

    def tune(self, generations: Mapping[str, int], budget: Budget, on_step: Callable[[Step], None] | None) -> Tuned[C]:
        """Measure, decide, and write down; `generations` are those of the leases, by the ids of the problems."""
        requests, weights = self._requests, self._weights
        names = [problem_id(request.problem) for request in requests]
        try:
            tuned = self._measure(budget, on_step)
        except KeyboardInterrupt as error:
            self._keep(error, [generations[name] for name in names])
            raise
        shares: dict[str, Any] = dict.fromkeys(names, 0.0)
        for name, weight in zip(names, weights, strict=True):
            shares[name] += weight / math.fsum(weights)
        # The measurements on one problem alone are kept in its entry too, so that they need not be taken again.
        beside = [each.measurements for each in self._alone] or [()] * len(requests)
        facts = {"weights": shares, "combine": self._combine}
        for name, request, entry, more in zip(names, requests, self._entries, beside, strict=True):
            whole = tuned._replace(measurements=(*more, *tuned.measurements))
            self._publish(request, whole, entry, generations[name], together=facts)
        return tuned

    def _measure(self, budget: Budget, on_step: Callable[[Step], None] | None) -> Tuned[C]:
        requests, combine, alone = self._requests, self._combine, self._alone
        step = tell_steps(requests[0], on_step)
        with ExitStack() as sites:
            jobs: list[Job[C]] = []
            for request, entry, kept in zip(map(ready, requests), self._entries, self._kept, strict=True):
                site, there = sites.enter_context(tuning_site(request.inv))
                history = self._book.history(request, entry.record, joint=True)
                jobs.append(there(job_for, request, request.policy, history, budget, step, site))
                request.tell("autotune_start", candidates=jobs[0].size, verifying=False)
                if combine in ("max", "relative"):
                    own = self._book.history(request, entry.record)
                    part = jobs[-1]._replace(history=own, budget=budget.split(len(requests) + 1))
                    alone.append(there(self._tuner.tune, part._replace(on_interrupt=kept.extend)))
                    kept.extend(alone[-1].measurements)
            fastest_s = [best_s(each) for each in alone] or [1.0] * len(requests)
            scaled = [weight / seconds for weight, seconds in zip(self._weights, fastest_s, strict=True)]
            job = together([request.problem for request in requests], jobs, scaled, combine)
            job = job._replace(budget=reduce(Budget.less, alone, budget), on_interrupt=self._keep_for_each)
            tuned: Tuned[C] = there(self._tuner.tune, job)
        return tuned._replace(values_from=job.conditions.values_from)

    def _keep_for_each(self, found: Sequence[Measurement]) -> None:
        for kept in self._kept:
            kept.extend(found)

    def _keep(self, error: KeyboardInterrupt, generations: Sequence[int]) -> None:
        """Write down the measurements of a tuning that was interrupted, and tell how many there are."""
        written = False
        for request, entry, kept, generation in zip(
            self._requests, self._entries, self._kept, generations, strict=True
        ):
            under = generation_of(entry) + generation
            written |= bool(self._book.publish_failures(request, kept, entry.record, under, interrupted=True))
        if written:
            each = {id(m): m for kept in self._kept for m in kept}  # those of all calls together are in each list
            chosen = isinstance(self._entries[0], Trusted)
            tell_of_interrupt(error, self._requests[0].problem, [*each.values()], chosen=chosen, joint=True)
