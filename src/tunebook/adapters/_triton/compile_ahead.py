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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final

from triton import knobs
from triton.compiler.compiler import make_backend
from triton.runtime import driver
from triton.runtime.cache import triton_key

from tunebook._base.errors import CompileError, LeftOut
from tunebook._base.locks import InterruptSafeLock
from tunebook._measure.forked_worker import ChildTask, ForkedWorker
from tunebook.adapters._triton import key_ahead
from tunebook.adapters._triton.resources import checked_compilation, refusal_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tunebook.adapters._triton.candidate import LaunchConfig

# With fewer candidates forks gain nothing: each takes 0.02 s to make.
FEWEST: Final = 4
FEWEST_CORES: Final = 4
# A fork that reads a compiled program answers sooner; compiling the smallest one takes 100 ms.
COLD_S: Final = 0.07
# A process so big that a fork takes this long is not forked again.
SLOWEST_FORK_S: Final = 0.2
# A fork hangs if another thread held a lock when it was made. A candidate that takes longer is compiled here instead.
_PATIENCE_S: Final = 30.0
_hung: Final = threading.Event()  # set after a hang: this process forks no more


def may_fork(candidates: int = FEWEST, *, fewest_cores: int = FEWEST_CORES) -> bool:
    """Return whether forks of this process may compile so many candidates, and would gain something."""
    distributed = sys.modules.get("torch.distributed")
    # Memory that is registered with a network card must not become copy-on-write, as a fork makes it on older kernels.
    networked = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if networked or _hung.is_set() or knobs.compilation.always_compile:
        return False
    return candidates >= FEWEST and (os.cpu_count() or 1) >= fewest_cores


def longest_first(candidates: Iterable[LaunchConfig]) -> list[LaunchConfig]:
    """Return candidates in the order in which to compile them, so that no core works on a long one alone at the end.

    Code is unrolled: the larger the blocks and the fewer the threads, the more there is of it. Of 278 candidates of
    gated linear attention the longest took ten times as long as the shortest; in this order 16 cores need 13 % less
    time for them than in a random one, and 1 % more than in the best.
    """

    def work(candidate: LaunchConfig) -> tuple[float, int]:
        config = candidate.config
        sizes = (value for value in config.kwargs.values() if isinstance(value, int) and value > 0)
        return math.prod(sizes) / (config.num_warps or 4), config.num_stages or 0  # None: given by the call

    return sorted(candidates, key=work, reverse=True)


def driver_for_forks() -> SimpleNamespace:
    """Return a driver to put in the place of Triton's in forks: it knows the target, and cannot touch the GPU."""
    device, target = driver.active.get_current_device(), driver.active.get_current_target()
    # Worked out once per process: in each fork they would take longer than many a candidate.
    key_ahead.finish()
    triton_key()
    make_backend(target).hash()
    return SimpleNamespace(
        get_current_device=lambda: device, get_current_stream=lambda _device: 0, get_current_target=lambda: target
    )


@contextmanager
def compile_forks(
    compile_one: Callable[[LaunchConfig], object],
    candidates: Sequence[LaunchConfig],
    *,
    ahead: bool = True,
    max_shared_bytes: int | None = None,
    heuristic: LaunchConfig | None = None,
) -> Iterator[CompileForks]:
    """Yield a pool of as many forks as cores; each starts with a candidate at once, unless not `ahead`.

    The candidates come in the order in which they are needed. If the first one is done in a moment, the programs are on
    disk already, and no further forks are made. With `max_shared_bytes`, the compilation of a candidate that is not
    worth more ends after its first stages, except for the heuristic.
    """
    stand_in = driver_for_forks()

    def first(index: int) -> tuple[float, ...]:
        driver.set_active(stand_in)
        foreseen, at = divmod(index, len(candidates))
        if max_shared_bytes is None or candidates[at] is heuristic:
            compile_one(candidates[at])
        else:
            with checked_compilation(max_shared_bytes, whole=not foreseen):
                compile_one(candidates[at])
        return ()

    job = ChildTask(first=first, sample=lambda _index, _number: ())
    forks = CompileForks(compile_one, candidates)
    with ExitStack() as stack, ExitStack() as ending:
        began_s = time.perf_counter()
        for index in range(min(os.cpu_count() or 1, len(candidates))):
            start_s = time.perf_counter()
            worker = stack.enter_context(ForkedWorker(job, _PATIENCE_S))
            # All are killed before any is waited for: taking a copy of a big process apart takes 30 ms.
            ending.callback(worker.interrupt)
            try:
                worker.start()
            except OSError:  # too many processes
                break
            if ahead:
                worker.begin(index)
                forks.begun[index] = worker
            else:
                forks.free.append(worker)
            on_disk = ahead and forks.begun[0].has_answered(0.0) and time.perf_counter() - began_s < COLD_S
            if on_disk or time.perf_counter() - start_s > SLOWEST_FORK_S:
                break
        yield forks


class CompileForks:
    """Compiles a candidate in a fork of this process if one is free, and loads the program here.

    Several threads may call it; each of them gets a fork of its own.
    """

    def __init__(self, compile_one: Callable[[LaunchConfig], object], candidates: Sequence[LaunchConfig]) -> None:
        self._compile_one = compile_one
        self._index_of = {id(candidate): index for index, candidate in enumerate(candidates)}
        self.begun: dict[int, ForkedWorker] = {}  # forks that no thread has, by the candidate that each has begun
        self.free: list[ForkedWorker] = []
        self._busy: dict[int, ForkedWorker] = {}
        self._left_out: set[int] = set()
        self.has_left_out = False  # of candidates that would run
        self._coming = len(candidates)
        self._lock = InterruptSafeLock()

    def __call__(self, candidate: LaunchConfig) -> object:
        index = self._index_of.get(id(candidate))
        if index is None:  # made after the forks
            return self._compile_one(candidate)
        with self._lock:
            self._coming -= 1
        refusal = self._ask(index, index)
        if index in self._left_out:
            raise CompileError("left out while it was compiled")
        if refusal is not None:
            raise refusal
        return self._compile_one(candidate)

    def foresee(self, candidates: Sequence[LaunchConfig]) -> list[CompileError | None]:
        """Return for each candidate why it is not worth compiling, by the first stages of its compilation."""
        many = len(self._index_of)
        found = [self._index_of.get(id(candidate)) for candidate in candidates]
        with ThreadPoolExecutor(len(candidates) or 1, thread_name_prefix="tunebook-foresee") as pool:
            return list(pool.map(lambda at: None if at is None else self._ask(at, at + many), found))

    def _ask(self, index: int, request: int) -> CompileError | None:
        """Let a fork answer a request about a candidate, and return why the candidate is not worth compiling."""
        worker = self._claim(index)
        failure = None if worker is None else worker.prepare(request).failure
        if failure is not None and failure.kind == "timeout":
            _hung.set()
        refusal = refusal_in(failure)
        with self._lock:
            self._busy.pop(index, None)
            self.has_left_out |= isinstance(refusal, LeftOut)
            # A lost worker would fork again, from this thread and while others compile. It is not used again.
            if worker is not None and (failure is None or failure.kind not in ("crash", "timeout", "memory")):
                if self._coming:
                    self.free.append(worker)
                else:  # it has nothing left to do, and ends while others compile, or the race is on
                    worker.interrupt()
        return refusal

    def _claim(self, index: int) -> ForkedWorker | None:
        """Return the fork that has begun a candidate, or a free one, or any; None if threads have them all."""
        with self._lock:
            if index in self._left_out:
                return None
            worker = self.begun.pop(index, None)
            if worker is None and self.free:
                worker = self.free.pop()
            elif worker is None and self.begun:
                worker = self.begun.popitem()[1]
            if worker is not None:
                self._busy[index] = worker
            return worker

    def leave_out(self, candidate: LaunchConfig) -> None:
        """Compile a candidate no further, and do not start it."""
        index = self._index_of[id(candidate)]
        with self._lock:
            self._left_out.add(index)
            if index in self._busy:
                self._busy[index].interrupt()
