"""The autotune tier for calls that must not wait for it: tuning behind them, or by them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from tunebook._base.config_codec import encode, fingerprint_of
from tunebook._base.errors import CodecError, TuningFailed, warn_once
from tunebook._memo.answer_memo import EPOCH, MEMO
from tunebook._selection.autotune_tier import AutotuneTier
from tunebook._selection.background_queue import BACKGROUND, Background
from tunebook._selection.recording import abstract, concrete, opaque_part, recordings
from tunebook._selection.tiers import Found, Memory, Request, Skipped, key_of
from tunebook._tuning.plan import candidates_to_try, is_forward_only, search_for

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from tunebook._base.vocabulary import Problem
    from tunebook._measure.stopwatch import Stopwatch
    from tunebook._tuning.in_call_session import InCallSession
    from tunebook._tuning.job import Tuned

C = TypeVar("C")

# An exploration holds no arrays, about 20 kB for 60 candidates. Beyond this many, the oldest is given up: a program
# with ever new shapes does not come back to it.
_EXPLORATIONS: Final = 256
_SEARCHED_IN_CALLS: Final = 64
_STATES: Final = {"running": "running in the background", "waiting": "waiting for its turn in the background"}


class DeferredTier(Generic[C]):
    """Answers for the tuning that goes on without the caller, and tunes in the call where the policy says so.

    That is also where there is nothing to answer with meanwhile: no heuristic, or none allowed.
    """

    name: Final = AutotuneTier.name

    def __init__(
        self, autotune: AutotuneTier[C], memory: Memory[C], stopwatch: Stopwatch, queue: Background = BACKGROUND
    ) -> None:
        self._autotune, self._memory = autotune, memory
        self._stopwatch = stopwatch
        self._queue = queue
        self._explorations: dict[tuple[Problem, str], InCallSession[C]] = {}

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        answer = self.at_once(request)
        return self._autotune.ask(request) if answer is None else answer

    def at_once(self, request: Request[C]) -> Found[C] | Skipped | None:
        """Return the answer that the caller does not wait for; None if the call has to be tuned now."""
        known = self._under_way(request) or self._autotune.known(request)
        if known is not None:
            return known
        served = self._served(request)
        return None if served is None else self._put_off(request, served)

    def preview(self, request: Request[C]) -> Found[C] | Skipped:
        """Return what `ask` would say, without any tuning."""
        known = self._under_way(request) or self._autotune.known(request)
        if known is not None:
            return known
        if self._served(request) is None:
            return Skipped("would tune now")
        behind = request.policy.cache_miss_fallback == "background"
        return _obstacle(request) or Skipped(
            "would tune in the background" if behind else "would try one candidate per call"
        )

    def _under_way(self, request: Request[C]) -> Skipped | None:
        policy = request.policy
        if not (policy.allow_autotune and policy.allow_heuristics) or recordings() or request.mode != "normal":
            return None
        if policy.cache_miss_fallback == "background":
            state = self._queue.state(self._key(request))
            return None if state is None else Skipped(_STATES[state])
        if policy.cache_miss_fallback == "incremental":
            exploration = self._explorations.get(key_of(request))
            return None if exploration is None else Skipped(str(exploration), exploration=exploration)
        return None

    def _served(self, request: Request[C]) -> C | None:
        """Return what answers the call while it is tuned otherwise; None if it is tuned in the call."""
        if request.policy.cache_miss_fallback == "autotune" or not request.policy.allow_heuristics:
            return None
        return request.kernel.heuristic(request.inv)

    def _put_off(self, request: Request[C], served: C) -> Skipped:
        obstacle = _obstacle(request)
        if obstacle is not None:
            warn_once("not tuned", request.problem.op, f"{request.problem.op} is not tuned: {obstacle.reason}")
            return obstacle
        if request.policy.cache_miss_fallback == "incremental":
            return self._explore(request, served)
        if self._submit(_detached(request), served, self._tune):
            return Skipped("queued to be tuned in the background")
        return Skipped("the background takes no more for now", transient=True)

    def _explore(self, request: Request[C], served: C) -> Skipped:
        from tunebook._tuning.in_call_session import InCallSession  # noqa: PLC0415 - only who explores needs it

        for oldest in list(self._explorations)[: 1 - _EXPLORATIONS]:
            self._explorations.pop(oldest, None)
        try:
            configs = [served, *_first_group(request)]
        except TuningFailed as error:
            self._autotune.remember_failure(request, error)
            return Skipped(str(error), error)
        later = _detached(request)
        mine = InCallSession(
            request.inv,
            later,
            configs,
            slowdown=request.policy.incremental_slowdown,
            stopwatch=self._stopwatch,
            on_found=lambda tuned: self._submit(later, served, partial(self._adopt, tuned)),
        )
        exploration = self._explorations.setdefault(key_of(request), mine)
        if exploration is mine:
            request.tell("autotune_start", candidates=mine.candidates, verifying=False)
        return Skipped(str(exploration), exploration=exploration)

    # ------------------------------------------------------------------------------------------------- in the worker

    def _key(self, request: Request[C]) -> Hashable:
        return self, *key_of(request)

    def _submit(self, request: Request[C], served: C, find: Callable[[Request[C]], Found[C] | Skipped]) -> bool:
        return self._queue.submit(self._key(request), _DeferredJob(self, request, served, find))

    def _tune(self, request: Request[C]) -> Found[C] | Skipped:
        args, kwargs = concrete((request.inv.args, dict(request.inv.kwargs)))
        return self._autotune.ask(replace(request, inv=replace(request.inv, args=args, kwargs=kwargs)))

    def _adopt(self, tuned: Tuned[C], request: Request[C]) -> Found[C] | Skipped:
        return self._autotune.adopt(request, tuned)

    def finish(
        self, request: Request[C], served: C, find: Callable[[Request[C]], Found[C] | Skipped], *, patient: bool
    ) -> bool:
        """Find the configuration of a call and let it take effect; False if somebody else is at it."""
        policy = replace(request.policy, while_tuning="wait" if patient else "heuristics")
        request = replace(request, policy=policy)
        try:
            # Whoever tuned it in a call meanwhile may have had nowhere to write it.
            answer = self._memory.ask(request)
            answer = answer if isinstance(answer, Found) else find(request)
            if isinstance(answer, Found):
                self._land(request, served, answer)
        except Exception as error:  # an author's functions may raise anything, and there is no caller to raise to
            if _says_shutdown(error):
                raise SystemExit from error  # silent in a thread
            self._autotune.remember_failure(request, error)
            answer = Skipped(f"{type(error).__name__}: {error}", error)
        if isinstance(answer, Found):
            return True
        if answer.error is not None:
            op = request.problem.op
            warn_once("background", op, f"{op} could not be tuned in the background: {answer.reason}")
        return not answer.transient

    def _land(self, request: Request[C], served: C, answer: Found[C]) -> None:
        if answer.remember:
            self._memory.remember(request, answer.config)
            request.tell(answer.event, cfg=answer.config, level=answer.level, called=False)
        if not _is_same(answer.config, served):
            EPOCH.advance()

    def forget(self, request: Request[C]) -> None:
        """Have the next call ask again, whatever came of the work for it."""
        self._explorations.pop(key_of(request), None)
        MEMO.invalidate(request.problem)


class _DeferredJob(Generic[C]):
    """One problem's turn in the background."""

    def __init__(
        self, tier: DeferredTier[C], request: Request[C], served: C, find: Callable[[Request[C]], Found[C] | Skipped]
    ) -> None:
        self._tier, self._request, self._served, self._find = tier, request, served, find

    def attempt(self, *, patient: bool) -> bool:
        return self._tier.finish(self._request, self._served, self._find, patient=patient)

    def ended(self) -> None:
        self._tier.forget(self._request)


def _detached(request: Request[C]) -> Request[C]:
    """Return a request that holds none of the caller's arrays, and needs none of its context."""
    args, kwargs = abstract((request.inv.args, dict(request.inv.kwargs)))
    backward = request.policy.validate_backward and not is_forward_only()
    return replace(
        request,
        inv=replace(request.inv, args=args, kwargs=kwargs, override_cfg=None, surroundings=request.inv.beside()),
        policy=replace(request.policy, cache_miss_fallback="autotune", validate_backward=backward),
        on_step=BACKGROUND.check_stop,
    )


def _obstacle(request: Request[Any]) -> Skipped | None:
    """Return why a call can only have the heuristic, if its caller is not to wait."""
    arguments = request.inv.args, dict(request.inv.kwargs)
    opaque = opaque_part(arguments)
    if opaque is not None:
        return Skipped(
            f"one of its arguments is a {opaque}, which another thread must not touch and cannot make up; pass arrays "
            "and plain values, or tune ahead of time"
        )
    if request.policy.cache_miss_fallback != "incremental":
        return None
    from tunebook._tuning.in_call_session import why_not_in_calls  # noqa: PLC0415 - only who explores needs it

    reason = why_not_in_calls(arguments)
    return None if reason is None else Skipped(reason)


def _first_group(request: Request[C]) -> Sequence[C]:
    """Return the candidates to try: a later group is for when nothing before it is valid, and the heuristic is."""
    kernel, inv = request.kernel, request.inv
    search = search_for(kernel, inv, request.strategy)
    # Of a space too big to race, calls try as many as a strategy that knows nothing proposes at first.
    candidates = candidates_to_try(kernel, inv) if search is None else search.first(_SEARCHED_IN_CALLS)
    first = min((kernel.cfg_group(inv, config) for config in candidates), default=0)
    return [config for config in candidates if kernel.cfg_group(inv, config) == first]


def _is_same(config: object, other: object) -> bool:
    try:
        return fingerprint_of(encode(config)) == fingerprint_of(encode(other))
    except CodecError:
        return config is other


def _says_shutdown(error: Exception) -> bool:
    """Whether this is how a thread learns that the interpreter is ending: it can start no others."""
    return isinstance(error, RuntimeError) and "shutdown" in str(error)
