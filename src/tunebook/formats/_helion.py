"""vLLM's tables for Helion kernels: a folder per kernel, a file per device, a list of keys with configurations."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from tunebook._base.record_format import canonical_json
from tunebook.formats._format import ForeignFile, Format, OutgoingRecord, config_of

if TYPE_CHECKING:
    from tunebook._base.record_format import Record


def _read(file: ForeignFile) -> list[Record]:
    place = file.path.absolute()
    records = []
    for row in file.json_list():
        match row:
            case {"key": dict() as key, "config": dict() as config, **rest} if not rest:
                problem = file.problem(f"gpu:{place.stem}", f"{place.parent.name}@v0", key)
                records.append(file.record(problem, chosen=config_of(config)))
            case _:
                raise file.error(f"{str(row)[:80]} is not a key with its configuration")
    return records


def _name(record: OutgoingRecord) -> str:
    device = re.sub(r"[\s/-]+", "_", record.device.lower())
    return f"{record.op}/{device}.json"


def _content(record: OutgoingRecord) -> dict[str, Any]:
    head, key = record.record.head, record.key()
    return {canonical_json(key): {"key": key, "config": record.values(head.config)}} if head.decided else {}


FORMAT: Final = Format(
    "helion",
    "a table of a Helion kernel",
    "*.json",
    _read,
    _content,
    _name,
    dump=lambda rows: json.dumps([*rows.values()], indent=2),
)
