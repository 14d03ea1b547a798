"""Undo `tunebook pin`: the entry gets its measured winner again.

An entry without measurements is removed, so that the next call tunes. Exits with 1 if the entry is not pinned.
"""

from __future__ import annotations

from tunebook._cli._entries import SHORT_ID, add_entry, config_text, find_one, plain
from tunebook._cli._filters import add_options, book_of
from tunebook._cli._verb import DONE, NO, ArgumentParser, Namespace, Terminal, Verb
from tunebook._cli.pin import lock_problem, unpin
from tunebook.stores._listing import Catalogue


def _arguments(parser: ArgumentParser) -> None:
    add_entry(parser)
    add_options(parser, "dry-run", "json")


def _run(options: Namespace, terminal: Terminal) -> int:
    store = book_of(options)
    listed, record = find_one(Catalogue(store), options)
    name = f"{listed.op} {listed.id[:SHORT_ID]}"
    if record.head.origin != "pinned":
        terminal.note(f"{name} is not pinned; its origin is {record.head.origin!r}")
        return NO
    back = unpin(record)
    if not options.dry_run:
        with lock_problem(store, record.problem) as earlier:
            back = unpin(earlier or record)
            if back is None:
                store.delete(record.problem)
            else:
                store.put(back)
    config = None if back is None else back.head.config
    does = "would unpin" if options.dry_run else "unpinned"
    then = "removed, since nothing was measured" if back is None else f"{config_text(config)}, {back.head.origin}"
    terminal.result({"id": listed.id, "config": plain(config), "removed": back is None}, f"{does} {name}: now {then}")
    return DONE


VERB = Verb("tunebook unpin matmul", _arguments, _run, __doc__)
