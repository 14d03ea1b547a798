"""Which files entries can be written to and read from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tunebook._cli._verb import UsageError
from tunebook.formats import FORMATS, read, write
from tunebook.stores import FILE_ENGINES, open_store

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from tunebook._base.record_format import Record
    from tunebook.stores._open import FileEngine

_ENGINES: Final = {engine.name: engine for engine in FILE_ENGINES.values()}
OWN: Final = ("bundle", *_ENGINES)


def add_format(parser: ArgumentParser) -> None:
    """Give a verb the option that says how its file is written."""
    names = f"{', '.join(OWN)}; of other tools: {', '.join(FORMATS)}"
    parser.add_argument("--format", metavar="NAME", help=f"{names}; by default what the name of the file means")


def guessed(path: Path) -> str:
    """Return the format that a file's name means."""
    engine = FILE_ENGINES.get(path.suffix.lower())
    return "bundle" if engine is None else engine.name


def exporter(name: str) -> Callable[[Sequence[Record], Path, bytes | None], None]:
    """Return what writes records in a format: a function of records, a path and a key to sign with."""
    if name == "bundle":
        return _write_bundle
    if name in _ENGINES:
        return lambda records, path, _key: _write_store(_ENGINES[name], records, path)
    _check_known(name)

    def write_other(records: Sequence[Record], path: Path, _key: bytes | None) -> None:
        write(name, records, path)

    return write_other


def read_file(name: str, path: Path, *, allow_unsigned: bool, op: str, device: str) -> Iterable[Record]:
    """Return the records in a file; `op` and `device` are for formats that do not say them."""
    if name == "bundle":
        return _read_bundle(path, allow_unsigned=allow_unsigned)
    if name in OWN:
        return open_store(path).items()
    _check_known(name)
    return read(name, path, op=op, device=device)


def _check_known(name: str) -> None:
    """Raise `UsageError` for an unknown format."""
    if name not in FORMATS:
        raise UsageError(f"{name!r} is not a format; there are {', '.join((*OWN, *FORMATS))}")


def _write_bundle(records: Sequence[Record], path: Path, key: bytes | None) -> None:
    from tunebook.formats._bundle import export_bundle  # noqa: PLC0415 - hashing and compression are for this only

    export_bundle(records, path, key=key)


def _write_store(engine: FileEngine, records: Sequence[Record], path: Path) -> None:
    if engine.writable and path.exists():  # a pack is replaced whole; a writable book would mix its entries with these
        raise UsageError(f"{path} exists; remove it first, or add to it: tunebook merge $(tunebook path) --book {path}")
    engine.create(path, records)


def _read_bundle(path: Path, *, allow_unsigned: bool) -> Iterable[Record]:
    from tunebook._base.environment_variables import signing_key  # noqa: PLC0415 - as above
    from tunebook.formats._bundle import import_bundle  # noqa: PLC0415 - as above

    return import_bundle(path, key=signing_key(), allow_unsigned=allow_unsigned).records
