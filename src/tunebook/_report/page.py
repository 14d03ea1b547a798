"""A report as a self-contained page: no network, no build, no dependency."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import time
from collections import defaultdict
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from tunebook._report import charts
from tunebook._report.colours import STEPS, style_sheet
from tunebook._report.entry import UnderRoof
from tunebook._report.markup import Markup, join, svg_of, tag
from tunebook._report.model import DETAILS, READ_FAILURES
from tunebook._report.scales import TIMES, quantile, ratio_text, time_text
from tunebook._report.tables import tables_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tunebook._report.detail import Detail
    from tunebook._report.model import ReportModel

# Larger tables are compressed: 100,000 entries are 20 MB as text; browsers unpack them in a tenth of a second.
_PLAIN_BYTES: Final = 1 << 20
_ROOFS, _POINTS = 4, 400  # devices that get a chart, and entries in it: more overlap

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
    text = json.dumps(tables_of(model), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    if len(text) > _PLAIN_BYTES:
        packed = base64.b64encode(gzip.compress(text.encode(), compresslevel=5, mtime=0)).decode()
        return tag("script", Markup(packed), type="application/gzip", id="data")
    # Inside a script element entities mean nothing, and only "<" could end it.
    safe = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return tag("script", Markup(safe), type="application/json", id="data")


def _sections(model: ReportModel) -> Iterable[Markup]:
    yield _figures(model)
    if not model.entries:
        yield tag("p", "This book has no entries yet. Tune a call: tunebook.tune(kernel, ...).", class_="note")
        return
    several = len(model.entries) > 1
    if several and model.speedups:
        yield from _speedups(model)
    yield from _rooflines(model, several=several)
    if several and any(group.seconds for group in model.groups):
        yield from _tuning_time(model)
    if model.failures:
        yield from _failures(model)
    if model.details:
        yield from _details(model)
    yield tag("h2", "All entries")
    yield _table("entries", "all entries")


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


def _heading(title: str, note: str, there: int, kind: str) -> Iterable[Markup]:
    only = f" Only the {charts.ROWS} {kind} are shown, of {there:,}." if there > charts.ROWS else ""
    yield tag("h2", title)
    yield tag("p", note + only, class_="note")


def _speedups(model: ReportModel) -> Iterable[Markup]:
    note = "How many times faster than the heuristic's configuration; the mark is the geometric mean."
    shown = sum(bool(group.speedups) for group in model.groups)
    yield from _heading("Gain over the default", note, shown, "kernels and devices with the largest gain")
    yield tag("figure", svg_of(charts.speedups(model.groups)))
    yield _table("groups", "kernels and devices")


def _rooflines(model: ReportModel, *, several: bool) -> Iterable[Markup]:
    if not any(group.reached for group in model.groups):
        return
    yield tag("h2", "Roofline")
    yield tag("p", "The author of a kernel states the work of a call with flops= and bytes=.", class_="note")
    if several:
        yield tag("figure", svg_of(charts.reached(model.groups)))
    roofs: dict[tuple[str, float, float], list[UnderRoof]] = defaultdict(list)
    for entry in model.entries:
        work = entry.roofline
        if work is not None and entry.best_s and work.flops and work.bytes_moved:
            flops_per_s, bytes_per_s = work.peak
            if flops_per_s and bytes_per_s:
                point = UnderRoof(entry, work.flops / work.bytes_moved, work.flops / entry.best_s)
                roofs[entry.problem.device, flops_per_s, bytes_per_s].append(point)
    for roof, points in sorted(roofs.items(), key=lambda item: -len(item[1]))[:_ROOFS]:
        drawn = points[:: -(-len(points) // _POINTS)]
        only = "" if len(drawn) == len(points) else f": {len(drawn)} of {len(points):,} entries"
        yield tag("figure", tag("h3", f"{roof[0]}{only}"), svg_of(charts.roofline(*roof, drawn)))


def _tuning_time(model: ReportModel) -> Iterable[Markup]:
    note = "Compilers run in parallel with the measuring and with each other."
    shown = sum(bool(group.seconds) for group in model.groups)
    yield from _heading("Compiling and measuring", note, shown, "kernels and devices that took longest")
    yield tag("div", *(tag("span", tag("i", class_=kind), name) for kind, name in charts.KEY.items()), class_="key")
    yield tag("figure", svg_of(charts.tuning_time(model.groups)))


def _failures(model: ReportModel) -> Iterable[Markup]:
    note = "Failed candidates, by the first line of their message."
    if model.with_failures > READ_FAILURES:
        note += f" The table covers {READ_FAILURES:,} of the {model.with_failures:,} entries with failures."
    yield from _heading("Failures", note, 0, "")
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
        yield tag("p", note, class_="note")
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
    inside = [_about(detail), *(tag("p", note, class_="note") for note in detail.notes)]
    pictures = [tag("section", tag("h3", t), tag("figure", svg_of(c))) for t, c in charts.of_tuning(detail)]
    if detail.heat_maps:
        pictures.append(_heat_maps(detail))
    inside.append(tag("div", *pictures, class_="pair"))
    if detail.left_out:
        inside.append(tag("p", f"{detail.left_out:,} slower candidates are not listed.", class_="note"))
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
