"""The forks of this process that compile beside it, of all problems: how many there may be, and which make room."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Final, final

from tunebook._base.locks import InterruptSafeLock

if TYPE_CHECKING:
    from tunebook._measure.forked_worker import ForkedWorker

# Forks that compile at once, on as many cores or more.
_AT_ONCE: Final = 12
# A fork that has answered waits so long for its session, and any other one so long: a session asks no more if its sizes
# come no more, or its kernel is gone. These forks held all places, and no other kernel was tuned.
_ANSWERED_S, _LONGEST_S = 10.0, 300.0


@final
class ForkPool:
    """Forks, by when their sessions asked for them last. Threads may share it."""

    def __init__(self) -> None:
        self._most: Final = max(1, min(_AT_ONCE, 3 * (os.cpu_count() or 1) // 4))
        self._asked_s: dict[ForkedWorker, float] = {}
        self._lock = InterruptSafeLock()

    def has_room(self, now_s: float) -> bool:
        """Return whether there may be one more fork; if there are as many as may be, end forks that wait in vain."""
        if len(self._asked_s) < self._most:
            return True
        with self._lock:
            for worker, asked_s in list(self._asked_s.items()):
                waited_s = now_s - asked_s
                # Its program is on disk: if the session asks again, it is compiled in a moment.
                if waited_s > _LONGEST_S or (waited_s > _ANSWERED_S and worker.has_answered(0.0)):
                    del self._asked_s[worker]
                    end(worker)
        return len(self._asked_s) < self._most

    def add(self, worker: ForkedWorker, now_s: float) -> None:
        """Count a new fork."""
        self._asked_s[worker] = now_s

    def keeps(self, worker: ForkedWorker, now_s: float) -> bool:
        """Note that a session asks for its fork; return False if the fork was ended to make room."""
        with self._lock:
            if worker in self._asked_s:
                self._asked_s[worker] = now_s
                return True
            return False

    def release(self, worker: ForkedWorker) -> None:
        """End a fork."""
        self._asked_s.pop(worker, None)
        end(worker)

    def forget_parent(self) -> None:
        """Count the forks of this process alone, in a forked child."""
        self._asked_s.clear()
        self._lock = InterruptSafeLock()  # a thread of the parent may hold it


def end(worker: ForkedWorker) -> None:
    """End a fork without waiting."""
    worker.interrupt()
    # Taking a copy of a big process apart takes 30 ms, which the program does not wait for.
    threading.Thread(target=worker.close, name="tunebook-forks", daemon=True).start()


POOL: Final = ForkPool()
os.register_at_fork(after_in_child=POOL.forget_parent)
