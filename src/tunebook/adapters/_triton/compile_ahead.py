"""Compiling candidates in processes: most of what Triton does before the machine code is Python, one thread at a time.

480 matmuls took 31 s in 16 threads of an H200's host, and 12 s in 16 processes. The processes are forks of this one,
which have the kernel and its arguments as they are. They never touch the GPU, for which a fork is no good, and only
fill Triton's cache on disk: whatever goes wrong in one, the candidate is compiled here.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final, Self, final

from triton import knobs
from triton.runtime import driver

from tunebook._measure.forked_worker import ChildTask, ForkedWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from tunebook.adapters._triton.candidate import LaunchConfig

# With fewer there is nothing to gain: forking 16 times takes 0.3 s.
FEWEST: Final = 12
FEWEST_CORES: Final = 4
# Reading a compiled program takes 5 ms, compiling the smallest one 60.
COLD_S: Final = 0.03
# A process so big that a fork takes this long is not forked again.
SLOWEST_FORK_S: Final = 0.2
# A fork in which some thread's lock stays held would hang; what takes longer than this is compiled here instead.
_PATIENCE_S: Final = 30.0
_hung: Final = threading.Event()  # then no process is forked any more
_GREETING: Final = 1 << 40  # the number of no candidate


@final
class _NoDevice:
    """Stands for Triton's driver in a fork: it knows what to compile for, and nothing else."""

    def __init__(self) -> None:
        self._device = driver.active.get_current_device()
        self._target = driver.active.get_current_target()

    def get_current_device(self) -> Any:
        return self._device

    def get_current_stream(self, _device: object) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def is_worth_it(compile_one: Callable[[LaunchConfig], object], candidates: Sequence[LaunchConfig]) -> bool:
    """Compile one candidate, and return whether the others are better compiled in processes."""
    if len(candidates) < FEWEST or (os.cpu_count() or 1) < FEWEST_CORES or not _may_fork():
        return False
    start = time.perf_counter()
    with suppress(Exception):  # whatever it is, it is raised again when this candidate's turn comes
        compile_one(candidates[0])
    return time.perf_counter() - start > COLD_S


def _may_fork() -> bool:
    """Whether a fork can do no harm here, and its work is not thrown away."""
    distributed = sys.modules.get("torch.distributed")
    # Memory that is registered with a network card must not become copy-on-write, which older kernels make of it.
    networked = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return not (networked or _hung.is_set() or knobs.compilation.always_compile)


@final
class CompileForks:
    """Compiles candidates in forks of this process, as many as there are cores. A context manager.

    `compile` may be called from several threads, each of which waits for a fork of its own.
    """

    def __init__(self, compile_one: Callable[[LaunchConfig], object], candidates: Sequence[LaunchConfig]) -> None:
        self._compile_one = compile_one
        self._candidates = candidates
        self._index = {id(candidate): index for index, candidate in enumerate(candidates)}
        self._free: queue.SimpleQueue[ForkedWorker] = queue.SimpleQueue()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        stand_in = _NoDevice()

        def first(index: int) -> tuple[float, ...]:
            driver.set_active(stand_in)
            if index < _GREETING:
                self._compile_one(self._candidates[index])
            return ()

        job = ChildTask(first=first, sample=lambda _index, _number: ())
        for number in range(min(os.cpu_count() or 1, len(self._candidates))):
            start = time.perf_counter()
            worker = self._open.enter_context(ForkedWorker(job, _PATIENCE_S))
            if worker.prepare(_GREETING + number).failure is not None:
                break
            self._free.put(worker)
            if time.perf_counter() - start > SLOWEST_FORK_S:
                break
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def compile(self, candidate: LaunchConfig) -> object:
        """Compile a candidate in a fork if one is free, and load what came of it."""
        try:
            worker = self._free.get_nowait()
        except queue.Empty:
            return self._compile_one(candidate)
        failure = worker.prepare(self._index[id(candidate)]).failure
        if failure is not None and failure.kind == "timeout":
            _hung.set()
        # One that was lost would be forked anew, by this thread and while others compile: it is not used again.
        if failure is None or failure.kind not in ("crash", "timeout", "memory"):
            self._free.put(worker)
        return self._compile_one(candidate)
