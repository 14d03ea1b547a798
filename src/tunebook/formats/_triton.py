"""Triton's own autotune cache (`TRITON_CACHE_AUTOTUNING=1`): `<kernel>.autotune.json`, one file per kernel and key."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from tunebook._base.config_codec import TAG
from tunebook._base.vocabulary import Failure
from tunebook.formats._format import ForeignFile, Format, OutgoingRecord

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json, Measurement

_SUFFIX: Final = ".autotune.json"
# The form in which adapters/_triton/candidate.py writes a configuration: there it equals a configuration of the kernel.
_CANDIDATE: Final = "tunebook.adapters._triton.candidate.LaunchConfig"
_OPTIONS: Final = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")
MAP_THE_KEY: Final = 'Say how the arguments give it, as Triton orders it: --map "key=[M, N, x.dtype, y.dtype]"'
# Triton keeps several times for one configuration: the median and two quantiles, or the statistics given to `do_bench`.
_MEDIAN: Final = 0


def _read(file: ForeignFile) -> list[Record]:
    content = file.json()
    key, timings = content.get("key"), content.get("configs_timings")
    if not isinstance(key, list) or not isinstance(timings, list):
        raise file.error("it needs a key and configs_timings")
    problem = file.problem("", f"{file.path.name.removesuffix(_SUFFIX)}@v0", {"key": key})
    return [file.record(problem, [_trial(entry, file) for entry in timings])]


def candidate_of(config: Mapping[str, Any]) -> Json:
    """Return a configuration of Triton as the adapter stores it, from its attributes as an object of JSON."""
    options = {name: config[name] for name in _OPTIONS if config.get(name) is not None}
    return {TAG: "custom", "t": _CANDIDATE, "v": {**config["kwargs"], **options}}


def attributes_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a configuration of Triton, from its values as the adapter stores them."""
    kwargs = {name: value for name, value in values.items() if name not in _OPTIONS}
    return {"kwargs": kwargs, **{name: values.get(name) for name in _OPTIONS}}


def _trial(entry: Any, file: ForeignFile) -> Measurement:
    match entry:
        case [{"kwargs": dict()} as config, timing]:
            pass
        case _:
            raise file.error(f"{str(entry)[:80]} is not a configuration with its times")
    times_ms = file.numbers(timing if isinstance(timing, list) else [timing], "configs_timings")
    trial = file.trial(candidate_of(config))
    # Triton writes an infinite time for a configuration that did not compile or run, without saying why.
    if not times_ms or times_ms[_MEDIAN] == float("inf"):
        return trial._replace(failure=Failure("launch", "did not compile or run under Triton"))
    return trial._replace(samples_s=(times_ms[_MEDIAN] / 1e3,), extra={"triton": list(times_ms)})


def _name(record: OutgoingRecord) -> str:
    # Triton finds a file by a digest of its own, in a directory of that name; several keys need several files.
    return f"{record.id[:16]}/{record.op}{_SUFFIX}"


def _content(record: OutgoingRecord) -> dict[str, Any]:
    key = record.key().get("key")
    if not isinstance(key, list):
        raise record.error(f"has a list of values as its key; found {record.problem.call_key}. {MAP_THE_KEY}")
    timings = []
    for m in record.measurements:
        times_ms: Any = m.extra.get("triton")
        if m.failure is not None:
            times_ms = [float("inf")] * 3
        elif not isinstance(times_ms, list):
            times_ms = [s * 1e3 for s in sorted(m.samples_s)[:1]] * 3
        timings.append([{**attributes_of(record.values(m.config)), "pre_hook": None}, times_ms])
    return {"key": key, "configs_timings": timings}


FORMAT: Final = Format(
    "triton", "an autotune cache file of Triton", f"*{_SUFFIX}", _read, _content, _name, single=True, dump=json.dumps
)
