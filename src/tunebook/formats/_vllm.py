"""vLLM's fused-MoE tables: a file per experts, size, device and dtype, all in its name; a configuration per batch.

`E=8,N=14336,device_name=NVIDIA_H200,dtype=fp8_w8a8.json` holds `{"1": {"BLOCK_SIZE_M": 16, ...}, "64": {...}}`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from tunebook.formats._format import ForeignFile, Format, OutgoingRecord, config_of

if TYPE_CHECKING:
    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json

_NAME: Final = re.compile(
    r"E=(?P<E>\d+),N=(?P<N>\d+),device_name=(?P<device>[^,]+)"
    r"(?:,dtype=(?P<dtype>[^,]+))?(?:,block_shape=(?P<block_shape>\[[\d, ]*\]))?\.json"
)
_VERSION: Final = "triton_version"


def _read(file: ForeignFile) -> list[Record]:
    match = _NAME.fullmatch(file.path.name)
    if match is None:
        raise file.error("its name should be like E=8,N=14336,device_name=NVIDIA_H200.json")
    parts = match.groupdict()
    device = f"gpu:{str(parts.pop('device')).replace('_', ' ')}"
    key: dict[str, Json] = {name: int(text) if text.isdecimal() else text for name, text in parts.items() if text}
    table = file.json()
    about: dict[str, Json] = {_VERSION: table.pop(_VERSION)} if _VERSION in table else {}
    records = []
    for batch, config in table.items():
        if not batch.isdecimal() or not isinstance(config, dict):
            raise file.error(f"{batch!r} is not a batch size with its configuration")
        problem = file.problem(device, "fused_moe@v0", {**key, "M": int(batch)})
        records.append(file.record(problem, chosen=config_of(config), about=about))
    return records


def _name(record: OutgoingRecord) -> str:
    key = record.key()
    if not {"E", "N", "M"} <= key.keys() <= {"E", "N", "M", "dtype", "block_shape"}:
        raise record.error(f"has keys of E, N, M, dtype and block_shape; found {record.problem.call_key}")
    name = f"E={key['E']},N={key['N']},device_name={record.device.replace(' ', '_')}"
    return name + "".join(f",{part}={key[part]}" for part in ("dtype", "block_shape") if part in key) + ".json"


def _content(record: OutgoingRecord) -> dict[str, Any]:
    head, made_with = record.record.head, record.record.body.provenance.get(_VERSION)
    if not head.decided:
        return {}
    version = {} if made_with is None else {_VERSION: made_with}
    return {**version, str(record.key().get("M")): record.values(head.config)}


def _order(name: str) -> tuple[bool, int, str]:
    """Order a table as vLLM writes it: the version, then the batch sizes as numbers."""
    return name != _VERSION, len(name), name


FORMAT: Final = Format("vllm", "a fused-MoE table of vLLM", "E=*.json", _read, _content, _name, order=_order, indent=4)
