"""Packs: many records in one immutable SQLite file, to ship in a package or to hand to a fleet.

A pack is written once and never changed, so it is opened without locks or journals: from read-only media, by any
number of processes, and also from inside a zip file, where SQLite has no file to open at all.
"""

from __future__ import annotations

import json
import os
import re
import weakref
import zlib
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias, final
from urllib.parse import quote

from tunebook._base.errors import CodecError, StoreError, warn_once
from tunebook._base.locks import InterruptSafeLock
from tunebook._base.record_format import MAX_RECORD_BYTES, SEAL_BYTES, Record, canonical_json, unsealed
from tunebook._base.vocabulary import ShownByPlace
from tunebook.stores._files import distrust, make_directory, problem_id, sync_path, write_file, writing

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterable, Iterator
    from importlib.resources.abc import Traversable

    from tunebook._base.vocabulary import Problem
    from tunebook.stores._listing import EntryFacts, EntryGroup, Wanted

    Source: TypeAlias = Path | Traversable

_APPLICATION_ID: Final = 0x74756E65  # "tune": `file` and sqlite3's own tools show it
_VERSION: Final = 1
# Compared with the schema in the file, word for word: a table of this name that is a view, or has triggers or other
# columns, is not ours and is not asked.
_TABLE: Final = "CREATE TABLE records (id BLOB PRIMARY KEY, generation INTEGER, record BLOB) WITHOUT ROWID"
_INSERT: Final = (
    "INSERT INTO records VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
    "generation = excluded.generation, record = excluded.record WHERE excluded.generation >= generation"
)
# The length of a blob is known without reading it.
_SELECT: Final = "SELECT id, record FROM records WHERE id = ? AND length(record) <= ?"
_SELECT_AFTER: Final = "SELECT id, record FROM records WHERE id > ? AND length(record) <= ? ORDER BY id LIMIT 256"
_SELECT_HEADS: Final = (
    "SELECT id, substr(record, 1, instr(record, x'0a')) FROM records "
    "WHERE id > ? AND length(record) <= ? AND id < ? ORDER BY id LIMIT 4096"
)
# Finds the names in a record's first line, whose fields are in order: 1 us, where parsing takes 5, for 100,000 records.
# Quotes inside strings are escaped, so that these can only be names of fields.
_DEVICE: Final = b',"device":"'
_STRING: Final = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_NAMES: Final = rb',"device":(%b),"environment":%b,"generation":\d+,"op":(%b),"origin"' % ((_STRING,) * 3)


def write_pack(path: str | os.PathLike[str], records: Iterable[Record], *, key: bytes | None = None) -> int:
    """Write a pack, in place of an earlier pack; return how many records it has.

    Of two records of a problem it gets the higher generation, then the later. Readers of the earlier pack keep it.
    With a key each record is signed, as in a shared book.
    """
    import sqlite3  # noqa: PLC0415 - milliseconds that only packs pay

    path = Path(path)
    temp = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    with writing(str(path)):
        make_directory(path.parent, os.fsync)
        # Made here and not by SQLite, whose "unable to open database file" would hide the reason.
        write_file(temp, b"", sync=None)
        try:
            with closing(sqlite3.connect(temp, isolation_level=None)) as connection:
                count = _fill(connection, records, key)
            sync_path(temp, os.fsync)
            temp.rename(path)
            sync_path(path.parent, os.fsync)
        except sqlite3.Error as error:
            kind = "full" if error.sqlite_errorcode == sqlite3.SQLITE_FULL else "io"
            raise StoreError(kind, str(path), f"cannot write the pack {path}: {error}. It is as it was.") from error
        finally:
            temp.unlink(missing_ok=True)
    return count


def _fill(connection: sqlite3.Connection, records: Iterable[Record], key: bytes | None) -> int:
    # Nothing sees the file before it is whole and synced, so it needs no journal; the cache holds the inner pages of
    # a million records, which come in random order.
    for pragma in ("journal_mode=OFF", "synchronous=OFF", "cache_size=-262144", f"application_id={_APPLICATION_ID}"):
        connection.execute(f"PRAGMA {pragma}")
    connection.execute(f"PRAGMA user_version={_VERSION}")
    connection.execute(_TABLE)
    connection.execute("BEGIN")
    seal: Callable[[Record], bytes] = Record.to_bytes
    if key is not None:
        from tunebook.stores._remote import Envelope  # noqa: PLC0415 - loaded late: for signed packs only

        seal = Envelope("", key).seal
    rows = ((bytes.fromhex(problem_id(r.problem)), r.head.generation, seal(r)) for r in records)
    connection.executemany(_INSERT, rows)
    connection.execute("COMMIT")
    (count,) = connection.execute("SELECT count(*) FROM records").fetchone()
    return int(count)


@final
class PackStore(ShownByPlace):
    """A pack, opened when it is first asked. Safe to share between threads, and to carry over a fork.

    `source` is a path or a resource of a package (`importlib.resources.files(...) / ...`), zipped or not. A file that
    is damaged, foreign, of a newer version or missing answers every get with None, after one warning; so does a file
    that others can write to, unless the caller vouches for it.
    """

    def __init__(self, source: Source, *, vouched: bool = False) -> None:
        self._source, self._vouched = source, vouched
        self.where: Final = str(source)
        # The process that may use the connection, a lock for it, and the connection: None if the file is not a pack.
        self._opened: tuple[int, InterruptSafeLock, sqlite3.Connection | None] | None = None
        self._groups: list[EntryGroup] | None = None

    def get(self, problem: Problem) -> Record | None:
        record = self.read(problem_id(problem))
        return record if record is not None and record.problem == problem else None

    def _refuse(self, *_given: Any, **_named: Any) -> NoReturn:
        """Raise `StoreError`: a pack is never changed."""
        remedy = "Give a directory or a .json file as path, and make a pack of it with write_pack."
        raise StoreError("read-only", self.where, f"the pack {self._source} cannot be written to. {remedy}")

    put = put_many = delete = _refuse

    def items(self, op: str | None = None) -> Iterator[Record]:
        """Yield every readable record, or the records of an operation, in the order of their ids."""
        # The name is in the first line, as it is written there: 1 us tells that a record is another kernel's.
        name = b"" if op is None else canonical_json(op).encode()
        for identifier, content in self._rows():
            if isinstance(content, bytes) and name not in content:
                continue
            record = self._decode(identifier, content)
            if record is not None and op in {None, record.problem.op}:
                yield record

    def require_signature(self, key: bytes) -> None:
        """Raise `CodecError` if a record of the pack is not signed with this key."""
        from tunebook.stores._remote import Envelope  # noqa: PLC0415 - loaded late: for signed packs only

        envelope = Envelope(self.where, key)
        remedy = "Set the key that it was written with, or say that its origin does not matter: --allow-unsigned"
        for _, content in self._rows():
            data = content if isinstance(content, bytes) else b""
            try:
                envelope.unseal(data)
            except CodecError as error:
                other = "signed with another key than TUNEBOOK_SIGNING_KEY, or was altered"
                found = "not signed, and a key is set" if unsealed(data) == data else other
                raise CodecError(f"{self.where} is {found}. {remedy}") from error

    def _rows(self) -> Iterator[tuple[bytes, Any]]:
        last = b""
        # In pages, so that no cursor stays open over a yield while other threads use the connection. Ids must rise:
        # in a damaged file they may go round in circles.
        while (rows := self._query(_SELECT_AFTER, last)) and rows[-1][0] > last:
            yield from rows
            last = rows[-1][0]

    def heads(self, prefix: str = "") -> Iterator[tuple[str, bytes]]:
        """Yield the id and the first line, unchecked, of each record whose id begins with `prefix`: for listings."""
        # An id sorts after its own beginning. Half a byte of the prefix is compared here and not by SQLite; of a whole
        # id, 16 bytes, the last byte is too.
        last = bytes.fromhex(prefix[: min(len(prefix), 30) // 2 * 2])
        end = last + b"\xff" * (17 - len(last))
        while (rows := self._query(_SELECT_HEADS, last, end)) and rows[-1][0] > last:
            found = [(row[0].hex(), row[1]) for row in rows if isinstance(row[1], bytes)]
            yield from [pair for pair in found if pair[0].startswith(prefix)] if prefix else found
            last = rows[-1][0]

    def groups(self, wanted: Wanted, prefix: str = "", at_most: int | None = None) -> Iterator[EntryGroup]:
        groups = self._groups
        if prefix or groups is None:
            groups = self._list(prefix, at_most)
        if not prefix and at_most is None:
            self._groups = groups  # a pack never changes, and is read whole to list it: 0.7 s for 100,000 records
        return (group for group in groups if wanted(group.op, group.device))

    def _list(self, prefix: str, at_most: int | None) -> list[EntryGroup]:
        from tunebook.stores._listing import EntryGroup  # noqa: PLC0415 - loaded late: only listings need it

        names_in = re.compile(_NAMES).match
        groups: dict[tuple[bytes, bytes], list[str]] = {}
        for identifier, head in islice(self.heads(prefix), at_most):
            found = names_in(head, head.rfind(_DEVICE))
            if found is not None:
                groups.setdefault((found[2], found[1]), []).append(identifier)
        listed = []
        for (op, device), ids in groups.items():
            try:
                names = json.loads(op), json.loads(device)
            except ValueError as error:  # the first lines are not checked before this
                self._warn(f"a record in it is damaged: {error}")
            else:
                listed.append(EntryGroup(*names, self.where, 0.0, ids, self))
        return listed

    def facts(self, ids: Iterable[str]) -> Iterator[EntryFacts]:
        from tunebook.stores._listing import EntryFacts  # noqa: PLC0415 - loaded by now

        return map(EntryFacts, ids)  # without times and sizes, which a pack does not know

    def read(self, identifier: str) -> Record | None:
        rows = self._query(_SELECT, bytes.fromhex(identifier))
        return self._decode(*rows[0]) if rows else None

    def leases(self) -> None:
        return  # nothing is tuned into a pack

    def _decode(self, identifier: bytes, content: object) -> Record | None:
        try:
            if not isinstance(content, bytes):
                raise CodecError(f"a record is bytes, not {type(content).__name__}")  # noqa: TRY301 - one way out
            record = Record.from_bytes(unsealed(content))  # a pack is trusted like a file of its owner, signed or not
        except CodecError as error:
            self._warn(f"a record in it is damaged: {error}"[:300])
            return None
        return record if bytes.fromhex(problem_id(record.problem)) == identifier else None

    def _query(self, sql: str, identifier: bytes, *more: bytes) -> list[tuple[Any, ...]]:
        opened = self._opened
        # A connection must not be used on both sides of a fork, and its lock may be held by a thread that the child
        # does not have.
        if opened is None or opened[0] != os.getpid():
            opened = self._opened = (os.getpid(), InterruptSafeLock(), self._open())
        _, lock, connection = opened
        if connection is None:
            return []
        from sqlite3 import Error  # noqa: PLC0415 - loaded by now, since there is a connection

        try:
            with lock:
                rows = connection.execute(sql, (identifier, MAX_RECORD_BYTES + SEAL_BYTES, *more)).fetchall()
            # In a damaged file an id may be of any type.
            return [row for row in rows if isinstance(row[0], bytes)]
        except (Error, UnicodeDecodeError) as error:  # see `_open` for the second
            self._warn(str(error))
            return []

    def _open(self) -> sqlite3.Connection | None:
        import sqlite3  # noqa: PLC0415 - milliseconds that only packs pay

        try:
            if isinstance(self._source, Path) and not self._vouched:
                unsafe = distrust(str(self._source.absolute()), inside="")
                if unsafe is not None:
                    warn_once(unsafe.kind, unsafe.path, unsafe.message)
                    return None
            connection = self._connect()
            # Two threads may both open it at first; each connection is closed with the store.
            weakref.finalize(self, connection.close)
            fault = _fault(connection)
            if not fault:
                return connection
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            # The last: SQLite quotes damaged text in its message, and Python decodes the message.
            fault = str(error)
        self._warn(fault)
        return None

    def _connect(self) -> sqlite3.Connection:
        import sqlite3  # noqa: PLC0415 - loaded by now

        if isinstance(self._source, Path):
            # `immutable` keeps SQLite from looking for a journal or taking a lock, neither of which works on
            # read-only media.
            uri = f"file:{quote(os.fsencode(self._source.absolute()))}?mode=ro&immutable=1"
            return sqlite3.connect(uri, uri=True, check_same_thread=False)
        import zipfile  # noqa: PLC0415 - milliseconds that only packs inside zip files pay

        try:
            content = self._source.read_bytes()
        except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
            raise OSError(f"its archive is damaged: {error}") from error
        if not content:  # SQLite would say that memory ran out
            raise OSError("it is empty")
        connection = sqlite3.connect(":memory:", check_same_thread=False)
        connection.deserialize(content)
        return connection

    def _warn(self, reason: str) -> None:
        message = f"the pack {self._source} is not used, or not all of it: {reason}. Install or copy it again."
        warn_once("unreadable", self.where, message)


def _fault(connection: sqlite3.Connection) -> str:
    """Return why a file is not a pack of ours, or an empty text."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    tables = connection.execute("SELECT sql FROM sqlite_schema").fetchall()
    if application != _APPLICATION_ID:
        return "it is not a pack"
    if version > _VERSION:
        return f"version {version} is newer than {_VERSION}, the last that this release knows"
    return "" if tables == [(_TABLE,)] else "it has other tables than a pack has"
