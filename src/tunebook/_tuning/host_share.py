"""Bounds the part of a program's time in which its host works for live tuning."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

if TYPE_CHECKING:
    from collections.abc import Callable

HostWork: TypeAlias = Literal["forks", "steps of loading", "decisions", "outlooks", "timed launches", "choices"]
_STALLS: Final = ("forks", "steps of loading", "decisions")  # milliseconds each

# The part of the program's time that the host may spend on tuning; `slowdown` limits the device's time alone. Loading
# a compiled candidate takes 3.6 ms, and a fork 13 ms, on the host of an H200. A better leader pays for more: see
# `HostShare.earn`.
HOST_SHARE: Final = 0.03
# Sessions with short calls ask so many times less often than those with long ones.
# So much of the share may be spent later: sessions ask only now and then, and what nobody asked for would be lost. With
# it, 25 kernels of a pretend training are decided after 52 s instead of 99.
_SAVED_S: Final = 0.01
_MOST_PATIENCE: Final = 8


class HostShare:
    """Bounds the part of the time that this process spends on live tuning, and how many of its calls stand still."""

    def __init__(self, share: float = HOST_SHARE, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._share, self.clock_s = share, clock_s
        self._owed_s, self._looked_s, self._longest_s = 0.0, clock_s(), 0.0
        self.stalls = self._since_stall = 0  # calls that stood still, and calls since the last one
        # How often, and how long in all.
        self.spent: Final[dict[HostWork, tuple[int, float]]] = dict.fromkeys(get_args(HostWork), (0, 0.0))

    def use_clock(self, clock_s: Callable[[], float]) -> None:
        """Go on by another clock, which may show any time."""
        self.clock_s, self._looked_s = clock_s, clock_s()

    def allows(self) -> bool:
        """Whether the host may do more now."""
        now_s = self.clock_s()
        self._owed_s = max(self._owed_s - self._share * (now_s - self._looked_s), -_SAVED_S)
        self._looked_s = now_s
        return self._owed_s <= 0

    @property
    def wait_s(self) -> float:
        """How long it takes until the host may do more, if nobody else works before."""
        return max(self._owed_s, 0.0) / self._share

    def spend(self, seconds: float, work: HostWork) -> None:
        """Note that the host has worked so long."""
        self._owed_s += seconds
        if work in _STALLS:
            self.stalls, self._since_stall = self.stalls + 1, 0
        count, total_s = self.spent[work]
        self.spent[work] = count + 1, total_s + seconds

    def earn(self, seconds: float) -> None:
        """Let the host work so much more, because the program has become faster."""
        self._owed_s = max(self._owed_s - seconds, -_SAVED_S)

    def count(self, calls: int) -> None:
        """Count calls of this process, all of which came after the last one that stood still."""
        self._since_stall += calls

    def may_stall(self, calls: int) -> bool:
        """Whether so many calls have passed since one stood still."""
        return self._since_stall >= calls

    def patience(self, call_s: float) -> int:
        """Return how many times as long a session with such calls waits as that with the longest ones.

        Long calls are tuned first: their winners save the most, and pay for the others.
        """
        self._longest_s = max(self._longest_s, call_s)
        return 1 if call_s <= 0 else int(min(self._longest_s / call_s, _MOST_PATIENCE))


HOST: Final = HostShare()
