"""The tiers, one small class each. `_selection` says in which order they are asked."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

from tunebook._book import Book, Call, History, Refused
from tunebook._errors import TuningFailed
from tunebook._overlay import find_overlay
from tunebook._pending import Flights, single_flight
from tunebook._registry import recordings
from tunebook._scope import Scope, scoped
from tunebook._tuner import FAILURE_LIFETIME_S, Job, Step, Tuned, Tuner
from tunebook.stores import problem_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tunebook._cache import ConfigCache
    from tunebook._policy import AutotunePolicy
    from tunebook._types import Problem
    from tunebook.stores import LeaseBoard

C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)


# NamedTuples here and below, where dataclasses would do: a frozen dataclass takes 0.42 ms to define, a NamedTuple 0.06,
# and `import tunebook` has a budget.
class Found(NamedTuple, Generic[C_co]):
    """A tier's answer. `remember` puts it into memory; `level` says which cache hit, for the event."""

    config: C_co
    event: str
    level: str | None = None
    remember: bool = False


class Skipped(NamedTuple):
    """Why a tier has no answer."""

    reason: str
    error: Exception | None = None
    transient: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Call[C]):
    """A call on its way through the tiers."""

    policy: AutotunePolicy
    tell: Callable[..., None]


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


class Source(Protocol[C]):
    """One tier."""

    @property
    def name(self) -> str:
        """What explanations and errors call it."""

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        """Return a configuration, or why there is none."""


class Override(Generic[C]):
    """The configuration given with this very call. Never remembered: it was not measured."""

    name: Final = "override"

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        config = request.inv.override_cfg
        return Skipped("none given") if config is None else Found(config=config, event="override")


class Overlays(Generic[C]):
    name: Final = "overlay"

    def ask(self, request: Request[C]) -> Found[Any] | Skipped:
        config = find_overlay(request.problem)
        return Skipped("none in this context") if config is None else Found(config=config, event="overlay_hit")


def _key(request: Request[Any]) -> tuple[Problem, str]:
    """Return what is tuned once: a problem, for one version of the code. A notebook cell run again makes another."""
    return request.problem, request.kernel.code_checksum


class Memory(Generic[C]):
    name: Final = "memory"

    def __init__(self, cache: ConfigCache[C]) -> None:
        self._cache = cache
        self._code_of: dict[Problem, str] = {}

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        config = self._cache.get(*request.problem)
        if config is None:
            return Skipped(f"no entry among {self._cache.size()}")
        code = self._code_of.get(request.problem)
        if code is not None and code != request.kernel.code_checksum:
            return Skipped("the entry was made by other code of the same name")
        return Found(config=config, event="cache_hit", level="memory")

    def remember(self, request: Request[C], config: C) -> None:
        self._code_of[request.problem] = request.kernel.code_checksum
        self._cache.put(*request.problem, config)


class Persistent(Generic[C]):
    name: Final = "persistent"

    def __init__(self, book: Book[C] | None) -> None:
        self._book = book

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        if self._book is None:
            return Skipped("none given")
        entry = self._book.find(request)
        if isinstance(entry, Refused):
            return Skipped(entry.reason)
        return Found(config=entry.config, event="cache_hit", level="persistent", remember=True)


class Autotune(Generic[C]):
    name: Final = "autotune"

    def __init__(self, tuner: AnyTuner | None, book: Book[C] | None, *, persist: bool, forbid_again: bool) -> None:
        self._tuner = tuner
        self._book = book
        self._persist = persist
        self._forbid_again = forbid_again
        self._decided: dict[tuple[Problem, str], C] = {}
        self._failed: dict[tuple[Problem, str], tuple[TuningFailed, float]] = {}
        self._clock_s = time.monotonic
        self._flights: Flights[Any] = Flights()
        self._explicit: Flights[Any] = Flights()

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        known = self.known(request)
        if known is not None:
            return known
        try:
            answer = self._tune_once(request)
        except TuningFailed as error:
            self._failed[_key(request)] = (error, self._clock_s() + FAILURE_LIFETIME_S)
            request.tell("autotune_finish", cfg=None, error=error)
            return Skipped(str(error), error)
        if isinstance(answer, Found):
            self._decided[_key(request)] = answer.config
        return answer

    def known(self, request: Request[C]) -> Found[C] | Skipped | None:
        """Return the answer that needs no tuning: a remembered decision or failure, or why tuning is off."""
        if self._forbid_again and _key(request) in self._decided:
            return Found(config=self._decided[_key(request)], event="cache_hit", level="memory", remember=True)
        reason = self._reason_not_to(request)
        if reason is not None:
            return Skipped(reason)
        error, expires = self._failed.get(_key(request), (None, 0.0))
        return Skipped(f"failed before: {error}", error) if expires > self._clock_s() else None

    def _reason_not_to(self, request: Request[C]) -> str | None:
        if self._tuner is None:
            return "no tuner given"
        if not request.policy.allow_autotune:
            return "off: policy.allow_autotune is False"
        if request.policy.cache_miss_fallback != "autotune":
            return f"off: policy.cache_miss_fallback is {request.policy.cache_miss_fallback!r}"
        if recordings():
            return "off: a recording is on"
        if not any(True for _ in request.kernel.candidates(request.inv)):
            return "the kernel has no candidates"  # and its heuristic alone would be a guess, written down as a choice
        return None

    def _tune_once(self, request: Request[C]) -> Found[C] | Skipped:
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
            tuned = self._run(request, generation=generation)
            return Found(config=tuned.config, event="autotune_finish", remember=True)

        busy = "another caller is tuning this problem, and policy.while_tuning is 'heuristics'"
        may_leave = request.policy.while_tuning == "heuristics" and request.policy.allow_heuristics
        answer: Found[C] | Skipped = single_flight(
            self._flights,
            _key(request),
            self._board(),
            problem_id(request.problem),
            look=look,
            work=work,
            instead=(lambda: Skipped(busy, transient=True)) if may_leave else None,
        )
        if isinstance(answer, Found) and not led and answer.level is None:
            return answer._replace(event="cache_hit", level="memory")  # another thread's result, waited for
        return answer

    def tune(self, request: Request[C], *, budget_s: float | None, on_step: Callable[[Step], None] | None) -> Tuned[C]:
        """Tune though an answer may be known; another process that does so already is waited for."""

        def work(generation: int) -> Tuned[C]:
            return self._run(request, generation=generation, budget_s=budget_s, on_step=on_step)

        lease = problem_id(request.problem)
        tuned: Tuned[C] = single_flight(
            self._explicit, _key(request), self._board(), lease, look=lambda: None, work=work
        )
        return tuned

    def _board(self) -> LeaseBoard | None:
        # What is not written down cannot be found by another process, so there is no point in making it wait.
        return self._book.persistent.leases() if self._book is not None and self._persist else None

    def _run(
        self,
        request: Request[C],
        *,
        generation: int,
        budget_s: float | None = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> Tuned[C]:
        """Measure what is not known, decide, and write it down."""
        history = History() if self._book is None else self._book.history(request)
        job = self._job(request, history, budget_s, on_step)
        request.tell("autotune_start", candidates=len(job.candidates))
        tuned = _tune(self._tuner or Tuner(), job)
        if self._book is not None and self._persist:
            self._book.publish(request, tuned, history.generation + generation)
        return tuned

    def _job(
        self,
        request: Request[C],
        history: History,
        budget_s: float | None,
        on_step: Callable[[Step], None] | None,
    ) -> Job[C]:
        kernel, inv = request.kernel, request.inv
        backward = request.policy.validate_backward and not any(scoped(_ForwardOnly)) and kernel.has_backward(inv)
        return Job(
            make_fn=lambda config: kernel.bind(inv, config, backward=backward),
            args=inv.args,
            kwargs=inv.kwargs,
            candidates=list(kernel.candidates(inv)),
            heuristic=kernel.heuristic(inv),
            incumbent=history.winner,
            known=history.measurements,
            unfinished=not history.complete,
            code=kernel.code_checksum,
            environment=kernel.environment(inv),
            mode="forward+backward" if backward else "forward",
            compile=(lambda config: kernel.compile_cfg(inv, config)) if kernel.compiles else None,
            check=None if backward else kernel.checker(inv),
            isolate=_isolates(request),
            timeout_s=request.policy.candidate_timeout_s,
            budget_s=budget_s,
            on_step=on_step,
        )


def _isolates(request: Request[Any]) -> bool:
    if request.policy.isolate == "auto":
        return request.kernel.compiles and request.inv.platform == "cpu"
    return request.policy.isolate == "always"


def _tune(tuner: AnyTuner, job: Job[C]) -> Tuned[C]:
    if isinstance(tuner, Tuner):
        return tuner.tune(job)
    config: C = tuner.autotune(job.make_fn, job.args, job.kwargs, job.candidates)
    return Tuned(
        config=config, verdict=None, measurements=(), ran=len(job.candidates), complete=True, seconds=0.0, configs={}
    )


class WouldTune(Generic[C]):
    """Stands in for tuning where nothing may run: it says what tuning would do."""

    name: Final = Autotune.name

    def __init__(self, autotune: Autotune[C]) -> None:
        self._autotune = autotune

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        answer = self._autotune.known(request)
        return Skipped("would tune now") if answer is None else answer


class Heuristics(Generic[C]):
    name: Final = "heuristics"

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        if not request.policy.allow_heuristics:
            return Skipped("off: policy.allow_heuristics is False")
        config = request.kernel.heuristic(request.inv)
        return Skipped("the kernel has none") if config is None else Found(config=config, event="heuristics")


class FirstCandidate(Generic[C]):
    """While a recording is on, nothing is tuned and the program must run all the same."""

    name: Final = "first candidate"

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        if not recordings():
            return Skipped("only while a recording is on")
        for config in request.kernel.candidates(request.inv):
            return Found(config=config, event="heuristics")
        return Skipped("the kernel has no candidates")


class _ForwardOnly:
    """Marks that backward passes are not measured."""


def forward_autotune_only() -> Scope:
    """Measure forward passes only inside a with-block, whatever `validate_backward` says."""
    return Scope(_ForwardOnly())
