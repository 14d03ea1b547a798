"""The text of a JSON book: what is ours in it, what is another tool's, and how to write it for the eye.

{
  "<device>|<op>|<key>": {...},            entries of other tools, left alone (ejkernel writes these)
  "tunebook": {
    "version": 1,
    "records": {"<id>": {"crc": "9d1c2a04", "head": {...}, "body": {...}}}
  }
}

Every record has its own checksum, so that one spoilt by hand is missed and the others are not.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tunebook._base.errors import CodecError
from tunebook._base.record_format import Head, Record, canonical_json
from tunebook._base.vocabulary import Json, Problem
from tunebook.stores._ids import problem_id

if TYPE_CHECKING:
    from collections.abc import Iterator

_VERSION: Final = 1
_SECTION: Final = "tunebook"
_LINE_CHARS: Final = 110
_encode: Final = json.JSONEncoder().encode

_Entries = dict[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonContent:
    """What a file holds; its dicts belong to whoever parsed it. Unknown fields are in `foreign` and `section`.

    `fault` says why the file could not be understood, and then the rest is empty. `keep` is the kind of fault for
    which the file must stay as it is, because it may well be whole.
    """

    foreign: _Entries = field(default_factory=dict)
    records: _Entries = field(default_factory=dict)
    section: _Entries = field(default_factory=dict)
    fault: str = ""
    keep: str = ""


def parse(data: bytes) -> JsonContent:
    """Take a file's text apart; never raises."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        return JsonContent(fault=f"not JSON: {error}"[:200])
    if not isinstance(fields, dict):
        return JsonContent(fault=f"a JSON object is needed, not {type(fields).__name__}")
    section = fields.pop(_SECTION, {"version": _VERSION, "records": {}})
    if not isinstance(section, dict) or type(version := section.pop("version", None)) is not int:
        return JsonContent(fault=f"{_SECTION!r} in it is not a book")
    if version > _VERSION:
        fault = f"version {version} is newer than {_VERSION}, the last that this release knows. Upgrade tunebook"
        return JsonContent(fault=fault, keep="newer")
    records = section.pop("records", None)
    if version != _VERSION or not isinstance(records, dict):
        return JsonContent(fault=f"{_SECTION!r} in it is not a book")
    return JsonContent(foreign=fields, records=records, section=section)


def text_of(content: JsonContent) -> bytes:
    """Put a file's text together; RecursionError if another tool's entries are nested too deeply."""
    records = dict(sorted(content.records.items(), key=lambda item: _reading_order(item[1])))
    section: _Entries = {**content.section, "version": _VERSION, "records": records}
    return f"{_layout({**content.foreign, _SECTION: section})}\n".encode("ascii")


def encode_entry(record: Record) -> _Entries:
    """Return a record as it stands in the file; `CodecError` if it is too large, or not JSON."""
    record.to_bytes()
    head, body = record.to_fields()
    return {"crc": _crc(canonical_json([head, body])), "head": head, "body": body}


def decode_entry(name: str, entry: Json) -> Record:
    """Return the record that stands under a name; `CodecError` if it is damaged or another's."""
    match entry:
        case {"crc": crc, "head": dict() as head, "body": dict() as body}:
            text = canonical_json([head, body])
        case _:
            raise CodecError("crc, head and body are needed")
    if crc != _crc(text):
        raise CodecError("its checksum does not match")
    # From the text: what is handed out must not share its lists and dicts with the parsed file.
    record = Record.from_fields(*json.loads(text))
    if problem_id(record.problem) != name:
        raise CodecError("it stands under another problem's name")
    return record


def imported_name(problem: Problem) -> str | None:
    """Return the name of another tool's entry for a problem, or None where that name could mean another one.

    The device's own text has bars in it ("gpu|NVIDIA H200"), so a name can be taken apart only from the right, and
    only if neither the operation nor the key has one.
    """
    if "|" in problem.op or "|" in problem.call_key:
        return None
    return "|".join(problem)


def imported_problem(name: str) -> Problem | None:
    """Return the problem that another tool's entry is for, or None if its name is not of the form device|op|key."""
    parts = name.rsplit("|", 2)
    return Problem(*parts) if len(parts) == 3 else None


def imported_problems(content: JsonContent) -> Iterator[Problem]:
    """Yield the problems of other tools' entries."""
    return filter(None, map(imported_problem, content.foreign))


def imported_record(problem: Problem, config: Json) -> Record:
    """Return another tool's entry as a record; `CodecError` if it cannot be one."""
    record = Record(Head(problem=problem, config=config, checksum="", origin="imported"))
    return Record.from_bytes(record.to_bytes())  # through bytes, for the reason given in `decode_entry`


def _crc(text: str) -> str:
    return f"{zlib.crc32(text.encode('ascii')):08x}"


def _reading_order(entry: Json) -> tuple[str, str, str]:
    """Order entries by device, operation and key, so that a person and a diff find them; damaged ones come first."""
    match entry:
        case {"head": {"device": str() as device, "op": str() as op, "call_key": str() as call_key}}:
            return device, op, call_key
        case _:
            return "", "", ""


def _layout(value: Json, indent: str = "") -> str:
    """Write JSON for the eye: what fits on a line stays on one, and so does a list of numbers.

    `json.dumps(indent=2)` gives every sample of every measurement a line of its own.
    """
    inner = indent + "  "
    match value:
        case dict():
            parts = [f"{_encode(name)}: {_layout(item, inner)}" for name, item in value.items()]
            return _broken("{", parts, "}", indent)
        case list() if any(isinstance(item, (dict, list)) for item in value):
            return _broken("[", [_layout(item, inner) for item in value], "]", indent)
        case _:
            return _encode(value)


def _broken(begin: str, parts: list[str], end: str, indent: str) -> str:
    line = f"{begin}{', '.join(parts)}{end}"
    if len(line) + len(indent) <= _LINE_CHARS and "\n" not in line:
        return line
    joined = f",\n{indent}  ".join(parts)
    return f"{begin}\n{indent}  {joined}\n{indent}{end}"
