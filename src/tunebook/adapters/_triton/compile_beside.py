"""Compiles candidates in forks beside a running program: at idle priority, and on other cores than the program's.

Nothing waits for a fork. A fork fills Triton's cache on disk, from which the program loads what was compiled. It
answers with a digest of the compiled program, so that equal programs are loaded once.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from triton.runtime import driver

from tunebook._measure.forked_worker import ChildTask, ForkedWorker
from tunebook._measure.stopwatch import Attempt
from tunebook._tuning.live_runs import Build
from tunebook.adapters._triton.compile_ahead import SLOWEST_FORK_S, driver_for_forks, may_fork
from tunebook.adapters._triton.fork_pool import POOL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tunebook._tuning.host_share import HostShare
    from tunebook.adapters._triton.candidate import LaunchConfig

# Forks per problem. A fork takes 13 ms of the program's time, and a training step meets ten problems at its start,
# so a second fork is made only if so many candidates are left after the first one's first.
_OF_ONE, _LEFT = 2, 6
# At idle priority a compiler may get no time at all for a while: the candidate is not at fault. A fork may also hang by
# chance, because another thread held a lock when it was made. So a candidate gets another fork, and twice the time.
_PATIENCE_S: Final = 300.0
# Candidates whose programs are in memory, from launches of other sizes, that one poll takes over: 0.2 ms each.
_FROM_MEMORY: Final = 4
_DIGITS: Final = 12  # hexadecimal: a double holds as many exactly
_TRIES: Final = 3


def may_fork_beside() -> bool:
    """Return whether forks may compile beside this process: there must be a core for them."""
    return may_fork(fewest_cores=2)


def _step_aside(cpu: int | None) -> None:
    """Run this process only where nothing else wants to, and not on the core that the program was on."""
    with suppress(AttributeError, OSError):  # not on every system
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(AttributeError, OSError):
        others = os.sched_getaffinity(0) - {cpu}
        if others:
            os.sched_setaffinity(0, others)


def _current_cpu() -> int | None:
    import ctypes  # noqa: PLC0415 - loaded late: 2 ms

    with suppress(AttributeError, OSError):
        return int(ctypes.CDLL(None).sched_getcpu())
    return None


def _digest(program: bytes) -> float:
    return float(int(hashlib.sha256(program).hexdigest()[:_DIGITS], 16))


class CompileBeside:
    """Compiles the candidates of one problem; `compile_one(candidate, call)` returns equal bytes for equal programs.

    `recall(candidate, call)` returns the same for programs in this process's memory, and None for others. Launches of
    other sizes share programs: Triton compiles for the kinds of arguments, and sizes differ in kind by divisors alone.
    `loads()` counts the programs that were loaded for any sizes: memory is asked again when there are more.
    """

    def __init__(
        self,
        compile_one: Callable[[LaunchConfig, Any], bytes | None],
        candidates: Mapping[str, LaunchConfig],
        host: HostShare,
        recall: Callable[[LaunchConfig, Any], bytes | None] = lambda _candidate, _call: None,
        loads: Callable[[], int] = lambda: 0,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recall, self._loads = recall, loads
        self._compile_one, self._host, self._clock_s = compile_one, host, clock_s
        self._names, self._candidates = list(candidates), list(candidates.values())
        self._places = {name: at for at, name in enumerate(self._names)}
        self._todo = list(range(len(self._names)))  # in this order
        self._begun: set[int] = set()
        self.forks = 0
        self._late: Counter[int] = Counter()  # how often a candidate was not compiled in time
        self._busy: dict[ForkedWorker, tuple[int, float]] = {}  # the candidate of each fork, and when it began
        self._forks = True
        # The loads at which memory was asked last and had nothing: asking takes 0.3 ms, and a problem may wait long for
        # its turn to fork.
        self._recalled_at: int | None = None

    def arrange(self, names: Sequence[str]) -> None:
        """Compile these next, in this order, and no others."""
        self._todo = [at for name in names if (at := self._places[name]) not in self._begun]

    def poll(self, call: Any, *, may_fork: bool = True) -> list[Build]:
        """Return the compilations that have ended, and start others; forks get a copy of the call's arguments."""
        done: list[Build] = []
        for worker, (index, began_s) in list(self._busy.items()):
            if not POOL.keeps(worker, self._clock_s()):
                self._try_again(worker, index)
            elif worker.has_answered(0.0):
                done.append(self._take(worker, index))
            elif self._clock_s() - began_s > _PATIENCE_S * 2 ** self._late[index]:
                done += self._give_up(worker, index)
        loads = self._loads()
        if not self._busy and loads != self._recalled_at:
            done += self._from_memory(call)
            self._recalled_at = None if done else loads
        if self._todo and not done:
            if may_fork and self._forks and self._wants_fork() and POOL.has_room(self._clock_s()):
                self._fork(call)
            if not self._forks and not self._busy:  # the program compiles the rest itself, within its share
                done += [Build(self._names[index]) for index in self._todo]
                self._begun.update(self._todo)
                self._todo.clear()
        return done

    def _from_memory(self, call: Any) -> list[Build]:
        """Return the next candidates that need no compiler."""
        done: list[Build] = []
        while self._todo and len(done) < _FROM_MEMORY:
            made = None
            # A grid may refuse a candidate, and Triton cannot write down some constants: a fork or a launch will tell.
            with Attempt():
                made = self._recall(self._candidates[self._todo[0]], call)
            if made is None:
                break
            self._begun.add(self._todo[0])
            done.append(Build(self._names[self._todo.pop(0)], _digest(made), in_memory=True))
        return done

    def _wants_fork(self) -> bool:
        if not self._busy:
            return True
        return len(self._busy) < _OF_ONE and len(self._begun) > len(self._busy) and len(self._todo) >= _LEFT

    def _fork(self, call: Any) -> None:
        stand_in = driver_for_forks()
        held, cpu, began_s = [call], _current_cpu(), self._host.clock_s()

        def first(index: int) -> tuple[float, ...]:
            _step_aside(cpu)
            driver.set_active(stand_in)
            made = self._compile_one(self._candidates[index], held[0])
            return () if made is None else (_digest(made),)

        task = ChildTask(first=first, sample=lambda _index, _number: ())
        # A server may have a thread per request: a fork that died with its thread failed a candidate that was fine.
        worker = ForkedWorker(task, _PATIENCE_S, outlives_thread=True)
        try:
            worker.start()
        except OSError:  # too many processes
            self._forks = False
            return
        self.forks += 1
        held.clear()  # the fork has its copy: the caller's tensors must not be kept here
        self._forks = self._host.clock_s() - began_s <= SLOWEST_FORK_S
        POOL.add(worker, self._clock_s())
        self._begin(worker)

    def _begin(self, worker: ForkedWorker) -> None:
        if not self._todo:
            self._release(worker)
            return
        index = self._todo.pop(0)
        self._begun.add(index)
        worker.begin(index)
        self._busy[worker] = index, self._clock_s()

    def _take(self, worker: ForkedWorker, index: int) -> Build:
        name, reply = self._names[index], worker.prepare(index)
        failure = reply.failure
        if failure is None:
            self._begin(worker)
            return Build(name, reply.samples_s[0] if reply.samples_s else None)
        lost = failure.kind in ("crash", "timeout", "memory")
        self._release(worker) if lost else self._begin(worker)
        # Another error than a compiler's may be of the fork: this process compiles the candidate itself.
        return Build(name, failure=failure) if lost or failure.kind == "compile" else Build(name)

    def _give_up(self, worker: ForkedWorker, index: int) -> list[Build]:
        """End a fork that was not done in time; its candidate is compiled again after the others, or left out."""
        self._release(worker)
        self._late[index] += 1
        if self._late[index] < _TRIES:
            self._try_again(worker, index)
            return []
        return [Build(self._names[index], left_out=f"its compiler was not done in time, {_TRIES} times")]

    def _try_again(self, worker: ForkedWorker, index: int) -> None:
        self._busy.pop(worker, None)
        self._begun.discard(index)
        self._todo.append(index)

    def _release(self, worker: ForkedWorker) -> None:
        self._busy.pop(worker, None)
        POOL.release(worker)

    def close(self) -> None:
        """End all forks."""
        for worker in list(self._busy):
            self._release(worker)
