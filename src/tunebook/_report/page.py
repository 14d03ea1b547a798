"""A report as a self-contained page: no network, no build, no dependency."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import time
from collections import Counter, defaultdict
from functools import partial
from html import escape
from importlib.resources import files
from shlex import quote
from typing import TYPE_CHECKING, Final

from tunebook._base.vocabulary import INTERRUPTED
from tunebook._report import charts
from tunebook._report.colours import STEPS, style_sheet
from tunebook._report.entry import PINNED
from tunebook._report.marks import TIMES, BarMark, DotMark, StrokeMark, TextMark, quantile, ratio_text, time_text
from tunebook._report.model import DETAILS, READ_FAILURES
from tunebook._report.size_chart import winners_by_size
from tunebook._report.tables import ID_DIGITS, pin_command, tables_of
from tunebook._report.tuning_charts import of_tuning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tunebook._report.charts import RoofPoint
    from tunebook._report.comparison import BookComparison
    from tunebook._report.detail import Detail
    from tunebook._report.entry import ReportEntry
    from tunebook._report.marks import Chart, ChartMark
    from tunebook._report.model import ReportModel

_VOID: Final = frozenset({"meta", "input", "line", "rect", "circle", "path", "polyline"})
# Larger tables are compressed: 100,000 entries are 20 MB as text; browsers unpack them in a tenth of a second.
_PLAIN_BYTES: Final = 1 << 20
_NAMED: Final = 5  # entries without a winner that the first lines name
_DEVICES: Final = 8  # devices that the first lines name
_ROOFS, _POINTS = 4, 400  # devices that get a chart, and entries in it: more overlap

_METHODS: Final = (
    """A time is the typical time of a candidate: a mean of the faster half of its samples, weighted to the fast, or the
    fastest of the first few samples. The heuristic is the configuration of a call that is not tuned.""",
    """Importance is a one-way analysis of variance of the logarithm of time, beyond chance (epsilon squared); for the
    better quarter, the divergence of its values from those of all candidates, beyond chance (PED-ANOVA).""",
)
# Beside each chart of a tuning: how to read it.
_READING: Final = {
    "Best so far": """Each dot is a candidate: when it was first tried, and its time at the end of the race. Candidates
    that were measured earlier stand at the beginning. A number with an arrow counts candidates above the chart.""",
    "Samples of the finalists": "Each dot is a run, each mark the time that counts.",
    "Importance of the parameters": """How much of the differences in time a parameter explains alone; the rest is
    interaction and noise. Over all candidates, one terrible value takes most of it; for the better quarter, it is how
    much a parameter decides about being in the fastest quarter.""",
    "Every candidate": "Each line is a candidate, through the values of its parameters to its time.",
    "Best time for each pair of values": """The fastest of all candidates with both values, as a multiple of the best
    time. A cross marks a pair with which every candidate failed.""",
}


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
    where = [tag("div", f"{model.where} · {made}", class_="where")]
    where += [
        tag("div", name if name == device else f"{name} ({device})", class_="where") for device, name in few(model)
    ]
    title = tag("div", tag("h1", model.title), *where)
    toggle = tag("button", "Dark", type="button", class_="toggle", title="light or dark")
    body = join(
        tag("header", title, toggle),
        tag("main", *_sections(model)),
        tag("footer", *(tag("p", method) for method in _METHODS)),
        _data(model),
        tag("script", Markup(script)),
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def few(model: ReportModel) -> list[tuple[str, str]]:
    """Return the first devices of a report with their short names: the page has each fingerprint once."""
    return list(model.devices.items())[:_DEVICES]


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
        yield _note("This book has no entries yet. Tune a call: tunebook.tune(kernel, ...).")
        return
    several = len(model.entries) > 1
    if model.undecided:
        yield _alarm(model)
    yield from map(_note, model.remarks)
    if model.comparison is not None:
        yield from _comparison(model.comparison)
    if several and model.speedups:
        yield tag("h2", "Gain over the heuristic")
        note = "How many times faster than the configuration that the heuristic gives; the mark is the geometric mean."
        yield _note(note, sum(bool(g.speedups) for g in model.groups), "kernels and devices with the largest gain")
        yield from _drift(model)
        yield _wide(partial(charts.speedups, model.groups))
        yield _table("groups", "kernels and devices")
    yield from _rooflines(model, several=several)
    if several and (tuned := sum(bool(group.seconds) for group in model.groups)):
        yield from _time_of_tuning(model, tuned)
    if model.by_size:
        yield from _by_size(model)
    yield from _no_winner(model)
    if model.failures:
        yield from _failures(model)
    if model.details:
        yield from _details(model)
    yield tag("h2", "All entries", id="entries")
    yield _note("A click on an id copies the command that explains the entry.")
    yield _table("entries", "all entries")


def _time_of_tuning(model: ReportModel, tuned: int) -> Iterable[Markup]:
    compiled = charts.compiled(model.groups)
    yield tag("h2", charts.time_heading(model.groups))
    note = "Compilers run in parallel with the measuring and with each other." if compiled else ""
    if note or tuned > charts.ROWS:
        yield _note(note, tuned, "kernels and devices that took longest")
    if compiled:
        yield tag("div", *(tag("span", tag("i", class_=kind), name) for kind, name in charts.KEY.items()), class_="key")
    yield _wide(partial(charts.tuning_time, model.groups))


def _no_winner(model: ReportModel) -> Iterable[Markup]:
    if model.undecided:
        yield tag("h2", "No winner", id="no-winner")
        yield _note(
            "All candidates of these entries failed. Calls run with the configuration that the heuristic gives; of a "
            "kernel without a heuristic they raise NoConfig."
        )
        yield _table("undecided", "entries without a winner")
    if model.interrupted:
        yield tag("h2", "Interrupted", id="interrupted")
        yield _note("No decision yet: these tunings were interrupted, and the next one goes on where they stopped.")
        yield _table("interrupted", "interrupted tunings")


def _alarm(model: ReportModel) -> Markup:
    """Say in red that entries have no winner, with the names of the first few."""
    many, there = len(model.undecided), len(model.entries)
    said = f"{many:,} of {there:,} entries {'has' if many == 1 else 'have'} no winner"
    names = [f"{entry.problem.op} {entry.call}"[:120] for entry, _ in model.undecided[:_NAMED]]
    more = f", and {many - _NAMED:,} more" if many > _NAMED else ""
    return tag("p", tag("a", said, href="#no-winner"), f": {'; '.join(names)}{more}.", class_="alarm")


def _drift(model: ReportModel) -> Iterable[Markup]:
    gains, disturbed = len(model.speedups), sum(e.disturbed and e.speedup is not None for e in model.entries)
    if disturbed:
        were, they, them = ("was", "It", "it") if disturbed == 1 else ("were", "They", "them")
        said = f"{disturbed:,} of {gains:,} gains {were} measured while other work disturbed the machine."
        yield tag(
            "p",
            f"{said} {they} may be far off. The tables mark {them}; on a quiet machine, "
            f"tunebook.tune(..., again=True) measures {them} anew.",
            class_="note doubt",
        )
    many = sum(entry.drift for entry in model.entries)
    if many:
        left_out = (
            "1 entry is left out: its heuristic" if many == 1 else f"{many:,} entries are left out: their heuristic"
        )
        yield _note(
            f"{left_out} was eliminated early, and the machine was slower afterwards; the times do not compare."
        )


def _comparison(comparison: BookComparison) -> Iterable[Markup]:
    kinds = Counter(change.kind for change in comparison.changes)
    counts = [
        f"{kinds[kind]:,} {kind}"
        for kind in ("slower", "faster", "same time", "no times", "new", "gone")
        if kinds[kind]
    ]
    same = f"{comparison.same:,} with the same configuration and time" if comparison.same else ""
    yield tag("h2", f"Compared with {comparison.label}")
    yield _note(f"Entries: {'; '.join([*counts, *([same] if same else [])])}. Times within 3 % count as the same.")
    if comparison.changes:
        yield _table("changes", "changes")


def _by_size(model: ReportModel) -> Iterable[Markup]:
    yield tag("h2", "Winners by size")
    yield _note("Each letter is a configuration, A the most frequent of its kernel; the table names them.")
    names = model.devices if len(model.devices) > 1 else {}
    yield _wide(partial(winners_by_size, model.by_size, names))
    yield _table("winners", "winners by size", 12, 60)


def _wide(draw: Callable[..., Chart]) -> Markup:
    """Return a wide chart, drawn for wide and for narrow screens; the style sheet shows one of them."""
    return tag("figure", svg_of(draw(), "on-wide"), svg_of(draw(width=charts.PHONE), "on-phone"))


def _note(text: str, there: int = 0, kind: str = "") -> Markup:
    only = f" Only the {charts.ROWS} {kind} are shown, of {there:,}." if there > charts.ROWS else ""
    return tag("p", text + only, class_="note")


def _figures(model: ReportModel) -> Markup:
    groups = model.groups
    failed, seconds = sum(group.failed for group in groups), sum(group.seconds for group in groups)
    kernels, devices, entries = len({g.op for g in groups}), len({g.device for g in groups}), len(model.entries)
    ordered = sorted(model.speedups)
    took = f"{seconds / 3600:,.1f} h" if seconds >= 7200 else time_text(seconds)
    link = partial(tag, "a", f"{failed:,}", href="#failures")
    found: list[tuple[str, str]] = [
        ("kernel" if kernels == 1 else "kernels", f"{kernels:,}"),
        ("device" if devices == 1 else "devices", f"{devices:,}"),
        ("entry" if entries == 1 else "entries", f"{entries:,}"),
        ("candidates tried", f"{sum(g.measured for g in groups):,}"),
        ("candidates failed", link() if failed and model.failures else f"{failed:,}" if failed else ""),
        ("median gain over the heuristic", ratio_text(quantile(ordered, 0.5)) if ordered else ""),
        ("time of tuning", took if seconds else ""),
    ]
    return tag("dl", *(tag("div", tag("dt", n), tag("dd", v)) for n, v in found if v), class_="figures")


def _rooflines(model: ReportModel, *, several: bool) -> Iterable[Markup]:
    if not any(group.reached for group in model.groups):
        return
    yield tag("h2", "Roofline")
    yield _note("The author of a kernel states the work of a call with flops= and bytes=.")
    if several:
        yield _wide(partial(charts.reached, model.groups))
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
        yield tag("h3", f"{model.devices[roof[0]]}{only}")
        yield _wide(partial(charts.roofline, *roof, drawn))


def _failures(model: ReportModel) -> Iterable[Markup]:
    note = "Failed candidates by cause: messages that differ only in numbers are one row."
    if model.with_failures > READ_FAILURES:
        note += f" The table covers {READ_FAILURES:,} of the {model.with_failures:,} entries with failures."
    yield tag("h2", "Failures", id="failures")
    yield _note(note)
    if len(model.failure_kinds) > 1:
        yield _wide(partial(charts.failure_bars, model.failure_kinds))
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
    device_of = model.devices if len(model.devices) > 1 else {}
    for number, detail in enumerate(model.details):
        yield _detail(number, detail, device_of.get(detail.entry.problem.device, ""))


def _detail(number: int, detail: Detail, device: str) -> Markup:
    entry = detail.entry
    gain = ratio_text(entry.speedup) if entry.speedup else time_text(entry.best_s) if entry.best_s else ""
    gain = {INTERRUPTED: "interrupted", PINNED: "pinned by hand"}.get(entry.origin, gain)
    summary = tag(
        "summary",
        tag("span", entry.problem.op, class_="name"),
        tag("span", f"{entry.call} · {device}" if device else entry.call, class_="call"),
        tag("span", f"{gain} · disturbed" if gain and entry.disturbed else gain, class_="gain"),
    )
    inside = [_about(detail, device), *map(_note, detail.notes)]
    pictures = [_picture(title, tag("figure", svg_of(chart))) for title, chart in of_tuning(detail)]
    if detail.heat_maps:
        pictures.append(_heat_maps(detail))
    inside.append(tag("div", *pictures, class_="pair"))
    if detail.left_out:
        inside.append(_note(f"{detail.left_out:,} slower candidates are not listed."))
    inside.append(_table(f"detail{number}", f"candidates of {entry.problem.op}", 12, 12))
    return tag("details", summary, tag("div", *inside, class_="inside"), open="" if number == 0 else None)


def _picture(title: str, *content: Markup) -> Markup:
    return tag("section", tag("h3", title), tag("p", _READING[title], class_="method"), *content)


def _about(detail: Detail, device: str) -> Markup:
    entry = detail.entry
    rates = [(entry.flops_per_s, "FLOP/s"), (entry.bytes_per_s, "B/s")]
    rate = ", ".join(charts.amount_text(amount, unit) for amount, unit in rates if amount)
    facts = {
        "call": "; ".join(detail.call),
        **_chosen(detail),
        "time": f"{time_text(entry.best_s)}{_against(entry)}" if entry.best_s and entry.origin != PINNED else "",
        "rate": rate,
        "because": detail.rule if entry.origin == "tuned" else "",
        "device": device,
        **{name: _copied(command) for name, command in _commands(detail).items()},
    }
    shown = [join(tag("dt", name), tag("dd", value)) for name, value in facts.items() if value]
    return tag("dl", *shown, class_="about")


def _chosen(detail: Detail) -> dict[str, str]:
    """Return the configuration of an entry by the word for it; beside a pin, the choice of the tuning."""
    entry = detail.entry
    if entry.origin != PINNED:
        return {"chosen": entry.config and tag("code", entry.config)}
    winner = next((c for c in detail.candidates if c.role == "chosen"), None)
    took = f" {time_text(entry.best_s)}" if entry.best_s else ", which was not measured"
    found: dict[str, str] = {"pinned by hand": join(tag("code", entry.config), took)}
    if winner is not None and winner.value_s:
        won = entry._replace(speedup=(entry.default_s or 0.0) / winner.value_s or None)
        because = f"; {detail.rule}" if detail.rule else ""
        took = f" {time_text(winner.value_s)}{_against(won)}{because}"
        found["measured winner"] = join(tag("code", winner.config), took)
    return found


def _against(entry: ReportEntry) -> str:
    if entry.drift:
        return "; no gain is given: the heuristic was eliminated early, and the machine was slower afterwards"
    if entry.speedup is None:
        return ""
    if abs(entry.speedup - 1) < 0.005:
        return ", as fast as the heuristic"
    slower = "faster" if entry.speedup > 1 else "slower"
    return f", {ratio_text(max(entry.speedup, 1 / entry.speedup))} {slower} than the heuristic"


def _commands(detail: Detail) -> dict[str, str]:
    """Return the commands that pin the choice, try it in one run, and explain it."""
    op = detail.entry.problem.op
    chosen = next((c for c in detail.candidates if c.role == "chosen"), None)
    found = {"unpin": f"tunebook unpin {detail.identifier[:ID_DIGITS]}"} if detail.entry.origin == PINNED else {}
    if chosen is not None and not found and (command := pin_command(detail, chosen)) is not None:
        found["pin"] = command
        values = ",".join(f"{name}={value}" for name, value in chosen.fields.items())
        if op.isprintable() and not set(op) & set(";:"):
            found["reproduce"] = f"TUNEBOOK_PIN={quote(f'{op}:{values}')} python your_program.py"
    return {**found, "explain": f"tunebook explain {detail.identifier[:ID_DIGITS]}"}


def _copied(command: str) -> Markup:
    button = tag("button", "Copy", type="button", class_="copy", data_copy=command)
    return tag("span", tag("code", command), " ", button, class_="command")


def _heat_maps(detail: Detail) -> Markup:
    best, worst = charts.heat_range(detail.heat_maps)
    maps = [tag("figure", svg_of(charts.heat_map(shown, best, worst))) for shown in detail.heat_maps]
    steps = [tag("rect", x=10 * s, y=0, width=10, height=10, class_=f"q{s}") for s in range(STEPS)]
    ramp = tag("svg", *steps, viewBox=f"0 0 {10 * STEPS} 10", width=10 * STEPS, height=10, aria_hidden="true")
    key = tag("div", "best", ramp, f"{worst / best:.2g} {TIMES} and slower", class_="ramp")
    return _picture("Best time for each pair of values", key, tag("div", *maps, class_="maps"))


def _table(name: str, label: str, rows: int = 25, printed: int = 200) -> Markup:
    empty = tag("noscript", "This table needs JavaScript. The script is part of this file and loads nothing.")
    return tag("figure", empty, class_="table", data_table=name, data_label=label, data_page=rows, data_printed=printed)


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


def svg_of(chart: Chart, kind: str = "") -> Markup:
    """Return a chart as an SVG element; page.css has the colours by the kind of each mark."""
    width, height, title, marks = chart
    content = (tag("title", title), *map(_svg_mark, marks))
    box = f"0 0 {width:g} {height:g}"
    return tag("svg", *content, class_=f"chart {kind}".rstrip(), viewBox=box, width=width, height=height, role="img")


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
