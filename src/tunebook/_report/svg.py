"""The parts that charts are made of: frames, axes, dots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tunebook._report.markup import Markup, join, tag

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tunebook._report.scales import Scale

LETTER: Final = 6.6  # how wide a letter of 12 pixels is at most, on average: text that must fit is cut by it


def chart(width: float, height: float, label: str, *children: str) -> Markup:
    """Return a chart; `label` is what is read out in place of it."""
    box = f"0 0 {width:g} {height:g}"
    title = tag("title", label)
    return tag("svg", title, *children, class_="chart", viewBox=box, width=width, height=height, role="img")


def text(x: float, y: float, content: str, *, kind: str = "", anchor: str | None = None, most: float = 0.0) -> Markup:
    """Return text at a place, cut to `most` pixels if it is given; whole when pointed at."""
    shown = fitted(content, most) if most else content
    more = () if shown == content else (tag("title", content),)
    return tag("text", *more, shown, x=x, y=y, class_=kind or None, text_anchor=anchor)


def fitted(content: str, pixels: float) -> str:
    """Return a text that is at most so wide, with dots where it was cut.

    >>> fitted("a_kernel_of_a_long_name", 66.0)
    'a_kernel_…'
    """
    room = int(pixels / LETTER)
    return content if len(content) <= room else f"{content[: max(room - 1, 1)]}…"


def dot(x: float, y: float, kind: str, title: str = "", radius: float = 3.0) -> Markup:
    """Return a dot that says what it is when pointed at."""
    return tag("circle", *([tag("title", title)] if title else []), cx=x, cy=y, r=radius, class_=kind)


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    """Return a straight line."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)


def bar(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> Markup:
    """Return a bar; one of nothing is not drawn."""
    told = [tag("title", title)] if title else []
    return tag("rect", *told, x=x, y=y, width=max(width, 0.0), height=height, class_=kind, rx=1.5)


def below(scale: Scale, top: float, bottom: float, write: Callable[[float], str], title: str, about: int = 5) -> Markup:
    """Return an axis along the bottom: faint lines at round values, the values under them, and what they are."""
    parts = []
    for value in scale.ticks(about):
        x = scale(value)
        parts += [line(x, top, x, bottom, "grid"), text(x, bottom + 16, write(value), kind="tick", anchor="middle")]
    parts.append(text((scale.start + scale.end) / 2, bottom + 34, title, kind="axis", anchor="middle"))
    return join(*parts)


def beside(scale: Scale, left: float, right: float, write: Callable[[float], str], about: int = 5) -> Markup:
    """Return an axis along the left."""
    parts = []
    for value in scale.ticks(about):
        y = scale(value)
        parts += [line(left, y, right, y, "grid"), text(left - 8, y + 4, write(value), kind="tick", anchor="end")]
    return join(*parts)


def steps(points: Sequence[tuple[float, float]], end: float, kind: str) -> Markup:
    """Return a line that keeps its height until the next point, and goes on to `end`."""
    first, *rest = points
    path = f"M{first[0]:.1f},{first[1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in rest) + f"H{end:.1f}"
    return tag("path", d=path, class_=kind)
