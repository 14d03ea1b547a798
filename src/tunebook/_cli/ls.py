"""List the entries of the book, the newest first.

The age of an entry in a directory counts from the last write to its file, which may be a pin, an unpin or a copy of
the book. Exits with 1 if no entry matches.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from tunebook._base.errors import clean
from tunebook._cli._entries import ID, KERNEL, SHORT_ID, decision_text, entry_json, find, key_text, seconds_of
from tunebook._cli._filters import FILTERS, age_text, book_to_read, count_of, filters_of
from tunebook._cli._terminal import TextColumn, count_text, wrapped
from tunebook._cli._verb import DONE, NO, ArgumentParser, Namespace, Terminal, UsageError, Verb
from tunebook._tuning.progress import seconds_text
from tunebook.stores._listing import Catalogue, newest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tunebook._base.record_format import Record
    from tunebook.stores._listing import EntryGroup, Listed

_SHOWN: Final = 30
_COLUMNS: Final = (
    ID,
    KERNEL._replace(give=3),
    TextColumn("config", style="green", whole=True),
    TextColumn("time", "right"),
    TextColumn("", style="yellow"),
    TextColumn("call", give=3),
    TextColumn("device", give=4, from_width=72),
    TextColumn("age", "right", from_width=90),
)
_NARROW: Final = 56  # on a narrower terminal a call is below its row: cut, it would not tell entries apart
_SUMMARY: Final = (
    KERNEL._replace(give=1),
    TextColumn("device", give=2),
    TextColumn("entries", "right"),
    TextColumn("changed", "right"),
)


def _arguments(parser: ArgumentParser) -> None:
    text = "list only the entries of these kernels, as --kernel does; a pattern may be given, e.g. 'matmul*'"
    parser.add_argument("names", metavar="KERNEL", nargs="*", help=text)
    parser.add_argument("--limit", metavar="N", type=count_of, help=f"show the N newest; 0 for all (default: {_SHOWN})")
    parser.add_argument("--summary", action="store_true", help="one line per kernel and device")


def _run(options: Namespace, terminal: Terminal) -> int:
    store = book_to_read(options)
    filters = filters_of(options)
    catalogue = Catalogue(store)
    filters.check(catalogue)
    for name in options.names:
        if find(catalogue, name, filters).listed:
            raise UsageError(f"{name!r} is the id of an entry; `tunebook show {name}` shows it")
    filters = filters._replace(kernel=(*filters.kernel, *options.names))
    groups = filters.groups(catalogue)
    total = sum(len(group.ids) for group in groups)
    if options.summary and (groups or terminal.json):
        _summary(groups, terminal)
    elif terminal.json:
        terminal.values(entry_json(e, e.record()) for e in newest(groups, options.limit or total))
    elif groups:
        limit = _SHOWN if options.limit is None else options.limit or total
        kernels, devices = {group.op for group in groups}, {group.device for group in groups}
        _entries(newest(groups, limit), len(devices), terminal)
        entries = f"{count_text(total, 'entry', 'entries')} of {count_text(len(kernels), 'kernel', 'kernels')}"
        on = clean(min(devices)) if len(devices) == 1 else f"{len(devices):,} devices"
        first, *rest = wrapped(f"{entries} on {on}", terminal.width - 2)
        for text in ("", first, *(f"  {more}" for more in rest), f"in {store.where}"):
            terminal.line(text, "dim")
        if total > limit:
            terminal.line(f"only the {limit} newest are shown: --limit 0 shows all, --summary counts them", "dim")
    else:
        terminal.note(f"{'no matching entry' if filters.any_given else 'no entries yet'} in {store.where}")
    return DONE if groups else NO


def _entries(found: Sequence[Listed], devices: int, terminal: Terminal) -> None:
    now_s = time.time()
    rows = []
    for listed in found:
        config, took, call, state = "unreadable", "", "", ""
        if (record := listed.record()) is not None:
            seconds = seconds_of(record)
            took = "" if seconds is None else seconds_text(seconds)
            config, call, state = decision_text(record), key_text(record.problem.call_key), _state(record)
        age = age_text(now_s - listed.written_s) if listed.written_s else ""
        # The name of a device is long, and nearly every book has only one: then the line below the table names it.
        device = clean(listed.device) if devices > 1 else ""
        rows.append((listed.id[:SHORT_ID], clean(listed.op), config, took, state, call, device, age))
    narrow = terminal.width < _NARROW
    terminal.table([c._replace(whole=True) if narrow and c.title == "call" else c for c in _COLUMNS], rows)


def _state(record: Record) -> str:
    """Return how an entry differs from the result of a finished tuning; its configuration says if it has no winner."""
    if not record.head.decided:
        return ""
    return "unfinished" if record.is_unfinished else record.head.origin.replace("tuned", "")


def _summary(groups: Sequence[EntryGroup], terminal: Terminal) -> None:
    counts: dict[tuple[str, str], tuple[int, float]] = {}
    for group in groups:
        count, changed_s = counts.get((group.op, group.device), (0, 0.0))
        counts[group.op, group.device] = (count + len(group.ids), max(changed_s, group.changed_s))
    listed = [(*names, count, changed_s or None) for names, (count, changed_s) in sorted(counts.items())]
    if terminal.json:
        names = ("kernel", "device", "entries", "changed")
        terminal.values(dict(zip(names, row, strict=True)) for row in listed)
    elif listed:
        ages = [f"{age_text(time.time() - changed_s)} ago" if changed_s else "" for *_, changed_s in listed]
        rows = [(clean(op), clean(device), f"{n:,}", age) for (op, device, n, _), age in zip(listed, ages, strict=True)]
        terminal.table(_SUMMARY, rows)


VERB = Verb("tunebook ls 'matmul*' --newer-than 30d", _run, (*FILTERS, "json"), _arguments, __doc__)
