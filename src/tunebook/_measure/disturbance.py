"""Finds disturbances of a measurement, as far as they can be seen.

There are three signs: how much of the CPU other processes used, the reports of a GPU's driver, and a drift of the
finalists' own samples. A sign that cannot be read (no /proc, no NVML, a race of a few milliseconds) counts as quiet.
"""

from __future__ import annotations

import math
import os
import time
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from tunebook._statistics.race import median_s, standard_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

# Other processes may use this fraction of the CPUs that we may use. Of two cores, one busy neighbour uses half.
OTHERS_PART: Final = 0.25
# The thread that runs the candidates may wait for a CPU for this fraction of the time. With a load of 3 on two cores,
# it waited for 60 %.
WAITED_PART: Final = 0.05
SHORTEST_WAIT_S: Final = 0.02  # in a shorter time, one turn of another process, of a few ms, is a large fraction
# A hypervisor that takes this fraction stops us in the middle of runs.
STOLEN_PART: Final = 0.02
# The kernel counts CPU time in steps of 10 ms; a shorter race cannot be judged by it.
SHORTEST_S: Final = 0.2
# How far the level of the samples may move from the first third of a race to the last. A machine that warms up
# evenly by 5 % moves it by 3 %, and sampling in turn evens that out.
DRIFT: Final = 0.05
# A move of up to this many standard errors may be chance.
_SURE: Final = 2.0


class Disturbances(NamedTuple):
    """The disturbances of a measurement, in words; empty if none was seen."""

    reasons: tuple[str, ...] = ()

    @property
    def quiet(self) -> bool:
        """Whether no disturbance was seen."""
        return not self.reasons


class Probe(Protocol):
    """Watches one part of the machine. Neither method may raise if something cannot be read."""

    def start(self) -> None: ...

    def disturbances(self) -> Iterable[str]:
        """Return the disturbances since the last start, in words."""


class DisturbanceWatch:
    """Watches the machine from its creation on; every question covers the whole time since."""

    def __init__(self, probes: Iterable[Probe]) -> None:
        self._probes = tuple(probes)
        for probe in self._probes:
            probe.start()

    def disturbances(self, finalists: Sequence[Sequence[float]] = ()) -> Disturbances:
        """Return the disturbances so far; `finalists` has the samples of each, in the order of the race."""
        seen = [reason for probe in self._probes for reason in probe.disturbances()]
        moved = drift(finalists)
        if abs(moved) > DRIFT:
            way = "slower" if moved > 0 else "faster"
            seen.append(f"everything became at least {abs(moved):.0%} {way} during the race")
        return Disturbances(tuple(seen))


def drift(lanes: Iterable[Sequence[float]]) -> float:
    """Return how much slower the last third of the samples is than the first, minus the noise.

    Samples are taken in turn, so a machine that changes moves all lanes alike.

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
    if len(first) < 12:
        return 0.0
    moved = median_s(last) / median_s(first) - 1
    # From the median deviation: a spike in every tenth sample must not hide a drift.
    errors = [median_s(part) * standard_error(part, 1.2533 * 1.4826) for part in (first, last)]
    sure = abs(moved) - _SURE * math.hypot(*errors)
    return math.copysign(max(sure, 0.0), moved)


def probes_for(platform: str, devices: Sequence[str] = (), nvml: Any = None) -> tuple[Probe, ...]:
    """Return the probes for kernels of a platform ("cpu", "gpu" or "tpu") on the devices that `device_lock` names."""
    gpus = [nvml_probe(device, nvml) for device in devices] if platform == "gpu" else []
    return (CpuProbe(), *(gpu for gpu in gpus if gpu is not None))


# ------------------------------------------------------------------------------------------------------------- the CPU


class Thread(NamedTuple):
    """How long a thread has run, and how long it was ready to run but had no CPU."""

    ran_s: float
    waited_s: float


class CpuReading(NamedTuple):
    """Seconds since some beginning: of the clock, and of use of `cores` by all, by this process and by the hypervisor.

    None if unreadable. `threads` has the threads that may run candidates: this one, and the first of each child.
    """

    wall_s: float
    cores: int
    busy_s: float | None = None
    own_s: float | None = None
    stolen_s: float = 0.0
    threads: Mapping[str, Thread] = MappingProxyType({})


class CpuProbe:
    """Watches the CPUs that this process may use. `read` is for tests."""

    def __init__(self, read: Callable[[], CpuReading] | None = None) -> None:
        self._read = read or read_cpu
        self._before = CpuReading(0.0, 1)

    def start(self) -> None:
        self._before = self._read()

    def disturbances(self) -> Iterable[str]:
        return cpu_disturbances(self._before, self._read())


def cpu_disturbances(before: CpuReading, after: CpuReading) -> list[str]:
    """Return the disturbances between two readings."""
    wall_s = after.wall_s - before.wall_s
    seen = []
    threads = [(before.threads[name], thread) for name, thread in after.threads.items() if name in before.threads]
    passed = [Thread(new.ran_s - old.ran_s, new.waited_s - old.waited_s) for old, new in threads]
    busiest = max(passed, default=Thread(0.0, 0.0))  # it runs the candidates
    if wall_s > SHORTEST_WAIT_S and (waited := busiest.waited_s / wall_s) > WAITED_PART:
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


def read_cpu(proc: Path = Path("/proc"), clock_s: Callable[[], float] = time.monotonic) -> CpuReading:
    """Read the counters of the CPUs that this process may use; the work of its children counts as its own."""
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
    own_s = sum(os.times()[:4])
    for child in children:  # their CPU time and their ended children's, behind a name in brackets with any characters
        own_s += tick_s * sum(map(int, _read(proc / child / "stat").rpartition(")")[2].split()[11:15]))
    threads = {}
    for name in ("thread-self", *children):
        ran_ns, waited_ns, *_ = (_read(proc / name / "schedstat") or "0 0").split()
        threads[name] = Thread(int(ran_ns) * 1e-9, int(waited_ns) * 1e-9)
    return CpuReading(clock_s(), len(allowed), busy * tick_s, own_s, stolen * tick_s, threads)


def _descendants(proc: Path, process: str) -> Iterator[str]:
    """Yield the living descendants of a process: candidates may run in a worker."""
    task = f"{proc}/{process}/task"
    try:
        threads = os.listdir(task)  # noqa: PTH208 - names, not objects
    except OSError:  # it has ended since it was listed
        return
    for thread in threads:
        for child in _read(Path(task, thread, "children")).split():
            yield child
            yield from _descendants(proc, child)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended since it was listed
        return ""


# ------------------------------------------------------------------------------------------------------------- the GPU


def nvml_probe(device: str, nvml: Any = None) -> NvmlProbe | None:
    """Return a probe of an NVIDIA GPU by its name in `device_lock`; None if NVML or its Python package is missing.

    By UUID, because NVML counts all GPUs of the host, and CUDA the visible ones, in the order of CUDA_VISIBLE_DEVICES.
    A name without a UUID (OpenCL's devices) is enough on a host with one GPU.
    """
    if nvml is None:
        try:
            nvml = import_module("pynvml")  # optional, and only for kernels on a GPU
        except ModuleNotFoundError:
            return None
    try:
        nvml.nvmlInit()
        digits = device.rpartition("-")[2]
        if len(digits) != 32:
            return NvmlProbe(nvml, nvml.nvmlDeviceGetHandleByIndex(0)) if nvml.nvmlDeviceGetCount() == 1 else None
        uuid = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
        try:
            return NvmlProbe(nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        except nvml.NVMLError:
            return NvmlProbe(nvml, nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}"))  # a slice of a GPU
    except nvml.NVMLError:  # the package without a driver, or a device of another maker
        return None


class NvmlProbe:
    """Watches one GPU through NVML's Python interface, which is passed in."""

    def __init__(self, nvml: Any, handle: Any, pid: int | None = None) -> None:
        self._nvml, self._handle, self._pid, self._since_us = nvml, handle, pid or os.getpid(), 0

    def start(self) -> None:
        self._since_us = time.time_ns() // 1000

    def disturbances(self) -> Iterable[str]:
        try:
            slowed = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        except self._nvml.NVMLError:  # not supported by every device
            slowed = 0
        if slowed & (0x20 | 0x40):  # by software, by hardware
            yield "the GPU is slowed down by heat"
        if slowed & (0x08 | 0x80):  # by hardware for other reasons, by the power brake
            yield "the GPU is slowed down by its power supply or its board"
        if (others := self._others()) > OTHERS_PART:
            yield f"other processes used {others:.0%} of the GPU"

    def _others(self) -> float:
        """Return the fraction used by other processes; 0.0 if our own cannot be recognized, as in most containers."""
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._handle, self._since_us)
        except self._nvml.NVMLError:  # also without a sample since the start
            return 0.0
        by_process: dict[int, list[int]] = {}
        for sample in samples:
            by_process.setdefault(sample.pid, []).append(sample.smUtil)
        if not by_process.pop(self._pid, []):
            return 0.0
        return sum(sum(used) / len(used) for used in by_process.values()) / 100
