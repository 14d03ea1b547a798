"""Compare two books by their configurations, or two entries field by field.

"-" marks an entry that only the first book has, "+" one that only the second has. Exits with 1 if they differ.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tunebook._api.versions import versions_differ
from tunebook._base.errors import clean
from tunebook._cli._changes import MARKS, EntryChange, write_changes
from tunebook._cli._entries import SHORT_ID, config_text, find_one, named, plain, seconds_of
from tunebook._cli._filters import FILTERS, book_to_read, existing_book, filters_of
from tunebook._cli._verb import DONE, NO, ArgumentParser, Namespace, Terminal, UsageError, Verb
from tunebook._keys.call_key import explain_difference
from tunebook._selection.recorded_decision import names_in
from tunebook._tuning.progress import seconds_text
from tunebook.stores._listing import Catalogue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tunebook._cli._filters import Filters
    from tunebook.stores import Store

_SHOWN: Final = 50


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("first", metavar="BOOK_OR_ID", help="a book, or an entry of --book")
    parser.add_argument("second", metavar="BOOK_OR_ID", nargs="?", help="the other book or entry; default: --book")


def _run(options: Namespace, terminal: Terminal) -> int:
    first, second = options.first, options.second
    given = [word for word in (first, second) if word is not None]
    if not any("/" in word or Path(word).suffix in {".json", ".db"} or Path(word).exists() for word in given):
        if second is None:
            raise UsageError(f"no book at {first}; to compare two entries, name both: tunebook diff {first} ID")
        return _entries(options, terminal)
    here = existing_book(first)
    there = book_to_read(options) if second is None else existing_book(second)
    changes = list(_changes(here, there, filters_of(options)))
    if terminal.json:
        configs = ([None if r is None else plain(r.head.config) for r in records] for _, _, records in changes)
        pairs = zip(changes, configs, strict=True)
        terminal.values({"change": c[0], **named(c[1]), "first": a, "second": b} for c, (a, b) in pairs)
    elif not changes:
        terminal.line("both have the same configurations", "green")
    else:
        _table(changes, terminal)
    return NO if changes else DONE


def _changes(first: Store, second: Store, filters: Filters) -> Iterator[EntryChange]:
    ours, theirs = ({e.id: e for e in filters.pick(Catalogue(store))} for store in (first, second))
    for identifier in sorted(ours.keys() | theirs.keys()):
        one, other = (side[identifier].record() if identifier in side else None for side in (ours, theirs))
        if one is None and other is not None:
            yield "added", other.problem, (None, other)
        elif one is not None and other is None:
            yield "removed", one.problem, (one, None)
        elif one is not None and other is not None and one.head.config != other.head.config:
            yield "changed", one.problem, (one, other)


def _table(changes: list[EntryChange], terminal: Terminal) -> None:
    write_changes(changes[:_SHOWN], terminal)
    counts = (f"{sum(change[0] == kind for change in changes):,} {kind}" for kind in MARKS)
    shown = f"; only {_SHOWN} are shown, --json prints all" if len(changes) > _SHOWN else ""
    terminal.line(f"\n{', '.join(counts)}{shown}", "dim")


def _entries(options: Namespace, terminal: Terminal) -> int:
    """Print each field in which two entries differ, with both values."""
    catalogue = Catalogue(book_to_read(options))
    found = [find_one(catalogue, options, word) for word in (options.first, options.second)]
    records = [record for _, record in found]
    names = [listed.id[:SHORT_ID] for listed, _ in found]
    one, other = (record.head for record in records)
    pairs = [("kernel", one.problem.op, other.problem.op), ("device", one.problem.device, other.problem.device)]
    first, second = (config_text(record.head.config, names_in(record)) for record in records)
    pairs += [("config", first, second), ("origin", one.origin, other.origin)]
    times = ["not measured" if (s := seconds_of(record)) is None else seconds_text(s) for record in records]
    lines = [(field, f"{a} there, {b} here") for field, a, b in [*pairs, ("time", *times)] if a != b]
    lines += (("call", line) for line in explain_difference(one.problem.call_key, other.problem.call_key))
    lines += (("version", line) for line in versions_differ(one.environment, other.environment))
    # "there" and "here" are for an entry beside a call; both entries are here.
    differ = [
        (field, re.sub(r" there, (.*) here$", rf" in {names[0]}, \1 in {names[1]}", line)) for field, line in lines
    ]
    if terminal.json:
        terminal.value([{"what": field, "difference": text} for field, text in differ])
    elif differ:
        terminal.fields((field, clean(text)) for field, text in differ)
    else:
        terminal.line("the same", "green")
    return NO if differ else DONE


VERB = Verb("tunebook diff other_book.json", _run, (*FILTERS, "json"), _arguments, __doc__)
