"""vLLM's kernel tables: a file per sizes, device and dtype, all in its name; a configuration per batch size.

`E=8,N=14336,device_name=NVIDIA_H200,dtype=fp8_w8a8.json` holds `{"1": {"BLOCK_SIZE_M": 16, ...}, "64": {...}}`. SGLang
and kernels of the Hugging Face hub have the same tables. Some of SGLang's hold the rows in a section, beside facts.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._base.config_codec import decode
from tunebook.formats._format import ForeignFile, Format, OutgoingRecord, config_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json

VERSION: Final = "triton_version"
_TOOLS: Final = ("vllm", "sglang")
_DOWN: Final = "_down"  # SGLang tunes the second product of an expert, the "down" projection, in a table of its own


class TableLayout(NamedTuple):
    """The names in the file name of a kernel's table, in order, of which the first `needed` are in every file name.

    `row` is the meaning of the numbers inside the file. A `prefix` is the first word of the file name. The rows are in
    the `section` of the file, or in its tables, one per `case`. `texts` says that the configurations are texts.
    """

    op: str
    names: tuple[str, ...]
    needed: int
    row: str = "M"
    prefix: str = ""
    section: str = ""
    case: str = ""
    texts: bool = False

    def fits(self, names: set[str]) -> bool:
        needed = set(self.names[: self.needed]) - _DEVICE
        return needed <= names <= {*self.names, "down"} - _DEVICE

    def holds(self, key: Mapping[str, Any], op: str) -> bool:
        """Return whether a key has a row in such a table."""
        inside = {self.row, self.case} - {""}
        return inside <= key.keys() and self.fits(key.keys() - inside) and (not self.prefix or self.op == op)

    def file_name(self, key: Mapping[str, Any], device: str) -> str:
        values = {**key, **dict.fromkeys(_DEVICE, device)}
        parts = [f"{name}={values[name]}" for name in self.names if name in values]
        return ",".join([self.prefix, *parts] if self.prefix else parts) + (_DOWN if key.get("down") else "") + ".json"

    def rows(self, table: Mapping[str, Any], file: ForeignFile) -> Iterator[tuple[dict[str, Json], Any]]:
        """Yield the parts of the key that are inside the file, and the configuration."""
        if self.section and not isinstance(table.get(self.section), dict):
            raise file.error(f"{self.section!r}, a table of configurations, is missing")
        rows = table[self.section] if self.section else table
        for name, inner in rows.items() if self.case else [("", rows)]:
            if not isinstance(inner, dict):
                raise file.error(f"{name!r} is not a table of configurations")
            for number, config in inner.items():
                # null is a size for which the tool found nothing: a record without a choice
                kind = str if self.texts else dict | None
                if not number.isdecimal() or str(int(number)) != number or not isinstance(config, kind):
                    raise file.error(f"{number!r} is not a number with its configuration")
                yield {**({self.case: name} if self.case else {}), self.row: int(number)}, config

    def place(self, key: Mapping[str, Any]) -> str:
        """Return the place of a row in its file: the section, the case and the number."""
        return "/".join([*filter(None, [self.section, key.get(self.case)]), str(key[self.row])])


_DEVICE: Final = frozenset({"device_name", "device"})
_LORA: Final = ("K", "R", "S", "device")
_FRONT: Final = ("E", "topk", "device_name")
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
    TableLayout("lora_base_gemm", ("provider", "E", "N1", "N2", "K", "device_name"), needed=6, section="buckets"),
    TableLayout(
        "sp_collective", ("world", "H", "device_name"), needed=3, row="tokens", section="configs", case="collective"
    ),
    TableLayout("moe_front_epilogue", _FRONT, needed=3, row="tokens", prefix="epilogue", section="configs"),
    TableLayout("moe_front_strategy", _FRONT, needed=3, row="tokens", prefix="strategy", section="configs", texts=True),
)
_SECTIONS: Final = frozenset(layout.section for layout in LAYOUTS) - {""}
_BESIDE: Final = "beside"  # in a record's provenance: the members of its file that are not rows


def read_table(file: ForeignFile, about: Mapping[str, Json] = {}) -> list[Record]:
    """Return a record for each number of a table."""
    stem = file.path.name.removesuffix(".json")
    prefix = stem.partition(",")[0]
    prefix = prefix if prefix in {layout.prefix for layout in LAYOUTS} else ""
    # A comma inside brackets is part of a value: block_shape=[128,128].
    parts = re.split(r",(?![^\[]*\])", stem.removeprefix(f"{prefix},").removesuffix(_DOWN))
    values = {name: text for name, _, text in (part.partition("=") for part in parts)}
    device = values.pop("device_name", "") or values.pop("device", "")
    key: dict[str, Json] = {name: _number(text) for name, text in values.items()}
    if stem.endswith(_DOWN):
        key["down"] = True
    layout = next((known for known in LAYOUTS if known.prefix == prefix and known.fits({*key})), None)
    if layout is None or layout.file_name(key, device) != file.path.name:
        raise file.error("its name should be like E=8,N=14336,device_name=NVIDIA_H200.json")
    table = file.json()
    if VERSION in table:
        about = {**about, VERSION: table.pop(VERSION)}
    if beside := {member: value for member, value in table.items() if layout.section and member != layout.section}:
        about = {**about, _BESIDE: beside}
    name = f"gpu:{device.replace('_', ' ')}" if device else ""
    records = []
    for inside, config in layout.rows(table, file):
        problem = file.problem(name, f"{layout.op}@v0", {**key, **inside})
        chosen = config_of(config) if isinstance(config, dict) else config
        records.append(file.record(problem, chosen=chosen, about=about))
    return records


def _number(text: str) -> Json:
    return int(text) if text.isdecimal() else {"True": True, "False": False}.get(text, text)


def table_name(record: OutgoingRecord, comma: str = ",") -> str:
    """Return the name of the table that holds a record; `CodecError` if its key has other names.

    `comma` is between the sizes of a block, as the tool's loader spells them: `[128,128]`, in SGLang `[128, 128]`.
    """
    layout, key = _layout(record)
    lists = {name: re.sub(r",\s*", comma, str(value)) for name, value in key.items() if str(value)[:1] == "["}
    return layout.file_name({**key, **lists}, record.file_device)


def _layout(record: OutgoingRecord) -> tuple[TableLayout, dict[str, Any]]:
    key = record.key()
    for layout in LAYOUTS:
        if layout.holds(key, record.op):
            return layout, key
    known = "; ".join(", ".join([*(n for n in layout.names if n not in _DEVICE), layout.row]) for layout in LAYOUTS[:3])
    raise record.error(
        f"has keys of {known}; found {record.problem.call_key if record.key_map is None else ', '.join(key)}. "
        "Say how the arguments of the call give them: --map E=w1.shape[0] --map N=w2.shape[2] --map M=x.shape[0]"
    )


def row_of(record: OutgoingRecord) -> dict[str, Any]:
    """Return the row of a table that holds a record, under its place, and the facts beside the rows."""
    head, about = record.record.head, record.record.body.provenance
    layout, key = _layout(record)
    beside: Any = about.get(_BESIDE, {}) if layout.section else {}
    if not head.decided:  # a tool's null; an entry without an answer that was made here is not a fact of the tool's
        return {**beside, layout.place(key): None} if about.get("tool") in _TOOLS else {}
    chosen = decode(head.config) if layout.texts else record.values(head.config)
    if layout.texts and not isinstance(chosen, str):
        raise record.error(f"of {layout.op} holds texts as configurations, not {chosen!r}")
    return {**beside, layout.place(key): chosen}


def dump_table(table: Mapping[str, Any]) -> str:
    """Return a table as vLLM writes it: the version, the facts, then the sizes in order."""
    content: dict[str, Any] = {}
    for name in sorted(table, key=lambda name: (name != VERSION, len(name), name)):
        section, _, place = name.partition("/")
        rows, number = content, name
        if place and section in _SECTIONS:
            case, _, number = place.rpartition("/")
            rows = content.setdefault(section, {})
            rows = rows.setdefault(case, {}) if case else rows
        rows[number] = table[name]
    return json.dumps(content, indent=4)


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
