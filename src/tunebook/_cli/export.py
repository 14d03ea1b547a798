"""Write entries to one file.

The file is a bundle for `tunebook import` on another machine (signed if TUNEBOOK_SIGNING_KEY is set), a pack to ship
inside a wheel, a readable .json book, or another tool's format. Exits with 1 if no entry matches.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tunebook._base.environment_variables import signing_key
from tunebook._base.errors import StoreError
from tunebook._cli._filters import FILTERS, book_to_read, filters_of
from tunebook._cli._formats import ENGINES, OWN, add_format, format_of
from tunebook._cli._terminal import count_text
from tunebook._cli._verb import DONE, NO, ArgumentParser, Namespace, Terminal, UsageError, Verb
from tunebook.formats import write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tunebook._base.record_format import Record


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="file to write; .db makes a pack, .json a readable book")
    add_format(parser)
    parser.add_argument(
        "--map",
        metavar="NAME=EXPR",
        action="append",
        default=[],
        help="a part of the file's key, from the arguments of the tuned call: E=w1.shape[0]; for other tools' formats",
    )
    parser.add_argument("--unsigned", action="store_true", help="do not sign the bundle, even if a key is set")


def _run(options: Namespace, terminal: Terminal) -> int:
    path = Path(options.file).expanduser()
    name = format_of(options.format, path)
    # Some tools have a directory of tables.
    if (path.is_dir() or options.file.endswith("/")) and name in OWN:
        raise UsageError(f"{options.file} is a directory; name a file in it, e.g. {path / 'tuned.bundle.gz'}")
    key = dict(_named(text) for text in options.map)
    if key and name in OWN:
        raise UsageError(f"--map is for the formats of other tools, and {path} is a {name}; add --format")
    store = book_to_read(options)
    records = list(filters_of(options).records(store))
    if not records:
        terminal.note(f"nothing to export in {store.where}")
        return NO
    signed_with = None if options.unsigned or name != "bundle" else signing_key()
    if name == "bundle":
        from tunebook.formats._bundle import export_bundle  # noqa: PLC0415 - help loads no format

        export_bundle(records, path, key=signed_with)
    elif name not in OWN:
        write(name, records, path, key=key)
    elif ENGINES[name].writable and path.exists():  # a pack is replaced; a book would mix its entries with these
        raise UsageError(f"{path} exists; remove it first, or add to it: tunebook merge $(tunebook path) --book {path}")
    else:
        _create(name, path, records)
    entries, signed = count_text(len(records), "entry", "entries"), signed_with is not None
    signature = "" if name != "bundle" else ", signed" if signed else ", not signed"
    terminal.result(
        {"file": str(path), "format": name, "entries": len(records), "signed": signed},
        f"wrote {entries} to {path} ({name}{signature})",
    )
    return DONE


def _create(name: str, path: Path, records: Sequence[Record]) -> None:
    try:
        ENGINES[name].create(path, records)
    except StoreError as error:
        if error.kind != "too-large":
            raise
        advice = f"Export a pack or a bundle instead: {path.with_suffix('.db')} or {path.with_suffix('.bundle.gz')}"
        raise UsageError(f"{len(records):,} entries are too many for a .json book. {advice}") from error


def _named(text: str) -> tuple[str, str]:
    name, equals, expression = text.partition("=")
    if not (name.strip() and equals and expression.strip()):
        raise UsageError(f"--map {text} should be like --map E=w1.shape[0]")
    return name.strip(), expression


VERB = Verb("tunebook export tuned.bundle.gz --newer-than 30d", _run, (*FILTERS, "json"), _arguments, __doc__)
