"""The chart of the winner of each kernel over the sizes of its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunebook._report.charts import WIDE, Rows, axis_below, line
from tunebook._report.marks import Chart, DotMark, Scale, TextMark, time_text
from tunebook._report.sizes import LETTERS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tunebook._report.sizes import SizeLine


def winners_by_size(lines: Sequence[SizeLine], names: Mapping[str, str], width: float = WIDE) -> Chart:
    """Describe the winner of each kernel over the sizes of its calls: a letter for each configuration."""
    rows = Rows(width, 110 if width >= WIDE else 14)
    sizes = [point.size for each in lines for point in each.points]
    x = Scale(min(sizes), max(sizes), rows.left + 12, rows.right - 12, log=True)
    height = rows.tall * len(lines)
    marks = axis_below(
        x, 4, height, "{:,.0f}".format, "elements of all arrays of a call (log)", 6 if width >= WIDE else 3
    )
    for index, each in enumerate(lines):
        y = rows.y(index)
        marks += rows.names(each.op, names.get(each.device, ""), index)
        marks.append(line(x(each.points[0].size), y, x(each.points[-1].size), y, "whisker"))
        for point in each.points:
            took = f", {time_text(point.best_s)}" if point.best_s else ""
            many = f", {point.entries} entries" if point.entries > 1 else ""
            hint = f"{point.size:,.0f}: {point.config}{took}{many}"
            place = LETTERS.index(point.letter) if point.letter in LETTERS else len(LETTERS)
            marks.append(DotMark(x(point.size), y, f"winner w{place}", hint, 8.5))
            marks.append(TextMark(x(point.size), y + 4, point.letter, f"letter l{place}", "middle"))
        if width >= WIDE:
            many_winners = len({point.config for point in each.points})
            said = "1 winner" if many_winners == 1 else f"{many_winners} winners"
            marks.append(TextMark(width, y + 4, said, "value", "end"))
    return Chart(width, height + 42, "the winner of each kernel by size", marks)
