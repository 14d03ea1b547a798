"""Triton's own autotune cache (`TRITON_CACHE_AUTOTUNING=1`): `<kernel>.autotune.json`, one file per kernel and key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tunebook._base.config_codec import TAG
from tunebook._base.errors import CodecError
from tunebook._base.vocabulary import Failure
from tunebook.formats._format import (
    UNKNOWN_DEVICE,
    ForeignTrial,
    Format,
    Naming,
    key_of,
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
    from collections.abc import Sequence
    from pathlib import Path

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json

_WHAT: Final = "an autotune cache file of Triton"
_SUFFIX: Final = ".autotune.json"
# As adapters/_triton/candidate.py writes a configuration, so that one from here is one of the kernel's own there.
_CANDIDATE: Final = "tunebook.adapters._triton.candidate.LaunchConfig"
_OPTIONS: Final = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")
# Of the times that Triton keeps for one configuration: the median and two quantiles, or what `do_bench` was told to.
_MEDIAN: Final = 0


def _read(path: Path, naming: Naming) -> list[Record]:
    return read_files(path, f"*{_SUFFIX}", _WHAT, lambda file: [_cache(file, naming)])


def _cache(path: Path, naming: Naming) -> Record:
    content = read_json(path, _WHAT)
    key, timings = content.get("key"), content.get("configs_timings")
    if not isinstance(key, list) or not isinstance(timings, list):
        raise CodecError(f"{path} is not {_WHAT}: it needs a key and configs_timings")
    problem = naming.problem(UNKNOWN_DEVICE, f"{path.name.removesuffix(_SUFFIX)}@v0", {"key": key})
    return record_of(problem, [_trial(entry, path) for entry in timings], "triton")


def _trial(entry: Any, path: Path) -> ForeignTrial:
    match entry:
        case [{"kwargs": dict() as kwargs} as config, timing]:
            options = {name: config[name] for name in _OPTIONS if config.get(name) is not None}
        case _:
            raise CodecError(f"{path} is not {_WHAT}: {str(entry)[:80]} is not a configuration with its times")
    times_ms = numbers(timing if isinstance(timing, list) else [timing], f"{path}: configs_timings")
    encoded: Json = {TAG: "custom", "t": _CANDIDATE, "v": {**kwargs, **options}}
    extra: dict[str, Json] = {"triton": list(times_ms)}
    # Infinite is what Triton writes for a configuration that did not compile or run, without saying why.
    good = times_ms and times_ms[_MEDIAN] < float("inf")
    if good:
        return ForeignTrial(encoded, (times_ms[_MEDIAN] / 1e3,), extra=extra)
    return ForeignTrial(encoded, failure=Failure("launch", "did not compile or run under Triton"))


def _write(records: Sequence[Record], path: Path) -> int:
    single = len(records) == 1 and path.name.endswith(_SUFFIX)
    for record in records:
        op = plain_op(record.problem.op)
        # Triton finds a file by a digest of its own, in a directory of that name; several keys need several files.
        file = path if single else path / problem_id(record.problem)[:16] / f"{op}{_SUFFIX}"
        key = key_of(record).get("key")
        if not isinstance(key, list):
            raise CodecError(f"{_WHAT} has a list of values as its key; found {record.problem.call_key}")
        timings = [[_config(m.config), _timing(m)] for m in record.body.measurements]
        write_json(file, {"key": key, "configs_timings": timings}, indent=None)
    return len(records)


def _config(config: Json) -> dict[str, Json]:
    values = values_of(config, _WHAT)
    options = {name: values.pop(name, None) for name in _OPTIONS}
    return {"kwargs": values, **options, "pre_hook": None}


def _timing(m: Any) -> list[float]:
    if m.failure is not None:
        return [float("inf")] * 3
    kept = m.extra.get("triton")
    return list(kept) if isinstance(kept, list) else [s * 1e3 for s in sorted(m.samples_s)[:1]] * 3


FORMAT: Final = Format("triton", "Triton's autotune cache, <kernel>.autotune.json", _read, _write)
