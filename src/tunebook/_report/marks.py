"""A chart as data: marks at places in pixels. `markup.svg_of` draws it on a page, `png.draw` in a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tunebook._report.scales import Scale

LETTER: Final = 6.6  # average width of a letter at 12 pixels, rounded up: long text is cut by it

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


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> StrokeMark:
    """Return a straight line."""
    return StrokeMark(kind, (((x1, y1), (x2, y2)),))


def cross(x: float, y: float, size: float, hint: str = "") -> StrokeMark:
    """Return a cross, `size` pixels from its centre to each side."""
    left, right, top, bottom = x - size, x + size, y - size, y + size
    return StrokeMark("cross", (((left, top), (right, bottom)), ((right, top), (left, bottom))), hint)


def axis_below(scale: Scale, top: float, bottom: float, write: Write, title: str, about: int = 5) -> list[ChartMark]:
    """Return an axis along the bottom: faint lines at round values, the values under them, and a title."""
    marks: list[ChartMark] = []
    for value in scale.ticks(about):
        x = scale(value)
        marks += [line(x, top, x, bottom, "grid"), TextMark(x, bottom + 16, write(value), "tick", "middle")]
    return [*marks, TextMark((scale.start + scale.end) / 2, bottom + 34, title, "axis", "middle")]


def axis_beside(scale: Scale, left: float, right: float, write: Write) -> list[ChartMark]:
    """Return an axis along the left: faint lines at round values, and the values."""
    marks: list[ChartMark] = []
    for value in scale.ticks():
        y = scale(value)
        marks += [line(left, y, right, y, "grid"), TextMark(left - 8, y + 4, write(value), "tick", "end")]
    return marks
