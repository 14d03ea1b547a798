"""Work behind the user's calls: one daemon thread per process, and the queue that it works through."""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from contextlib import suppress
from contextvars import Context
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from tunebook._memo.answer_memo import MEMO

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

# A job holds descriptions and no arrays, about 2 kB. Beyond this many, a call is told so and asks again next time.
CAPACITY: Final = 1024
# How long the end of the process waits for a candidate that is running. A longer one dies with the process, and the
# next process that waits for its lease takes it over.
_GRACE_S: Final = 1.0

State: TypeAlias = Literal["running", "waiting"]


class _QueuedJob(NamedTuple):
    key: Hashable
    attempt: Callable[..., bool]
    ended: Callable[[], object]


class Background:
    """A queue with one job per key, and the thread that works through it, which lives as long as there are jobs.

    Jobs that another caller is doing are put off until there is nothing else to do, so that two processes with the
    same jobs share them. In a forked child the queue is empty.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity: Final = capacity
        self._stops_at_exit = False
        self._clear()

    def _clear(self) -> None:
        self._changed = threading.Condition()
        self._fresh: deque[_QueuedJob] = deque()
        self._put_off: deque[_QueuedJob] = deque()
        self._states: dict[Hashable, State] = {}
        self._left = 0  # jobs that have not been told yet that they have ended
        self._thread: threading.Thread | None = None
        self._stopping = False

    def state(self, key: Hashable) -> State | None:
        """Return how far the job under a key is, or None."""
        return self._states.get(key)

    def submit(self, key: Hashable, attempt: Callable[..., bool], ended: Callable[[], object]) -> bool:
        """Queue a job, unless one has its key already; False if the queue is full, or a thread cannot be started.

        `attempt(patient=)` does the work, and returns False if another caller is doing it; if `patient`, it waits for
        that caller instead. An error ends the thread, as it would end any other, and the next job gets a new thread.
        `ended` is called when the job has left the queue, with or without a result.
        """
        with self._changed:
            if key in self._states:
                return True
            if len(self._states) >= self._capacity or self._stopping or not self._has_thread():
                return False
            self._states[key] = "waiting"
            self._left += 1
            self._fresh.append(_QueuedJob(key, attempt, ended))
            return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no job is left; False if the time is up before, or if a job itself asks."""
        with self._changed:
            if threading.current_thread() is self._thread:
                return False  # it would wait for itself
            return self._changed.wait_for(lambda: not self._left, timeout)

    def check_stop(self, _step: object = None) -> None:
        """End this thread if the process is ending; called now and then by jobs that take long.

        By SystemExit, which is silent in a thread, and does not count as a failure of a candidate.
        """
        if self._stopping:
            raise SystemExit

    def stop(self) -> None:
        """Drop all jobs, and wait a moment for the running job to release its lease."""
        with self._changed:
            self._stopping = True
            self._fresh.clear()
            self._put_off.clear()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_GRACE_S)

    def forget_after_fork(self) -> None:
        """Start empty, in a forked child, where the parent's thread does not exist."""
        pending = bool(self._states)
        self._clear()
        if pending:
            # Memoised answers wait for results that come in the parent only; asked again, the child queues its own.
            MEMO.invalidate()

    def _has_thread(self) -> bool:
        """Whether there is a thread, or could be started: not at interpreter exit, nor where there are too many."""
        if self._thread is None:
            # In an empty context: where threads inherit their starter's, an overlay of that call would last for ever.
            thread = threading.Thread(target=Context().run, args=(self._run,), name="tunebook background", daemon=True)
            with suppress(RuntimeError):
                thread.start()
                self._thread = thread
        return self._thread is not None

    def _stop_at_exit(self) -> None:
        if self._stops_at_exit:
            return
        self._stops_at_exit = True
        import concurrent.futures.thread  # noqa: F401, PLC0415 - its hook must be there before ours, and so run after it

        # Before the threads of pools are joined, and not after as `atexit` does: tuning under jax runs in a thread of a
        # pool, and the process would not end before it.
        at_exit = getattr(threading, "_register_atexit", atexit.register)
        try:
            at_exit(self.stop)
        except RuntimeError:
            self.stop()  # it is too late to register anything

    def _run(self) -> None:
        try:
            self._stop_at_exit()
            while (turn := self._take()) is not None:
                self._attempt(*turn)
        finally:
            with self._changed:
                self._thread = None
                if self._fresh or self._put_off:
                    self._has_thread()  # for jobs that came while this thread ended, or that it left when a job raised

    def _take(self) -> tuple[_QueuedJob, bool] | None:
        with self._changed:
            patient = not self._fresh
            queue = self._put_off if patient else self._fresh
            if not queue:
                return None
            entry = queue.popleft()
            self._states[entry.key] = "running"
            return entry, patient

    def _attempt(self, entry: _QueuedJob, patient: bool) -> None:  # noqa: FBT001 - as `_take` returns it
        done = True
        try:
            done = entry.attempt(patient=patient)
        finally:
            if done:
                self._end(entry)
            else:
                with self._changed:
                    self._states[entry.key] = "waiting"
                    self._put_off.append(entry)

    def _end(self, entry: _QueuedJob) -> None:
        self._states.pop(entry.key, None)
        try:
            entry.ended()
        finally:
            with self._changed:
                self._left -= 1
                self._changed.notify_all()


BACKGROUND: Final = Background()
os.register_at_fork(after_in_child=BACKGROUND.forget_after_fork)


def wait_for_background(timeout: float | None = None) -> bool:
    """Wait until nothing is tuned in the background any more; False if something still is after `timeout` seconds."""
    return BACKGROUND.wait(timeout)
