"""The tiers in order: the only place that knows it."""

from __future__ import annotations

import itertools
import math
import os
import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from tunebook._base.environment_variables import mode
from tunebook._base.errors import DefinitionError, NoConfig, TuningFailed
from tunebook._kernel.policy import AutotunePolicy
from tunebook._measure.stopwatch import Stopwatch
from tunebook._memo.answer_memo import MEMO
from tunebook._memo.context_stack import Scope, scoped
from tunebook._selection.agreement_hook import LocalTiers, tiers_of
from tunebook._selection.autotune_tier import AnyTuner, AutotuneTier
from tunebook._selection.deferred_tier import DeferredTier
from tunebook._selection.tiers import (
    FirstCandidate,
    Found,
    Heuristics,
    Memory,
    Overlays,
    Override,
    Persistent,
    Pinned,
    Request,
    Skipped,
    Tier,
)
from tunebook._selection.trusted_entries import EntryGuard
from tunebook._tuning.job import Budget, Step, Tuned, parse_budget
from tunebook._tuning.tuner import Tuner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tunebook._base.vocabulary import Problem, StrategyLike
    from tunebook._kernel.kernel import Invocation, Kernel
    from tunebook._memo.memory import ConfigCache
    from tunebook._selection.persistent_cache import PersistentCache
    from tunebook._tuning.in_call_session import InCallSession
    from tunebook._tuning.reverify import Verified
    from tunebook.search import Nearest

C = TypeVar("C")


class Selection(NamedTuple, Generic[C]):
    """A configuration, the tier that gave it, and what the tiers before it said.

    `transient` says that the same call may get another answer soon, though nothing changes in this process.
    `exploration` may run the call in place of who asked, to learn from it; it is not obliged to use `config`.
    `guess` says what a configuration that was not measured for this problem is taken from, and how sure that is.
    """

    problem: Problem
    config: C
    source: str
    event: str
    level: str | None
    remember: bool
    tried: tuple[tuple[str, str], ...]
    transient: bool = False
    exploration: InCallSession[C] | None = None
    guess: Nearest | None = None


class NoSelection(NamedTuple):
    """No tier had an answer; `cause` is the first error that a tier met."""

    problem: Problem
    tried: tuple[tuple[str, str], ...]
    cause: Exception | None = None


def event_data(problem: Problem, *, level: str | None = None, **data: Any) -> dict[str, Any]:
    """Return what a listener is told with an event."""
    told = {"device": problem.device, "op_id": problem.op, "call_key": problem.call_key, **data}
    return told if level is None else {**told, "level": level}


def _ask_in_order(request: Request[C], sources: Sequence[Tier[C]]) -> Selection[C] | NoSelection:
    tried: list[tuple[str, str]] = []
    cause: Exception | None = None
    transient = False
    exploration: InCallSession[C] | None = None
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
                exploration=exploration,
                guess=answer.guess,
            )
        tried.append((source.name, answer.reason))
        cause = cause or answer.error
        transient = transient or answer.transient
        exploration = exploration or answer.exploration
    return NoSelection(problem=request.problem, tried=tuple(tried), cause=cause)


def _remedy(request: Request[Any]) -> str:
    """Return what to do about a call without an answer, where no policy is the reason."""
    if request.mode not in {"frozen", "replay"}:
        return ""
    return (
        f"TUNEBOOK_MODE={request.mode} tunes nothing: tune this call before, in a run without it or with "
        "`tunebook tune`, or pass a configuration with the call."
    )


class _Preview(Generic[C]):
    """Stands in for tuning where nothing may run: it says what tuning would do."""

    name: Final = DeferredTier.name

    def __init__(self, tier: DeferredTier[C]) -> None:
        self._tier = tier

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        return self._tier.preview(request)


def _checked_weights(calls: int, weights: Sequence[float] | None) -> Sequence[float]:
    if not calls:
        raise DefinitionError("there is no call to tune for; give at least one tuple of arguments")
    if weights is None:
        return [1.0] * calls
    if len(weights) != calls or not all(0 < weight < math.inf for weight in weights):
        raise DefinitionError(f"weights={list(weights)!r}: write a positive number for each of the {calls} calls")
    return weights


@contextmanager
def _failure_told(*requests: Request[Any]) -> Iterator[None]:
    """Tell that a tuning which somebody asked for has ended, where it ends in an error."""
    try:
        yield
    except TuningFailed as error:
        for request in requests:
            request.tell("autotune_finish", cfg=None, error=error, called=False)
        raise


class Everywhere:
    """Who is told about the events of every selector of the process. One per process: `EVERYWHERE`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.listeners: tuple[Callable[..., None], ...] = ()

    def renew_lock(self) -> None:
        """Take a new lock, in a forked child."""
        self._lock = threading.Lock()

    def listen(self, listener: Callable[..., None]) -> None:
        """Tell one more listener from now on; twice the same is told once."""
        with self._lock:
            if listener not in self.listeners:
                self.listeners = (*self.listeners, listener)
        MEMO.invalidate()

    def unlisten(self, listener: Callable[..., None]) -> None:
        """Tell a listener no more."""
        with self._lock:
            self.listeners = tuple(each for each in self.listeners if each != listener)
        MEMO.invalidate()


EVERYWHERE: Final = Everywhere()
os.register_at_fork(after_in_child=EVERYWHERE.renew_lock)
_numbers: Final = itertools.count()


class ConfigSelectorChain(Generic[C]):
    """Chooses a configuration for a call: override, overlay, memory, persistent, autotune, heuristics, error.

    `on_event(event, **data)` is called with `override`, `overlay_hit`, `pinned`, `cache_hit` (with `level` "memory" or
    "persistent"), `autotune_start` (with `verifying`, True if only the finalists of an entry are measured again),
    `autotune_finish`, `disturbed` (with `reasons` and what was `measured`, if an earlier `cfg` stays), `nearest` (with
    `confidence`, and the call key that is `near`), `heuristics` or `error`; data holds `device`, `op_id`, `call_key`
    and `cfg`, and `called` is False where no call got the answer. Tuning in the background is told from its thread.
    Safe to share between threads.
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
        self.number: Final = next(_numbers)
        self.cache: Final = cache
        self.persistent: Final = persistent
        self.book: Final = None if persistent is None else EntryGuard(persistent)
        self._policy = policy or AutotunePolicy()
        self._listeners: tuple[Callable[..., None], ...] = () if on_event is None else (on_event,)
        self._listeners_lock = threading.Lock()
        self._memory = Memory(cache)
        self._autotune = AutotuneTier(tuner, self.book, persist=persist_autotune, forbid_again=forbid_reautotune)
        stopwatch = tuner.stopwatch if isinstance(tuner, Tuner) else Stopwatch()
        self._not_blocking = DeferredTier(self._autotune, self._memory, stopwatch)
        # What is set for calls of this process is not for the other processes of a job; the rest they agree on.
        self._own: Final[tuple[Tier[C], ...]] = (Override(), Overlays(), Pinned())
        self._alone: Final[LocalTiers[C]] = LocalTiers(
            known=(self._memory, Persistent(self.book)),
            tuning=self._not_blocking,
            autotune=self._autotune,
            guesses=(Heuristics(self.book), FirstCandidate()),
        )
        self.sources: Final[tuple[Tier[C], ...]] = (
            *self._own,
            *self._alone.known,
            self._not_blocking,
            *self._alone.guesses,
        )

    def choose(self, inv: Invocation[C, Any], kernel: Kernel[C, Any]) -> C:
        """Return the configuration for a call; `NoConfig` says what every tier answered."""
        return self.select(inv, kernel).config

    def select(self, inv: Invocation[C, Any], kernel: Kernel[C, Any], problem: Problem | None = None) -> Selection[C]:
        """Return the configuration for a call, and where it came from; `problem` is the call's, where it is known."""
        request = self._request(inv, kernel, problem)
        selection = _ask_in_order(request, tiers_of(self._own, self._alone) or self.sources)
        if isinstance(selection, NoSelection):
            request.tell("error", cfg=None, tried=selection.tried)
            raise NoConfig(selection.problem.op, selection.tried, _remedy(request)) from selection.cause
        if selection.remember:
            self._memory.remember(request, selection.config)
        request.tell(selection.event, cfg=selection.config, level=selection.level)
        return selection

    def preview(
        self, inv: Invocation[C, Any], kernel: Kernel[C, Any], problem: Problem | None = None
    ) -> Selection[C] | NoSelection:
        """Return what `select` would answer, but tune nothing, remember nothing and tell nobody."""
        tiers = tiers_of(self._own, self._alone, silent=True) or self.sources
        sources = [_Preview(s) if isinstance(s, DeferredTier) else s for s in tiers]
        return _ask_in_order(self._request(inv, kernel, problem, silent=True), sources)

    def tune(
        self,
        inv: Invocation[C, Any],
        kernel: Kernel[C, Any],
        *,
        budget: Budget | float | str | None = None,
        on_step: Callable[[Step], None] | None = None,
        strategy: StrategyLike | None = None,
    ) -> Tuned[C]:
        """Tune a call now and use the result from now on; what was measured before is not measured again."""
        request = replace(self._tuning_request(inv, kernel), strategy=strategy)
        with _failure_told(request):
            tuned = self._autotune.tune(request, budget=parse_budget(budget), on_step=on_step)
        self._memory.remember(request, tuned.config)
        request.tell("autotune_finish", cfg=tuned.config, called=False)
        return tuned

    def tune_together(
        self,
        invs: Sequence[Invocation[C, Any]],
        kernel: Kernel[C, Any],
        weights: Sequence[float] | None = None,
        *,
        budget: Budget | float | str | None = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> Tuned[C]:
        """Find the one configuration that is best for several calls on the whole, and use it for each from now on."""
        requests = [self._tuning_request(inv, kernel) for inv in invs]
        shares = _checked_weights(len(invs), weights)
        with _failure_told(*requests):
            tuned = self._autotune.tune_together(requests, shares, budget=parse_budget(budget), on_step=on_step)
        for request in requests:
            self._memory.remember(request, tuned.config)
            request.tell("autotune_finish", cfg=tuned.config, called=False)
        return tuned

    def verify(
        self,
        inv: Invocation[C, Any],
        kernel: Kernel[C, Any],
        *,
        budget: Budget | float | str | None = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> Verified[C]:
        """Measure again those that could have won a call, and keep its choice if it holds; else tune it."""
        request = self._tuning_request(inv, kernel)
        with _failure_told(request):
            verified = self._autotune.verify(request, budget=parse_budget(budget), on_step=on_step)
        self._memory.remember(request, verified.config)
        request.tell("autotune_finish", cfg=verified.config, called=False)
        return verified

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
        MEMO.invalidate()

    @property
    def listeners(self) -> tuple[Callable[..., None], ...]:
        """Who is told about events."""
        return self._listeners + EVERYWHERE.listeners

    def listen(self, listener: Callable[..., None]) -> None:
        """Tell one more listener about events from now on."""
        with self._listeners_lock:
            self._listeners = (*self._listeners, listener)
        MEMO.invalidate()

    def _tuning_request(self, inv: Invocation[C, Any], kernel: Kernel[C, Any]) -> Request[C]:
        request = self._request(inv, kernel)
        if request.mode != "normal":
            raise DefinitionError(f"TUNEBOOK_MODE={request.mode} tunes nothing; unset it to tune {request.problem.op}")
        return request

    def _request(
        self, inv: Invocation[C, Any], kernel: Kernel[C, Any], known: Problem | None = None, *, silent: bool = False
    ) -> Request[C]:
        problem = known or kernel.problem(inv)

        def tell(event: str, **data: Any) -> None:
            if not silent and (listeners := self.listeners):
                told = event_data(problem, **data)
                for listener in listeners:
                    listener(event, **told)

        heard = bool(self.listeners) and not silent
        return Request(inv=inv, kernel=kernel, problem=problem, policy=self.policy, tell=tell, heard=heard, mode=mode())


# -------------------------------------------------------------------------------------------- for the length of a block


class _PolicyOverride(NamedTuple):
    selector: ConfigSelectorChain[Any]
    updates: tuple[tuple[str, Any], ...]

    def content(self) -> object:
        """Return what is equal for overrides that do the same."""
        return self.selector.number, self.updates


def policy_override(selector: ConfigSelectorChain[Any], **updates: Any) -> Scope:
    """Change some of a selector's policies inside a with-block, for this thread or task only."""
    if not isinstance(selector, ConfigSelectorChain):
        raise DefinitionError(
            f"policy_override needs a selector, such as kernel.selector; got {type(selector).__name__}"
        )
    selector.policy.updated(updates)  # a wrong name or value is an error here, not at some later call
    return Scope(_PolicyOverride(selector, tuple(updates.items())))
