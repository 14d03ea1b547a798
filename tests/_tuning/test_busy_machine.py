"""A machine that other processes use: runs wait for the CPU, and a slow candidate must not win by that."""

from __future__ import annotations

import random
from itertools import count

import pytest
from kernels import FakeClock, fake_tuner, job, job_of


class BusyCpu:
    """A CPU that others use for most of the time: a run that does not end within its turn waits for the next one."""

    def __init__(self, seed, *, turn_s, others_s):
        self.clock, self._random = FakeClock(), random.Random(seed)
        self._turn_s, self._others_s = turn_s, others_s
        self._left_s = self._next(turn_s)

    def _next(self, mean_s):
        return self._random.expovariate(1 / mean_s)

    def run(self, seconds):
        work_s = seconds * (1 + 0.05 * self._random.lognormvariate(0.0, 0.6))
        while work_s > self._left_s:
            work_s -= self._left_s
            self.clock.spend(self._left_s + self._next(self._others_s))
            self._left_s = self._next(self._turn_s)
        self.clock.spend(work_s)
        self._left_s -= work_s


class BusyProbe:
    def start(self):
        pass

    def disturbances(self):
        return ["runs waited for a CPU 80% of the time"]


@pytest.mark.parametrize("length_s", [10e-6, 100e-6, 1e-3, 10e-3])
@pytest.mark.parametrize("turn_s", [0.5e-3, 3e-3])
def test_a_candidate_that_is_three_times_slower_never_wins(length_s, turn_s):
    for seed in range(60):
        cpu = BusyCpu(seed, turn_s=turn_s, others_s=5 * turn_s)
        costs = {"decoy": 3 * length_s, "good": length_s}
        work = job_of(lambda way, cpu=cpu, costs=costs: lambda: cpu.run(costs[way]), list(costs), heuristic="decoy")
        assert fake_tuner(cpu.clock, probes=lambda _: [BusyProbe()]).tune(work).config == "good"


@pytest.mark.parametrize(("probes", "expected"), [([BusyProbe()], "good"), ([], "decoy")])
def test_a_runner_up_that_left_early_is_sampled_again_after_a_disturbance(probes, expected):
    clock, runs = FakeClock(), count()
    work, _ = job(clock, {"good": lambda: 0.5 if next(runs) < 4 else 0.1, "decoy": 0.3})
    assert fake_tuner(clock, probes=lambda _: probes).tune(work).config == expected


def test_sampling_again_takes_no_longer_than_everything_before():
    clock = FakeClock()
    work, ran = job(clock, {"fast": 0.1, "slow": 10.0})
    assert fake_tuner(clock, probes=lambda _: [BusyProbe()]).tune(work).config == "fast"
    assert ran.count("slow") <= 2 * 4
