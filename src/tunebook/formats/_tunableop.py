"""PyTorch TunableOp's results: CSV lines of validators, then `operation,parameters,solution,milliseconds`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tunebook._statistics.race import typical_s
from tunebook.formats._format import ForeignFile, Format, OutgoingRecord, config_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json

_VALIDATOR: Final = "Validator"
_ARCHITECTURE: Final = "GCN_ARCH_NAME"


def _read(file: ForeignFile) -> list[Record]:
    rows = [line.split(",") for line in file.text().splitlines() if line.strip()]
    validators: dict[str, Json] = {row[1]: ",".join(row[2:]) for row in rows if row[0] == _VALIDATOR and len(row) > 1}
    # "gfx942:sramecc+:xnack-" is an architecture with its settings; on CUDA no line names the device.
    device = str(validators.get(_ARCHITECTURE, "")).partition(":")[0]
    records = []
    for row in rows:
        match row:
            case [first, *_] if first == _VALIDATOR:
                continue
            # After the time, PYTORCH_TUNABLEOP_BLAS_LOG adds the parameters of the BLAS call, with commas.
            case [op, parameters, solution, time_ms, *rest]:
                trial = file.trial(config_of({"solution": solution}))
            case _:
                raise file.error(f"{','.join(row)[:80]!r} should be operation, parameters, solution, milliseconds")
        time_s = file.time_s(time_ms, f"{op},{parameters}")
        trial = trial._replace(samples_s=(time_s,), extra={"tunableop": [time_ms, *rest]})
        problem = file.problem(f"gpu:{device}" if device else "", f"{op}@v0", {"parameters": parameters})
        records.append(file.record(problem, [trial], chosen=trial.config, about={"validators": validators}))
    if not records:
        raise file.error("it has no line with a result")
    return records


def _content(record: OutgoingRecord) -> dict[str, Any]:
    head, parameters = record.record.head, record.key().get("parameters")
    if not head.decided:
        return {}
    solution = record.values(head.config).get("solution")
    chosen = record.timed_choice
    if not isinstance(parameters, str) or not isinstance(solution, str) or chosen is None:
        raise record.error(f"has a text of parameters, a solution and a time; found {record.problem.call_key}")
    known = record.record.body.provenance.get("validators")
    validators = known.items() if isinstance(known, dict) else ()
    lines = {f"{_VALIDATOR},{name}": value for name, value in validators}
    times = chosen.extra.get("tunableop")
    rest = [str(part) for part in times] if isinstance(times, list) else [repr(typical_s(chosen.samples_s) * 1e3)]
    return {**lines, f"{record.op},{parameters}": ",".join([solution, *rest])}


def _dump(lines: Mapping[str, str]) -> str:
    # Validators first: PyTorch stops at a result of another environment.
    ordered = sorted(lines, key=lambda name: not name.startswith(f"{_VALIDATOR},"))
    return "".join(f"{name},{lines[name]}\n" for name in ordered)


FORMAT: Final = Format(
    "tunableop",
    "a results file of PyTorch TunableOp",
    "*.csv",
    _read,
    _content,
    lambda _record: "tunableop_results0.csv",
    dump=_dump,
)
