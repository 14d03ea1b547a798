"""Move entries between books and files, and remove them: merge, export, import, prune."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tunebook._api.versions import environment_here, versions_differ
from tunebook._base.environment_variables import signing_key
from tunebook._cli._entries import ID, KERNEL, SHORT_ID
from tunebook._cli._filters import FILTERS, age_s, age_text, book_of, existing_book, filters_of, size_bytes, size_text
from tunebook._cli._terminal import TextColumn, clean, count_text
from tunebook._cli._verb import DONE, NO, ArgumentParser, Namespace, Terminal, UsageError, Verb
from tunebook.formats import FORMATS, read, write
from tunebook.stores import FILE_ENGINES, open_store
from tunebook.stores._listing import Catalogue, measured_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tunebook._base.record_format import Record
    from tunebook.stores import Store
    from tunebook.stores._listing import Listed

_ENGINES: Final = {engine.name: engine for engine in FILE_ENGINES.values()}
OWN: Final = ("bundle", *_ENGINES)
_SHOWN: Final = 20
_COLUMNS: Final = (
    ID,
    KERNEL,
    TextColumn("device", give=2, from_width=60),
    TextColumn("size", "right", from_width=50),
    TextColumn("why"),
)


def _merge_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("sources", metavar="BOOK", nargs="+", help="a directory, a .json file, a .db pack or a URL")


def _merge(options: Namespace, terminal: Terminal) -> int:
    """Merge the entries of other books into this one.

    The measurements of both books are kept, the choice with the better evidence wins, and entries that are pinned here
    stay pinned. It is safe while programs tune into the same book.
    """
    filters = filters_of(options)
    sources = [existing_book(given) for given in options.sources]
    _take((record for source in sources for record in filters.records(source)), options, terminal)
    return DONE


def _take(records: Iterable[Record], options: Namespace, terminal: Terminal) -> None:
    """Merge records into the book, and print how many entries this added, changed and kept."""
    from tunebook.formats._bundle import merge_into  # noqa: PLC0415 - help loads no format

    where = (store := book_of(options)).where
    merged = merge_into(store, records, dry_run=options.dry_run)
    counts = {name: len(problems) for name, problems in merged._asdict().items()}
    words = {"added": "new", "changed": "changed", "same": "already known", "kept_pinned": "kept because pinned here"}
    said = ", ".join(f"{counts[name]:,} {words[name]}" for name in counts if counts[name] or name == "added")
    does = "would merge" if options.dry_run else "merged"
    terminal.result({**counts, "book": where, "dry_run": options.dry_run}, f"{does} into {where}: {said}")


def _add_format(parser: ArgumentParser) -> None:
    names = f"{', '.join(OWN)}; of other tools: {', '.join(FORMATS)}"
    parser.add_argument("--format", metavar="NAME", help=f"{names}; default: inferred from the file name")


def _format_of(name: str | None, path: Path) -> str:
    if name is not None and name not in (*OWN, *FORMATS):
        raise UsageError(f"unknown format {name!r}; choose one of {', '.join((*OWN, *FORMATS))}")
    engine = FILE_ENGINES.get(path.suffix.lower())
    return name or ("bundle" if engine is None else engine.name)


def _export_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="file to write; .db makes a pack, .json a readable book")
    _add_format(parser)
    parser.add_argument("--unsigned", action="store_true", help="do not sign the bundle, even if a key is set")


def _export(options: Namespace, terminal: Terminal) -> int:
    """Write entries to one file.

    The file is a bundle for `tunebook import` on another machine (signed if TUNEBOOK_SIGNING_KEY is set), a pack to
    ship inside a wheel, a readable .json book, or another tool's format. Exits with 1 if no entry matches.
    """
    path = Path(options.file).expanduser()
    name = _format_of(options.format, path)
    store = book_of(options)
    records = list(filters_of(options).records(store))
    if not records:
        terminal.note(f"nothing to export in {store.where}")
        return NO
    key = None if options.unsigned or name != "bundle" else signing_key()
    if name == "bundle":
        from tunebook.formats._bundle import export_bundle  # noqa: PLC0415 - help loads no format

        export_bundle(records, path, key=key)
    elif name not in OWN:
        write(name, records, path)
    elif _ENGINES[name].writable and path.exists():  # a pack is replaced; a book would mix its entries with these
        raise UsageError(f"{path} exists; remove it first, or add to it: tunebook merge $(tunebook path) --book {path}")
    else:
        _ENGINES[name].create(path, records)
    terminal.result(
        {"file": str(path), "format": name, "entries": len(records), "signed": key is not None},
        f"wrote {count_text(len(records), 'entry', 'entries')} to {path} ({name}{', signed' if key else ''})",
    )
    return DONE


def _import_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a bundle, a pack, a book, or another tool's file")
    _add_format(parser)
    parser.add_argument("--as-kernel", metavar="NAME", default="", help="the kernel, if the file does not name it")
    parser.add_argument("--as-device", metavar="NAME", default="", help="the device, if the file does not name it")
    parser.add_argument("--allow-unsigned", action="store_true", help="accept a bundle without a valid signature")


def _import(options: Namespace, terminal: Terminal) -> int:
    """Merge the entries of a file into this book.

    The file is a bundle, a pack, a book or another tool's file. If TUNEBOOK_SIGNING_KEY is set, a bundle must be signed
    with that key.
    """
    from tunebook.formats._format import UNKNOWN_DEVICE  # noqa: PLC0415 - help loads no format

    path, filters = Path(options.file).expanduser(), filters_of(options)
    if not path.exists():
        raise UsageError(f"no file {path}")
    # The entries of a file were not written into a book yet: their age is the age of their measurements.
    aged = (record for record in _read(path, options) if filters.takes_age(measured_s(record)))
    records = [record for record in aged if filters.takes_kernel(record.problem.op, record.problem.device)]
    if not records:
        terminal.note(f"no matching entry in {path}")
        return NO
    _take(records, options, terminal)
    if terminal.json:
        return DONE
    if unnamed := sum(record.problem.device == UNKNOWN_DEVICE for record in records):
        why = "without a device, because the file does not name it: add --as-device, as printed by `tunebook doctor`"
        terminal.line(f"  {unnamed:,} {why}", "yellow")
    environments = [record.head.environment for record in records]
    reasons = Counter(reason for there in environments for reason in versions_differ(there, environment_here(there)))
    for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
        terminal.line(f"  {count:,} will be verified at their first call: {reason}", "dim")
    return DONE


def _read(path: Path, options: Namespace) -> Iterable[Record]:
    name = _format_of(options.format, path)
    if name == "bundle":
        from tunebook.formats._bundle import import_bundle  # noqa: PLC0415 - help loads no format

        return import_bundle(path, key=signing_key(), allow_unsigned=options.allow_unsigned).records
    if name in OWN:
        return open_store(path).items()
    return read(name, path, op=options.as_kernel, device=options.as_device)


def _prune_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--unused", metavar="AGE", type=age_s, help="remove entries not read or written for AGE: 90d")
    text = "remove least recently used entries until the book is at most SIZE"
    parser.add_argument("--max-size", metavar="SIZE", type=size_bytes, help=text)
    text = "remove entries that were tuned with other versions than installed here"
    parser.add_argument("--other-versions", action="store_true", help=text)
    parser.add_argument("--pinned", action="store_true", help="remove pinned entries too")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def _prune(options: Namespace, terminal: Terminal) -> int:
    """Remove entries by age, use, size or version, within --kernel and --device.

    An entry is removed if it matches any of the criteria. It counts as used when a program reads it, if the mount keeps
    access times (most do, once a day; `tunebook doctor` tells); reading with this command does not count. Versions are
    compared with this Python installation. Asks before it removes anything; exits with 1 if there is nothing to remove,
    or you say no.
    """
    criteria = (options.older_than, options.newer_than, options.unused, options.max_size)
    if all(criterion is None for criterion in criteria) and not options.other_versions:
        raise UsageError("add a criterion: --older-than, --newer-than, --unused, --max-size or --other-versions")
    store = book_of(options)
    doomed = dict(_doomed(options, store))
    size = sum(listed.size_bytes for listed in doomed)
    entries = f"{count_text(len(doomed), 'entry', 'entries')}, {size_text(size)}, from {store.where}"
    if doomed and not terminal.json:
        shown = list(doomed.items())[:_SHOWN]
        texts = ((e.id[:SHORT_ID], e.op, e.device, size_text(e.size_bytes), why) for e, why in shown)
        terminal.table(_COLUMNS, (tuple(map(clean, row)) for row in texts))
        if len(doomed) > _SHOWN:
            terminal.line(f"and {len(doomed) - _SHOWN:,} more", "dim")
    agreed = bool(doomed) and (options.dry_run or terminal.confirm(f"Remove {entries}?", yes=options.yes))
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


MERGE = Verb("tunebook merge other_book.json --dry-run", _merge, (*FILTERS, "dry-run", "json"), _merge_arguments)
EXPORT = Verb("tunebook export tuned.bundle.gz --newer-than 30d", _export, (*FILTERS, "json"), _export_arguments)
IMPORT = Verb("tunebook import tuned.bundle.gz --dry-run", _import, (*FILTERS, "dry-run", "json"), _import_arguments)
PRUNE = Verb("tunebook prune --unused 90d --dry-run", _prune, (*FILTERS, "dry-run", "json"), _prune_arguments)
