"""`tunebook export`: entries as one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tunebook._cli._filters import add_filters, add_json, book_of, filters_of
from tunebook._cli._formats import add_format, exporter, guessed
from tunebook._cli._verb import DONE, NO, Verb

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from tunebook._cli._terminal import Terminal


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="where to write; .db makes a pack, .json a readable book")
    add_filters(parser)
    add_format(parser)
    parser.add_argument("--unsigned", action="store_true", help="a bundle without signature, though a key is set")
    add_json(parser)


def _run(options: Namespace, terminal: Terminal) -> int:
    from tunebook._base.environment_variables import signing_key  # noqa: PLC0415 - loaded by then
    from tunebook.stores._listing import Catalogue  # noqa: PLC0415 - stores are loaded when one is opened

    path = Path(options.file).expanduser()
    name = options.format or guessed(path)
    write = exporter(name)
    store = book_of(options)
    listed = list(filters_of(options).pick(Catalogue(store)))
    records = [record for entry in listed if (record := entry.record()) is not None]
    if not records:
        terminal.note(f"nothing to export in {store.where}")
        return NO
    key = None if options.unsigned else signing_key()
    write(records, path, key)
    if terminal.json:
        terminal.value({"file": str(path), "format": name, "entries": len(records), "signed": _signed(name, key)})
    else:
        sealed = ", signed" if _signed(name, key) else ""
        terminal.line(
            f"wrote {len(records):,} {'entry' if len(records) == 1 else 'entries'} to {path} ({name}{sealed})"
        )
    return DONE


def _signed(name: str, key: bytes | None) -> bool:
    return name == "bundle" and key is not None


VERB = Verb(
    "export",
    "write entries to a file, for another machine",
    "tunebook export tuned.bundle.gz --newer-than 30d",
    _arguments,
    _run,
    "Write entries to one file: a bundle for `tunebook import` elsewhere (signed if TUNEBOOK_SIGNING_KEY is set), a "
    "pack to ship inside a wheel, a book to read by eye, or another tool's format. Exits with 1 if there are none.",
)
