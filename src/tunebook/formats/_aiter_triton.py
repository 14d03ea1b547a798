"""AITER's tables for Triton kernels: `gfx942-GEMM-A16W16-N=256-K=7168.json`, a configuration per case of sizes."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from tunebook._base.record_format import canonical_json
from tunebook.formats._format import ForeignFile, Format, OutgoingRecord, config_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json

_SIZES: Final = "sizes"  # the order of the sizes in the name of the file
_NAME: Final = re.compile(r"(?P<device>[A-Za-z0-9]+)-(?P<op>[A-Za-z_][^=]*?)(?P<sizes>(?:-[A-Za-z]\w*=\d+)*)\.json")


def _read(file: ForeignFile) -> list[Record]:
    table, match = file.json(), _NAME.fullmatch(file.path.name)
    if match is None:
        raise file.error("its name should be like gfx942-GEMM-A16W16-N=256-K=7168.json")
    sizes: dict[str, Json] = {name: int(size) for name, size in re.findall(r"-(\w+)=(\d+)", match["sizes"])}
    records = []
    for case, config in _cases(table, (), file):
        problem = file.problem(f"gpu:{match['device']}", f"{match['op']}@v0", {**sizes, "case": [*case]})
        records.append(file.record(problem, chosen=config_of(config), about={_SIZES: [*sizes]}))
    if not records:
        raise file.error("it has no configuration")
    return records


def _cases(
    table: Mapping[str, Any], case: tuple[str, ...], file: ForeignFile
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Yield the configurations, objects of plain values, with the names that lead to them."""
    tables = {name: item for name, item in table.items() if isinstance(item, dict)}
    if tables and len(tables) < len(table):
        raise file.error(f"{' '.join(case) or 'it'} mixes configurations with plain values")
    if not tables:
        yield case, table
    for name, item in tables.items():
        yield from _cases(item, (*case, name), file)


def _name(record: OutgoingRecord) -> str:
    key, order = record.key(), record.record.body.provenance.get(_SIZES)
    sizes = order if isinstance(order, list) else [name for name in key if name != "case"]
    return f"{record.file_device}-{record.op}{''.join(f'-{name}={key[str(name)]}' for name in sizes)}.json"


def _content(record: OutgoingRecord) -> dict[str, Any]:
    head, key = record.record.head, record.key()
    case = key.get("case")
    sizes = [size for name, size in key.items() if name != "case"]
    if not isinstance(case, list) or not all(isinstance(size, int) for size in sizes):
        raise record.error(
            f"has sizes and a case as its key; found {record.problem.call_key}. Say how the arguments of the call give "
            "them: --map N=w.shape[0] --map K=w.shape[1] --map \"case=['any']\""
        )
    return {canonical_json(case): (case, record.values(head.config))} if head.decided else {}


def _dump(rows: Mapping[str, tuple[list[str], Any]]) -> str:
    top: dict[str, Any] = {}
    for case, config in rows.values():
        table = top
        for name in case[:-1]:
            table = table.setdefault(name, {})
        if case:
            table[case[-1]] = config
        else:
            top = config
    return json.dumps(top, indent=4)


FORMAT: Final = Format(
    "aiter_triton", "a table of AITER for a Triton kernel", "*.json", _read, _content, _name, dump=_dump
)
