"""Merge the entries of other books into this one.

The measurements of both books are kept, the choice with the better evidence wins, and entries that are pinned here stay
pinned. It is safe while programs tune into the same book.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunebook._cli._filters import FILTERS, book_of, existing_book, filters_of
from tunebook._cli._verb import DONE, ArgumentParser, Namespace, Terminal, Verb

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tunebook._base.record_format import Record


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("sources", metavar="BOOK", nargs="+", help="a directory, a .json file, a .db pack or a URL")


def _run(options: Namespace, terminal: Terminal) -> int:
    filters = filters_of(options)
    sources = [existing_book(given) for given in options.sources]
    merge_records((record for source in sources for record in filters.records(source)), options, terminal)
    return DONE


def merge_records(records: Iterable[Record], options: Namespace, terminal: Terminal) -> None:
    """Merge records into the book, and print how many entries this added, changed and kept."""
    from tunebook.formats._bundle import merge_into  # noqa: PLC0415 - help loads no format

    where = (store := book_of(options)).where
    merged = merge_into(store, records, dry_run=options.dry_run)
    counts = {name: len(problems) for name, problems in merged._asdict().items()}
    words = {"added": "new", "changed": "changed", "same": "already known", "kept_pinned": "kept because pinned here"}
    said = ", ".join(f"{counts[name]:,} {words[name]}" for name in counts if counts[name] or name == "added")
    does = "would merge" if options.dry_run else "merged"
    terminal.result({**counts, "book": where, "dry_run": options.dry_run}, f"{does} into {where}: {said}")


VERB = Verb("tunebook merge other_book.json --dry-run", _run, (*FILTERS, "dry-run", "json"), _arguments, __doc__)
