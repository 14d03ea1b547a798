"""A chart as data: marks at places in pixels, scales from values to places, and round numbers for axes.

`page.svg_of` draws a chart on a page, `png.draw` in a picture.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from tunebook._tuning.progress import seconds_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LETTER: Final = 6.6  # average width of a letter at 12 pixels, rounded up: long text is cut by it
TIMES: Final = "\u00d7"  # the sign, and not the letter

Point: TypeAlias = "tuple[float, float]"
Write: TypeAlias = "Callable[[float], str]"


class TextMark(NamedTuple):
    """Text at a place, cut to `most` pixels if `most` is given. A page shows the whole text on hover."""

    x: float
    y: float
    content: str
    kind: str
    anchor: Literal["start", "middle", "end"] = "start"
    most: float = 0.0

    @property
    def shown(self) -> str:
        """The text, cut to fit, with an ellipsis where it was cut.

        >>> TextMark(0, 0, "a_kernel_of_a_long_name", "label", most=66.0).shown
        'a_kernel_…'
        """
        room = int(self.most / LETTER)
        whole = not self.most or len(self.content) <= room
        return self.content if whole else f"{self.content[: max(room - 1, 1)]}…"


class DotMark(NamedTuple):
    """A dot. A page shows `hint` on hover."""

    x: float
    y: float
    kind: str
    hint: str = ""
    radius: float = 3.0


class BarMark(NamedTuple):
    """A rectangle, from its upper left corner."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    hint: str = ""


class StrokeMark(NamedTuple):
    """One or more lines through points."""

    kind: str
    strokes: tuple[Sequence[Point], ...]
    hint: str = ""


ChartMark: TypeAlias = TextMark | DotMark | BarMark | StrokeMark


class Chart(NamedTuple):
    """A chart. Screen readers read the title in its place."""

    width: float
    height: float
    title: str
    marks: Sequence[ChartMark]


class Scale(NamedTuple):
    """Maps a range of values to a range of pixels, linear or logarithmic; values outside map to the edge."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        value = max(value, self.low) if self.log else value
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        part = (at - low) / (high - low) if high > low else 0.5
        return self.start + min(max(part, 0.0), 1.0) * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        """Return round values inside the range."""
        low, high = self.low, self.high
        found: list[float] = []
        if self.log:
            decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for steps in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
                found = [s * 10.0**d for d in decades for s in steps if low * 0.999 <= s * 10.0**d <= high * 1.001]
                if len(found) <= about + 2:
                    break
            else:
                found = found[:: math.ceil(len(found) / about)]
        return found if len(found) > 1 else linear_ticks(low, high, about)


def linear_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return about so many round values from low to high.

    >>> linear_ticks(0, 10.3)
    [0.0, 2.5, 5.0, 7.5, 10.0]
    """
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    digits = 12 - math.floor(math.log10(step))
    return [round(n * step, digits) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def time_text(seconds: float) -> str:
    """Return a duration with the sign for micro."""
    return seconds_text(seconds).replace(" us", " µs")


def ratio_text(ratio: float) -> str:
    """Return a ratio as text.

    >>> [ratio_text(ratio)[:-2] for ratio in (1.042, 13.6, 240.2)]
    ['1.04', '13.6', '240']
    """
    digits = 2 if ratio < 10 else 1 if ratio < 100 else 0
    return f"{ratio:.{digits}f} {TIMES}"


def quantile(ordered: Sequence[float], part: float) -> float:
    """Return a quantile of sorted values, interpolated between neighbours.

    >>> quantile([1.0, 2.0, 4.0], 0.5), quantile([1.0, 2.0], 0.25)
    (2.0, 1.25)
    """
    at = part * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])
