"""Compare two books by their configurations, or two entries field by field.

"there" is the first book or entry, "here" the second. Exits with 1 if they differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from tunebook._api.versions import versions_differ
from tunebook._base.errors import clean
from tunebook._cli._entries import ID, KERNEL, SHORT_ID, config_text, find_one, key_text, named, plain, seconds_of
from tunebook._cli._filters import FILTERS, book_to_read, existing_book, filters_of
from tunebook._cli._terminal import TextColumn
from tunebook._cli._verb import DONE, NO, ArgumentParser, Namespace, Terminal, Verb
from tunebook._keys.call_key import explain_difference
from tunebook._selection.recorded_decision import names_in
from tunebook._tuning.progress import seconds_text
from tunebook.stores import problem_id
from tunebook.stores._listing import Catalogue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Problem
    from tunebook._cli._filters import Filters
    from tunebook.stores import Store

_COLUMNS: Final = (
    TextColumn("", style="bold"),
    ID,
    KERNEL,
    TextColumn("device", give=4, from_width=90),
    TextColumn("call", give=4, from_width=70),
    TextColumn("first", give=2),
    TextColumn("second", give=2),
)
_SHOWN: Final = 50
# Kind, problem, and the record in each book.
_Change: TypeAlias = "tuple[str, Problem, tuple[Record | None, Record | None]]"
_MARKS: Final = {"removed": "-", "added": "+", "changed": "~"}


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("first", metavar="BOOK_OR_ID", help="a book, or an entry of --book")
    parser.add_argument("second", metavar="BOOK_OR_ID", nargs="?", help="the other book or entry; default: --book")


def _run(options: Namespace, terminal: Terminal) -> int:
    first, second = options.first, options.second
    words = (first, second or "/")  # without a second word, the first is a book
    if not any("/" in word or Path(word).suffix in {".json", ".db"} or Path(word).exists() for word in words):
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


def _changes(first: Store, second: Store, filters: Filters) -> Iterator[_Change]:
    ours, theirs = ({e.id: e for e in filters.pick(Catalogue(store))} for store in (first, second))
    for identifier in sorted(ours.keys() | theirs.keys()):
        one, other = (side[identifier].record() if identifier in side else None for side in (ours, theirs))
        if one is None and other is not None:
            yield "added", other.problem, (None, other)
        elif one is not None and other is None:
            yield "removed", one.problem, (one, None)
        elif one is not None and other is not None and one.head.config != other.head.config:
            yield "changed", one.problem, (one, other)


def _table(changes: list[_Change], terminal: Terminal) -> None:
    rows = []
    for kind, problem, records in changes[:_SHOWN]:
        sides = ("" if record is None else config_text(record.head.config, names_in(record)) for record in records)
        names = clean(problem.op), clean(problem.device), key_text(problem.call_key)
        rows.append((_MARKS[kind], problem_id(problem)[:SHORT_ID], *names, *sides))
    terminal.table(_COLUMNS, rows)
    counts = (f"{sum(change[0] == kind for change in changes):,} {kind}" for kind in _MARKS)
    shown = f"; only {_SHOWN} are shown, --json prints all" if len(changes) > _SHOWN else ""
    terminal.line(f"\n{', '.join(counts)}{shown}", "dim")


def _entries(options: Namespace, terminal: Terminal) -> int:
    """Print each field in which two entries differ, with both values."""
    catalogue = Catalogue(book_to_read(options))
    records = [find_one(catalogue, options, word)[1] for word in (options.first, options.second)]
    one, other = (record.head for record in records)
    pairs = [("kernel", one.problem.op, other.problem.op), ("device", one.problem.device, other.problem.device)]
    first, second = (config_text(record.head.config, names_in(record)) for record in records)
    pairs += [("config", first, second), ("origin", one.origin, other.origin)]
    times = ["not measured" if (s := seconds_of(record)) is None else seconds_text(s) for record in records]
    found = [(field, f"{a} there, {b} here") for field, a, b in [*pairs, ("time", *times)] if a != b]
    found += (("call", line) for line in explain_difference(one.problem.call_key, other.problem.call_key))
    found += (("version", line) for line in versions_differ(one.environment, other.environment))
    if terminal.json:
        terminal.value([{"what": field, "difference": text} for field, text in found])
    elif found:
        terminal.fields((field, clean(text)) for field, text in found)
    else:
        terminal.line("the same", "green")
    return NO if found else DONE


VERB = Verb("tunebook diff other_book.json", _run, (*FILTERS, "json"), _arguments, __doc__)
