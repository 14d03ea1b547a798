"""A process of the background tests, on one book.

usage: background_process.py BOOK LOG KEYS SECONDS_PER_RUN wait|exit
"""

from __future__ import annotations

import os
import sys
import threading
import time

from kernels import FakeClock, fake_tuner
from limits import HANG_S

import tunebook as tb
from tunebook._selection import deferred_tuning

STARTED = threading.Event()
CLOCK = FakeClock()


def say(log, *words):
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, (" ".join(map(str, words)) + "\n").encode())
    os.close(descriptor)


def main(book, log, keys, seconds, end):
    if float(seconds) < 1:
        deferred_tuning._GRACE_S = HANG_S  # a busy machine may take long over a short run

    @tb.tunable(
        space=tb.Space(b=[1, 2, 3]),
        heuristic={"b": 1},
        name="behind",
        store=book,
        check=False,
        tuner=fake_tuner(CLOCK),
        policy=tb.AutotunePolicy(cache_miss_fallback="background"),
        on_event=lambda event, call_key, **_: event == "autotune_start" and say(log, "begin", call_key),
    )
    def kernel(n, *, config):
        if threading.current_thread() is not threading.main_thread():
            STARTED.set()
            time.sleep(float(seconds))
            CLOCK.spend(0.003 / config.b)
        return config.b

    assert all(kernel(n) in (1, 3) for n in range(int(keys))), "the heuristic serves, or what another found"
    print("served", flush=True)
    if end == "wait":
        assert tb.wait_for_background(HANG_S)
        assert all(kernel(n) == 3 for n in range(int(keys))), "the tuned one is swapped in"
        print("tuned", flush=True)
    else:
        assert STARTED.wait(HANG_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
