"""Undo `tunebook pin`: the entry gets its measured winner again.

An entry without measurements is removed, so that the next call tunes. Exits with 1 if the entry is not pinned.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tunebook._base.record_format import Record
from tunebook._cli._entries import SHORT_ID, config_text, find_one, plain
from tunebook._cli._filters import FILTERS, book_to_read
from tunebook._cli._verb import DONE, NO, Namespace, Terminal, Verb
from tunebook._cli.pin import DECISION, add_entry, lock_problem
from tunebook._selection.recorded_decision import names_in, verdict_of
from tunebook.stores._listing import Catalogue

# For a decision whose kernel is unknown here. It matches no kernel, so that the next call decides again from the stored
# measurements, which costs nothing.
_NO_CHECKSUM: Final = "unpinned"


def _run(options: Namespace, terminal: Terminal) -> int:
    store = book_to_read(options)
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
    chosen = config_text(config, names_in(record))
    then = "removed, since nothing was measured" if back is None else f"{chosen}, {back.head.origin}"
    terminal.result({"id": listed.id, "config": plain(config), "removed": back is None}, f"{does} {name}: now {then}")
    return DONE


def unpin(record: Record) -> Record | None:
    """Return a record with the winner of its measurements, else with its decision before the pin, else None."""
    head, body = record.head, record.body
    facts = dict(body.provenance)
    before = facts.pop("instead_of", None)
    earlier = before if isinstance(before, dict) else {}
    measured = facts.pop("measured", None)
    if measured is not None:
        facts["when"] = measured
    verdict = verdict_of(record)
    if verdict is not None and facts.get("interrupted") is not True:  # which had chosen nothing
        winner = verdict.winner.measurement
        same = winner.config == earlier.get("config") and winner.environment == earlier.get("environment")
        checksum = str(earlier.get("checksum")) if same else _NO_CHECKSUM
        back = replace(head, config=winner.config, origin="tuned", checksum=checksum, environment=winner.environment)
    elif "config" in earlier:
        back = replace(head, **{name: earlier.get(name, "") for name in DECISION})  # type: ignore[arg-type] # as pinned
    else:
        return None
    return Record(back, replace(body, provenance=facts))


VERB = Verb("tunebook unpin matmul", _run, (*FILTERS, "dry-run", "json"), add_entry, __doc__)
