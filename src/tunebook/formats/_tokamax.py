"""tokamax's tables: a directory per device, a file per operation; arguments to configurations to times, all in JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from tunebook._base.record_format import canonical_json
from tunebook.formats._format import ForeignFile, Format, OutgoingRecord, config_of

if TYPE_CHECKING:
    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json, Measurement

_KNOWN: Final = ("compile_time_ms", "evaluation_times_ms")


def _read(file: ForeignFile) -> list[Record]:
    place = file.path.parent.name
    device = f"{'tpu' if place.startswith('tpu') else 'gpu'}:{place}"
    records = []
    for arguments, configs in file.json().items():
        if not isinstance(configs, dict):
            raise file.error(f"{arguments[:60]!r} has no configurations")
        problem = file.problem(device, f"{file.path.stem}@v0", file.json(arguments))
        records.append(file.record(problem, [_trial(*found, file) for found in configs.items()]))
    return records


def _trial(config: str, found: Any, file: ForeignFile) -> Measurement:
    if not isinstance(found, dict) or "evaluation_times_ms" not in found:
        raise file.error(f"{config[:60]!r} has no evaluation_times_ms")
    return file.trial(config_of(file.json(config)))._replace(
        samples_s=tuple(ms / 1e3 for ms in file.numbers(found["evaluation_times_ms"], "evaluation_times_ms")),
        compile_s=file.seconds(found.get("compile_time_ms"), "compile_time_ms"),
        extra={"tokamax": {name: value for name, value in found.items() if name not in _KNOWN}},
    )


def _content(record: OutgoingRecord) -> dict[str, Any]:
    measured = [m for m in record.measurements if m.failure is None]
    return {_text(record.key()): {_text(record.values(m.config)): _found(m) for m in measured}}


def _text(value: dict[str, Json]) -> str:
    canonical_json(value)  # `CodecError` for a value that JSON cannot hold
    return json.dumps(value, separators=(",", ":"))


def _found(m: Measurement) -> dict[str, Json]:
    extra = m.extra.get("tokamax")
    found: dict[str, Json] = {"evaluation_times_ms": [s * 1e3 for s in m.samples_s]}
    if m.compile_s is not None:
        found["compile_time_ms"] = m.compile_s * 1e3
    return {**(extra if isinstance(extra, dict) else {}), **found}


FORMAT: Final = Format(
    "tokamax", "a table of tokamax", "*.json", _read, _content, lambda record: f"{record.device}/{record.op}.json"
)
