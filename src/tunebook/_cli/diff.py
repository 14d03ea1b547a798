"""`tunebook diff`: in what two books, or two entries, differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tunebook._cli._filters import add_filters, add_json, book_of, existing_book, filters_of
from tunebook._cli._terminal import TextColumn, clean
from tunebook._cli._verb import DONE, NO, Verb

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Problem
    from tunebook._cli._filters import Filters
    from tunebook._cli._terminal import Terminal
    from tunebook.stores import Store

_COLUMNS: Final = (
    TextColumn("", style="bold"),
    TextColumn("id", style="cyan"),
    TextColumn("kernel", give=2, style="bold", keeps_end=True),
    TextColumn("device", give=4, from_width=90),
    TextColumn("call", give=4, from_width=70),
    TextColumn("first", give=2),
    TextColumn("second", give=2),
)
_SHOWN: Final = 50
_MARKS: Final = {"removed": "-", "added": "+", "changed": "~"}


class _Change(NamedTuple):
    """A problem that two books do not agree on."""

    kind: str
    problem: Problem
    first: Record | None
    second: Record | None


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("first", metavar="BOOK_OR_ID", help="a book, or an entry of --book")
    parser.add_argument("second", metavar="BOOK_OR_ID", nargs="?", help="the other; by default --book")
    add_filters(parser)
    add_json(parser)


def _run(options: Namespace, terminal: Terminal) -> int:
    first, second = options.first, options.second
    if second is not None and not any(_is_book(given) for given in (first, second)):
        return _entries(options, terminal)
    here = existing_book(first)
    there = book_of(options) if second is None else existing_book(second)
    return _books(here, there, filters_of(options), terminal)


def _is_book(given: str) -> bool:
    return "://" in given or "/" in given or Path(given).suffix in {".json", ".db"} or Path(given).exists()


# -------------------------------------------------------------------------------------------------------------- books


def _books(first: Store, second: Store, filters: Filters, terminal: Terminal) -> int:
    changes = list(_changes(first, second, filters))
    if terminal.json:
        terminal.values(map(_as_json, changes))
    elif not changes:
        terminal.line("the same configurations in both", "green")
    else:
        _table(changes, terminal)
    return NO if changes else DONE


def _changes(first: Store, second: Store, filters: Filters) -> Iterator[_Change]:
    from tunebook.stores._listing import Catalogue  # noqa: PLC0415 - stores are loaded when one is opened

    ours = {listed.id: listed for listed in filters.pick(Catalogue(first))}
    theirs = {listed.id: listed for listed in filters.pick(Catalogue(second))}
    for identifier in sorted(ours.keys() | theirs.keys()):
        one, other = (side[identifier].record() if identifier in side else None for side in (ours, theirs))
        if one is None and other is not None:
            yield _Change("added", other.problem, None, other)
        elif one is not None and other is None:
            yield _Change("removed", one.problem, one, None)
        elif one is not None and other is not None and one.head.config != other.head.config:
            yield _Change("changed", one.problem, one, other)


def _table(changes: list[_Change], terminal: Terminal) -> None:
    from tunebook._cli._entries import SHORT_ID, config_text, key_text  # noqa: PLC0415 - as above
    from tunebook.stores import problem_id  # noqa: PLC0415 - as above

    rows = []
    for change in changes[:_SHOWN]:
        problem = change.problem
        sides = ("" if record is None else config_text(record.head.config) for record in (change.first, change.second))
        names = clean(problem.op), clean(problem.device), key_text(problem.call_key)
        rows.append((_MARKS[change.kind], problem_id(problem)[:SHORT_ID], *names, *sides))
    terminal.table(_COLUMNS, rows)
    terminal.line()
    counts = (f"{sum(change.kind == kind for change in changes):,} {kind}" for kind in _MARKS)
    shown = f"; {_SHOWN} are shown, --json has all" if len(changes) > _SHOWN else ""
    terminal.line(f"{', '.join(counts)}{shown}", "dim")


def _as_json(change: _Change) -> dict[str, object]:
    from tunebook._cli._entries import plain  # noqa: PLC0415 - as above
    from tunebook.stores import problem_id  # noqa: PLC0415 - as above

    problem = change.problem
    sides = {
        name: None if record is None else plain(record.head.config)
        for name, record in (("first", change.first), ("second", change.second))
    }
    named = {"id": problem_id(problem), "kernel": problem.op, "device": problem.device, "call_key": problem.call_key}
    return {"change": change.kind, **named, **sides}


# ------------------------------------------------------------------------------------------------------------ entries


def _entries(options: Namespace, terminal: Terminal) -> int:
    from tunebook._cli._entries import find_one  # noqa: PLC0415 - as above
    from tunebook.stores._listing import Catalogue  # noqa: PLC0415 - as above

    catalogue, filters = Catalogue(book_of(options)), filters_of(options)
    first, second = (find_one(catalogue, what, filters)[1] for what in (options.first, options.second))
    found = list(_differences(first, second))
    if terminal.json:
        terminal.value([{"what": what, "difference": text} for what, text in found])
    elif found:
        terminal.fields((what, clean(text)) for what, text in found)
    else:
        terminal.line("the same", "green")
    return NO if found else DONE


def _differences(first: Record, second: Record) -> Iterator[tuple[str, str]]:
    """Yield in what two entries differ, the first being "there" and the second "here"."""
    from tunebook._api.explain import versions_differ  # noqa: PLC0415 - as above
    from tunebook._cli._entries import config_text, seconds_of  # noqa: PLC0415 - as above
    from tunebook._keys.call_key import explain_difference  # noqa: PLC0415 - as above
    from tunebook._tuning.progress import seconds_text  # noqa: PLC0415 - as above

    one, other = first.head, second.head
    pairs = [("kernel", one.problem.op, other.problem.op), ("device", one.problem.device, other.problem.device)]
    pairs += [("config", config_text(one.config), config_text(other.config)), ("origin", one.origin, other.origin)]
    times = ["not measured" if (s := seconds_of(r)) is None else seconds_text(s) for r in (first, second)]
    yield from ((what, f"{a} there, {b} here") for what, a, b in [*pairs, ("time", *times)] if a != b)
    yield from (("call", line) for line in explain_difference(one.problem.call_key, other.problem.call_key))
    yield from (("version", line) for line in versions_differ(one.environment, other.environment))


VERB = Verb(
    "diff",
    "compare two books, or two entries",
    "tunebook diff other_book.json",
    _arguments,
    _run,
    "Compare two books by the configurations in them, or two entries field by field: there is the first, here the "
    "second. Exits with 1 if they differ.",
)
