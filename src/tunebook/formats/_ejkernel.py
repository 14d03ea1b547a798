"""ejkernel's persistent cache: one JSON object, `"device|op|key"` to the fields of a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tunebook._base.config_codec import decode
from tunebook._base.vocabulary import Problem
from tunebook.formats._format import ForeignFile, Format, OutgoingRecord
from tunebook.stores._json import foreign_name, foreign_problem

if TYPE_CHECKING:
    from tunebook._base.record_format import Record


def _read(file: ForeignFile) -> list[Record]:
    records = []
    for name, config in file.json().items():
        named = foreign_problem(name)
        if named is None:
            raise file.error(f"{name!r} is not of the form device|op|key")
        if config is None:
            raise file.error(f"{name!r} has no configuration")
        problem = Problem(file.device or named.device, file.op or named.op, named.call_key)
        records.append(file.record(problem, chosen=config))
    return records


def _content(record: OutgoingRecord) -> dict[str, Any]:
    problem, name = record.problem, foreign_name(record.problem)
    if name is None:
        raise record.error(f"cannot hold {problem.op!r} with the key {problem.call_key!r}: it has a | in it")
    return {name: decode(record.record.head.config)} if record.record.head.decided else {}


FORMAT: Final = Format("ejkernel", "an ejkernel cache", "*.json", _read, _content)
