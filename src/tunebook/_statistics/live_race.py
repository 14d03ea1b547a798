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

from tunebook._statistics.live_comparisons import (
    FASTER,
    FinalComparisons,
    finalists_of,
    rounds_of_final,
    surely_below,
    times_as_long,
    varies_by_itself,
)
from tunebook._statistics.live_rounds import ComparableTimes, Round, Turn, WinnerLook
from tunebook._statistics.race import ENOUGH, HOPELESS, Lane, is_time, median_s
from tunebook._statistics.slowdown_account import DisturbedLaunches
from tunebook._statistics.winner_watch import AWAITING, WATCH_EVERY, WinnerWatch

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from tunebook._statistics.live_comparisons import Aside
    from tunebook._statistics.live_rounds import Conditions
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
_PRESSED_ROUNDS: Final = 32  # while the account holds up the race
# If the account has held up the race for the first part of its window, candidates that seem this much slower leave;
# after the second, all that seem slower: then no more launches cost anything.
_HELD_UP, _ENDS, _PROMISING = 0.5, 0.8, 1.1
_UNDER_WAY: Final = 4  # rounds whose times are not known yet
# So many calls of other sizes in a row give up a round that waits for calls of its own.
_PATIENCE: Final = 8
# While no round can begin, the leader serves so many calls before the race is asked again, because asking takes host
# time: a random number, so that the races of a program do not all ask in the same step, where the first one would take
# all of the host's share.
_REST: Final = 8, 24


class LiveRace:
    """Chooses the candidate of each call, and the winner. The first name is the incumbent's.

    Candidates take part from `admit` on, when they can run without a wait. `complete` says that all are admitted.
    """

    def __init__(
        self, incumbent: str, account: SlowdownAccount, rng: random.Random, aside: Aside = lambda work: work()
    ) -> None:
        """`aside` does long computations, now or beside the program: the race goes on meanwhile."""
        self._incumbent, self.account, self._rng = incumbent, account, rng
        self.leader = incumbent
        self.phase: Phase = "screening"
        self._values: dict[str, float] = {incumbent: 1.0}  # times, relative to the incumbent's
        self._led = 1.0  # the leader's, at most
        self._lanes: dict[str, Lane] = {}  # in the screening
        self.finalists: list[Lane] = []
        self._started = 0  # final rounds
        self._comparisons: Final = FinalComparisons(aside)
        self._final: dict[str, Lane] = {}
        self._complete = False
        self._open: Round | None = None
        self._issued = 0  # launches of the open round
        self._under_way = 0
        self._comparable: Final = ComparableTimes()
        self.runs: Counter[str] = Counter()
        self.decided_after: int | None = None  # calls
        self.unit_s = 0.0  # the latest time of the incumbent, by the leader's
        self.watch: Final = WinnerWatch()
        self.is_refused, self._held_up = False, 0  # by the account, when it was asked last; the calls of all such times
        self._disturbed: Final = DisturbedLaunches()

    # ------------------------------------------------------------------------------------------------ the next call

    def admit(self, name: str) -> None:
        """Let a candidate take part from now on."""
        if name not in self._lanes and name != self._incumbent and self.phase == "screening":
            self._lanes[name] = Lane(name, lambda: None)

    def complete(self) -> None:
        """Say that no further candidate will be admitted."""
        self._complete = True

    def withdraw(self, name: str) -> bool:
        """Let a candidate take no part any more, unless it has run; return whether it was so."""
        if not self.runs[name]:
            self._drop(name)
        return not self.runs[name]

    @property
    def is_round_open(self) -> bool:
        """Whether candidates of a round are still to be launched."""
        return self._open is not None

    @property
    def is_pressed(self) -> bool:
        """Whether the account has held up rounds for so long that only promising candidates are still to run."""
        return self._held_up >= _HELD_UP * self.account.window

    @property
    def is_overdue(self) -> bool:
        """Whether the account has held up rounds for so long that the race ends with the candidates that have run."""
        return self._held_up >= _ENDS * self.account.window

    @property
    def left(self) -> int:
        """How many candidates are still in the race, the leader among them."""
        return len({*self._lanes, self.leader}) if self.phase == "screening" else len(self.finalists)

    @property
    def known(self) -> dict[str, float]:
        """The times of candidates that have run more than once, or left, relative to the incumbent's."""
        return {name: each for name, each in self._values.items() if name not in self._lanes or self._has_run(name)}

    @property
    def racing(self) -> set[str]:
        """The candidates that may be launched again, without the leader."""
        names = self._lanes if self.phase == "screening" else [lane.name for lane in self.finalists]
        return {self._incumbent, *names} - {self.leader}

    @property
    def untried(self) -> list[str]:
        """The candidates that are in the race and are not known yet."""
        return [name for name in self._lanes if not self._has_run(name)]

    def _has_run(self, name: str) -> bool:
        return name in (self.leader, self._incumbent) or len(self._lanes[name].samples_s) > (not self.is_pressed)

    def next(self, sizes: Callable[[], Hashable], *, may_begin: bool = True) -> Turn:
        """Return the candidate of the next call; `sizes` returns its sizes, and is asked only where they matter.

        Without `may_begin`, no round begins: the host has spent its share of the program's time.
        """
        if self.phase == "decided" and self._open is None and self.watch.duel is None:
            due = self.watch.begins_look(self.account.calls)
            turn = WinnerLook(self.leader, sizes()) if due else Turn(self.leader)
        else:
            self._take_comparison()
            found = self._continued(sizes)
            self.is_refused = False
            if found is None and may_begin and self._open is None and self._under_way < _UNDER_WAY:
                self._open = self._plan(sizes)
                found = self._continued(sizes)
            self._held_up += self.is_refused
            turn = found or Turn(self.leader)
        self.runs[turn.name] += 1
        # The launch of another candidate was reserved, and is charged when its time is known.
        self.account.count(self._led - 1 if turn.name == self.leader else 0.0)
        return turn

    @property
    def is_calm(self) -> bool:
        """Whether the winner serves all calls, and nothing is awaited."""
        return self.phase == "decided" and self._open is None and self.watch.is_calm and not self.watch.looks

    def count_led(self, calls: int) -> None:
        """Count calls that the leader serves."""
        self.account.count(self._led - 1, calls)
        self.runs[self.leader] += calls

    @property
    def gain_s(self) -> float:
        """How much less a call takes with the leader than with the incumbent."""
        return (1 - self._led) * self.unit_s

    def rest(self, turn: Turn, patience: int = 1, at_least: int = 0) -> int:
        """Return how many calls the leader serves before the race is asked again, and count them.

        Until the decision, it is `patience` times as many, and about `at_least` so many: nothing can begin before.
        """
        decided = self.phase == "decided"
        if self._open is not None or not self.watch.is_calm or (turn.is_timed and not decided):
            return 0
        calls = -self.account.calls % WATCH_EVERY if decided else self._rng.randint(*_REST) * patience + at_least
        if (self._under_way or self.watch.looks) and not at_least:
            calls = min(calls, AWAITING)
        self.count_led(calls)
        self._held_up += self.is_refused * calls
        return calls

    def _continued(self, sizes: Callable[[], Hashable]) -> Turn | None:
        """Return the next launch of the open round, if it is of these sizes."""
        if (opened := self._open) is None:
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
            self.account.reserve(-opened.expected[place])
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
            return self._plan_final(sizes)
        if self.watch.runner_up is None:
            return None
        return self._begin([self.leader, self.watch.runner_up], sizes, is_duel=True)

    def _plan_final(self, sizes: Callable[[], Hashable]) -> Round | None:
        if self.is_overdue:
            self.finalists = [lane for lane in self.finalists if self._is_promising(lane)]
        if self.finalists and self._started < self._most_rounds():
            return self._begin([lane.name for lane in self.finalists], sizes)
        if not self._under_way and not self._comparisons.is_under_way:
            self._end()
        return None

    def _plan_screening(self, sizes: Callable[[], Hashable]) -> Round | None:
        if self._complete and not any(name != self.leader for name in self._lanes) and not self._under_way:
            self._begin_final()
            return self._plan(sizes) if self.phase == "final" else None
        if not self.unit_s:  # how long a call takes decides which kernels are tuned first
            return None if self._under_way else self._begin([self.leader], sizes)
        waiting = [lane for lane in self._lanes.values() if lane.name != self.leader and not self._is_screened(lane)]
        if self.is_pressed:
            waiting = [lane for lane in waiting if not lane.samples_s or self._is_promising(lane)]
        if not waiting:
            if self._complete and not self._under_way:
                self._begin_final()
                return self._plan(sizes) if self.phase == "final" else None
            return None
        self._rng.shuffle(waiting)
        lane = min(waiting, key=self._urgency)
        return self._begin([self.leader, lane.name], sizes)

    def _urgency(self, lane: Lane) -> tuple[bool, int, float]:
        """Return a sort key: candidates that seem faster than the leader first, then those that ran least, cheap first.

        A faster leader saves the time that slow candidates cost. Without it, a third of the spaces of 32 candidates had
        the incumbent still leading after 2,000 calls, at 1.8 times the best.
        """
        if lane.name == self._incumbent:
            return False, 0, 0.0
        value = self._values.get(lane.name, math.inf)
        return value >= (1 - FASTER) * self._values[self.leader], self.runs[lane.name], value

    def _is_promising(self, lane: Lane) -> bool:
        return self._values[lane.name] <= self._values[self.leader] * (1.0 if self.is_overdue else _PROMISING)

    def _is_screened(self, lane: Lane) -> bool:
        return len(lane.samples_s) >= _SCREENED

    def _begin(self, names: Sequence[str], sizes: Callable[[], Hashable], *, is_duel: bool = False) -> Round | None:
        """Return a round, if the account allows its launches."""
        expected = [0.0 if n == self.leader else self._values.get(n, SURPRISE) - 1 for n in names]
        total = math.fsum(extra for extra in expected if extra > 0)
        # A limit below one surprise lets a round begin when nothing is owed: else nothing would ever be tried.
        if total > 0 and not self.account.allows(min(total, self.account.most)):
            self.is_refused = True
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
            self.watch.looks -= 1
            if seconds is not None and is_time(seconds) and turn.name == self.leader:
                self.watch.note(turn.sizes, seconds, late=late)
        if found_in is None:
            return
        found_in.seconds[turn.place] = seconds if seconds is not None and is_time(seconds) else None
        found_in.late |= {turn.place} if late else set()
        if found_in.is_complete and found_in is not self._open:
            self._close(found_in)

    def failed(self, turn: Turn) -> None:
        """Drop a candidate whose launch failed."""
        self._drop(turn.name)
        self.learn(turn, None)

    def _drop(self, name: str) -> None:
        self._lanes.pop(name, None)
        self.finalists = [lane for lane in self.finalists if lane.name != name]
        if self.phase == "final" and not self.finalists:
            self._end()
        if name == self.leader:
            self.leader, self._led = self._incumbent, 1.0
        self.watch.drop(name)

    def _close(self, closed: Round) -> None:
        self._under_way -= 1
        self.account.reserve(-math.fsum(closed.expected[: len(closed.names)]))
        seconds = {name: closed.seconds[place] for place, name in enumerate(closed.names)}
        self._charge(closed, seconds)
        comparable = self._comparable.of(closed, self.account.calls)
        if self.phase == "final" and len(closed.names) > 1:
            self._started += len(comparable) - 1
        for conditions, times in comparable:
            if self.phase == "decided":
                if closed.is_duel:
                    self.watch.fight(self.leader, times, conditions)
            elif self.phase == "final":
                self._compare_finalists(conditions, times)
            elif self.leader in times:
                self._screen(times)

    def _charge(self, closed: Round, seconds: dict[str, float | None]) -> None:
        """Charge the extra time of a round's launches, by the time of the leader beside them."""
        led_s = seconds.get(self.leader)
        if led_s is not None:
            self.unit_s = led_s / self._values[self.leader]
            led_s = self._disturbed.own_time(closed.sizes, led_s)
        for place, (name, each) in enumerate(seconds.items()):
            if name == self.leader:
                continue  # its calls were counted with its time
            if each is None or led_s is None:
                self.account.charge(closed.expected[place] if each is not None else 0.0)
            else:
                lane = self._final.get(name) or self._lanes.get(name)
                known = self._values[name] if lane and len(lane.samples_s) >= _MEDIAN_FROM else None
                self.account.charge(self._disturbed.own_extra(name, each / led_s * self._values[self.leader], known))

    # -------------------------------------------------------------------------------------------------- the screening

    def _screen(self, times: dict[str, float]) -> None:
        led = self._values[self.leader]
        for name, seconds in times.items():
            lane = self._lanes.get(name)
            if lane is None or name == self.leader:
                continue
            if name == self._incumbent:
                self._check_lead(lane, times)
                return
            lane.samples_s.append(seconds / times[self.leader] * led)
            count = len(lane.samples_s)
            value = median_s(lane.samples_s) if count >= _MEDIAN_FROM else min(lane.samples_s)
            self._values[name] = value
            best = min([led, *(self._values[n] for n, x in self._lanes.items() if len(x.samples_s) >= _MEDIAN_FROM)])
            keep = next((keep for samples, keep in reversed(_SCREENING) if count >= samples), math.inf)
            if value > keep * best:
                self._drop(name)
            elif count >= _MEDIAN_FROM and (at_most := surely_below(lane.samples_s, led)) is not None:
                # The account gets only what is surely saved: of many candidates, noise flatters the fastest one.
                self.leader, self._led = name, min(at_most, self._led)
                self._lanes[self._incumbent] = Lane(self._incumbent, lambda: None)  # it is compared with the new leader
                return

    def _check_lead(self, lane: Lane, times: dict[str, float]) -> None:
        """Compare the incumbent with a leader, which may lead by chance, and would make all calls slower."""
        lane.samples_s.append(times[lane.name] / times[self.leader])
        if len(lane.samples_s) >= _MEDIAN_FROM and median_s(lane.samples_s) < 1:
            self.leader, self._led = self._incumbent, 1.0
        elif self._is_screened(lane):
            self._led = self._values[self.leader] = 1 / median_s(lane.samples_s)
        if self.leader == self._incumbent or self._is_screened(lane):
            del self._lanes[self._incumbent]

    def _begin_final(self) -> None:
        """Choose the finalists. The incumbent is one of them, so that savings are known beside it."""
        known = {name: self._values[name] for name in {self._incumbent, self.leader, *self._lanes}}
        self._line_up(finalists_of(known, always=(self.leader, self._incumbent)))

    def _line_up(self, names: Iterable[str]) -> None:
        self._final = {n: Lane(n, lambda: None, wins_ties=n == self._incumbent) for n in dict.fromkeys(names)}
        self.finalists = list(self._final.values())
        self.phase = "final"

    # ------------------------------------------------------------------------------------------------------ the final

    def _most_rounds(self) -> int:
        return _PRESSED_ROUNDS if self.is_pressed else rounds_of_final(len(self.finalists))

    def _compare_finalists(self, conditions: Conditions, times: dict[str, float]) -> None:
        if any(lane.name not in times for lane in self.finalists):
            return  # a round that was begun before these were the finalists
        self._comparisons.add(conditions, times)
        for lane in self.finalists:
            lane.samples_s.append(times[lane.name])
        self._comparisons.compare(self.finalists, self._rounds, len(self._final))
        self._take_comparison()

    @property
    def _rounds(self) -> int:
        return min((len(lane.samples_s) for lane in self.finalists), default=0)

    def _take_comparison(self) -> None:
        """Let the finalists leave that a comparison calls slow, and end the race if it is clear."""
        compared = self._comparisons.take()
        if self.phase != "final" or self._comparisons.is_under_way:
            return
        if compared is not None and compared.left is not None:
            lanes = {lane.name: lane for lane in self.finalists}
            self.finalists = [lanes[name] for name in compared.left if name in lanes]
            self._lead_by_final()
        alone = len(self.finalists) <= 1 and self._rounds >= ENOUGH
        if alone or (compared is not None and compared.is_settled) or self._rounds >= self._most_rounds():
            self._end()

    def _lead_by_final(self) -> None:
        """Let the fastest finalist lead, if the leader is surely slower or out."""
        best, led = self.finalists[0], next((lane for lane in self.finalists if lane.name == self.leader), None)
        if led is None or best.value_s < (1 - FASTER) * led.value_s:
            self._take_lead(best.name)
        elif self.leader != self._incumbent:
            self._take_lead(self.leader)

    def _take_lead(self, name: str) -> None:
        """Let a finalist lead; its time is that beside the incumbent in the final, or else beside the last leader."""
        for other in (self._incumbent, self.leader):
            if (found := times_as_long(self.samples_s(name), self.samples_s(other))) is not None:
                self._values[name] = self._values[other] * found
                break
        self._led = self._values.setdefault(name, self._values.get(self.leader, 1.0))
        self.leader = name

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
        """The candidates that ran in the final."""
        return [name for name, lane in self._final.items() if lane.samples_s]

    def adopt(self, winner: str, ranking: Iterable[str]) -> None:
        """Let the winner of the decision serve all calls from now on; the best of the others is the runner-up."""
        self._take_lead(winner)
        others = [name for name in ranking if name != winner]
        runner_up = next(iter(others), None) or (None if winner == self._incumbent else self._incumbent)
        varies = 0.0 if runner_up is None else varies_by_itself(self.samples_s(winner), self.samples_s(runner_up))
        self.watch.begin(runner_up, self._comparisons.latest_of(winner), varies)

    # ------------------------------------------------------------------------------------------------------- watching

    def beaten_by(self) -> str | None:
        """Return the runner-up after a duel that the winner has lost, once; the runner-up leads from then on."""
        runner_up = self.watch.runner_up
        if not self.watch.beaten() or runner_up is None:
            return None
        self._values[runner_up] = self._values.get(runner_up, 1.0)
        self.leader, self.watch.runner_up, self._led = runner_up, self.leader, self._values[runner_up]
        return runner_up

    def race_again(self, names: Iterable[str]) -> None:
        """Race these again from the final on, for example after a duel that the winner has lost."""
        self._line_up(names)
        self._comparisons.clear()
        self._started = 0
        for name in self._final:
            self._values.setdefault(name, 1.0)
