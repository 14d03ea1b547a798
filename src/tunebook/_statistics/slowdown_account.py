"""The account that bounds how much slower the calls of a program are while candidates are tried in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tunebook._statistics.live_rounds import MOST_SIZES

if TYPE_CHECKING:
    from collections.abc import Hashable


class SlowdownAccount:
    """Bounds the extra time of calls: any `window` of them take at most `slowdown` times as long as the incumbent's.

    In units of one call of the incumbent. A debt of half of the limit may be made at once, and the other half is paid
    off evenly, call by call: so the bound holds for every window, wherever it begins. Calls that are faster than the
    incumbent's pay off more, but are not saved up.
    """

    def __init__(self, slowdown: float, window: int) -> None:
        self.window: Final = window
        self._rate: Final = (slowdown - 1) / 2
        self.most: Final = self._rate * window
        self._debt = self._reserved = 0.0
        self.calls, self.extra = 0, 0.0  # of all calls: their number, and how much longer they took

    @property
    def debt(self) -> float:
        """The extra time that is not paid off yet."""
        return self._debt

    def allows(self, extra: float) -> bool:
        """Whether a launch that takes so much longer keeps to the limit, with all that are under way."""
        return self._debt + self._reserved + extra <= self.most

    def count(self, extra: float, calls: int = 1) -> None:
        """Count calls, with the extra time of each if it is known by now: negative if the calls were faster."""
        self.calls += calls
        self.charge((extra - self._rate) * calls)
        self.extra += self._rate * calls

    def reserve(self, extra: float) -> None:
        """Set aside the expected extra time of a launch, or release it with a negative number."""
        self._reserved = max(self._reserved + extra, 0.0)

    def charge(self, extra: float) -> None:
        """Add the extra time of a launch that was counted before."""
        self.extra += extra
        self._debt = max(self._debt + extra, 0.0)


# A launch that takes so many times as long as is known of its candidate was disturbed, or the candidate is slower now.
_FAR: Final = 1.5


class DisturbedLaunches:
    """Tells which extra time of a launch is its candidate's own."""

    def __init__(self) -> None:
        self._led_s: dict[Hashable, float] = {}  # the latest time of the leader, by sizes
        self._slow: set[str] = set()  # candidates whose latest launch took far longer than is known of them

    def own_time(self, sizes: Hashable, led_s: float) -> float:
        """Return the time of the leader to compare others with: the one before if this one took far longer.

        Beside a leader that was disturbed, a candidate that takes eight times as long seems to take three times.
        """
        before_s = self._led_s.get(sizes, led_s)
        if len(self._led_s) >= MOST_SIZES:
            self._led_s.clear()
        self._led_s[sizes] = led_s
        return before_s if led_s > _FAR * before_s else led_s

    def own_extra(self, name: str, seen: float, known: float | None) -> float:
        """Return the extra time to charge, given the time that was seen, and the one that many launches have told.

        In times of the incumbent. Nothing below zero: a leader that was disturbed would make a slow candidate look as
        if it saved time. Then the noise of many launches would add up, and a final of equal candidates took 3,000 calls
        more. So the known time counts, unless two launches in a row took far longer.
        """
        if known is not None:
            before = name in self._slow
            (self._slow.add if seen > _FAR * known else self._slow.discard)(name)
            seen = seen if before and name in self._slow else known
        return max(seen - 1, 0.0)
