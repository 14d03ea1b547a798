"""Notices that the winner of a live race has become slower, by calls that are timed now and then.

A slow look or two may be of a disturbed machine, and all launches may have become slower together. So looks that are
slower than before are followed by more of them, and then by a duel: rounds with the runner-up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tunebook._statistics.race import OF_MEDIAN, median_s, standard_error

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

# The winner is timed at every so manieth call: a prime number, so that sizes that come in turn all have theirs. After
# one that is slower than before, the next ones are timed too. Two slow ones of three begin a duel of so many rounds
# with the runner-up: 13 + 4 + 2 + 16 calls, and the time until their events are read.
WATCH_EVERY: Final = 13
_SUSPECTS, _SLOWER = 3, 1.08
# Times that vary by themselves, for example of a device that waits for the host, begin no duel after duel: a look is
# slow only if it is so many times further off than looks usually are.
_FURTHER: Final = 4.0
_FORGETS, _FORGETS_SPREAD = 0.25, 0.1  # the weight of the latest look: the clock of a device moves by itself
_DUEL: Final = 8
_BEATEN: Final = 1.015  # as far as the tie rule lets candidates differ
_MOST_SIZES: Final = 64


class WinnerWatch:
    """The looks at a winner, and its duel with the runner-up."""

    def __init__(self) -> None:
        self.runner_up: str | None = None
        self.alert = 0  # calls that are timed because one was slow
        self.duel: list[float] | None = None  # the winner's times, relative to the runner-up's
        self.duels = 0
        self._usual: dict[Hashable, tuple[float, float]] = {}  # seconds, and how far looks are off, as a fraction
        self._spread: dict[Hashable, float] = {}  # of sizes whose usual time is to be learnt again
        self._recent: list[float] = []

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

    def note(self, sizes: Hashable, seconds: float) -> None:
        """Learn a time of the winner; it may begin a duel."""
        if self.duel is not None:
            return
        usual = self._usual.get(sizes)
        if usual is None:
            if len(self._usual) > _MOST_SIZES:  # calls of ever new sizes must not grow this for ever
                self._usual.clear()
                self._spread.clear()
            self._usual[sizes] = seconds, self._spread.get(sizes, 0.0)
            return
        usual_s, spread = usual
        off, far = seconds / usual_s - 1, max(_SLOWER - 1, _FURTHER * spread)
        slow = off > far
        self._recent = [*self._recent, off if slow else 0.0][-_SUSPECTS:]
        if len(self._recent) == _SUSPECTS and (middle := median_s(self._recent)) > 0:
            self._suspect(sizes, middle)
        elif slow:
            self.alert = _SUSPECTS - 1
        elif off < -far:
            self._usual[sizes] = seconds, spread  # the looks before were of a disturbed machine
        else:
            usual_s += _FORGETS * (seconds - usual_s)
            self._usual[sizes] = usual_s, spread + _FORGETS_SPREAD * (abs(off) - spread)

    def _suspect(self, sizes: Hashable, off: float) -> None:
        self._recent.clear()
        self.alert = 0
        spreads = {each: spread for each, (_, spread) in self._usual.items()}
        if self.runner_up is None:
            self._learn_again(spreads)  # nothing else to serve: this is usual now
            return
        # If the duel is in vain, the same again does not begin another one at once.
        self._spread = {**spreads, sizes: max(off / _FURTHER, spreads.get(sizes, 0.0))}
        self.duel = []
        self.duels += 1

    def _learn_again(self, spreads: dict[Hashable, float]) -> None:
        self._spread = spreads
        self._usual.clear()

    def beaten(self) -> bool:
        """Whether the winner has just lost a duel; asked once, the duel is over."""
        ratios = self.duel
        if ratios is None or len(ratios) < _DUEL or self.runner_up is None:
            return False
        self.duel = None
        self._learn_again(self._spread)  # the new level of the device, or the new leader's
        middle, error = median_s(ratios), standard_error(ratios, OF_MEDIAN)
        return middle * (1 - 2 * error) > _BEATEN

    def drop(self, name: str) -> None:
        """Have no runner-up any more, if it is this one."""
        if name == self.runner_up:
            self.runner_up = self.duel = None
