"""Processes that share a book on a server: they hold leases, are killed and paused, tune, and die with things unsent.

Run by path with a command's name and its settings as JSON; `TUNEBOOK_HOME` is the local book, one for each "machine".
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

from limits import HANG_S

from tunebook._base.errors import TunebookWarning
from tunebook._base.record_format import Head, Record
from tunebook._base.vocabulary import Problem
from tunebook._selection.persistent_cache import book_before
from tunebook._selection.single_flight import Lease, acquire
from tunebook.stores import _shared, problem_id


def start(command: str, home: Path, **settings) -> subprocess.Popen[str]:
    source = Path(__file__)
    path = os.pathsep.join([str(source.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, str(source), command, json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "TUNEBOOK_HOME": str(home)},
    )


def problem(key: str) -> Problem:
    return Problem("cpu", "op", key)


def record(key: str, config: object, generation: int = 0) -> Record:
    return Record(Head(problem=problem(key), config=config, checksum="c", origin="tuned", generation=generation))


def _hold(url: str, key: str, lease_s: float) -> None:
    """Hold the lease; publish on the first line of input, release on the second."""
    _shared.HOT_S = HANG_S  # a busy server must not make a local lease of this one
    store = book_before(url)
    held = acquire(store.leases(), problem_id(problem(key)), look=lambda: None, lease_s=lease_s)
    assert isinstance(held, Lease)
    print(json.dumps({"generation": held.generation}), flush=True)
    sys.stdin.readline()
    store.put(record(key, "the first holder's", held.generation))
    print(json.dumps({"stands": store.get(problem(key)).head.config}), flush=True)
    sys.stdin.readline()
    held.release()
    print(json.dumps({"released": True}), flush=True)


def _put(url: str, keys: list[str]) -> None:
    """Put records, and die without tidying up."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = book_before(url)
        for key in keys:
            store.put(record(key, key))
    print(json.dumps({"warnings": [str(warning.message) for warning in caught]}), flush=True)
    os.kill(os.getpid(), 9)


def _work(url: str, seconds: float, keys: int, number: int) -> None:
    """Read and write, all the time, and report the turns and the resources that the process holds."""
    warnings.simplefilter("ignore", TunebookWarning)  # the server is killed on purpose; once is not the question here
    store = book_before(url)
    ends = time.monotonic() + seconds
    begun: dict[str, int] = {}
    turn = 0
    while time.monotonic() < ends:
        key = f"{number}-{turn % keys}"
        store.put(record(key, turn, turn))
        store.get(problem(f"{(number + 1) % 4}-{turn % keys}"))
        store.get(problem(f"nobody-{turn}"))
        held = acquire(store.leases(), problem_id(problem(f"lease-{turn % 7}")), look=lambda: None, deadline_s=0.0)
        if isinstance(held, Lease):
            held.release()
        turn += 1
        if turn == 200:  # when connections and memos are there
            begun = _holdings()
    ended = _holdings()
    names = [thread.name for thread in threading.enumerate()]
    print(json.dumps({"turns": turn, "begun": begun, "ended": ended, "threads": names}), flush=True)


def _holdings() -> dict[str, int]:
    # Each question has a thread, and each lease: when they have ended, the system has yet to clear them away, which on
    # a busy machine takes longer than a turn (4 were seen of a process that knew only its main thread). A question that
    # no call waits for any more ends when its client gives up. What is left then, stays.
    ends = time.monotonic() + 4 * _shared.PATIENT_S
    while time.monotonic() < ends and (_tasks() > 2 or _is_asking()):
        time.sleep(0.01)
    return {
        "files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - names, and no objects
        "threads": _tasks(),
        # What it has now: the highest that it ever had begins with that of the process that started it.
        "kilobytes": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024,
    }


def _tasks() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - as above


def _is_asking() -> bool:
    return any(thread.name.startswith(("tunebook remote", "tunebook lease")) for thread in threading.enumerate())


COMMANDS = {"hold": _hold, "put": _put, "work": _work}

if __name__ == "__main__":
    COMMANDS[sys.argv[1]](**json.loads(sys.argv[2]))
