"""A report as a picture: the same values as the page, drawn by matplotlib."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from tunebook._base.optional import require
from tunebook._report.charts import ROWS, heat_range, heat_step, samples_range
from tunebook._report.colours import Theme, themes
from tunebook._report.scales import TIMES, Scale, ratio_text, time_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tunebook._report.detail import Detail
    from tunebook._report.model import ReportModel

_INCHES: Final = (5.6, 3.4)  # of one panel
_LONGEST: Final = 34  # letters of a name
_THICK: Final = 0.36  # of a bar, as a part of its row


def draw(model: ReportModel, path: Path) -> None:
    """Draw the charts of a model, two beside each other, into a PNG file."""
    # Not pyplot, which has one state for the whole process and may want a screen.
    canvas = require("matplotlib.backends.backend_agg", extra="plot", feature="a picture of a report")
    figures = require("matplotlib.figure", extra="plot", feature="a picture of a report")
    panels = _panels(model)
    rows = max(math.ceil(len(panels) / 2), 1)
    figure = figures.Figure(figsize=(2 * _INCHES[0], rows * _INCHES[1] + 0.7))
    canvas.FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", w_pad=0.16, h_pad=0.14)
    theme = themes()[0]
    figure.set_facecolor(theme.named["paper"])
    figure.suptitle(_plain(model.title), x=0.012, ha="left", fontsize=15, fontweight="bold", color=theme.named["ink"])
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(rows, 2, index + 1)
        _dress(axes, theme)
        panel(axes, theme)
    if not panels:
        figure.text(0.012, 0.4, "There is nothing in this book yet.", color=theme.named["muted"])
    figure.savefig(path, dpi=150, format="png")


def _plain(text: str) -> str:
    """Return a text in which matplotlib finds no formula."""
    short = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
    return short.replace("$", r"\$")


def _panels(model: ReportModel) -> list[Callable[[Any, Theme], None]]:
    found: list[Callable[[Any, Theme], None]] = []
    several = len(model.entries) > 1
    if several and model.speedups:
        found.append(lambda axes, theme: _speedups(axes, theme, model))
    if several and any(group.seconds for group in model.groups):
        found.append(lambda axes, theme: _tuning_time(axes, theme, model))
    if model.failure_kinds:
        found.append(lambda axes, theme: _failures(axes, theme, model))
    if model.details:
        found += _panels_of(model.details[0])
    return found


def _panels_of(detail: Detail) -> list[Callable[[Any, Theme], None]]:
    found: list[Callable[[Any, Theme], None]] = []
    if detail.best_so_far:
        found.append(lambda axes, theme: _best_so_far(axes, theme, detail))
    if detail.finalists:
        found.append(lambda axes, theme: _samples(axes, theme, detail))
    if detail.importances:
        found.append(lambda axes, theme: _importance(axes, theme, detail))
    if detail.heat_maps:
        found.append(lambda axes, theme: _heat_map(axes, theme, detail))
    return found


def _dress(axes: Any, theme: Theme) -> None:
    axes.set_facecolor(theme.named["paper"])
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, labelsize=8, colors=theme.named["muted"])
    axes.set_axisbelow(True)
    axes.grid(visible=True, color=theme.named["rule"], linewidth=0.8)


def _title(axes: Any, theme: Theme, title: str, below: str = "") -> None:
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=theme.named["ink"])
    axes.set_xlabel(below, fontsize=8, color=theme.named["muted"])


def _name_rows(axes: Any, names: Sequence[str]) -> None:
    axes.grid(visible=False, axis="y")
    axes.set_yticks(range(len(names)), [_plain(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)


def _speedups(axes: Any, theme: Theme, model: ReportModel) -> None:
    shown = sorted((g for g in model.groups if g.speedups), key=lambda g: -(g.typical_speedup or 0))[:ROWS]
    for row, group in enumerate(shown):
        values = group.speedups[:: max(len(group.speedups) // 200, 1)]
        axes.plot(values, [row] * len(values), "o", color=theme.named["chosen"], alpha=0.45, markersize=4, mew=0)
        axes.plot([group.typical_speedup], [row], "|", color=theme.named["ink"], markersize=11, mew=1.6)
    axes.axvline(1.0, color=theme.named["muted"], linestyle=(0, (3, 3)), linewidth=1)
    axes.set_xscale("log")
    _ticks(axes.xaxis, axes.get_xlim(), lambda value: f"{value:g} {TIMES}")
    _name_rows(axes, [group.op for group in shown])
    _title(axes, theme, "Gain over the default", "times faster (log)")


def _ticks(axis: Any, limits: tuple[float, float], write: Callable[[float], str]) -> None:
    """Write round numbers on a logarithmic axis: matplotlib would write powers of ten, of which there may be none."""
    ticks = Scale(*limits, 0.0, 1.0, log=True).ticks()
    axis.set_ticks(ticks, [write(value) for value in ticks])
    axis.set_ticks([], minor=True)


def _tuning_time(axes: Any, theme: Theme, model: ReportModel) -> None:
    shown = sorted((g for g in model.groups if g.seconds), key=lambda g: -g.seconds)[:ROWS]
    rows = range(len(shown))
    waiting = [min(group.waiting_s, group.seconds) for group in shown]
    axes.barh(rows, waiting, _THICK, color=theme.named["mark"], label="waiting for compilers")
    measuring = [group.measuring_s for group in shown]
    axes.barh(rows, measuring, _THICK, left=waiting, color=theme.named["chosen"], label="measuring")
    _name_rows(axes, [group.op for group in shown])
    _title(axes, theme, "Compiling and measuring", "seconds of tuning")
    axes.legend(frameon=False, fontsize=8, labelcolor=theme.named["muted"])


def _failures(axes: Any, theme: Theme, model: ReportModel) -> None:
    kinds = model.failure_kinds
    axes.barh(range(len(kinds)), [count for _, count in kinds], _THICK, color=theme.named["failed"])
    _name_rows(axes, [kind for kind, _ in kinds])
    _title(axes, theme, "Failures", "candidates")


def _best_so_far(axes: Any, theme: Theme, detail: Detail) -> None:
    tried = [(c.tried_s, c.value_s) for c in detail.candidates if c.value_s is not None]
    best = detail.best_so_far[-1][1]
    axes.plot(*zip(*tried, strict=True), "o", color=theme.named["mark"], markersize=3, mew=0)
    end = max(detail.entry.seconds, *(when for when, _ in tried))
    found = [*detail.best_so_far, (end, best)]
    axes.plot(*zip(*found, strict=True), drawstyle="steps-post", color=theme.named["chosen"], linewidth=2)
    axes.annotate(f"best {time_text(best)}", (end, best), (0, 5), **_at_the_right(theme, "chosen"))
    if (default := detail.entry.default_s) is not None:
        axes.axhline(default, color=theme.named["default"], linestyle=(0, (5, 4)), linewidth=1.2)
        axes.annotate(f"default {time_text(default)}", (end, default), (0, 5), **_at_the_right(theme, "default"))
    axes.set_yscale("log")
    _ticks(axes.yaxis, axes.get_ylim(), time_text)
    _title(axes, theme, f"Best so far: {_plain(detail.entry.problem.op)}", "seconds of tuning")


def _at_the_right(theme: Theme, name: str) -> dict[str, Any]:
    colour = theme.named[name]
    return {"textcoords": "offset points", "ha": "right", "fontsize": 8, "fontweight": "bold", "color": colour}


def _samples(axes: Any, theme: Theme, detail: Detail) -> None:
    shown = detail.finalists
    best = min(c.value_s or math.inf for c in shown)
    low, high = samples_range([c.samples_s for c in shown if (c.value_s or 0.0) <= 2 * best])
    for row, c in enumerate(shown):
        colour = theme.named[c.role if c.role in ("chosen", "default") else "mark"]
        axes.plot(c.samples_s, [row] * len(c.samples_s), "o", color=colour, alpha=0.4, markersize=4, mew=0)
        axes.plot([c.value_s], [row], "|", color=colour, markersize=13, mew=2)
        if (c.value_s or 0.0) > high:
            told = f"{time_text(c.value_s or 0.0)} →"
            axes.text(high, row, told, ha="right", va="center", fontsize=8, color=colour)
    axes.set_xlim(low - 0.03 * (high - low), high)
    ticks = axes.get_xticks()[1:-1:2]
    axes.set_xticks(ticks, [time_text(value) for value in ticks])
    _name_rows(axes, [c.config for c in shown])
    axes.tick_params(axis="y", labelsize=7)
    _title(axes, theme, "Samples of the finalists", "time of one run")


def _importance(axes: Any, theme: Theme, detail: Detail) -> None:
    shown = detail.importances[:12]
    axes.barh(range(len(shown)), [100 * each.share for each in shown], _THICK, color=theme.named["chosen"])
    axes.set_xlim(0, 100)
    _name_rows(axes, [each.axis for each in shown])
    _title(axes, theme, "Importance of the parameters", "% of the variance of log time explained")


def _heat_map(axes: Any, theme: Theme, detail: Detail) -> None:
    from matplotlib.colors import ListedColormap  # noqa: PLC0415 - as above

    shown = detail.heat_maps[0]
    best, worst = heat_range(detail.heat_maps)
    ratios = [[math.nan if cell is None else cell / best for cell in row] for row in shown.cells]
    axes.grid(visible=False)
    axes.imshow(
        ratios, cmap=ListedColormap(theme.scale), norm="log", vmin=1.0, vmax=worst / best * 1.0001, aspect="auto"
    )
    for row, cells in enumerate(ratios):
        for column, ratio in enumerate(cells):
            if not math.isnan(ratio):
                axes.text(
                    column,
                    row,
                    ratio_text(ratio),
                    ha="center",
                    va="center",
                    fontsize=8,
                    **_ink(theme, ratio, worst / best),
                )
    axes.set_xticks(range(len(shown.columns)), [_plain(name) for name in shown.columns])
    axes.set_yticks(range(len(shown.rows)), [_plain(name) for name in shown.rows])
    axes.set_ylabel(_plain(shown.y), fontsize=8, color=theme.named["muted"])
    _title(axes, theme, "Best time for each pair of values", _plain(shown.x))


def _ink(theme: Theme, ratio: float, worst: float) -> dict[str, str]:
    return {"color": theme.on_scale(heat_step(ratio, 1.0, worst))}
