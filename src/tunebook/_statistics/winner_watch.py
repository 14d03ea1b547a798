"""Notices that the winner of a live race has become slower, by calls that are timed now and then.

A slow look or two may be of a disturbed machine, and all launches may have become slower together. So looks that are
slower than before are followed by more of them, and then by a duel: rounds with the runner-up.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from tunebook._statistics.live_rounds import MOST_SIZES
from tunebook._statistics.race import OF_MEDIAN, median_s, standard_error

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

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
_FORGETS, _FORGETS_SPREAD = 0.25, 0.1  # the weight of the latest look: the clock of a device moves by itself
_DUEL, _CLEAR_DUEL = 8, 5
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
        self.duels = 0
        self._usual: dict[Hashable, tuple[float, float]] = {}  # seconds, and how far looks are off, as a fraction
        self._spread: dict[Hashable, float] = {}  # of sizes whose usual time is to be learnt again
        self._recent: list[float] = []
        self._varies = 0.0  # how far looks were off before the duel, as a fraction

    @property
    def is_calm(self) -> bool:
        """Whether nothing was slow lately."""
        return self.duel is None and not self.alert

    def begin(self, runner_up: str | None, usual_s: Mapping[Hashable, float]) -> None:
        """Watch another winner, whose times at some sizes are known."""
        self.runner_up, self.duel, self.alert = runner_up, None, 0
        self._usual = {sizes: (seconds, 0.0) for sizes, seconds in usual_s.items()}
        self._spread.clear()
        self._recent.clear()

    def begins_look(self, calls: int) -> bool:
        """Whether the next call is timed, after so many calls; if so, its time is to come."""
        if self.looks >= _UNDER_WAY or (not self.alert and (self.looks or calls % WATCH_EVERY)):
            return False
        self.alert = max(self.alert - 1, 0)
        self.looks += 1
        return True

    def fight(self, winner: str, times: Mapping[str, float]) -> None:
        """Learn the times of a round of the duel."""
        if self.duel is not None and self.runner_up is not None and {winner, self.runner_up} <= times.keys():
            self.duel.append(times[winner] / times[self.runner_up])

    def note(self, sizes: Hashable, seconds: float) -> None:
        """Learn a time of the winner; it may begin a duel."""
        usual = self._usual.get(sizes)
        if usual is not None and not self._recent and self.duel is None:
            usual_s, spread = usual
            off = abs(seconds - usual_s) / usual_s
            if off < _SLOWER - 1:  # nearly all looks
                self._usual[sizes] = (
                    usual_s + _FORGETS * (seconds - usual_s),
                    spread + _FORGETS_SPREAD * (off - spread),
                )
                return
        if self.duel is not None:
            return
        if usual is None:
            if len(self._usual) > MOST_SIZES:  # calls of ever new sizes must not grow this for ever
                self._usual.clear()
                self._spread.clear()
            self._usual[sizes] = seconds, self._spread.get(sizes, 0.0)
            return
        usual_s, spread = usual
        off, far = seconds / usual_s - 1, max(_SLOWER - 1, _FURTHER * spread)
        slow = off > far
        if (slow or self._recent) and self._is_suspect(sizes, off if slow else 0.0):
            return
        if slow:
            self.alert = _SUSPECTS - 1
        elif off < -far:
            self._usual[sizes] = seconds, spread  # the looks before were of a disturbed machine
        else:
            usual_s += _FORGETS * (seconds - usual_s)
            self._usual[sizes] = usual_s, spread + _FORGETS_SPREAD * (abs(off) - spread)

    def _is_suspect(self, sizes: Hashable, off: float) -> bool:
        """Whether two of the last three looks were slow: by how much, or zero, each."""
        self._recent = [*self._recent, off][-_SUSPECTS:]
        if (middle := sorted([*self._recent, 0.0, 0.0])[-2]) > 0:
            self._suspect(sizes, middle)
            return True
        if not any(self._recent):
            self._recent.clear()
        return False

    def _suspect(self, sizes: Hashable, off: float) -> None:
        self._recent.clear()
        self.alert = 0
        spreads = {each: spread for each, (_, spread) in self._usual.items()}
        if self.runner_up is None:
            self._learn_again(spreads)  # nothing else to serve: this is usual now
            return
        # If the duel is in vain, the same again does not begin another one at once.
        self._varies = spreads.get(sizes, 0.0)
        self._spread = {**spreads, sizes: max(off / _FURTHER, spreads.get(sizes, 0.0))}
        self.duel = []
        self.duels += 1

    def _learn_again(self, spreads: dict[Hashable, float]) -> None:
        self._spread = spreads
        self._usual.clear()

    def beaten(self) -> bool:
        """Whether the winner has just lost a duel; asked once, the duel is over."""
        ratios = self.duel
        if ratios is None or len(ratios) < _CLEAR_DUEL or self.runner_up is None:
            return False
        if len(ratios) < _DUEL and sorted(ratios)[1] <= _CLEARLY_BEATEN:  # one round may have been disturbed
            return False
        self.duel = None
        self._learn_again(self._spread)  # the new level of the device, or the new leader's
        varied = _UNCERTAIN * self._varies / math.sqrt(len(ratios))
        middle, error = median_s(ratios), max(standard_error(ratios, OF_MEDIAN), varied)
        return middle * (1 - 2 * error) > _BEATEN

    def drop(self, name: str) -> None:
        """Have no runner-up any more, if it is this one."""
        if name == self.runner_up:
            self.runner_up = self.duel = None
