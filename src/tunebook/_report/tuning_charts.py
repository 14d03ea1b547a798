"""The charts of one tuning: best so far, samples, importance, and every candidate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from tunebook._report.charts import HALF, axis_below, axis_beside, bar, cross, heat_step, line, time_axis
from tunebook._report.detail import levels
from tunebook._report.marks import BarMark, Chart, DotMark, Scale, StrokeMark, TextMark, quantile, time_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tunebook._report.detail import CandidateRow, Detail
    from tunebook._report.marks import ChartMark

_AXES: Final = 7  # parameters that the chart of all candidates shows, the most important
_LINES: Final = 160  # candidates that it shows
_LETTER: Final = 9.0  # the width of a letter, on a phone


def of_tuning(detail: Detail) -> Iterable[tuple[str, Chart]]:
    """Yield the charts of a tuning with their headings, without its heat maps."""
    if detail.best_so_far:
        yield "Best so far", best_so_far(detail)
    if detail.finalists and detail.entry.decided:
        yield "Samples of the finalists", samples(detail)
    if detail.importances:
        yield "Importance of the parameters", importance(detail)
        yield "Every candidate", parallel(detail)


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
        *(
            DotMark(x(c.tried_s), y(value), "small", f"{time_text(value)}: {c.config}", 2)
            for c, value in tried
            if value <= y.high
        ),
        *(cross(x(c.tried_s), 229.5, 2.5, c.failure) for c in detail.candidates if c.value_s is None),
    ]
    if slower := sum(value > y.high for _, value in tried):
        marks.append(TextMark(68, 21, f"+{slower} ↑", "tick"))
    if (default_s := detail.entry.default_s) is not None:
        at = y(default_s)
        text_at = at - 5 if at > 30 else at + 13
        marks.append(line(64, at, HALF - 12, at, "heuristic-line"))
        marks.append(TextMark(HALF - 14, text_at, f"heuristic {time_text(default_s)}", "of-heuristic", "end"))
    steps = [(x(t), y(v)) for t, v in found]
    turns = [(later[0], earlier[1]) for earlier, later in zip(steps, [*steps[1:], (x(end), 0.0)], strict=True)]
    marks.append(StrokeMark("best-line", ([point for pair in zip(steps, turns, strict=True) for point in pair],)))
    marks.append(TextMark(HALF - 14, y(best) + 14, f"best {time_text(best)}", "of-chosen", "end"))
    return Chart(HALF, 272, "best time so far, over the time of tuning", marks)


def samples(detail: Detail) -> Chart:
    """Describe every sample of the finalists, of the chosen candidate and of the heuristic's."""
    shown = detail.finalists
    best = min(c.value_s or math.inf for c in shown)
    # A heuristic that is many times slower would press the others together at the left.
    low, high = samples_range([c.samples_s for c in shown if (c.value_s or 0.0) <= 2 * best])
    height = 40.0 * len(shown)
    # Room for the samples that are not shown, at the largest size of the letters; else it would lie on the last dots.
    room = max(len(_beyond(c, high)) for c in shown) * _LETTER + 8
    x = Scale(low - (high - low) * 0.03, high, 8, HALF - max(room, 40.0))
    marks = axis_below(x, 4, height, time_axis(x.high), "time per run")
    for index, c in enumerate(shown):
        y = 40.0 * index + 26
        kind = c.role if c.role in ("chosen", "heuristic") else "finalist"
        name = c.config if kind == "finalist" else f"{kind}: {c.config}"
        marks.append(TextMark(8, y - 11, name, f"small-label of-{kind}", most=HALF - 110))
        marks += _strip(c, x, y, kind)
    return Chart(HALF, height + 42, "samples of each finalist", marks)


def _strip(c: CandidateRow, x: Scale, y: float, kind: str) -> Iterable[ChartMark]:
    typical = c.value_s or x.low
    beyond = _beyond(c, x.high)
    if typical > x.high:
        yield TextMark(HALF - 4, y + 4, beyond, f"small-label of-{kind}", "end")
        return
    seen = [(index, sample) for index, sample in enumerate(c.samples_s) if sample <= x.high]
    for index, sample in seen:
        # Neighbours get different heights, the same each time.
        jitter = 2 * math.modf(index * 0.618034)[0] - 1
        yield DotMark(x(sample), y + 4 * jitter, f"sample {kind}", time_text(sample), 2.2)
    if beyond:
        yield TextMark(HALF - 4, y + 4, beyond, "tick", "end")
    yield line(x(typical), y - 8, x(typical), y + 8, f"typical {kind}")


def _beyond(c: CandidateRow, high: float) -> str:
    """Return the words at the end of a strip: the time of a candidate, or the number of its samples, to the right."""
    if (c.value_s or 0.0) > high:
        return f"{time_text(c.value_s or 0.0)} →"
    count = sum(sample > high for sample in c.samples_s)
    return f"+{count} →" if count else ""


def samples_range(samples: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the ends of an axis that a few disturbed runs do not stretch.

    >>> samples_range([[1.0, 1.1, 1.2, 9.0]])
    (1.0, 1.39)
    """
    low, slowest = min(map(min, samples)), max(map(max, samples))
    usual = max(quantile(sorted(each), 0.5) for each in samples)
    return low, min(slowest, round(low + max(2.6 * (usual - low), 0.04 * low), 15)) if slowest > low else low * 1.01


def importance(detail: Detail) -> Chart:
    """Describe how much each parameter decides: over all candidates, and about being in the better quarter."""
    shown = sorted(detail.importances, key=lambda item: -max(item[1], detail.in_quarter.get(item[0], 0.0)))[:12]
    x = Scale(0.0, 1.0, 130, HALF - 50)
    tall = 34.0 if detail.in_quarter else 26.0
    bottom = tall * len(shown) + 4
    marks = axis_below(x, 4, bottom, "{:.0%}".format, "part that a parameter explains alone")
    if len(shown) == 1:  # each value may have a single candidate, so that chance cannot be told from the parameter
        marks = [TextMark(8, 21, f"{shown[0][0]}: the only parameter, so it explains every difference", "label")]
        return Chart(HALF, 40, "importance of the parameters", marks)
    for index, (name, share) in enumerate(shown):
        y = tall * index + 21
        marks += [TextMark(122, y, name, "label", "end", 118), bar(x, share, y, "half", f"{name}: {share:.0%} of all")]
        marks.append(TextMark(HALF, y, _percent(share), "value", "end"))
        if detail.in_quarter:
            inside = detail.in_quarter.get(name, 0.0)
            marks.append(
                bar(x, inside, y + 13, "quarter", f"{name}: {inside:.0%} for the better quarter")._replace(height=10)
            )
            marks.append(TextMark(HALF, y + 13, _percent(inside), "of-quarter", "end"))
    if detail.in_quarter:
        key = (("half", "of-chosen", "over all candidates"), ("quarter", "of-quarter", "for the better quarter"))
        for at, (kind, text_kind, name) in enumerate(key):
            marks += [
                BarMark(110.0 + 190 * at, bottom + 44, 10, 10, kind),
                TextMark(125.0 + 190 * at, bottom + 53, name, text_kind),
            ]
    height = bottom + (60 if detail.in_quarter else 42)
    if all(_percent(share) in ("0%", "< 1%") for _, share in shown):
        height += 20
        marks.append(
            TextMark(8, height - 6, "over all candidates, no parameter explains the differences alone", "label")
        )
    return Chart(HALF, height, "importance of the parameters", marks)


def _percent(share: float) -> str:
    """Return a part as text; a part that rounds to nothing is "< 1 %", not zero."""
    return "< 1%" if 0 < share < 0.005 else f"{share:.0%}"


def parallel(detail: Detail) -> Chart:
    """Describe every candidate as a line through the values of its parameters to its time, the fastest below."""
    valid = [c for c in detail.candidates if c.value_s]
    order = sorted(detail.importances, key=lambda item: -max(item[1], detail.in_quarter.get(item[0], 0.0)))
    names = [name for name, _ in order][:_AXES]
    drawn = valid[:: max(-(-len(valid) // _LINES), 1)]
    gap = (HALF - 110) / max(len(names), 1)
    best = valid[0].value_s or 1.0
    worst = max(min(max(c.value_s or best for c in drawn), 4 * best), best * 1.001)
    times = Scale(best, worst, 226, 34, log=True)
    places: list[Sequence[float]] = []
    marks: list[ChartMark] = []
    labels: list[ChartMark] = []
    for index, name in enumerate(names):
        texts, at = levels(c.axes[name] for c in drawn)
        x, y = 46 + gap * index, Scale(0.0, max(len(texts) - 1, 1), 226, 34)
        places.append([y(level) for level in at])
        marks += [line(x, 34, x, 226, "grid"), TextMark(x, 18, name, "small-label", "middle", gap - 6)]
        labels += [TextMark(x - 5, y(place) + 4, text, "tick on-lines", "end", 52) for place, text in enumerate(texts)]
    end = 46 + gap * len(names)
    marks += [line(end, 34, end, 226, "grid"), TextMark(end, 18, "time", "small-label", "middle")]
    labels += [TextMark(end + 6, times(value) + 4, time_axis(worst)(value), "tick") for value in times.ticks(4)]
    for number, c in reversed(list(enumerate(drawn))):  # the fastest on top
        value_s = c.value_s or best
        through = [(46 + gap * index, place[number]) for index, place in enumerate(places)]
        kind = "chosen-path" if c.role == "chosen" else f"path s{heat_step(value_s, best, worst)}"
        marks.append(StrokeMark(kind, ([*through, (end, times(value_s))],), f"{time_text(value_s)}: {c.config}"))
    return Chart(HALF, 240, "every candidate through its parameters", [*marks, *labels])
