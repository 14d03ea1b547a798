"""Every chart of a report, described once; the page and the picture draw the descriptions."""

from __future__ import annotations

import math
from operator import itemgetter
from typing import TYPE_CHECKING, Final, TypeAlias

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

    from tunebook._report.detail import CandidateRow, Detail, HeatMap
    from tunebook._report.entry import ReportEntry
    from tunebook._report.marks import Write
    from tunebook._report.model import KernelGroup

    # A kernel's typical value, its sorted values, and the kernel.
    Spread: TypeAlias = tuple[float, Sequence[float], KernelGroup]
    # Operations per byte, operations per second, and the entry.
    RoofPoint: TypeAlias = tuple[float, float, ReportEntry]

WIDE: Final = 1000.0
HALF: Final = 480.0
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


def _names(group: KernelGroup, y: float) -> list[ChartMark]:
    return [TextMark(0, y - 1, group.op, "label", most=290), TextMark(0, y + 12, group.device, "tick", most=290)]


def _spread_chart(rows: Sequence[Spread], scale: Scale, write: Write, say: Write, title: str) -> Chart:
    """Describe the values of each kernel and device: a few as dots, many as their middle half and their ends."""
    height = 34.0 * len(rows)
    marks = [*axis_below(scale, 4, height, write, title, 7), line(scale(1.0), 4, scale(1.0), height, "origin")]
    for index, (typical, values, group) in enumerate(rows):
        x, y = scale(typical), 34.0 * index + 18
        marks += _names(group, y)
        if len(values) <= _DOTS:
            marks += [DotMark(scale(value), y, "dot", write(value)) for value in values]
        else:
            low, first, third, high = (quantile(values, part) for part in (0.02, 0.25, 0.75, 0.98))
            ends = f"96 % from {write(low)} to {write(high)}"
            hint = f"half of {len(values)} from {write(first)} to {write(third)}, {ends}"
            marks.append(line(scale(low), y, scale(high), y, "whisker"))
            marks.append(BarMark(scale(first), y - 5, max(scale(third) - scale(first), 1.5), 10, "half", hint))
        marks.append(line(x, y - 8, x, y + 8, "middle"))
        marks.append(TextMark(WIDE, y + 4, say(typical), "value", "end"))
    return Chart(WIDE, height + 42, title, marks)


def speedups(groups: Sequence[KernelGroup]) -> Chart:
    """Describe how many times faster than the default the entries of each kernel and device are."""
    spreads = [(g.typical_speedup or 1.0, g.speedups, g) for g in groups if g.speedups]
    rows = sorted(spreads, key=itemgetter(0), reverse=True)[:ROWS]
    low = min(1.0, *(quantile(values, 0.02 if len(values) > _DOTS else 0.0) for _, values, _ in rows))
    high = max(1.5, *(quantile(values, 0.98 if len(values) > _DOTS else 1.0) for _, values, _ in rows))
    scale = Scale(low / 1.03, high * 1.03, 300, WIDE - 80, log=True)
    return _spread_chart(rows, scale, lambda v: f"{v:.3g} {TIMES}", ratio_text, "times faster than the default (log)")


def reached(groups: Sequence[KernelGroup]) -> Chart:
    """Describe the part of the roofline that the entries of each kernel and device reach."""
    spreads = [(quantile(g.reached, 0.5), g.reached, g) for g in groups if g.reached]
    rows = sorted(spreads, key=itemgetter(0), reverse=True)[:ROWS]
    scale = Scale(0.0, max(1.0, *(values[-1] for _, values, _ in rows)), 300, WIDE - 80)
    return _spread_chart(rows, scale, "{:.0%}".format, "{:.0%}".format, "part of the device's peak")


def tuning_time(groups: Sequence[KernelGroup]) -> Chart:
    """Describe how long each kernel and device waited for compilers, and how long it measured."""
    shown = sorted((g for g in groups if g.seconds), key=lambda g: -g.seconds)[:ROWS]
    longest = shown[0].seconds
    unit, size = next((unit, size) for unit, size in _UNITS if longest >= 2 * size or size == 1.0)
    scale = Scale(0.0, longest, 300, WIDE - 190)
    in_units = scale._replace(high=longest / size)
    marks = axis_below(in_units, 4, 34.0 * len(shown), "{:g}".format, f"{unit} of tuning")
    for index, g in enumerate(shown):
        y, waiting_s = 34.0 * index + 18, min(g.waiting_s, g.seconds)
        start, middle, end = scale(0.0), scale(waiting_s), scale(g.seconds)
        waiting, measuring = (time_text(seconds) for seconds in (g.waiting_s, g.seconds - waiting_s))
        marks += [
            *_names(g, y),
            BarMark(start, y - 6, middle - start, 12, "waiting", f"{KEY['waiting']}: {waiting}"),
            BarMark(middle, y - 6, end - middle, 12, "measuring", f"{KEY['measuring']}: {measuring}"),
            TextMark(WIDE, y - 1, time_text(g.seconds), "value", "end"),
            TextMark(WIDE, y + 12, f"compilers ran {time_text(g.compile_s)}", "tick", "end"),
        ]
    return Chart(WIDE, 34.0 * len(shown) + 42, "time of tuning, by kernel and device", marks)


def roofline(device: str, flops_per_s: float, bytes_per_s: float, points: Sequence[RoofPoint]) -> Chart:
    """Describe operations per byte against operations per second, under the roof of a device."""
    ridge = flops_per_s / bytes_per_s
    across = [intensity for intensity, _, _ in points]
    x = Scale(min(*across, ridge) / 3, max(*across, ridge) * 3, 80, WIDE - 20, log=True)
    lowest = min(*(rate for _, rate, _ in points), x.low * bytes_per_s)
    y = Scale(lowest / 2, flops_per_s * 2, 300, 16, log=True)
    roof = [(x.low, x.low * bytes_per_s), (ridge, flops_per_s), (x.high, flops_per_s)]
    marks = [
        *axis_below(x, 16, 300, "{:.3g}".format, "operations per byte (log)", 7),
        *axis_beside(y, 80, WIDE - 20, lambda rate: amount_text(rate, "op/s")),
        StrokeMark("roof", ([(x(a), y(b)) for a, b in roof],)),
        TextMark(x(ridge), y(flops_per_s) - 7, amount_text(flops_per_s, "op/s"), "tick"),
    ]
    for intensity, rate, entry in points:
        part = f"{amount_text(rate, 'op/s')}, {entry.reached or 0:.0%} of the roof"
        marks.append(DotMark(x(intensity), y(rate), "dot", f"{entry.problem.op}, {entry.call}: {part}", 4))
    return Chart(WIDE, 342, f"roofline of {device}", marks)


def of_tuning(detail: Detail) -> Iterable[tuple[str, Chart]]:
    """Yield the charts of a tuning with their headings, without its heat maps."""
    if detail.best_so_far:
        yield "Best so far", best_so_far(detail)
    if detail.finalists:
        yield "Samples of the finalists", samples(detail)
    if detail.importances:
        yield "Importance of the parameters", importance(detail)


def best_so_far(detail: Detail) -> Chart:
    """Describe the best time over the time of tuning, with a dot for each candidate when it was tried."""
    found = detail.best_so_far
    tried = [(c, c.value_s) for c in detail.candidates if c.value_s is not None]
    end = max(detail.entry.seconds, *(c.tried_s for c in detail.candidates), 1e-9)
    best = found[-1][1]
    # Very slow candidates would press the others together at the bottom.
    top = min(max(value for _, value in tried), 12 * best)
    x = Scale(0.0, end, 64, HALF - 12)
    y = Scale(best / 1.15, top * 1.1, 232, 10, log=True)
    marks = [
        *axis_below(x, 10, 232, "{:g}".format, "seconds of tuning"),
        *axis_beside(y, 64, HALF - 12, time_axis(y.high)),
        *(DotMark(x(c.tried_s), y(value), "small", f"{time_text(value)}: {c.config}", 2) for c, value in tried),
        *(cross(x(c.tried_s), 229.5, 2.5, c.failure) for c in detail.candidates if c.value_s is None),
    ]
    if (default_s := detail.entry.default_s) is not None:
        at = y(default_s)
        text_at = at - 5 if at > 30 else at + 13
        marks.append(line(64, at, HALF - 12, at, "default-line"))
        marks.append(TextMark(HALF - 14, text_at, f"default {time_text(default_s)}", "of-default", "end"))
    steps = [(x(t), y(v)) for t, v in found]
    turns = [(later[0], earlier[1]) for earlier, later in zip(steps, [*steps[1:], (x(end), 0.0)], strict=True)]
    marks.append(StrokeMark("best-line", ([point for pair in zip(steps, turns, strict=True) for point in pair],)))
    marks.append(TextMark(HALF - 14, y(best) + 14, f"best {time_text(best)}", "of-chosen", "end"))
    return Chart(HALF, 272, "best time so far, over the time of tuning", marks)


def samples(detail: Detail) -> Chart:
    """Describe every sample of the finalists, of the chosen candidate and of the default."""
    shown = detail.finalists
    best = min(c.value_s or math.inf for c in shown)
    # A default that is many times slower would press the others together at the left.
    low, high = samples_range([c.samples_s for c in shown if (c.value_s or 0.0) <= 2 * best])
    height = 40.0 * len(shown)
    x = Scale(low - (high - low) * 0.03, high, 8, HALF - 40)
    marks = axis_below(x, 4, height, time_axis(x.high), "time per run")
    for index, c in enumerate(shown):
        y = 40.0 * index + 26
        kind = c.role if c.role in ("chosen", "default") else "finalist"
        name = c.config if kind == "finalist" else f"{kind}: {c.config}"
        marks.append(TextMark(8, y - 11, name, f"small-label of-{kind}", most=HALF - 60))
        marks += _strip(c, x, y, kind)
    return Chart(HALF, height + 42, "samples of each finalist", marks)


def _strip(c: CandidateRow, x: Scale, y: float, kind: str) -> Iterable[ChartMark]:
    typical = c.value_s or x.low
    if typical > x.high:
        yield TextMark(HALF - 4, y + 4, f"{time_text(typical)} →", f"small-label of-{kind}", "end")
        return
    seen = [(index, sample) for index, sample in enumerate(c.samples_s) if sample <= x.high]
    for index, sample in seen:
        # Neighbours get different heights, the same each time.
        jitter = 2 * math.modf(index * 0.618034)[0] - 1
        yield DotMark(x(sample), y + 4 * jitter, f"sample {kind}", time_text(sample), 2.2)
    if beyond := len(c.samples_s) - len(seen):
        yield TextMark(HALF - 4, y + 4, f"+{beyond} →", "tick", "end")
    yield line(x(typical), y - 8, x(typical), y + 8, f"typical {kind}")


def samples_range(samples: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the ends of an axis that a few disturbed runs do not stretch.

    >>> samples_range([[1.0, 1.1, 1.2, 9.0]])
    (1.0, 1.39)
    """
    low, slowest = min(map(min, samples)), max(map(max, samples))
    usual = max(quantile(sorted(each), 0.5) for each in samples)
    return low, min(slowest, round(low + max(2.6 * (usual - low), 0.04 * low), 15)) if slowest > low else low * 1.01


def importance(detail: Detail) -> Chart:
    """Describe the part of the differences in time that each parameter explains alone."""
    shown = detail.importances[:12]
    x = Scale(0.0, 1.0, 130, HALF - 50)
    marks = axis_below(x, 4, 26.0 * len(shown) + 4, "{:.0%}".format, "part of the variance of log time explained")
    for index, (name, share) in enumerate(shown):
        y = 26.0 * index + 21
        marks += [TextMark(122, y, name, "label", "end", 118), _bar(x, share, y, "half")]
        marks.append(TextMark(HALF, y, f"{share:.0%}", "value", "end"))
    return Chart(HALF, 26.0 * len(shown) + 46, "importance of the parameters", marks)


def failure_bars(kinds: Sequence[tuple[str, int]]) -> Chart:
    """Describe how many candidates failed, by kind."""
    x = Scale(0.0, float(max(count for _, count in kinds)), 130, WIDE - 80)
    marks: list[ChartMark] = []
    for index, (kind, count) in enumerate(kinds):
        y = 26.0 * index + 21
        marks += [TextMark(0, y, kind, "label", most=126), _bar(x, count, y, "failed-bar")]
        marks.append(TextMark(x(count) + 8, y, f"{count:,}", "value"))
    return Chart(WIDE, 26.0 * len(kinds) + 4, "candidates that failed, by kind", marks)


def _bar(x: Scale, value: float, y: float, kind: str) -> BarMark:
    return BarMark(x(0), y - 11, max(x(value) - x(0), 1.0), 14, kind)


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
