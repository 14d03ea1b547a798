"""`tunebook merge`: other books into this one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunebook._cli._filters import add_filters, add_json, book_of, existing_book, filters_of
from tunebook._cli._verb import DONE, Verb

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from tunebook._cli._terminal import Terminal
    from tunebook.formats._bundle import Merged


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "sources", metavar="BOOK", nargs="+", help="a directory, a .json file, a .db pack or an address"
    )
    add_filters(parser)
    parser.add_argument("--dry-run", action="store_true", help="only say what it would do")
    add_json(parser)


def _run(options: Namespace, terminal: Terminal) -> int:
    from tunebook.formats._bundle import merge_into  # noqa: PLC0415 - hashing and compression are for this only
    from tunebook.stores._listing import Catalogue  # noqa: PLC0415 - stores are loaded when one is opened

    store, filters = book_of(options), filters_of(options)
    records = (
        record
        for source in [existing_book(given) for given in options.sources]
        for listed in filters.pick(Catalogue(source))
        if (record := listed.record()) is not None
    )
    tell(merge_into(store, records, dry_run=options.dry_run), store.where, terminal, dry_run=options.dry_run)
    return DONE


def tell(merged: Merged, where: str, terminal: Terminal, *, dry_run: bool) -> None:
    """Say what merging did."""
    counts = {name: len(problems) for name, problems in merged._asdict().items()}
    if terminal.json:
        terminal.value({**counts, "book": where, "dry_run": dry_run})
        return
    words = {"added": "new", "changed": "changed", "same": "known already", "kept_pinned": "pinned here, and so kept"}
    said = ", ".join(f"{counts[name]:,} {words[name]}" for name in counts if counts[name] or name == "added")
    terminal.line(f"{'would merge' if dry_run else 'merged'} into {where}: {said}")


VERB = Verb(
    "merge",
    "take other books' entries into this one",
    "tunebook merge other_book.json --dry-run",
    _arguments,
    _run,
    "Take entries of other books into this one: measurements of both are kept, the better founded choice stands, and "
    "what is pinned here stays. Nothing is lost if somebody tunes meanwhile.",
)
