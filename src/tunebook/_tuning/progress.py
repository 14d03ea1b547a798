"""Shows the progress of a tuning: on a terminal, in a notebook, in a log."""

from __future__ import annotations

import math
import os
import shutil
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeAlias

from tunebook._base.durations import day_text as day_text  # noqa: PLC0414 - for those who show progress
from tunebook._base.durations import seconds_text as seconds_text  # noqa: PLC0414 - for those who show progress
from tunebook._base.errors import MissingDependency, require
from tunebook._base.locks import InterruptSafeLock
from tunebook._base.log import listens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tunebook._base.vocabulary import FailureKind
    from tunebook._tuning.job import Step

Progress: TypeAlias = "Callable[[Step], None]"

_BAR: Final = 24
_DRAWN_S: Final = 0.05  # nobody reads faster, and drawing takes time from measuring
FAILED: Final[Mapping[FailureKind, str]] = {
    "compile": "did not compile",
    "launch": "did not run",
    "timeout": "timed out",
    "crash": "crashed",
    "memory": "out of memory",
    "wrong-result": "wrong",
    "nan": "gave NaN",
    "check": "not checked",
}


def progress_for(
    asked: Progress | bool | None,  # noqa: FBT001 - users pass True, False or a function
    title: str,
    stream: TextIO | None = None,
) -> Progress | None:
    """Return a function that shows progress, or None: a function is used as it is, False shows nothing.

    On a terminal it redraws a line, in colour if rich is installed; in a notebook it changes an output. Elsewhere True
    writes a line every ten seconds and at the end, and None writes nothing.
    """
    stream = stream or sys.stderr
    if callable(asked):
        return asked
    if asked is False or stream is None:  # a daemon may have closed standard error
        return None
    if stream.isatty():
        return _rich_line(title, stream) or progress_line(title, stream)
    in_notebook = _notebook_line(title) if stream is sys.stderr else None
    return in_notebook or (log_lines(title, stream) if asked else None)


@contextmanager
def line_of_call(title: str, on_step: Progress | None, after_s: float = 1.0) -> Iterator[Progress | None]:
    """Yield `on_step`, or a function that shows progress if the tuning of a call takes longer than a moment.

    It shows nothing where standard error is not a terminal, nor where the log tells the same.
    """
    if on_step is not None or sys.stderr is None or not sys.stderr.isatty() or listens("info"):
        yield on_step
        return
    line = _LineOfCall(title, sys.stderr, after_s)
    with line:
        yield line.show


class _LineOfCall:
    """The line of a tuning that a caller waits for. It appears after a moment, also while the first candidate runs."""

    def __init__(self, title: str, stream: TextIO, after_s: float) -> None:
        self._title, self._stream, self._due_s = title, stream, time.monotonic() + after_s
        self._lock = InterruptSafeLock()
        self._draw: Progress | None = None
        self._is_open = False
        self._timer = threading.Timer(after_s, self._announce)
        self._timer.daemon = True

    def show(self, step: Step) -> None:
        """Draw a step, if the moment is over."""
        if time.monotonic() < self._due_s:
            return
        with self._lock:
            if self._draw is None:
                self._draw = progress_for(None, self._title, self._stream)
            if self._draw is not None and not is_last(step):  # the line goes when the tuning ends
                self._draw(step)
                self._is_open = True

    def _announce(self) -> None:
        with self._lock:
            if not self._is_open and self._draw is None and not self._timer.finished.is_set():
                self._stream.write("\r\x1b[2K" + _cut(f"{self._title} tuning ...", columns_of(self._stream)))
                self._stream.flush()
                self._is_open = True

    def __enter__(self) -> None:
        with suppress(RuntimeError):  # at interpreter exit no thread can be started
            self._timer.start()

    def __exit__(self, kind: object, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            if self._is_open:
                self._is_open = False
                # The traceback of an error or an interrupt begins on a line of its own.
                self._stream.write("\r\x1b[2K" if kind is None else "\n")
                self._stream.flush()


def is_last(step: Step) -> bool:
    """Whether a job has no step after this one."""
    return step.done == step.total and step.doing == "racing"


def _paced(draw: Progress, every_s: float, clock_s: Callable[[], float], *, at_once: bool = True) -> Progress:
    """Return a function that draws a step if enough time has passed, and always the last step."""
    due_s = clock_s() + (0.0 if at_once else every_s)

    def draw_if_due(step: Step) -> None:
        nonlocal due_s
        if clock_s() >= due_s or is_last(step):
            due_s = clock_s() + every_s
            draw(step)

    return draw_if_due


def progress_line(title: str, stream: TextIO) -> Progress:
    """Return a function that draws `title trying ━━━━     40/100  best 1.24 ms  2 wrong  3 s` in place."""

    def draw(step: Step) -> None:
        line = progress_text(title, step, columns_of(stream))
        stream.write(f"\r\x1b[2K{line}" + ("\n" if is_last(step) else ""))
        stream.flush()

    return draw


def log_lines(title: str, stream: TextIO, clock_s: Callable[[], float] = time.monotonic) -> Progress:
    """Return a function that writes a line without a bar now and then, for logs."""

    def write(step: Step) -> None:
        stream.write("  ".join(text for text, _ in _parts(title, step)) + "\n")
        stream.flush()

    return _paced(write, 10.0, clock_s, at_once=False)


def _notebook_line(title: str) -> Progress | None:
    """Return a function that changes one output of a notebook cell; None outside of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    # Not in IPython's console, which is a terminal.
    if all(kind.__name__ != "ZMQInteractiveShell" for kind in type(shell).__mro__):
        return None
    from IPython.display import display  # noqa: PLC0415 - loaded already

    handle: Any = None

    def draw(step: Step) -> None:
        nonlocal handle
        content = {"text/plain": progress_text(title, step)}
        if handle is None:
            handle = display(content, raw=True, display_id=True)
        else:
            handle.update(content, raw=True)

    return _paced(draw, _DRAWN_S, time.monotonic)


def _rich_line(title: str, stream: TextIO) -> Progress | None:
    """Return a function that draws a line in colour, cut to the width of the terminal; None without rich."""
    try:
        Console = require("rich.console", extra="rich", feature="a line in colour").Console  # noqa: N806 - a class
        Text = require("rich.text", extra="rich", feature="a line in colour").Text  # noqa: N806 - a class
    except MissingDependency:
        return None
    # Not rich's own progress bar: it hides the cursor and runs a thread until a last step, and an error has none.
    console = Console(file=stream, highlight=False)

    def draw(step: Step) -> None:
        console.width = columns_of(stream)
        line = Text("  ").join(Text(text, style) for text, style in _fitted(title, step, console.width))
        stream.write("\r\x1b[2K")
        console.print(line, end="\n" if is_last(step) else "", no_wrap=True, overflow="ellipsis", crop=True)
        stream.flush()

    return _paced(draw, _DRAWN_S, time.monotonic)


def columns_of(stream: TextIO) -> int:
    """Return the number of columns that a line may have on a terminal: in the last one, some begin a new row."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (AttributeError, OSError, ValueError):
        columns = 0
    return (columns or shutil.get_terminal_size().columns) - 1


def _cut(text: str, width: float) -> str:
    return text if len(text) <= width else text[: int(max(width - 1, 0))] + "…"


def _parts(title: str, step: Step, bar: int = 0) -> list[tuple[str, str]]:
    """Return the parts of the line for one step, each with its style; `bar` is the length of a bar in it."""
    parts = [(" ".join([title, *_stage(step, bar)]), "bold" if is_last(step) else "")]
    if step.running is not None:
        parts.append((f"{step.running!r} has been running for {seconds_text(step.running_s)}", "yellow"))
    if step.best_s is not None:
        parts.append((f"best {seconds_text(step.best_s)}", "green"))
    parts.extend((f"{count} {FAILED.get(kind, kind)}", "red") for kind, count in sorted(step.failures.items()))
    parts.append((seconds_text(step.elapsed_s), "dim"))
    if step.left_s:
        parts.append((f"up to {seconds_text(step.left_s)} left", "dim"))
    if step.known and not is_last(step):
        parts.append((f"going on from {step.known} measurement{'' if step.known == 1 else 's'}", "dim"))
    return parts


def _stage(step: Step, bar: int) -> list[str]:
    """Return the words for the stage of a job. A race has no bar: it ends as soon as its times are certain."""
    if is_last(step):
        return ["tuned"]
    if step.doing == "racing":
        return ["racing the fastest"]
    drawn = ("━" * (bar * step.done // max(step.total, 1))).ljust(bar)
    return list(filter(None, (step.doing, drawn, f"{step.done}/{step.total}")))


def _fitted(title: str, step: Step, width: float) -> list[tuple[str, str]]:
    """Return the parts of a line that has a width: its bar becomes shorter, then its last parts are left out."""
    bar = _BAR
    while _length(parts := _parts(title, step, bar)) > width and bar:
        bar -= 1
    while _length(parts) > width and len(parts) > 1:
        parts.pop()
    return [(_cut(text, width), style) for text, style in parts]


def _length(parts: list[tuple[str, str]]) -> int:
    return len("  ".join(text for text, _ in parts))


def progress_text(title: str, step: Step, width: float = math.inf) -> str:
    """Return the line for one step, in at most so many characters."""
    return "  ".join(text for text, _ in _fitted(title, step, width))
