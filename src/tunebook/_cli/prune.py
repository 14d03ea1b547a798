"""Remove entries by age, use, size or version, within --kernel and --device.

An entry is removed if it matches any of the criteria. It counts as used when a program reads it, if the mount keeps
access times (most do, once a day; `tunebook doctor` tells); reading with this command does not count. Versions are
compared with this Python installation. Asks before it removes anything; exits with 1 if there is nothing to remove, or
you say no.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from tunebook._api.versions import environment_here, versions_differ
from tunebook._base.errors import clean
from tunebook._cli._entries import ID, KERNEL, SHORT_ID
from tunebook._cli._filters import FILTERS, age_s, age_text, book_to_read, filters_of, size_bytes, size_text
from tunebook._cli._terminal import TextColumn, count_text
from tunebook._cli._verb import DONE, NO, ArgumentParser, Namespace, Terminal, UsageError, Verb
from tunebook.stores._listing import Catalogue

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tunebook.stores import Store
    from tunebook.stores._listing import Listed

_SHOWN: Final = 20
_COLUMNS: Final = (
    ID,
    KERNEL,
    TextColumn("device", give=2, from_width=60),
    TextColumn("size", "right", from_width=50),
    TextColumn("why"),
)


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--unused", metavar="AGE", type=age_s, help="remove entries not read or written for AGE: 90d")
    text = "remove least recently used entries until the book is at most SIZE"
    parser.add_argument("--max-size", metavar="SIZE", type=size_bytes, help=text)
    text = "remove entries that were tuned with other versions than installed here"
    parser.add_argument("--other-versions", action="store_true", help=text)
    add_removal(parser)


def add_removal(parser: ArgumentParser) -> None:
    """Add the options of a verb that removes entries."""
    parser.add_argument("--pinned", action="store_true", help="remove pinned entries too")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def _run(options: Namespace, terminal: Terminal) -> int:
    criteria = (options.older_than, options.newer_than, options.unused, options.max_size)
    if all(criterion is None for criterion in criteria) and not options.other_versions:
        raise UsageError("add a criterion: --older-than, --newer-than, --unused, --max-size or --other-versions")
    store = book_to_read(options)
    return remove(store, dict(_doomed(options, store)), options, terminal)


def remove(
    store: Store, doomed: Mapping[Listed, str], options: Namespace, terminal: Terminal, *, ask: bool = True
) -> int:
    """Remove entries, each with its reason, and print them; asks before, unless `--yes` was given."""
    size = sum(listed.size_bytes for listed in doomed)
    entries = f"{count_text(len(doomed), 'entry', 'entries')}, {size_text(size)}, from {store.where}"
    if doomed and not terminal.json:
        shown = list(doomed.items())[:_SHOWN]
        texts = ((e.id[:SHORT_ID], e.op, e.device, size_text(e.size_bytes), why) for e, why in shown)
        terminal.table(_COLUMNS, (tuple(map(clean, row)) for row in texts))
        if len(doomed) > _SHOWN:
            terminal.line(f"and {len(doomed) - _SHOWN:,} more", "dim")
    agreed = bool(doomed) and (options.dry_run or terminal.confirm(f"Remove {entries}?", yes=options.yes or not ask))
    records = [] if options.dry_run or not agreed else [listed.record() for listed in doomed]
    removed = sum(store.delete(record.problem) for record in records if record is not None)
    if terminal.json:
        listing = [{"id": listed.id, "kernel": listed.op, "why": why} for listed, why in doomed.items()]
        terminal.value({"removed": removed, "bytes": size, "dry_run": options.dry_run, "entries": listing})
    elif doomed:
        terminal.line(f"{'would remove' if options.dry_run else 'removed' if agreed else 'did not remove'} {entries}")
    else:
        terminal.note(f"nothing to prune in {store.where}")
    return DONE if agreed else NO


def _doomed(options: Namespace, store: Store) -> Iterator[tuple[Listed, str]]:
    """Yield the entries to remove, with the reason; entries in packs cannot be removed."""
    filters, now_s, catalogue = filters_of(options), time.time(), Catalogue(store)
    filters.check(catalogue)
    own = [listed for listed in catalogue.entries(filters.takes_kernel) if listed.where == store.where]
    own.sort(key=lambda listed: (listed.used_s, listed.id))
    over = 0 if options.max_size is None else sum(listed.size_bytes for listed in own) - options.max_size
    by_age = options.older_than is not None or options.newer_than is not None
    for listed in own:
        unused_s = now_s - listed.used_s
        if by_age and filters.takes(listed):
            why = f"written {age_text(now_s - listed.written_s)} ago"
        elif options.unused is not None and unused_s > options.unused:
            why = f"unused for {age_text(unused_s)}"
        elif over > 0:
            why = "least recently used"
        elif options.other_versions and (other := _other_versions(listed)):
            why = other
        else:
            continue
        record = listed.record()
        if options.pinned or record is None or record.head.origin != "pinned":
            over -= listed.size_bytes
            yield listed, why


def _other_versions(listed: Listed) -> str:
    record = listed.record()
    there = "" if record is None else record.head.environment
    return "; ".join(versions_differ(there, environment_here(there)))


VERB = Verb("tunebook prune --unused 90d --dry-run", _run, (*FILTERS, "dry-run", "json"), _arguments, __doc__)
