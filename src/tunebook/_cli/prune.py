"""`tunebook prune`: take away what nobody needs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from tunebook._cli._filters import (
    add_destructive,
    add_filters,
    add_json,
    age_s,
    age_text,
    book_of,
    filters_of,
    size_bytes,
    size_text,
)
from tunebook._cli._terminal import TextColumn, clean
from tunebook._cli._verb import DONE, NO, UsageError, Verb

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator, Sequence

    from tunebook._base.vocabulary import Problem
    from tunebook._cli._terminal import Terminal
    from tunebook.stores import Store
    from tunebook.stores._listing import Listed

_SHOWN: Final = 20
_COLUMNS: Final = (
    TextColumn("id", style="cyan"),
    TextColumn("kernel", give=2, style="bold", keeps_end=True),
    TextColumn("device", give=2, from_width=60),
    TextColumn("size", "right", from_width=50),
    TextColumn("why"),
)


def _arguments(parser: ArgumentParser) -> None:
    add_filters(parser)
    parser.add_argument("--unused", metavar="AGE", type=age_s, help="neither written nor read for this long: 90d")
    parser.add_argument("--max-size", metavar="SIZE", type=size_bytes, help="the longest unused, until SIZE is left")
    parser.add_argument(
        "--other-versions", action="store_true", help="tuned under versions that are not those installed here"
    )
    parser.add_argument("--pinned", action="store_true", help="pinned ones too")
    add_destructive(parser)
    add_json(parser)


def _run(options: Namespace, terminal: Terminal) -> int:
    criteria = (
        options.older_than,
        options.newer_than,
        options.unused,
        options.max_size,
        options.other_versions or None,
    )
    if all(criterion is None for criterion in criteria):
        raise UsageError("say what to prune by: --older-than, --unused, --max-size or --other-versions")
    store = book_of(options)
    doomed = dict(_doomed(options, store))
    if not doomed:
        if terminal.json:
            terminal.value({"removed": 0, "bytes": 0, "dry_run": options.dry_run, "entries": []})
        else:
            terminal.note(f"nothing to prune in {store.where}")
        return NO
    size = sum(listed.size_bytes for listed in doomed)
    what = f"{len(doomed):,} {'entry' if len(doomed) == 1 else 'entries'}, {size_text(size)}, from {store.where}"
    if not terminal.json:
        _table(doomed, terminal)
    agreed = options.dry_run or terminal.confirm(f"Remove {what}?", yes=options.yes)
    removed = 0 if options.dry_run or not agreed else sum(map(store.delete, _problems(list(doomed))))
    if terminal.json:
        entries = [{"id": listed.id, "kernel": listed.op, "why": why} for listed, why in doomed.items()]
        terminal.value({"removed": removed, "bytes": size, "dry_run": options.dry_run, "entries": entries})
    else:
        terminal.line(f"{'would remove' if options.dry_run else 'removed' if agreed else 'did not remove'} {what}")
    return DONE if agreed else NO


def _doomed(options: Namespace, store: Store) -> Iterator[tuple[Listed, str]]:
    """Yield the entries to go, with the reason; the ones in packs cannot go."""
    from tunebook.stores._listing import Catalogue  # noqa: PLC0415 - stores are loaded when one is opened

    filters, now_s = filters_of(options), time.time()
    own = [listed for listed in Catalogue(store).entries(filters.takes_kernel) if listed.where == store.where]
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
            why = "longest unused"
        elif options.other_versions and (other := _other_versions(listed)):
            why = other
        else:
            continue
        if options.pinned or not _is_pinned(listed):
            over -= listed.size_bytes
            yield listed, why


def _other_versions(listed: Listed) -> str:
    from tunebook._api.explain import versions_differ  # noqa: PLC0415 - as above
    from tunebook._cli._environment import environment_here  # noqa: PLC0415 - for this only

    record = listed.record()
    there = "" if record is None else record.head.environment
    return "; ".join(versions_differ(there, environment_here(there)))


def _is_pinned(listed: Listed) -> bool:
    record = listed.record()
    return record is not None and record.head.origin == "pinned"


def _problems(doomed: Sequence[Listed]) -> Iterator[Problem]:
    for listed in doomed:
        record = listed.record()
        if record is not None:
            yield record.problem


def _table(doomed: dict[Listed, str], terminal: Terminal) -> None:
    rows = [
        (listed.id[:8], clean(listed.op), clean(listed.device), size_text(listed.size_bytes), clean(why))
        for listed, why in list(doomed.items())[:_SHOWN]
    ]
    terminal.table(_COLUMNS, rows)
    if len(doomed) > _SHOWN:
        terminal.line(f"and {len(doomed) - _SHOWN:,} more", "dim")


VERB = Verb(
    "prune",
    "remove entries that nobody needs",
    "tunebook prune --unused 90d --dry-run",
    _arguments,
    _run,
    "Remove entries by age, use, size or version; what fits any of these goes, within --kernel and --device. A record "
    "counts as used when a program read it, as far as the mount keeps access times (most do, once a day; `tunebook "
    "doctor` says); looking at it with this command does not count. Versions are those of this Python installation. "
    "Asks before it removes anything; exits with 1 if there is nothing to remove, or you say no.",
)
