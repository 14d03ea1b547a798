"""`tunebook unpin`: back to what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunebook._cli._filters import add_filters, add_json, book_of, filters_of
from tunebook._cli._verb import DONE, NO, Verb

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from tunebook._cli._terminal import Terminal


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("what", metavar="ID_OR_KERNEL", help="the beginning of an id, or a kernel with one entry")
    add_filters(parser)
    parser.add_argument("--dry-run", action="store_true", help="only say what it would do")
    add_json(parser)


def _run(options: Namespace, terminal: Terminal) -> int:
    from tunebook._cli._entries import SHORT_ID, config_text, find_one, plain  # noqa: PLC0415 - for what is found
    from tunebook._cli._pinning import held, unpinned  # noqa: PLC0415 - as above
    from tunebook.stores._listing import Catalogue  # noqa: PLC0415 - as above

    store = book_of(options)
    listed, record = find_one(Catalogue(store), options.what, filters_of(options))
    name = f"{listed.op} {listed.id[:SHORT_ID]}"
    if record.head.origin != "pinned":
        terminal.note(f"{name} is not pinned; it is {record.head.origin}")
        return NO
    back = unpinned(record)
    if not options.dry_run:
        with held(store, record.problem) as earlier:
            back = unpinned(earlier or record)
            if back is None:
                store.delete(record.problem)
            else:
                store.put(back)
    config = None if back is None else back.head.config
    if terminal.json:
        terminal.value({"id": listed.id, "config": plain(config), "removed": back is None})
        return DONE
    does = "would unpin" if options.dry_run else "unpinned"
    then = (
        "removed, since nothing was measured" if back is None else f"back to {config_text(config)}, {back.head.origin}"
    )
    terminal.line(f"{does} {name}: {then}")
    return DONE


VERB = Verb(
    "unpin",
    "go back to the measured winner",
    "tunebook unpin matmul",
    _arguments,
    _run,
    "Take back what `tunebook pin` did: the entry gets its measured winner again, or is removed if nothing was "
    "measured, so that the next call tunes. Exits with 1 if it is not pinned.",
)
