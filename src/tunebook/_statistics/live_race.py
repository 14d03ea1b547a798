"""A race in the calls of a running program, within a limit on the slow-down: it neither runs nor times anything.

The load of a running program changes, so candidates are compared in *rounds*: launches of neighbouring calls with the
same sizes. A screening round has the leader and one other candidate; a final round has every finalist. Times arrive
some calls after the launch, because nothing waits for the device, so a few rounds are under way at once. The leader
serves all other calls. A candidate that is surely faster leads at once, before the race is over. Afterwards the winner
is watched: see `winner_watch`.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from tunebook._statistics.live_rounds import Round, Turn, WinnerLook
from tunebook._statistics.race import (
    ENOUGH,
    HOPELESS,
    OF_MEDIAN,
    Lane,
    RaceStage,
    is_time,
    median_s,
    paired,
    pooled_uncertainty,
    standard_error,
    survivors,
)
from tunebook._statistics.winner_watch import WATCH_EVERY, WinnerWatch

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from tunebook._statistics.slowdown_account import SlowdownAccount

Phase: TypeAlias = Literal["screening", "final", "decided"]

# A candidate that has not run yet is expected to take this many times as long as the incumbent. The limit is kept
# exactly as long as no candidate is slower than this; a slower one overdraws the account by its first launch alone.
SURPRISE: Final = 8.0
# After so many rounds, a candidate that is this much slower than the leader leaves. One sample may be of a disturbed
# launch, so the first margins are wide; the median of five is not.
_SCREENING: Final = ((1, HOPELESS), (2, 1.8), (3, 1.4), (5, 1.2), (8, 1.1))
_MEDIAN_FROM: Final = 5
_SCREENED: Final = _SCREENING[-1][0]
# Finalists: all this close to the best, because a tie is decided by rule and not by the luck of the screening...
_ALIKE: Final = 1.03
# ...and so many in all, if they are this close.
_FINALISTS, _CLOSE = 6, 1.08
_FINAL: Final = (
    RaceStage(8, 1.06),
    RaceStage(16, 1.04),
    RaceStage(24, 1.03),
    RaceStage(32, 1.025),
    RaceStage(48, 1.02),
)
# Samples of finalists cost the program next to nothing, so there are more of them than in a race that it waits for:
# with 24 rounds, noise chose between equal candidates in 4 of 80 races, and with these in none or one.
_LEAST_ROUNDS, _MOST_ROUNDS, _FINAL_SAMPLES = 96, 320, 1000
_SETTLED, _SETTLED_AFTER = 0.001, 48
_LOOK_EVERY: Final = 16  # rounds: working out the uncertainty takes as long as several launches
# A candidate leads if it is faster by so many standard errors, and by this fraction: five samples may agree by chance.
_SURELY, _FASTER = 2.5, 0.02
_UNDER_WAY: Final = 4  # rounds, or looks, whose times are not known yet
# So many calls of other sizes in a row give up a round that waits for calls of its own.
_PATIENCE: Final = 8
_MOST_SIZES: Final = 64  # whose latest times are kept: calls of ever new sizes must not grow this for ever
# While no round can begin, the leader serves so many calls before the race is asked again, because asking takes host
# time: a random number, so that the races of a program do not all ask in the same step, where the first one would take
# all of the host's share. And so many where the times of rounds are awaited.
_REST, _REST_AWAITING = (8, 24), 4


class LiveRace:
    """Chooses the candidate of each call, and the winner. The first name is the incumbent's.

    Candidates take part from `admit` on, when they can run without a wait. `complete` says that all are admitted.
    """

    def __init__(self, incumbent: str, account: SlowdownAccount, rng: random.Random) -> None:
        self._incumbent, self.account, self._rng = incumbent, account, rng
        self.leader = incumbent
        self.phase: Phase = "screening"
        self._values: dict[str, float] = {incumbent: 1.0}  # times, relative to the incumbent's
        self._lanes: dict[str, Lane] = {}  # in the screening
        self.finalists: list[Lane] = []
        self._started = 0  # final rounds
        self._runs: list[tuple[Hashable, float]] = []
        self._final: dict[str, Lane] = {}
        self._latest: dict[Hashable, dict[str, float]] = {}  # the last final round of each sizes
        self._complete = False
        self._open: Round | None = None
        self._issued = 0  # launches of the open round
        self._under_way = 0
        self.runs: Counter[str] = Counter()
        self.decided_after: int | None = None  # calls
        self.unit_s = 0.0  # the latest time of the incumbent, by the leader's
        self.watch: Final = WinnerWatch()
        self._looks = 0  # whose times are not known yet

    # ------------------------------------------------------------------------------------------------ the next call

    def admit(self, name: str) -> None:
        """Let a candidate take part from now on."""
        if name not in self._lanes and name != self._incumbent and self.phase == "screening":
            self._lanes[name] = Lane(name, lambda: None)

    def complete(self) -> None:
        """Say that no further candidate will be admitted."""
        self._complete = True

    @property
    def left(self) -> int:
        """How many candidates are still in the race, the leader among them."""
        return len({*self._lanes, self.leader}) if self.phase == "screening" else len(self.finalists)

    @property
    def known(self) -> dict[str, float]:
        """The times of candidates that have run more than once, or left, relative to the incumbent's."""
        return {name: each for name, each in self._values.items() if name not in self._lanes or self._has_run(name)}

    @property
    def untried(self) -> int:
        """How many candidates are in the race and are not known yet."""
        return sum(not self._has_run(name) for name in self._lanes)

    def _has_run(self, name: str) -> bool:
        return name == self.leader or len(self._lanes[name].samples_s) > 1

    def next(self, sizes: Callable[[], Hashable], *, may_begin: bool = True) -> Turn:
        """Return the candidate of the next call; `sizes` returns its sizes, and is asked only where they matter.

        Without `may_begin`, no round begins: the host has spent its share of the program's time.
        """
        if self.phase == "decided" and self._open is None and self.watch.duel is None:
            turn = self._look(sizes)
        else:
            found = self._continued(sizes)
            if found is None and may_begin and self._open is None and self._under_way < _UNDER_WAY:
                self._open = self._plan(sizes)
                found = self._continued(sizes)
            turn = found or Turn(self.leader)
        self.runs[turn.name] += 1
        led = self._values[self.leader] - 1
        # The launch of another candidate was reserved, and is charged when its time is known.
        self.account.count(led if turn.name == self.leader else 0.0)
        return turn

    def _look(self, sizes: Callable[[], Hashable]) -> Turn:
        """Return a call of the winner, which is timed if it is time for that."""
        watch = self.watch
        if self._looks >= _UNDER_WAY or (not watch.alert and (self._looks or self.account.calls % WATCH_EVERY)):
            return Turn(self.leader)
        watch.alert = max(watch.alert - 1, 0)
        self._looks += 1
        return WinnerLook(self.leader, sizes())

    @property
    def gain_s(self) -> float:
        """How much less a call takes with the leader than with the incumbent."""
        return (1 - self._values[self.leader]) * self.unit_s

    def rest(self, turn: Turn, patience: int = 1, at_least: int = 0) -> int:
        """Return how many calls the leader serves before the race is asked again, and count them.

        Until the decision, it is `patience` times as many, and about `at_least` so many if no times are awaited.
        """
        decided = self.phase == "decided"
        if self._open is not None or not self.watch.is_calm or (turn.is_timed and not decided):
            return 0
        calls = -self.account.calls % WATCH_EVERY if decided else self._rng.randint(*_REST) * patience + at_least
        if self._under_way or self._looks:
            calls = min(calls, _REST_AWAITING)
        self.account.count(self._values[self.leader] - 1, calls)
        self.runs[self.leader] += calls
        return calls

    def _continued(self, sizes: Callable[[], Hashable]) -> Turn | None:
        """Return the next launch of the open round, if it is of these sizes."""
        opened = self._open
        if opened is None:
            return None
        if opened.sizes != sizes():
            opened.strangers += 1
            if opened.strangers >= _PATIENCE:
                self._abandon(opened)
            return None
        opened.strangers = 0
        place = self._issued
        self._issued += 1
        if self._issued == len(opened.names):
            self._open = None
            self._issued = 0
        return Turn(opened.names[place], opened, place)

    def _abandon(self, opened: Round) -> None:
        """Launch no more of a round; the times of its launches so far are of no use."""
        for place in range(self._issued, len(opened.names)):
            self._release(opened, place)
        opened.names = opened.names[: self._issued]
        opened.sizes = None  # it is charged, and compares nothing
        self._open, self._issued = None, 0
        if not opened.names:
            self._under_way -= 1
        elif opened.is_complete:
            self._close(opened)

    def _plan(self, sizes: Callable[[], Hashable]) -> Round | None:
        """Return the next round to begin, if the account allows one."""
        if self.phase == "screening":
            return self._plan_screening(sizes)
        if self.phase == "final":
            if self._started >= self._most_rounds():
                return None
            return self._begin([lane.name for lane in self.finalists], sizes)
        if self.watch.runner_up is None:
            return None
        return self._begin([self.leader, self.watch.runner_up], sizes, is_duel=True)

    def _plan_screening(self, sizes: Callable[[], Hashable]) -> Round | None:
        if self._complete and not any(name != self.leader for name in self._lanes) and not self._under_way:
            self._begin_final()
            return self._plan(sizes) if self.phase == "final" else None
        waiting = [lane for lane in self._lanes.values() if lane.name != self.leader and not self._is_screened(lane)]
        if not waiting:
            if self._complete and not self._under_way:
                self._begin_final()
                return self._plan(sizes) if self.phase == "final" else None
            return None
        self._rng.shuffle(waiting)
        lane = min(waiting, key=self._urgency)
        return self._begin(self._shuffled([self.leader, lane.name]), sizes)

    def _urgency(self, lane: Lane) -> tuple[bool, int, float]:
        """Return a sort key: candidates that seem faster than the leader first, then those that ran least, cheap first.

        A faster leader saves the time that slow candidates cost. Without it, a third of the spaces of 32 candidates had
        the incumbent still leading after 2,000 calls, at 1.8 times the best.
        """
        value = self._values.get(lane.name, math.inf)
        return value >= (1 - _FASTER) * self._values[self.leader], self.runs[lane.name], value

    def _is_screened(self, lane: Lane) -> bool:
        return len(lane.samples_s) >= _SCREENED

    def _shuffled(self, names: list[str]) -> list[str]:
        self._rng.shuffle(names)
        return names

    def _begin(self, names: Sequence[str], sizes: Callable[[], Hashable], *, is_duel: bool = False) -> Round | None:
        """Return a round, if the account allows its launches."""
        expected = [0.0 if n == self.leader else self._values.get(n, SURPRISE) - 1 for n in names]
        total = math.fsum(extra for extra in expected if extra > 0)
        # A limit below one surprise lets a round begin when nothing is owed: else nothing would ever be tried.
        if total > 0 and not self.account.allows(min(total, self.account.most)):
            return None
        self.account.reserve(total)
        self._under_way += 1
        self._started += self.phase == "final"
        # In a new order each time: a device that gets slower must not always hit the same candidate.
        order = list(range(len(names)))
        self._rng.shuffle(order)
        return Round([names[i] for i in order], sizes(), [max(expected[i], 0.0) for i in order], is_duel=is_duel)

    # ---------------------------------------------------------------------------------------------- times that arrive

    def learn(self, turn: Turn, seconds: float | None, *, late: bool = False) -> None:
        """Learn the time of a launch, or None if it is lost. `late`: the device waited for the host within it."""
        found_in = turn.round
        if isinstance(turn, WinnerLook):
            self._looks -= 1
            if seconds is not None and is_time(seconds) and turn.name == self.leader:
                self.watch.note(turn.sizes, seconds)
        if found_in is None:
            return
        found_in.seconds[turn.place] = seconds if seconds is not None and is_time(seconds) else None
        found_in.late.add(late)
        if found_in.is_complete and found_in is not self._open:
            self._close(found_in)

    def failed(self, turn: Turn) -> None:
        """Drop a candidate whose launch failed."""
        self._drop(turn.name)
        self.learn(turn, None)

    def _release(self, closed: Round, place: int) -> None:
        self.account.reserve(-closed.expected[place])

    def _drop(self, name: str) -> None:
        self._lanes.pop(name, None)
        self.finalists = [lane for lane in self.finalists if lane.name != name]
        if self.phase == "final" and not self.finalists:
            self._end()
        if name == self.leader:
            self.leader = self._incumbent
        self.watch.drop(name)

    def _close(self, closed: Round) -> None:
        self._under_way -= 1
        for place in range(len(closed.names)):
            self._release(closed, place)
        seconds = {name: closed.seconds[place] for place, name in enumerate(closed.names)}
        self._charge(closed, seconds)
        # A window in which the device waited for the host contains the wait: it compares only with another such one.
        times = {name: each for name, each in seconds.items() if each is not None}
        if closed.sizes is None or len(closed.late) > 1 or len(times) < len(seconds):
            self._started -= self.phase == "final" and len(closed.names) > 1
            return
        if self.phase == "decided":
            self._fight(closed, times)
        elif self.phase == "final":
            self._compare_finalists(closed.sizes, times)
        elif self.leader in times:
            self._screen(times)

    def _charge(self, closed: Round, seconds: dict[str, float | None]) -> None:
        """Charge the extra time of a round's launches, by the time of the leader beside them."""
        led_s = seconds.get(self.leader)
        if led_s is not None:
            self.unit_s = led_s / self._values[self.leader]
        for place, (name, each) in enumerate(seconds.items()):
            if name == self.leader:
                continue  # its calls were counted with its time
            if each is None or led_s is None:
                self.account.charge(closed.expected[place] if each is not None else 0.0)
            else:
                # Not below zero: a leader that was disturbed would make a slow candidate look as if it saved time.
                self.account.charge(max(each / led_s * self._values[self.leader] - 1, 0.0))

    # -------------------------------------------------------------------------------------------------- the screening

    def _screen(self, times: dict[str, float]) -> None:
        led = self._values[self.leader]
        for name, seconds in times.items():
            lane = self._lanes.get(name)
            if lane is None or name == self.leader:
                continue
            lane.samples_s.append(seconds / times[self.leader] * led)
            count = len(lane.samples_s)
            value = median_s(lane.samples_s) if count >= _MEDIAN_FROM else min(lane.samples_s)
            self._values[name] = value
            best = min([led, *(self._values[n] for n, x in self._lanes.items() if len(x.samples_s) >= _MEDIAN_FROM)])
            keep = next((keep for samples, keep in reversed(_SCREENING) if count >= samples), math.inf)
            if value > keep * best:
                self._drop(name)
            elif count >= _MEDIAN_FROM and self._leads(lane, value, led):
                self.leader = name

    def _leads(self, lane: Lane, value: float, led: float) -> bool:
        error = standard_error(lane.samples_s, OF_MEDIAN)
        return value < led * (1 - max(_FASTER, _SURELY * error))

    def _begin_final(self) -> None:
        """Choose the finalists: a second one too if it is far behind, because the winner is watched beside it."""
        known = {name: self._values[name] for name in {self._incumbent, self.leader, *self._lanes}}
        best = min(known.values())
        ranked = sorted(known, key=lambda name: (known[name], name))
        few = ranked[:2] + [name for name in ranked[2:_FINALISTS] if known[name] <= _CLOSE * best]
        chosen = dict.fromkeys([*few, *(name for name in ranked if known[name] <= _ALIKE * best), self.leader])
        self._final = {n: Lane(n, lambda: None, wins_ties=n == self._incumbent) for n in chosen}
        self.finalists = list(self._final.values())
        self.phase = "final"

    # ------------------------------------------------------------------------------------------------------ the final

    def _most_rounds(self) -> int:
        return min(max(_FINAL_SAMPLES // max(len(self.finalists), 1), _LEAST_ROUNDS), _MOST_ROUNDS)

    def _compare_finalists(self, sizes: Hashable, times: dict[str, float]) -> None:
        if any(lane.name not in times for lane in self.finalists):
            return  # a round that was begun before these were the finalists
        self._latest = {**self._latest, sizes: times} if len(self._latest) < _MOST_SIZES else {sizes: times}
        for lane in self.finalists:
            lane.samples_s.append(times[lane.name])
            self._runs.append((lane.name, times[lane.name]))
        rounds = min((len(lane.samples_s) for lane in self.finalists), default=0)
        stage = next((stage for stage in _FINAL if stage.samples == rounds), None)
        if stage is not None:
            found = paired(self._runs, [lane.name for lane in self.finalists])
            relative = None if found is None else found.times
            self.finalists = survivors(self.finalists, stage, len(self._final), times=relative)
            self._lead_by_final()
        alone = len(self.finalists) <= 1 and rounds >= ENOUGH
        if alone or self._is_settled(rounds) or rounds >= self._most_rounds():
            self._end()

    def _is_settled(self, rounds: int) -> bool:
        if rounds < _SETTLED_AFTER or rounds % _LOOK_EVERY:
            return False
        return pooled_uncertainty(lane.samples_s for lane in self.finalists) <= _SETTLED

    def _lead_by_final(self) -> None:
        """Let the fastest finalist lead, if the leader is surely slower or out."""
        best = self.finalists[0]
        led = next((lane for lane in self.finalists if lane.name == self.leader), None)
        lost = self._final.get(self.leader)
        before_s = self._values.get(self.leader, 1.0)
        if led is None or best.value_s < (1 - _FASTER) * led.value_s:
            if lost is not None and lost.samples_s:
                self._values[best.name] = before_s * best.value_s / lost.value_s
            self._values.setdefault(best.name, before_s)
            self.leader = best.name

    def _end(self) -> None:
        self.phase, self.decided_after = "decided", self.account.calls

    # --------------------------------------------------------------------------------------------------- the decision

    def samples_s(self, name: str) -> Sequence[float]:
        """Return the samples of a finalist in seconds."""
        return self._final[name].samples_s if name in self._final else ()

    def screened(self, name: str) -> Sequence[float]:
        """Return the samples of a candidate that left the race before the final, relative to the incumbent's time."""
        lane = self._lanes.get(name)
        return [self._values[name]] if lane is None and name in self._values else [] if lane is None else lane.samples_s

    @property
    def contenders(self) -> list[str]:
        """The candidates that were in the final."""
        return list(self._final)

    def adopt(self, winner: str, ranking: Iterable[str]) -> None:
        """Let the winner of the decision serve all calls from now on; the best of the others is the runner-up."""
        before_s = self._values.get(self.leader, 1.0)
        ours, theirs = self._final.get(winner), self._final.get(self.leader)
        if ours is not None and theirs is not None and ours.samples_s and theirs.samples_s:
            self._values[winner] = before_s * ours.value_s / theirs.value_s
        self._values.setdefault(winner, before_s)
        self.leader = winner
        others = [name for name in ranking if name != winner]
        runner_up = next(iter(others), None) or (None if winner == self._incumbent else self._incumbent)
        self.watch.begin(runner_up, {sizes: each[winner] for sizes, each in self._latest.items() if winner in each})

    # ------------------------------------------------------------------------------------------------------- watching

    def _fight(self, closed: Round, times: dict[str, float]) -> None:
        watch = self.watch
        if closed.is_duel and watch.duel is not None and watch.runner_up in times and self.leader in times:
            watch.duel.append(times[self.leader] / times[watch.runner_up])

    def beaten_by(self) -> str | None:
        """Return the runner-up after a duel that the winner has lost, once; the runner-up leads from then on."""
        runner_up = self.watch.runner_up
        if not self.watch.beaten() or runner_up is None:
            return None
        self._values[runner_up] = self._values.get(runner_up, 1.0)
        self.leader, self.watch.runner_up = runner_up, self.leader
        return runner_up

    def race_again(self, names: Iterable[str]) -> None:
        """Race these again from the final on, for example after a duel that the winner has lost."""
        self._final = {n: Lane(n, lambda: None, wins_ties=n == self._incumbent) for n in dict.fromkeys(names)}
        self.finalists = list(self._final.values())
        self._runs.clear()
        self._latest.clear()
        self._started, self.phase = 0, "final"
        for name in self._final:
            self._values.setdefault(name, 1.0)
