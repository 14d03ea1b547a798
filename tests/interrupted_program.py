"""A program for the tests of interrupts: tunes a kernel of slow candidates, and says which candidate runs.

usage: interrupted_program.py BOOK [CANDIDATE_THAT_CRASHES]
"""

from __future__ import annotations

import os
import signal
import sys
import time

import tunebook as tb


def main(book, crashing="0"):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run with it ignored

    @tb.tunable(space=tb.Space(ms=[1, 2, 5, 300]), store=book, name="nap", on_event=say, check=False)
    def nap(x, *, config):
        print("ran", config.ms, flush=True)
        if config.ms == int(crashing):
            os.kill(os.getpid(), signal.SIGKILL)
        if config.ms == 5:
            raise ValueError("no")
        time.sleep(config.ms * 1e-3)
        return x

    nap(3)
    print("done", flush=True)


def say(event, **data):
    if event == "autotune_progress":
        step = data["step"]
        print("step", step.doing, step.done, step.total, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
