"""T4, the common form for results of auto-tuners: one list of configurations with times and validity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tunebook._base.errors import CodecError
from tunebook._base.vocabulary import Failure
from tunebook.formats._format import (
    UNKNOWN_DEVICE,
    ForeignTrial,
    Format,
    Naming,
    config_of,
    number,
    numbers,
    plain_op,
    read_files,
    read_json,
    record_of,
    values_of,
    write_json,
)
from tunebook.stores import problem_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import FailureKind, Json, Measurement

_WHAT: Final = "a T4 results file"
_VERSION: Final = "1.0.0"
_UNITS: Final[Mapping[str, float]] = {"seconds": 1.0, "milliseconds": 1e3, "microseconds": 1e6, "nanoseconds": 1e9}
_KINDS: Final[Mapping[str, FailureKind]] = {
    "compile": "compile",
    "runtime": "launch",
    "timeout": "timeout",
    "correctness": "wrong-result",
    "constraints": "launch",
}
_WRITTEN: Final[Mapping[str, str]] = {
    "compile": "compile",
    "launch": "runtime",
    "timeout": "timeout",
    "crash": "runtime",
    "memory": "runtime",
    "wrong-result": "correctness",
    "nan": "correctness",
}


def _read(path: Path, naming: Naming) -> list[Record]:
    return read_files(path, "*.json", _WHAT, lambda file: [_results(file, naming)])


def _results(path: Path, naming: Naming) -> Record:
    content = read_json(path, _WHAT)
    results, about = content.get("results"), content.get("metadata")
    if not isinstance(results, list):
        raise CodecError(f"{path} is not {_WHAT}: it needs a list of results")
    about = about if isinstance(about, dict) else {}
    unit = _UNITS.get(str(about.get("timeunit", "milliseconds")))
    if unit is None:
        raise CodecError(f"{path}: timeunit {about.get('timeunit')!r} is none of {', '.join(_UNITS)}")
    ours = about.get("tunebook")
    known = ours if isinstance(ours, dict) else {}
    device, op = str(known.get("device", UNKNOWN_DEVICE)), str(known.get("op", f"{path.stem}@v0"))
    problem = naming.problem(device, op, {})
    if "call_key" in known:
        problem = problem._replace(call_key=str(known["call_key"]))
    return record_of(problem, [_trial(result, unit, path) for result in results], "t4")


def _trial(result: Any, unit: float, path: Path) -> ForeignTrial:
    match result:
        case {"configuration": dict() as config, "times": dict() as times, "invalidity": str() as invalidity}:
            pass
        case _:
            raise CodecError(f"{path} is not {_WHAT}: a result needs configuration, times and invalidity")
    compiling = times.get("compilation_time", times.get("compilation"))
    compile_s = None if compiling is None else number(compiling, f"{path}: compilation") / unit
    if invalidity != "correct":
        kind = _KINDS.get(invalidity)
        if kind is None:
            raise CodecError(f"{path}: invalidity {invalidity!r} is none of {', '.join((*_KINDS, 'correct'))}")
        return ForeignTrial(config_of(config), failure=Failure(kind, invalidity), compile_s=compile_s)
    runtimes = numbers(times.get("runtimes") or _measured_time(result), f"{path}: runtimes")
    return ForeignTrial(config_of(config), tuple(value / unit for value in runtimes), compile_s=compile_s)


def _measured_time(result: Mapping[str, Any]) -> list[Json]:
    measurements = result.get("measurements") or []
    return [m["value"] for m in measurements if isinstance(m, dict) and m.get("name") == "time" and "value" in m]


def _write(records: Sequence[Record], path: Path) -> int:
    single = len(records) == 1 and path.suffix == ".json"
    for record in records:
        name = f"{plain_op(record.problem.op)}-{problem_id(record.problem)[:8]}.json".replace("/", "_")
        content = {
            "schema_version": _VERSION,
            # T4 does not say what was tuned; a section of our own does.
            "metadata": {"timeunit": "milliseconds", "tunebook": record.problem._asdict()},
            "results": [_result(m) for m in record.body.measurements],
        }
        write_json(path if single else path / name, content)
    return len(records)


def _result(m: Measurement) -> dict[str, Any]:
    times_ms = [s * 1e3 for s in m.samples_s]
    times: dict[str, Any] = {"runtimes": times_ms}
    if m.compile_s is not None:
        times["compilation_time"] = m.compile_s * 1e3
    measured = [{"name": "time", "value": sum(times_ms) / len(times_ms), "unit": "ms"}] if times_ms else []
    return {
        "configuration": values_of(m.config, _WHAT),
        "objectives": ["time"],
        "times": times,
        "invalidity": "correct" if m.failure is None else _WRITTEN.get(m.failure.kind, "runtime"),
        "correctness": 1 if m.failure is None else 0,
        "measurements": measured,
    }


FORMAT: Final = Format("t4", "T4, the common form of auto-tuning results", _read, _write)
