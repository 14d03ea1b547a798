"""What a format is, and how what another tool tried becomes a record."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._base.config_codec import decode, encode, fingerprint_of
from tunebook._base.errors import CodecError, StoreError, warn_once
from tunebook._base.record_format import Body, Head, Record, canonical_json
from tunebook._base.vocabulary import Failure, Json, Measurement, Problem
from tunebook._space.space import Config
from tunebook._statistics.race import typical_s
from tunebook.stores._files import replace_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

# A recorded space has 10^4 configurations, and a record is read whole. The slowest of them teach a search nothing.
KEPT: Final = 2000
UNKNOWN_DEVICE: Final = "unknown"


class Naming(NamedTuple):
    """What a file may not say: the operation and the device, as they stand in keys. Empty: as the file has it."""

    op: str = ""
    device: str = ""

    def problem(self, device: str, op: str, key: Mapping[str, Json]) -> Problem:
        """Return the problem of a key that is written as tunebook writes its own."""
        return Problem(self.device or device, self.op or op, canonical_json(dict(key)))


class Format(NamedTuple):
    """One tool's file. `read` and `write` take a file or a directory of such, as the tool has them.

    `read(path, naming)` raises `CodecError` for what is not such a file, `StoreError` for what cannot be read.
    `write(records, path)` returns how many files it wrote; `CodecError` if the format cannot hold a record.
    """

    name: str
    about: str
    read: Callable[[Path, Naming], list[Record]]
    write: Callable[[Sequence[Record], Path], int]


class ForeignTrial(NamedTuple):
    """What another tool found out about one configuration."""

    config: Json  # encoded
    samples_s: tuple[float, ...] = ()
    failure: Failure | None = None
    compile_s: float | None = None
    when: float = 0.0
    extra: Mapping[str, Json] = {}


def record_of(
    problem: Problem,
    trials: Iterable[ForeignTrial],
    tool: str,
    *,
    chosen: Json = None,
    about: Mapping[str, Json] | None = None,
) -> Record:
    """Return the record of what a tool tried: its choice, else the fastest; no decision if everything failed.

    `about` are facts of the file that have no other place in a record, and are needed to write it again.
    """
    kept = _fastest(list(trials))
    timed = [trial for trial in kept if trial.samples_s]
    if chosen is None and timed:
        chosen = min(timed, key=_typical_s).config
    head = Head(problem=problem, config=chosen, checksum="", origin="imported")
    when = max((trial.when for trial in kept), default=0.0)
    measured = tuple(_measurement(trial, tool) for trial in kept if trial.samples_s or trial.failure)
    return Record(head, Body(measurements=measured, provenance={"when": when, "tool": tool, **(about or {})}))


def _typical_s(trial: ForeignTrial) -> float:
    return typical_s(trial.samples_s) if trial.samples_s else math.inf


def _fastest(trials: list[ForeignTrial]) -> list[ForeignTrial]:
    """Return those that are kept, in the file's order."""
    if len(trials) <= KEPT:
        return trials
    slowest_kept = sorted(map(_typical_s, trials))[KEPT - 1]
    return [trial for trial in trials if _typical_s(trial) <= slowest_kept][:KEPT]


def _measurement(trial: ForeignTrial, tool: str) -> Measurement:
    return Measurement(
        config=trial.config,
        fingerprint=fingerprint_of(trial.config),
        code="",  # unknown, so that it is never taken for a time of the code at hand
        policy=f"as {tool} measures",
        environment="",
        samples_s=trial.samples_s,
        failure=trial.failure,
        compile_s=trial.compile_s,
        when=trial.when,
        extra=trial.extra,
    )


def config_of(values: Mapping[str, Any]) -> Json:
    """Return named values as a configuration of a `Space` is written."""
    return encode(Config(**values))


def values_of(config: Json, what: str) -> dict[str, Any]:
    """Return the named values of an encoded configuration; `CodecError` if it has none, or they are not plain."""
    plain = decode(config)
    if not isinstance(plain, dict) or not all(isinstance(name, str) for name in plain):
        raise CodecError(f"{what} holds configurations with named values, not {plain!r}")
    return plain


def key_of(record: Record) -> dict[str, Any]:
    """Return a record's call key as an object; `CodecError` if it is a text of another form."""
    try:
        key = json.loads(record.problem.call_key)
    except ValueError:
        key = None
    if not isinstance(key, dict):
        raise CodecError(f"the key {record.problem.call_key!r} of {record.problem.op!r} has no named parts")
    return key


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Return the object in a file; errors name the file and what it should be."""
    return parse_json(read_text(path, what), path, what)


def read_text(path: Path, what: str) -> str:
    """Return the text of a file; `StoreError` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise StoreError("read", str(path), f"cannot read {path} as {what}: {error}") from error
    except ValueError as error:
        raise CodecError(f"{path} is not {what}: {error}") from error


def parse_json(text: str, path: Path, what: str) -> dict[str, Any]:
    """Return the object that a text is; `CodecError` if it is something else."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"{path} is not {what}: {error}") from error
    if not isinstance(content, dict):
        raise CodecError(f"{path} is not {what}: a JSON object is needed, found {type(content).__name__}")
    return content


def write_json(path: Path, content: object, *, indent: int | None = 2) -> None:
    """Write a file, all or nothing; `CodecError` if a value has no place in JSON."""
    try:
        text = json.dumps(content, indent=indent)
    except (TypeError, ValueError) as error:
        raise CodecError(f"{path}: a configuration holds what JSON cannot: {error}") from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())
    except OSError as error:
        raise StoreError("write", str(path), f"cannot write {path}: {error}") from error


def read_files(path: Path, pattern: str, what: str, read: Callable[[Path], list[Record]]) -> list[Record]:
    """Return what a file holds, or all files below a directory: there a broken one costs a warning, not the others."""
    if not path.is_dir():
        return read(path)
    records, readable = [], 0
    for file in sorted(path.rglob(pattern)):
        if not file.stat().st_size:
            continue  # tokamax ships some that are empty, for operations that have no table on a device
        try:
            records += read(file)
            readable += 1
        except CodecError as error:
            warn_once("unreadable", str(file), f"left out: {error}")
    if not readable:
        raise CodecError(f"{path} has no {pattern} in it that is {what}")
    return records


def number(value: object, where: str) -> float:
    """Return a number of a file's; `CodecError` that says where it stands if it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CodecError(f"{where} should be a number, found {value!r}")
    return float(value)


def numbers(values: object, where: str) -> tuple[float, ...]:
    """Return a list of numbers of a file's."""
    if not isinstance(values, list):
        raise CodecError(f"{where} should be a list of numbers, found {values!r}")
    return tuple(number(value, where) for value in values)


def device_name(device: str) -> str:
    """Return the hardware's own name in a device of a key: "gpu:NVIDIA H200" is an NVIDIA H200."""
    return device.partition(":")[2] or device


def plain_op(op: str) -> str:
    """Return an operation without its version."""
    return op.rpartition("@v")[0] or op
