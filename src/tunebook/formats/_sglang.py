"""SGLang's kernel tables: named and filled as vLLM's, in a folder per version of Triton, `triton_3_5_1`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from tunebook.formats._format import ForeignFile, Format, OutgoingRecord
from tunebook.formats._vllm import VERSION, dump_table, read_table, row_of, table_name

if TYPE_CHECKING:
    from tunebook._base.record_format import Record

_FOLDER: Final = re.compile(r"triton_(\d+(?:_\d+)*)")


def _read(file: ForeignFile) -> list[Record]:
    folder = _FOLDER.fullmatch(file.path.absolute().parent.name)
    return read_table(file, {} if folder is None else {VERSION: folder[1].replace("_", ".")})


def _name(record: OutgoingRecord) -> str:
    version = record.record.body.provenance.get(VERSION)
    folder = "" if version is None else f"triton_{str(version).replace('.', '_')}/"
    return f"{folder}{table_name(record, ', ')}"


FORMAT: Final = Format("sglang", "a kernel table of SGLang", "*.json", _read, row_of, _name, dump=dump_table)
