"""The charts of a page, each a function of the model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from tunebook._report.colours import STEPS
from tunebook._report.markup import Markup, join, tag
from tunebook._report.scales import TIMES, Scale, amount_text, quantile, ratio_text, time_axis, time_text
from tunebook._report.svg import LETTER, bar, below, beside, chart, dot, line, steps, text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tunebook._report.detail import CandidateRow, Detail
    from tunebook._report.entry import UnderRoof
    from tunebook._report.importance import HeatMap
    from tunebook._report.model import KernelGroup

WIDE: Final = 1000.0
HALF: Final = 480.0
ROWS: Final = 24  # kernels and devices that a chart shows; the table has all
_DOTS: Final = 60  # beyond this many, a row shows where most of them are
_UNITS: Final = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


class ChartRow(NamedTuple):
    """A line of a chart: what it is about, its sorted values, the one that stands for them, and what its end says."""

    label: str
    under: str
    values: Sequence[float]
    middle: float
    told: str


def spread_of(
    rows: Sequence[ChartRow], scale: Scale, write: Callable[[float], str], title: str, origin: float
) -> Markup:
    """Return where the values of each row are: as dots if they are few, else their middle half and their ends."""
    height = 34.0 * len(rows)
    parts = [below(scale, 4, height, write, title, 7), line(scale(origin), 4, scale(origin), height, "origin")]
    for index, row in enumerate(rows):
        y = 34.0 * index + 18
        parts += [text(0, y - 1, row.label, kind="label", most=290), text(0, y + 12, row.under, kind="tick", most=290)]
        parts += _values(row, scale, y, write)
        parts.append(text(WIDE, y + 4, row.told, kind="value", anchor="end"))
    return chart(WIDE, height + 42, title, *parts)


def _values(row: ChartRow, scale: Scale, y: float, write: Callable[[float], str]) -> list[Markup]:
    values, middle = row.values, scale(row.middle)
    if len(values) <= _DOTS:
        return [*(dot(scale(v), y, "dot", write(v)) for v in values), line(middle, y - 8, middle, y + 8, "middle")]
    low, first, third, high = (quantile(values, part) for part in (0.02, 0.25, 0.75, 0.98))
    told = f"half of {len(values)} from {write(first)} to {write(third)}, 96 % from {write(low)} to {write(high)}"
    return [
        line(scale(low), y, scale(high), y, "whisker"),
        bar(scale(first), y - 5, max(scale(third) - scale(first), 1.5), 10, "half", told),
        line(middle, y - 8, middle, y + 8, "middle"),
    ]


def speedups(groups: Sequence[KernelGroup]) -> Markup:
    """Return how many times faster than the default the entries of each kernel and device are."""
    shown = sorted((g for g in groups if g.speedups), key=lambda g: g.typical_speedup or 0.0, reverse=True)[:ROWS]
    typical = [g.typical_speedup or 1.0 for g in shown]
    rows = [ChartRow(g.op, g.device, g.speedups, m, ratio_text(m)) for g, m in zip(shown, typical, strict=True)]
    low = min(*(quantile(row.values, 0.02 if len(row.values) > _DOTS else 0.0) for row in rows), 1.0)
    high = max(*(quantile(row.values, 0.98 if len(row.values) > _DOTS else 1.0) for row in rows), 1.5)
    scale = Scale(low / 1.03, high * 1.03, 300, WIDE - 80, log=True)
    return spread_of(rows, scale, lambda v: f"{v:.3g} {TIMES}", "times faster than the default (log)", 1.0)


def reached(groups: Sequence[KernelGroup]) -> Markup:
    """Return which part of the roofline the entries of each kernel and device reach."""
    shown = sorted((g for g in groups if g.reached), key=lambda g: quantile(g.reached, 0.5), reverse=True)[:ROWS]
    middles = [quantile(g.reached, 0.5) for g in shown]
    rows = [ChartRow(g.op, g.device, g.reached, m, f"{m:.0%}") for g, m in zip(shown, middles, strict=True)]
    high = max(1.0, *(row.values[-1] for row in rows))
    scale = Scale(0.0, high, 300, WIDE - 80)
    return spread_of(rows, scale, lambda v: f"{v:.0%}", "part of what the device can do at best", 1.0)


def tuning_time(groups: Sequence[KernelGroup]) -> Markup:
    """Return where the time of tuning went: waiting for compilers, and measuring."""
    shown = sorted((g for g in groups if g.seconds), key=lambda g: -g.seconds)[:ROWS]
    height = 34.0 * len(shown)
    longest = max(g.seconds for g in shown)
    unit, size = next((unit, size) for unit, size in _UNITS if longest >= 2 * size or size == 1.0)
    parts = [below(Scale(0.0, longest / size, 300, WIDE - 190), 4, height, lambda v: f"{v:g}", f"{unit} of tuning")]
    scale = Scale(0.0, longest, 300, WIDE - 190)
    for index, g in enumerate(shown):
        y = 34.0 * index + 18
        waiting = scale(min(g.waiting_s, g.seconds)) - scale(0)
        measuring = scale(g.seconds) - scale(0) - waiting
        parts += [
            text(0, y - 1, g.op, kind="label", most=290),
            text(0, y + 12, g.device, kind="tick", most=290),
            bar(scale(0), y - 6, waiting, 12, "waiting", f"waiting for compilers: {time_text(g.waiting_s)}"),
            bar(scale(0) + waiting, y - 6, measuring, 12, "measuring", f"measuring: {time_text(g.measuring_s)}"),
            text(WIDE, y - 1, time_text(g.seconds), kind="value", anchor="end"),
            text(WIDE, y + 12, f"compilers ran {time_text(g.compile_s)}", kind="tick", anchor="end"),
        ]
    return chart(WIDE, height + 42, "time of tuning, by kernel and device", *parts)


def roofline(device: str, points: Sequence[UnderRoof]) -> Markup:
    """Return the work of each entry per byte against how fast it is done, under the roof that they share."""
    flops_per_s, bytes_per_s = points[0].flops_per_s, points[0].bytes_per_s
    ridge = flops_per_s / bytes_per_s
    across = [point.intensity for point in points]
    x = Scale(min(*across, ridge) / 3, max(*across, ridge) * 3, 80, WIDE - 20, log=True)
    lowest = min(*(point.rate for point in points), x.low * bytes_per_s)
    y = Scale(lowest / 2, flops_per_s * 2, 300, 16, log=True)
    roof = [(x.low, x.low * bytes_per_s), (ridge, flops_per_s), (x.high, flops_per_s)]
    path = "M" + "L".join(f"{x(a):.1f},{y(b):.1f}" for a, b in roof)
    parts = [
        below(x, 16, 300, lambda v: f"{v:.3g}", "operations per byte (log)", 7),
        beside(y, 80, WIDE - 20, lambda v: amount_text(v, "op/s")),
        tag("path", d=path, class_="roof"),
        text(x(ridge), y(flops_per_s) - 7, amount_text(flops_per_s, "op/s"), kind="tick", anchor="start"),
    ]
    for point in points:
        entry = point.entry
        part = f"{amount_text(point.rate, 'op/s')}, {entry.reached or 0:.0%} of the roof"
        parts.append(dot(x(point.intensity), y(point.rate), "dot", f"{entry.problem.op}, {entry.call}: {part}", 4))
    return chart(WIDE, 342, f"roofline of {device}", *parts)


def best_so_far(detail: Detail) -> Markup:
    """Return the best time over the time of tuning, with every candidate as a dot at when it was tried."""
    found = detail.best_so_far
    tried = [c for c in detail.candidates if c.value_s is not None]
    end = max(detail.entry.seconds, *(c.tried_s for c in detail.candidates), 1e-9)
    best, worst = found[-1][1], max(c.value_s or 0.0 for c in tried)
    default_s = detail.entry.default_s
    # Hopeless candidates would press the others together at the bottom.
    top = min(worst, 12 * best)
    x = Scale(0.0, end, 64, HALF - 12)
    y = Scale(best / 1.15, top * 1.1, 232, 10, log=True)
    write = time_axis(y.high)
    parts = [below(x, 10, 232, lambda v: f"{v:g}", "seconds of tuning"), beside(y, 64, HALF - 12, write)]
    parts += [
        dot(x(c.tried_s), y(c.value_s or top), "small", f"{time_text(c.value_s or 0)}: {c.config}", 2) for c in tried
    ]
    for c in detail.candidates:
        if c.value_s is None:
            at = x(c.tried_s)
            parts.append(tag("path", tag("title", c.failure), d=f"M{at - 2.5:.1f},227l5,5m0,-5l-5,5", class_="cross"))
    if default_s is not None:
        parts.append(line(64, y(default_s), HALF - 12, y(default_s), "default-line"))
        above = y(default_s) > 30
        parts.append(
            text(
                HALF - 14,
                y(default_s) + (-5 if above else 13),
                f"default {time_text(default_s)}",
                kind="of-default",
                anchor="end",
            )
        )
    parts.append(steps([(x(t), y(v)) for t, v in found], x(end), "best-line"))
    parts.append(text(HALF - 14, y(best) + 14, f"best {time_text(best)}", kind="of-chosen", anchor="end"))
    return chart(HALF, 272, "best time so far, over the time of tuning", *parts)


def samples(detail: Detail) -> Markup:
    """Return every sample of the finalists, of the chosen one and of the default."""
    shown = detail.finalists
    best = min(c.value_s or math.inf for c in shown)
    # A default that is many times slower would press the others together at the left.
    near = [c for c in shown if (c.value_s or 0.0) <= 2 * best]
    low, high = samples_range([c.samples_s for c in near])
    height = 40.0 * len(shown)
    x = Scale(low - (high - low) * 0.03, high, 8, HALF - 40)
    parts = [below(x, 4, height, time_axis(x.high), "time of one run")]
    for index, c in enumerate(shown):
        y = 40.0 * index + 26
        kind = c.role if c.role in ("chosen", "default") else "finalist"
        name = c.config if kind == "finalist" else f"{kind}: {c.config}"
        parts.append(text(8, y - 11, name, kind=f"small-label of-{kind}", most=HALF - 60))
        parts += _strip(c, x, y, kind)
    return chart(HALF, height + 42, "samples of each finalist", *parts)


def _strip(c: CandidateRow, x: Scale, y: float, kind: str) -> list[Markup]:
    if (c.value_s or 0.0) > x.high:
        return [text(HALF - 4, y + 4, f"{time_text(c.value_s or 0.0)} →", kind=f"small-label of-{kind}", anchor="end")]
    seen = [(at, s) for at, s in enumerate(c.samples_s) if s <= x.high]
    dots = [dot(x(s), y + 4 * _jitter(at), f"sample {kind}", time_text(s), 2.2) for at, s in seen]
    beyond = len(c.samples_s) - len(seen)
    more = [text(HALF - 4, y + 4, f"+{beyond} →", kind="tick", anchor="end")] if beyond else []
    typical = x(c.value_s or x.low)
    return [*dots, *more, line(typical, y - 8, typical, y + 8, f"typical {kind}")]


def samples_range(samples: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the ends of an axis that a few disturbed runs do not stretch.

    >>> samples_range([[1.0, 1.1, 1.2, 9.0]])
    (1.0, 1.39)
    """
    low, slowest = min(map(min, samples)), max(map(max, samples))
    usual = max(quantile(sorted(each), 0.5) for each in samples)
    return low, min(slowest, round(low + max(2.6 * (usual - low), 0.04 * low), 15)) if slowest > low else low * 1.01


def _jitter(index: int) -> float:
    """Return a place from -1 to 1 that neighbours do not share, and that is the same each time."""
    return 2 * math.modf(index * 0.618034)[0] - 1


def importance(detail: Detail) -> Markup:
    """Return how much of the differences in time each parameter explains alone."""
    shown = detail.importances[:12]
    height = 26.0 * len(shown) + 4
    x = Scale(0.0, 1.0, 130, HALF - 50)
    parts = [below(x, 4, height, lambda v: f"{v:.0%}", "part of the variance of log time explained")]
    for index, each in enumerate(shown):
        y = 26.0 * index + 17
        parts += [
            text(122, y + 4, each.axis, kind="label", anchor="end", most=118),
            bar(x(0), y - 7, max(x(each.share) - x(0), 1.0), 14, "half"),
            text(HALF, y + 4, f"{each.share:.0%}", kind="value", anchor="end"),
        ]
    return chart(HALF, height + 42, "importance of the parameters", *parts)


def heat_map(shown: HeatMap, best_s: float, worst_s: float) -> Markup:
    """Return the best time for each pair of values of two parameters."""
    # As wide as the names below it, where there is room.
    named = min(max((len(name) for name in shown.columns), default=0) * LETTER + 8, 90.0)
    cell = min(max(40.0, named), 288.0 / max(len(shown.columns), 1))
    left = min(max(len(name) for name in shown.rows) * LETTER + 10, 90.0)
    top, tall = 20.0, 26.0
    width, height = left + cell * len(shown.columns), top + tall * len(shown.rows)
    parts = [text(0, 11, f"{shown.y} ↓  {shown.x} →", kind="small-label", most=336)]
    for row, (name, cells) in enumerate(zip(shown.rows, shown.cells, strict=True)):
        y = top + tall * row
        parts.append(text(left - 6, y + 17, name, kind="tick", anchor="end", most=left - 6))
        parts += [
            _cell(left + cell * column, y, cell, tall, seconds, best_s, worst_s, f"{shown.y}={name}, {shown.x}={value}")
            for column, (value, seconds) in enumerate(zip(shown.columns, cells, strict=True))
        ]
    for column, value in enumerate(shown.columns):
        parts.append(text(left + cell * (column + 0.5), height + 14, value, kind="tick", anchor="middle", most=cell))
    return chart(max(width, 200.0), height + 20, f"best time by {shown.x} and {shown.y}", *parts)


def _cell(
    x: float, y: float, wide: float, tall: float, seconds: float | None, best_s: float, worst_s: float, name: str
) -> Markup:
    place = {"x": x + 0.5, "y": y + 0.5, "width": wide - 1, "height": tall - 1, "rx": 2}
    if seconds is None:
        return tag("rect", tag("title", f"{name}: not measured"), class_="hollow", **place)
    if math.isnan(seconds):
        cross = f"M{x + wide / 2 - 4:.1f},{y + tall / 2 - 4:.1f}l8,8m0,-8l-8,8"
        told = tag("title", f"{name}: every candidate failed")
        return join(tag("rect", told, class_="hollow", **place), tag("path", d=cross, class_="cross"))
    step = heat_step(seconds, best_s, worst_s)
    told = tag("title", f"{name}: {time_text(seconds)}, {ratio_text(seconds / best_s)} the best")
    label = text(x + wide / 2, y + tall / 2 + 4, _multiple(seconds / best_s), kind=f"cell t{step}", anchor="middle")
    return join(tag("rect", told, class_=f"q{step}", **place), label if wide >= 26 else "")


def _multiple(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"


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
    """Return the ends of the colour scale that the maps of one tuning share: the best, and up to 4 times as long."""
    times = [s for each in maps for row in each.cells for s in row if s is not None and not math.isnan(s)]
    best = min(times, default=1.0)
    return best, min(max(times, default=1.0), 4 * best)


def failure_bars(kinds: Sequence[tuple[str, int]]) -> Markup:
    """Return how many candidates failed, by kind."""
    height = 26.0 * len(kinds) + 4
    x = Scale(0.0, float(max(count for _, count in kinds)), 130, WIDE - 80)
    parts: list[Markup] = []
    for index, (kind, count) in enumerate(kinds):
        y = 26.0 * index + 17
        parts += [
            text(0, y + 4, kind, kind="label", most=126),
            bar(x(0), y - 7, max(x(count) - x(0), 1.0), 14, "failed-bar"),
            text(x(count) + 8, y + 4, f"{count:,}", kind="value"),
        ]
    return chart(WIDE, height, "candidates that failed, by kind", *parts)
