"""HTML and SVG that records cannot inject into: every string that is not `Markup` is escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from tunebook._report.marks import BarMark, DotMark, StrokeMark, TextMark

if TYPE_CHECKING:
    from tunebook._report.marks import Chart, ChartMark

_VOID: Final = frozenset({"meta", "input", "line", "rect", "circle", "path", "polyline"})


class Markup(str):
    """Text that is markup. A plain string never is: a kernel may be named `<script>`."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: object) -> Markup:
    """Return an element; `class_` is class, other underscores are hyphens, and attributes of None are left out.

    >>> tag("p", "1 < 2", class_="note", aria_label='"')
    '<p class="note" aria-label="&quot;">1 &lt; 2</p>'
    """
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    opening = "".join(f' {key}="{escape(_text(value))}"' for key, value in given.items())
    if name in _VOID and not children:
        return Markup(f"<{name}{opening}/>")
    return Markup(f"<{name}{opening}>{join(*children)}</{name}>")


def join(*children: str) -> Markup:
    """Return markup one after another."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children))


def _text(value: object) -> str:
    # Half a tenth of a pixel is not seen, and 17 digits per number would be most of the page.
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def svg_of(chart: Chart) -> Markup:
    """Return a chart as an SVG element; page.css has the colours by the kind of each mark."""
    width, height, title, marks = chart
    box = f"0 0 {width:g} {height:g}"
    content = (tag("title", title), *map(_svg_mark, marks))
    return tag("svg", *content, class_="chart", viewBox=box, width=width, height=height, role="img")


def _svg_mark(mark: ChartMark) -> Markup:
    match mark:
        case TextMark(x, y, content, kind, anchor):
            hint = () if mark.shown == content else (tag("title", content),)
            return tag("text", *hint, mark.shown, x=x, y=y, class_=kind, text_anchor=anchor)
        case DotMark(x, y, kind, said, radius):
            return tag("circle", *_hint(said), cx=x, cy=y, r=radius, class_=kind)
        case BarMark(x, y, width, height, kind, said):
            return tag("rect", *_hint(said), x=x, y=y, width=width, height=height, class_=kind, rx=1.5)
        case StrokeMark(kind, (((x1, y1), (x2, y2)),)):
            return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)
        case StrokeMark(kind, strokes, said):
            path = "".join("M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in stroke) for stroke in strokes)
            return tag("path", *_hint(said), d=path, class_=kind)


def _hint(said: str) -> tuple[Markup, ...]:
    return (tag("title", said),) if said else ()
