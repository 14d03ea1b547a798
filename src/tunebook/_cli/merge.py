"""Merge the entries of other books into this one.

The measurements of all books are kept. --prefer says which choice stands if books differ: of the entry that was tuned
more often (generation), the latest (newer), the one with the smaller time (faster), the one that most of the books
have, this book among them (majority), or always this book's (mine). Entries that are pinned here stay pinned. It is
safe while programs tune into the same book. If TUNEBOOK_SIGNING_KEY is set, entries of a shared book must be signed
with that key, and a book on disk, which has no signatures, needs --allow-unsigned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tunebook._base.environment_variables import signing_key
from tunebook._base.errors import CodecError
from tunebook._cli._changes import write_changes
from tunebook._cli._entries import named, plain
from tunebook._cli._filters import FILTERS, book_of, existing_book, filters_of
from tunebook._cli._verb import DONE, ArgumentParser, Namespace, Terminal, Verb
from tunebook.stores import is_address

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Problem
    from tunebook.formats._bundle import Merged
    from tunebook.stores import Store

ALLOW_UNSIGNED: Final = "accept entries without a valid signature"
_SHOWN: Final = 20
_RULES: Final = ("generation", "newer", "faster", "majority", "mine")


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("sources", metavar="BOOK", nargs="+", help="a directory, a .json file, a .db pack or a URL")
    parser.add_argument("--allow-unsigned", action="store_true", help=ALLOW_UNSIGNED)
    add_prefer(parser)


def add_prefer(parser: ArgumentParser) -> None:
    """Add the option --prefer."""
    text = "which choice stands if books differ; see `tunebook merge --help` (default: generation)"
    parser.add_argument("--prefer", choices=_RULES, default=_RULES[0], help=text)


def _run(options: Namespace, terminal: Terminal) -> int:
    filters = filters_of(options)
    refuse_unsigned([given for given in options.sources if not is_address(given)], options)
    sources = [existing_book(given) for given in options.sources]
    merge_records((record for source in sources for record in filters.records(source)), options, terminal)
    return DONE


def refuse_unsigned(sources: Sequence[str], options: Namespace) -> None:
    """Raise `CodecError` if there are sources without signatures though a key is set, and the user did not allow it."""
    # Not only for bundles: else the sender of a file would choose, by its suffix, whether its signature is checked.
    if sources and signing_key() is not None and not options.allow_unsigned:
        raise CodecError(
            f"{sources[0]} is not signed, and a key is set. Import a bundle or pack that was written with the same "
            "TUNEBOOK_SIGNING_KEY, or say that its origin does not matter: --allow-unsigned"
        )


def merge_records(records: Iterable[Record], options: Namespace, terminal: Terminal) -> None:
    """Merge records into the book, and print how many entries this added, changed and kept; a preview names them."""
    from tunebook.formats._bundle import merge_into  # noqa: PLC0415 - help loads no format

    where, records = (store := book_of(options)).where, list(records)
    merged = merge_into(store, records, dry_run=options.dry_run, prefer=options.prefer)
    changes = list(_changes(store, records, merged, options)) if options.dry_run else []
    if changes and not terminal.json:
        write_changes(changes[:_SHOWN], terminal)
        more = len(changes) - _SHOWN
        terminal.line(f"and {more:,} more; --json prints all\n" if more > 0 else "", "dim")
    counts = {name: len(problems) for name, problems in merged._asdict().items()}
    words = {"added": "new", "changed": "changed", "same": "already known", "kept_pinned": "kept because pinned here"}
    said = ", ".join(f"{counts[name]:,} {words[name]}" for name in counts if counts[name] or name == "added")
    does = "would merge" if options.dry_run else "merged"
    entries = [
        {"change": kind, **named(problem), "config": plain(after.head.config)} for kind, problem, (_, after) in changes
    ]
    facts = {"book": where, "dry_run": options.dry_run, **({"entries": entries} if options.dry_run else {})}
    terminal.result({**counts, **facts}, f"{does} into {where}: {said}")


def _changes(
    store: Store, records: Sequence[Record], merged: Merged, options: Namespace
) -> Iterator[tuple[str, Problem, tuple[Record | None, Record]]]:
    """Yield the entries that a merge adds or changes, as they are and as they would be."""
    from tunebook.formats._bundle import merge_all  # noqa: PLC0415 - help loads no format

    theirs: dict[Problem, list[Record]] = {}
    for record in records:
        theirs.setdefault(record.problem, []).append(record)
    for kind, problems in (("added", merged.added), ("changed", merged.changed)):
        for problem in problems:
            mine = store.get(problem)
            yield kind, problem, (mine, merge_all(mine, theirs[problem], options.prefer))


VERB = Verb("tunebook merge other_book.json --dry-run", _run, (*FILTERS, "dry-run", "json"), _arguments, __doc__)
