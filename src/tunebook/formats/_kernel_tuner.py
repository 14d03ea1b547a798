"""Kernel Tuner's cache files: every configuration of a search space on a device, with samples and costs.

The tool appends to the file while it runs, so the file of an interrupted run lacks its last brackets. Files from AMD
cards hold samples as `[0, t]` pairs.
"""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tunebook._base.errors import CodecError
from tunebook._base.vocabulary import Failure
from tunebook.formats._format import ForeignFile, Format, OutgoingRecord, config_of

if TYPE_CHECKING:
    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import FailureKind, Measurement

_TOOL: Final = "kernel_tuner"
_KINDS: Final[dict[str, FailureKind]] = {
    "CompilationFailedConfig": "compile",
    "RuntimeFailedConfig": "launch",
    "InvalidConfig": "launch",
}
_KNOWN: Final = ("time", "times", "compile_time", "timestamp")


def _read(file: ForeignFile) -> list[Record]:
    content = _parse(file)
    names, cache = content.get("tune_params_keys"), content.get("cache")
    if not isinstance(names, list) or not isinstance(cache, dict):
        raise file.error("it needs tune_params_keys and cache")
    problem = file.problem(
        f"gpu:{content.get('device_name', 'unknown')}",
        f"{content.get('kernel_name', file.path.stem)}@v0",
        {"problem_size": content.get("problem_size")},
    )
    trials = [_trial(entry, names, name, file) for name, entry in cache.items()]
    return [file.record(problem, trials, about={"tune_params": content.get("tune_params")})]


def _parse(file: ForeignFile) -> dict[str, Any]:
    """Return the content of a file, with the brackets that an interrupted run did not write."""
    text = file.text()
    for missing in ("}}", "}"):
        with suppress(CodecError):
            return file.json(text.rstrip().removesuffix(",") + missing)
    return file.json(text)


def _trial(entry: Any, names: list[str], where: str, file: ForeignFile) -> Measurement:
    if not isinstance(entry, dict) or not set(names) <= entry.keys() or "time" not in entry:
        raise file.error(f"{where} needs {', '.join(names)} and time")
    rest = {name: value for name, value in entry.items() if name not in (*names, *_KNOWN)}
    stamp = entry.get("timestamp")
    try:
        when_s = 0.0 if stamp is None else datetime.fromisoformat(str(stamp)).timestamp()
    except ValueError as error:
        raise file.error(f"{where}: timestamp: {error}") from error
    trial = file.trial(config_of({name: entry[name] for name in names}))._replace(
        compile_s=file.seconds(entry.get("compile_time"), f"{where}: compile_time"),
        when=when_s,
        extra={_TOOL: {**rest, "time": entry["time"]}},
    )
    if isinstance(entry["time"], str):
        return trial._replace(failure=Failure(_KINDS.get(entry["time"], "launch"), entry["time"]))
    given = entry.get("times") or [entry["time"]]
    times = [value[-1] if isinstance(value, list) and value else value for value in given]
    return trial._replace(samples_s=tuple(ms / 1e3 for ms in file.numbers(times, f"{where}: times")))


def _name(record: OutgoingRecord) -> str:
    return f"{record.op}_{record.device}.json".replace("/", "_")


def _content(record: OutgoingRecord) -> dict[str, Any]:
    entries = [(record.values(m.config), m) for m in record.measurements]
    names = list(entries[0][0]) if entries else []
    if any(list(values) != names for values, _ in entries):
        raise record.error(f"has the same names in all configurations; in {record.problem.op!r} they differ")
    tried = {name: list(dict.fromkeys(values[name] for values, _ in entries)) for name in names}
    return {
        "device_name": record.device,
        "kernel_name": record.op,
        "problem_size": record.key().get("problem_size"),
        "tune_params_keys": names,
        "tune_params": record.record.body.provenance.get("tune_params") or tried,
        "objective": "time",
        "cache": {",".join(map(str, values.values())): _entry(values, m) for values, m in entries},
    }


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


FORMAT: Final = Format(
    _TOOL,
    "a cache file of Kernel Tuner",
    "*.json",
    _read,
    _content,
    _name,
    single=True,
    dump=partial(json.dumps, indent=0),
)
