"""vLLM's fused-MoE tables: a file per experts, size, device and dtype, which its name says; a configuration per batch.

`E=8,N=14336,device_name=NVIDIA_H200,dtype=fp8_w8a8.json` holds `{"1": {"BLOCK_SIZE_M": 16, ...}, "64": {...}}`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from tunebook._base.errors import CodecError
from tunebook.formats._format import (
    Format,
    Naming,
    config_of,
    device_name,
    key_of,
    read_files,
    read_json,
    record_of,
    values_of,
    write_json,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json

_WHAT: Final = "a fused-MoE table of vLLM"
_NAME: Final = re.compile(
    r"E=(?P<E>\d+),N=(?P<N>\d+),device_name=(?P<device>[^,]+)"
    r"(?:,dtype=(?P<dtype>[^,]+))?(?:,block_shape=(?P<block_shape>\[[\d, ]*\]))?\.json"
)
_OP: Final = "fused_moe@v0"
_VERSION: Final = "triton_version"


def _read(path: Path, naming: Naming) -> list[Record]:
    return read_files(path, "E=*.json", _WHAT, lambda file: _table(file, naming))


def _table(path: Path, naming: Naming) -> list[Record]:
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise CodecError(f"{path.name!r} is not the name of {_WHAT}: E=8,N=14336,device_name=NVIDIA_H200.json is one")
    parts = match.groupdict()
    device = f"gpu:{str(parts.pop('device')).replace('_', ' ')}"
    key: dict[str, Json] = {name: int(text) if text.isdecimal() else text for name, text in parts.items() if text}
    table = read_json(path, _WHAT)
    about: dict[str, Json] = {_VERSION: table.pop(_VERSION)} if _VERSION in table else {}
    records = []
    for batch, config in table.items():
        if not batch.isdecimal() or not isinstance(config, dict):
            raise CodecError(f"{path} is not {_WHAT}: {batch!r} is not a batch size with its configuration")
        problem = naming.problem(device, _OP, {**key, "M": int(batch)})
        records.append(record_of(problem, (), "vllm", chosen=config_of(config), about=about))
    return records


def _write(records: Sequence[Record], path: Path) -> int:
    files: dict[str, dict[str, Any]] = defaultdict(dict)
    for record in records:
        if not record.head.decided:
            continue
        key = key_of(record)
        if not {"E", "N", "M"} <= key.keys() <= {"E", "N", "M", "dtype", "block_shape"}:
            raise CodecError(f"{_WHAT} has keys of E, N, M, dtype and block_shape; found {record.problem.call_key}")
        name = f"E={key['E']},N={key['N']},device_name={device_name(record.problem.device).replace(' ', '_')}"
        name += "".join(f",{part}={key[part]}" for part in ("dtype", "block_shape") if part in key)
        made_with = record.body.provenance.get(_VERSION)
        files[name] |= {} if made_with is None else {_VERSION: made_with}
        files[name][str(key["M"])] = values_of(record.head.config, _WHAT)
    for name, table in files.items():
        ordered = {m: table[m] for m in sorted(table, key=lambda m: (m != _VERSION, len(m), m))}
        write_json(path / f"{name}.json", ordered, indent=4)
    return len(files)


FORMAT: Final = Format("vllm", "vLLM's fused-MoE tables, a directory of JSON files", _read, _write)
