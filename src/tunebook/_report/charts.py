"""Every chart of a report, described once; the page and the picture draw the descriptions."""

from __future__ import annotations

import math
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from tunebook._report.colours import STEPS
from tunebook._report.marks import (
    LETTER,
    TIMES,
    BarMark,
    Chart,
    ChartMark,
    DotMark,
    Scale,
    StrokeMark,
    TextMark,
    quantile,
    ratio_text,
    time_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tunebook._report.detail import HeatMap
    from tunebook._report.entry import ReportEntry
    from tunebook._report.marks import Write
    from tunebook._report.model import KernelGroup

    # A kernel's typical value, its sorted values, and the kernel.
    Spread: TypeAlias = tuple[float, Sequence[float], KernelGroup]
    # Operations per byte, operations per second, and the entry.
    RoofPoint: TypeAlias = tuple[float, float, ReportEntry]

WIDE: Final = 1000.0
HALF: Final = 480.0
PHONE: Final = 350.0  # a wide chart for a narrow screen: names stand above the rows
ROWS: Final = 24  # kernels and devices that a chart shows; the table has all
KEY: Final = {"waiting": "waiting for compilers", "measuring": "measuring"}
_DOTS: Final = 60  # beyond this many values, a row shows their quantiles
_UNITS: Final = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> StrokeMark:
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


def time_axis(high: float) -> Write:
    """Return a function that formats the ticks of an axis of time, all in one unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if high >= size:
            return lambda seconds: f"{seconds / size:.4g} {unit}"
    return lambda seconds: f"{seconds * 1e9:.4g} ns"


def amount_text(amount: float, unit: str) -> str:
    """Return an amount with a metric prefix.

    >>> amount_text(3.21e12, "B/s")
    '3.21 TB/s'
    """
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if amount >= size:
            return f"{amount / size:.3g} {prefix}{unit}"
    return f"{amount:.3g} {unit}"


class Rows(NamedTuple):
    """The rows of a chart of kernels: names to the left, or above where there is no room."""

    width: float
    value: float  # room for a value at the right end

    @property
    def left(self) -> float:
        return 300.0 if self.width >= WIDE else 6.0

    @property
    def right(self) -> float:
        return self.width - self.value

    @property
    def tall(self) -> float:
        return 34.0 if self.width >= WIDE else 50.0

    def y(self, index: int) -> float:
        """Return the middle of a row."""
        return self.tall * (index + 1) - 16.0

    def names(self, op: str, device: str, index: int) -> list[ChartMark]:
        """Return the name of a row: its kernel, and its device unless that is empty."""
        y = self.y(index)
        if self.width < WIDE:
            return [TextMark(0, y - 17, f"{op} · {device}" if device else op, "label", most=0.85 * self.width)]
        if not device:
            return [TextMark(0, y + 4, op, "label", most=290)]
        return [TextMark(0, y - 1, op, "label", most=290), TextMark(0, y + 12, device, "tick", most=290)]


def _spread_chart(rows: Sequence[Spread], scale: Scale, write: Write, say: Write, title: str, lines: Rows) -> Chart:
    """Describe the values of each kernel and device: a few as dots, many as their middle half and their ends."""
    height = lines.tall * len(rows)
    about = 7 if lines.width >= WIDE else 3
    marks = [*axis_below(scale, 4, height, write, title, about), line(scale(1.0), 4, scale(1.0), height, "origin")]
    for index, (typical, values, group) in enumerate(rows):
        x, y = scale(typical), lines.y(index)
        marks += lines.names(group.op, group.shown_device, index)
        if len(values) <= _DOTS:
            marks += [DotMark(scale(value), y, "dot", write(value)) for value in values]
        else:
            low, first, third, high = (quantile(values, part) for part in (0.02, 0.25, 0.75, 0.98))
            ends = f"96 % from {write(low)} to {write(high)}"
            hint = f"half of {len(values)} from {write(first)} to {write(third)}, {ends}"
            marks.append(line(scale(low), y, scale(high), y, "whisker"))
            marks.append(BarMark(scale(first), y - 5, max(scale(third) - scale(first), 1.5), 10, "half", hint))
        marks.append(line(x, y - 8, x, y + 8, "middle"))
        marks.append(TextMark(lines.width, y + 4, say(typical), "value", "end"))
    return Chart(lines.width, height + 42, title, marks)


def speedups(groups: Sequence[KernelGroup], width: float = WIDE) -> Chart:
    """Describe how many times faster than the heuristic the entries of each kernel and device are."""
    spreads = [(g.typical_speedup or 1.0, g.speedups, g) for g in groups if g.speedups]
    rows = sorted(spreads, key=itemgetter(0), reverse=True)[:ROWS]
    low = min(1.0, *(quantile(values, 0.02 if len(values) > _DOTS else 0.0) for _, values, _ in rows))
    high = max(1.5, *(quantile(values, 0.98 if len(values) > _DOTS else 1.0) for _, values, _ in rows))
    lines = Rows(width, 80 if width >= WIDE else 64)
    scale = Scale(low / 1.03, high * 1.03, lines.left, lines.right, log=True)
    title = "times faster than the heuristic (log)"
    return _spread_chart(rows, scale, lambda v: f"{v:.3g} {TIMES}", ratio_text, title, lines)


def reached(groups: Sequence[KernelGroup], width: float = WIDE) -> Chart:
    """Describe the part of the roofline that the entries of each kernel and device reach."""
    spreads = [(quantile(g.reached, 0.5), g.reached, g) for g in groups if g.reached]
    rows = sorted(spreads, key=itemgetter(0), reverse=True)[:ROWS]
    lines = Rows(width, 80 if width >= WIDE else 56)
    scale = Scale(0.0, max(1.0, *(values[-1] for _, values, _ in rows)), lines.left, lines.right)
    return _spread_chart(rows, scale, "{:.0%}".format, "{:.0%}".format, "part of the device's peak", lines)


def compiled(groups: Sequence[KernelGroup]) -> bool:
    """Return whether a compiler ran for any of the candidates."""
    return any(group.compile_s or group.waiting_s for group in groups)


def time_heading(groups: Sequence[KernelGroup]) -> str:
    """Return the heading of the chart of the time of tuning."""
    return "Compiling and measuring" if compiled(groups) else "Time of tuning"


def tuning_time(groups: Sequence[KernelGroup], width: float = WIDE) -> Chart:
    """Describe how long each kernel and device waited for compilers, and how long it measured."""
    shown = sorted((g for g in groups if g.seconds), key=lambda g: -g.seconds)[:ROWS]
    longest = shown[0].seconds
    unit, size = next((unit, size) for unit, size in _UNITS if longest >= 2 * size or size == 1.0)
    lines = Rows(width, 190 if width >= WIDE else 90)
    scale = Scale(0.0, longest, lines.left, lines.right)
    in_units, height = scale._replace(high=longest / size), lines.tall * len(shown)
    marks = axis_below(in_units, 4, height, "{:g}".format, f"{unit} of tuning", 5 if width >= WIDE else 3)
    for index, g in enumerate(shown):
        y, waiting_s = lines.y(index), min(g.waiting_s, g.seconds)
        start, middle, end = scale(0.0), scale(waiting_s), scale(g.seconds)
        waiting, measuring = (time_text(seconds) for seconds in (g.waiting_s, g.seconds - waiting_s))
        marks += [
            *lines.names(g.op, g.shown_device, index),
            *(
                [BarMark(start, y - 6, middle - start, 12, "waiting", f"{KEY['waiting']}: {waiting}")]
                if waiting_s
                else []
            ),
            BarMark(middle, y - 6, end - middle, 12, "measuring", f"{KEY['measuring']}: {measuring}"),
            TextMark(width, y + (-1 if g.compile_s and width >= WIDE else 4), time_text(g.seconds), "value", "end"),
        ]
        if g.compile_s and width >= WIDE:
            marks.append(TextMark(width, y + 12, f"compilers ran {time_text(g.compile_s)}", "tick", "end"))
    return Chart(width, height + 42, "time of tuning, by kernel and device", marks)


def roofline(
    device: str, flops_per_s: float, bytes_per_s: float, points: Sequence[RoofPoint], width: float = WIDE
) -> Chart:
    """Describe operations per byte against operations per second, under the roof of a device."""
    ridge = flops_per_s / bytes_per_s
    across = [intensity for intensity, _, _ in points]
    x = Scale(min(*across, ridge) / 3, max(*across, ridge) * 3, 80, width - 20, log=True)
    lowest = min(*(rate for _, rate, _ in points), x.low * bytes_per_s)
    y = Scale(lowest / 2, flops_per_s * 2, 300, 16, log=True)
    roof = [(x.low, x.low * bytes_per_s), (ridge, flops_per_s), (x.high, flops_per_s)]
    marks = [
        *axis_below(x, 16, 300, "{:.3g}".format, "operations per byte (log)", 7 if width >= WIDE else 3),
        *axis_beside(y, 80, width - 20, lambda rate: amount_text(rate, "op/s")),
        StrokeMark("roof", ([(x(a), y(b)) for a, b in roof],)),
        TextMark(x(ridge), y(flops_per_s) - 7, amount_text(flops_per_s, "op/s"), "tick"),
    ]
    for intensity, rate, entry in points:
        part = f"{amount_text(rate, 'op/s')}, {entry.reached or 0:.0%} of the roof"
        marks.append(DotMark(x(intensity), y(rate), "dot", f"{entry.problem.op}, {entry.call}: {part}", 4))
    return Chart(width, 342, f"roofline of {device}", marks)


def failure_bars(kinds: Sequence[tuple[str, int]], width: float = WIDE) -> Chart:
    """Describe how many candidates failed, by kind."""
    x = Scale(0.0, float(max(count for _, count in kinds)), 130, width - 80)
    marks: list[ChartMark] = []
    for index, (kind, count) in enumerate(kinds):
        y = 26.0 * index + 21
        marks += [TextMark(0, y, kind, "label", most=126), bar(x, count, y, "failed-bar")]
        marks.append(TextMark(x(count) + 8, y, f"{count:,}", "value"))
    return Chart(width, 26.0 * len(kinds) + 4, "candidates that failed, by kind", marks)


def bar(x: Scale, value: float, y: float, kind: str, hint: str = "") -> BarMark:
    return BarMark(x(0), y - 11, max(x(value) - x(0), 1.0), 14, kind, hint)


def heat_map(shown: HeatMap, best_s: float, worst_s: float) -> Chart:
    """Describe the best time for each pair of values of two parameters."""
    # As wide as the names below it, where there is room.
    longest = min(max((len(name) for name in shown.columns), default=0) * LETTER + 8, 90.0)
    wide, tall = min(max(40.0, longest), 288.0 / max(len(shown.columns), 1)), 26.0
    left, top = min(max(len(name) for name in shown.rows) * LETTER + 10, 90.0), 20.0
    height = top + tall * len(shown.rows)
    marks: list[ChartMark] = [TextMark(0, 11, f"{shown.y} ↓  {shown.x} →", "small-label", most=336)]
    for row, (name, cells) in enumerate(zip(shown.rows, shown.cells, strict=True)):
        y = top + tall * row
        marks.append(TextMark(left - 6, y + 17, name, "tick", "end", left - 6))
        for column, (value, seconds) in enumerate(zip(shown.columns, cells, strict=True)):
            box = BarMark(left + wide * column + 0.5, y + 0.5, wide - 1, tall - 1, "hollow")
            marks += _heat_cell(box, seconds, best_s, worst_s, f"{shown.y}={name}, {shown.x}={value}")
    for column, value in enumerate(shown.columns):
        marks.append(TextMark(left + wide * (column + 0.5), height + 14, value, "tick", "middle", wide))
    width = max(left + wide * len(shown.columns), 200.0)
    return Chart(width, height + 20, f"best time by {shown.x} and {shown.y}", marks)


def _heat_cell(box: BarMark, seconds: float | None, best_s: float, worst_s: float, name: str) -> Iterable[ChartMark]:
    middle_x, middle_y = box.x + box.width / 2, box.y + box.height / 2
    if seconds is None:
        yield box._replace(hint=f"{name}: not measured")
    elif math.isnan(seconds):
        yield box._replace(hint=f"{name}: every candidate failed")
        yield cross(middle_x, middle_y, 4)
    else:
        step, ratio = heat_step(seconds, best_s, worst_s), seconds / best_s
        yield box._replace(kind=f"q{step}", hint=f"{name}: {time_text(seconds)}, {ratio_text(ratio)} the best")
        if box.width >= 25:
            multiple = f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"
            yield TextMark(middle_x, middle_y + 4, multiple, f"cell t{step}", "middle")


def heat_step(seconds: float, best_s: float, worst_s: float) -> int:
    """Return the step of the colour scale for a time: by its logarithm, from the best to the worst.

    >>> heat_step(1.0, 1.0, 8.0), heat_step(8.0, 1.0, 8.0)
    (0, 15)
    """
    if worst_s <= best_s:
        return 0
    part = math.log(seconds / best_s) / math.log(worst_s / best_s)
    return min(int(min(max(part, 0.0), 1.0) * STEPS), STEPS - 1)


def heat_range(maps: Sequence[HeatMap]) -> tuple[float, float]:
    """Return the ends of the colour scale that the maps of a tuning share: the best, and up to 4 times as long."""
    times = [s for each in maps for row in each.cells for s in row if s is not None and not math.isnan(s)]
    best = min(times, default=1.0)
    return best, min(max(times, default=1.0), 4 * best)
