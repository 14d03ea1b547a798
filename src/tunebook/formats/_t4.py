"""T4, the common form for results of auto-tuners: one list of configurations with times and validity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tunebook._base.vocabulary import Failure
from tunebook.formats._format import ForeignFile, Format, OutgoingRecord, config_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import FailureKind, Measurement

_UNITS: Final[Mapping[str, float]] = {"seconds": 1.0, "milliseconds": 1e3, "microseconds": 1e6, "nanoseconds": 1e9}
_KINDS: Final[dict[str, FailureKind]] = {
    "compile": "compile",
    "runtime": "launch",
    "timeout": "timeout",
    "correctness": "wrong-result",
    "constraints": "launch",
}
_WRITTEN: Final = {kind: name for name, kind in reversed(_KINDS.items())} | {"nan": "correctness"}


def _read(file: ForeignFile) -> list[Record]:
    content = file.json()
    results, about = content.get("results"), content.get("metadata")
    if not isinstance(results, list):
        raise file.error("it needs a list of results")
    about = about if isinstance(about, dict) else {}
    unit = _UNITS.get(str(about.get("timeunit", "milliseconds")))
    if unit is None:
        raise file.error(f"unknown timeunit {about.get('timeunit')!r}; known are {', '.join(_UNITS)}")
    ours = about.get("tunebook")
    known = ours if isinstance(ours, dict) else {}
    device, op = str(known.get("device", "")), str(known.get("op", f"{file.path.stem}@v0"))
    problem = file.problem(device, op, {})
    if "call_key" in known:
        problem = problem._replace(call_key=str(known["call_key"]))
    return [file.record(problem, [_trial(result, unit, file) for result in results])]


def _trial(result: Any, unit: float, file: ForeignFile) -> Measurement:
    match result:
        case {"configuration": dict() as config, "times": dict() as times, "invalidity": str() as invalidity}:
            pass
        case _:
            raise file.error("a result needs configuration, times and invalidity")
    compile_s = file.seconds(times.get("compilation_time", times.get("compilation")), "compilation", unit)
    trial = file.trial(config_of(config))._replace(compile_s=compile_s)
    if invalidity != "correct":
        kind = _KINDS.get(invalidity)
        if kind is None:
            raise file.error(f"unknown invalidity {invalidity!r}; known are {', '.join((*_KINDS, 'correct'))}")
        return trial._replace(failure=Failure(kind, invalidity))
    found = [m for m in result.get("measurements") or [] if isinstance(m, dict) and m.get("name") == "time"]
    runtimes = file.numbers(times.get("runtimes") or [m["value"] for m in found if "value" in m], "runtimes")
    return trial._replace(samples_s=tuple(value / unit for value in runtimes))


def _name(record: OutgoingRecord) -> str:
    return f"{record.op}-{record.id[:8]}.json".replace("/", "_")


def _content(record: OutgoingRecord) -> dict[str, Any]:
    return {
        "schema_version": "1.0.0",
        # T4 does not name the tuned kernel; a section of our own does.
        "metadata": {"timeunit": "milliseconds", "tunebook": record.problem._asdict()},
        "results": [_result(m, record.values(m.config)) for m in record.measurements],
    }


def _result(m: Measurement, values: dict[str, Any]) -> dict[str, Any]:
    times_ms = [s * 1e3 for s in m.samples_s]
    times: dict[str, Any] = {"runtimes": times_ms}
    if m.compile_s is not None:
        times["compilation_time"] = m.compile_s * 1e3
    measured = [{"name": "time", "value": sum(times_ms) / len(times_ms), "unit": "ms"}] if times_ms else []
    return {
        "configuration": values,
        "objectives": ["time"],
        "times": times,
        "invalidity": "correct" if m.failure is None else _WRITTEN.get(m.failure.kind, "runtime"),
        "correctness": 1 if m.failure is None else 0,
        "measurements": measured,
    }


FORMAT: Final = Format("t4", "a T4 results file", "*.json", _read, _content, _name, single=True)
