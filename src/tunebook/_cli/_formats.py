"""The file formats of `tunebook export` and `tunebook import`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tunebook._base.environment_variables import signing_key
from tunebook._cli._verb import ArgumentParser, UsageError
from tunebook.formats import FORMATS, read, write
from tunebook.stores import FILE_ENGINES, open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from tunebook._base.record_format import Record

_ENGINES: Final = {engine.name: engine for engine in FILE_ENGINES.values()}
OWN: Final = ("bundle", *_ENGINES)


def add_format(parser: ArgumentParser) -> None:
    """Add the option that names the format of the file."""
    names = f"{', '.join(OWN)}; of other tools: {', '.join(FORMATS)}"
    parser.add_argument("--format", metavar="NAME", help=f"{names}; default: inferred from the file name")


def format_of(name: str | None, path: Path) -> str:
    """Return the format of a file: the given name, else inferred from the path; `UsageError` if it is unknown."""
    if name is not None and name not in (*OWN, *FORMATS):
        raise UsageError(f"unknown format {name!r}; choose one of {', '.join((*OWN, *FORMATS))}")
    engine = FILE_ENGINES.get(path.suffix.lower())
    return name or ("bundle" if engine is None else engine.name)


def write_file(name: str, records: Sequence[Record], path: Path, key: bytes | None) -> None:
    """Write records to a file; a bundle is signed with the key."""
    if name == "bundle":
        from tunebook.formats._bundle import export_bundle  # noqa: PLC0415 - a format is loaded when it is named

        export_bundle(records, path, key=key)
    elif name not in _ENGINES:
        write(name, records, path)
    elif _ENGINES[name].writable and path.exists():  # a pack is replaced; a book would mix its entries with these
        raise UsageError(f"{path} exists; remove it first, or add to it: tunebook merge $(tunebook path) --book {path}")
    else:
        _ENGINES[name].create(path, records)


def read_file(name: str, path: Path, *, allow_unsigned: bool, op: str, device: str) -> Iterable[Record]:
    """Return the records in a file; `op` and `device` are for formats that do not name them."""
    if name == "bundle":
        from tunebook.formats._bundle import import_bundle  # noqa: PLC0415 - a format is loaded when it is named

        return import_bundle(path, key=signing_key(), allow_unsigned=allow_unsigned).records
    return open_store(path).items() if name in OWN else read(name, path, op=op, device=device)
