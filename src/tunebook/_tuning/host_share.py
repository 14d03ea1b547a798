"""Bounds the part of a program's time in which its host works for live tuning."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args
from weakref import ref

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HostWork: TypeAlias = Literal["forks", "steps of loading", "decisions", "outlooks", "timed launches", "choices"]
_STALLS: Final = ("forks", "steps of loading", "decisions")  # milliseconds each...
_STALL_S: Final = 5e-4  # ...unless the program was in memory, for example
# A session has the right to the calls that may stand still until it has prepared its candidates. If it does not use one
# for so many times as long as it had to wait for it, because its calls are rare, another session has the right.
_FORGONE: Final = 1.5

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
        self.stalls = 0  # calls that stood still
        self._since_stall: float = float("inf")  # calls since the last one; the first call of all compiles anyway
        self._preparing: Callable[[], object] = lambda: None  # the session whose calls may stand still
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
        if work in _STALLS and seconds >= _STALL_S:
            self.stalls, self._since_stall = self.stalls + 1, 0
        count, total_s = self.spent[work]
        self.spent[work] = count + 1, total_s + seconds

    def earn(self, seconds: float) -> None:
        """Let the host work so much more, because the program has become faster."""
        self._owed_s = max(self._owed_s - seconds, -_SAVED_S)

    def count(self, calls: int) -> None:
        """Count calls of this process, all of which came after the last one that stood still."""
        self._since_stall += calls

    def may_stall(self, calls: int, who: object) -> bool:
        """Whether so many calls have passed since one stood still, and the next one is of this session.

        One session at a time prepares: sessions of the same kernel share its programs, and each would make a fork. On a
        pretend server with eight shapes, programs were loaded after 20,000 calls of each shape, and not after 1,500.
        """
        if not calls:
            return True
        if self._since_stall < calls:
            return False
        if not self.is_preparing(who):
            if self._preparing() is not None and self._since_stall < _FORGONE * calls:
                return False
            self._preparing = ref(who)
        return True

    def is_preparing(self, who: object) -> bool:
        """Whether a session has the right to the next call that may stand still."""
        return self._preparing() is who

    def has_prepared(self, who: object) -> None:
        """Give up the right to calls that stand still."""
        if self.is_preparing(who):
            self._preparing = lambda: None

    @contextmanager
    def working(self, work: HostWork) -> Iterator[None]:
        """Note how long the host works inside."""
        began_s = self.clock_s()
        yield
        self.spend(self.clock_s() - began_s, work)

    def patience(self, call_s: float) -> int:
        """Return how many times as long a session with such calls waits as that with the longest ones.

        Long calls are tuned first: their winners save the most, and pay for the others.
        """
        self._longest_s = max(self._longest_s, call_s)
        return 1 if call_s <= 0 else int(min(self._longest_s / call_s, _MOST_PATIENCE))


HOST: Final = HostShare()
