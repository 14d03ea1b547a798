"""One line on a terminal while candidates are measured."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final, TextIO, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tunebook._job import Step
    from tunebook._types import FailureKind

Progress: TypeAlias = "Callable[[Step], None]"

_BAR: Final = 24
FAILED: Final[Mapping[FailureKind, str]] = {
    "compile": "did not compile",
    "launch": "did not run",
    "timeout": "timed out",
    "crash": "crashed",
    "memory": "out of memory",
    "wrong-result": "wrong",
    "nan": "gave NaN",
}


def progress_for(
    asked: Progress | bool | None,  # noqa: FBT001 - True, False and a function are what users pass
    title: str,
    stream: TextIO | None = None,
) -> Progress | None:
    """Return what shows progress: a function is used as it is, True shows a bar, None does so on a terminal only."""
    stream = stream or sys.stderr
    if callable(asked):
        return asked
    show = stream.isatty() if asked is None else asked
    return ProgressLine(title, stream) if show else None


class ProgressLine:
    """Draws `title racing ━━━━━     40/100  best 1.24 ms  2 wrong  3 s  about 5 s left`, over itself on a terminal."""

    def __init__(self, title: str, stream: TextIO) -> None:
        self._title, self._stream = title, stream
        self._over = stream.isatty()

    def __call__(self, step: Step) -> None:
        last = step.done == step.total and step.doing == "racing"
        if self._over:
            self._stream.write(f"\r\x1b[2K{progress_text(self._title, step)}" + ("\n" if last else ""))
        elif last:
            self._stream.write(progress_text(self._title, step) + "\n")
        self._stream.flush()


def progress_text(title: str, step: Step) -> str:
    """Return the line for one step."""
    filled = _BAR * step.done // max(step.total, 1)
    parts = [f"{title} {step.doing} {'━' * filled}{' ' * (_BAR - filled)} {step.done}/{step.total}"]
    if step.best_s is not None:
        parts.append(f"best {seconds_text(step.best_s)}")
    parts.extend(f"{count} {FAILED[kind]}" for kind, count in sorted(step.failures.items()))
    parts.append(seconds_text(step.elapsed_s))
    if step.left_s:
        parts.append(f"about {seconds_text(step.left_s)} left")
    return "  ".join(parts)


def seconds_text(seconds: float) -> str:
    """Return a duration as people say it.

    >>> seconds_text(0.00123), seconds_text(0.25), seconds_text(75)
    ('1.23 ms', '250 ms', '1 min 15 s')
    """
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
