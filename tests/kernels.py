"""Kernels for tests: their times come from a fake clock, so that no test depends on the machine's speed."""

from __future__ import annotations

import time
from dataclasses import dataclass

import tunebook as tb
from tunebook._measure.stopwatch import Stopwatch
from tunebook._tuning.job import Conditions, Goal, History, Job, Part, Setup


class FakeClock:
    """A clock that only kernels move."""

    def __init__(self):
        self.ns = 1_000

    def __call__(self):
        return self.ns

    def spend(self, seconds):
        self.ns += int(seconds * 1e9)

    @property
    def seconds(self):
        return self.ns * 1e-9


def note_in(events):
    """Return a listener that notes events with their data, except the many steps of a tuning."""

    def note(event, **data):
        if event != "autotune_progress":
            events.append((event, data))

    return note


def fake_tuner(clock, *, warmup=1, iters=3, **options):
    """A tuner that measures by a fake clock."""
    return tb.Tuner(
        stopwatch=Stopwatch(warmup=warmup, iters=iters, clock_ns=clock), clock_s=lambda: clock.seconds, **options
    )


def cpu_tuner():
    """A tuner for candidates that really run: it counts this process's CPU time, which other processes do not stretch.

    A slow candidate takes twenty times the CPU time of a good one, so that no load on the machine reverses them.
    """
    return tb.Tuner(stopwatch=Stopwatch(clock_ns=time.process_time_ns))


def job(clock, costs, **options):
    """Return a job over configurations that cost seconds, raise or run any code; and the list of runs."""
    ran = []

    def make(config):
        def run():
            ran.append(config)
            cost = costs[config]
            if isinstance(cost, Exception):
                raise cost
            clock.spend(cost() if callable(cost) else cost)

        return run

    return job_of(make, list(costs), **options), ran


def job_of(make_fn, candidates, *, known=(), incumbent=None, unfinished=False, others=(), **options):
    """A job from options that each name a field of one of its values."""
    values = {
        kind: kind(**{name: options.pop(name) for name in kind._fields if name in options})
        for kind in (Conditions, Setup, Goal)
    }
    part = Part(make_fn, **{name: options.pop(name) for name in Part._fields if name in options})
    return Job(
        [part, *others],
        candidates,
        history=History(tuple(known), incumbent, complete=not unfinished),
        conditions=values[Conditions],
        setup=values[Setup],
        goal=values[Goal],
        **options,
    )


@dataclass(frozen=True)
class Tiles:
    """A configuration as users write them."""

    m: int
    n: int = 32


class Costs:
    """The costs of a pretend kernel, which are not part of its code."""

    def __init__(self, by_config):
        self.by_config = by_config

    def __tunebook_checksum__(self):
        return "costs"


class PretendKernel(tb.Kernel):
    """Takes `cost[config]` seconds on a fake clock; counts its runs by configuration."""

    checks = False  # its output is its configuration

    def __init__(self, clock, costs, *, heuristic=None, op_id="pretend", version="0"):
        super().__init__(op_id, version)
        self.clock, self._costs, self.fallback = clock, Costs(costs), heuristic
        self.runs = []

    @property
    def costs(self):
        return self._costs.by_config

    @costs.setter
    def costs(self, costs):
        self._costs.by_config = costs

    def run(self, *args, cfg, **kwargs):
        self.runs.append(cfg)
        cost = self._costs.by_config[cfg]
        if isinstance(cost, Exception):
            raise cost
        self.clock.spend(cost)
        return cfg

    def heuristic_cfg(self, inv):
        return super().heuristic_cfg(inv) if self.fallback is None else self.fallback

    def candidate_cfgs(self, inv):
        return list(self.costs)


def invocation(kernel, *args, override=None, **kwargs):
    """A call of a kernel."""
    return tb.Invocation(kernel.op_id, args, kwargs, override_cfg=override)
