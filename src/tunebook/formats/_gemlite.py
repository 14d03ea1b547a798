"""gemlite's tables: a file per device, `{"GEMM": {"(1, 4096, 4096, 64, 8)": {"BLOCK_SIZE_M": 16, ...}}}`."""

from __future__ import annotations

import ast
import json
from typing import TYPE_CHECKING, Any, Final

from tunebook.formats._format import ForeignFile, Format, OutgoingRecord, config_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tunebook._base.record_format import Record


def _read(file: ForeignFile) -> list[Record]:
    records = []
    for op, table in file.json().items():
        if not isinstance(table, dict):
            raise file.error(f"{op!r} is not a kernel with its table")
        for text, config in table.items():
            key = _tuple(text)
            if key is None or not isinstance(config, dict):
                raise file.error(f"{text!r} of {op} is not a tuple of sizes with its configuration")
            problem = file.problem(f"gpu:{file.path.stem}", f"{op}@v0", {"key": [*key]})
            records.append(file.record(problem, chosen=config_of(config)))
    if not records:
        raise file.error("it has no configuration")
    return records


def _tuple(text: str) -> tuple[Any, ...] | None:
    try:
        key = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return key if isinstance(key, tuple) and str(key) == text else None


def _content(record: OutgoingRecord) -> dict[str, Any]:
    head, key = record.record.head, record.key().get("key")
    if not isinstance(key, list):
        raise record.error(
            f"has a tuple of sizes as its key; found {record.problem.call_key}. Say how the arguments of the call give "
            'it: --map "key=[M, N, K]"'
        )
    text = str(tuple(key))
    return {f"{record.op} {text}": (record.op, text, record.values(head.config))} if head.decided else {}


def _dump(rows: Mapping[str, tuple[str, str, Any]]) -> str:
    tables: dict[str, dict[str, Any]] = {}
    for op, key, config in rows.values():
        tables.setdefault(op, {})[key] = config
    return json.dumps(tables)


FORMAT: Final = Format(
    "gemlite",
    "a table of gemlite",
    "*.json",
    _read,
    _content,
    lambda record: f"{record.file_device}.json",
    dump=_dump,
)
