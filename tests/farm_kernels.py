"""Kernels that workers import: quick kernels, and kernels that kill or hold up their worker.

Files in the directory FARM_TEST control them: every worker on this machine sees it, however the worker was started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from limits import HANG_S

import tunebook as tb
from tunebook._selection.recording import recordings


def stage():
    return Path(os.environ.get("FARM_TEST", "/nonexistent"))


def note(event, number):
    """Append a line to the log, with the process id and the time."""
    if stage().exists():
        descriptor = os.open(stage() / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{event} {number} {os.getpid()} {time.monotonic_ns()}\n".encode())
        os.close(descriptor)


@tb.tunable(space=tb.Space(n=[10, 1000]), name="farm.quick", check=False)
def quick(x, *, config):
    note("run", x.shape[0])
    return sum(range(config.n))


@tb.tunable(space=tb.Space(n=[10, 11, 12, 13]), heuristic={"n": 10}, name="farm.half_wrong")
def half_wrong(x, *, config):
    if config.n == 12:
        raise ValueError("it does not run")
    return 2 * x if config.n == 13 else x


@tb.tunable(space=tb.Space(n=[10, 1000]), name="farm.lazy", check=False)
def lazy(x, *, config):
    note("lazy", x.shape[0])
    time.sleep(0.002)
    return x.shape


@tb.tunable(space=tb.Space(n=[10, 1000]), name="farm.deadly", check=False)
def deadly(x, *, config):
    """Kills its worker, as often as the file `deaths` says."""
    deaths = stage() / "deaths"
    left = int(deaths.read_text()) if deaths.exists() else 0
    if left:
        deaths.write_text(str(left - 1))
        note("die", x.shape[0])
        os.kill(os.getpid(), signal.SIGKILL)
    return sum(range(config.n))


@tb.tunable(space=tb.Space(n=[10, 1000]), name="farm.stuck", check=False)
def stuck(x, *, config):
    """Waits until the file `go` is there."""
    note("stuck", x.shape[0])
    while stage().exists() and not (stage() / "go").exists():
        time.sleep(0.01)
    return sum(range(config.n))


@tb.tunable(space=tb.Space(n=[10, 11]), heuristic={"n": 10}, name="farm.half_stuck", check=False)
def half_stuck(x, *, config):
    """One candidate waits until the file `go` is there, in a way that no signal ends if the file `deaf` is there."""
    if config.n == 11 and stage().exists() and not (stage() / "go").exists():
        if (stage() / "deaf").exists():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note("half_stuck", x.shape[0])
        while not (stage() / "go").exists():
            time.sleep(0.01)
    return sum(range(config.n))


@tb.tunable(space=tb.Space(n=[10, 1000]), name="farm.forgetful", check=False, store=False)
def forgetful(x, *, config):
    return sum(range(config.n))


@tb.tunable(space=tb.Space(n=[10, 1000]), name="farm.broken", check=False)
def broken(x, *, config):
    if (stage() / "breaks").exists():
        raise ValueError("it does not work")
    return sum(range(config.n))


class PerCall(tb.Kernel):
    """A kernel that its program makes anew for every call."""

    checks = False

    def __init__(self):
        super().__init__("farm.per_call")

    def run(self, x, *, cfg):
        return sum(range(cfg))

    def heuristic_cfg(self, inv):
        return 10

    def candidate_cfgs(self, inv):
        return [10, 1000]


executor = tb.Executor(tb.ConfigSelectorChain(tb.ConfigCache(), None, tb.Tuner(), tb.PersistentCache("farm.per_call")))


def _meet(this, other):
    """Say that this has begun, and wait until the other has: both must be going on at the same time."""
    (stage() / this).touch()
    deadline = time.monotonic() + HANG_S
    while not (stage() / other).exists():
        assert time.monotonic() < deadline, f"{this} has met no {other}"
        time.sleep(0.01)


def _compile(config):
    """Compile, and that while somebody measures if it is the second to compile; nobody but the first starts alone."""
    with contextlib.suppress(FileExistsError):
        (stage() / "first").mkdir()
        return
    if stage().exists():
        _meet("compiling", "measuring")


@tb.tunable(space=[{"n": 10}], name="farm.compiled", check=False, compile=_compile)
def compiled(x, *, config):
    if stage().exists() and not recordings():
        _meet("measuring", "compiling")
    return sum(range(config.n))
