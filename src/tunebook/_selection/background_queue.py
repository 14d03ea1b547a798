"""Work behind the user's calls: one daemon thread per process, and the queue that it works through."""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from contextlib import suppress
from contextvars import Context
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, TypeAlias

from tunebook._memo.answer_memo import MEMO

if TYPE_CHECKING:
    from collections.abc import Hashable

# A job holds descriptions and no arrays, about 2 kB. Beyond this many, a call is told so and asks again next time.
CAPACITY: Final = 1024
# How long the end of the process waits for a candidate that is running. One that takes longer dies with the process,
# and who waits for its lease takes it over.
_GRACE_S: Final = 1.0

State: TypeAlias = Literal["running", "waiting"]


class Work(Protocol):
    """A job of the queue."""

    def attempt(self, *, patient: bool) -> bool:
        """Do the work; False if somebody else is at it. If `patient`, wait for them instead.

        What it raises ends the thread as it would end any other, and the next job gets a new one.
        """

    def ended(self) -> None:
        """Learn that the job is no longer in the queue, whatever came of it."""


class _QueuedJob(NamedTuple):
    key: Hashable
    work: Work


class Background:
    """A queue with one job per key, and the thread that works through it, which lives as long as there are jobs.

    Jobs that somebody else is at are put off until there is nothing else to do, so that two processes with the same
    jobs share them. In a forked child the queue is empty.
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
        self._left = 0  # jobs of which not everybody knows yet that they have ended
        self._thread: threading.Thread | None = None
        self._stopping = False

    def state(self, key: Hashable) -> State | None:
        """Return how far a job is, or None if there is none under this key."""
        return self._states.get(key)

    def submit(self, key: Hashable, work: Work) -> bool:
        """Queue a job, unless there is one under its key; False if there is no room for it, or for a thread."""
        with self._changed:
            if key in self._states:
                return True
            if len(self._states) >= self._capacity or self._stopping or not self._has_thread():
                return False
            self._states[key] = "waiting"
            self._left += 1
            self._fresh.append(_QueuedJob(key, work))
            return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no job is left; False if some are when the time is up, or for a job that asks."""
        with self._changed:
            if threading.current_thread() is self._thread:
                return False  # it would wait for itself
            return self._changed.wait_for(lambda: not self._left, timeout)

    def check_stop(self, _step: object = None) -> None:
        """End this thread if the process is ending; called now and then by jobs that take long.

        By SystemExit, which is silent in a thread, and is no failure of whatever it passes through.
        """
        if self._stopping:
            raise SystemExit

    def stop(self) -> None:
        """Drop all jobs, and wait a moment for the one that is running to let go of what it holds."""
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

        # Before the threads of pools are joined, and not after as `atexit` does: tuning under jax goes on in such a
        # thread, and the process would not end before it.
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
                    self._has_thread()  # for what came while this one ended, or after one job ended it

    def _take(self) -> tuple[_QueuedJob, bool] | None:
        with self._changed:
            patient = not self._fresh
            queue = self._put_off if patient else self._fresh
            if not queue:
                return None
            entry = queue.popleft()
            self._states[entry.key] = "running"
            return entry, patient

    def _attempt(self, entry: _QueuedJob, patient: bool) -> None:  # noqa: FBT001 - as it was taken
        done = True
        try:
            done = entry.work.attempt(patient=patient)
        finally:
            if done:
                self._end(entry)
            else:
                self._put_back(entry)

    def _put_back(self, entry: _QueuedJob) -> None:
        with self._changed:
            self._states[entry.key] = "waiting"
            self._put_off.append(entry)

    def _end(self, entry: _QueuedJob) -> None:
        self._states.pop(entry.key, None)
        try:
            entry.work.ended()
        finally:
            with self._changed:
                self._left -= 1
                self._changed.notify_all()


BACKGROUND: Final = Background()
os.register_at_fork(after_in_child=BACKGROUND.forget_after_fork)


def wait_for_background(timeout: float | None = None) -> bool:
    """Wait until nothing is tuned in the background any more; False if something still is after `timeout` seconds."""
    return BACKGROUND.wait(timeout)
