"""flash-linear-attention's tables: a folder per device, a file per Triton kernel, an entry per key of its autotuner.

The library finds an entry by a digest of its key. The modes "full" and "default" use the `default_config` of a file.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any, Final

from tunebook._statistics.race import typical_s
from tunebook.formats._format import ForeignFile, Format, OutgoingRecord
from tunebook.formats._triton import MAP_THE_KEY, attributes_of, candidate_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json

_VERSION: Final = "triton_version"
_DEFAULT: Final = "default_config"
_ENTRIES: Final = "autotune_entries"
_NAME: Final = "kernel_name"


def _read(file: ForeignFile) -> list[Record]:
    content = file.json()
    place = file.path.absolute()
    device, op = f"gpu:{place.parent.name.replace('_', ' ')}", f"{content.get(_NAME) or place.stem}@v0"
    about: dict[str, Json] = {_VERSION: content[_VERSION]} if _VERSION in content else {}
    entries = content.get(_ENTRIES, {})
    default = content if "kwargs" in content else content.get(_DEFAULT)  # the first form was a configuration alone
    if not isinstance(entries, dict | list) or not (entries or default):
        raise file.error(f"it needs {_ENTRIES} or {_DEFAULT}")
    records = []
    if default is not None:
        records.append(file.record(file.problem(device, op, {}), chosen=_candidate(default, file), about=about))
    for entry in entries.values() if isinstance(entries, dict) else entries:
        match entry:
            case {"autotune_key": list(key), "config": config}:
                trial = file.trial(_candidate(config, file))
            case _:
                raise file.error(f"{str(entry)[:80]} is not a key with its configuration")
        if (timing := entry.get("best_timing")) is not None:
            # the median and two quantiles, as Triton keeps them, or one time
            median_s = file.time_s(timing[0] if isinstance(timing, list) and timing else timing, "best_timing")
            trial = trial._replace(samples_s=(median_s,), extra={"fla": timing})
        problem = file.problem(device, op, {"key": key})
        records.append(file.record(problem, [trial], chosen=trial.config, about=about))
    return records


def _candidate(config: Any, file: ForeignFile) -> Json:
    if not isinstance(config, dict) or not isinstance(config.get("kwargs"), dict):
        raise file.error(f"{str(config)[:80]} is not a configuration of Triton")
    return candidate_of(config)


def _name(record: OutgoingRecord) -> str:
    return f"{re.sub('[^0-9A-Za-z]+', '_', record.device).strip('_')}/{record.op.rpartition('.')[2]}.json"


def _content(record: OutgoingRecord) -> dict[str, Any]:
    head, version = record.record.head, record.record.body.provenance.get(_VERSION)
    if not head.decided:
        return {}
    config, key = attributes_of(record.values(head.config)), record.key()
    about = {_NAME: record.op.rpartition(".")[2]} | ({} if version is None else {_VERSION: version})
    if not key:
        return {**about, _DEFAULT: config}
    if not isinstance(key.get("key"), list):
        raise record.error(f"has a list of values as its key; found {record.problem.call_key}. {MAP_THE_KEY}")
    entry = {"autotune_key": key["key"], "config": config}
    if (chosen := record.timed_choice) is not None:
        entry["best_timing"] = chosen.extra.get("fla", typical_s(chosen.samples_s) * 1e3)
    text = json.dumps(key["key"], separators=(",", ":"), sort_keys=True)
    return {**about, hashlib.md5(text.encode(), usedforsecurity=False).hexdigest(): entry}


def _dump(parts: Mapping[str, Any]) -> str:
    table = {name: parts[name] for name in (_NAME, _VERSION, _DEFAULT) if name in parts}
    entries = {digest: entry for digest, entry in parts.items() if digest not in table}
    return json.dumps({**table, _ENTRIES: entries}, indent=2)


FORMAT: Final = Format("fla", "a table of flash-linear-attention", "*.json", _read, _content, _name, dump=_dump)
