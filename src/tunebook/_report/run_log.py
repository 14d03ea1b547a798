"""The log of `tunebook run`: each process of its command appends a line per event, and the command sums them up.

A line is written at its event and not at exit: a process that is killed, or that a fork made, ends without any notice.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from tunebook._base.vocabulary import Problem
from tunebook.stores import problem_id

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOG: Final = "log"  # the file in the folder of a run


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
        what = {"heuristics": "guessed", "cache_hit": "found" if level == "persistent" else ""}.get(event, "")
        if event == "autotune_finish" and data.get("error") is None:
            what = "found"  # the reader takes the tunings of all processes off
        problem = Problem(data["device"], data["op_id"], data["call_key"])
        if event == "error":
            self.note("failed", problem.op, "no configuration; the process got an error", problem=problem_id(problem))
        elif what:
            self.note(what, problem.op, problem=problem_id(problem))

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
    """A line of the log."""

    what: str
    process: int
    kernel: str
    problem: str
    seconds: float
    why: str


def read_log(path: Path) -> list[RunEvent]:
    """Return the lines of a log; a line that a process did not write to its end is left out."""
    events = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, TypeError):
            events.append(RunEvent(*json.loads(line)))
    return events
