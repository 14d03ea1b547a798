"""`tunebook ls`: what is in the book."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from tunebook._cli._filters import add_filters, add_json, age_text, book_of, filters_of
from tunebook._cli._terminal import TextColumn, clean
from tunebook._cli._verb import DONE, NO, Verb

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Sequence

    from tunebook._cli._terminal import Terminal
    from tunebook.stores._listing import EntryGroup, Listed

_SHOWN: Final = 30

_COLUMNS: Final = (
    TextColumn("id", style="cyan"),
    TextColumn("kernel", give=3, style="bold", keeps_end=True),
    TextColumn("device", give=4, from_width=72),
    TextColumn("call", give=3, from_width=56),
    TextColumn("config", give=3, style="green"),
    TextColumn("time", "right"),
    TextColumn("origin", from_width=90),
    TextColumn("age", "right", from_width=50),
)
_SUMMARY: Final = (
    TextColumn("kernel", give=1, style="bold", keeps_end=True),
    TextColumn("device", give=2),
    TextColumn("entries", "right"),
    TextColumn("changed", "right"),
)


def _arguments(parser: ArgumentParser) -> None:
    add_filters(parser)
    parser.add_argument("--limit", metavar="N", type=int, help=f"show the N newest; 0 for all (default {_SHOWN})")
    parser.add_argument("--summary", action="store_true", help="one line per kernel and device")
    add_json(parser)


def _run(options: Namespace, terminal: Terminal) -> int:
    from tunebook.stores._listing import Catalogue, newest  # noqa: PLC0415 - stores are loaded when one is opened

    store = book_of(options)
    filters = filters_of(options)
    groups = filters.groups(Catalogue(store))
    total = sum(len(group.ids) for group in groups)
    if options.summary:
        _summary(groups, terminal)
    elif terminal.json:
        _json(newest(groups, options.limit or total), terminal)
    elif groups:
        limit = _SHOWN if options.limit is None else options.limit or total
        _entries(newest(groups, limit), len({group.device for group in groups}), terminal)
        _foot(groups, limit, store.where, terminal)
    else:
        what = "nothing that fits" if filters.any_given else "nothing is tuned yet"
        terminal.note(f"{what} in {store.where}")
    return DONE if groups else NO


def _json(found: Sequence[Listed], terminal: Terminal) -> None:
    from tunebook._cli._entries import as_json  # noqa: PLC0415 - as above

    terminal.values(as_json(listed, listed.record()) for listed in found)


def _entries(found: Sequence[Listed], devices: int, terminal: Terminal) -> None:
    from tunebook._cli._entries import SHORT_ID, row_of  # noqa: PLC0415 - as above
    from tunebook._tuning.progress import seconds_text  # noqa: PLC0415 - as above

    now_s = time.time()
    rows = []
    for listed in found:
        row = row_of(listed)
        took = "" if row.seconds is None else seconds_text(row.seconds)
        age = age_text(now_s - listed.written_s) if listed.written_s else ""
        rows.append((row.id[:SHORT_ID], row.kernel, row.device, row.key, row.config, took, row.origin, age))
    # A device's name is long, and nearly every book is of one device: then the foot says which.
    kept = [i for i, column in enumerate(_COLUMNS) if devices > 1 or column.title != "device"]
    terminal.table([_COLUMNS[i] for i in kept], [[row[i] for i in kept] for row in rows])


def _foot(groups: Sequence[EntryGroup], limit: int, where: str, terminal: Terminal) -> None:
    kernels, devices = {group.op for group in groups}, {group.device for group in groups}
    count = sum(len(group.ids) for group in groups)
    total = f"{_count(count, 'entry', 'entries')} of {_count(len(kernels), 'kernel', 'kernels')} on "
    total += clean(min(devices)) if len(devices) == 1 else f"{len(devices):,} devices"
    terminal.line()
    terminal.line(total, "dim")
    terminal.line(f"in {where}", "dim")
    if count > limit:
        terminal.line(f"the {limit} newest are shown; --limit 0 shows all, --summary sums them up", "dim")


def _summary(groups: Sequence[EntryGroup], terminal: Terminal) -> None:
    counts: dict[tuple[str, str], tuple[int, float]] = {}
    for group in groups:
        count, changed_s = counts.get((group.op, group.device), (0, 0.0))
        counts[group.op, group.device] = (count + len(group.ids), max(changed_s, group.changed_s))
    listed = sorted(counts.items())
    if terminal.json:
        terminal.values(
            {"kernel": op, "device": device, "entries": count, "changed": changed_s or None}
            for (op, device), (count, changed_s) in listed
        )
    elif listed:
        now_s = time.time()
        terminal.table(
            _SUMMARY,
            (
                (clean(op), clean(device), f"{count:,}", f"{age_text(now_s - changed_s)} ago" if changed_s else "")
                for (op, device), (count, changed_s) in listed
            ),
        )


def _count(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


VERB = Verb(
    "ls",
    "list what is tuned",
    "tunebook ls --kernel 'matmul*' --newer-than 30d",
    _arguments,
    _run,
    "List the entries of the book, the newest first. Exits with 1 if there are none.",
)
