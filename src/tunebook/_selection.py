"""The tiers in order: the only place that knows it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from tunebook._book import Book, Call, Refused
from tunebook._codec import fingerprint_of
from tunebook._errors import DefinitionError, NoConfig, TuningFailed
from tunebook._gate import GATE
from tunebook._overlay import find_overlay
from tunebook._pending import Flights, single_flight
from tunebook._policy import AutotunePolicy
from tunebook._registry import recordings
from tunebook._scope import Scope, scoped
from tunebook._tuner import FAILURE_LIFETIME_S, Job, Step, Tuned, Tuner, parse_budget
from tunebook.stores import problem_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tunebook._cache import ConfigCache
    from tunebook._kernel import Invocation, Kernel
    from tunebook._persistent import PersistentCache
    from tunebook._types import Problem

C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(Generic[C_co]):
    """A tier's answer. `remember` puts it into memory; `level` says which cache hit, for the event."""

    config: C_co
    event: str
    level: str | None = None
    remember: bool = False


@dataclass(frozen=True, slots=True)
class Skipped:
    """Why a tier has no answer."""

    reason: str
    error: Exception | None = None
    transient: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection(Generic[C]):
    """A configuration, the tier that gave it, and what the tiers before it said.

    `transient` says that the same call may get another answer soon, though nothing changes in this process.
    """

    problem: Problem
    config: C
    source: str
    event: str
    level: str | None
    remember: bool
    tried: tuple[tuple[str, str], ...]
    transient: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSelection:
    """No tier had an answer; `cause` is the first error that a tier met."""

    problem: Problem
    tried: tuple[tuple[str, str], ...]
    cause: Exception | None = None


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


class _Override(Generic[C]):
    """The configuration given with this very call. Never remembered: it was not measured."""

    name: Final = "override"

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        config = request.inv.override_cfg
        return Skipped("none given") if config is None else Found(config=config, event="override")


class _Overlays(Generic[C]):
    name: Final = "overlay"

    def ask(self, request: Request[C]) -> Found[Any] | Skipped:
        config = find_overlay(request.problem)
        return Skipped("none in this context") if config is None else Found(config=config, event="overlay_hit")


def _key(request: Request[Any]) -> tuple[Problem, str]:
    """Return what is tuned once: a problem, for one version of the code. A notebook cell run again makes another."""
    return request.problem, request.kernel.code_checksum


class _Memory(Generic[C]):
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


class _Persistent(Generic[C]):
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


class _Autotune(Generic[C]):
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

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        known = self.known(request)
        if known is not None:
            return known
        try:
            config = self._tune_once(request)
        except TuningFailed as error:
            self._failed[_key(request)] = (error, self._clock_s() + FAILURE_LIFETIME_S)
            return Skipped(str(error), error)
        if config is None:
            reason = "another caller is tuning this problem, and policy.while_tuning is 'heuristics'"
            return Skipped(reason, transient=True)
        self._decided[_key(request)] = config
        return Found(config=config, event="autotune_finish", remember=True)

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
        return None

    def _tune_once(self, request: Request[C]) -> C | None:
        """Tune once among threads and processes; None if others are at it and the policy says not to wait."""

        def look() -> tuple[C] | None:
            entry = Refused("") if self._book is None else self._book.find(request)
            return None if isinstance(entry, Refused) else (entry.config,)

        def work(generation: int) -> tuple[C]:
            return (self.run(request, generation=generation).config,)

        may_leave = request.policy.while_tuning == "heuristics" and request.policy.allow_heuristics
        found: tuple[C] | None = single_flight(
            self._flights,
            _key(request),
            # What is not written down cannot be found by another process, so there is no point in making it wait.
            self._book.persistent.leases() if self._book is not None and self._persist else None,
            problem_id(request.problem),
            look=look,
            work=work,
            instead=(lambda: None) if may_leave else None,
        )
        return None if found is None else found[0]

    def run(
        self,
        request: Request[C],
        *,
        generation: int = 0,
        budget_s: float | None = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> Tuned[C]:
        """Measure what is not known, decide, and write it down."""
        job = self._job(request, budget_s, on_step)
        request.tell("autotune_start", candidates=len(job.candidates))
        tuned = _tune(self._tuner or Tuner(), job)
        if self._book is not None and self._persist:
            self._book.publish(request, tuned, generation)
        return tuned

    def _job(self, request: Request[C], budget_s: float | None, on_step: Callable[[Step], None] | None) -> Job[C]:
        kernel, inv = request.kernel, request.inv
        backward = request.policy.validate_backward and not any(scoped(_ForwardOnly)) and kernel.has_backward(inv)
        known = () if self._book is None else self._book.measurements(request)
        incumbent = None if self._book is None else self._book.incumbent(request)
        return Job(
            make_fn=lambda config: kernel.bind(inv, config, backward=backward),
            args=inv.args,
            kwargs=inv.kwargs,
            candidates=list(kernel.candidates(inv)),
            heuristic=kernel.heuristic(inv),
            incumbent=None if incumbent is None else fingerprint_of(incumbent),
            known=known,
            code=kernel.code_checksum,
            environment=kernel.environment(inv),
            mode="forward+backward" if backward else "forward",
            compile=(lambda config: kernel.compile_cfg(inv, config)) if kernel.compiles else None,
            check=None if backward else (lambda output: kernel.check_output(inv, output)),
            budget_s=budget_s,
            on_step=on_step,
        )


def _tune(tuner: AnyTuner, job: Job[C]) -> Tuned[C]:
    if isinstance(tuner, Tuner):
        return tuner.tune(job)
    config: C = tuner.autotune(job.make_fn, job.args, job.kwargs, job.candidates)
    return Tuned(config=config, verdict=None, measurements=(), ran=len(job.candidates), complete=True, seconds=0.0)


class _WouldTune(Generic[C]):
    """Stands in for tuning where nothing may run: it says what tuning would do."""

    name: Final = _Autotune.name

    def __init__(self, autotune: _Autotune[C]) -> None:
        self._autotune = autotune

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        answer = self._autotune.known(request)
        return Skipped("would tune now") if answer is None else answer


class _Heuristics(Generic[C]):
    name: Final = "heuristics"

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        if not request.policy.allow_heuristics:
            return Skipped("off: policy.allow_heuristics is False")
        config = request.kernel.heuristic(request.inv)
        return Skipped("the kernel has none") if config is None else Found(config=config, event="heuristics")


class _FirstCandidate(Generic[C]):
    """While a recording is on, nothing is tuned and the program must run all the same."""

    name: Final = "first candidate"

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        if not recordings():
            return Skipped("only while a recording is on")
        for config in request.kernel.candidates(request.inv):
            return Found(config=config, event="heuristics")
        return Skipped("the kernel has no candidates")


def _ask_in_order(request: Request[C], sources: Sequence[Source[C]]) -> Selection[C] | NoSelection:
    tried: list[tuple[str, str]] = []
    cause: Exception | None = None
    transient = False
    for source in sources:
        answer = source.ask(request)
        if isinstance(answer, Found):
            return Selection(
                problem=request.problem,
                config=answer.config,
                source=source.name,
                event=answer.event,
                level=answer.level,
                remember=answer.remember,
                tried=tuple(tried),
                transient=transient,
            )
        tried.append((source.name, answer.reason))
        cause = cause or answer.error
        transient = transient or answer.transient
    return NoSelection(problem=request.problem, tried=tuple(tried), cause=cause)


class ConfigSelectorChain(Generic[C]):
    """Chooses a configuration for a call: override, overlay, memory, persistent, autotune, heuristics, error.

    `on_event(event, **data)` is called with `override`, `overlay_hit`, `cache_hit` (with `level` "memory" or
    "persistent"), `autotune_start`, `autotune_finish`, `heuristics` or `error`; data holds `device`, `op_id`,
    `call_key` and `cfg`. Safe to share between threads.
    """

    def __init__(
        self,
        cache: ConfigCache[C],
        policy: AutotunePolicy | None = None,
        tuner: AnyTuner | None = None,
        persistent: PersistentCache[C] | None = None,
        persist_autotune: bool = True,  # noqa: FBT001, FBT002 - positional in the contract
        on_event: Callable[..., None] | None = None,
        forbid_reautotune: bool = True,  # noqa: FBT001, FBT002 - as above
    ) -> None:
        self.cache: Final = cache
        self.persistent: Final = persistent
        self.book: Final = None if persistent is None else Book(persistent)
        self._policy = policy or AutotunePolicy()
        self._listeners: tuple[Callable[..., None], ...] = () if on_event is None else (on_event,)
        self._listeners_lock = threading.Lock()
        self._memory = _Memory(cache)
        self._autotune = _Autotune(tuner, self.book, persist=persist_autotune, forbid_again=forbid_reautotune)
        self.sources: Final[tuple[Source[C], ...]] = (
            _Override(),
            _Overlays(),
            self._memory,
            _Persistent(self.book),
            self._autotune,
            _Heuristics(),
            _FirstCandidate(),
        )

    def choose(self, inv: Invocation[C, Any], kernel: Kernel[C, Any]) -> C:
        """Return the configuration for a call; `NoConfig` says what every tier answered."""
        return self.select(inv, kernel).config

    def select(self, inv: Invocation[C, Any], kernel: Kernel[C, Any]) -> Selection[C]:
        """Return the configuration for a call, and where it came from."""
        request = self._request(inv, kernel)
        selection = _ask_in_order(request, self.sources)
        if isinstance(selection, NoSelection):
            request.tell("error", cfg=None, tried=selection.tried)
            raise NoConfig(selection.problem.op, selection.tried) from selection.cause
        if selection.remember:
            self._memory.remember(request, selection.config)
        level = {} if selection.level is None else {"level": selection.level}
        request.tell(selection.event, cfg=selection.config, **level)
        return selection

    def preview(self, inv: Invocation[C, Any], kernel: Kernel[C, Any]) -> Selection[C] | NoSelection:
        """Return what `select` would answer, but tune nothing, remember nothing and tell nobody."""
        sources = [_WouldTune(s) if isinstance(s, _Autotune) else s for s in self.sources]
        return _ask_in_order(self._request(inv, kernel, silent=True), sources)

    def tune(
        self,
        inv: Invocation[C, Any],
        kernel: Kernel[C, Any],
        *,
        budget: float | str | None = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> Tuned[C]:
        """Tune a call now and use the result from now on; what was measured before is not measured again."""
        request = self._request(inv, kernel)
        tuned = self._autotune.run(request, budget_s=parse_budget(budget), on_step=on_step)
        self._memory.remember(request, tuned.config)
        request.tell("autotune_finish", cfg=tuned.config)
        return tuned

    @property
    def policy(self) -> AutotunePolicy:
        """The policy in this thread or task."""
        # Outermost first, so that an inner block changes what an outer one set.
        overrides = [o for o in scoped(_PolicyOverride) if o.selector is self]
        policy = self._policy
        for override in reversed(overrides):
            policy = policy.updated(dict(override.updates))
        return policy

    @policy.setter
    def policy(self, policy: AutotunePolicy) -> None:
        self._policy = policy
        GATE.invalidate()

    @property
    def listeners(self) -> tuple[Callable[..., None], ...]:
        """Who is told about events."""
        return self._listeners

    def listen(self, listener: Callable[..., None]) -> None:
        """Tell one more listener about events from now on."""
        with self._listeners_lock:
            self._listeners = (*self._listeners, listener)
        GATE.invalidate()

    def tell(self, event: str, problem: Problem, **data: object) -> None:
        """Pass an event on to every listener."""
        for listener in self._listeners:
            listener(event, device=problem.device, op_id=problem.op, call_key=problem.call_key, **data)

    def _request(self, inv: Invocation[C, Any], kernel: Kernel[C, Any], *, silent: bool = False) -> Request[C]:
        problem = kernel.problem(inv)

        def tell(event: str, **data: object) -> None:
            if self._listeners and not silent:
                self.tell(event, problem, **data)

        return Request(inv=inv, kernel=kernel, problem=problem, policy=self.policy, tell=tell)


# -------------------------------------------------------------------------------------------- for the length of a block


@dataclass(frozen=True, slots=True)
class _PolicyOverride:
    selector: ConfigSelectorChain[Any]
    updates: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class _ForwardOnly:
    """Marks that backward passes are not measured."""


def policy_override(selector: ConfigSelectorChain[Any], **updates: Any) -> Scope:
    """Change some of a selector's policies inside a with-block, for this thread or task only."""
    if not isinstance(selector, ConfigSelectorChain):
        raise DefinitionError(
            f"policy_override needs a selector, such as kernel.selector; got {type(selector).__name__}"
        )
    selector.policy.updated(updates)  # a wrong name or value is an error here, not at some later call
    return Scope(_PolicyOverride(selector, tuple(updates.items())))


def forward_autotune_only() -> Scope:
    """Measure forward passes only inside a with-block, whatever `validate_backward` says."""
    return Scope(_ForwardOnly())
