"""A report as one page that needs nothing but itself: no network, no build, no dependency."""

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
from tunebook._report.entry import under_roof
from tunebook._report.markup import Markup, join, tag
from tunebook._report.model import DETAILS, READ_FAILURES
from tunebook._report.scales import TIMES, quantile, ratio_text, time_text
from tunebook._report.tables import tables_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tunebook._report.detail import Detail
    from tunebook._report.entry import UnderRoof
    from tunebook._report.model import ReportModel

# Larger tables are packed: 100,000 entries are 20 MB as text, and browsers unpack them in a tenth of a second.
_PLAIN_BYTES: Final = 1 << 20
_ROOFS, _POINTS = 4, 400  # devices that get a picture, and entries in it: more are a blot

_METHODS: Final = (
    """A time is the typical one of a candidate: a mean of the faster half of its samples, weighted to the fast, or the
    fastest of the first few. The default is the configuration that the kernel's heuristic gives.""",
    """Importance is the part of the variance of log time that a parameter explains alone, less what chance would
    explain with as many values (one-way analysis of variance, epsilon squared), over the candidates that worked. What
    is missing from 100 % is interaction of parameters, and noise.""",
    """A heat map shows, for each pair of values, the best time over everything that was measured with both, as a
    multiple of the best of all. A cross is a pair with which every candidate failed.""",
    """Best so far: each candidate stands at the moment at which it was first tried, with the time that the whole race
    found for it. What was known before the tuning began stands at its beginning.""",
)


def page_of(model: ReportModel) -> str:
    """Return the whole page."""
    script = _part("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Nothing is fetched, and no script runs but ours, whatever a record may hold.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("title", f"{model.title} · tunebook"),
        tag("style", Markup(style_sheet() + _part("page.css"))),
    )
    body = join(
        _header(model),
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


def _header(model: ReportModel) -> Markup:
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(model.made))
    title = tag("div", tag("h1", model.title), tag("div", f"{model.where} · {made}", class_="where"))
    toggle = tag("button", "Dark", type="button", class_="toggle", title="light or dark")
    return tag("header", title, toggle)


def _sections(model: ReportModel) -> Iterable[Markup]:
    yield _figures(model)
    if not model.entries:
        yield tag("p", "There is nothing in this book yet. Tune a call: tunebook.tune(kernel, ...).", class_="note")
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
    failed = sum(group.failed for group in groups)
    seconds = sum(group.seconds for group in groups)
    kernels, devices, entries = len({g.op for g in groups}), len({g.device for g in groups}), len(model.entries)
    found = [
        ("kernel" if kernels == 1 else "kernels", f"{kernels:,}"),
        ("device" if devices == 1 else "devices", f"{devices:,}"),
        ("entry" if entries == 1 else "entries", f"{entries:,}"),
        ("candidates tried", f"{sum(g.measured for g in groups):,}"),
        ("of them failed", f"{failed:,}" if failed else ""),
        ("median gain over the default", _gain(model)),
        ("time of tuning", _long(seconds) if seconds else ""),
    ]
    return tag("dl", *(tag("div", tag("dt", n), tag("dd", v)) for n, v in found if v), class_="figures")


def _gain(model: ReportModel) -> str:
    ordered = sorted(model.speedups)
    return ratio_text(quantile(ordered, 0.5)) if ordered else ""


def _long(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} h" if seconds >= 7200 else time_text(seconds)


def _speedups(model: ReportModel) -> Iterable[Markup]:
    shown = sum(bool(group.speedups) for group in model.groups)
    yield tag("h2", "Gain over the default")
    told = "How many times faster than with the heuristic's configuration; the mark is the geometric mean."
    yield tag("p", told + _only(shown, charts.ROWS, "kernels and devices with the largest gain"), class_="note")
    yield tag("figure", charts.speedups(model.groups))
    yield _table("groups", "kernels and devices")


def _only(there: int, shown: int, what: str) -> str:
    return f" Shown are the {shown} {what}, of {there:,}." if there > shown else ""


def _rooflines(model: ReportModel, *, several: bool) -> Iterable[Markup]:
    if not any(group.reached for group in model.groups):
        return
    yield tag("h2", "Roofline")
    yield tag("p", "The work of a call is what its author stated as flops= and bytes=.", class_="note")
    if several:
        yield tag("figure", charts.reached(model.groups))
    roofs: dict[tuple[str, float, float], list[UnderRoof]] = defaultdict(list)
    for entry in model.entries:
        if (point := under_roof(entry)) is not None:
            roofs[entry.problem.device, point.flops_per_s, point.bytes_per_s].append(point)
    largest = sorted(roofs.items(), key=lambda item: -len(item[1]))[:_ROOFS]
    for (device, _, _), points in largest:
        drawn = points[:: -(-len(points) // _POINTS)]
        told = "" if len(drawn) == len(points) else f": {len(drawn)} of {len(points):,} entries"
        yield tag("figure", tag("h3", f"{device}{told}"), charts.roofline(device, drawn))


def _tuning_time(model: ReportModel) -> Iterable[Markup]:
    shown = sum(bool(group.seconds) for group in model.groups)
    yield tag("h2", "Compiling and measuring")
    told = "Where the time of tuning went. Compilers run beside the measuring, and beside each other."
    yield tag("p", told + _only(shown, charts.ROWS, "that took longest"), class_="note")
    keys = [("waiting", "waiting for compilers"), ("measuring", "measuring")]
    yield tag("div", *(tag("span", tag("i", class_=kind), name) for kind, name in keys), class_="key")
    yield tag("figure", charts.tuning_time(model.groups))


def _failures(model: ReportModel) -> Iterable[Markup]:
    yield tag("h2", "Failures")
    told = "Candidates that have no time, by the first line of what was said."
    if model.with_failures > READ_FAILURES:
        told += f" The table is of {READ_FAILURES:,} of the {model.with_failures:,} entries with failures."
    yield tag("p", told, class_="note")
    if len(model.failure_kinds) > 1:
        yield tag("figure", charts.failure_bars(model.failure_kinds))
    yield _table("failures", "failures")


def _details(model: ReportModel) -> Iterable[Markup]:
    yield tag("h2", "Tunings" if len(model.details) > 1 else "The tuning")
    if model.tuned > len(model.details):
        told = (
            f"{len(model.details)} of {model.tuned:,} in detail: of each kernel and device the one with the largest "
            f"gain, then others by their gain, at most {DETAILS}. The rest is in the sums above and the table below."
        )
        yield tag("p", told, class_="note")
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
    pictures = [_section(title, drawn) for title, drawn in _pictures(detail)]
    if detail.heat_maps:
        pictures.append(_heat_maps(detail))
    inside.append(tag("div", *pictures, class_="pair"))
    if detail.left_out:
        inside.append(tag("p", f"{detail.left_out:,} more candidates are slower than those listed.", class_="note"))
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


def _pictures(detail: Detail) -> Iterable[tuple[str, Markup]]:
    if detail.best_so_far:
        yield "Best so far", charts.best_so_far(detail)
    if detail.finalists:
        yield "Samples of the finalists", charts.samples(detail)
    if detail.importances:
        yield "Importance of the parameters", charts.importance(detail)


def _section(title: str, drawn: Markup) -> Markup:
    return tag("section", tag("h3", title), tag("figure", drawn))


def _heat_maps(detail: Detail) -> Markup:
    best, worst = charts.heat_range(detail.heat_maps)
    maps = [tag("figure", charts.heat_map(shown, best, worst)) for shown in detail.heat_maps]
    title = tag("h3", "Best time for each pair of values")
    return tag("section", title, _ramp(worst / best), tag("div", *maps, class_="maps"))


def _ramp(most: float) -> Markup:
    steps = [tag("rect", x=10 * s, y=0, width=10, height=10, class_=f"q{s}") for s in range(STEPS)]
    drawn = tag("svg", *steps, viewBox=f"0 0 {10 * STEPS} 10", width=10 * STEPS, height=10, aria_hidden="true")
    return tag("div", "best", drawn, f"{most:.2g} {TIMES} and slower", class_="ramp")


def _table(name: str, label: str, rows: int = 25, printed: int = 200) -> Markup:
    empty = tag("noscript", "This table needs JavaScript, which is in this file and asks for nothing from outside.")
    return tag("figure", empty, class_="table", data_table=name, data_label=label, data_page=rows, data_printed=printed)


def framed(page: str, height: int) -> str:
    """Return a page as a frame in a notebook, whose own style and scripts it does not touch."""
    return tag("iframe", srcdoc=page, style=f"width:100%;height:{height}px;border:0", title="tunebook report")
