"""The file formats of `tunebook export` and `tunebook import`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tunebook._cli._verb import ArgumentParser, UsageError
from tunebook.formats import FORMATS
from tunebook.stores import FILE_ENGINES

if TYPE_CHECKING:
    from pathlib import Path

ENGINES: Final = {engine.name: engine for engine in FILE_ENGINES.values()}
OWN: Final = ("bundle", *ENGINES)


def add_format(parser: ArgumentParser) -> None:
    """Add the option --format."""
    names = f"{', '.join(OWN)}; of other tools: {', '.join(FORMATS)}"
    parser.add_argument("--format", metavar="NAME", help=f"{names}; default: inferred from the file name")


def format_of(name: str | None, path: Path) -> str:
    """Return the given format, else the format that the name of the file implies."""
    if name is not None and name not in (*OWN, *FORMATS):
        raise UsageError(f"unknown format {name!r}; choose one of {', '.join((*OWN, *FORMATS))}")
    engine = FILE_ENGINES.get(path.suffix.lower())
    return name or ("bundle" if engine is None else engine.name)
