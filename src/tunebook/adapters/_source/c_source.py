"""Source in C, CUDA C or OpenCL C, with a configuration as macros."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._base.errors import DefinitionError
from tunebook._base.record_format import blake2b, canonical_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tunebook._base.vocabulary import Json

FLAGS_ITEM: Final = "cflags"
# fmt: off
_KEYWORDS: Final = frozenset({
    "auto", "break", "case", "char", "const", "continue", "default", "defined", "do", "double", "else", "enum",
    "extern", "float", "for", "goto", "if", "inline", "int", "long", "register", "restrict", "return", "short",
    "signed", "sizeof", "static", "struct", "switch", "typedef", "union", "unsigned", "void", "volatile", "while",
})
# fmt: on
_INCLUDE: Final = re.compile(r'^\s*#\s*include\s*"([^"\n]+)"', re.MULTILINE)
_SUFFIXES: Final = (".c", ".h", ".cl", ".cu", ".cuh")


class Macros(NamedTuple):
    """The macros and the flags of a configuration."""

    definitions: tuple[str, ...]
    flags: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((*self.definitions, *self.flags)) or "no macros"


def macros_of(config: Mapping[str, Any]) -> Macros:
    """Return the macros and flags of a configuration; `DefinitionError` for values that cannot be macros.

    >>> macros_of({"BLOCK": 64, "PACK": True, "TYPE": "float", "cflags": ("-O2",)}).definitions
    ('BLOCK=64', 'PACK=1', 'TYPE=float')
    """
    if not isinstance(config, Mapping):
        raise DefinitionError(
            f"compiled source takes its configuration as a mapping, e.g. tunebook.Config or a dict; got {config!r}"
        )
    definitions = [f"{n}={_macro_value(n, v)}" for n, v in config.items() if n != FLAGS_ITEM]
    return Macros(tuple(sorted(definitions)), flags_of(FLAGS_ITEM, config.get(FLAGS_ITEM, ())))


def _macro_value(name: str, value: object) -> str:
    if not isinstance(name, str) or not (name.isascii() and name.isidentifier()) or name in _KEYWORDS:
        raise DefinitionError(f"{name!r} cannot be a macro: it is not an identifier in C")
    if isinstance(value, str) and not set(value) & {"\n", "\r", "\0"}:
        return str.__str__(value)  # str(value) of an enum of strings would give its name
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real) and math.isfinite(value):
        return repr(float(value))
    raise DefinitionError(
        f"{name}={value!r} cannot be a macro: use a finite number, a bool, or a one-line str; flags for the "
        f"compiler go into {FLAGS_ITEM}=('-O2', ...)"
    )


def flags_of(name: str, flags: Iterable[str]) -> tuple[str, ...]:
    """Return flags as a tuple; `DefinitionError` for anything but an iterable of flags."""
    given = None if isinstance(flags, str) or not isinstance(flags, Iterable) else tuple(flags)
    if given is None or not all(isinstance(flag, str) and flag and "\0" not in flag for flag in given):
        raise DefinitionError(f"{name}={flags!r}: write a tuple of flags, e.g. {name}=('-O3', '-march=native')")
    return given


class SourceText(NamedTuple):
    """Source, and the content of the headers beside it that it includes; `directory` has the headers."""

    name: str
    text: str
    directory: Path | None
    headers: tuple[str, ...]


def read_source(source: str | Path) -> SourceText:
    """Return source given as text, or as the path of a file."""
    if isinstance(source, Path):
        path = source.absolute()
        try:
            text = _read(path)
        except OSError as error:
            raise DefinitionError(f"cannot read the source {source}: {error.strerror}") from error
        name = path.name.replace("\\", "\\\\").replace('"', '\\"')
        return SourceText(name, text, path.parent, tuple(_headers(text, path.parent, set())))
    if "\n" not in source and source.rstrip().endswith(_SUFFIXES):
        raise DefinitionError(f"a str is the source itself; for a file write Path({source!r})")
    return SourceText("kernel.c", source, None, ())


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="surrogateescape")  # comments are written in any encoding


def _headers(text: str, directory: Path, seen: set[Path]) -> Iterator[str]:
    """Yield the content of the files beside a source that it includes, and of the files that these include."""
    for name in _INCLUDE.findall(text):
        path = directory / name
        if path in seen or not path.is_file():
            continue  # a missing file is for the compiler to find, or to complain about
        seen.add(path)
        content = _read(path)
        yield content
        yield from _headers(content, path.parent, seen)


def digest(parts: list[Json]) -> str:
    """Return a digest of some parts; equal parts have equal digests in every process."""
    return blake2b(canonical_json(parts).encode("ascii"), digest_size=16).hexdigest()


def complaint(said: str, otherwise: str, macros: Macros | str) -> str:
    """Return a message that begins with the first error, since lists of failures show one line of each.

    The macros are in the second line: failures with the same first line are listed as one.
    """
    lines = [line[:200] for line in said.splitlines() if line.strip()]
    first = next((i for i, line in enumerate(lines) if "error" in line), 0)
    shown = lines[first : first + 12] or [otherwise]
    return "\n".join([shown[0], *(f"  {line}" for line in (f"compiled with {macros}", *shown[1:]))])
