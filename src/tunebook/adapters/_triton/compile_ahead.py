"""Compiles candidates in forks: most of Triton's work before the machine code is Python, one thread at a time.

480 matmuls took 31 s in 16 threads of an H200's host, and 12 s in 16 processes. A fork has the kernel and its arguments
as they are. It never touches the GPU, whose context does not survive a fork, and only fills Triton's cache on disk. If
anything goes wrong in a fork, this process compiles the candidate.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final

from triton import knobs
from triton.runtime import driver

from tunebook._measure.forked_worker import ChildTask, ForkedWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tunebook.adapters._triton.candidate import LaunchConfig

# With fewer candidates forks gain nothing: forking 16 times takes 0.3 s.
FEWEST: Final = 12
FEWEST_CORES: Final = 4
# Reading a compiled program takes 5 ms, compiling the smallest one 60.
COLD_S: Final = 0.03
# A process so big that a fork takes this long is not forked again.
SLOWEST_FORK_S: Final = 0.2
# A fork hangs if another thread held a lock when it was made. A candidate that takes longer is compiled here instead.
_PATIENCE_S: Final = 30.0
_hung: Final = threading.Event()  # set after a hang: this process forks no more
_GREETING: Final = 1 << 40  # larger than any candidate's number


def is_worth_it(compile_one: Callable[[LaunchConfig], object], candidates: Sequence[LaunchConfig]) -> bool:
    """Compile one candidate, and return whether forks should compile the others."""
    distributed = sys.modules.get("torch.distributed")
    # Memory that is registered with a network card must not become copy-on-write, as a fork makes it on older kernels.
    networked = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if networked or _hung.is_set() or knobs.compilation.always_compile:
        return False
    if len(candidates) < FEWEST or (os.cpu_count() or 1) < FEWEST_CORES:
        return False
    start = time.perf_counter()
    # The job compiles this candidate again: the error is raised then, and costs that candidate alone.
    with suppress(Exception):  # the user's heuristics run in here, and may raise anything
        compile_one(candidates[0])
    return time.perf_counter() - start > COLD_S


@contextmanager
def compile_forks(
    compile_one: Callable[[LaunchConfig], object], candidates: Sequence[LaunchConfig]
) -> Iterator[Callable[[LaunchConfig], object]]:
    """Yield a function that compiles a candidate in a fork of this process if one is free, and loads the program here.

    There are as many forks as cores. Several threads may call the function; each of them gets a fork of its own.
    """
    index_of = {id(candidate): index for index, candidate in enumerate(candidates)}
    free: queue.SimpleQueue[ForkedWorker] = queue.SimpleQueue()
    device, target = driver.active.get_current_device(), driver.active.get_current_target()
    # Replaces Triton's driver in a fork: it knows the target to compile for, and cannot touch the GPU.
    stand_in = SimpleNamespace(
        get_current_device=lambda: device, get_current_stream=lambda _device: 0, get_current_target=lambda: target
    )

    def first(index: int) -> tuple[float, ...]:
        driver.set_active(stand_in)
        if index < _GREETING:
            compile_one(candidates[index])
        return ()

    def compile_in_fork(candidate: LaunchConfig) -> object:
        try:
            worker = free.get_nowait()
        except queue.Empty:
            return compile_one(candidate)
        failure = worker.prepare(index_of[id(candidate)]).failure
        if failure is not None and failure.kind == "timeout":
            _hung.set()
        # A lost worker would fork again, from this thread and while others compile. It is not used again.
        if failure is None or failure.kind not in ("crash", "timeout", "memory"):
            free.put(worker)
        return compile_one(candidate)

    job = ChildTask(first=first, sample=lambda _index, _number: ())
    with ExitStack() as stack:
        for number in range(min(os.cpu_count() or 1, len(candidates))):
            start = time.perf_counter()
            worker = stack.enter_context(ForkedWorker(job, _PATIENCE_S))
            if worker.prepare(_GREETING + number).failure is not None:
                break
            free.put(worker)
            if time.perf_counter() - start > SLOWEST_FORK_S:
                break
        yield compile_in_fork
