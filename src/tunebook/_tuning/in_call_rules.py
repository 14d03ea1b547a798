"""The rules of tuning by the user's own calls: each runs at most one candidate, and together they keep to a slow-down.

A state machine that neither runs nor times anything: it names the next candidate, and learns its time. The rules of the
race apply: rounds in a new order each time, and a margin that is wide at first and never below the noise.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Final

from tunebook._statistics.race import (
    HOPELESS,
    QUALIFYING,
    SAMPLES_PER_CANDIDATE,
    STAGES,
    RaceStage,
    is_settled,
    survivors,
    typical_s,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator, Sequence

# One sample each instead of two before the hopeless leave: here the user waits for the second.
_STAGES: Final = (RaceStage(1, HOPELESS, few=10**6), *QUALIFYING[1:], *STAGES)
# Timed calls of the heuristic before anything else runs, without the very first call: it may compile.
_BASELINE: Final = 5
_RECENT: Final = 32
# The expected time of a candidate that has not run yet, in times of the heuristic: half of a matmul's space take less.
_UNSEEN: Final = 2.0


class _LiveCandidate:
    __slots__ = ("first_s", "name", "runs", "samples_s")

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self.runs = 0
        self.first_s = math.nan
        self.samples_s: list[float] = []

    def expected_s(self, usual_s: float) -> float:
        """Return the expected time of the next run, if the heuristic takes `usual_s`."""
        if self.samples_s:
            return typical_s(self.samples_s)
        # The first run may have compiled something, and says little about the second.
        return _UNSEEN * usual_s if not self.runs else min(self.first_s, HOPELESS * usual_s)


class InCallRules:
    """Chooses the candidate of each call, so that all calls together take at most `slowdown` times the heuristic.

    `names` are the candidates, the heuristic's among them. A candidate runs if the calls so far, with it, are expected
    to keep to the slow-down. If it then takes longer than expected, the account is overdrawn by one run, and only the
    heuristic runs until it is balanced.
    """

    def __init__(self, names: Iterable[str], heuristic: str, *, slowdown: float, rng: random.Random) -> None:
        self._all: Final = {name: _LiveCandidate(name) for name in names}
        self._heuristic: Final = heuristic
        self._slowdown: Final = slowdown
        self._rng: Final = rng
        self._lanes = list(self._all.values())
        self._usual: deque[float] = deque(maxlen=_RECENT)
        self.usual_s = math.nan  # the time of a call with the heuristic
        self.calls = 0
        self._tried = 0
        self._tried_s = 0.0
        self._turns = self._plan()
        self._due = next(self._turns, None)

    @property
    def finished(self) -> bool:
        """Whether all candidates are compared."""
        return self._due is None

    @property
    def finalists(self) -> list[str]:
        """The candidates still in the race."""
        return [lane.name for lane in self._lanes]

    @property
    def times_served(self) -> bool:
        """Whether the next call of the heuristic is timed."""
        return len(self._usual) < _BASELINE

    @property
    def overdrawn_s(self) -> float:
        """The time of the calls so far beyond the slow-down; a negative time may still be spent."""
        return self._tried_s - (self._tried + (self._slowdown - 1) * self.calls) * self.usual_s

    def samples_s(self, name: str) -> Sequence[float]:
        """Return the samples of a candidate, without its first run."""
        return self._all[name].samples_s

    def is_new(self, name: str) -> bool:
        """Whether a candidate has not run yet."""
        return not self._all[name].runs

    def next(self) -> str | None:
        """Return the candidate of the next call, or None if the heuristic serves it."""
        if self._due is None or self.times_served:
            return None
        # Calls of the heuristic must be decided fast: an overdrawn account is seen without an expected time.
        saved_s = (self._slowdown - 1) * self.usual_s - self.overdrawn_s
        affordable = saved_s > -self.usual_s and self._due.expected_s(self.usual_s) - self.usual_s <= saved_s
        return self._due.name if affordable else None

    def served(self, seconds: float | None = None) -> None:
        """Count a call that the heuristic served, and learn its time if it was timed."""
        self.calls += 1
        if seconds is not None and self.calls > 1:
            self._note_usual(seconds)

    def tried(self, name: str, *, call_s: float, sample_s: float | None) -> None:
        """Learn the time of a whole call, and of its candidate, or None if that failed."""
        self.calls += 1
        self._tried += 1
        self._tried_s += call_s if _is_time(call_s) else 0.0
        candidate = self._all[name]
        candidate.runs += 1
        if sample_s is None or not _is_time(sample_s):
            self._lanes = [lane for lane in self._lanes if lane is not candidate]
        elif candidate.runs == 1:
            candidate.first_s = sample_s
        else:
            candidate.samples_s.append(sample_s)
            if name == self._heuristic:
                self._note_usual(sample_s)
        self._due = next(self._turns, None)

    def _note_usual(self, seconds: float) -> None:
        if _is_time(seconds):
            self._usual.append(seconds)
            self.usual_s = typical_s(self._usual)

    def _plan(self) -> Iterator[_LiveCandidate]:
        for stage in _STAGES:
            yield from self._rounds_until(stage.samples)
            self._lanes = survivors(self._lanes, stage, len(self._all))
            if stage is not _STAGES[0] and is_settled(self._lanes):
                return
        most = SAMPLES_PER_CANDIDATE * len(self._all)
        while not is_settled(self._lanes):
            taken = sum(len(candidate.samples_s) for candidate in self._all.values())
            if taken + len(self._lanes) > most:
                return
            yield from self._rounds_until(1 + min(len(lane.samples_s) for lane in self._lanes))
            self._lanes = survivors(self._lanes, STAGES[-1], len(self._all))

    def _rounds_until(self, samples: int) -> Iterator[_LiveCandidate]:
        while short := [lane for lane in self._lanes if len(lane.samples_s) < samples]:
            self._rng.shuffle(short)
            for lane in short:
                yield lane
                if lane.runs == 1 and lane in self._lanes:
                    yield lane  # a sample at once after its first run


def _is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds > 0
