"""Compiles candidates in forks: most of Triton's work before the machine code is Python, one thread at a time.

480 matmuls took 31 s in 16 threads of an H200's host, and 12 s in 16 processes. A fork has the kernel and its arguments
as they are. It never touches the GPU, whose context does not survive a fork, and only fills Triton's cache on disk. If
anything goes wrong in a fork, this process compiles the candidate.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final

from triton import knobs
from triton.compiler.compiler import make_backend
from triton.runtime import driver
from triton.runtime.cache import triton_key

from tunebook._measure.forked_worker import ChildTask, ForkedWorker
from tunebook.adapters._triton import key_ahead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tunebook.adapters._triton.candidate import LaunchConfig

# With fewer candidates forks gain nothing: each takes 0.02 s to make.
FEWEST: Final = 4
FEWEST_CORES: Final = 4
# Reading a compiled program takes 5 ms, compiling the smallest one 100.
COLD_S: Final = 0.05
# A process so big that a fork takes this long is not forked again.
SLOWEST_FORK_S: Final = 0.2
# A fork hangs if another thread held a lock when it was made. A candidate that takes longer is compiled here instead.
_PATIENCE_S: Final = 30.0
_hung: Final = threading.Event()  # set after a hang: this process forks no more


def may_fork(candidates: int) -> bool:
    """Return whether forks of this process may compile so many candidates, and would gain something."""
    distributed = sys.modules.get("torch.distributed")
    # Memory that is registered with a network card must not become copy-on-write, as a fork makes it on older kernels.
    networked = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if networked or _hung.is_set() or knobs.compilation.always_compile:
        return False
    return candidates >= FEWEST and (os.cpu_count() or 1) >= FEWEST_CORES


def longest_first(candidates: Iterable[LaunchConfig]) -> list[LaunchConfig]:
    """Return candidates in the order in which to compile them, so that no core works on a long one alone at the end.

    Code is unrolled: the larger the blocks and the fewer the threads, the more there is of it. Of 278 candidates of
    gated linear attention the longest took ten times as long as the shortest; in this order 16 cores need 13 % less
    time for them than in a random one, and 1 % more than in the best.
    """

    def work(candidate: LaunchConfig) -> tuple[float, int]:
        config = candidate.config
        sizes = (value for value in config.kwargs.values() if isinstance(value, int) and value > 0)
        return math.prod(sizes) / config.num_warps, config.num_stages

    return sorted(candidates, key=work, reverse=True)


@contextmanager
def compile_forks(
    compile_one: Callable[[LaunchConfig], object], candidates: Sequence[LaunchConfig]
) -> Iterator[Callable[[LaunchConfig], object]]:
    """Yield a function that compiles a candidate in a fork of this process if one is free, and loads the program here.

    There are as many forks as cores, and each starts with a candidate at once: the candidates come in the order in
    which they are needed. If the first one is done in a moment, the programs are on disk already, and there is no other
    fork. Several threads may call the function; each of them gets a fork of its own.
    """
    index_of = {id(candidate): index for index, candidate in enumerate(candidates)}
    forks = _Forks()
    device, target = driver.active.get_current_device(), driver.active.get_current_target()
    # Worked out once per process: in each fork they would take longer than many a candidate.
    key_ahead.finish()
    triton_key()
    make_backend(target).hash()
    # Replaces Triton's driver in a fork: it knows the target to compile for, and cannot touch the GPU.
    stand_in = SimpleNamespace(
        get_current_device=lambda: device, get_current_stream=lambda _device: 0, get_current_target=lambda: target
    )

    def first(index: int) -> tuple[float, ...]:
        driver.set_active(stand_in)
        compile_one(candidates[index])
        return ()

    def compile_in_fork(candidate: LaunchConfig) -> object:
        index = index_of[id(candidate)]
        worker = forks.claim(index)
        if worker is None:
            return compile_one(candidate)
        failure = worker.prepare(index).failure
        if failure is not None and failure.kind == "timeout":
            _hung.set()
        # A lost worker would fork again, from this thread and while others compile. It is not used again.
        if failure is None or failure.kind not in ("crash", "timeout", "memory"):
            forks.give_back(worker)
        return compile_one(candidate)

    job = ChildTask(first=first, sample=lambda _index, _number: ())
    with ExitStack() as stack:
        for index in range(min(os.cpu_count() or 1, len(candidates))):
            start = time.perf_counter()
            worker = stack.enter_context(ForkedWorker(job, _PATIENCE_S))
            try:
                worker.begin(index)
            except OSError:  # too many processes
                break
            took_s = time.perf_counter() - start
            forks.begun[index] = worker
            if took_s > SLOWEST_FORK_S or (index == 0 and worker.has_answered(COLD_S)):
                break
        yield compile_in_fork


class _Forks:
    """The forks that no thread has: those that have begun a candidate, by its number, and the others."""

    def __init__(self) -> None:
        self.begun: dict[int, ForkedWorker] = {}
        self._free: list[ForkedWorker] = []
        self._lock = threading.Lock()

    def claim(self, index: int) -> ForkedWorker | None:
        """Return the fork that has begun a candidate, or a free one, or any; None if threads have them all."""
        with self._lock:
            if index in self.begun:
                return self.begun.pop(index)
            if self._free:
                return self._free.pop()
            return self.begun.popitem()[1] if self.begun else None

    def give_back(self, worker: ForkedWorker) -> None:
        with self._lock:
            self._free.append(worker)
