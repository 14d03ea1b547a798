"""Tuning by search, for spaces that are too big to race whole.

A strategy proposes batches. Each batch is compiled in parallel, checked, and sampled a few times: the first rounds of
a race, in which candidates that are clearly behind stop. Then the fastest of all batches race each other to the end,
and the decision is made over all measurements.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

from tunebook._base.errors import LeftOut, TuningFailed
from tunebook._measure.compile_pool import program_of
from tunebook._measure.stopwatch import failed
from tunebook._statistics.race import QUALIFYING, typical_s
from tunebook._tuning.job import TRYING, Budget, CandidateSet, History, Job, Step, Tuned
from tunebook._tuning.time_left import finals_s
from tunebook.search import Observation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tunebook._base.vocabulary import Measurement
    from tunebook._space.space import Config
    from tunebook.search import Strategy
    from tunebook.search._by_name import Search

Cfg = TypeVar("Cfg")

# The number of candidates compiled at once, and proposed on the same knowledge: with fewer, compilers wait for the
# clock; with more, the strategy learns later.
_MOST_FAILURES: Final = 1000  # candidates that are tried though none has worked: as many as are raced without a search
BATCH: Final = 16
# The number of tried candidates that race each other in the end.
FINALISTS: Final = 16
# A later batch tries more candidates at random, and may be so many times slower than the slowest one so far.
_SLOWER: Final = 1.1


class Searching(Generic[Cfg]):
    """One search while it runs."""

    def __init__(
        self,
        job: Job[Cfg],
        search: Search,
        policy: str,
        tune: Callable[[Job[Cfg]], Tuned[Cfg]],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        setup = job.setup
        once = None if setup.compile is None else _compile_once(setup.compile, setup.launch_axes)
        self._told = job.on_interrupt
        self._job = job._replace(search=None, setup=setup._replace(compile=once), on_interrupt=self._interrupted)
        self._search, self._tune, self._clock_s, self._started_s = search, tune, clock_s, clock_s()
        self._candidates: CandidateSet[Any] = CandidateSet(job.conditions, policy, None)
        self._ran, self._waiting_s = 0, 0.0
        self._left_out: dict[str, str] = {}
        self._trials = search.trials
        self._began_s, self._slowest_s = 0.0, 0.0  # when this batch began; of a candidate, in the slowest batch
        self._best: tuple[float, object] = math.inf, None
        for m in job.known:
            if self._candidates.is_comparable(m) and (config := search.space.decoded(m.config)) is not None:
                self._candidates.results[self._candidates.admit(config)] = m

    def run(self) -> Tuned[Cfg]:
        strategy, measured = self._search.begin(), self._candidates.results
        strategy.observe(self._observations(measured))
        trials = self._search.trials - len(measured)
        trials = trials if self._job.budget.trials is None else self._job.budget.trials
        self._trials = trials
        at_once, ended = self._search.batch or BATCH, False
        while not ended and (self._ran < trials or self._must_go_on()):
            left = trials - self._ran
            batch = self._next_batch(strategy, min(at_once, left) if left > 0 else at_once)
            if not batch:
                break
            fresh = self._measure(batch)
            strategy.observe(self._observations(fresh))
            left_out = sum(self._candidates.admit(config) in self._left_out for config in batch)
            ended = len(fresh) + left_out < len(batch) or self._left_s(TRYING) <= 0
        return self._finals(complete=not ended)

    def _must_go_on(self) -> bool:
        """Whether nothing has worked yet, and the caller has named no number: without a choice, the call fails."""
        if self._job.budget.trials is not None or self._ran >= _MOST_FAILURES:
            return False
        return all(m.failure is not None for m in self._candidates.results.values())

    def _next_batch(self, strategy: Strategy, many: int) -> list[Config]:
        """Return proposals that are worth compiling; fewer only if fewer are left."""
        foresee = self._job.setup.foresee
        if foresee is None:
            return strategy.propose(many)
        batch: list[Config] = []
        while len(batch) < many and (proposed := strategy.propose(many - len(batch))):
            errors = dict(zip(proposed, foresee(cast("list[Cfg]", proposed)), strict=True))
            batch += [config for config in proposed if errors[config] is None]
            strategy.observe(self._observations(self._refused(errors)))
        return batch

    def _refused(self, errors: Mapping[Config, Exception | None]) -> list[str]:
        """Keep why candidates are not compiled, and return the fingerprints of those that would fail."""
        failing = []
        for config, error in errors.items():
            if isinstance(error, LeftOut):  # it would be slow, and says nothing about candidates next to it
                self._left_out[self._candidates.admit(config)] = str(error)
            elif error is not None:
                failing.append(self._candidates.admit(config))
                self._candidates.record(failing[-1], failed(error))
        return failing

    def _interrupted(self, found: Sequence[Measurement]) -> None:
        """Tell the measurements of the batches so far, too."""
        if self._told is not None:
            self._told([*({**self._candidates.results, **{m.fingerprint: m for m in found}}).values()])

    def _measure(self, batch: list[Config]) -> list[str]:
        """Measure a batch briefly, and return the fingerprints of its measured candidates."""
        measured = self._candidates.results
        self._began_s = self._elapsed_s
        job = self._job._replace(
            candidates=cast("list[Cfg]", batch),
            history=History(tuple(measured.values())),
            brief=True,
            budget=self._budget(),
            on_step=self._tell,
        )
        try:
            tuned = self._tune(job)
        except TuningFailed as error:
            found = error.measurements
        else:
            found = tuned.measurements
            self._waiting_s += tuned.waiting_s
            self._left_out |= tuned.left_out
        before = set(measured)
        for m in found:
            measured.setdefault(m.fingerprint, m)
        names = [name for name in map(self._candidates.admit, batch) if name in measured]
        self._ran += len(set(names) - before)
        self._slowest_s = max(self._slowest_s, (self._elapsed_s - self._began_s) / len(batch))
        return names

    def _finals(self, *, complete: bool) -> Tuned[Cfg]:
        """Race the fastest to the end, and decide over all measurements."""
        job, configs, measured = self._job, self._candidates.configs, self._candidates.results
        valid = {name: m for name, m in measured.items() if m.failure is None and m.valid_samples_s}
        fastest = sorted(valid, key=lambda name: typical_s(valid[name].valid_samples_s))[:FINALISTS]
        names = dict.fromkeys([*fastest, *([job.incumbent] if job.incumbent in valid else [])])
        finalists = [configs[name] for name in names if name in configs]
        failures = tuple(m for m in measured.values() if m.failure is not None)
        if not finalists and job.heuristic is None:
            errors = [RuntimeError(f"{m.failure.kind}: {m.failure.message}") for m in failures if m.failure is not None]
            without = ValueError("the search proposed no candidates")
            raise TuningFailed(f"all {len(failures)} candidates failed", errors or [without], failures)
        history = job.history._replace(
            measurements=failures if self._ran else tuple(measured.values()),
            complete=not self._ran and job.history.complete,
        )
        final = self._tune(
            job._replace(candidates=finalists, history=history, budget=self._budget(), on_step=self._tell_of_finals)
        )
        measured.update({name: m._replace(dropped=True) for name, m in measured.items()})
        measured.update({m.fingerprint: m for m in final.measurements})
        configs.update(final.configs)
        self._candidates.heuristic = final.default
        decided = self._candidates.decide(
            job.incumbent,
            job.goal.objective,
            ran=self._ran,
            complete=complete and final.complete,
            seconds=self._elapsed_s,
            disturbances=final.disturbances,
            waiting_s=self._waiting_s + final.waiting_s,
            left_out=self._left_out,
            roofline=final.roofline,
        )
        return decided._replace(when=final.when)

    def _observations(self, names: Iterable[str]) -> list[Observation]:
        configs, measured = self._candidates.configs, [(name, self._candidates.results[name]) for name in names]
        return [
            Observation(configs[name], typical_s(m.valid_samples_s) if not m.failure and m.valid_samples_s else None)
            for name, m in measured
        ]

    @property
    def _elapsed_s(self) -> float:
        return self._clock_s() - self._started_s

    def _left_s(self, share: float = 1.0) -> float:
        return self._job.budget.left_s(self._elapsed_s, share)

    def _budget(self) -> Budget:
        return Budget(None if self._job.budget.seconds is None else max(self._left_s(), 1e-3))

    def _tell(self, step: Step) -> None:
        """Report tried candidates of the whole search; the race of a batch is not the race of the whole."""
        if self._job.on_step is None or step.doing != "trying":
            return
        if step.best_s is not None and step.best_s < self._best[0]:
            self._best = step.best_s, step.best
        best_s, best = self._best if self._best[0] < math.inf else (None, None)
        done = self._ran + step.done
        total = max(self._trials, done)
        left_s: float | None = min(self._left_to_try_s(step.done, total) + self._finals_s(), max(self._left_s(), 0.0))
        if done < 2:  # the first is near the middle of the space, and faster than most
            left_s = None
        before = Counter(m.failure.kind for m in self._candidates.results.values() if m.failure is not None)
        self._job.on_step(
            step._replace(
                done=done,
                total=total,
                elapsed_s=self._elapsed_s,
                failures=before + Counter(step.failures),
                best_s=best_s,
                best=best,
                left_s=left_s,
            )
        )

    def _left_to_try_s(self, done: int, total: int) -> float:
        """Return how long further candidates will take, by the slowest batch, or in the first one by its first runs."""
        if self._slowest_s:
            slowest_s = _SLOWER * self._slowest_s
            untried, in_batch_s = total - self._ran, self._elapsed_s - self._began_s
            return slowest_s * max(untried - in_batch_s / slowest_s, untried - done)
        return self._elapsed_s / max(done, 1) * (1 + QUALIFYING[-1].samples) * total - self._elapsed_s

    def _tell_of_finals(self, step: Step) -> None:
        if self._job.on_step is not None:
            self._job.on_step(step._replace(elapsed_s=self._elapsed_s))

    def _finals_s(self) -> float:
        measured = (m.valid_samples_s for m in self._candidates.results.values() if m.failure is None)
        return finals_s(sorted(typical_s(samples_s) for samples_s in measured if samples_s)[:FINALISTS], FINALISTS)


def _compile_once(compile_one: Callable[[Cfg], object], launch_axes: frozenset[str]) -> Callable[[Cfg], object]:
    """Return a compiler that remembers programs: batches share some, and finalists run again."""
    made: dict[str, object] = {}

    def compile_new(config: Cfg) -> object:
        program = program_of(config, launch_axes)
        if program is None:
            return compile_one(config)
        compiled, _ = program
        if compiled not in made:  # threads may compile one twice
            made[compiled] = compile_one(config)
        return made[compiled]

    return compile_new
