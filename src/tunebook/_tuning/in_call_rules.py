"""The rules of tuning by the user's own calls: each runs at most one candidate, and together they keep to a slow-down.

A state machine that neither runs nor times anything: it names the next candidate, and learns its time. The rules of the
race apply: rounds in a new order each time, and a margin that is wide at first and never below the noise.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import TYPE_CHECKING, Final

from tunebook._statistics.race import (
    HOPELESS,
    QUALIFYING,
    SAMPLES_PER_CANDIDATE,
    STAGES,
    Lane,
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
# The expected time of a candidate that has not run yet, in times of the heuristic: half of a matmul's space take less.
_UNSEEN: Final = 2.0


class InCallRules:
    """Chooses the candidate of each call, so that all calls together take at most `slowdown` times the heuristic.

    `names` are the candidates, the heuristic's among them. A candidate runs if the calls so far, with it, are expected
    to keep to the slow-down. If it then takes longer than expected, the account is overdrawn by one run, and only the
    heuristic runs until it is balanced. `usual_s` is the time of a call with the heuristic.
    """

    def __init__(self, names: Iterable[str], heuristic: str, *, slowdown: float, rng: random.Random) -> None:
        self._all: Final = {name: Lane(name, lambda: None) for name in names}  # the calls run them
        self._heuristic, self._slowdown, self._rng = heuristic, slowdown, rng
        self._lanes = list(self._all.values())
        self._runs: Counter[str] = Counter()
        self._usual: deque[float] = deque(maxlen=32)
        self.usual_s = math.nan
        self.calls = self._tried = 0
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

    def samples_s(self, name: str) -> Sequence[float]:
        """Return the samples of a candidate, without its first run."""
        return self._all[name].samples_s

    def is_new(self, name: str) -> bool:
        """Whether a candidate has not run yet."""
        return not self._runs[name]

    def next(self) -> str | None:
        """Return the candidate of the next call, or None if the heuristic serves it."""
        due, usual_s = self._due, self.usual_s
        if due is None or self.times_served:
            return None
        extra = self._slowdown - 1
        saved_s = extra * usual_s - (self._tried_s - (self._tried + extra * self.calls) * usual_s)
        if saved_s <= -usual_s:
            return None  # calls of the heuristic must be decided fast: without an expected time
        if due.samples_s:
            expected_s = due.value_s
        else:  # the first run may have compiled something, and says little about the second
            expected_s = min(due.first_s, HOPELESS * usual_s) if self._runs[due.name] else _UNSEEN * usual_s
        return due.name if expected_s - usual_s <= saved_s else None

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
        self._runs[name] += 1
        if sample_s is None or not _is_time(sample_s):
            self._lanes = [lane for lane in self._lanes if lane is not candidate]
        elif self._runs[name] == 1:
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

    def _plan(self) -> Iterator[Lane]:
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

    def _rounds_until(self, samples: int) -> Iterator[Lane]:
        while short := [lane for lane in self._lanes if len(lane.samples_s) < samples]:
            self._rng.shuffle(short)
            for lane in short:
                yield lane
                if self._runs[lane.name] == 1 and lane in self._lanes:
                    yield lane  # a sample at once after its first run


def _is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds > 0
