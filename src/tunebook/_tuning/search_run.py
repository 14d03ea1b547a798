"""Tuning by search, where the space is too big to race whole.

A strategy proposes batches. Each is compiled in parallel, checked, and sampled a few times: the first rounds of a race,
in which those that are clearly behind stop. Then the fastest of all batches race each other to the end, and the choice
is made over everything that was measured.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar, cast

from tunebook._base.errors import TuningFailed
from tunebook._measure.compile_pool import program_of
from tunebook._statistics.decide import decide
from tunebook._statistics.race import typical_s
from tunebook._tuning.job import Budget, Job, Step, Tuned
from tunebook._tuning.job_run import TRYING, identify
from tunebook.search import Observation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tunebook._base.vocabulary import Measurement
    from tunebook._space.space import Config
    from tunebook.search._by_name import Search

Cfg = TypeVar("Cfg")

# How many are compiled at once, and proposed on the same knowledge: with fewer, compilers wait for the clock; with
# more, the strategy learns later.
BATCH: Final = 16
# How many of all that were tried race each other in the end.
FINALISTS: Final = 16


class TuneListed(Protocol[Cfg]):
    """Runs a job that lists its candidates."""

    def __call__(self, job: Job[Cfg]) -> Tuned[Cfg]:
        """Return what was found; `TuningFailed` if every candidate fails."""


class Searching(Generic[Cfg]):
    """One search while it runs."""

    def __init__(
        self,
        job: Job[Cfg],
        search: Search,
        policy: str,
        tune: TuneListed[Cfg],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        once = None if job.compile is None else _CompileOnce(job.compile, job.launch_axes)
        self._job = job._replace(search=None, compile=once)
        self._search, self._tune, self._clock_s = search, tune, clock_s
        self._started_s = clock_s()
        self._configs: dict[str, Any] = {}
        self._measured: dict[str, Measurement] = {}
        self._ran = 0
        self._waiting_s = 0.0
        here = (job.code, policy, job.environment)
        for m in job.known:
            if (m.code, m.policy, m.environment) == here and (config := search.space.decoded(m.config)) is not None:
                self._measured[m.fingerprint], self._configs[m.fingerprint] = m, config

    def run(self) -> Tuned[Cfg]:
        strategy = self._search.begin()
        strategy.observe(self._observations(self._measured))
        trials = self._search.trials - len(self._measured)
        trials = trials if self._job.budget.trials is None else self._job.budget.trials
        ended = False
        while self._ran < trials and not ended:
            batch = strategy.propose(min(BATCH, trials - self._ran))
            if not batch:
                break
            fresh = self._batch(batch)
            strategy.observe(self._observations(fresh))
            ended = len(fresh) < len(batch) or self._left_s(TRYING) <= 0
        return self._finals(complete=not ended)

    def _batch(self, batch: list[Config]) -> list[str]:
        """Measure a batch briefly, and return the fingerprints of those that were."""
        known = tuple(self._measured.values())
        budget = Budget(None if self._job.budget.seconds is None else max(self._left_s(), 1e-3))
        job = self._job._replace(
            candidates=cast("list[Cfg]", batch),
            known=known,
            incumbent=None,
            unfinished=False,
            brief=True,
            budget=budget,
            on_step=self._told,
        )
        try:
            tuned = self._tune(job)
        except TuningFailed as error:
            found = error.measurements
        else:
            found = tuned.measurements
            self._waiting_s += tuned.waiting_s
        before = set(self._measured)
        for m in found:
            self._measured.setdefault(m.fingerprint, m)
        for number, config in enumerate(batch):
            self._configs.setdefault(identify(config, number)[0], config)
        wanted = [identify(config, number)[0] for number, config in enumerate(batch)]
        measured = [fp for fp in wanted if fp in self._measured]
        self._ran += len(set(measured) - before)
        return measured

    def _finals(self, *, complete: bool) -> Tuned[Cfg]:
        """Race the fastest to the end, and decide over everything."""
        valid = {fp: m for fp, m in self._measured.items() if m.failure is None and m.valid_samples_s}
        fastest = sorted(valid, key=lambda fp: typical_s(valid[fp].valid_samples_s))[:FINALISTS]
        names = dict.fromkeys([*fastest, *([self._job.incumbent] if self._job.incumbent in valid else [])])
        candidates = [self._configs[fp] for fp in names if fp in self._configs]
        failures = tuple(m for m in self._measured.values() if m.failure is not None)
        job = self._job._replace(
            candidates=candidates,
            known=failures if self._ran else tuple(self._measured.values()),
            unfinished=bool(self._ran) or self._job.unfinished,
            budget=Budget(None if self._job.budget.seconds is None else max(self._left_s(), 1e-3)),
        )
        if not candidates and self._job.heuristic is None:
            raise TuningFailed(f"all {len(failures)} candidates failed", _errors(failures), failures)
        final = self._tune(job)
        measured = {fp: m._replace(dropped=True) for fp, m in self._measured.items()}
        measured |= {m.fingerprint: m for m in final.measurements}
        heuristic = None if self._job.heuristic is None else identify(self._job.heuristic, 0)[0]
        verdict = decide(
            measured.values(), incumbent=self._job.incumbent, heuristic=heuristic, objective=self._job.objective
        )
        configs = {**self._configs, **final.configs}
        return final._replace(
            config=final.config if verdict is None else configs[verdict.winner.measurement.fingerprint],
            verdict=verdict,
            measurements=tuple(measured.values()),
            ran=self._ran,
            complete=complete and final.complete,
            seconds=self._clock_s() - self._started_s,
            configs=configs,
            waiting_s=self._waiting_s + final.waiting_s,
        )

    def _observations(self, fingerprints: Iterable[str]) -> list[Observation]:
        found = []
        for fp in fingerprints:
            m = self._measured[fp]
            valid = m.failure is None and m.valid_samples_s
            found.append(Observation(self._configs[fp], typical_s(m.valid_samples_s) if valid else None))
        return found

    def _left_s(self, share: float = 1.0) -> float:
        seconds = self._job.budget.seconds
        return float("inf") if seconds is None else share * seconds - (self._clock_s() - self._started_s)

    def _told(self, step: Step) -> None:
        """Tell of candidates that were tried; each batch's race is no race of the whole."""
        if self._job.on_step is not None and step.doing == "trying":
            done = self._ran + step.done
            self._job.on_step(step._replace(done=done, total=max(self._search.trials, done)))


class _CompileOnce(Generic[Cfg]):
    """Compiles each program once: batches share some, and finalists are asked for again; not for threads that do."""

    def __init__(self, compile_one: Callable[[Cfg], object], launch_axes: frozenset[str]) -> None:
        self._compile_one, self._launch_axes = compile_one, launch_axes
        self._made: dict[str, object] = {}

    def __call__(self, config: Cfg) -> object:
        program = program_of(config, self._launch_axes)
        if program is None:
            return self._compile_one(config)
        if program.compiled not in self._made:
            self._made[program.compiled] = self._compile_one(config)
        return self._made[program.compiled]


def _errors(failures: Iterable[Measurement]) -> list[Exception]:
    said = [RuntimeError(f"{m.failure.kind}: {m.failure.message}") for m in failures if m.failure is not None]
    return [*said] or [ValueError("the search proposed nothing")]
