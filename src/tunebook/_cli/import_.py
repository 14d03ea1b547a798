"""Merge the entries of a file into this book.

The file is a bundle, a pack, a book or another tool's file. If TUNEBOOK_SIGNING_KEY is set, a bundle must be signed
with that key.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from tunebook._api.versions import environment_here, versions_differ
from tunebook._cli._filters import FILTERS, add_options, book_of, filters_of
from tunebook._cli._formats import add_format, format_of, read_file
from tunebook._cli._verb import DONE, NO, ArgumentParser, Namespace, Terminal, UsageError, Verb
from tunebook._cli.merge import tell
from tunebook.formats._bundle import merge_into
from tunebook.formats._format import UNKNOWN_DEVICE
from tunebook.stores._listing import measured_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tunebook._base.record_format import Record


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a bundle, a pack, a book, or another tool's file")
    add_format(parser)
    parser.add_argument("--as-kernel", metavar="NAME", default="", help="the kernel, if the file does not name it")
    parser.add_argument("--as-device", metavar="NAME", default="", help="the device, if the file does not name it")
    parser.add_argument("--allow-unsigned", action="store_true", help="accept a bundle without a valid signature")
    add_options(parser, *FILTERS, "dry-run", "json")


def _run(options: Namespace, terminal: Terminal) -> int:
    path = Path(options.file).expanduser()
    if not path.exists():
        raise UsageError(f"no file {path}")
    filters = filters_of(options)
    name, unsigned = format_of(options.format, path), options.allow_unsigned
    found = read_file(name, path, allow_unsigned=unsigned, op=options.as_kernel, device=options.as_device)
    # The entries of a file were not written into a book yet: their age is the age of their measurements.
    aged = (record for record in found if filters.takes_age(measured_s(record)))
    records = [record for record in aged if filters.takes_kernel(record.problem.op, record.problem.device)]
    if not records:
        terminal.note(f"no matching entry in {path}")
        return NO
    store = book_of(options)
    tell(merge_into(store, records, dry_run=options.dry_run), store.where, terminal, dry_run=options.dry_run)
    if not terminal.json:
        _warn(records, terminal)
    return DONE


def _warn(records: Sequence[Record], terminal: Terminal) -> None:
    """Print how many entries no program will use, and how many will be verified first."""
    unnamed = sum(record.problem.device == UNKNOWN_DEVICE for record in records)
    if unnamed:
        why = "without a device, because the file does not name it: add --as-device, as printed by `tunebook doctor`"
        terminal.line(f"  {unnamed:,} {why}", "yellow")
    environments = [record.head.environment for record in records]
    reasons = Counter(reason for there in environments for reason in versions_differ(there, environment_here(there)))
    for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
        terminal.line(f"  {count:,} will be verified at their first call: {reason}", "dim")


VERB = Verb("tunebook import tuned.bundle.gz --dry-run", _arguments, _run, __doc__)
