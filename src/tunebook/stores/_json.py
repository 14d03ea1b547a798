"""All records in one JSON file: for a book that a person reads, edits or checks in. `_json_text` shows its form.

Every write reads the file again under a lock, adds to it and replaces it whole. The lock is `flock` on a file beside
it: the kernel gives it up when its holder dies, however it dies. It holds between the processes of one host; a book
that several hosts write belongs in a directory store, which needs no lock.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from tunebook._base.errors import CodecError, StoreError, warn_once
from tunebook.stores._files import (
    LeaseFiles,
    drop_lock,
    make_directory,
    read_fault,
    read_file,
    replace_file,
    take_lock,
    writing,
)
from tunebook.stores._ids import problem_id
from tunebook.stores._json_text import (
    JsonContent,
    decode_entry,
    encode_entry,
    imported_name,
    imported_problems,
    imported_record,
    parse,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json, Problem
    from tunebook.stores._files import Sync

# Every put rewrites the file; far below this a directory is the better book.
_MAX_FILE_BYTES: Final = 64 << 20
# Whoever keeps the lock over so many tries, of 1 ms, is paused; a put that waits longer holds a kernel's call up.
_LOCK_TRIES: Final = 5000
# Time stamps move in steps of up to 10 ms, and inode numbers are used again: a file that changed a moment ago may have
# changed twice since without showing it, so a parse of it is not kept.
_SETTLED_NS: Final = 100_000_000


@final
class JsonStore:
    """One readable file. Safe between threads and between the processes of one host.

    A damaged entry is a miss and stays in the file for a person to mend; a damaged file is moved aside by the next
    write. A file of a newer version is neither read nor written.
    """

    def __init__(self, path: Path, *, sync: Sync = os.fsync, now_ns: Callable[[], int] = time.time_ns) -> None:
        # The target of a link, so that a rename replaces the file and not the link.
        self._path = Path(os.path.realpath(path))
        self._sync = sync
        self._now_ns = now_ns
        self._parsed: tuple[tuple[int, ...], JsonContent] | None = None

    @property
    def where(self) -> str:
        return str(self._path)

    def get(self, problem: Problem) -> Record | None:
        content = self._read()
        name = problem_id(problem)
        if name in content.records:
            record = self._decoded(name, content.records[name])
            if record is not None and record.problem == problem:
                return record
        return self._imported(problem, content)

    def put(self, record: Record) -> None:
        """Keep a record, durably; the whole file is written again."""
        self.put_many((record,))

    def put_many(self, records: Iterable[Record]) -> None:
        """Keep many records with one write of the file: all of them, or none."""
        self._change(self._adding(records))

    def create(self, records: Iterable[Record]) -> None:
        """Write the file with these records alone, and no lock beside it: for one that is not there yet."""
        content = JsonContent()
        self._adding(records)(content)
        with writing(self.where):
            make_directory(self._path.parent, self._sync)
            self._replace(self._text(content))

    def _adding(self, records: Iterable[Record]) -> Callable[[JsonContent], bool]:
        encoded = [(record, encode_entry(record)) for record in records]

        def add(content: JsonContent) -> bool:
            for record, entry in encoded:
                name = problem_id(record.problem)
                present = self._decoded(name, content.records[name]) if name in content.records else None
                if present is None or present.head.generation <= record.head.generation:
                    content.records[name] = entry
            return True

        return add

    def delete(self, problem: Problem) -> bool:
        """Remove a record, and another tool's entry for the same problem; False if there was neither."""

        def remove(content: JsonContent) -> bool:
            name, imported = problem_id(problem), imported_name(problem)
            present = name in content.records or imported in content.foreign
            content.records.pop(name, None)
            content.foreign.pop(imported or "", None)
            return present

        return self._path.exists() and self._change(remove)

    def items(self, op: str | None = None) -> Iterator[Record]:
        """Yield every readable record, or one operation's, then the entries of other tools that have none."""
        return (record for record in self._all() if op in {None, record.problem.op})

    def _all(self) -> Iterator[Record]:
        content = self._read()
        seen = set()
        for name, entry in content.records.items():
            record = self._decoded(name, entry)
            if record is not None:
                seen.add(record.problem)
                yield record
        for problem in imported_problems(content):
            if problem not in seen and (record := self._imported(problem, content)) is not None:
                yield record

    def leases(self) -> LeaseFiles:
        return LeaseFiles(self._path.with_name(f"{self._path.name}.leases"), self.where)

    def _decoded(self, name: str, entry: Json) -> Record | None:
        try:
            return decode_entry(name, entry)
        except CodecError as error:
            reason = str(error)[:200]
        message = f"the entry {name[:40]!r} in {self._path} is damaged: {reason}. It counts as not tuned yet."
        warn_once("unreadable", self.where, message)
        return None

    def _imported(self, problem: Problem, content: JsonContent) -> Record | None:
        name = imported_name(problem)
        if name is None or name not in content.foreign:
            return None
        try:
            return imported_record(problem, content.foreign[name])
        except CodecError as error:
            warn_once("unreadable", self.where, f"the entry {name[:80]!r} in {self._path} is not usable: {error}")
            return None

    def _read(self) -> JsonContent:
        """Return the content for reading, parsed again if the file changed; empty, after one warning, if it is bad."""
        try:
            facts = self._path.stat()
            identity = facts.st_mtime_ns, facts.st_size, facts.st_ino, facts.st_dev
            parsed = self._parsed
            if parsed is not None and parsed[0] == identity:
                return parsed[1]
            content = self._parse()
        except FileNotFoundError:
            return JsonContent()
        except OSError as error:
            raise read_fault(self.where, error) from error
        if content.fault:
            warn_once("unreadable", self.where, f"{self._path} counts as empty: {content.fault}")
        if self._now_ns() - facts.st_mtime_ns > _SETTLED_NS:
            self._parsed = identity, content
        return content

    def _parse(self) -> JsonContent:
        try:
            data = read_file(str(self._path), _MAX_FILE_BYTES)
        except CodecError as error:
            return JsonContent(fault=f"{error}. Use a directory for so much", keep="too-large")
        return JsonContent() if data is None else parse(data)

    def _change(self, change: Callable[[JsonContent], bool]) -> bool:
        """Apply a change to what the file holds now, and replace the file; not if the change says there was none."""
        with writing(self.where), self._locked():
            content = self._parse()
            if content.keep:
                message = f"{self._path} is left as it is, and results stay in memory: {content.fault}."
                raise StoreError(content.keep, self.where, message)
            if not change(content):
                return False
            text = self._text(content)
            if content.fault:
                self._move_aside(content.fault)
            self._replace(text)
            return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        make_directory(self._path.parent, self._sync)
        lock = self._path.with_name(f"{self._path.name}.lock")
        # Never removed: a process that waits on a removed lock file and one that makes a new one would both get in.
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not take_lock(descriptor, _LOCK_TRIES):
                message = f"another process keeps {lock} locked. Results stay in memory; find it with: fuser {lock}"
                raise StoreError("busy", self.where, message)
            try:
                yield
            finally:
                drop_lock(descriptor)
        finally:
            os.close(descriptor)

    def _replace(self, text: bytes) -> None:
        temp = self._path.with_name(f"{self._path.name}.tmp")
        temp.unlink(missing_ok=True)  # only the holder of the lock writes one: this was left by a holder that died
        replace_file(self._path, text, sync=self._sync, mode=0o644, temporary=temp)

    def _text(self, content: JsonContent) -> bytes:
        try:
            text = text_of(content)
        except RecursionError as error:
            message = f"{self._path} has entries that are nested too deeply to be written again. Choose another path."
            raise StoreError("too-deep", self.where, message) from error
        if len(text) > _MAX_FILE_BYTES:
            message = f"{self._path} would take {len(text)} bytes, over {_MAX_FILE_BYTES}. Use a directory instead."
            raise StoreError("too-large", self.where, message)
        return text

    def _move_aside(self, fault: str) -> None:
        number = 1
        while (target := self._path.with_name(f"{self._path.name}.damaged-{number}")).exists():
            number += 1
        self._path.rename(target)
        warn_once("damaged", self.where, f"{self._path} was moved to {target}, because it was unreadable: {fault}")
