"""`tunebook import`: entries from a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tunebook._cli._filters import add_filters, add_json, book_of, filters_of
from tunebook._cli._formats import add_format, guessed, read_file
from tunebook._cli._verb import DONE, NO, UsageError, Verb

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Sequence

    from tunebook._base.record_format import Record
    from tunebook._cli._filters import Filters
    from tunebook._cli._terminal import Terminal


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a bundle, a pack, a book, or another tool's file")
    add_filters(parser)
    add_format(parser)
    parser.add_argument(
        "--as-kernel", metavar="NAME", default="", help="the kernel, where another tool's file has none"
    )
    parser.add_argument("--as-device", metavar="NAME", default="", help="the device, as above")
    parser.add_argument("--allow-unsigned", action="store_true", help="whoever made the bundle, take it")
    parser.add_argument("--dry-run", action="store_true", help="only say what it would do")
    add_json(parser)


def _run(options: Namespace, terminal: Terminal) -> int:
    from tunebook._cli.merge import tell  # noqa: PLC0415 - as above
    from tunebook.formats._bundle import merge_into  # noqa: PLC0415 - hashing and compression are for this only

    path = Path(options.file).expanduser()
    if not path.exists():
        raise UsageError(f"there is no file {path}")
    filters = filters_of(options)
    found = read_file(
        options.format or guessed(path),
        path,
        allow_unsigned=options.allow_unsigned,
        op=options.as_kernel,
        device=options.as_device,
    )
    records = [record for record in found if _is_meant(record, filters)]
    if not records:
        terminal.note(f"nothing that fits in {path}")
        return NO
    store = book_of(options)
    merged = merge_into(store, records, dry_run=options.dry_run)
    tell(merged, store.where, terminal, dry_run=options.dry_run)
    if not terminal.json:
        _nowhere(records, terminal)
        _fitness(records, terminal)
    return DONE


def _is_meant(record: Record, filters: Filters) -> bool:
    from tunebook.stores._listing import measured_s  # noqa: PLC0415 - as above

    # Nothing of a file was written into a book yet: its entries are as old as what was measured.
    return filters.takes_age(measured_s(record)) and filters.takes_kernel(record.problem.op, record.problem.device)


def _nowhere(records: Sequence[Record], terminal: Terminal) -> None:
    """Say which of them no program will ever ask for."""
    from tunebook.formats._format import UNKNOWN_DEVICE  # noqa: PLC0415 - loaded by now

    count = sum(record.problem.device == UNKNOWN_DEVICE for record in records)
    if count:
        told = "of no device, because the file names none: --as-device does, as `tunebook doctor` writes it"
        terminal.line(f"  {count:,} {told}", "yellow")


def _fitness(records: Sequence[Record], terminal: Terminal) -> None:
    """Say which of them a program here can use at once."""
    from tunebook._api.explain import versions_differ  # noqa: PLC0415 - as above
    from tunebook._cli._environment import environment_here  # noqa: PLC0415 - as above

    reasons: dict[str, int] = {}
    for record in records:
        for difference in versions_differ(record.head.environment, environment_here(record.head.environment)):
            reasons[difference] = reasons.get(difference, 0) + 1
    for difference, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
        terminal.line(f"  {count:,} will be verified at their first call: {difference}", "dim")


VERB = Verb(
    "import",
    "take entries from a file",
    "tunebook import tuned.bundle.gz --dry-run",
    _arguments,
    _run,
    "Take entries from a bundle, a pack, a book or another tool's file into this book, as `tunebook merge` does. With "
    "TUNEBOOK_SIGNING_KEY set, only a bundle that is signed with it is taken.",
)
