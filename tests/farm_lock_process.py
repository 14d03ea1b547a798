"""Processes that take turns on a device, and note when they had it.

usage: farm_lock_process.py COMMAND ROOT ARGUMENTS...
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from limits import HANG_S

from tunebook._measure.device_lock import DeviceTurn


def note(root, event, begin=0):
    descriptor = os.open(Path(root, "log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    # CLOCK_MONOTONIC is the machine's, so that times of different processes can be compared.
    os.write(descriptor, f"{event} {os.getpid()} {begin} {time.monotonic_ns()}\n".encode())
    os.close(descriptor)


def turns(root, count, seconds):
    """Have the device for a while, again and again."""
    turn = DeviceTurn(["cpu"], HANG_S, root=Path(root, "locks"))
    print("ready", flush=True)
    for _ in range(int(count)):
        note(root, "want")
        with turn.taken(HANG_S):
            began = time.monotonic_ns()
            note(root, "have")
            time.sleep(float(seconds))
            assert not turn.disturbances(), turn.disturbances()
            note(root, "had", began)


def hold(root):
    """Have the device until killed."""
    with DeviceTurn(["cpu"], HANG_S, root=Path(root, "locks")).taken(HANG_S):
        print("ready", flush=True)
        time.sleep(HANG_S)


def hold_and_tell(root):
    """Hold the device, and print the disturbances: before and after a line of input."""
    turn = DeviceTurn(["cpu"], HANG_S, root=Path(root, "locks"))
    with turn.taken(HANG_S):
        print(turn.disturbances(), flush=True)
        sys.stdin.readline()
        print(turn.disturbances(), flush=True)


def hold_and_fork(root):
    """Have the device until killed, with a child that outlives it."""
    with DeviceTurn(["cpu"], HANG_S, root=Path(root, "locks")).taken(HANG_S):
        child = os.fork()
        if child == 0:
            print(os.getpid(), flush=True)
            time.sleep(HANG_S)
        time.sleep(HANG_S)


def fork_back(root):
    """Fork within a turn; the child comes back from it first, and leaves the parent's lock alone."""
    turn = DeviceTurn(["cpu"], HANG_S, root=Path(root, "locks"))
    parent = os.getpid()
    with turn.taken(HANG_S):
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            print("ready", flush=True)
            sys.stdin.readline()
    if os.getpid() != parent:
        with DeviceTurn(["cpu"], 0.0, root=Path(root, "locks")).taken(0.0):
            pass  # which closes a descriptor of the parent's file, in the child
        os._exit(0)


def tune(root, count, isolate):
    """Tune through the front door a kernel that notes each of its runs."""
    import tunebook as tb

    runs = []

    @tb.tunable(
        space=tb.Space(n=[20_000, 40_000, 60_000]),
        name="noted",
        store=False,
        check=False,
        policy=tb.AutotunePolicy(isolate=isolate),
    )
    def noted(x, *, config):
        began = time.monotonic_ns()
        total = sum(range(config.n))
        if isolate == "never":
            runs.append((began, time.monotonic_ns()))
        else:
            note(root, "had", began)
        return total

    print("ready", flush=True)
    sys.stdin.readline()
    for x in range(int(count)):
        tb.tune(noted, x)
    with Path(root, "log").open("a") as log:
        log.writelines(f"had {os.getpid()} {began} {ended}\n" for began, ended in runs)


def ring(root, role):
    """Be the one that has the device and needs a lease, or the one that has the lease and needs the device."""
    import tunebook as tb

    def meet(mine, other):
        Path(root, mine).touch()
        deadline = time.monotonic() + HANG_S
        while not Path(root, other).exists():
            assert time.monotonic() < deadline, f"{other} never came"
            time.sleep(0.01)

    def leased(candidates, x):  # called when the lease is held, and nothing has been measured
        if role == "inner":
            meet("leased", "measuring")
        return candidates

    book, tuner = Path(root, "book"), tb.Tuner(device_wait_s=1.0)

    @tb.tunable(space=[{"n": 10}, {"n": 20}], name="inner", check=False, store=book, tuner=tuner, prune=leased)
    def inner(x, *, config):
        return x

    @tb.tunable(space=[{"n": 10}], name="outer", check=False, store=False, tuner=tuner)
    def outer(x, *, config):
        meet("measuring", "leased")
        return inner(x)

    print({"inner": inner, "outer": outer}[role](1), flush=True)


if __name__ == "__main__":
    commands = (turns, hold, hold_and_tell, hold_and_fork, fork_back, tune, ring)
    {command.__name__: command for command in commands}[sys.argv[1]](*sys.argv[2:])
