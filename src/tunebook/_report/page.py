"""A report as a self-contained page: no network, no build, no dependency."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import time
from collections import defaultdict
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from tunebook._report import charts
from tunebook._report.colours import STEPS, style_sheet
from tunebook._report.marks import TIMES, BarMark, DotMark, StrokeMark, TextMark, quantile, ratio_text, time_text
from tunebook._report.model import DETAILS, READ_FAILURES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tunebook._base.vocabulary import Json
    from tunebook._report.charts import RoofPoint
    from tunebook._report.detail import Detail
    from tunebook._report.marks import Chart, ChartMark
    from tunebook._report.model import ReportModel

_VOID: Final = frozenset({"meta", "input", "line", "rect", "circle", "path", "polyline"})
# Larger tables are compressed: 100,000 entries are 20 MB as text; browsers unpack them in a tenth of a second.
_PLAIN_BYTES: Final = 1 << 20
_ROOFS, _POINTS = 4, 400  # devices that get a chart, and entries in it: more overlap

Kind: TypeAlias = Literal["text", "code", "count", "time", "ratio", "part", "date"]

_METHODS: Final = (
    """A time is the typical time of a candidate: a mean of the faster half of its samples, weighted to the fast, or the
    fastest of the first few samples. The default is the configuration of the kernel's heuristic.""",
    """Importance is the part of the variance of log time that a parameter explains alone, minus the part that chance
    explains with as many values (one-way analysis of variance, epsilon squared), over the candidates that worked. The
    rest to 100 % is interaction of parameters, and noise.""",
    """A heat map shows the best time for each pair of values, over all candidates with both values, as a multiple of
    the best time of all. A cross marks a pair with which every candidate failed.""",
    """Best so far: each candidate stands at the moment at which it was first tried, with its time at the end of the
    race. Candidates that were measured earlier stand at the beginning.""",
)


def page_of(model: ReportModel) -> str:
    """Return the whole page."""
    script = _part("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Nothing is fetched and no other script runs, whatever text a record holds.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("title", f"{model.title} · tunebook"),
        tag("style", Markup(style_sheet() + _part("page.css"))),
    )
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(model.made))
    title = tag("div", tag("h1", model.title), tag("div", f"{model.where} · {made}", class_="where"))
    toggle = tag("button", "Dark", type="button", class_="toggle", title="light or dark")
    body = join(
        tag("header", title, toggle),
        tag("main", *_sections(model)),
        tag("footer", *(tag("p", method) for method in _METHODS)),
        _data(model),
        tag("script", Markup(script)),
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def _part(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _data(model: ReportModel) -> Markup:
    text = json.dumps(_tables(model), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    if len(text) > _PLAIN_BYTES:
        packed = base64.b64encode(gzip.compress(text.encode(), compresslevel=5, mtime=0)).decode()
        return tag("script", Markup(packed), type="application/gzip", id="data")
    # Inside a script element entities mean nothing, and only "<" could end it.
    safe = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return tag("script", Markup(safe), type="application/json", id="data")


def _sections(model: ReportModel) -> Iterable[Markup]:
    yield _figures(model)
    if not model.entries:
        yield _note("This book has no entries yet. Tune a call: tunebook.tune(kernel, ...).")
        return
    several = len(model.entries) > 1
    if several and model.speedups:
        yield tag("h2", "Gain over the default")
        note = "How many times faster than the heuristic's configuration; the mark is the geometric mean."
        yield _note(note, sum(bool(g.speedups) for g in model.groups), "kernels and devices with the largest gain")
        yield tag("figure", svg_of(charts.speedups(model.groups)))
        yield _table("groups", "kernels and devices")
    yield from _rooflines(model, several=several)
    if several and (tuned := sum(bool(group.seconds) for group in model.groups)):
        yield tag("h2", "Compiling and measuring")
        note = "Compilers run in parallel with the measuring and with each other."
        yield _note(note, tuned, "kernels and devices that took longest")
        yield tag("div", *(tag("span", tag("i", class_=kind), name) for kind, name in charts.KEY.items()), class_="key")
        yield tag("figure", svg_of(charts.tuning_time(model.groups)))
    if model.failures:
        yield from _failures(model)
    if model.details:
        yield from _details(model)
    yield tag("h2", "All entries")
    yield _table("entries", "all entries")


def _note(text: str, there: int = 0, kind: str = "") -> Markup:
    only = f" Only the {charts.ROWS} {kind} are shown, of {there:,}." if there > charts.ROWS else ""
    return tag("p", text + only, class_="note")


def _figures(model: ReportModel) -> Markup:
    groups = model.groups
    failed, seconds = sum(group.failed for group in groups), sum(group.seconds for group in groups)
    kernels, devices, entries = len({g.op for g in groups}), len({g.device for g in groups}), len(model.entries)
    ordered = sorted(model.speedups)
    took = f"{seconds / 3600:,.1f} h" if seconds >= 7200 else time_text(seconds)
    found = [
        ("kernel" if kernels == 1 else "kernels", f"{kernels:,}"),
        ("device" if devices == 1 else "devices", f"{devices:,}"),
        ("entry" if entries == 1 else "entries", f"{entries:,}"),
        ("candidates tried", f"{sum(g.measured for g in groups):,}"),
        ("candidates failed", f"{failed:,}" if failed else ""),
        ("median gain over the default", ratio_text(quantile(ordered, 0.5)) if ordered else ""),
        ("time of tuning", took if seconds else ""),
    ]
    return tag("dl", *(tag("div", tag("dt", n), tag("dd", v)) for n, v in found if v), class_="figures")


def _rooflines(model: ReportModel, *, several: bool) -> Iterable[Markup]:
    if not any(group.reached for group in model.groups):
        return
    yield tag("h2", "Roofline")
    yield _note("The author of a kernel states the work of a call with flops= and bytes=.")
    if several:
        yield tag("figure", svg_of(charts.reached(model.groups)))
    roofs: dict[tuple[str, float, float], list[RoofPoint]] = defaultdict(list)
    for entry in model.entries:
        work = entry.roofline
        if work is not None and entry.best_s and work.flops and work.bytes_moved:
            flops_per_s, bytes_per_s = work.peak
            if flops_per_s and bytes_per_s:
                point = (work.flops / work.bytes_moved, work.flops / entry.best_s, entry)
                roofs[entry.problem.device, flops_per_s, bytes_per_s].append(point)
    for roof, points in sorted(roofs.items(), key=lambda item: -len(item[1]))[:_ROOFS]:
        drawn = points[:: -(-len(points) // _POINTS)]
        only = "" if len(drawn) == len(points) else f": {len(drawn)} of {len(points):,} entries"
        yield tag("figure", tag("h3", f"{roof[0]}{only}"), svg_of(charts.roofline(*roof, drawn)))


def _failures(model: ReportModel) -> Iterable[Markup]:
    note = "Failed candidates, by the first line of their message."
    if model.with_failures > READ_FAILURES:
        note += f" The table covers {READ_FAILURES:,} of the {model.with_failures:,} entries with failures."
    yield tag("h2", "Failures")
    yield _note(note)
    if len(model.failure_kinds) > 1:
        yield tag("figure", svg_of(charts.failure_bars(model.failure_kinds)))
    yield _table("failures", "failures")


def _details(model: ReportModel) -> Iterable[Markup]:
    yield tag("h2", "Tunings" if len(model.details) > 1 else "The tuning")
    tuned = sum(entry.measured > 0 for entry in model.entries)
    if tuned > len(model.details):
        note = (
            f"{len(model.details)} of {tuned:,} in detail: for each kernel and device the entry with the largest gain, "
            f"then others by their gain, at most {DETAILS}. The sums above and the table below cover all entries."
        )
        yield _note(note)
    for number, detail in enumerate(model.details):
        yield _detail(number, detail)


def _detail(number: int, detail: Detail) -> Markup:
    entry = detail.entry
    gain = ratio_text(entry.speedup) if entry.speedup else time_text(entry.best_s) if entry.best_s else ""
    summary = tag(
        "summary",
        tag("span", entry.problem.op, class_="name"),
        tag("span", f"{entry.call} · {entry.problem.device}", class_="call"),
        tag("span", gain, class_="gain"),
    )
    inside = [_about(detail), *map(_note, detail.notes)]
    pictures = [tag("section", tag("h3", t), tag("figure", svg_of(c))) for t, c in charts.of_tuning(detail)]
    if detail.heat_maps:
        pictures.append(_heat_maps(detail))
    inside.append(tag("div", *pictures, class_="pair"))
    if detail.left_out:
        inside.append(_note(f"{detail.left_out:,} slower candidates are not listed."))
    inside.append(_table(f"detail{number}", f"candidates of {entry.problem.op}", 12, 12))
    return tag("details", summary, tag("div", *inside, class_="inside"), open="" if number == 0 else None)


def _about(detail: Detail) -> Markup:
    entry = detail.entry
    against = f", {ratio_text(entry.speedup)} faster than the default" if entry.speedup else ""
    facts = {
        "call": "; ".join(detail.call),
        "chosen": entry.config and tag("code", entry.config),
        "time": f"{time_text(entry.best_s)}{against}" if entry.best_s else "",
        "because": detail.rule,
        "device": entry.problem.device,
    }
    shown = [join(tag("dt", name), tag("dd", value)) for name, value in facts.items() if value]
    return tag("dl", *shown, class_="about")


def _heat_maps(detail: Detail) -> Markup:
    best, worst = charts.heat_range(detail.heat_maps)
    maps = [tag("figure", svg_of(charts.heat_map(shown, best, worst))) for shown in detail.heat_maps]
    steps = [tag("rect", x=10 * s, y=0, width=10, height=10, class_=f"q{s}") for s in range(STEPS)]
    ramp = tag("svg", *steps, viewBox=f"0 0 {10 * STEPS} 10", width=10 * STEPS, height=10, aria_hidden="true")
    key = tag("div", "best", ramp, f"{worst / best:.2g} {TIMES} and slower", class_="ramp")
    return tag("section", tag("h3", "Best time for each pair of values"), key, tag("div", *maps, class_="maps"))


def _table(name: str, label: str, rows: int = 25, printed: int = 200) -> Markup:
    empty = tag("noscript", "This table needs JavaScript. The script is part of this file and loads nothing.")
    return tag("figure", empty, class_="table", data_table=name, data_label=label, data_page=rows, data_printed=printed)


class TableColumn(NamedTuple):
    """A column. `pick` adds a list to choose from, `wide` more room; a click sorts a `down` column largest first."""

    name: str
    kind: Kind
    values: Sequence[str | float | None]
    hint: str = ""
    pick: bool = False
    wide: bool = False
    down: bool = False
    marks: bool = False

    def to_json(self) -> Json:
        """Return the column for the page's script; repeated text is written once."""
        fields: dict[str, Json] = {"name": self.name, "kind": self.kind}
        fields |= {n: v for n in ("hint", "wide", "down", "marks") if (v := getattr(self, n))}
        distinct = sorted({v for v in self.values if isinstance(v, str)})
        if self.kind in ("text", "code") and (self.pick or 2 * len(distinct) < len(self.values)):
            number = {text: index for index, text in enumerate(distinct)}
            at: list[Json] = [number.get(v) if isinstance(v, str) else None for v in self.values]
            return {**fields, "pick": self.pick, "of": distinct, "at": at}  # type: ignore[dict-item] # strings
        # Four digits are more than any measurement has, and a third of the length of a double.
        return {**fields, "at": [float(f"{v:.4g}") if isinstance(v, float) else v for v in self.values]}


def _tables(model: ReportModel) -> dict[str, Json]:
    """Return every table by its name, without empty columns. The page's script sorts, filters and formats them."""
    tables = {"entries": _entries(model), "groups": _groups(model), "failures": _failed(model)}
    tables |= {f"detail{number}": _candidates(detail) for number, detail in enumerate(model.details)}
    return {
        name: [c.to_json() for c in columns if c.pick or any(v not in (None, "", 0) for v in c.values)]
        for name, columns in tables.items()
    }


def _entries(model: ReportModel) -> list[TableColumn]:
    entries = model.entries
    return [
        TableColumn("Kernel", "text", [e.problem.op for e in entries], pick=True),
        TableColumn("Device", "text", [e.problem.device for e in entries], pick=True),
        TableColumn("Call", "text", [e.call for e in entries], wide=True),
        TableColumn("Configuration", "code", [e.config for e in entries], wide=True),
        TableColumn("Time", "time", [e.best_s for e in entries], "typical time per run"),
        TableColumn("Gain", "ratio", [e.speedup for e in entries], "times faster than the default", down=True),
        TableColumn("Of roof", "part", [e.reached for e in entries], "part of the device's peak", down=True),
        TableColumn("Tried", "count", [e.measured for e in entries], "candidates, failed ones too", down=True),
        TableColumn("Failed", "count", [sum(e.failed.values()) for e in entries], down=True),
        TableColumn("Measured (UTC)", "date", [int(e.when) or None for e in entries], down=True),
        TableColumn("Origin", "text", [e.origin for e in entries], pick=True),
    ]


def _groups(model: ReportModel) -> list[TableColumn]:
    groups = model.groups
    return [
        TableColumn("Kernel", "text", [g.op for g in groups]),
        TableColumn("Device", "text", [g.device for g in groups]),
        TableColumn("Entries", "count", [g.entries for g in groups], down=True),
        TableColumn("Gain", "ratio", [g.typical_speedup for g in groups], "geometric mean over the default", down=True),
        TableColumn("Least", "ratio", [g.speedups[0] if g.speedups else None for g in groups]),
        TableColumn("Most", "ratio", [g.speedups[-1] if g.speedups else None for g in groups], down=True),
        TableColumn("Tried", "count", [g.measured for g in groups], "candidates, failed ones too", down=True),
        TableColumn("Failed", "count", [g.failed for g in groups], down=True),
        TableColumn("Tuning", "time", [g.seconds or None for g in groups], down=True),
        TableColumn("Compilers", "time", [g.compile_s or None for g in groups], "summed over candidates", down=True),
    ]


def _failed(model: ReportModel) -> list[TableColumn]:
    ops, kinds, messages, counts, examples = zip(*model.failures, strict=True) if model.failures else ((),) * 5
    return [
        TableColumn("Kernel", "text", ops, pick=True),
        TableColumn("Kind", "text", kinds, pick=True),
        TableColumn("Message", "text", messages, wide=True),
        TableColumn("Candidates", "count", counts, down=True),
        TableColumn("Example", "code", examples, wide=True),
    ]


def _candidates(detail: Detail) -> list[TableColumn]:
    shown = detail.candidates
    best = next((c.value_s for c in shown if c.value_s), None)
    parameters = []
    for name in dict.fromkeys(name for c in shown for name in c.axes):
        values = [c.axes.get(name) for c in shown]
        numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
        if len(numbers) == len([v for v in values if v is not None]):
            parameters.append(TableColumn(name, "count", [v if isinstance(v, (int, float)) else None for v in values]))
        else:
            parameters.append(TableColumn(name, "text", ["" if v is None else str(v) for v in values]))
    return [
        TableColumn("Role", "text", [c.role for c in shown], marks=True),
        *parameters,
        TableColumn("Time", "time", [c.value_s for c in shown], "typical time per run"),
        TableColumn("Of best", "ratio", [c.value_s / best if c.value_s and best else None for c in shown]),
        TableColumn("Samples", "count", [len(c.samples_s) or None for c in shown], down=True),
        TableColumn("Compiled in", "time", [c.compile_s for c in shown], down=True),
        TableColumn("Failure", "text", [c.failure for c in shown], wide=any(c.failure for c in shown)),
    ]


class Markup(str):
    """Text that is markup. A plain string never is, and is escaped: a kernel may be named `<script>`."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: object) -> Markup:
    """Return an element; `class_` is class, other underscores are hyphens, and attributes of None are left out.

    >>> tag("p", "1 < 2", class_="note", aria_label='"')
    '<p class="note" aria-label="&quot;">1 &lt; 2</p>'
    """
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    # Half a tenth of a pixel is not seen, and 17 digits per number would be most of the page.
    texts = {k: f"{v:.1f}".removesuffix(".0") if isinstance(v, float) else str(v) for k, v in given.items()}
    opening = "".join(f' {key}="{escape(text)}"' for key, text in texts.items())
    if name in _VOID and not children:
        return Markup(f"<{name}{opening}/>")
    return Markup(f"<{name}{opening}>{join(*children)}</{name}>")


def join(*children: str) -> Markup:
    """Return markup one after another."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children))


def svg_of(chart: Chart) -> Markup:
    """Return a chart as an SVG element; page.css has the colours by the kind of each mark."""
    width, height, title, marks = chart
    content = (tag("title", title), *map(_svg_mark, marks))
    box = f"0 0 {width:g} {height:g}"
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
