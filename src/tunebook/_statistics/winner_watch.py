"""Notices that the winner of a live race has become slower, by calls that are timed now and then.

A slow look or two may be of a disturbed machine, and all launches may have become slower together. So looks that are
slower than before are followed by more of them, and then by a duel: rounds with the runner-up.

A look is *late* if the device waited for the host within it: it times the host too. Late looks are compared with late
ones, and count for nothing as long as the device is busy at some of the launches.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from tunebook._statistics.live_rounds import MOST_SIZES
from tunebook._statistics.race import OF_MEDIAN, median_s, standard_error

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from tunebook._statistics.live_rounds import Conditions

# The winner is timed at every so manieth call: a prime number, so that sizes that come in turn all have theirs. After
# one that is slower than before, the next ones are timed too. Two slow ones of three begin a duel of so many rounds
# with the runner-up, or fewer if they are clear: 23 + 4 + 2 + 10 to 16 calls, and the time until their events are read.
WATCH_EVERY: Final = 23
AWAITING: Final = 4  # calls between a look, or a round, and the next question for its times
_SUSPECTS, _SLOWER = 3, 1.08
_UNDER_WAY: Final = 4  # looks whose times are not known yet
# Times that vary by themselves, for example of a device that waits for the host, begin no duel after duel: a look is
# slow only if it is so many times further off than looks usually are.
_FURTHER: Final = 4.0
# Each duel that the winner has won shows how far times vary by themselves, so the next one takes clearer looks to begin
# and a clearer result to lose: by so much of the logarithm of their number. Where a device waits for a busy host, a
# winner fought 233 duels in 1,129 looks without it, and lost 13.
_CLEARER_LOOKS, _CLEARER_DUEL = 0.5, 1.0
_SURELY: Final = 2.5  # standard errors, for the first duel
# After so many late looks in a row the device is taken to wait for the host at every launch.
_IDLE: Final = 16
_FORGETS, _FORGETS_SPREAD = 0.25, 0.1  # the weight of the latest look: the clock of a device moves by itself
# Of a duel. At so many rounds it is over even if the device waited for the host in most of them.
_DUEL, _CLEAR_DUEL, _MOST_ROUNDS = 8, 5, 24
# A few rounds of a noisy device may be alike by chance: their ratios are as uncertain as looks have been off before.
# Without it, the runner-up of a server whose device waits for the host won 1 duel in 15 against an equal winner.
_UNCERTAIN: Final = 2.2
_BEATEN, _CLEARLY_BEATEN = 1.015, 1.08  # as far as the tie rule lets candidates differ; as far as a look is slow


class WinnerWatch:
    """The looks at a winner, and its duel with the runner-up."""

    def __init__(self) -> None:
        self.runner_up: str | None = None
        self.alert = 0  # calls that are timed because one was slow
        self.looks = 0  # whose times are not known yet
        self.duel: list[float] | None = None  # the winner's times, relative to the runner-up's
        self._fought: dict[Conditions, list[tuple[float, float]]] = {}  # the same in seconds: winner, runner-up
        self.duels = 0
        self._void = 0  # rounds of the duel in which the device waited for the host, and is busy otherwise
        # By sizes, and whether looks are late: seconds, and how far looks are off, as a fraction.
        self._usual: dict[Conditions, tuple[float, float]] = {}
        self._spread: dict[Conditions, float] = {}  # where the usual time is to be learnt again
        self._idle: dict[Hashable, int] = {}  # late looks since the device was busy, by sizes at which it was
        self._recent: list[float] = []
        self._varies = 0.0  # how far looks were off before the duel, as a fraction

    @property
    def is_calm(self) -> bool:
        """Whether nothing was slow lately."""
        return self.duel is None and not self.alert

    def begin(self, runner_up: str | None, usual_s: Mapping[Conditions, float], varies: float = 0.0) -> None:
        """Watch another winner, whose times at some sizes are known, late or not; `varies`: how far, as a fraction."""
        self.runner_up, self.duel, self.alert = runner_up, None, 0
        self._usual = {conditions: (seconds, varies) for conditions, seconds in usual_s.items()}
        self._idle = {sizes: 0 for sizes, late in usual_s if not late}
        self._spread.clear()
        self._recent.clear()

    def begins_look(self, calls: int) -> bool:
        """Whether the next call is timed, after so many calls; if so, its time is to come."""
        if self.looks >= _UNDER_WAY or (not self.alert and (self.looks or calls % WATCH_EVERY)):
            return False
        self.alert = max(self.alert - 1, 0)
        self.looks += 1
        return True

    def fight(self, winner: str, times: Mapping[str, float], conditions: Conditions = (None, False)) -> None:
        """Learn the times of a round of the duel."""
        if self.duel is None or self.runner_up is None or not {winner, self.runner_up} <= times.keys():
            return
        sizes, late = conditions
        if late and sizes in self._idle:
            self._void += 1
        else:
            self.duel.append(times[winner] / times[self.runner_up])
            self._fought.setdefault(conditions, []).append((times[winner], times[self.runner_up]))

    def note(self, sizes: Hashable, seconds: float, *, late: bool = False) -> None:
        """Learn a time of the winner; it may begin a duel."""
        if self.duel is not None or self._says_nothing(sizes, late=late):
            return
        conditions = sizes, late
        # A look that is not late takes no longer than late ones, unless the winner has become slower.
        usual = self._usual.get(conditions) or (None if late else self._usual.get((sizes, True)))
        if usual is None:
            self._forget_if_many()
            self._usual[conditions] = seconds, self._spread.get(conditions, 0.0)
            return
        usual_s, spread = usual
        off, far = seconds / usual_s - 1, max(_SLOWER - 1, self._further(_FURTHER, _CLEARER_LOOKS) * spread)
        if (off > far or self._recent) and self._is_suspect(conditions, off if off > far else 0.0):
            return
        if off > far:
            self.alert = _SUSPECTS - 1
        elif off < -far or conditions not in self._usual:
            self._usual[conditions] = seconds, spread  # the looks before were of a disturbed machine, or late
        else:
            usual_s += _FORGETS * (seconds - usual_s)
            self._usual[conditions] = usual_s, spread + _FORGETS_SPREAD * (abs(off) - spread)

    def _says_nothing(self, sizes: Hashable, *, late: bool) -> bool:
        """Whether a look is late at sizes at which the device is busy; note how often it was so."""
        if not late:
            self._idle[sizes] = 0
            return False
        if (before := self._idle.get(sizes)) is None:
            return False
        if before + 1 >= _IDLE:
            del self._idle[sizes]
            return False
        self._idle[sizes] = before + 1
        self.alert = max(self.alert, int(bool(self._recent)))  # the next look may say whether this one is slow again
        return True

    def _further(self, least: float, by: float) -> float:
        """Return how far off times must be, after the duels so far."""
        return least * (1 + by * math.log(1 + self.duels))

    def _forget_if_many(self) -> None:
        """Forget all usual times if there are many: calls of ever new sizes must not grow this for ever."""
        if len(self._usual) > MOST_SIZES:
            for known in (self._usual, self._spread, self._idle):
                known.clear()

    def _is_suspect(self, conditions: Conditions, off: float) -> bool:
        """Whether two of the last three looks were slow: by how much, or zero, each."""
        self._recent = [*self._recent, off][-_SUSPECTS:]
        if (middle := sorted([*self._recent, 0.0, 0.0])[-2]) > 0:
            self._suspect(conditions, middle)
            return True
        if not any(self._recent):
            self._recent.clear()
        return False

    def _suspect(self, conditions: Conditions, off: float) -> None:
        self._recent.clear()
        self.alert = 0
        spreads = {each: spread for each, (_, spread) in self._usual.items()}
        if self.runner_up is None:
            self._learn_again(spreads)  # nothing else to serve: this is usual now
            return
        # If the duel is in vain, the same again does not begin another one at once.
        self._varies = spreads.get(conditions, 0.0)
        self._spread = {**spreads, conditions: max(off / _FURTHER, spreads.get(conditions, 0.0))}
        self.duel, self._void = [], 0
        self._fought.clear()

    def _learn_again(self, spreads: dict[Conditions, float]) -> None:
        self._spread = spreads
        self._usual.clear()

    def beaten(self) -> bool:
        """Whether the winner has just lost a duel; asked once, the duel is over."""
        ratios = self.duel
        if ratios is None or self.runner_up is None or not self._is_over(ratios):
            return False
        surely = self._further(_SURELY, _CLEARER_DUEL)
        self.duel = None
        self.duels += 1
        if len(ratios) < _CLEAR_DUEL:  # it says nothing, so slow looks begin another one
            return False
        varied = _UNCERTAIN * self._varies / math.sqrt(len(ratios))
        middle, error = median_s(ratios), max(standard_error(ratios, OF_MEDIAN), varied)
        is_beaten = middle * (1 - surely * error) > _BEATEN
        self._learn_again(self._spread)  # the new level of the device, or the new leader's
        for conditions, pairs in self._fought.items():
            self._usual[conditions] = median_s([pair[is_beaten] for pair in pairs]), self._spread.get(conditions, 0.0)
        return is_beaten

    def _is_over(self, ratios: list[float]) -> bool:
        rounds = len(ratios)
        clear = rounds >= _CLEAR_DUEL and sorted(ratios)[1] > _CLEARLY_BEATEN  # one round may have been disturbed
        return clear or rounds >= _DUEL or rounds + self._void >= _MOST_ROUNDS

    def drop(self, name: str) -> None:
        """Have no runner-up any more, if it is this one."""
        if name == self.runner_up:
            self.runner_up = self.duel = None
