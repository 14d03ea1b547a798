"""Whether the ground was quiet while candidates were measured, as far as that can be seen.

Three things are looked at: how much of the CPU others used meanwhile, what a GPU's driver says, and whether the
finalists' own samples moved. What cannot be read (no /proc, no NVML, a race of a few milliseconds) is not judged.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from tunebook._statistics.race import median_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

# Others may use this part of the CPUs that we may use. Of two cores, one busy neighbour uses half.
OTHERS_PART: Final = 0.25
# So much of the time the thread that runs the candidates may stand in line for a CPU. With a load of 3 on two cores,
# it did so for 60 % of it.
WAITED_PART: Final = 0.05
SHORTEST_WAIT_S: Final = 0.02  # in which one turn of somebody else's, of a few ms, is not much yet
# A hypervisor that takes this part stops us in the middle of runs.
STOLEN_PART: Final = 0.02
# The kernel counts CPU time in steps of 10 ms; a shorter race cannot be judged by it.
SHORTEST_S: Final = 0.2
# How far the level of the samples may move from the first third of a race to the last. A machine that warms up
# evenly by 5 % moves it by 3 %, and the turns that candidates take deal with that.
DRIFT: Final = 0.05
# How many standard errors of a move may be chance.
_SURE: Final = 2.0
_FEWEST_SAMPLES: Final = 12

_NVML_THERMAL: Final = 0x20 | 0x40  # software and hardware slow-down for heat
_NVML_SLOWED: Final = 0x08 | 0x80  # hardware slow-down for other reasons, and the power brake


class Disturbances(NamedTuple):
    """What disturbed a measurement, in words; nothing if nothing was seen."""

    reasons: tuple[str, ...] = ()

    @property
    def quiet(self) -> bool:
        """Whether nothing was seen."""
        return not self.reasons


class Probe(Protocol):
    """Looks at one part of the machine. Neither method may raise for what it cannot read."""

    def start(self) -> None:
        """Begin to look; again, to begin anew."""

    def disturbances(self) -> Iterable[str]:
        """Say what disturbed since the start, for a person to read."""


class DisturbanceWatch:
    """Looks at the ground from when it is made until it is asked; asked again later, it tells about all of the time."""

    def __init__(self, probes: Iterable[Probe]) -> None:
        self._probes = tuple(probes)
        for probe in self._probes:
            probe.start()

    def disturbances(self, finalists: Sequence[Sequence[float]] = ()) -> Disturbances:
        """Return how the ground was; `finalists` are their samples, each in the order in which they were taken."""
        seen = [reason for probe in self._probes for reason in probe.disturbances()]
        moved = drift(finalists)
        if abs(moved) > DRIFT:
            way = "slower" if moved > 0 else "faster"
            seen.append(f"everything became at least {abs(moved):.0%} {way} during the race")
        return Disturbances(tuple(seen))


def drift(lanes: Iterable[Sequence[float]]) -> float:
    """Return how much slower the last third of the samples is than the first, at least; noise is taken off.

    Samples are taken in turn, so a machine that changes moves all lanes alike; they are looked at together.

    >>> drift([[1.0, 1.01, 0.99, 1.0] * 6]), round(drift([[1.0] * 12 + [1.1] * 12 + [1.2] * 12]), 2)
    (0.0, 0.2)
    """
    first: list[float] = []
    last: list[float] = []
    for samples in lanes:
        third = len(samples) // 3
        if third:
            level = median_s(samples)
            first += [sample / level for sample in samples[:third]]
            last += [sample / level for sample in samples[-third:]]
    if len(first) < _FEWEST_SAMPLES:
        return 0.0
    moved = median_s(last) / median_s(first) - 1
    sure = abs(moved) - _SURE * math.hypot(_standard_error(first), _standard_error(last))
    return math.copysign(max(sure, 0.0), moved)


def _standard_error(samples: Sequence[float]) -> float:
    """Return that of a median, from the median deviation: a spike in every tenth sample must not hide a drift."""
    level = median_s(samples)
    deviation = 1.4826 * median_s(abs(sample - level) for sample in samples)
    return 1.2533 * deviation / math.sqrt(len(samples))


def probes_for(platform: str) -> tuple[Probe, ...]:
    """Return what can be looked at here for kernels of a platform: "cpu", "gpu" or "tpu"."""
    gpu = nvml_probe() if platform == "gpu" else None
    return (CpuProbe(),) if gpu is None else (CpuProbe(), gpu)


# ------------------------------------------------------------------------------------------------------------- the CPU


class Thread(NamedTuple):
    """How long a thread has run, and how long it could have run but had no CPU."""

    ran_s: float
    waited_s: float


class CpuReading(NamedTuple):
    """Seconds since some beginning: of the clock, and what everybody, this process and the hypervisor used of `cores`.

    None where they cannot be read. `threads` are those that may run candidates: this one, and the first of each child.
    """

    wall_s: float
    cores: int
    busy_s: float | None = None
    own_s: float | None = None
    stolen_s: float = 0.0
    threads: Mapping[str, Thread] = MappingProxyType({})


class CpuProbe:
    """Looks at who used the CPUs that this process may use. `read` is for tests."""

    def __init__(self, read: Callable[[], CpuReading] | None = None) -> None:
        self._read = read or read_cpu
        self._before = CpuReading(0.0, 1)

    def start(self) -> None:
        """Begin to look."""
        self._before = self._read()

    def disturbances(self) -> Iterable[str]:
        """Say how much others, or the hypervisor, used."""
        return cpu_disturbances(self._before, self._read())


def cpu_disturbances(before: CpuReading, after: CpuReading) -> list[str]:
    """Compare two readings."""
    wall_s = after.wall_s - before.wall_s
    seen = []
    waited = _waited_s(before.threads, after.threads) / wall_s if wall_s > SHORTEST_WAIT_S else 0.0
    if waited > WAITED_PART:
        seen.append(f"runs waited for a CPU {waited:.0%} of the time")
    if None in (before.busy_s, after.busy_s, before.own_s, after.own_s) or wall_s < SHORTEST_S:
        return seen
    room_s = wall_s * after.cores
    busy = ((after.busy_s or 0.0) - (before.busy_s or 0.0)) / room_s
    own = ((after.own_s or 0.0) - (before.own_s or 0.0)) / room_s
    if (others := busy - own) > OTHERS_PART:
        seen.append(f"other processes used {others:.0%} of the CPU")
    if (stolen := (after.stolen_s - before.stolen_s) / room_s) > STOLEN_PART:
        seen.append(f"the hypervisor took {stolen:.0%} of the CPU")
    return seen


def _waited_s(before: Mapping[str, Thread], after: Mapping[str, Thread]) -> float:
    """Return how long that thread waited which ran most: it is the one that runs the candidates."""
    passed = [
        Thread(t.ran_s - before[n].ran_s, t.waited_s - before[n].waited_s) for n, t in after.items() if n in before
    ]
    return max(passed, default=Thread(0.0, 0.0)).waited_s


def read_cpu(proc: Path = Path("/proc"), clock_s: Callable[[], float] = time.monotonic) -> CpuReading:
    """Read the counters of the CPUs that this process may use; the work of its children is its own."""
    try:
        allowed = os.sched_getaffinity(0)
        lines = (proc / "stat").read_text().splitlines()
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):  # not Linux, or a container that hides it
        return CpuReading(clock_s(), os.cpu_count() or 1)
    busy = stolen = 0
    for line in lines:
        name, *counts = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in allowed:
            user, nice, system, _idle, _iowait, irq, softirq, steal = (int(count) for count in counts[:8])
            busy += user + nice + system + irq + softirq
            stolen += steal
    children = list(_descendants(proc, "self"))
    own_s = sum(os.times()[:4]) + tick_s * sum(_ticks(proc / child / "stat") for child in children)
    threads = {name: _thread(proc / name / "schedstat") for name in ("thread-self", *children)}
    return CpuReading(clock_s(), len(allowed), busy * tick_s, own_s, stolen * tick_s, threads)


def _descendants(proc: Path, process: str) -> Iterator[str]:
    """Yield the living children of a process, and theirs: candidates may run in a worker."""
    for children in (proc / process / "task").glob("*/children"):
        for child in _read(children).split():
            yield child
            yield from _descendants(proc, child)


def _ticks(stat: Path) -> int:
    """Return the CPU time of a process and of its children that are gone."""
    # Counted from behind the name in brackets, which may hold anything.
    return sum(map(int, _read(stat).rpartition(")")[2].split()[11:15]))


def _thread(schedstat: Path) -> Thread:
    ran_ns, waited_ns, *_ = (_read(schedstat) or "0 0").split()
    return Thread(int(ran_ns) * 1e-9, int(waited_ns) * 1e-9)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended since it was listed
        return ""


# ------------------------------------------------------------------------------------------------------------- the GPU


def nvml_probe(index: int = 0) -> Probe | None:
    """Return what looks at an NVIDIA GPU, or None where NVML or its Python package is not there."""
    try:
        import pynvml  # noqa: PLC0415 - optional, and only for kernels on a GPU
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
        return NvmlProbe(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index))
    except pynvml.NVMLError:  # the package without a driver
        return None


class NvmlProbe:
    """Looks at one GPU through NVML's Python interface, which is passed in."""

    def __init__(self, nvml: Any, handle: Any, pid: int | None = None) -> None:
        self._nvml, self._handle = nvml, handle
        self._pid = pid or os.getpid()
        self._since_us = 0

    def start(self) -> None:
        """Begin to look."""
        self._since_us = time.time_ns() // 1000

    def disturbances(self) -> Iterable[str]:
        """Say whether the GPU is slowed down, and whether other processes computed on it."""
        try:
            slowed = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        except self._nvml.NVMLError:  # not every device tells
            slowed = 0
        if slowed & _NVML_THERMAL:
            yield "the GPU is slowed down by heat"
        if slowed & _NVML_SLOWED:
            yield "the GPU is slowed down by its power supply or its board"
        others = self._others()
        if others > OTHERS_PART:
            yield f"other processes used {others:.0%} of the GPU"

    def _others(self) -> float:
        """Return the part that others used; 0.0 where it cannot be told who is who, as in most containers."""
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._handle, self._since_us)
        except self._nvml.NVMLError:  # also if there was no sample since
            return 0.0
        if all(sample.pid != self._pid for sample in samples):
            return 0.0
        by_process: dict[int, list[int]] = {}
        for sample in samples:
            if sample.pid != self._pid:
                by_process.setdefault(sample.pid, []).append(sample.smUtil)
        return sum(sum(used) / len(used) for used in by_process.values()) / 100
