"""Tuning that calls do not wait for: behind them, or one candidate per call."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from tunebook._base.config_codec import is_same_config
from tunebook._base.errors import TuningFailed, text_of, warn_once
from tunebook._base.locks import InterruptSafeLock
from tunebook._kernel.measure import measure_of
from tunebook._measure.stopwatch import Stopwatch
from tunebook._memo.answer_memo import EPOCH, MEMO
from tunebook._selection.recording import (
    abstract,
    how_to_give_values,
    make_up,
    opaque_part,
    recordings,
    values_in,
)
from tunebook._selection.tiers import Found, Memory, Parts, Request, Skipped, key_of, stand_in_for
from tunebook._tuning.plan import first_group, is_forward_only
from tunebook._tuning.tuner import Tuner

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from tunebook._base.vocabulary import Problem
    from tunebook._kernel.kernel import Invocation
    from tunebook._tuning.in_call_session import InCallSession
    from tunebook._tuning.job import Tuned
    from tunebook._tuning.live_runs import LiveRuns
    from tunebook._tuning.live_session import LiveSession

C = TypeVar("C")

# A job holds descriptions and no arrays, about 2 kB, and the values of small arrays of integers. Beyond this many, a
# call is told so and asks again next time.
CAPACITY: Final = 1024
# How long the end of the process waits for a candidate that is running. A longer one dies with the process, and the
# next process that waits for its lease takes it over.
_GRACE_S: Final = 1.0
# An exploration holds no arrays, about 20 kB for 60 candidates. Beyond this many, the oldest is given up: a program
# with ever new shapes does not come back to it.
_EXPLORATIONS: Final = 256
_LETS_GO_S: Final = 2e-4  # until the program is awake; with 0, this thread would have the interpreter again before
# Finds the configuration of a request, in the background.
Find: TypeAlias = "Callable[[Request[C]], Found[C] | Skipped]"
State: TypeAlias = Literal["running", "waiting for its turn"]


class TunesNow(Protocol[C]):
    """The methods of the autotune tier that deferred tuning calls, now or later; the tier has their contract."""

    def ask(self, request: Request[C]) -> Found[C] | Skipped: ...

    def known(self, request: Request[C]) -> Found[C] | Skipped | None: ...

    def failed_before(self, request: Request[C], *, made_up: bool) -> Skipped | None: ...

    def adopt(self, request: Request[C], tuned: Tuned[C], *, again: bool = False) -> Found[C] | Skipped: ...

    def remember_failure(self, request: Request[C], error: Exception) -> Skipped: ...


def _let_program_run() -> None:
    """Let go of the interpreter: a thread that computes would hold up each launch of the program for 5 ms."""
    time.sleep(_LETS_GO_S)


class _QueuedJob(NamedTuple):
    key: Hashable
    attempt: Callable[..., bool]
    ended: Callable[[], object]


class Background:
    """A queue with one job per key, and the daemon thread that works through it, which lives while there are jobs.

    Jobs that another caller is doing are put off until there is nothing else to do, so that two processes with the
    same jobs share them.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity: Final = capacity
        self._stops_at_exit = False
        self._clear()

    def _clear(self) -> None:
        self._lock = InterruptSafeLock()
        self._changed = threading.Condition(self._lock)
        self._fresh: deque[_QueuedJob] = deque()
        self._put_off: deque[_QueuedJob] = deque()
        self._states: dict[Hashable, State] = {}
        self._left = 0  # jobs that have not been told yet that they have ended
        self._thread: threading.Thread | None = None
        self._stopping = False

    def state(self, key: Hashable) -> State | None:
        """Return how far the job under a key is, or None."""
        return self._states.get(key)

    def submit(self, key: Hashable, attempt: Callable[..., bool], ended: Callable[[], object]) -> bool:
        """Queue a job, unless one has its key already; False if the queue is full, or a thread cannot be started.

        `attempt(patient=)` does the work, and returns False if another caller is doing it; if `patient`, it waits for
        that caller instead. An error ends the thread, and the next job gets a new thread. `ended` is called when the
        job has left the queue, with or without a result.
        """
        with self._lock:
            if key in self._states:
                return True
            if len(self._states) >= self._capacity or self._stopping or not self._has_thread():
                return False
            self._states[key] = "waiting for its turn"
            self._left += 1
            self._fresh.append(_QueuedJob(key, attempt, ended))
            return True

    def aside(self, work: Callable[..., object]) -> None:
        """Do work beside the program if a thread can: it calls its argument now and then, to let the program go on."""

        def attempt(*, patient: bool) -> bool:  # noqa: ARG001 - nobody else does this
            work(_let_program_run)
            return True

        if not self.submit(object(), attempt, lambda: None):
            work()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no job is left; False if the time is up before, or if a job itself asks."""
        with self._lock:
            if threading.current_thread() is self._thread:
                return False  # it would wait for itself
            return self._changed.wait_for(lambda: not self._left, timeout)

    def check_stop(self, _step: object = None) -> None:
        """End this thread if the process is ending, by SystemExit: silent, and not a failure of the candidate."""
        if self._stopping:
            raise SystemExit

    def stop(self) -> None:
        """Drop all jobs, and wait a moment for the running job to release its lease."""
        with self._lock:
            self._stopping = True
            self._fresh.clear()
            self._put_off.clear()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_GRACE_S)

    def forget_after_fork(self) -> None:
        """Start empty, in a forked child, where the parent's thread does not exist."""
        pending = bool(self._states)
        self._clear()
        if pending:
            # Memoised answers wait for results that come in the parent only; asked again, the child queues its own.
            MEMO.invalidate()

    def _has_thread(self) -> bool:
        """Whether there is a thread, or could be started: not at interpreter exit, nor where there are too many."""
        if self._thread is None:
            # In an empty context: where threads inherit their starter's, an overlay of that call would last for ever.
            thread = threading.Thread(target=Context().run, args=(self._run,), name="tunebook background", daemon=True)
            with suppress(RuntimeError):
                thread.start()
                self._thread = thread
        return self._thread is not None

    def _stop_at_exit(self) -> None:
        if self._stops_at_exit:
            return
        self._stops_at_exit = True
        import concurrent.futures.thread  # noqa: F401, PLC0415 - its hook must be there before ours, and so run after it

        # Before the threads of pools are joined, and not after as `atexit` does: tuning under jax runs in a thread of a
        # pool, and the process would not end before it.
        at_exit = getattr(threading, "_register_atexit", atexit.register)
        try:
            at_exit(self.stop)
        except RuntimeError:
            self.stop()  # it is too late to register anything

    def _run(self) -> None:
        try:
            self._stop_at_exit()
            while True:
                with self._lock:
                    patient = not self._fresh
                    queue = self._put_off if patient else self._fresh
                    if not queue:
                        break
                    entry = queue.popleft()
                    self._states[entry.key] = "running"
                self._attempt(entry, patient=patient)
        finally:
            with self._lock:
                self._thread = None
                if self._fresh or self._put_off:
                    self._has_thread()  # for jobs that came while this thread ended, or that it left when a job raised

    def _attempt(self, entry: _QueuedJob, *, patient: bool) -> None:
        done = True
        try:
            done = entry.attempt(patient=patient)
        finally:
            if done:
                self._end(entry)
            else:
                with self._lock:
                    self._states[entry.key] = "waiting for its turn"
                    self._put_off.append(entry)

    def _end(self, entry: _QueuedJob) -> None:
        self._states.pop(entry.key, None)
        try:
            entry.ended()
        finally:
            with self._lock:
                self._left -= 1
                self._changed.notify_all()


BACKGROUND: Final = Background()
os.register_at_fork(after_in_child=BACKGROUND.forget_after_fork)


def wait_for_background(timeout: float | None = None) -> bool:
    """Wait until nothing is tuned in the background any more; False if something still is after `timeout` seconds."""
    return BACKGROUND.wait(timeout)


class DeferredTuning(Generic[C]):
    """Tunes behind callers, or by them. Where no heuristic can answer meanwhile, the call has to be tuned at once."""

    def __init__(self, autotune: TunesNow[C], parts: Parts[C], queue: Background = BACKGROUND) -> None:
        self._autotune, self._parts = autotune, parts
        self.queue = queue
        self.explorations: Final[dict[tuple[Problem, str], InCallSession[C] | LiveSession[C]]] = {}

    def ask(self, request: Request[C], *, silent: bool = False) -> Found[C] | Skipped | None:
        """Return the answer without waiting; None if the call has to be tuned now. `silent`: nothing is tuned later."""
        known = self._find_under_way(request) or self._autotune.known(request)
        needed = known is None and request.policy.allow_heuristics
        stand_in = stand_in_for(self._parts.book, request) if needed else None  # it answers the call meanwhile
        if stand_in is None or _has_to_wait(request):
            return known
        behind = request.policy.cache_miss_fallback == "background"
        if behind and (failed := self._autotune.failed_before(request, made_up=True)) is not None:
            return failed
        if not silent:
            return self._defer(request, stand_in)
        would = "would tune in the background" if behind else "would try one candidate per call"
        return _obstacle(request) or Skipped(would)

    def reverify(self, request: Request[C], stand_in: C) -> str:
        """Tune behind a call that an entry answers which was not made for it here; return how far that is."""
        if (state := self.queue.state(self._key(request))) is not None:
            return f"{state} in the background"
        known = self._autotune.failed_before(request, made_up=True) or self._autotune.known(request)
        later = _detach(request)
        if (obstacle := known if isinstance(known, Skipped) else _obstacle(later)) is not None:
            said = f"not measured behind the call: {obstacle.reason}"
            if not request.silent and known is None:
                warn_once("not verified", request.problem.op, f"{request.problem.op} is {said}")
            return said
        if request.silent or known is not None:
            return "to be measured behind a call"
        made_up = values_in((later.inv.args, dict(later.inv.kwargs)))
        queued = self._submit(replace(later, inv=replace(later.inv, values_from=made_up)), stand_in, self._tune)
        return "queued to be measured in the background" if queued else "the background takes no more for now"

    def _find_under_way(self, request: Request[C]) -> Skipped | None:
        """Return how far the tuning of a call is; None if it has not begun."""
        policy = request.policy
        if not (policy.allow_autotune and policy.allow_heuristics) or recordings() or request.mode != "normal":
            return None
        if policy.cache_miss_fallback == "background":
            state = self.queue.state(self._key(request))
            return None if state is None else Skipped(f"{state} in the background")
        exploration = self.explorations.get(key_of(request))
        return None if exploration is None else Skipped(str(exploration), exploration=exploration)

    def _defer(self, request: Request[C], stand_in: C) -> Skipped:
        if (obstacle := _obstacle(request)) is not None:
            warn_once("not tuned", request.problem.op, f"{request.problem.op} is not tuned: {obstacle.reason}")
            return obstacle
        if request.policy.cache_miss_fallback == "incremental":
            runs = live_runs_of(request, stand_in)
            return self._explore(request, stand_in) if runs is None else self._explore_live(request, stand_in, runs)
        later = _detach(request)
        if later.kernel.recorder is None:
            made_up = values_in((later.inv.args, dict(later.inv.kwargs)))
            later = replace(later, inv=replace(later.inv, values_from=made_up))
        if self._submit(later, stand_in, self._tune):
            return Skipped("queued to be tuned in the background")
        return Skipped("the background takes no more for now", transient=True)

    def _configs_to_try(self, request: Request[C], stand_in: C) -> list[C] | Skipped:
        """Return the configurations of a new session, for which the oldest one makes room."""
        for oldest in list(self.explorations)[: 1 - _EXPLORATIONS]:
            self.explorations.pop(oldest, None)
        try:
            return [stand_in, *first_group(request.kernel, request.inv, request.strategy)]
        except TuningFailed as error:
            return self._autotune.remember_failure(request, error)

    def _explore(self, request: Request[C], stand_in: C) -> Skipped:
        from tunebook._tuning.in_call_session import InCallSession  # noqa: PLC0415 - loaded late: few policies explore

        configs = self._configs_to_try(request, stand_in)
        if isinstance(configs, Skipped):
            return configs
        later = _detach(request)
        tuner = self._parts.tuner
        mine = InCallSession(
            request.inv,
            later,
            configs,
            slowdown=request.policy.incremental_slowdown,
            stopwatch=tuner.stopwatch if isinstance(tuner, Tuner) else Stopwatch(),
            on_found=lambda tuned: self._submit(later, stand_in, partial(self._autotune.adopt, tuned=tuned)),
        )
        return self._begin(request, mine)

    def _explore_live(self, request: Request[C], stand_in: C, runs: LiveRuns[C]) -> Skipped:
        """Try candidates in calls that nothing waits for, and go on watching the winner."""
        from tunebook._tuning.live_session import LiveOutcome, LiveSession  # noqa: PLC0415 - loaded late: as above

        configs = self._configs_to_try(request, stand_in)
        if isinstance(configs, Skipped):
            return configs
        policy = replace(request.policy, cache_miss_fallback="autotune")
        # The functions below hold this one, and not the request: the caller's arrays must not be kept.
        later = replace(request, inv=runs.detached(request.inv), policy=policy, looks=[])

        def found(decide: Callable[..., Tuned[C]], again: bool) -> bool:  # noqa: FBT001 - a callback
            find = partial(self._adopt_live, mine, decide, again=again)
            return self._submit(later, stand_in, find, fresh=again)

        def rolled_back(beaten: C, better: C) -> None:
            self._parts.watched[later.problem] = mine, better
            self._roll_back(later, beaten, better)

        mine: LiveSession[C] = LiveSession(
            later,
            configs,
            runs,
            LiveOutcome(found, rolled_back, partial(later.tell, "live_progress"), self.queue.aside),
            slowdown=policy.slowdown,
            window=policy.slowdown_window,
            calls_per_stall=policy.calls_per_stall,
            others=[*self.explorations.values(), *(session for session, _ in self._parts.watched.values())],
        )
        return self._begin(request, mine)

    def _begin(self, request: Request[C], mine: InCallSession[C] | LiveSession[C]) -> Skipped:
        """Make a session that of its problem, unless another thread has one, or has just finished one."""
        if (session := self.explorations.setdefault(key_of(request), mine)) is mine:
            # The memory was asked before that one ended: no call would ever come to a second session.
            if isinstance(self._memory.ask(request), Found):
                self.explorations.pop(key_of(request), None)
                return Skipped("another thread has just finished tuning it", transient=True)
            request.tell("autotune_start", candidates=mine.candidates, verifying=False)
        return Skipped(str(session), exploration=session)

    @property
    def _memory(self) -> Memory[C]:
        return next(tier for tier in self._parts.tiers if isinstance(tier, Memory))

    def _roll_back(self, request: Request[C], beaten: C, better: C) -> None:
        self._memory.remember(request, better)
        request.tell("rolled_back", cfg=better, beaten=beaten)
        EPOCH.advance()

    def _adopt_live(
        self, session: LiveSession[C], decide: Callable[..., Tuned[C]], request: Request[C], *, again: bool
    ) -> Found[C] | Skipped:
        tuned = decide(_let_program_run)
        answer = self._autotune.adopt(request, tuned, again=again)
        # An offline tuning may have been faster: its choice stands, and is not watched.
        if isinstance(answer, Found) and is_same_config(answer.config, tuned.config):
            self._parts.watched[request.problem] = session, answer.config
        return answer

    def _key(self, request: Request[C]) -> Hashable:
        return self, *key_of(request)

    def _submit(self, request: Request[C], stand_in: C, find: Find[C], *, fresh: bool = False) -> bool:
        attempt = partial(self._attempt, request, stand_in, find, fresh=fresh)
        return self.queue.submit(self._key(request), attempt, partial(self._forget, request))

    def _tune(self, request: Request[C]) -> Found[C] | Skipped:
        with request.kernel.aside(request.inv):
            return self._autotune.ask(replace(request, inv=make_up(request.kernel, request.inv)))

    def _attempt(self, request: Request[C], stand_in: C, find: Find[C], *, patient: bool, fresh: bool = False) -> bool:
        """Find the configuration of a call and let it take effect; False if another caller is finding it.

        `fresh`: the answer in memory is to be replaced.
        """
        policy = replace(request.policy, while_tuning="wait" if patient else "heuristics")
        request = replace(request, policy=policy)
        try:
            # A caller that tuned it meanwhile may have had no book to write to.
            answer = self._memory.ask(request)
            answer = answer if isinstance(answer, Found) and not fresh else find(request)
            if isinstance(answer, Found) and answer.remember:
                self._memory.remember(request, answer.config)
                request.tell(answer.event, cfg=answer.config, level=answer.level, called=False)
            if isinstance(answer, Found) and not is_same_config(answer.config, stand_in):
                EPOCH.advance()
        except Exception as error:  # an author's functions may raise anything, and nothing in this thread catches it
            if isinstance(error, RuntimeError) and "shutdown" in text_of(error):
                raise SystemExit from error  # the interpreter is ending: silent in a thread, which cannot start others
            self._autotune.remember_failure(request, error)
            answer = Skipped(f"{type(error).__name__}: {text_of(error)}", error)
        if isinstance(answer, Found):
            return True
        if answer.error is not None:
            op, made_up = request.problem.op, request.inv.values_from != "call"
            on, hint = (", on made-up arguments", f"\n{how_to_give_values(request.kernel)}") if made_up else ("", "")
            warn_once("background", op, f"{op} could not be tuned in the background{on}: {answer.reason}{hint}")
        return not answer.transient

    def _forget(self, request: Request[C]) -> None:
        """Let the next call ask the tiers again."""
        self.explorations.pop(key_of(request), None)
        MEMO.invalidate(request.problem)


def _detach(request: Request[C]) -> Request[C]:
    """Return a request without the caller's arrays, which may be tuned in another context."""
    if (recorder := request.kernel.recorder) is not None:
        args, kwargs = recorder.describe(request.inv.args, request.inv.kwargs, samples=True)
        inv = recorder.recall(replace(request.inv, args=args, kwargs=kwargs, override_cfg=None))
        policy = replace(request.policy, cache_miss_fallback="autotune")
        inv = replace(inv, values_from="samples")
        return replace(request, inv=inv, policy=policy, on_step=BACKGROUND.check_stop, looks=[])
    backward = request.policy.validate_backward and not is_forward_only()
    return replace(
        request,
        inv=_without_arrays(request.inv),
        policy=replace(request.policy, cache_miss_fallback="autotune", validate_backward=backward),
        on_step=BACKGROUND.check_stop,
    )


def live_runs_of(request: Request[C], stand_in: C | None = None) -> LiveRuns[C] | None:
    """Return how candidates are tried in calls that are timed by device events; None if the host's clock times them."""
    found: LiveRuns[C] | None = request.kernel.live_runs(request.inv)
    if found is not None or stand_in is None or request.kernel.recorder is not None:
        return found
    from tunebook._tuning.live_functions import function_runs  # noqa: PLC0415 - loaded late: few policies explore

    return function_runs(request.kernel, request.inv, stand_in, _without_arrays)


def _without_arrays(inv: Invocation[C, Any]) -> Invocation[C, Any]:
    args, kwargs = abstract((inv.args, dict(inv.kwargs)), samples=True)
    return replace(inv, args=args, kwargs=kwargs, override_cfg=None, surroundings=inv.beside())


def _has_to_wait(request: Request[Any]) -> bool:
    """Whether launches cannot be tuned later: Triton's interpreter has no events."""
    incremental = request.policy.cache_miss_fallback == "incremental"
    return incremental and request.kernel.recorder is not None and live_runs_of(request) is None


def _obstacle(request: Request[Any]) -> Skipped | None:
    """Return why a call can only have the heuristic, if its caller is not to wait."""
    if request.kernel.recorder is not None:
        return None  # a launch, which its kernel knows how to describe
    arguments = request.inv.args, dict(request.inv.kwargs)
    opaque = opaque_part(arguments)
    if opaque is not None:
        return Skipped(
            f"one of its arguments is a {opaque}, which another thread must not touch and cannot make up; pass arrays "
            "and plain values, or tune ahead of time"
        )
    if request.policy.cache_miss_fallback != "incremental":
        return None
    if request.kernel.table is not None:
        return Skipped("its calls run nothing that a candidate could be tried in; use cache_miss_fallback='background'")
    if (measure := measure_of(request.kernel)) is not None:
        how = f"its calls are measured as they are, and not as {measure!r} says"
        return Skipped(f"{how}; use cache_miss_fallback='background'")
    from tunebook._tuning.in_call_session import why_not_in_calls  # noqa: PLC0415 - loaded late: few policies explore

    reason = why_not_in_calls(arguments)
    return None if reason is None else Skipped(reason)
