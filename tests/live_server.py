"""A server on a pretend clock: requests arrive at their own times, wait for one device, and are served in their order.

Open loop: arrivals do not depend on how fast requests are served. Two servers with the same seed get the same requests,
with the same disturbances, so that their latencies differ by the configurations alone.
"""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import NamedTuple

from tunebook._space.space import Config
from tunebook._tuning.host_share import HOST_SHARE, HostShare
from tunebook._tuning.live_runs import Build, LiveRuns
from tunebook._tuning.live_session import LiveOutcome, LiveSession

# On the host of an H200: half of a load, a fork, a program that is in memory, events around a launch; and a compiler.
HALF_LOAD_S, FORK_S, RECALL_S, EVENTS_S, COMPILE_S = 1.8e-3, 13e-3, 20e-6, 8e-6, 0.5
BURSTS, BURST_S, BURST_FACTOR = 0.1, 0.05, 3.0  # part of the time, seconds, and times as many requests
TURN_S = 40.0  # in which the popularity of each shape goes up and down
SLOW_S = 1e-3  # a call that stands still for longer than its kernel takes


class Request(NamedTuple):
    """One request: when it arrives, its shape, and how long its kernel takes beside its usual time."""

    arrives_s: float
    shape: int
    noise: float


def shapes_of(seed, count, candidates):
    """Return the seconds of each candidate at each shape: a tile that is good at one shape is not far off at others."""
    pick = random.Random(seed)
    tile, warps = pick.uniform(4.5, 6.5), pick.uniform(0.5, 2.5)
    weights = [pick.uniform(0.1, 0.3) for _ in range(2)]
    sizes, counts = (16, 32, 64, 128)[: candidates // 3], (2, 4, 8)
    found = []
    for _ in range(count):
        unit_s, shift = 10 ** pick.uniform(-3.7, -2.7), pick.gauss(0, 0.5)
        costs = {}
        for size in sizes:
            for number in counts:
                off = math.log2(size) - tile - shift
                log = weights[0] * off**2 + weights[1] * (math.log2(number) - warps - 0.5 * off) ** 2
                costs[Config(BLOCK=size, num_warps=number)] = unit_s * math.exp(log + pick.gauss(0, 0.02))
        found.append(costs)
    return found


def first_of(shapes, rank):
    """Return the candidate of each shape that serves first: its own best one, or one by its rank over all shapes."""
    if rank == "best":
        return [min(costs, key=costs.__getitem__) for costs in shapes]
    best = [min(costs.values()) for costs in shapes]
    order = sorted(shapes[0], key=lambda config: sum(c[config] / b for c, b in zip(shapes, best, strict=True)))
    return [order[round(rank * (len(order) - 1))]] * len(shapes)


def requests_of(seed, shapes, firsts, load, seconds):
    """Yield requests that keep the device busy for a part `load` of the time if the first candidates serve them all."""
    pick = random.Random(seed)
    mean_s = sum(costs[first] for costs, first in zip(shapes, firsts, strict=True)) / len(shapes)
    usual = load / mean_s / (1 + BURSTS * (BURST_FACTOR - 1))
    phases = [pick.uniform(0, 2 * math.pi) for _ in shapes]
    now_s, burst, changes_s, weights, weighed_s = 0.0, False, 0.0, [], -1.0
    while now_s < seconds:
        if now_s >= changes_s:
            burst = not burst and bool(changes_s)
            changes_s = now_s + pick.expovariate(1 / (BURST_S if burst else BURST_S * (1 / BURSTS - 1)))
        now_s += pick.expovariate(usual * (BURST_FACTOR if burst else 1))
        if now_s > weighed_s:
            weighed_s = now_s + 0.1
            weights = [math.exp(1.5 * math.sin(phase + 2 * math.pi * now_s / TURN_S)) for phase in phases]
        noise = math.exp(pick.gauss(0, 0.02)) * (3.0 if pick.random() < 0.002 else 1.0)
        yield Request(now_s, pick.choices(range(len(shapes)), weights)[0], noise)


class Programs:
    """The programs of a kernel that this process has compiled and loaded, for all shapes; and its forks."""

    def __init__(self):
        self.compiled, self.loaded, self.forks = set(), set(), 0


class Device(LiveRuns):
    """The calls of one shape."""

    clock = "device-events"

    def __init__(self, costs, clock, programs):
        self.costs, self.host_clock, self.programs = costs, clock, programs
        self.slower = {}  # candidates that have become slower, and how many times
        self.calls, self.half = 0, None

    def may_try(self, args, kwargs):
        return True

    def sizes(self, args, kwargs):
        return 0

    def run(self, config, args, kwargs):
        seconds = self.costs[config] * self.slower.get(config, 1.0) * args[0]
        self.host_clock.now_s += seconds
        self.host_clock.kernel_s += seconds
        self.calls += 1
        return seconds

    def timed(self, config, args, kwargs):
        seconds, at = self.run(config, args, kwargs), self.calls
        self.host_clock.now_s += EVENTS_S
        return seconds, SimpleNamespace(
            late=False, host_s=EVENTS_S, seconds=lambda: seconds if self.calls > at else None
        )

    def builds(self, configs):
        return Compilers(self, configs)

    def load(self, config, args, kwargs):
        """Load in two calls, unless a launch of another shape has loaded the program."""
        known = config in self.programs.loaded
        self.host_clock.now_s += RECALL_S if known else HALF_LOAD_S
        self.half = None if self.half == config else config
        if self.half is None:
            self.programs.loaded.add(config)
        return self.half is None

    def detached(self, inv):
        return inv


class Compilers:
    """Compiles the candidates of one shape in a fork, one after the other; programs in memory need none."""

    def __init__(self, device, configs):
        self.device, self.configs, self.todo = device, dict(configs), list(configs)
        self.forks, self.busy, self.begun = 0, None, set()

    def arrange(self, names):
        self.todo = [name for name in names if name not in self.begun]

    def _next(self):
        name = self.todo.pop(0)
        self.begun.add(name)
        return name

    def poll(self, call, *, may_fork=True):
        clock, programs = self.device.host_clock, self.device.programs
        done = []
        if self.busy is not None and clock.now_s - self.busy[1] >= COMPILE_S:
            programs.compiled.add(self.configs[self.busy[0]])
            done.append(Build(self.busy[0], product=self.busy[0]))
            self.busy = (self._next(), clock.now_s) if self.todo else None
        while self.busy is None and self.todo and self.configs[self.todo[0]] in programs.loaded:
            clock.now_s += RECALL_S
            name = self._next()
            done.append(Build(name, product=name, in_memory=True))
        if may_fork and self.todo and not done and self.busy is None:
            clock.now_s += FORK_S
            self.forks += 1
            programs.forks += 1
            self.busy = self._next(), clock.now_s
        return done

    def close(self):
        self.busy = None


class Server:
    """Serves requests with live tuning, or with the first candidate of each shape for good if `fixed`."""

    def __init__(self, shapes, firsts, *, fixed=False, calls_per_stall=1000):
        self.clock, programs = SimpleNamespace(now_s=0.0, kernel_s=0.0), Programs()
        programs.loaded.update(firsts)
        self.programs, self.firsts = programs, firsts
        self.devices = [Device(costs, self.clock, programs) for costs in shapes]
        self.host, self.sessions = HostShare(HOST_SHARE, lambda: self.clock.now_s), []
        for shape, device in enumerate(() if fixed else self.devices):
            self.sessions.append(self._session(shape, device, calls_per_stall))
        self.stood_still, self.calls = [], [0] * len(shapes)
        self.prepared, self.decided = {}, {}  # after so many calls of each shape

    def _session(self, shape, device, calls_per_stall):
        kernel = SimpleNamespace(code_checksum="", environment=lambda _inv: "", objective="typical")
        return LiveSession(
            SimpleNamespace(kernel=kernel, inv=None),
            [first := self.firsts[shape], *(config for config in device.costs if config != first)],
            device,
            LiveOutcome(lambda decide, _again: bool(decide()), lambda *_: None, lambda **_: None),
            slowdown=1.02,
            window=2000,
            calls_per_stall=calls_per_stall,
            host=self.host,
            others=list(self.sessions),
        )

    def serve(self, request):
        """Serve a request, when it and the device are there; return the time from its arrival to its end."""
        clock, shape = self.clock, request.shape
        clock.now_s = max(clock.now_s, request.arrives_s)
        began_s, kernel_s = clock.now_s, clock.kernel_s
        self.calls[shape] += 1
        if self.sessions:
            session = self.sessions[shape]
            session.run((request.noise,), {})
            if session.to_prepare == (0, 0):
                self.prepared.setdefault(shape, self.calls[shape])
            if session.is_finished:
                self.decided.setdefault(shape, self.calls[shape])
        else:
            self.devices[shape].run(self.firsts[shape], (request.noise,), {})
        if clock.now_s - began_s - (clock.kernel_s - kernel_s) > SLOW_S:
            self.stood_still.append(sum(self.calls))
        return clock.now_s - request.arrives_s


def p99(values):
    return sorted(values)[int(0.99 * (len(values) - 1))]


def alike(count):
    """Return candidates that no race tells apart: their final has the most launches, and its statistics take long."""
    configs = [
        Config(BLOCK=2 ** (4 + i % 6), num_warps=2 ** (i // 6 % 3), num_stages=1 + i // 18) for i in range(count)
    ]
    return {config: 1e-4 * (1 + 5e-4 * place) for place, config in enumerate(configs)}


class Waves(LiveRuns):
    """Calls on a device whose clock changes; events are read one call late, and nothing else takes any time."""

    clock = "device-events"

    def __init__(self, costs, seed):
        self._pick, self._costs, self.calls, self._level = random.Random(seed), costs, 0, 1.0

    def may_try(self, args, kwargs):
        return True

    def sizes(self, args, kwargs):
        return 0

    def run(self, config, args, kwargs):
        self.calls += 1
        if self._pick.random() < 0.1:
            self._level = self._pick.choice((0.9, 1.0, 1.1))
        return self._costs[config] * self._level * math.exp(self._pick.gauss(0, 0.01))

    def timed(self, config, args, kwargs):
        seconds, at = self.run(config, args, kwargs), self.calls
        return seconds, SimpleNamespace(late=False, host_s=0.0, seconds=lambda: seconds if self.calls > at else None)

    def detached(self, inv):
        return inv


def session_on(costs, seed, aside):
    """Return a session on such a device; `aside(work)` does long work, now or later."""
    kernel = SimpleNamespace(code_checksum="", environment=lambda _inv: "", objective="typical")
    return LiveSession(
        SimpleNamespace(kernel=kernel, inv=None),
        list(costs),
        Waves(costs, seed),
        LiveOutcome(lambda decide, _again: aside(decide) or True, lambda *_: None, lambda **_: None, aside),
        slowdown=1.02,
        window=2000,
        host=HostShare(1e9),
    )
