"""Which files entries can be written to and read from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tunebook._cli._verb import UsageError

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from tunebook._base.record_format import Record

OWN: Final = ("bundle", "pack", "json")
# The names in `tunebook.formats.FORMATS`, which help must not load for.
OTHERS: Final = ("ejkernel", "kernel_tuner", "t4", "tokamax", "triton", "vllm")


def add_format(parser: ArgumentParser) -> None:
    """Give a verb the option that says how its file is written."""
    names = f"{', '.join(OWN)}; of other tools: {', '.join(OTHERS)}"
    parser.add_argument("--format", metavar="NAME", help=f"{names}; by default what the name of the file means")


def guessed(path: Path) -> str:
    """Return the format that a file's name means."""
    return {".db": "pack", ".json": "json"}.get(path.suffix.lower(), "bundle")


def exporter(name: str) -> Callable[[Sequence[Record], Path, bytes | None], None]:
    """Return what writes records in a format: a function of records, a path and a key to sign with."""
    own: dict[str, Callable[[Sequence[Record], Path, bytes | None], None]] = {
        "bundle": _write_bundle,
        "pack": _write_pack,
        "json": _write_json,
    }
    if name not in own:
        _known(name)
    return own.get(name) or (lambda records, path, _key: _write_other(name, records, path))


def read_file(name: str, path: Path, *, allow_unsigned: bool, op: str, device: str) -> Iterable[Record]:
    """Return the records in a file; `op` and `device` are for formats that do not say them."""
    if name == "bundle":
        return _read_bundle(path, allow_unsigned=allow_unsigned)
    if name in OWN:
        return _read_store(path)
    _known(name)
    from tunebook.formats import read  # noqa: PLC0415 - only who names another tool's format needs it

    return read(name, path, op=op, device=device)


def _known(name: str) -> None:
    """Raise `UsageError` for a format that there is not."""
    from tunebook.formats import FORMATS  # noqa: PLC0415 - as above

    if name not in FORMATS:
        raise UsageError(f"{name!r} is not a format; there are {', '.join((*OWN, *OTHERS))}")


def _write_other(name: str, records: Sequence[Record], path: Path) -> None:
    from tunebook.formats import write  # noqa: PLC0415 - as above

    write(name, records, path)


def _write_bundle(records: Sequence[Record], path: Path, key: bytes | None) -> None:
    from tunebook.formats._bundle import export_bundle  # noqa: PLC0415 - hashing and compression are for this only

    export_bundle(records, path, key=key)


def _write_pack(records: Sequence[Record], path: Path, _key: bytes | None) -> None:
    from tunebook.stores import write_pack  # noqa: PLC0415 - SQLite is for this only

    write_pack(path, records)


def _write_json(records: Sequence[Record], path: Path, _key: bytes | None) -> None:
    from tunebook.stores import JsonStore  # noqa: PLC0415 - for this only

    if path.exists():  # a bundle or a pack is replaced whole; what is in a book would be mixed with these
        raise UsageError(f"{path} exists; remove it first, or add to it: tunebook merge $(tunebook path) --book {path}")
    JsonStore(path).create(records)


def _read_bundle(path: Path, *, allow_unsigned: bool) -> Iterable[Record]:
    from tunebook._base.environment_variables import signing_key  # noqa: PLC0415 - as above
    from tunebook.formats._bundle import import_bundle  # noqa: PLC0415 - as above

    return import_bundle(path, key=signing_key(), allow_unsigned=allow_unsigned).records


def _read_store(path: Path) -> Iterable[Record]:
    from tunebook.stores import open_store  # noqa: PLC0415 - as above

    return open_store(path).items()
