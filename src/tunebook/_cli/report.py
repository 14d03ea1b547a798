"""Write a report: one HTML page with gains over the heuristics, tunings in detail and a table of all entries.

A name that ends in .png gives a picture of the main charts. With --compare or --since, two books or two dates stand
side by side. Exits with 1, and writes nothing, if no entry matches.
"""

from __future__ import annotations

import time
from argparse import ArgumentTypeError
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tunebook._cli._filters import FILTERS, age_s, book_to_read, existing_book, filters_of, size_text
from tunebook._cli._terminal import count_text, writing_output
from tunebook._cli._verb import DONE, NO, ArgumentParser, Namespace, Terminal, UsageError, Verb
from tunebook._report import report_on

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tunebook._base.record_format import Record
    from tunebook._cli._filters import Filters
    from tunebook.stores import Store

_OUTPUT: Final = "tunebook-report.html"


def _arguments(parser: ArgumentParser) -> None:
    text = f"file to write, .html or .png (default: {_OUTPUT})"
    parser.add_argument("-o", "--output", metavar="PATH", default=_OUTPUT, help=text)
    parser.add_argument("--title", metavar="TEXT", help="title of the report")
    text = "show what differs from this book: a directory, a pack, a .json file or a URL"
    parser.add_argument("--compare", metavar="OTHER_BOOK", help=text)
    text = "show what changed since then: 2026-03-31, '2026-03-31 18:00' (UTC), or an age, e.g. 7d"
    parser.add_argument("--since", metavar="DATE", type=_since_s, help=text)
    parser.add_argument("--open", action="store_true", help="open the report in the browser")


def _since_s(text: str) -> float:
    """Return a date, or the moment an age ago, as a Unix time."""
    for form in ("%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M"):
        with suppress(ValueError):
            return datetime.strptime(text, form).replace(tzinfo=UTC).timestamp()
    try:
        return time.time() - age_s(text)
    except ArgumentTypeError:
        raise ArgumentTypeError(f"invalid date {text!r}: write 2026-03-31, or an age, e.g. 7d") from None


def _records(store: Store, filters: Filters) -> Iterable[Record]:
    return filters.records(store) if filters.any_given else store.items()


def _run(options: Namespace, terminal: Terminal) -> int:
    path = Path(options.output).expanduser()
    if path.suffix.lower() not in {".html", ".png"}:
        raise UsageError(f"--output {options.output}: the name of a report must end in .html or .png")
    with writing_output(path):
        path.parent.stat()  # before the work
    store = book_to_read(options)
    filters = filters_of(options)
    if options.compare is not None and options.since is not None:
        raise UsageError("--compare and --since are two comparisons; give one of them")
    other = None if options.compare is None else existing_book(options.compare)
    compare = None if other is None else (_records(other, filters), other.where)
    records = _records(store, filters)
    made = report_on(records, store.where, options.title, compare=compare, since=options.since)
    count = len(made.model.entries)
    if not count:
        terminal.note(f"nothing to report on in {store.where}; tune something, or use fewer filters")
        return NO
    with writing_output(path):
        made.save(path)
    size, entries = path.stat().st_size, count_text(count, "entry", "entries")
    terminal.result({"path": str(path), "entries": count, "bytes": size}, f"{path}: {entries}, {size_text(size)}")
    if options.open:
        import webbrowser  # noqa: PLC0415 - loaded late: 10 ms

        webbrowser.open(path.resolve().as_uri())
    return DONE


VERB = Verb("tunebook report --kernel 'matmul*' --output matmul.html", _run, (*FILTERS, "json"), _arguments, __doc__)
