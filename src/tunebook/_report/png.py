"""A report as a picture: matplotlib draws the charts of the page, in the light colours of page.css."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from tunebook._base.errors import require
from tunebook._report import charts
from tunebook._report.colours import style_sheet, themes
from tunebook._report.marks import BarMark, DotMark, StrokeMark, TextMark
from tunebook._report.tuning_charts import of_tuning

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tunebook._report.marks import Chart, ChartMark
    from tunebook._report.model import ReportModel

_WIDTH: Final = charts.WIDE + 80  # of the picture, in pixels of a chart
_INCHES: Final = 11.2
_POINT: Final = _INCHES * 72 / _WIDTH  # points per pixel of a chart
_LETTER_WIDTH: Final = 0.92  # matplotlib's font is wider than the fonts of browsers
_ALIGN: Final = {"start": "left", "middle": "center", "end": "right"}


def draw(model: ReportModel, path: Path) -> None:
    """Draw the main charts of a model into a PNG file: wide charts in a row each, narrow charts two in a row."""
    # Not pyplot, which has one state for the whole process and may want a screen.
    canvas = require("matplotlib.backends.backend_agg", extra="plot", feature="a picture of a report")
    figures = require("matplotlib.figure", extra="plot", feature="a picture of a report")
    rows: list[list[tuple[str, Chart]]] = []
    for heading, chart in _charts_of(model):
        if rows and len(rows[-1]) == 1 and max(chart.width, rows[-1][0][1].width) <= charts.HALF:
            rows[-1].append((heading, chart))
        else:
            rows.append([(heading, chart)])
    heights = [max(chart.height for _, chart in row) + 56 for row in rows]
    remarks = model.remarks
    top = 110.0 + 18 * len(remarks)
    height = top + sum(heights)
    figure = figures.Figure(figsize=(_INCHES, _INCHES * height / _WIDTH), facecolor=themes()[0]["paper"])
    canvas.FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-40, _WIDTH - 40), ylim=(height, 0))
    axes.set_axis_off()
    pen = _Pen(axes)
    pen.text(0, 44, TextMark(0, 0, model.title, "", most=500), fontsize=15, fontweight="bold")
    if not model.entries:
        pen.text(0, 90, TextMark(0, 0, "This book has no entries yet.", "tick"))
    for at, remark in enumerate(remarks):
        pen.text(0, 70 + 18 * at, TextMark(0, 0, remark, "tick"))
    y = top
    for row, tall in zip(rows, heights, strict=True):
        for x, (heading, chart) in zip((0.0, charts.WIDE - charts.HALF), row, strict=False):
            pen.text(x, y - 14, TextMark(0, 0, heading, ""), fontsize=10.5, fontweight="bold")
            for mark in chart.marks:
                pen.draw(x, y, mark)
        y += tall
    figure.savefig(path, dpi=150, format="png")


def _charts_of(model: ReportModel) -> Iterable[tuple[str, Chart]]:
    several = len(model.entries) > 1
    if several and model.speedups:
        yield "Gain over the heuristic", charts.speedups(model.groups)
    if several and any(group.seconds for group in model.groups):
        chart, names = charts.tuning_time(model.groups), charts.KEY if charts.compiled(model.groups) else {}
        key: list[ChartMark] = [BarMark(300 + 200 * at, -24, 12, 12, kind) for at, kind in enumerate(names)]
        key += [TextMark(318 + 200 * at, -14, name, "tick") for at, name in enumerate(names.values())]
        yield charts.time_heading(model.groups), chart._replace(marks=[*chart.marks, *key])
    if model.failure_kinds:
        yield "Failures", charts.failure_bars(model.failure_kinds)
    for detail in model.details[:1]:
        yield from of_tuning(detail)
        for shown in detail.heat_maps[:1]:
            yield "Best time for each pair of values", charts.heat_map(shown, *charts.heat_range(detail.heat_maps))


class _Pen:
    """Draws marks on axes, in the style that the style sheet gives to their kind."""

    def __init__(self, axes: Any) -> None:
        self._axes = axes
        self._colours = themes()[0]
        sheet = (files(__package__) / "page.css").read_text(encoding="utf-8") + style_sheet()
        # Rules for screens begin in the first column; rules for printing are indented.
        found = re.findall(r"^((?:\.[\w-]+[, ]*)+|\.chart text )\{([^{}]*)\}", sheet, re.MULTILINE)
        self._rules = [
            (set(re.findall(r"[\w-]+", selector)) - {"chart"}, dict(re.findall(r"([\w-]+): *([^;]+)", body)))
            for selectors, body in found
            for selector in selectors.split(",")
        ]

    def _style(self, mark: ChartMark) -> dict[str, str]:
        kinds = {*mark.kind.split(), "text" if isinstance(mark, TextMark) else ""}
        found = {name: value for needed, rule in self._rules if needed <= kinds for name, value in rule.items()}
        return {name: self._colours.get(value[6:-1], value) for name, value in found.items()}  # var(--name)

    def text(self, x: float, y: float, mark: TextMark, **settings: Any) -> None:
        style = self._style(mark)
        size = float(style["font-size"].removesuffix("px")) * _POINT * _LETTER_WIDTH
        weight = "bold" if int(style.get("font-weight", 400)) > 500 else "normal"
        settings = {"fontsize": size, "fontweight": weight, "color": style["fill"], **settings}
        # matplotlib would read text between dollars as a formula.
        self._axes.text(x + mark.x, y + mark.y, mark.shown.replace("$", r"\$"), ha=_ALIGN[mark.anchor], **settings)

    def draw(self, x: float, y: float, mark: ChartMark) -> None:
        from matplotlib.patches import Circle, PathPatch, Rectangle  # noqa: PLC0415 - an optional package
        from matplotlib.path import Path  # noqa: PLC0415 - an optional package

        if isinstance(mark, TextMark):
            self.text(x, y, mark)
            return
        style = self._style(mark)
        settings: dict[str, Any] = {"facecolor": style.get("fill", "none"), "edgecolor": style.get("stroke", "none")}
        settings["alpha"] = float(style.get("fill-opacity", 1))
        settings["linewidth"] = float(style.get("stroke-width", 0)) * _POINT
        settings["linestyle"] = (0, [float(part) for part in style.get("stroke-dasharray", "1 0").split()])
        shape: Any
        match mark:
            case DotMark():
                shape = Circle((x + mark.x, y + mark.y), mark.radius, **settings)
            case BarMark():
                shape = Rectangle((x + mark.x, y + mark.y), mark.width, mark.height, **settings)
            case StrokeMark():
                lines = [Path([(x + a, y + b) for a, b in stroke]) for stroke in mark.strokes]
                shape = PathPatch(Path.make_compound_path(*lines), **settings)
        self._axes.add_patch(shape)
