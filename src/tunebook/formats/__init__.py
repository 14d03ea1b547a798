"""Other tools' files: what they know becomes records, and records become their files.

What is read has the origin "imported": who imports it vouches for it. Its times are of unknown code, so they never
decide a tuning here; the search starts from them, and the configurations that were best there answer calls with the
same key.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from tunebook._base.errors import DefinitionError
from tunebook.formats import _ejkernel, _kernel_tuner, _t4, _tokamax, _triton, _vllm
from tunebook.formats._format import UNKNOWN_DEVICE as UNKNOWN_DEVICE
from tunebook.formats._format import Naming

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from tunebook._base.record_format import Record
    from tunebook.formats._format import Format

FORMATS: Final[Mapping[str, Format]] = {
    module.FORMAT.name: module.FORMAT for module in (_ejkernel, _kernel_tuner, _t4, _tokamax, _triton, _vllm)
}


def read(name: str, path: str | os.PathLike[str], *, op: str = "", device: str = "") -> list[Record]:
    """Read another tool's file or directory as records; `op` and `device` stand for what the file does not say."""
    return _format(name).read(Path(path), Naming(op, device))


def write(name: str, records: Iterable[Record], path: str | os.PathLike[str]) -> int:
    """Write records as another tool's files, and return how many files; `CodecError` for what it cannot hold."""
    return _format(name).write(list(records), Path(path))


def _format(name: str) -> Format:
    if name not in FORMATS:
        raise DefinitionError(f"no format is called {name!r}; there are {', '.join(FORMATS)}")
    return FORMATS[name]
