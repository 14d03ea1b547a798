"""The lines of an explanation on a terminal, and the drawing of samples in them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from tunebook._base.durations import seconds_text
from tunebook._tuning.progress import columns_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tunebook._statistics.decide import Ranked

# The bars of a drawing, the first for no sample; the second row is for terminals that know ASCII only.
_BARS: Final = ("·▁▂▃▄▅▆▇█", ".:-=+*%#@")
_BINS: Final = 24
_HANGING: Final = 4  # where the rest of a line begins that has no label, behind the place where arguments begin


class ExplanationLine(NamedTuple):
    """A line of an explanation. Items and drawings are indented; `label` is their name, padded to a column."""

    role: Literal["title", "answer", "section", "item", "drawing"]
    text: str
    label: str = ""

    @property
    def prefix(self) -> str:
        """The indentation and the label before the text."""
        return f"  {self.label}" if self.role in ("item", "drawing") else ""

    def __str__(self) -> str:
        return f"{self.prefix}{self.text}".replace("\n", f"\n{' ' * len(self.prefix)}")

    def wrapped(self, width: int) -> list[str]:
        """Return the line in rows of at most so many characters, broken at spaces where possible; drawings are cut."""
        import textwrap  # noqa: PLC0415 - loaded late: 3 ms

        if self.role == "drawing":
            return [str(self)[:width]]
        # Below the text, or near the left edge of a narrow terminal.
        behind = len(self.prefix) if self.label else _HANGING
        hanging = " " * (behind if width >= 3 * behind else _HANGING)
        # Not at hyphens: people copy names of files and devices from the output.
        wrapper = textwrap.TextWrapper(max(width, 1), subsequent_indent=hanging, break_on_hyphens=False)
        return [row for part in str(self).splitlines() for row in wrapper.wrap(part)] or [""]


def item(name: str, text: str, width: int = 11) -> ExplanationLine:
    """Return a line with a label."""
    return ExplanationLine("item", text, f"{name:<{max(width, len(name) + 2)}}")


def on_screen(lines: Sequence[ExplanationLine]) -> str:
    """Return lines as one text; wrapped to the width of standard output, where most go, if that is a terminal."""
    out = sys.stdout
    if out is None or not getattr(out, "isatty", lambda: False)():
        return "\n".join(map(str, lines))
    width = columns_of(out)
    return "\n".join(row for line in lines for row in line.wrapped(width))


def spread_of(winner: Ranked, runner_up: Ranked) -> Iterator[ExplanationLine]:
    """Yield the samples of both as bars on one scale, if there are enough to have a shape."""
    pair = [sorted(ranked.measurement.valid_samples_s) for ranked in (winner, runner_up)]
    low = min(samples[0] for samples in pair)
    # An interrupted sample would squeeze all others into the first bar; slower samples are in the last.
    high = max(samples[len(samples) * 9 // 10] for samples in pair)
    if min(map(len, pair)) < 5 or low == high:
        return
    yield ExplanationLine("drawing", f"{_bars(pair[0], low, high)}  winner", f"{'spread':<11}")
    yield ExplanationLine("drawing", f"{_bars(pair[1], low, high)}  runner-up", " " * 11)
    right = seconds_text(high) + (" and more" if max(samples[-1] for samples in pair) > high else "")
    yield ExplanationLine("drawing", f"{seconds_text(low):<{_BINS - len(seconds_text(high))}}{right}", " " * 11)


def _bars(samples: Sequence[float], low: float, high: float) -> str:
    counts = [0] * _BINS
    for sample in samples:
        counts[min(_BINS - 1, int((sample - low) / (high - low) * _BINS))] += 1
    top = max(counts)
    bars = _BARS[0] if _can_print(_BARS[0]) else _BARS[1]
    heights = len(bars) - 1
    return "".join(bars[0 if count == 0 else 1 + (count * heights - 1) // top] for count in counts)


def _can_print(text: str) -> bool:
    """Return whether standard output, where most explanations go, can encode a text."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeError, LookupError):
        return False
    return True
