"""Files of other tools: read as records, and written from records.

Records that were read have the origin "imported": importing them is vouching for them. Their times belong to
unknown code, so they never decide a tuning here; the search starts from them, and the configurations that were best
there answer calls with the same key.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tunebook._base.errors import DefinitionError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from tunebook._base.record_format import Record
    from tunebook.formats._format import Format

# The format "x" is `FORMAT` in `_x.py`, which is loaded when it is named: help lists all of them, and loads none.
FORMATS: Final[Mapping[str, str]] = {
    "ejkernel": "ejkernel's persistent cache, one JSON file",
    "kernel_tuner": "Kernel Tuner's cache files",
    "t4": "T4, the common form of auto-tuning results",
    "tokamax": "tokamax's tables, a directory per device",
    "triton": "Triton's autotune cache, <kernel>.autotune.json",
    "vllm": "vLLM's fused-MoE tables, a directory of JSON files",
}


def read(name: str, path: str | os.PathLike[str], *, op: str = "", device: str = "") -> list[Record]:
    """Read another tool's file or directory as records; `op` and `device` replace the names that the file gives."""
    return _load(name).read_all(Path(path), op, device)


def write(name: str, records: Iterable[Record], path: str | os.PathLike[str]) -> int:
    """Write records as another tool's files, and return how many files; `CodecError` if the format cannot hold them."""
    return _load(name).write_all(list(records), Path(path))


def _load(name: str) -> Format:
    if name not in FORMATS:
        raise DefinitionError(f"unknown format {name!r}; known are {', '.join(FORMATS)}")
    found: Format = import_module(f"tunebook.formats._{name}").FORMAT
    return found
