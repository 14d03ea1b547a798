"""Merge the entries of a file into this book.

The file is a bundle, a pack, a book or another tool's file. If TUNEBOOK_SIGNING_KEY is set, it must be a bundle or a
pack that is signed with that key, unless --allow-unsigned is given: other files have no signatures.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from tunebook._api.versions import environment_here, versions_differ
from tunebook._base.environment_variables import signing_key
from tunebook._base.errors import StoreError
from tunebook._cli._filters import FILTERS, filters_of
from tunebook._cli._formats import ENGINES, add_format, format_of
from tunebook._cli._verb import DONE, NO, ArgumentParser, Namespace, Terminal, Verb
from tunebook._cli.merge import ALLOW_UNSIGNED, add_prefer, merge_records, refuse_unsigned
from tunebook.formats import read
from tunebook.stores import PackStore, open_store
from tunebook.stores._listing import measured_s

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tunebook._base.record_format import Record


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a bundle, a pack, a book, or another tool's file")
    add_format(parser)
    parser.add_argument("--as-kernel", metavar="NAME", default="", help="the kernel, if the file does not name it")
    parser.add_argument("--as-device", metavar="NAME", default="", help="the device, if the file does not name it")
    parser.add_argument("--allow-unsigned", action="store_true", help=ALLOW_UNSIGNED)
    add_prefer(parser)


def _run(options: Namespace, terminal: Terminal) -> int:
    from tunebook.formats._format import UNKNOWN_DEVICE  # noqa: PLC0415 - help loads no format

    path, filters = Path(options.file).expanduser(), filters_of(options)
    if not path.exists():
        raise StoreError("io", str(path), f"no file {path}")
    # The entries of a file were not written into a book yet: their age is the age of their measurements.
    aged = [record for record in _read(path, options) if filters.takes_age(measured_s(record))]
    filters.warn_of_misses([(record.problem.op, record.problem.device) for record in aged], str(path))
    records = [record for record in aged if filters.takes_kernel(record.problem.op, record.problem.device)]
    if not records:
        terminal.note(f"no matching entry in {path}")
        return NO
    merge_records(records, options, terminal)
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
    name = format_of(options.format, path)
    if name == "bundle":
        from tunebook.formats._bundle import import_bundle  # noqa: PLC0415 - help loads no format

        return import_bundle(path, key=signing_key(), allow_unsigned=options.allow_unsigned).records
    key = signing_key()
    if name == "pack" and key is not None and not options.allow_unsigned and path.is_file():
        PackStore(path, vouched=True).require_signature(key)
    else:
        refuse_unsigned([str(path)], options)
    if name in ENGINES and not path.is_dir():
        return ENGINES[name].open(path, vouched=True).items()
    if name in ENGINES:
        return open_store(path).items()
    return read(name, path, op=options.as_kernel, device=options.as_device)


VERB = Verb("tunebook import tuned.bundle.gz --dry-run", _run, (*FILTERS, "dry-run", "json"), _arguments, __doc__)
