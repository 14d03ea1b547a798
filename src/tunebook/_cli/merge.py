"""Merge the entries of other books into this one.

The measurements of both books are kept, the choice with the better evidence wins, and entries that are pinned here stay
pinned. It is safe while programs tune into the same book.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunebook._cli._filters import FILTERS, add_options, book_of, existing_book, filters_of
from tunebook._cli._verb import DONE, ArgumentParser, Namespace, Terminal, Verb
from tunebook.formats._bundle import merge_into

if TYPE_CHECKING:
    from tunebook.formats._bundle import Merged


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("sources", metavar="BOOK", nargs="+", help="a directory, a .json file, a .db pack or a URL")
    add_options(parser, *FILTERS, "dry-run", "json")


def _run(options: Namespace, terminal: Terminal) -> int:
    store, filters = book_of(options), filters_of(options)
    sources = [existing_book(given) for given in options.sources]
    records = (record for source in sources for record in filters.records(source))
    tell(merge_into(store, records, dry_run=options.dry_run), store.where, terminal, dry_run=options.dry_run)
    return DONE


def tell(merged: Merged, where: str, terminal: Terminal, *, dry_run: bool) -> None:
    """Print how many entries a merge added, changed and kept."""
    counts = {name: len(problems) for name, problems in merged._asdict().items()}
    words = {"added": "new", "changed": "changed", "same": "already known", "kept_pinned": "kept because pinned here"}
    said = ", ".join(f"{counts[name]:,} {words[name]}" for name in counts if counts[name] or name == "added")
    does = "would merge" if dry_run else "merged"
    terminal.result({**counts, "book": where, "dry_run": dry_run}, f"{does} into {where}: {said}")


VERB = Verb("tunebook merge other_book.json --dry-run", _arguments, _run, __doc__)
