"""All records in one JSON file: for a book that a person reads, edits or checks in.

{
  "<device>|<op>|<key>": {...},            entries of other tools, left alone (ejkernel writes these)
  "tunebook": {
    "version": 1,
    "records": {"<id>": {"crc": "9d1c2a04", "head": {...}, "body": {...}}}
  }
}

Every record has its own checksum, so that a record spoilt by hand is missed and the others are not. Every write reads
the file again under a lock, adds to it and replaces it whole. The lock is `flock` on a file beside it: the kernel gives
it up when its holder dies, however it dies. It holds between the processes of a host; a book that several hosts write
belongs in a directory store, which needs no lock.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from tunebook._base.errors import CodecError, StoreError, warn_once
from tunebook._base.record_format import Head, Record, canonical_json, decode_json
from tunebook._base.vocabulary import Json, Problem, ShownByPlace
from tunebook.stores._files import (
    FileLock,
    LeaseFiles,
    distrust,
    make_directory,
    opened,
    problem_id,
    read_fault,
    read_file,
    replace_file,
    writing,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tunebook.stores._files import Sync

_VERSION: Final = 1
_SECTION: Final = "tunebook"
# Every put rewrites the file; far below this a directory is the better book.
_MAX_FILE_BYTES: Final = 64 << 20
# A holder that keeps the lock over so many tries, of 1 ms, and writes nothing is paused; to wait holds a call up.
_LOCK_TRIES: Final = 5000
# Time stamps move in steps of up to 10 ms, and inode numbers are used again: a file that changed a moment ago may have
# changed twice since without showing it, so a parse of it is not kept.
_SETTLED_NS: Final = 100_000_000

_encode: Final = json.JSONEncoder().encode
_Entries = dict[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class _JsonContent:
    """The content of a file, in dicts of its own. Unknown fields are in `foreign` and `section`."""

    foreign: _Entries = field(default_factory=dict)
    records: _Entries = field(default_factory=dict)
    section: _Entries = field(default_factory=dict)
    fault: str = ""  # why the file is invalid
    keep: str = ""  # the kind of a fault for which the file stays as it is, because it may well be whole


@final
class JsonStore(ShownByPlace):
    """One readable file. Safe between threads, and between the processes of a host.

    A damaged entry is a miss and stays in the file for a person to fix; a damaged file is moved aside by the next
    write. A file of a newer version is neither read nor written, nor is a file that others can write to, unless the
    caller vouches for it.
    """

    def __init__(
        self, path: Path, *, vouched: bool = False, sync: Sync = os.fsync, now_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._given = "" if vouched else str(path.absolute())
        # The target of a link, so that a rename replaces the file and not the link.
        self._path = Path(os.path.realpath(path))
        self.where: Final = str(self._path)
        self._sync, self._now_ns = sync, now_ns
        self._parsed: tuple[tuple[int, ...], _JsonContent] | None = None

    def get(self, problem: Problem) -> Record | None:
        content = self._read()
        record = self._decode(problem_id(problem), content)
        return record if record is not None and record.problem == problem else self._decode_foreign(problem, content)

    def put(self, record: Record) -> None:
        self.put_many((record,))

    def put_many(self, records: Iterable[Record]) -> None:
        """Store many records with one write of the file: all of them, or none."""
        self._change(self._adding(records))

    def create(self, records: Iterable[Record]) -> None:
        """Write a new file with these records alone, and no lock beside it."""
        content = _JsonContent()
        self._adding(records)(content)
        with writing(self.where):
            make_directory(self._path.parent, self._sync)
            self._replace(self._text(content))

    def _adding(self, records: Iterable[Record]) -> Callable[[_JsonContent], bool]:
        encoded: list[tuple[Record, _Entries]] = []
        for record in records:
            record.to_bytes()  # `CodecError` if it is too large, or not JSON
            head, body = record.to_fields()
            encoded.append((record, {"crc": _crc(canonical_json([head, body])), "head": head, "body": body}))

        def add(content: _JsonContent) -> bool:
            for record, entry in encoded:
                name = problem_id(record.problem)
                present = self._decode(name, content)
                if present is None or present.head.generation <= record.head.generation:
                    content.records[name] = entry
            return True

        return add

    def delete(self, problem: Problem) -> bool:
        """Remove a record, and another tool's entry for the same problem; False if both are missing."""

        def remove(content: _JsonContent) -> bool:
            name, foreign = problem_id(problem), foreign_name(problem) or ""
            present = name in content.records or foreign in content.foreign
            content.records.pop(name, None)
            content.foreign.pop(foreign, None)
            return present

        return self._path.exists() and self._change(remove)

    def items(self, op: str | None = None) -> Iterator[Record]:
        """Yield the readable records, then the entries of other tools for other problems."""
        content = self._read()
        ours = list(filter(None, (self._decode(name, content) for name in content.records)))
        known = {record.problem for record in ours}
        foreign = (problem for problem in map(foreign_problem, content.foreign) if problem and problem not in known)
        theirs = filter(None, (self._decode_foreign(problem, content) for problem in foreign))
        return (record for record in (*ours, *theirs) if op in {None, record.problem.op})

    def leases(self) -> LeaseFiles:
        return LeaseFiles(self._path.with_name(f"{self._path.name}.leases"), self.where)

    def _decode(self, name: str, content: _JsonContent) -> Record | None:
        """Return our record of a name, or None if it is missing or, after one warning, damaged."""
        if name not in content.records:
            return None
        try:
            return _decode_entry(name, content.records[name])
        except CodecError as error:
            reason = str(error)[:200]
        message = f"the entry {name[:40]!r} in {self._path} is damaged: {reason}. It counts as not tuned yet."
        warn_once("unreadable", self.where, message)
        return None

    def _decode_foreign(self, problem: Problem, content: _JsonContent) -> Record | None:
        """Return another tool's entry as a record, or None if it is missing or, after one warning, unusable."""
        name = foreign_name(problem)
        if name is None or name not in content.foreign:
            return None
        record = Record(Head(problem=problem, config=content.foreign[name], checksum="", origin="imported"))
        try:
            return Record.from_bytes(record.to_bytes())  # through bytes, for the reason given in `_decode_entry`
        except CodecError as error:
            warn_once("unreadable", self.where, f"the entry {name[:80]!r} in {self._path} is not usable: {error}")
            return None

    def _read(self) -> _JsonContent:
        """Return the content for reading, parsed again if the file changed; empty, after one warning, if invalid."""
        try:
            facts = self._path.stat()
            identity = facts.st_mtime_ns, facts.st_size, facts.st_ino, facts.st_dev, facts.st_uid, facts.st_mode
            parsed = self._parsed
            if parsed is not None and parsed[0] == identity:
                return parsed[1]
            if (unsafe := self._distrust()) is not None:
                warn_once(unsafe.kind, unsafe.path, unsafe.message)
                return _JsonContent()
            content = self._parse()
        except FileNotFoundError:
            return _JsonContent()
        except OSError as error:
            raise read_fault(self.where, error) from error
        if content.fault:
            warn_once("unreadable", self.where, f"{self._path} counts as empty: {content.fault}")
        if self._now_ns() - facts.st_mtime_ns > _SETTLED_NS:
            self._parsed = identity, content
        return content

    def _distrust(self) -> StoreError | None:
        return distrust(self._given, inside="") if self._given else None

    def _parse(self) -> _JsonContent:
        try:
            data = read_file(str(self._path), _MAX_FILE_BYTES)
        except CodecError as error:
            return _JsonContent(fault=f"{error}. Use a directory for so much", keep="too-large")
        return _JsonContent() if data is None else _parse(data)

    def _change(self, change: Callable[[_JsonContent], bool]) -> bool:
        """Apply a change to the present content, and replace the file; False if the change had nothing to do."""
        with writing(self.where), self._locked():
            with suppress(FileNotFoundError):
                if (unsafe := self._distrust()) is not None:
                    raise unsafe
            content = self._parse()
            if content.keep:
                message = f"{self._path} is left as it is, and results stay in memory: {content.fault}."
                raise StoreError(content.keep, self.where, message)
            if not change(content):
                return False
            text = self._text(content)
            if content.fault:
                names = (self._path.with_name(f"{self._path.name}.damaged-{number}") for number in count(1))
                target = next(name for name in names if not name.exists())
                self._path.rename(target)
                message = f"{self._path} was moved to {target}, because it was unreadable: {content.fault}"
                warn_once("damaged", self.where, message)
            self._replace(text)
            return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        make_directory(self._path.parent, self._sync)
        lock = self._path.with_name(f"{self._path.name}.lock")
        # Never removed: a process that waits on a removed lock file and one that makes a new one would both get in.
        with opened(lock, os.O_RDWR | os.O_CREAT) as descriptor:
            waiting, before = True, self._changed_ns()
            while waiting:
                with FileLock(descriptor, _LOCK_TRIES) as is_ours:
                    if is_ours:
                        yield
                        return
                # Many writers on a busy machine take their turns in no order. As long as they write, none is paused.
                now = self._changed_ns()
                waiting, before = now != before, now
            message = f"another process keeps {lock} locked. Results stay in memory; find it with: fuser {lock}"
            raise StoreError("busy", self.where, message)

    def _changed_ns(self) -> int:
        try:
            return self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _replace(self, text: bytes) -> None:
        temp = self._path.with_name(f"{self._path.name}.tmp")
        temp.unlink(missing_ok=True)  # only the holder of the lock writes one: this was left by a holder that died
        replace_file(self._path, text, sync=self._sync, mode=0o644, temporary=temp)

    def _text(self, content: _JsonContent) -> bytes:
        records = dict(sorted(content.records.items(), key=lambda item: _reading_order(item[1])))
        section: _Entries = {**content.section, "version": _VERSION, "records": records}
        try:
            text = f"{_layout({**content.foreign, _SECTION: section})}\n".encode("ascii")
        except RecursionError as error:
            message = f"{self._path} has entries that are nested too deeply to be written again. Choose another path."
            raise StoreError("too-deep", self.where, message) from error
        if len(text) > _MAX_FILE_BYTES:
            message = f"{self._path} would take {len(text)} bytes, over {_MAX_FILE_BYTES}. Use a directory instead."
            raise StoreError("too-large", self.where, message)
        return text


# ------------------------------------------------------------------------------------------------- the text of a file


def foreign_name(problem: Problem) -> str | None:
    """Return the name of another tool's entry for a problem, or None where that name could mean another problem."""
    # The device's own text has bars in it ("gpu|NVIDIA H200"), so a name can be taken apart only from the right.
    return None if "|" in problem.op or "|" in problem.call_key else "|".join(problem)


def foreign_problem(name: str) -> Problem | None:
    """Return the problem of another tool's entry, or None if its name is not of the form device|op|key."""
    parts = name.rsplit("|", 2)
    return Problem(*parts) if len(parts) == 3 else None


def _parse(data: bytes) -> _JsonContent:
    """Parse the text of a file; never raises."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        return _JsonContent(fault=f"not JSON: {error}"[:200])
    if not isinstance(fields, dict):
        return _JsonContent(fault=f"a JSON object is needed, not {type(fields).__name__}")
    section = fields.pop(_SECTION, {"version": _VERSION, "records": {}})
    if not isinstance(section, dict) or type(version := section.pop("version", None)) is not int:
        return _JsonContent(fault=f"{_SECTION!r} in it is not a book")
    if version > _VERSION:
        fault = f"version {version} is newer than {_VERSION}, the last that this release knows. Upgrade tunebook"
        return _JsonContent(fault=fault, keep="newer")
    records = section.pop("records", None)
    if version != _VERSION or not isinstance(records, dict):
        return _JsonContent(fault=f"{_SECTION!r} in it is not a book")
    return _JsonContent(foreign=fields, records=records, section=section)


def _decode_entry(name: str, entry: Json) -> Record:
    """Return the record that stands under a name; `CodecError` if it is damaged or another problem's."""
    match entry:
        case {"crc": crc, "head": dict() as head, "body": dict() as body}:
            text = canonical_json([head, body])
        case _:
            raise CodecError("crc, head and body are needed")
    if crc != _crc(text):
        raise CodecError("its checksum does not match")
    # From the text: the record must not share its lists and dicts with the parsed file.
    record = Record.from_fields(*decode_json(text))
    if problem_id(record.problem) != name:
        raise CodecError("it stands under another problem's name")
    return record


def _crc(text: str) -> str:
    return f"{zlib.crc32(text.encode('ascii')):08x}"


def _reading_order(entry: Json) -> tuple[str, str, str]:
    """Order entries by device, operation and key, so that a person and a diff find them; damaged ones come first."""
    match entry:
        case {"head": {"device": str() as device, "op": str() as op, "call_key": str() as call_key}}:
            return device, op, call_key
    return "", "", ""


def _layout(value: Json, indent: str = "") -> str:
    """Write JSON for the eye. `json.dumps(indent=2)` gives every sample of every measurement a line of its own."""
    inner = indent + "  "
    match value:
        case dict():
            begin, end = "{", "}"
            parts = [f"{_encode(name)}: {_layout(item, inner)}" for name, item in value.items()]
        case list() if any(isinstance(item, (dict, list)) for item in value):
            begin, end = "[", "]"
            parts = [_layout(item, inner) for item in value]
        case _:
            return _encode(value)
    line = f"{begin}{', '.join(parts)}{end}"
    if len(line) + len(indent) <= 110 and "\n" not in line:
        return line
    joined = f",\n{inner}".join(parts)
    return f"{begin}\n{inner}{joined}\n{indent}{end}"
