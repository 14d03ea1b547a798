"""Kernel Tuner's cache files: every configuration of one search space on one device, with samples and costs.

The tool appends to the file while it runs, so one that was interrupted lacks its last brackets. Files from AMD cards
hold samples as `[0, t]` pairs.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from tunebook._base.errors import CodecError
from tunebook._base.vocabulary import Failure, Json
from tunebook.formats._format import (
    ForeignTrial,
    Format,
    Naming,
    config_of,
    device_name,
    key_of,
    number,
    parse_json,
    plain_op,
    read_files,
    read_text,
    record_of,
    values_of,
    write_json,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import FailureKind, Measurement

_WHAT: Final = "a cache file of Kernel Tuner"
_TOOL: Final = "kernel_tuner"
_KINDS: Final[dict[str, FailureKind]] = {
    "CompilationFailedConfig": "compile",
    "RuntimeFailedConfig": "launch",
    "InvalidConfig": "launch",
}
_KNOWN: Final = ("time", "times", "compile_time", "timestamp")


def _read(path: Path, naming: Naming) -> list[Record]:
    return read_files(path, "*.json", _WHAT, lambda file: [_cache(file, naming)])


def _cache(path: Path, naming: Naming) -> Record:
    content = _parsed(read_text(path, _WHAT), path)
    names, cache = content.get("tune_params_keys"), content.get("cache")
    if not isinstance(names, list) or not isinstance(cache, dict):
        raise CodecError(f"{path} is not {_WHAT}: it needs tune_params_keys and cache")
    problem = naming.problem(
        f"gpu:{content.get('device_name', 'unknown')}",
        f"{content.get('kernel_name', path.stem)}@v0",
        {"problem_size": content.get("problem_size")},
    )
    trials = [_trial(entry, names, f"{path}: {name}") for name, entry in cache.items()]
    return record_of(problem, trials, _TOOL, about={"tune_params": content.get("tune_params")})


def _parsed(text: str, path: Path) -> dict[str, Any]:
    """Return the content of a file, with the brackets that an interrupted run did not write."""
    for missing in ("}}", "}"):
        with suppress(CodecError):
            return parse_json(text.rstrip().removesuffix(",") + missing, path, _WHAT)
    return parse_json(text, path, _WHAT)


def _trial(entry: Any, names: list[str], where: str) -> ForeignTrial:
    if not isinstance(entry, dict) or not set(names) <= entry.keys() or "time" not in entry:
        raise CodecError(f"{where} is not an entry of {_WHAT}: it needs {', '.join(names)} and time")
    config = config_of({name: entry[name] for name in names})
    rest = {name: value for name, value in entry.items() if name not in (*names, *_KNOWN)}
    compile_ms = entry.get("compile_time")
    compile_s = None if compile_ms is None else number(compile_ms, f"{where}: compile_time") / 1e3
    when = _seconds(entry.get("timestamp"), where)
    extra: dict[str, Json] = {_TOOL: {**rest, "time": entry["time"]}}
    if isinstance(entry["time"], str):
        kind = _KINDS.get(entry["time"], "launch")
        return ForeignTrial(config, failure=Failure(kind, entry["time"]), compile_s=compile_s, when=when, extra=extra)
    times = entry.get("times") or [entry["time"]]
    samples = tuple(_sample(value, where) / 1e3 for value in times)
    return ForeignTrial(config, samples, compile_s=compile_s, when=when, extra=extra)


def _sample(value: Any, where: str) -> float:
    return number(value[-1] if isinstance(value, list) and value else value, f"{where}: times")


def _seconds(timestamp: Any, where: str) -> float:
    if timestamp is None:
        return 0.0
    try:
        return datetime.fromisoformat(str(timestamp)).timestamp()
    except ValueError as error:
        raise CodecError(f"{where}: timestamp: {error}") from error


def _write(records: Sequence[Record], path: Path) -> int:
    single = len(records) == 1 and path.suffix == ".json"
    for record in records:
        name = f"{plain_op(record.problem.op)}_{device_name(record.problem.device)}".replace("/", "_")
        write_json(path if single else path / f"{name}.json", _content(record), indent=0)
    return len(records)


def _content(record: Record) -> dict[str, Any]:
    entries = [(values_of(m.config, _WHAT), m) for m in record.body.measurements]
    names = list(entries[0][0]) if entries else []
    if any(list(values) != names for values, _ in entries):
        raise CodecError(f"{_WHAT} has the same names in all configurations; those of {record.problem.op!r} differ")
    given = record.body.provenance.get("tune_params")
    return {
        "device_name": device_name(record.problem.device),
        "kernel_name": plain_op(record.problem.op),
        "problem_size": key_of(record).get("problem_size"),
        "tune_params_keys": names,
        "tune_params": given or {name: _values(name, entries) for name in names},
        "objective": "time",
        "cache": {",".join(map(str, values.values())): _entry(values, m) for values, m in entries},
    }


def _values(name: str, entries: Sequence[tuple[dict[str, Any], Measurement]]) -> list[Any]:
    return list(dict.fromkeys(values[name] for values, _ in entries))


def _entry(values: dict[str, Any], m: Measurement) -> dict[str, Any]:
    kept = m.extra.get(_TOOL)
    times_ms = [s * 1e3 for s in m.samples_s]
    mean_ms = sum(times_ms) / len(times_ms) if times_ms else None
    stamp = datetime.fromtimestamp(m.when, UTC).isoformat(sep=" ")
    entry: dict[str, Any] = {"time": mean_ms, "compile_time": (m.compile_s or 0.0) * 1e3, "timestamp": stamp}
    if m.failure is None:
        entry["times"] = times_ms
    else:
        names = {kind: name for name, kind in reversed(_KINDS.items())}
        entry["time"] = m.failure.message if m.failure.message in _KINDS else names.get(m.failure.kind, "InvalidConfig")
    # Its simulation mode adds these up.
    costs = {"verification_time": 0, "benchmark_time": sum(times_ms), "strategy_time": 0, "framework_time": 0}
    return {**values, **costs, **entry, **(kept if isinstance(kept, dict) else {})}


FORMAT: Final = Format(_TOOL, "Kernel Tuner's cache files", _read, _write)
