"""vLLM's kernel tables: a file per sizes, device and dtype, all in its name; a configuration per batch size.

`E=8,N=14336,device_name=NVIDIA_H200,dtype=fp8_w8a8.json` holds `{"1": {"BLOCK_SIZE_M": 16, ...}, "64": {...}}`. SGLang
and kernels of the Hugging Face hub have the same tables.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook.formats._format import ForeignFile, Format, OutgoingRecord, config_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json

VERSION: Final = "triton_version"
_DOWN: Final = "_down"  # SGLang tunes the second product of an expert, the "down" projection, in a table of its own


class TableLayout(NamedTuple):
    """The names in the file name of a kernel's table, in order, of which the first `needed` are in every file name.

    `row` is the meaning of the numbers inside the file. A `prefix` is the first word of the file name.
    """

    op: str
    names: tuple[str, ...]
    needed: int
    row: str = "M"
    prefix: str = ""

    def fits(self, names: set[str], op: str) -> bool:
        needed = set(self.names[: self.needed]) - _DEVICE
        return needed <= names <= {*self.names, "down"} - _DEVICE and self.prefix in ("", op)

    def file_name(self, key: Mapping[str, Any], device: str) -> str:
        values = {**key, **dict.fromkeys(_DEVICE, device)}
        parts = [f"{name}={values[name]}" for name in self.names if name in values]
        return ",".join([self.prefix, *parts] if self.prefix else parts) + (_DOWN if key.get("down") else "") + ".json"


_DEVICE: Final = frozenset({"device_name", "device"})
_LORA: Final = ("K", "R", "S", "device")
LAYOUTS: Final = (
    TableLayout(
        "fused_moe", ("E", "N", "device_name", "dtype", "block_shape", "per_channel_quant", "backend"), needed=3
    ),
    TableLayout(
        "w8a8_scaled_mm", ("N", "K", "device_name", "dtype", "input_dtype", "out_dtype", "block_shape"), needed=3
    ),
    TableLayout(
        "selective_state_update", ("headdim", "dstate", "device_name", "cache_dtype"), needed=4, row="effective_batch"
    ),
    TableLayout("lora_shrink", _LORA, needed=4, row="chunk_size", prefix="lora_shrink"),
    TableLayout("lora_expand", _LORA, needed=4, row="chunk_size", prefix="lora_expand"),
)


def read_table(file: ForeignFile, about: Mapping[str, Json] = {}) -> list[Record]:
    """Return a record for each number of a table."""
    stem = file.path.name.removesuffix(".json")
    prefix = next((layout.prefix for layout in LAYOUTS if layout.prefix and stem.startswith(layout.prefix)), "")
    # A comma inside brackets is part of a value: block_shape=[128,128].
    parts = re.split(r",(?![^\[]*\])", stem.removeprefix(f"{prefix},").removesuffix(_DOWN))
    values = {name: text for name, _, text in (part.partition("=") for part in parts)}
    device = values.pop("device_name", "") or values.pop("device", "")
    key: dict[str, Json] = {name: _number(text) for name, text in values.items()}
    if stem.endswith(_DOWN):
        key["down"] = True
    layout = next((known for known in LAYOUTS if known.fits({*key}, prefix)), None)
    if layout is None or layout.file_name(key, device) != file.path.name:
        raise file.error("its name should be like E=8,N=14336,device_name=NVIDIA_H200.json")
    table = file.json()
    if VERSION in table:
        about = {**about, VERSION: table.pop(VERSION)}
    name = f"gpu:{device.replace('_', ' ')}" if device else ""
    records = []
    for number, config in table.items():
        # null is a size for which the tool found nothing: a record without a choice
        if not number.isdecimal() or str(int(number)) != number or not isinstance(config, dict | None):
            raise file.error(f"{number!r} is not a number with its configuration")
        problem = file.problem(name, f"{layout.op}@v0", {**key, layout.row: int(number)})
        records.append(file.record(problem, chosen=None if config is None else config_of(config), about=about))
    return records


def _number(text: str) -> Json:
    return int(text) if text.isdecimal() else {"True": True, "False": False}.get(text, text)


def table_name(record: OutgoingRecord) -> str:
    """Return the name of the table that holds a record; `CodecError` if its key has other names."""
    layout, key = _layout(record)
    return layout.file_name(key, record.file_device)


def _layout(record: OutgoingRecord) -> tuple[TableLayout, dict[str, Any]]:
    key = record.key()
    for layout in LAYOUTS:
        if layout.row in key and layout.fits(key.keys() - {layout.row}, record.op):
            return layout, key
    known = "; ".join(", ".join([*(n for n in layout.names if n not in _DEVICE), layout.row]) for layout in LAYOUTS[:3])
    raise record.error(
        f"has keys of {known}; found {record.problem.call_key if record.key_map is None else ', '.join(key)}. "
        "Say how the arguments of the call give them: --map E=w1.shape[0] --map N=w2.shape[2] --map M=x.shape[0]"
    )


def row_of(record: OutgoingRecord) -> dict[str, Any]:
    """Return the row of a table that holds a record."""
    head = record.record.head
    layout, key = _layout(record)
    return {str(key[layout.row]): record.values(head.config)} if head.decided else {}


def dump_table(table: Mapping[str, Any]) -> str:
    """Return a table as vLLM writes it: the version, then the sizes in order."""
    names = sorted(table, key=lambda name: (name != VERSION, len(name), name))
    return json.dumps({name: table[name] for name in names}, indent=4)


def _content(record: OutgoingRecord) -> dict[str, Any]:
    row, made_with = row_of(record), record.record.body.provenance.get(VERSION)
    return {VERSION: made_with, **row} if row and made_with is not None else row


FORMAT: Final = Format(
    "vllm",
    "a kernel table of vLLM",
    "*.json",
    read_table,
    _content,
    table_name,
    dump=dump_table,
)
