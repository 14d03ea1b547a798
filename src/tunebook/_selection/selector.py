"""The order of the tiers, and the selector that asks them."""

from __future__ import annotations

import itertools
import math
import os
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, Protocol, TypeVar, get_args

from tunebook._arrays.describe import is_traced
from tunebook._base.environment_variables import mode, run_options, trust_setting
from tunebook._base.errors import DefinitionError, NoConfig, NoGradient, TuningFailed, hide_own_frames, warn_once
from tunebook._base.vocabulary import Combine
from tunebook._kernel.policy import AutotunePolicy
from tunebook._memo.answer_memo import MEMO
from tunebook._memo.context_stack import Scope, scoped
from tunebook._selection.autotune_tier import WOULD_TUNE, AutotuneTier
from tunebook._selection.listeners import EVERYWHERE
from tunebook._selection.recording import how_to_give_values
from tunebook._selection.selector_settings import SelectorSettings, as_policy
from tunebook._selection.tiers import (
    NO_CANDIDATES,
    AnyCandidate,
    AnyTuner,
    FirstCandidate,
    Found,
    Heuristics,
    Memory,
    OfflineEntry,
    Overlays,
    Override,
    Persistent,
    Pinned,
    Request,
    Session,
    Skipped,
    Teller,
    Tier,
)
from tunebook._selection.tuning_watch import FIX_OUTPUT, is_wrong, remedy_for, start_log
from tunebook._tuning.job import Budget, Step, Tuned, parse_budget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tunebook._base.vocabulary import Event, Problem, StrategyLike, Trust
    from tunebook._kernel.kernel import Invocation, Kernel
    from tunebook._kernel.measure import Measure
    from tunebook._kernel.policy import MissFallback
    from tunebook._memo.answer_memo import ConfigCache
    from tunebook._selection.persistent_cache import PersistentCache
    from tunebook._tuning.in_call_session import InCallSession
    from tunebook._tuning.live_session import LiveSession
    from tunebook._tuning.reverify import Verified
    from tunebook.search import Nearest, Prediction


if TYPE_CHECKING:
    from typing_extensions import TypeVar as DefaultTypeVar

    Out = DefaultTypeVar("Out", default=Any)
else:
    Out = TypeVar("Out")
C = TypeVar("C")
R = TypeVar("R", bound="Tuned[Any] | Verified[Any]")


class Selection(NamedTuple, Generic[C]):
    """A configuration, the tier that gave it, and the answers of the tiers before it.

    `transient`: the same call may get another answer soon. `exploration` may run the call in place of the caller, to
    learn from it. `guess` is the entry of another problem that the configuration is taken from, with how sure that is.
    `trust` is the rung of an entry that was not made for this very call here, and why it is on that rung.
    `cause` is the first error that a tier before it met.
    """

    problem: Problem
    config: C
    source: str
    event: Event
    level: str | None
    remember: bool
    tried: tuple[tuple[str, str], ...]
    transient: bool = False
    exploration: Session | None = None
    guess: Nearest | Prediction | None = None
    trust: tuple[Trust, str] | None = None
    cause: Exception | None = None

    @property
    def would_tune(self) -> bool:
        """Whether this is a preview of a call that would be tuned now."""
        return any(said.startswith(WOULD_TUNE) for _, said in self.tried)


class NoSelection(NamedTuple):
    """No tier had an answer; `cause` is the first error that a tier met."""

    problem: Problem
    tried: tuple[tuple[str, str], ...]
    cause: Exception | None = None


def _first_answer(
    problem: Problem, answers: Iterable[tuple[str, Found[C] | Skipped | None]]
) -> Selection[C] | NoSelection:
    """Return the first configuration. `answers` is lazy: a tier is asked only if all tiers before it had none."""
    skipped: list[tuple[str, Skipped]] = []
    for source, answer in answers:
        if isinstance(answer, Found):
            return Selection(
                problem=problem,
                config=answer.config,
                source=source,
                event=answer.event,
                level=answer.level,
                remember=answer.remember,
                tried=tuple((name, each.reason) for name, each in skipped),
                transient=any(each.transient for _, each in skipped),
                exploration=answer.exploration or next((e.exploration for _, e in skipped if e.exploration), None),
                guess=answer.guess,
                trust=answer.trust,
                cause=next((each.error for _, each in skipped if each.error), None),
            )
        if answer is not None:
            skipped.append((source, answer))
    cause = next((each.error for _, each in skipped if each.error), None)
    return NoSelection(problem, tuple((name, each.reason) for name, each in skipped), cause)


def select_offline(entry: OfflineEntry) -> Selection[Any] | NoSelection:
    """Return the answer that a new process would find in a book, without the kernel's program."""
    answers = ((tier.name, tier.ask_offline(entry)) for tier in ORDER)
    return _first_answer(entry.problem, ((getattr(answer, "level", None) or name, answer) for name, answer in answers))


# --------------------------------------------------------------------------- the other processes of a job (see `fleet`)


class LocalTiers(NamedTuple, Generic[C]):
    """The tiers by which a process would answer without the other ranks of its job."""

    known: tuple[Tier[C], ...]
    autotune: AutotuneTier[C]
    guesses: tuple[Tier[C], ...]


class Agreement(Protocol):
    """One answer per problem for all processes of a job; safe to share between threads."""

    def ask(self, request: Request[C], alone: LocalTiers[C]) -> Found[C] | Skipped:
        """Return the answer of all processes; without one, this process guesses, as the others do."""

    def known(self, request: Request[C]) -> Found[C] | Skipped:
        """Return the answer of all processes, if this one has learned it already; no other process is asked."""


_agreement: Agreement | None = None


def agree_by(agreement: Agreement | None) -> None:
    """Take answers from an agreement from now on, except for calls that set their own; None ends that."""
    global _agreement  # noqa: PLW0603 - a process is in one job at most
    _agreement = agreement
    MEMO.invalidate()


def agreement() -> Agreement | None:
    """Return the agreement that this process answers by, or None if it answers alone."""
    return _agreement


# A forked child (an isolated candidate, a data loader) is not a rank, and its parent's connections are not its own.
os.register_at_fork(after_in_child=lambda: agree_by(None))


class AgreementTier(Tier[C]):
    """Answers for the tiers that need agreement: ranks with different programs hang, or compute different things."""

    name = "agreement"
    in_jobs_only = True

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        return Skipped("none") if _agreement is None else _agreement.ask(request, local_tiers(self._parts.tiers))

    def preview(self, request: Request[C]) -> Found[C] | Skipped:
        return Skipped("none") if _agreement is None else _agreement.known(request)


def asked_tiers(tiers: tuple[Tier[C], ...], *, silent: bool = False, alone: bool = False) -> tuple[Tier[C], ...]:
    """Return the tiers that answer a call, alone or in a job; `silent`: the tiers that need agreement too."""
    if _agreement is None or alone:
        return tuple(tier for tier in tiers if not tier.in_jobs_only)
    return tuple(tier for tier in tiers if silent or not tier.needs_agreement)


def local_tiers(tiers: tuple[Tier[C], ...]) -> LocalTiers[C]:
    """Return the tiers of a selector, by their parts in an agreement."""
    (autotune,) = (tier for tier in tiers if isinstance(tier, AutotuneTier))
    known = tuple(tier for tier in tiers if tier.needs_agreement and not tier.runs_candidates)
    return LocalTiers(known, autotune, tuple(tier for tier in tiers if tier.guesses))


# The order of all tiers, and its only place. A tier answers if all tiers before it have no answer.
ORDER: Final[tuple[type[Tier[Any]], ...]] = (
    Override, Overlays, Pinned, AgreementTier, Memory, Persistent, AutotuneTier, Heuristics, FirstCandidate,
    AnyCandidate,
)  # fmt: skip


_numbers: Final = itertools.count()


def _remedy(request: Request[Any], selection: NoSelection) -> str:
    """Return how to get a configuration for a call that has none; empty for the usual ways."""
    if isinstance(selection.cause, TuningFailed):
        return remedy_for(selection.cause)
    if any(said.startswith(NO_CANDIDATES) for _, said in selection.tried):
        return "Give the kernel a candidate, or pass a configuration with the call."
    if request.mode not in {"frozen", "replay"}:
        return ""
    before = "tune this call before, in a run without it or with `tunebook tune`"
    return f"TUNEBOOK_MODE={request.mode} tunes nothing: {before}, or pass a configuration with the call."


def _warn_of_rejection(request: Request[C], selection: Selection[C], cause: Exception) -> None:
    """Warn once that a kernel runs with a configuration that tuning rejected; raise if the policy is strict."""
    behind = request.policy.cache_miss_fallback == "background"
    if not isinstance(cause, TuningFailed) or (behind and cause.on_made_up):
        return  # the background has warned of it
    op = request.problem.op
    if request.policy.strict:
        request.tell("error", cfg=None, tried=selection.tried, reason="tuning_failed")
        raise TuningFailed(f"{op}: {cause.message}", cause.exceptions, cause.measurements)
    on = f", on made-up arguments. {how_to_give_values(request.kernel)}" if cause.on_made_up else "."
    if not behind:
        tried, why, name = len(cause.measurements), cause.summary, op.partition("@")[0].rpartition(".")[2]
        state = "which failed too." if tried else "whose output was not checked."
        if tried and all(map(is_wrong, cause.measurements)):
            why = f"all {tried} candidates gave a wrong output: {cause.reason}"
            state = f"whose output is wrong too. {FIX_OUTPUT}."
        warn_once(
            "rejected",
            op,
            f"{op} is not tuned: {why}{on} The call runs with the heuristic's {selection.config!r}, {state} "
            f"{name}.explain(...) lists every reason; AutotunePolicy(strict=True) raises instead.",
        )


class ConfigSelectorChain(SelectorSettings[C], Generic[C, Out]):
    """Chooses a configuration for a call: override, overlay, memory, persistent, autotune, heuristics, error.

    Without a `tuner`, `Tuner()` tunes; `tuner=False` tunes nothing. `persist_autotune=False` writes no results into
    `persistent`. `forbid_reautotune` answers a call that was tuned before with that result, also after `cache.clear()`.
    These, `cache`, `policy` and `on_event` are attributes. A new value counts from the next call on.

    `on_event(event, **data)` is called with the events of `tunebook._base.vocabulary.Event`; data holds `device`,
    `op_id`, `call_key` and `cfg`, and `called` is False where no call got the answer. Tuning in the background is told
    from its thread. Safe to share between threads.
    """

    __slots__ = ("_added", "_autotune", "_memory", "_policy", "_tiers_alone", "number", "tiers")

    def __init__(
        self,
        cache: ConfigCache[C],
        policy: AutotunePolicy | MissFallback | None = None,
        tuner: AnyTuner | Literal[False] | None = None,
        persistent: PersistentCache[C] | None = None,
        persist_autotune: bool = True,  # noqa: FBT001, FBT002 - positional in the contract
        on_event: Callable[..., None] | None = None,
        forbid_reautotune: bool = True,  # noqa: FBT001, FBT002 - positional too
    ) -> None:
        self.number: Final = next(_numbers)
        super().__init__(cache, tuner, persistent, on_event, persist=persist_autotune, forbid_again=forbid_reautotune)
        self._added: Final[list[Callable[..., None]]] = []
        self.policy = policy or AutotunePolicy()
        parts = self._parts
        self.tiers: Final[tuple[Tier[C], ...]] = tuple(kind(parts) for kind in ORDER)
        parts.tiers = self.tiers
        self._tiers_alone: Final = asked_tiers(
            self.tiers, alone=True
        )  # once: a call inside an overlay asks them each time
        (self._memory,) = (tier for tier in self.tiers if isinstance(tier, Memory))
        self._autotune: Final = local_tiers(self.tiers).autotune
        if self.number == 0:
            start_log()
            if run_options() is not None:  # in a process of `tunebook run`
                import_module("tunebook._cli._child").report(EVERYWHERE)

    if not TYPE_CHECKING:

        def __class_getitem__(cls, parameters: Any) -> Any:
            given = parameters if isinstance(parameters, tuple) else (parameters, Any)  # `Out` may be left out
            return super().__class_getitem__(given)

    def choose(self, inv: Invocation[C, Any], kernel: Kernel[C, Any]) -> C:
        """Return the configuration for a call; `NoConfig` has the answers of all tiers."""
        return self.select(inv, kernel).config

    def select(self, inv: Invocation[C, Any], kernel: Kernel[C, Any], problem: Problem | None = None) -> Selection[C]:
        """Return the configuration for a call, and where it came from; `problem` is the call's, where it is known."""
        request = self.request(inv, kernel, problem)
        tiers = self._tiers_alone if _agreement is None else asked_tiers(self.tiers)
        with request.tell, request.tell:
            selection = _first_answer(request.problem, ((tier.name, tier.ask(request)) for tier in tiers))
            if isinstance(selection, NoSelection):
                request.tell("error", cfg=None, tried=selection.tried, reason="no_config")
                if selection.cause is not None:
                    hide_own_frames(selection.cause)
                raise NoConfig(selection.problem.op, selection.tried, _remedy(request, selection)) from selection.cause
            if selection.cause is not None:
                _warn_of_rejection(request, selection, selection.cause)
                # A trace has no values to tune on. The same call with values of its own is tuned, if they matter.
                matter = not isinstance(selection.cause, NoGradient)
                selection = selection._replace(transient=selection.transient or (matter and is_traced(inv)))
            if selection.remember:
                self._memory.remember(request, selection.config)
            rung = {} if selection.trust is None else {"trust": selection.trust[0]}
            request.tell(selection.event, cfg=selection.config, level=selection.level, **rung)
        return selection

    def preview(
        self, inv: Invocation[C, Any], kernel: Kernel[C, Any], problem: Problem | None = None
    ) -> Selection[C] | NoSelection:
        """Return the answer of `select`, but tune nothing, remember nothing and tell nobody."""
        request = self.request(inv, kernel, problem, silent=True)
        tiers = asked_tiers(self.tiers, silent=True)
        return _first_answer(request.problem, ((tier.name, tier.preview(request)) for tier in tiers))

    @property
    def pending(self) -> tuple[InCallSession[C] | LiveSession[C], ...]:
        """The tunings that go on in the user's calls."""
        return tuple(self._autotune.deferred.explorations.values())

    def tune(
        self,
        inv: Invocation[C, Any],
        kernel: Kernel[C, Any],
        *,
        budget: Budget | float | str | None = None,
        on_step: Callable[[Step], None] | None = None,
        strategy: StrategyLike | None = None,
        measure: Measure | None = None,
        again: bool = False,
    ) -> Tuned[C]:
        """Tune a call now and use the result from now on; known measurements are reused, unless `again`."""
        request = replace(self._tuning_request(inv, kernel), strategy=strategy, measure=measure, again=again)
        return self._finish(partial(self._autotune.tune, request), [request], budget, on_step)

    def tune_together(
        self,
        invs: Sequence[Invocation[C, Any]],
        kernel: Kernel[C, Any],
        weights: Sequence[float] | None = None,
        *,
        combine: Combine = "mean",
        budget: Budget | float | str | None = None,
        on_step: Callable[[Step], None] | None = None,
        again: bool = False,
    ) -> Tuned[C]:
        """Find the configuration that is best for several calls on the whole, and use it for each from now on."""
        if combine not in get_args(Combine):
            raise DefinitionError(f"combine={combine!r}: choose one of {', '.join(map(repr, get_args(Combine)))}")
        if combine == "max" and weights is not None:
            raise DefinitionError('combine="max" takes no weights: the worst call counts; use "relative" with weights')
        requests = [replace(self._tuning_request(inv, kernel), again=again) for inv in invs]
        shares = [1.0] * len(invs) if weights is None else weights
        if not invs:
            raise DefinitionError("calls to tune for are missing; give at least one tuple of arguments")
        if len(shares) != len(invs) or not all(0 < share < math.inf for share in shares):
            raise DefinitionError(f"weights={[*shares]!r}: write a positive number for each of the {len(invs)} calls")
        return self._finish(partial(self._autotune.tune_together, requests, shares, combine), requests, budget, on_step)

    def verify(
        self,
        inv: Invocation[C, Any],
        kernel: Kernel[C, Any],
        *,
        budget: Budget | float | str | None = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> Verified[C]:
        """Measure the finalists of a call again, and keep its choice if it holds; else tune it."""
        request = self._tuning_request(inv, kernel)
        return self._finish(partial(self._autotune.verify, request), [request], budget, on_step)

    def _finish(
        self,
        work: Callable[..., R],
        requests: Sequence[Request[C]],
        budget: Budget | float | str | None,
        on_step: Callable[[Step], None] | None,
    ) -> R:
        """Do the work of a tuning on demand, remember its configuration, and tell the listeners how it ended."""
        with ExitStack() as told:
            for request in (*requests, *requests):
                told.enter_context(request.tell)
            try:
                found = work(budget=parse_budget(budget), on_step=on_step)
            except KeyboardInterrupt as error:
                raise hide_own_frames(error) from None
            except TuningFailed as error:
                for request in requests:
                    request.tell("autotune_finish", cfg=None, error=error, called=False)
                raise hide_own_frames(error) from error.__cause__
            for request in requests:
                if not self._waits_for_a_caller(request):
                    self._memory.remember(request, found.config)
                request.tell("autotune_finish", cfg=found.config, called=False)
        return found

    def _waits_for_a_caller(self, request: Request[C]) -> bool:
        """Whether a tuning on made-up arguments left an outdated entry, which a call verifies on its own arguments."""
        return (
            request.inv.values_from != "call" and getattr(self._parts.book.find(request), "outdated", None) is not None
        )

    @property
    def policy(self) -> AutotunePolicy:
        """The policy in this thread or task."""
        policy = self._policy
        # Outermost first, so that an inner block overrides an outer block.
        for override in reversed([each for each in scoped(_PolicyOverride) if each.selector is self]):
            policy = policy.updated(dict(override.updates))
        return policy

    @policy.setter
    def policy(self, policy: AutotunePolicy | MissFallback) -> None:
        self._policy = as_policy(policy)
        MEMO.invalidate()

    @property
    def listeners(self) -> list[Callable[..., None]]:
        """The listeners to the events of this selector."""
        mine = self._added if self._on_event is None else [self._on_event, *self._added]
        return mine + EVERYWHERE.listeners

    def listen(self, listener: Callable[..., None]) -> None:
        """Tell one more listener about events from now on."""
        self._added.append(listener)
        MEMO.invalidate()

    def _tuning_request(self, inv: Invocation[C, Any], kernel: Kernel[C, Any]) -> Request[C]:
        request = self.request(inv, kernel)
        if request.mode != "normal":
            raise DefinitionError(f"TUNEBOOK_MODE={request.mode} tunes nothing; unset it to tune {request.problem.op}")
        return replace(request, on_demand=True)

    def request(
        self, inv: Invocation[C, Any], kernel: Kernel[C, Any], known: Problem | None = None, *, silent: bool = False
    ) -> Request[C]:
        """Return a call as the tiers get it, under the policy of this thread or task."""
        trust_setting()  # an invalid value is an error also where an exact entry, or a pin, answers
        problem = known or kernel.problem(inv)
        # The method and not the invocation, which holds the caller's arrays.
        tell = Teller(problem, list if silent else lambda: self.listeners + EVERYWHERE.rare, inv.method)
        heard = bool(self.listeners or EVERYWHERE.rare) and not silent
        return Request(
            inv=inv,
            kernel=kernel,
            problem=problem,
            policy=self.policy,
            tell=tell,
            heard=heard,
            silent=silent,
            mode=mode(),
        )


# -------------------------------------------------------------------------------------------- for the length of a block


class _PolicyOverride(NamedTuple):
    selector: ConfigSelectorChain[Any]
    updates: tuple[tuple[str, Any], ...]

    def content(self) -> object:
        """Return a value that is equal for overrides with the same effect."""
        return self.selector.number, self.updates


class policy_override(Scope):  # noqa: N801 - it is used like a function
    """Change some of a selector's policies inside a with-block, for this thread or task only."""

    __slots__ = ("selector", "updates")

    def __init__(self, selector: ConfigSelectorChain[Any], **updates: Any) -> None:
        if not isinstance(selector, ConfigSelectorChain):
            got = type(selector).__name__
            raise DefinitionError(f"policy_override needs a selector, for example kernel.selector; got {got}")
        selector.policy.updated(updates)  # a wrong name or value is an error here, not at some later call
        self.selector: Final = selector
        self.updates: Final = MappingProxyType(updates)
        super().__init__(_PolicyOverride(selector, tuple(updates.items())))
