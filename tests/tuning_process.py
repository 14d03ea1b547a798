"""A process of the stress tests: calls a tunable kernel, and logs each tuning in one appended line.

usage: tuning_process.py BOOK LOG KEYS SECONDS_PER_TUNING
"""

from __future__ import annotations

import os
import random
import sys
import time
import warnings

import tunebook as tb


class LoggingTuner:
    """Takes its time, and chooses by the key."""

    def __init__(self, log, seconds):
        self.log, self.seconds = log, seconds

    def say(self, event, key):
        descriptor = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{event} {key}\n".encode())
        os.close(descriptor)

    def autotune(self, make_fn, args, kwargs, candidates):
        self.say("begin", args[0])
        time.sleep(self.seconds)
        self.say("end", args[0])
        return candidates[args[0] % 2]


def main(book, log, keys, seconds):
    warnings.filterwarnings("ignore", message=".*was tuned for")  # a problem per number is what this test is about

    @tb.tunable(space=tb.Space(b=[1, 2]), name="stress", store=book, tuner=LoggingTuner(log, float(seconds)))
    def kernel(n, *, config):
        return config.b

    order = random.sample(range(int(keys)), int(keys))
    assert all(kernel(n) == n % 2 + 1 for n in order)
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
