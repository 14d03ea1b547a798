"""The log of `tunebook run`: each process of its command appends a line per event, and the command sums them up.

A line is written at its event and not at exit: a process that is killed, or that a fork made, ends without any notice.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final, get_args

from tunebook._base.vocabulary import Problem, Trust
from tunebook.stores import problem_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

LOG: Final = "log"  # the file in the folder of a run
_RUNGS: Final[tuple[Trust, ...]] = get_args(Trust)


def recording_path(folder: Path) -> Path:
    """Return the file for the recording of this process."""
    return folder / f"calls-{os.getpid()}-{os.urandom(4).hex()}.json"


@final
class TuningTimes:
    """A listener that calls `on_end(problem, seconds, error)` after each tuning that this process did itself."""

    def __init__(
        self,
        on_end: Callable[[Problem, float, object], object],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_end, self._clock_s = on_end, clock_s
        self._began: dict[Problem, float] = {}

    def hear(self, event: str, *, device: str, op_id: str, call_key: str, **data: Any) -> None:
        """Take the time of a tuning; selectors call this."""
        problem = Problem(device, op_id, call_key)
        # A verification that does not hold begins a tuning of the same problem: together they are one.
        if event == "autotune_start" and problem not in self._began:
            self._began[problem] = self._clock_s()
        elif event == "live_progress" and problem in self._began:
            self._began[problem] = self._clock_s()  # calls go on meanwhile: no time is spent on tuning alone
        elif event == "autotune_finish" and (began_s := self._began.pop(problem, None)) is not None:
            self._on_end(problem, self._clock_s() - began_s, data.get("error"))


@final
class RunLog:
    """Writes the log, from any number of threads and processes."""

    def __init__(self, path: Path, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._times = TuningTimes(self._note_tuning, clock_s)
        self._noted: set[tuple[str, str]] = set()

    def hear(self, event: str, *, level: str | None = None, **data: Any) -> None:
        """Note an event; selectors call this."""
        self._times.hear(event, **data)
        problem = Problem(data["device"], data["op_id"], data["call_key"])
        what, why = "", ""
        if event == "heuristics":
            what, why = "guessed", problem.call_key
        elif event == "cache_hit" and level == "persistent":
            what, why = "found", data.get("trust", "")
        elif event == "autotune_finish" and data.get("error") is None:
            what = "found"  # the reader takes the tunings of all processes off
        if event == "error":
            self.note("failed", problem.op, "no configuration; the process got an error", problem=problem_id(problem))
        elif what:
            self.note(what, problem.op, why, problem=problem_id(problem))

    def _note_tuning(self, problem: Problem, seconds: float, error: object) -> None:
        what, why = ("tuned", "") if error is None else ("failed", str(error).partition("\n")[0])
        self.note(what, problem.op, why, problem=problem_id(problem), seconds=seconds)

    def note(self, what: str, kernel: str, why: str = "", *, problem: str = "", seconds: float = 0.0) -> None:
        """Append a line, once for each problem or kernel, except for tunings."""
        key = (what, problem or kernel)
        if key in self._noted and not seconds:
            return
        self._noted.add(key)
        line = json.dumps([what, os.getpid(), kernel, problem, seconds, why[:500]]) + "\n"
        with suppress(OSError):  # the command has ended before this process, or the disk is full
            # One write to the end of the file: lines of several processes do not mix.
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)


class RunEvent(NamedTuple):
    """A line of the log. `why` is the error of a failure, the call that was guessed, or the rung of a found entry.

    The rung is empty if the entry was made for this very call here.
    """

    what: str
    process: int
    kernel: str
    problem: str
    seconds: float
    why: str


def read_log(path: Path, start: int = 0) -> list[RunEvent]:
    """Return the lines of a log from a byte on; a line that a process did not write to its end is left out."""
    events = []
    for line in path.read_bytes()[start:].decode(errors="replace").splitlines():
        with suppress(ValueError, TypeError):
            events.append(RunEvent(*json.loads(line)))
    return events


def shortfalls(events: Iterable[RunEvent], trust: Trust) -> list[RunEvent]:
    """Return an event for each problem that the book does not cover, up to a rung of trust.

    >>> found = [RunEvent("found", 1, "k@v0", "p1", 0.0, "family"), RunEvent("found", 1, "k@v0", "p2", 0.0, "")]
    >>> [event.problem for event in shortfalls(found, "versions")], shortfalls(found, "family")
    (['p1'], [])
    """
    allowed = {"", *_RUNGS[: _RUNGS.index(trust) + 1]}
    wrong = ("tuned", "guessed", "missing", "failed")
    short = (e for e in events if e.what in wrong or (e.what == "found" and e.why not in allowed))
    return list({(event.what, event.problem): event for event in short}.values())
