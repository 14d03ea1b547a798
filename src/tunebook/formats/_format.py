"""The parts that formats share: reading a file, the record of another tool's trials, and writing files."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from tunebook._base.config_codec import decode, encode, fingerprint_of
from tunebook._base.errors import CodecError, DefinitionError, StoreError, warn_once
from tunebook._base.record_format import Body, Head, Record, canonical_json
from tunebook._base.vocabulary import Json, Measurement, Problem
from tunebook._keys.key_text import parsed
from tunebook._space.space import Config
from tunebook._statistics.race import typical_s
from tunebook.stores import problem_id
from tunebook.stores._files import replace_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from tunebook.formats._key_map import KeyMap

# A recorded space has 10^4 configurations, and a record is read whole. The slowest of them teach a search nothing.
KEPT: Final = 2000
UNKNOWN_DEVICE: Final = "unknown"
_J = TypeVar("_J", dict[str, Any], list[Any])


class Format(NamedTuple):
    """One tool's form of file: `what` it is in errors, and the `pattern` of its files in a directory.

    `read` raises `CodecError` for a file of another form. `content` returns a record's named parts of the file that
    `name` gives, or of the one file of the format; `CodecError` if the format cannot hold the record. `dump` returns
    the text of a file from the parts of its records. A `single` record may be written to a path that ends in .json.
    """

    tool: str
    what: str
    pattern: str
    read: Callable[[ForeignFile], list[Record]]
    content: Callable[[OutgoingRecord], Mapping[str, object]]
    name: Callable[[OutgoingRecord], str] | None = None
    single: bool = False
    dump: Callable[[dict[str, Any]], str] = partial(json.dumps, indent=2)

    def read_all(self, path: Path, op: str, device: str) -> list[Record]:
        """Return the records of a file, or of all files below a directory: there a broken file costs a warning only."""
        if not path.is_dir():
            return self.read_file(ForeignFile(path, self, op, device))
        records, readable = [], 0
        for file in sorted(path.rglob(self.pattern)):
            if not file.stat().st_size:
                continue  # tokamax ships empty files, for operations without a table on a device
            try:
                records += self.read_file(ForeignFile(file, self, op, device))
                readable += 1
            except CodecError as error:
                warn_once("unreadable", str(file), f"left out: {error}")
        if not readable:
            raise CodecError(f"{path} has no {self.pattern} in it that is {self.what}")
        if several := len(records) - len({record.problem for record in records}):
            text = f"{several:,} entries below {path} have the same key as another. A book keeps one of each: to choose"
            warn_once("several", str(path), f"{text}, read one folder (of one version, for example) at a time")
        return records

    def read_file(self, file: ForeignFile) -> list[Record]:
        """Return the records of a file; `CodecError` names the file and the reason if it has another form."""
        try:
            return self.read(file)
        except DefinitionError as error:  # a name that no configuration here can have
            raise file.error(error) from error

    def write_all(self, records: Sequence[Record], path: Path, key: KeyMap | None = None) -> int:
        """Write the files, each of them whole, and return how many."""
        one_file = self.name is None or (self.single and len(records) == 1 and path.suffix == ".json")
        files: dict[Path, dict[str, Any]] = {path: {}} if one_file else {}
        for record in (OutgoingRecord(record.problem, record, self.what, key) for record in records):
            if content := self.content(record):
                name = "" if one_file or self.name is None else self.name(record)
                if name.startswith("/") or ".." in name.split("/"):
                    raise record.error(f"cannot have the name {name!r}, outside {path}")
                _add(files.setdefault(path / name, {}), content, record)
        for file, content in files.items():
            try:
                text = self.dump(content)
                file.parent.mkdir(parents=True, exist_ok=True)
                replace_file(file, text.encode())
            except (TypeError, ValueError) as error:
                raise CodecError(
                    f"{file}: a configuration holds a value that {self.what} cannot hold: {error}"
                ) from error
            except OSError as error:
                raise StoreError("write", str(file), f"cannot write {file}: {error}") from error
        return len(files)


def _add(parts: dict[str, Any], content: Mapping[str, object], record: OutgoingRecord) -> None:
    """Add a record's parts to its file; `CodecError` if an earlier record has the same place with other values."""
    if taken := [name for name in content if name in parts and parts[name] != content[name]]:
        raise record.error(
            f"has one place for {taken[0]!r}, and two entries differ in it; the second has the key "
            f"{record.problem.call_key} of {record.problem.op!r} on {record.problem.device!r}. "
            "Write fewer entries at once (--kernel, --device), or let --map tell them apart"
        )
    parts.update(content)


class ForeignFile(NamedTuple):
    """A file of another tool; every error names the file. `op` and `device` replace the names that the file gives."""

    path: Path
    form: Format
    op: str = ""
    device: str = ""

    def error(self, found: object) -> CodecError:
        return CodecError(f"{self.path} is not {self.form.what}: {found}")

    def text(self) -> str:
        try:
            return self.path.read_text(encoding="utf-8")
        except OSError as error:
            raise StoreError("read", str(self.path), f"cannot read {self.path} as {self.form.what}: {error}") from error
        except ValueError as error:
            raise self.error(error) from error

    def json(self, text: str | None = None) -> dict[str, Any]:
        """Return the JSON object in the file, or in a text from it."""
        return self._json_of(dict, self.text() if text is None else text)

    def json_list(self) -> list[Any]:
        """Return the JSON list in the file."""
        return self._json_of(list, self.text())

    def _json_of(self, kind: type[_J], text: str) -> _J:
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self.error(error) from error
        if not isinstance(content, kind):
            needed = "list" if kind is list else "object"
            raise self.error(f"a JSON {needed} is needed, found {type(content).__name__}")
        return content

    def problem(self, device: str, op: str, key: Mapping[str, Json]) -> Problem:
        """Return the problem of a key, with the call key written as tunebook writes its own."""
        return Problem(self.device or device or UNKNOWN_DEVICE, self.op or op, canonical_json(dict(key)))

    def number(self, value: object, name: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CodecError(f"{self.path}: {name} should be a number, found {value!r}")
        return float(value)

    def numbers(self, values: object, name: str) -> tuple[float, ...]:
        if not isinstance(values, list):
            raise CodecError(f"{self.path}: {name} should be a list of numbers, found {values!r}")
        return tuple(self.number(value, name) for value in values)

    def seconds(self, value: object, name: str, per_second: float = 1e3) -> float | None:
        """Return a time of the file in seconds, or None if the file does not have it."""
        return None if value is None else self.number(value, name) / per_second

    def time_s(self, value: Any, name: str, per_second: float = 1e3) -> float:
        """Return a time of the file, a number or its text, in seconds."""
        try:
            seconds = float(value) / per_second
        except (TypeError, ValueError) as error:
            raise self.error(f"{name}: {error}") from error
        if not math.isfinite(seconds):
            raise self.error(f"{name}: {value} is not a time")
        return seconds

    def trial(self, config: Json) -> Measurement:
        """Return the measurement, still empty, of an encoded configuration that the tool tried."""
        # The code is unknown, so that this is never taken for a time of the code at hand.
        return Measurement(config, fingerprint_of(config), "", f"as {self.form.tool} measures", environment="")

    def record(
        self, problem: Problem, trials: Iterable[Measurement] = (), chosen: Json = None, about: Mapping[str, Json] = {}
    ) -> Record:
        """Return the record of the tool's trials: its choice, else the fastest; undecided if all trials failed."""
        kept = list(trials)
        if len(kept) > KEPT:  # the fastest, in the order of the file
            slowest_kept = sorted(map(_typical_s, kept))[KEPT - 1]
            kept = [trial for trial in kept if _typical_s(trial) <= slowest_kept][:KEPT]
        timed = [trial for trial in kept if trial.samples_s]
        if chosen is None and timed:
            chosen = min(timed, key=_typical_s).config
        head = Head(problem=problem, config=chosen, checksum="", origin="imported")
        when = max((trial.when for trial in kept), default=0.0)
        measured = tuple(trial for trial in kept if trial.samples_s or trial.failure)
        # `about` are facts of the file that have no other place in a record, and are needed to write it again.
        provenance = {"when": when, "tool": self.form.tool, **about}
        return Record(head, Body(measurements=measured, provenance=provenance))


def _typical_s(trial: Measurement) -> float:
    return typical_s(trial.samples_s) if trial.samples_s else math.inf


def config_of(values: Mapping[str, Any]) -> Json:
    """Return named values as a configuration of a `Space` is written."""
    return encode(Config(**values))


class OutgoingRecord(NamedTuple):
    """A record to be written in another tool's form."""

    problem: Problem
    record: Record
    what: str
    key_map: KeyMap | None = None

    @property
    def op(self) -> str:
        """The operation without its version."""
        return self.problem.op.rpartition("@v")[0] or self.problem.op

    @property
    def device(self) -> str:
        """The hardware's own name in the device: "gpu:NVIDIA H200" is an NVIDIA H200."""
        return self.problem.device.partition(":")[2] or self.problem.device

    @property
    def file_device(self) -> str:
        """The device in the name of a file: "" if unknown; spaces, and the slashes of a CPU's name, are underscores."""
        return "" if self.problem.device == UNKNOWN_DEVICE else re.sub(r"[\s/]", "_", self.device)

    @property
    def id(self) -> str:
        return problem_id(self.problem)

    @property
    def measurements(self) -> Sequence[Measurement]:
        return self.record.body.measurements

    @property
    def timed_choice(self) -> Measurement | None:
        """The measurement of the chosen configuration; None if its time is unknown."""
        chosen = self.record.head.config
        return next((m for m in self.measurements if m.config == chosen and m.samples_s), None)

    def key(self) -> dict[str, Any]:
        """Return the key in the file: the call key as an object, or the user's map of it; else `CodecError`."""
        key = parsed(self.problem.call_key)
        if key is None:
            raise CodecError(f"the key {self.problem.call_key!r} of {self.problem.op!r} has no named parts")
        return key if self.key_map is None else self.key_map(key, self.problem)

    def values(self, config: Json) -> dict[str, Any]:
        """Return the named values of an encoded configuration; `CodecError` if it has none, or they are not plain."""
        plain = decode(config)
        if not isinstance(plain, dict) or not all(isinstance(name, str) for name in plain):
            raise self.error(f"holds configurations with named values, not {plain!r}")
        return plain

    def error(self, found: str) -> CodecError:
        return CodecError(f"{self.what} {found}")
