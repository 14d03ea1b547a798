"""Tuning that calls do not wait for: behind them, or one candidate per call."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

from tunebook._base.config_codec import encode, fingerprint_of
from tunebook._base.errors import CodecError, TuningFailed, warn_once
from tunebook._measure.stopwatch import Stopwatch
from tunebook._memo.answer_memo import EPOCH, MEMO
from tunebook._selection.background_queue import BACKGROUND, Background
from tunebook._selection.recording import abstract, concrete, opaque_part, recordings
from tunebook._selection.tiers import Found, Memory, Parts, Request, Skipped, key_of
from tunebook._tuning.plan import candidates_to_try, is_forward_only, search_for
from tunebook._tuning.tuner import Tuner

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from tunebook._base.vocabulary import Problem
    from tunebook._selection.autotune_tier import AutotuneTier
    from tunebook._tuning.in_call_session import InCallSession
    from tunebook._tuning.job import Tuned

C = TypeVar("C")

# An exploration holds no arrays, about 20 kB for 60 candidates. Beyond this many, the oldest is given up: a program
# with ever new shapes does not come back to it.
_EXPLORATIONS: Final = 256
_SEARCHED_IN_CALLS: Final = 64
# Finds the configuration of a request, in the background.
Find: TypeAlias = "Callable[[Request[C]], Found[C] | Skipped]"
_STATES: Final = {"running": "running in the background", "waiting": "waiting for its turn in the background"}


# Policies by which a call does not wait for its tuning.
DEFERRED: Final = frozenset({"background", "incremental"})


class DeferredTuning(Generic[C]):
    """Tunes without making callers wait: behind them, or by them.

    Where nothing can answer meanwhile (no heuristic, or it is not allowed), the call has to be tuned at once.
    """

    def __init__(self, autotune: AutotuneTier[C], parts: Parts[C], queue: Background = BACKGROUND) -> None:
        self._autotune, self._parts = autotune, parts
        self.queue = queue
        self.explorations: Final[dict[tuple[Problem, str], InCallSession[C]]] = {}

    def ask(self, request: Request[C]) -> Found[C] | Skipped | None:
        """Return the answer that the caller does not wait for; None if the call has to be tuned now."""
        known = self._find_under_way(request) or self._autotune.known(request)
        if known is not None:
            return known
        stand_in = self._stand_in(request)
        return None if stand_in is None else self._defer(request, stand_in)

    def preview(self, request: Request[C]) -> Found[C] | Skipped | None:
        """Return the answer of `ask`, without any tuning."""
        known = self._find_under_way(request) or self._autotune.known(request)
        if known is not None or self._stand_in(request) is None:
            return known
        behind = request.policy.cache_miss_fallback == "background"
        return _obstacle(request) or Skipped(
            "would tune in the background" if behind else "would try one candidate per call"
        )

    def _find_under_way(self, request: Request[C]) -> Skipped | None:
        """Return how far the tuning of a call is; None if it has not begun."""
        policy = request.policy
        if not (policy.allow_autotune and policy.allow_heuristics) or recordings() or request.mode != "normal":
            return None
        if policy.cache_miss_fallback == "background":
            state = self.queue.state(self._key(request))
            return None if state is None else Skipped(_STATES[state])
        exploration = self.explorations.get(key_of(request))
        return None if exploration is None else Skipped(str(exploration), exploration=exploration)

    def _stand_in(self, request: Request[C]) -> C | None:
        """Return the configuration that answers the call meanwhile; None if it is tuned in the call."""
        return request.kernel.heuristic(request.inv) if request.policy.allow_heuristics else None

    def _defer(self, request: Request[C], stand_in: C) -> Skipped:
        obstacle = _obstacle(request)
        if obstacle is not None:
            warn_once("not tuned", request.problem.op, f"{request.problem.op} is not tuned: {obstacle.reason}")
            return obstacle
        if request.policy.cache_miss_fallback == "incremental":
            return self._explore(request, stand_in)
        if self._submit(_detach(request), stand_in, self._tune):
            return Skipped("queued to be tuned in the background")
        return Skipped("the background takes no more for now", transient=True)

    def _explore(self, request: Request[C], stand_in: C) -> Skipped:
        from tunebook._tuning.in_call_session import InCallSession  # noqa: PLC0415 - loaded late: few policies explore

        for oldest in list(self.explorations)[: 1 - _EXPLORATIONS]:
            self.explorations.pop(oldest, None)
        try:
            configs = [stand_in, *_first_group(request)]
        except TuningFailed as error:
            return self._autotune.remember_failure(request, error)
        later = _detach(request)
        tuner = self._parts.tuner
        mine = InCallSession(
            request.inv,
            later,
            configs,
            slowdown=request.policy.incremental_slowdown,
            stopwatch=tuner.stopwatch if isinstance(tuner, Tuner) else Stopwatch(),
            on_found=lambda tuned: self._submit(later, stand_in, partial(self._adopt, tuned)),
        )
        exploration = self.explorations.setdefault(key_of(request), mine)
        if exploration is mine:
            request.tell("autotune_start", candidates=mine.candidates, verifying=False)
        return Skipped(str(exploration), exploration=exploration)

    # ------------------------------------------------------------------------------------------------- in the worker

    @property
    def _memory(self) -> Memory[C]:
        return next(tier for tier in self._parts.tiers if isinstance(tier, Memory))

    def _key(self, request: Request[C]) -> Hashable:
        return self, *key_of(request)

    def _submit(self, request: Request[C], stand_in: C, find: Find[C]) -> bool:
        attempt = partial(self._attempt, request, stand_in, find)
        return self.queue.submit(self._key(request), attempt, partial(self._forget, request))

    def _tune(self, request: Request[C]) -> Found[C] | Skipped:
        args, kwargs = concrete((request.inv.args, dict(request.inv.kwargs)))
        return self._autotune.ask(replace(request, inv=replace(request.inv, args=args, kwargs=kwargs)))

    def _adopt(self, tuned: Tuned[C], request: Request[C]) -> Found[C] | Skipped:
        return self._autotune.adopt(request, tuned)

    def _attempt(self, request: Request[C], stand_in: C, find: Find[C], *, patient: bool) -> bool:
        """Find the configuration of a call and let it take effect; False if another caller is finding it."""
        policy = replace(request.policy, while_tuning="wait" if patient else "heuristics")
        request = replace(request, policy=policy)
        try:
            # A caller that tuned it meanwhile may have had no book to write to.
            answer = self._memory.ask(request)
            answer = answer if isinstance(answer, Found) else find(request)
            if isinstance(answer, Found):
                self._apply(request, stand_in, answer)
        except Exception as error:  # an author's functions may raise anything, and nothing in this thread catches it
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

    def _apply(self, request: Request[C], stand_in: C, answer: Found[C]) -> None:
        if answer.remember:
            self._memory.remember(request, answer.config)
            request.tell(answer.event, cfg=answer.config, level=answer.level, called=False)
        if not _is_same(answer.config, stand_in):
            EPOCH.advance()

    def _forget(self, request: Request[C]) -> None:
        """Let the next call ask the tiers again."""
        self.explorations.pop(key_of(request), None)
        MEMO.invalidate(request.problem)


def _detach(request: Request[C]) -> Request[C]:
    """Return a request without the caller's arrays, which may be tuned in another context."""
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
    from tunebook._tuning.in_call_session import why_not_in_calls  # noqa: PLC0415 - loaded late: few policies explore

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
    """Whether an error means that the interpreter is ending, when a thread cannot start others."""
    return isinstance(error, RuntimeError) and "shutdown" in str(error)
