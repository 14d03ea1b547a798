"""Locks that an interrupt does not leave locked."""

from __future__ import annotations

import signal
import threading

import pytest

from tunebook._base.locks import InterruptSafeLock

INTERRUPTS = 2_000


class Interrupt(BaseException):
    pass


@pytest.fixture
def alarm():
    def interrupt(*_):
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_signal_at_any_moment_leaves_the_lock_unlocked(alarm):
    lock = InterruptSafeLock()
    left_locked = 0
    for nth in range(INTERRUPTS):
        try:
            alarm(2e-5 + nth % 50 * 1e-6)
            while True:
                with lock:
                    pass
        except Interrupt:
            left_locked += lock._is_owned()
    assert left_locked == 0


def test_a_signal_inside_a_nested_block_unlocks_only_what_that_block_locked(alarm):
    lock = InterruptSafeLock()
    for nth in range(INTERRUPTS // 4):
        with lock:
            try:
                alarm(2e-5 + nth % 50 * 1e-6)
                while True:
                    with lock:
                        pass
            except Interrupt:
                assert lock._is_owned()
        assert not lock._is_owned()


def test_a_signal_while_another_thread_has_the_lock_takes_nothing(alarm):
    lock, has_it, may_end = InterruptSafeLock(), threading.Event(), threading.Event()

    def hold():
        with lock:
            has_it.set()
            may_end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    has_it.wait()
    alarm(0.01)
    with pytest.raises(Interrupt), lock:
        pass
    assert not lock._is_owned()
    may_end.set()
    thread.join()
    with lock:
        assert lock._is_owned()


def test_a_condition_can_wait_with_it():
    lock, seen = InterruptSafeLock(), []
    changed = threading.Condition(lock)

    def put():
        with lock:
            seen.append(1)
            changed.notify_all()

    threading.Timer(0.01, put).start()
    with lock:
        assert changed.wait_for(lambda: seen)
