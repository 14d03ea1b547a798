"""Processes that compete for leases, are killed and paused; and a judge of the log they leave.

Run by path with a command's name, or import `tune_each_key_once` and `kill_holders`.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from limits import HANG_S

from tunebook._base.record_format import Head, Record
from tunebook._base.vocabulary import Problem
from tunebook._selection.single_flight import Flights, Lease, acquire
from tunebook.stores import problem_id
from tunebook.stores._directory import DirectoryStore
from tunebook.stores._files import LeaseFiles

if TYPE_CHECKING:
    from collections.abc import Callable


def single_flight(flights, key, board, lease_id, *, look, work, instead=None, **options):
    """The result that `look` finds, or else of `work`; of `instead` rather than wait for another's work."""
    with flights.turn(key, board, lease_id, look=look, wait=instead is None, **options) as turn:
        if turn.leads:
            turn.result = work(turn.generation)
        return instead() if turn.result is None else turn.result


class Log:
    """Lines that many processes append to one file, in the order in which things happened."""

    def __init__(self, root: Path) -> None:
        self._descriptor = os.open(root / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, event: str, key: str, pid: int | None = None) -> None:
        # CLOCK_MONOTONIC is the machine's, so that times of different processes can be compared.
        os.write(self._descriptor, f"{time.monotonic_ns()} {event} {pid or os.getpid()} {key}\n".encode())


class Book:
    """A book and its log, used around single flight as the selector does."""

    def __init__(self, root: Path) -> None:
        self.store = DirectoryStore(root / "book")
        self.log = Log(root)
        self.flights = Flights()

    def look(self, key: str) -> Record | None:
        return self.store.get(Problem("cpu", "op", key))

    def publish(self, key: str, generation: int) -> Record:
        problem = Problem("cpu", "op", key)
        record = Record(Head(problem=problem, config=os.getpid(), checksum="c", origin="tuned", generation=generation))
        self.store.put(record)
        return record

    def lease_id(self, key: str) -> str:
        return problem_id(Problem("cpu", "op", key))

    def tune(self, key: str, measure: Callable[[int], None]) -> Record:
        def work(generation: int) -> Record:
            self.log.write("begin" if self.look(key) is None else "again", key)
            measure(generation)
            record = self.publish(key, generation)
            self.log.write("end", key)
            return record

        def look() -> Record | None:
            return self.look(key)

        # A lease that does not lapse while a test lasts: that its holder is gone must be seen.
        options = {"look": look, "work": work, "lease_s": 10 * HANG_S}
        record = single_flight(self.flights, key, self.store.leases(), self.lease_id(key), **options)
        self.log.write("have", key)
        return record


@dataclass(frozen=True)
class Verdict:
    """Counts from the log: keys, tunings begun, and the duplicates, overlaps and unfinished tunings."""

    keys: int
    begun: int
    duplicates: int
    overlaps: int
    unfinished: int


def judge(root: Path) -> Verdict:
    by_key = defaultdict(list)
    for line in (root / "log").read_text().splitlines():
        _, event, pid, key = line.split()
        by_key[key].append((event, pid))
    verdicts = [_judge_key(events) for events in by_key.values()]
    return Verdict(len(by_key), *(sum(column) for column in zip(*verdicts, strict=True)))


def _judge_key(events: list[tuple[str, str]]) -> tuple[int, int, int, int]:
    begun = duplicates = overlaps = ended = 0
    at_work: set[str] = set()
    for event, pid in events:
        if event in {"begin", "again"}:
            begun += 1
            duplicates += event == "again" or ended > 0
            overlaps += bool(at_work)
            at_work.add(pid)
        elif event in {"end", "kill"}:
            ended += event == "end"
            at_work.discard(pid)
    return begun, duplicates, overlaps, int(not any(event == "have" for event, _ in events))


def start(command: str, **settings) -> subprocess.Popen[str]:
    source = Path(__file__)
    path = os.pathsep.join([str(source.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, str(source), command, json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )


def outcome(command: str, **settings) -> dict:
    """Run a command to its end and return the JSON object that it printed last."""
    process = start(command, **settings)
    try:
        printed, _ = process.communicate(timeout=HANG_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with all that it forked
    if process.returncode:
        raise RuntimeError(f"{command} ended with {process.returncode}: {printed}")
    return json.loads(printed.splitlines()[-1])


def tune_each_key_once(processes: int, keys: int, work_s: float = 0.001) -> dict:
    """Let processes ask for the same keys in the same order, all starting at once."""
    with tempfile.TemporaryDirectory() as directory:
        began = time.monotonic()
        workers = [start("tune", root=directory, keys=keys, work_s=work_s) for _ in range(processes)]
        for worker in workers:
            worker.stdout.readline()
        ready = time.monotonic()
        for worker in workers:
            worker.stdin.write("go\n")
            worker.stdin.flush()
        failed = sum(worker.wait(timeout=HANG_S) != 0 for worker in workers)
        seconds = time.monotonic() - ready
        for worker in workers:
            worker.communicate()
        slips = sum(path.is_file() for path in Path(directory, "book/v1/leases").rglob("*"))
        facts = {"seconds": seconds, "seconds_with_start": time.monotonic() - began, "failed": failed, "slips": slips}
        return {"processes": processes, **asdict(judge(Path(directory))), **facts}


def _tune(root: str, keys: int, work_s: float) -> None:
    book = Book(Path(root))
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(keys):
        book.tune(f"key-{number}", lambda _: time.sleep(work_s))


def kill_holders(kills: int, *, seed: int = 0) -> dict:
    """Kill the process at work for a key, again and again, in a process of its own that does nothing else but fork."""
    return outcome("kill", kills=kills, seed=seed)


def _kill(kills: int, seed: int) -> None:
    delays = random.Random(seed)
    recoveries_ms: list[float] = []
    rounds = 0
    with tempfile.TemporaryDirectory() as directory:
        book = Book(Path(directory))
        book.store.leases()  # the forked children share a book that is there already
        while len(recoveries_ms) < kills:
            # Two of three kills come while everything happens at once: in the work, in publishing, in releasing. The
            # third finds waiters that have long waited, and look only every 50 ms.
            delay_s, work_s = (delays.uniform(0.1, 0.2), 60) if rounds % 3 == 0 else (delays.uniform(0, 0.010), 0.005)
            if _one_kill(book, f"round-{rounds}", delay_s, work_s, reap=rounds % 2 == 0):
                recoveries_ms.append(_recovery_ms(Path(directory), f"round-{rounds}"))
            rounds += 1
        verdict = asdict(judge(Path(directory)))
    print(json.dumps({"kills": kills, "rounds": rounds, **verdict, "recoveries_ms": recoveries_ms}))


def _one_kill(book: Book, key: str, delay_s: float, work_s: float, *, reap: bool) -> bool:
    """Kill the first of three that begins, after a delay; whether it was still running then.

    A killed process that is not reaped stays as a zombie, whose pid still answers.
    """
    reading, writing = os.pipe()

    def measure(generation: int) -> None:
        os.write(writing, b"%8d" % os.getpid())
        time.sleep(work_s if generation == 1 else 0.005)

    children = [_fork(lambda: book.tune(key, measure)) for _ in range(3)]
    holder = int(os.read(reading, 8))
    time.sleep(delay_s)
    book.log.write("kill", key, holder)
    os.kill(holder, signal.SIGKILL)
    for child in sorted(children, key=lambda child: child != holder if reap else child == holder):
        _, status = os.waitpid(child, 0)
        if child == holder:
            was_running = os.WIFSIGNALED(status)
        elif status != 0:
            raise RuntimeError(f"a waiter for {key} ended with {status}")
    os.close(reading)
    os.close(writing)
    return was_running


def _fork(work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)  # never back into the parent's code
    return child


def _recovery_ms(root: Path, key: str) -> float:
    """From the kill until another process was at work or had the result."""
    lines = [line.split() for line in (root / "log").read_text().splitlines()]
    events = [(int(when), event, pid) for when, event, pid, of in lines if of == key]
    killed_at, victim = next((when, pid) for when, event, pid in events if event == "kill")
    after = next((when for when, _, pid in events if when > killed_at and pid != victim), killed_at)
    return (after - killed_at) / 1e6


def _hold(root: str, key: str, lease_s: float) -> None:
    """Hold the lease; publish on the first line of input, release on the second."""
    book = Book(Path(root))
    held = acquire(book.store.leases(), book.lease_id(key), look=lambda: None, lease_s=lease_s)
    assert isinstance(held, Lease)
    print(json.dumps({"generation": held.generation}), flush=True)
    if sys.stdin.readline():
        record = book.publish(key, held.generation)
        print(json.dumps({"kept": book.look(key) == record}), flush=True)
    sys.stdin.readline()
    held.release()
    print(json.dumps({"left": book.store.leases().generations(book.lease_id(key))}), flush=True)


def _fork_in_flight() -> None:
    """Fork while another thread is at work for a key; the child asks for the same key."""
    flights: Flights[str] = Flights()
    working, finish = threading.Event(), threading.Event()

    def slow() -> str:
        working.set()
        finish.wait()
        return "parent"

    def ask(work: Callable[[], str], **instead) -> str:
        return single_flight(flights, "key", None, "k", look=lambda: None, work=lambda _: work(), **instead)

    leader = threading.Thread(target=ask, args=(slow,))
    leader.start()
    working.wait()
    reading, writing = os.pipe()
    _fork(lambda: os.write(writing, json.dumps(ask(lambda: "child")).encode()))
    child_had = json.loads(os.read(reading, 100))
    still_busy = ask(lambda: "free", instead=lambda: "busy") == "busy"
    finish.set()
    leader.join()
    print(json.dumps({"child_had": child_had, "still_busy": still_busy}))


def _fork_while_holding(root: str) -> None:
    """Fork while holding a lease; the child releases its copy, and outlives the parent's release."""
    board = LeaseFiles(Path(root))
    held = acquire(board, "k", look=lambda: None, lease_s=0.2)
    reading, writing = os.pipe()
    after_parent, parent_done = os.pipe()

    def child() -> None:
        held.release()
        names = [thread.name for thread in threading.enumerate()]
        os.write(writing, json.dumps({"after_child": board.generations("k"), "threads": len(names)}).encode())
        os.read(after_parent, 1)

    pid = _fork(child)
    report = json.loads(os.read(reading, 1000))
    held.release()
    report["after_parent"] = board.generations("k")
    os.write(parent_done, b".")
    os.waitpid(pid, 0)
    print(json.dumps(report))


def _fork_in_work(root: str) -> None:
    """Fork in the work itself; the child comes back from the same call, while the parent still holds the lease."""
    board = LeaseFiles(Path(root))
    flights: Flights[str] = Flights()
    reading, writing = os.pipe()
    parent = os.getpid()

    def ask(work: Callable[[int], str]) -> str:
        return single_flight(flights, "key", board, "k", look=lambda: None, work=work)

    def work(generation: int) -> str:
        if os.fork() == 0:
            return "child, which asked again and had " + ask(lambda _: "its own work")
        held_after = os.read(reading, 1000).decode()
        return f"parent, after: {held_after}; held: {board.generations('k')}"

    result = ask(work)
    if os.getpid() != parent:
        os.write(writing, result.encode())
        os._exit(0)
    print(json.dumps({"result": result, "left": board.generations("k")}))


def _tune_at_exit(root: str) -> None:
    """Ask for a lease when threads can no longer be started."""

    def late() -> None:
        held = acquire(LeaseFiles(Path(root)), "k", look=lambda: None)
        print(json.dumps({"generation": held.generation}))
        held.release()

    atexit.register(late)


def _unwritable(root: str) -> None:
    """Compete in a directory that belongs to somebody else."""
    if os.geteuid() == 0:
        os.seteuid(65534)  # permissions mean nothing to root
    board = LeaseFiles(Path(root))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        generations = [acquire(board, f"k{number}", look=lambda: None).generation for number in range(3)]
    print(json.dumps({"generations": generations, "warnings": [str(warning.message) for warning in caught]}))


COMMANDS = {
    "fork_in_flight": _fork_in_flight,
    "fork_in_work": _fork_in_work,
    "fork_while_holding": _fork_while_holding,
    "hold": _hold,
    "kill": _kill,
    "tune": _tune,
    "tune_at_exit": _tune_at_exit,
    "unwritable": _unwritable,
}

if __name__ == "__main__":
    COMMANDS[sys.argv[1]](**json.loads(sys.argv[2]))
