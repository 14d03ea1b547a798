"""Calls of a pretend program that a live race chooses the candidates of; the times arrive some calls later."""

from __future__ import annotations

import random
from collections import deque

from tunebook._base.vocabulary import Measurement
from tunebook._statistics.decide import decide
from tunebook._statistics.live_race import LiveRace
from tunebook._statistics.live_rounds import Turn
from tunebook._statistics.slowdown_account import SlowdownAccount

POLICY = "device-events/live/forward"


class LiveCalls:
    """Drives a race on a landscape, as a session does.

    `factor(name, call)` disturbs single candidates; `lag` calls pass until a time is known. The device waits for the
    host within a launch for `waits(call)` seconds.
    """

    def __init__(
        self, land, incumbent, *, slowdown=1.02, window=2000, lag=2, seed=0, sizes=lambda _call: 0, admitted=None
    ):
        self.land, self.incumbent, self.lag, self.sizes = land, incumbent, lag, sizes
        self.race = LiveRace(str(incumbent), SlowdownAccount(slowdown, window), random.Random(seed))
        self.by_name = {str(config): config for config in land.configs}
        for name in self.by_name if admitted is None else admitted:
            self.race.admit(name)
        if admitted is None:
            self.race.complete()
        self.fails = set()
        self.factor = lambda _name, _call: 1.0
        self.waits = lambda _call: 0.0
        self.served, self.extra, self._waiting = [], [], deque()
        self.asked = self._rest = 0

    def call(self):
        number = len(self.served)
        if self._rest:
            self._rest -= 1
            turn = Turn(self.race.leader)
        else:
            self._learn()
            self.asked += 1
            turn = self.race.next(lambda: self.sizes(number))
            self._rest = self.race.rest(turn)
        before_s = self.land.elapsed_s
        self.land.make_fn(self.by_name[turn.name])()
        factor = self.factor(turn.name, number)
        waits_s = self.waits(number)
        self._waiting.append((turn, (self.land.elapsed_s - before_s) * factor + waits_s, waits_s > 0))
        self.served.append(turn.name)
        usual_s = self.land.true_s(self.incumbent)
        self.extra.append(self.land.true_s(self.by_name[turn.name]) * factor / usual_s - 1)

    def _learn(self):
        while len(self._waiting) >= self.lag and self._waiting:
            turn, seconds, late = self._waiting.popleft()
            if turn.name in self.fails:
                self.race.failed(turn)
            else:
                self.race.learn(turn, seconds, **({"late": True} if late else {}))

    def until_decided(self, most=20_000):
        while self.race.phase != "decided" and len(self.served) < most:
            self.call()
        return self

    def verdict(self):
        left = {lane.name for lane in self.race.finalists}
        measured = [
            Measurement(name, name, "", POLICY, "", tuple(self.race.samples_s(name)), dropped=name not in left)
            for name in self.race.contenders
        ]
        return decide(measured, heuristic=str(self.incumbent))

    def adopt(self):
        verdict = self.verdict()
        ranking = [ranked.measurement.fingerprint for ranked in verdict.ranking]
        self.race.adopt(verdict.winner.measurement.fingerprint, ranking)
        return self.race.leader

    def worst_window(self, calls):
        """Return the largest extra time of so many neighbouring calls, in calls of the incumbent."""
        sums = [0.0]
        for extra in self.extra:
            sums.append(sums[-1] + extra)
        last = len(self.extra)
        return max(sums[min(start + calls, last)] - sums[start] for start in range(last))
