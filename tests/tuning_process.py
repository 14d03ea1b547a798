"""A process of the stress tests: calls a tunable kernel, and logs each tuning in one appended line.

usage: tuning_process.py BOOK LOG KEYS SECONDS_PER_TUNING
"""

from __future__ import annotations

import os
import random
import sys
import time

import tunebook as tb

book, log, keys, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])


def say(*words):
    line = " ".join(map(str, (*words, os.getpid(), time.monotonic_ns()))) + "\n"
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


class CountingTuner:
    def autotune(self, make_fn, args, kwargs, candidates):
        say("begin", args[0])
        time.sleep(seconds)
        say("end", args[0])
        return candidates[args[0] % 2]


@tb.tunable(space=tb.Space(b=[1, 2]), name="stress", store=book, tuner=CountingTuner())
def kernel(n, *, config):
    return config.b


order = list(range(keys))
random.shuffle(order)
assert all(kernel(n) == n % 2 + 1 for n in order)
print("done", flush=True)
