"""Tuning in the calls of a running program on a GPU: nothing waits for the device, and a limit is kept.

Each call launches once, on the caller's own arguments: the leader, or one candidate. Device events around some of the
launches are read when the device has passed them. Candidates are compiled beside the program. The share of its time in
which the host does anything else for the session is bounded: loading compiled programs, events, and choosing.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar
from weakref import WeakSet

from tunebook._base.vocabulary import LIVE
from tunebook._measure.stopwatch import Attempt, Trial
from tunebook._statistics.decide import objective_for
from tunebook._statistics.live_race import LiveRace
from tunebook._statistics.live_rounds import Turn
from tunebook._statistics.race import no_pause
from tunebook._statistics.slowdown_account import SlowdownAccount
from tunebook._statistics.winner_watch import AWAITING, WATCH_EVERY
from tunebook._tuning.host_share import HOST
from tunebook._tuning.job import CandidateSet, Conditions
from tunebook._tuning.live_preparation import LivePreparation
from tunebook._tuning.pause import is_paused

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from tunebook._statistics.live_comparisons import Aside
    from tunebook._statistics.race import Pause
    from tunebook._tuning.host_share import HostShare
    from tunebook._tuning.job import Call, Tuned
    from tunebook._tuning.live_runs import LaunchWindow, LiveRuns

C = TypeVar("C")

_TELL_EVERY: Final = 1024  # calls
_NEAR, _LIKELY = 1.1, 4  # candidates this near the leader are tried first at other sizes, so many at most
_LONGEST_REST: Final = 4096  # calls, while the host has spent its share
# While a session can begin nothing, because its candidates are still compiled, it asks after twice as many calls each
# time, up to so many, or so long. In a training of fla's gated linear attention, nearly all turns were such ones, and
# took most of the host's share.
_FIRST_IDLE, _LONGEST_IDLE, _LONGEST_IDLE_S = 8, 128, 0.1
# So many turns in a row without a call of the kind that candidates are prepared for let them be prepared for another
# one; the next time, twice as many, because kinds may come in any number and order.
_STRANGERS: Final = 16
_EARNED: Final = 0.5  # of the device's time that a better leader saves, where the program waits for the device


_sessions: Final[WeakSet[LiveSession[Any]]] = WeakSet()


def _forget_parents() -> None:
    for session in _sessions:
        session.forget_parent()


# Not by asking for the process's number in each call, which is a call of the system.
os.register_at_fork(after_in_child=_forget_parents)


class LiveOutcome(NamedTuple, Generic[C]):
    """Where a session reports. `progress` gets data.

    `found(decide, again)` is told that the race is over; `decide(pause)` returns the result, takes milliseconds, and is
    called once, by any thread. It returns False if it must be told again. `aside` does work of such a length.
    """

    found: Callable[[Callable[..., Tuned[C]], bool], bool]
    rolled_back: Callable[[C, C], object]
    progress: Callable[..., object]
    aside: Aside = lambda work: work()


class LiveSession(Generic[C]):
    """One problem that is tuned by its calls and then watched. Threads may share it: one at a time has the turn."""

    # Each launch reads these, which takes longer for the attributes of an object with more than 30 of them.
    __slots__ = ("__dict__", "__weakref__", "config", "rest")

    def __init__(
        self,
        call: Call[C],
        configs: Sequence[C],
        runs: LiveRuns[C],
        outcome: LiveOutcome[C],
        *,
        slowdown: float,
        window: int,
        calls_per_stall: int = 0,
        host: HostShare | None = None,
        others: Iterable[object] = (),
    ) -> None:
        """`call` describes the problem without its arrays. The first configuration serves until another one leads.

        `others` are sessions of the same kernel at other sizes: the candidates that are fast there are tried first.
        """
        self._call, self._runs, self._outcome = call, runs, outcome
        self._host, self._counted = HOST if host is None else host, (0, 0)
        conditions = Conditions(call.kernel.code_checksum, call.kernel.environment(call.inv))
        self._candidates = CandidateSet(conditions, f"{runs.clock}{LIVE}/forward", configs[0])
        for config in configs[1:]:
            self._candidates.admit(config)
        self._incumbent = next(iter(self._candidates.configs))
        account = SlowdownAccount(slowdown, window)
        self.race: Final = LiveRace(self._incumbent, account, self._candidates.shuffler(), outcome.aside)
        self.config: C = configs[0]
        self.candidates: Final = len(self._candidates.configs)
        likely = dict.fromkeys(name for other in others if isinstance(other, LiveSession) for name in other.fast)
        self._preparation: Final = LivePreparation(
            self._candidates.configs,
            runs,
            self.race,
            self._host,
            likely=list(likely),
            calls_per_stall=calls_per_stall,
            failed=self._fail,
        )
        self._unseen = set(self._preparation.names)
        self._waiting: deque[tuple[Turn, LaunchWindow]] = deque()
        self._found: Tuned[C] | None = None
        self._handed_over = self._again = False
        self._decision: tuple[Tuned[C], str, list[str]] | None = None  # of another thread: see `_settle`
        self._began_s, self._calls = time.monotonic(), 0
        self._told = 0, 0.0  # calls and extra seconds
        self.rollbacks = 0
        self._asked = 0, self._host.clock_s()  # calls, and the time then
        self._idle = 0  # turns in a row in which nothing could begin
        self._earned, self._late = 0, True  # calls up to here have earned; whether the device waits for the host
        self.rest = 0  # calls that the leader serves before the session is asked again; a hot path may count them down
        self._turn = threading.Lock()
        _sessions.add(self)
        self._kind: Hashable = None  # of the calls that candidates are prepared for
        self._strangers, self._most_strangers = 0, _STRANGERS  # turns in a row whose calls were of another kind
        self._is_calm = False  # the winner is watched, and nothing is wrong with it
        self._look: LaunchWindow | None = None
        self._look_sizes: Hashable = None
        self._uncounted = 0  # calls of a calm winner

    @property
    def is_finished(self) -> bool:
        """Whether a configuration was found."""
        return self._found is not None

    def __str__(self) -> str:
        self._count_glances()
        account, race = self.race.account, self.race
        cost = f"{account.calls} calls took {account.extra / max(account.calls, 1):+.1%} compared with the first one"
        if self._found is not None:
            back = f", {self.rollbacks} rolled back" if self.rollbacks else ""
            return (
                f"watching the winner, which was found after {race.decided_after} calls{back}{self._left_out}; {cost}"
            )
        left = self._preparation.left
        built = f", {left} are still to be compiled or loaded" if left else ""
        kept = race.left + left - len(self._preparation.again)
        left_to_try = f"{kept} of {self.candidates} are left{built}{self._left_out}"
        return f"trying one candidate per call ({race.phase}): {left_to_try}; {cost}"

    @property
    def _left_out(self) -> str:
        why = "predicted to be slower, too slow for the limit, or not compiled in time"
        return f", {len(self.not_tried)} not tried: {why}" if self.not_tried else ""

    @property
    def not_tried(self) -> Mapping[str, str]:
        """The reasons why candidates are not tried, by name."""
        return self._preparation.not_tried

    @property
    def loads(self) -> int:
        """How many candidates were loaded."""
        return self._preparation.loads

    @property
    def to_prepare(self) -> tuple[int, int]:
        """How many candidates are to be compiled, and how many are compiled and to be loaded."""
        return len(self._preparation.to_build), len(self._preparation.to_load)

    @property
    def fast(self) -> list[str]:
        """The candidates that are near the leader, as far as is known, the fastest first."""
        times = self.race.known
        near = [name for name, each in times.items() if each <= _NEAR * times[self.race.leader]]
        return sorted(near, key=times.__getitem__)[:_LIKELY]

    # ------------------------------------------------------------------------------------------------------ one call

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call, with a candidate if it is time for one, and return its result."""
        if self.rest > 0:  # nearly all calls
            self.rest -= 1
            return self._runs.run(self.config, args, kwargs)
        lock = self._turn
        # Without waiting: the thread that has the turn may be loading a program.
        if lock.acquire(False):  # noqa: FBT003 - by name it takes 0.3 us more
            try:
                if self._is_calm:
                    return self._glance(args, kwargs)
                if not is_paused() and self._runs.may_try(args, kwargs):
                    return self._take_turn(args, kwargs) if self._found is None else self._watch(args, kwargs)
            finally:
                lock.release()
        return self._runs.run(self.config, args, kwargs)

    def _take_turn(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        race, began_s = self.race, self._host.clock_s()
        if race.is_round_open:
            return self._go_on(args, kwargs)
        self._calls += 1
        if self._calls == 1:  # at once, with the configuration that is there: it may have to be compiled and loaded too
            self._kind = self._runs.kind(args, kwargs)
            return self._runs.run(self.config, args, kwargs)
        if race.phase != "decided" and not self._host.allows():
            # With eleven kernels on an H200, a quarter of the share went into turns in which nothing could begin.
            race.count_led(1)
            patience = 1 if self._preparation.has_turn else self._host.patience(race.unit_s)
            self.rest = race.rest(Turn(race.leader), patience, self._calls_to_rest(self._host.clock_s()))
            return self._runs.run(self.config, args, kwargs)
        self._earn()
        calls, stalls = self._counted
        self._counted = race.account.calls, self._host.stalls
        if stalls == self._host.stalls:  # else some of the calls came before the last one that stood still
            self._host.count(race.account.calls - calls)
        kind = self._runs.kind(args, kwargs)
        may_begin, worked = self._is_prepared_for(kind) and self._host.allows(), False
        if self._waiting or race.phase == "decided":
            self._read_events()
            began_s = self._host.clock_s() if race.phase == "decided" else began_s  # a decision is noted by itself
        if self._found is None and may_begin and self._preparation.is_due:
            self._host.spend(self._host.clock_s() - began_s, "choices")
            worked = self._preparation.step(args, kwargs)
            began_s = self._host.clock_s()
        if race.account.calls - self._told[0] >= _TELL_EVERY:
            self.tell_progress()
        may_begin = may_begin and not worked and not self._preparation.again
        turn = race.next(lambda: (kind, self._runs.sizes(args, kwargs)), may_begin=may_begin)
        waits = self._waiting or self._preparation.has_turn or race.is_refused or 0 < self._strangers < _STRANGERS
        self._idle = 0 if worked or turn.is_timed or waits else self._idle + 1
        # A call that has loaded begins no round, and the next one may.
        if not (worked and self._host.allows()):
            patience = 1 if self._preparation.has_turn else self._host.patience(race.unit_s)
            self.rest = race.rest(turn, patience, self._calls_to_rest(began_s))
        self._host.spend(self._host.clock_s() - began_s, "choices")
        if not turn.is_timed:
            return self._runs.run(self.config, args, kwargs)
        return self._launch(turn, args, kwargs)

    def _sizes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
        return self._runs.kind(args, kwargs), self._runs.sizes(args, kwargs)

    def _is_prepared_for(self, kind: Hashable) -> bool:
        """Return whether candidates are prepared, or being prepared, for calls of a kind; other calls take the leader.

        Else calls would compile candidates. If the kind comes no more, they are prepared for the present one.
        """
        self._strangers = 0 if kind == self._kind else self._strangers + 1
        if self._strangers >= self._most_strangers:
            self._kind, self._strangers, self._most_strangers = kind, 0, 2 * self._most_strangers
            self._unseen |= self._preparation.renew()
        return kind == self._kind

    def _go_on(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Launch the next candidate of a round, and do nothing else: all else can wait until the round is launched.

        On the host of an H200, choosing took 125 us per timed launch when each one also read the events of others,
        asked for compiled programs, and worked out the shares.
        """
        began_s = self._host.clock_s()
        turn = self.race.next(lambda: self._sizes(args, kwargs), may_begin=False)
        self._host.spend(self._host.clock_s() - began_s, "choices")
        if not turn.is_timed:  # a call of other sizes
            return self._runs.run(self.config, args, kwargs)
        return self._launch(turn, args, kwargs)

    def _calls_to_rest(self, now_s: float) -> int:
        """Return about how many calls pass until the host may do more: asking takes a part of its share too."""
        (calls, then_s), now = self._asked, self.race.account.calls
        self._asked = now, now_s
        if now_s <= then_s:
            return 0
        per_s = (now - calls) / (now_s - then_s)
        idle = min(_FIRST_IDLE << min(self._idle, 8), _LONGEST_IDLE, _LONGEST_IDLE_S * per_s) if self._idle > 1 else 0
        return int(max(min(self._host.wait_s * per_s, _LONGEST_REST), idle))

    def _watch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Take the turn of a winner. Nothing is charged to the host: a limit on watching would be one on noticing."""
        race = self.race
        if self._waiting:
            self._read_events()
            if race.account.calls - self._told[0] >= _TELL_EVERY:
                self.tell_progress()
        if race.is_calm and not self._waiting:
            self._is_calm = True
            return self._glance(args, kwargs)
        kind = self._runs.kind(args, kwargs)
        may_begin = self._is_prepared_for(kind)
        turn = race.next(lambda: (kind, self._runs.sizes(args, kwargs)), may_begin=may_begin)
        self.rest = race.rest(turn)
        if not turn.is_timed:
            return self._runs.run(self.config, args, kwargs)
        return self._launch(turn, args, kwargs)

    def _glance(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Watch a winner that nothing is wrong with, in as few steps as there can be: as long as the process lives.

        One call of 23 is timed, and its time is read five calls later, or 23 later again if the device is far behind.
        """
        # To ask for an event while a graph is captured would end the capture.
        look, may_ask = self._look, not is_paused() and self._runs.may_try(args, kwargs)
        if look is None and may_ask:
            result, self._look = self._runs.glance(self.config, args, kwargs)
            # As if it were of the kind that is prepared: to ask takes a microsecond.
            self._look_sizes, self.rest = (self._kind, self._runs.sizes(args, kwargs)), AWAITING
            return result
        # The call first: the device works while the time of another call is read.
        result = self._runs.run(self.config, args, kwargs)
        seconds = look.seconds() if look is not None and may_ask else None
        self.rest = WATCH_EVERY - 1
        if look is not None and seconds is not None:
            self._look = None
            watch = self.race.watch
            watch.note(self._look_sizes, seconds, late=look.late)
            self._uncounted += WATCH_EVERY
            self._is_calm = watch.is_calm
            self.rest = WATCH_EVERY - AWAITING - 2 if self._is_calm else 0
            if self._uncounted >= _TELL_EVERY:
                self.tell_progress()
        return result

    def _earn(self) -> None:
        """Let the host have a part of the time that the leader has saved since the last time."""
        race = self.race
        calls, self._earned = race.account.calls - self._earned, race.account.calls
        if race.gain_s > 0 and not self._late:
            self._host.earn(_EARNED * calls * race.gain_s)

    def _launch(self, turn: Turn, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if turn.name in self._unseen:
            return self._launch_first(turn, args, kwargs)
        launched: tuple[Any, LaunchWindow] | None = None
        try:
            launched = self._runs.timed(self._candidates.configs[turn.name], args, kwargs)
        finally:
            if launched is None:
                self.race.learn(turn, None)  # the call's own error is raised, as without tuning
        return self._launched(turn, *launched)

    def _launch_first(self, turn: Turn, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Launch a candidate that has not run yet: if it fails, the leader serves the call."""
        config, result = self._candidates.configs[turn.name], None
        tried: tuple[Any, LaunchWindow] | None = None
        is_known = False
        try:
            with Attempt() as attempt:
                tried = self._runs.first(config, self.config, args, kwargs)
            if tried is None:
                self._runs.recover(args, kwargs)
                result = self._runs.run(self.config, args, kwargs)
            is_known = True
        finally:
            if not is_known:  # at Ctrl-C, or if the leader fails too: the candidate is tried again
                self.race.learn(turn, None)
        self._unseen.discard(turn.name)
        if tried is None:
            self._fail(turn.name, attempt.trial)
            self.race.failed(turn)
            return result
        return self._launched(turn, *tried)

    def _launched(self, turn: Turn, result: Any, window: LaunchWindow) -> Any:
        if self._found is None:
            self._host.spend(window.host_s, "timed launches")
        self._waiting.append((turn, window))
        return result

    def _read_events(self) -> None:
        """Learn the times of all launches that the device has passed, in their order."""
        while self._waiting:
            turn, window = self._waiting[0]
            seconds = window.seconds()
            if seconds is None:
                break
            self._waiting.popleft()
            self._late = window.late
            self.race.learn(turn, seconds, late=window.late)
        self._follow()

    def _follow(self) -> None:
        """Serve the calls with the leader of the race, decide when it is over, and roll back a winner that lost."""
        race = self.race
        if race.phase == "decided" and self._found is None:
            self._settle()
        elif self._found is not None and race.phase == "decided":
            beaten = race.leader
            if race.beaten_by() is not None:
                self._roll_back(beaten)
        self.config = self._candidates.configs[race.leader]

    def _fail(self, name: str, trial: Trial) -> None:
        self._unseen.discard(name)
        self._candidates.record(name, trial)

    def forget_parent(self) -> None:
        """Go on in a forked child: events and compilers are the parent's, and a GPU cannot be used."""
        self._turn = threading.Lock()  # a thread of the parent may have the turn
        self._waiting.clear()
        self._look = None
        self._handed_over = self._found is not None  # the parent's thread does not decide for this process
        self._preparation.forget()

    # ------------------------------------------------------------------------------------------------------- deciding

    def _settle(self) -> None:
        """Have the race decided beside the program, and adopt the decision in the first call that finds it.

        The statistics over all samples take up to 20 ms: too long for one call.
        """
        if not self._handed_over:
            with self._host.working("decisions"):
                self._handed_over = self._outcome.found(self._decide, self._again)
        if self._decision is not None:
            (self._found, winner, ranking), self._decision = self._decision, None
            self.race.adopt(winner, ranking)
            self.tell_progress()

    def _decide(self, pause: Pause = no_pause) -> Tuned[C]:
        """Return the result of the race. Another thread may call it: the race is over, and its samples stay."""
        candidates, race = self._candidates, self.race
        if self._again:
            candidates.results = {n: m for n, m in candidates.results.items() if n not in race.contenders}
        unit_s = race.unit_s
        finalists = {lane.name for lane in race.finalists}
        for name in [
            name for name in candidates.configs if name not in candidates.results and name not in self._preparation.same
        ]:
            if name in race.contenders:
                candidates.record(name, Trial(), samples_s=race.samples_s(name), dropped=name not in finalists)
            elif screened := race.screened(name):
                candidates.record(name, Trial(), samples_s=[each * unit_s for each in screened], dropped=True)
        for name, original in self._preparation.same.items():
            if original in candidates.results and name not in candidates.results:
                candidates.copy(original, name, None)
        tuned = candidates.decide(
            objective=objective_for(self._call.kernel.objective),
            pause=pause,
            ran=len(candidates.results),
            complete=True,
            seconds=time.monotonic() - self._began_s,
            left_out=self.not_tried,
        )
        ranking = [] if tuned.verdict is None else [r.measurement.fingerprint for r in tuned.verdict.ranking]
        names = {name: original for name, original in self._preparation.same.items() if name not in race.contenders}
        winner = next(name for name, config in candidates.configs.items() if config is tuned.config)
        order = list(dict.fromkeys(names.get(name, name) for name in ranking if name not in self._unseen))
        self._decision = tuned, names.get(winner, winner), order
        return tuned

    def _roll_back(self, beaten: str) -> None:
        race, configs = self.race, self._candidates.configs
        self.rollbacks += 1
        self.config = configs[race.leader]
        self._outcome.rolled_back(configs[beaten], self.config)
        self._found, self._decision, self._handed_over, self._again = None, None, False, True
        race.race_again([race.leader, beaten, *race.contenders])

    def _count_glances(self) -> None:
        calls, self._uncounted = self._uncounted, 0
        self.race.count_led(calls)

    def tell_progress(self) -> None:
        """Tell the listeners what the session has cost since the last time."""
        self._count_glances()
        account = self.race.account
        calls, extra_s = account.calls, account.extra * self.race.unit_s
        told_calls, told_s = self._told
        self._told = calls, extra_s
        since = {"calls": calls - told_calls, "extra_s": extra_s - told_s}
        self._outcome.progress(cfg=self.config, **since, left=self.race.left, phase=self.race.phase)
