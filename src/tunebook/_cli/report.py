"""`tunebook report`: the book as one page, or one picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tunebook._cli._filters import add_filters, add_json, book_of, existing_book, filters_of, size_text
from tunebook._cli._verb import DONE, NO, UsageError, Verb

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator

    from tunebook._base.record_format import Record
    from tunebook._cli._terminal import Terminal
    from tunebook.stores import Store

_OUTPUT: Final = "tunebook-report.html"


def _arguments(parser: ArgumentParser) -> None:
    add_filters(parser)
    parser.add_argument(
        "-o", "--output", metavar="PATH", default=_OUTPUT, help=f"where to write it, .html or .png (default {_OUTPUT})"
    )
    parser.add_argument("--title", metavar="TEXT", help="what to write above it")
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    add_json(parser)


def _run(options: Namespace, terminal: Terminal) -> int:
    from pathlib import Path  # noqa: PLC0415 - loaded by then anyway

    from tunebook._report import report_on  # noqa: PLC0415 - only this verb needs it

    path = Path(options.output).expanduser()
    if path.suffix.lower() not in {".html", ".png"}:
        raise UsageError(f"--output {options.output}: a report is written to a name that ends in .html or .png")
    store = book_of(options) if options.book is None else existing_book(options.book)
    made = report_on(_records(store, options), store.where, options.title)
    count = len(made.model.entries)
    if not count:
        terminal.note(f"there is nothing to report on in {store.where}; tune something, or filter less")
        return NO
    try:
        made.save(path)
    except OSError as error:
        raise UsageError(f"--output {options.output}: {error.strerror or error}") from error
    size = path.stat().st_size
    if terminal.json:
        terminal.value({"path": str(path), "entries": count, "bytes": size})
    else:
        terminal.line(f"{path}: {count:,} {'entry' if count == 1 else 'entries'}, {size_text(size)}")
    if options.open:
        import webbrowser  # noqa: PLC0415 - 10 ms that few need to pay

        webbrowser.open(path.resolve().as_uri())
    return DONE


def _records(store: Store, options: Namespace) -> Iterator[Record]:
    from tunebook.stores._listing import Catalogue  # noqa: PLC0415 - stores are loaded when one is opened

    filters = filters_of(options)
    if not filters.any_given:
        yield from store.items()
        return
    for listed in filters.pick(Catalogue(store)):
        record = listed.record()
        if record is not None:
            yield record


VERB = Verb(
    "report",
    "write the book as one page of tables and charts",
    "tunebook report --kernel 'matmul*' --output matmul.html",
    _arguments,
    _run,
    "Write one HTML page with the gains over the defaults, the tunings in detail and a table of all entries, or the "
    "main charts as a PNG picture. Exits with 1, and writes nothing, if there is nothing to report on.",
)
