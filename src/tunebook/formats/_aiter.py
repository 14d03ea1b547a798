"""AITER's tuned tables: CSV files with a column per size and setting, the chosen kernel, its time and its error.

Its `untuned` files list shapes without results. Releases add columns: every column that is not part of a choice or a
measurement is part of the key.
"""

from __future__ import annotations

import csv
import io
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from tunebook._base.record_format import canonical_json
from tunebook._statistics.race import typical_s
from tunebook.formats._format import ForeignFile, Format, OutgoingRecord, config_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json

_CHOICE: Final = frozenset({
    "kernelId", "kernelName", "kernelName1", "kernelName2", "splitK", "ksplit", "libtype", "solidx", "block_m",
    "run_1stage", "xbf16",
})  # fmt: skip
_MEASURED: Final = frozenset({
    "us", "us1", "us2", "tflops", "bw", "errRatio", "err_ratio", "err1", "err2", "_tag",
})  # fmt: skip
_COLUMNS: Final = "columns"


def _read(file: ForeignFile) -> list[Record]:
    try:
        rows = list(csv.reader(io.StringIO(file.text())))
    except csv.Error as error:
        raise file.error(error) from error
    columns = rows[0] if rows else []
    if "us" not in columns or not _CHOICE & {*columns}:
        raise file.error(f"it has no times (a column us) of chosen kernels: its columns are {', '.join(columns)[:200]}")
    records = []
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(columns):
            raise file.error(f"line {number} has {len(row)} values for {len(columns)} columns")
        values = {name: _typed(text) for name, text in zip(columns, row, strict=True)}
        key = {name: value for name, value in values.items() if name not in _CHOICE | _MEASURED}
        trial = file.trial(config_of({name: value for name, value in values.items() if name in _CHOICE}))._replace(
            samples_s=(file.time_s(values["us"], f"line {number}: us", 1e6),),
            extra={"aiter": {name: value for name, value in values.items() if name in _MEASURED}},
        )
        problem = file.problem(f"gpu:{values['gfx']}" if "gfx" in values else "", f"{file.path.stem}@v0", key)
        records.append(file.record(problem, [trial], chosen=trial.config, about={_COLUMNS: [*columns]}))
    return records


def _typed(text: str) -> Json:
    """Return a number if it has this very text, else the text: a written file must be the one that was read."""
    for kind in (int, float):
        with suppress(ValueError):
            if str(number := kind(text)) == text and math.isfinite(number):
                return number
    return text


def _content(record: OutgoingRecord) -> dict[str, Any]:
    head, key = record.record.head, record.key()
    if not head.decided:
        return {}
    if (chosen := record.timed_choice) is None:
        raise record.error(f"has a time for each choice; {record.problem.op!r} has none")
    if nested := [name for name, value in key.items() if isinstance(value, dict | list)]:
        raise record.error(
            f"has a column for each part of a key; found {', '.join(nested)} in {record.problem.call_key}. Say how the "
            "arguments of the call give the columns: --map M=x.shape[0] --map N=w.shape[0] --map K=w.shape[1]"
        )
    extra = chosen.extra.get("aiter")
    measured = extra if isinstance(extra, dict) else {"us": typical_s(chosen.samples_s) * 1e6}
    columns = record.record.body.provenance.get(_COLUMNS)
    row = {**key, **record.values(head.config), **measured}
    return {_COLUMNS: columns if isinstance(columns, list) else [*row], canonical_json(key): row}


def _dump(parts: Mapping[str, Any]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, parts[_COLUMNS], lineterminator="\n")
    writer.writeheader()
    writer.writerows(row for name, row in parts.items() if name != _COLUMNS)
    return text.getvalue()


FORMAT: Final = Format(
    "aiter", "a tuned table of AITER", "*.csv", _read, _content, lambda record: f"{record.op}.csv", dump=_dump
)
