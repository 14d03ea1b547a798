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

__all__ = ["FORMATS", "read", "write"]

# The format "x" is `FORMAT` in `_x.py`, which is loaded when it is named: help lists all of them, and loads none.
FORMATS: Final[Mapping[str, str]] = {
    "aiter": "AITER's tuned tables, CSV files",
    "aiter_triton": "AITER's tables for Triton kernels, a directory of JSON files",
    "ejkernel": "ejkernel's persistent cache, one JSON file",
    "fla": "flash-linear-attention's tables, a directory per device",
    "gemlite": "gemlite's tables, a JSON file per device",
    "helion": "vLLM's tables for Helion kernels, a directory per kernel",
    "kernel_tuner": "Kernel Tuner's cache files",
    "sglang": "SGLang's kernel tables, a directory per version of Triton",
    "t4": "T4, the common form of auto-tuning results",
    "tokamax": "tokamax's tables, a directory per device",
    "triton": "Triton's autotune cache, <kernel>.autotune.json",
    "tunableop": "PyTorch TunableOp's results, a CSV file",
    "vllm": "vLLM's kernel tables, a directory of JSON files",
}


def read(name: str, path: str | os.PathLike[str], *, op: str = "", device: str = "") -> list[Record]:
    """Read another tool's file or directory as records; `op` and `device` replace the names that the file gives."""
    return _load(name).read_all(Path(path), op, device)


def write(
    name: str, records: Iterable[Record], path: str | os.PathLike[str], *, key: Mapping[str, str] | None = None
) -> int:
    """Write records as another tool's files, and return how many files; `CodecError` if the format cannot hold them.

    `key` gives the file's key as expressions over the arguments of the tuned call: `{"E": "w1.shape[0]", "M": "n"}`.
    """
    from tunebook.formats._key_map import KeyMap  # noqa: PLC0415 - help loads no format

    return _load(name).write_all(list(records), Path(path), KeyMap(key) if key else None)


def _load(name: str) -> Format:
    if name not in FORMATS:
        raise DefinitionError(f"unknown format {name!r}; known are {', '.join(FORMATS)}")
    found: Format = import_module(f"tunebook.formats._{name}").FORMAT
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
