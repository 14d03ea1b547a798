"""tokamax's tables: a directory per device, a file per operation; arguments to configurations to times, all in JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from tunebook._base.errors import CodecError
from tunebook._base.record_format import canonical_json
from tunebook.formats._format import (
    ForeignTrial,
    Format,
    Naming,
    config_of,
    device_name,
    key_of,
    number,
    numbers,
    parse_json,
    plain_op,
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
    from tunebook._base.vocabulary import Json, Measurement

_WHAT: Final = "a table of tokamax"
_KNOWN: Final = ("compile_time_ms", "evaluation_times_ms")


def _read(path: Path, naming: Naming) -> list[Record]:
    return read_files(path, "*.json", _WHAT, lambda file: _table(file, naming))


def _table(path: Path, naming: Naming) -> list[Record]:
    device = f"{'tpu' if path.parent.name.startswith('tpu') else 'gpu'}:{path.parent.name}"
    records = []
    for arguments, configs in read_json(path, _WHAT).items():
        if not isinstance(configs, dict):
            raise CodecError(f"{path} is not {_WHAT}: {arguments[:60]!r} has no configurations")
        problem = naming.problem(device, f"{path.stem}@v0", parse_json(arguments, path, _WHAT))
        trials = [_trial(config, found, path) for config, found in configs.items()]
        records.append(record_of(problem, trials, "tokamax"))
    return records


def _trial(config: str, found: Any, path: Path) -> ForeignTrial:
    if not isinstance(found, dict) or "evaluation_times_ms" not in found:
        raise CodecError(f"{path} is not {_WHAT}: {config[:60]!r} has no evaluation_times_ms")
    compile_ms = found.get("compile_time_ms")
    return ForeignTrial(
        config=config_of(parse_json(config, path, _WHAT)),
        samples_s=tuple(ms / 1e3 for ms in numbers(found["evaluation_times_ms"], f"{path}: evaluation_times_ms")),
        compile_s=None if compile_ms is None else number(compile_ms, f"{path}: compile_time_ms") / 1e3,
        extra={"tokamax": {name: value for name, value in found.items() if name not in _KNOWN}},
    )


def _write(records: Sequence[Record], path: Path) -> int:
    files: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    for record in records:
        name = (device_name(record.problem.device), plain_op(record.problem.op))
        measured = [m for m in record.body.measurements if m.failure is None]
        files[name][_text(key_of(record))] = {_text(values_of(m.config, _WHAT)): _found(m) for m in measured}
    for (device, op), table in files.items():
        write_json(path / device / f"{op}.json", table)
    return len(files)


def _text(value: dict[str, Json]) -> str:
    canonical_json(value)  # `CodecError` for what JSON cannot hold
    return json.dumps(value, separators=(",", ":"))


def _found(m: Measurement) -> dict[str, Json]:
    extra = m.extra.get("tokamax")
    found: dict[str, Json] = {"evaluation_times_ms": [s * 1e3 for s in m.samples_s]}
    if m.compile_s is not None:
        found["compile_time_ms"] = m.compile_s * 1e3
    return {**(extra if isinstance(extra, dict) else {}), **found}


FORMAT: Final = Format("tokamax", "tokamax's tables, a directory per device", _read, _write)
