"""A directory of records: one small file per problem, replaced whole, needing nothing but atomic rename.

<root>/v1/<device>/<op>/<id>.json     a record (see `record_format`)
<root>/v1/tmp/                        records being written
<root>/v1/quarantine/                 unreadable records, kept for a person to look at
<root>/v1/leases/  packs/  outbox/    see `LeaseFiles`, `_pack` and `Outbox`

A release that writes records of another form makes a `v2` beside it. Neither release touches the records of the other.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, final

from tunebook._base.errors import CodecError, warn_once
from tunebook._base.record_format import MAX_RECORD_BYTES, Record
from tunebook._base.vocabulary import ShownByPlace
from tunebook.stores._files import (
    RESERVED,
    FileLock,
    LeaseFiles,
    distrust,
    make_directory,
    opened,
    path_component,
    problem_id,
    read_fault,
    read_file,
    set_aside,
    sync_path,
    write_file,
    writing,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tunebook._base.vocabulary import Problem
    from tunebook.stores._files import Sync
    from tunebook.stores._listing import EntryFacts, EntryGroup, Wanted

# Fewer files than this are synced one by one: syncing the file system also waits for the writes of others.
_BULK_FILES: Final = 16
# How many records of a bulk write wait in `tmp/` for one sync: 1000 small files are 4 MB there.
_BATCH_RECORDS: Final = 1000
# A put takes milliseconds; a file still in `tmp/` after this was left by a process that died.
_STALE_TEMP_S: Final = 3600
# A lock here is held for microseconds. After these tries, of 1 ms, its holder is paused, and nobody should wait for it.
_LOCK_TRIES: Final = 50
# How long a place that was found safe counts as safe: a look at it takes 10 to 70 us, a get 15.
SAFE_S: Final = 1.0
# Listing must not count as using: `tunebook prune --unused` goes by access times. Only the owner of a file may ask for
# this.
_QUIETLY: Final = getattr(os, "O_NOATIME", 0)


def _sync_file_system(descriptor: int) -> bool:
    """Write out everything on the file system of an open file; False where the system cannot do that."""
    import ctypes  # noqa: PLC0415 - 4 ms that only bulk writes pay

    try:
        syncfs = ctypes.CDLL(None, use_errno=True).syncfs
    except (AttributeError, OSError):
        return False
    if syncfs(descriptor) != 0:
        fault = ctypes.get_errno()
        raise OSError(fault, os.strerror(fault))
    return True


@final
class DirectoryStore(ShownByPlace):
    """Records as files under a root. Nothing is made on disk before the first write, and nothing is scanned to open.

    Safe to share between threads and processes, and between hosts on a shared mount. A root that others can write to
    is not used: gets return None after one warning, and puts raise.
    """

    def __init__(
        self,
        root: Path,
        *,
        sync: Sync = os.fsync,
        sync_all: Callable[[int], bool] = _sync_file_system,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.where: Final = str(root.absolute())
        self._base = Path(self.where, "v1")
        self._prefix = str(self._base)
        self._sync, self._sync_all, self._now, self._clock = sync, sync_all, now, clock
        self._safe_until_s = -math.inf
        self._tidied = False

    def get(self, problem: Problem) -> Record | None:
        if not (self._clock() < self._safe_until_s or self._check_root()):
            return None
        return self._find(self._path(problem), problem)

    def state(self, problem: Problem) -> tuple[int, ...] | None:
        """Return a value that changes with the record of a problem, for less than a read; None if it is unknown."""
        try:
            facts = os.stat(self._path(problem))  # noqa: PTH116 - a path as text is at hand
        except FileNotFoundError:
            return ()
        except OSError:
            return None  # a read says why
        return facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_size

    def put(self, record: Record) -> None:
        """Store a record, durably, for two syncs. The first put makes directories, for one sync more each."""
        self._put_batch((record,))

    def put_many(self, records: Iterable[Record]) -> None:
        """Store many records, sharing syncs. After an error some may be stored, each of them whole."""
        remaining = iter(records)
        while batch := tuple(islice(remaining, _BATCH_RECORDS)):
            self._put_batch(batch)

    def delete(self, problem: Problem) -> bool:
        with writing(self.where):
            if not self._check_root(for_writing=True):
                return False
            path = Path(self._path(problem))
            try:
                path.unlink()
            except FileNotFoundError:
                return False
            self._sync_paths([path.parent])
            return True

    def items(self, op: str | None = None) -> Iterator[Record]:
        """Yield every readable record, or the records of an operation, with or without records written meanwhile."""
        found = (f"{directory}/{name}" for directory in self._directories(op) for name in self._names(directory))
        for path in found:
            record = self._find(path, None) if path.endswith(".json") else None
            # A directory's name holds a digest of 5 bytes: two operations could share one.
            if record is not None and op in {None, record.problem.op}:
                yield record

    def groups(self, wanted: Wanted, prefix: str = "", at_most: int | None = None) -> Iterator[EntryGroup]:  # noqa: ARG002 - names are listed, not records
        from tunebook.stores._listing import EntryGroup  # noqa: PLC0415 - loaded late: only listings need it

        for directory in self._directories():
            files, names = _RecordFiles(directory), self._names(directory)
            ids = [name[:-5] for name in names if name.endswith(".json") and name.startswith(prefix)]
            # The directory's own name may be cut short, and has no upper case.
            problem = next((record.problem for record in map(files.read, ids) if record is not None), None)
            if problem is not None and wanted(problem.op, problem.device):
                with suppress(FileNotFoundError), writing(self.where, read_fault):  # removed since it was listed
                    changed_s = os.stat(directory).st_mtime  # noqa: PTH116 - a path as text is at hand
                    yield EntryGroup(problem.op, problem.device, self.where, changed_s, ids, files)

    def leases(self) -> LeaseFiles | None:
        """Return the board for single flight among processes; None if the root is not used."""
        if not self._check_root():
            # Left to the board, the root would get the mode that the umask gives: with the 002 of many systems, a mode
            # that we do not trust.
            if not Path(self.where).exists():
                with suppress(OSError):  # the board's first slip will fail in the same way, and say so
                    make_directory(self._base, self._sync)
            # Looked at again, because another process may have made it meanwhile: taken for an unsafe root, a new
            # book would be tuned into without leases (1 of 60 had a problem tuned twice).
            if Path(self.where).exists() and not self._check_root():
                return None
        return LeaseFiles(self._base / "leases", self.where)

    def _path(self, problem: Problem) -> str:
        # A string, because every get makes one: with `pathlib` a miss takes three times as long.
        device, op = path_component(problem.device), path_component(problem.op)
        return f"{self._prefix}/{device}/{op}/{problem_id(problem)}.json"

    def _check_root(self, *, for_writing: bool = False) -> bool:
        """Return whether the root exists and is safe. An unsafe root is looked at each time: it may be fixed."""
        if self._clock() < self._safe_until_s:
            return True
        try:
            unsafe = distrust(self.where)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise read_fault(self.where, error) from error
        self._safe_until_s = self._clock() + SAFE_S if unsafe is None else -math.inf
        if unsafe is not None:
            if for_writing:
                raise unsafe
            warn_once(unsafe.kind, unsafe.path, unsafe.message)
        return unsafe is None

    def _read(self, path: str, problem: Problem | None) -> Record | None:
        """Read a record; `CodecError` if it is damaged, or belongs elsewhere."""
        try:
            content = read_file(path, MAX_RECORD_BYTES)
        except OSError as error:
            raise read_fault(self.where, error) from error
        if content is None:
            return None
        record = Record.from_bytes(content)
        if (self._path(record.problem) != path) if problem is None else (record.problem != problem):
            raise CodecError(f"it holds a record of {record.problem.op[:80]!r} that belongs elsewhere")
        return record

    def _find(self, path: str, problem: Problem | None) -> Record | None:
        try:
            return self._read(path, problem)
        except CodecError:
            # Once more, with writers kept out; a record that is still unreadable goes to quarantine.
            with writing(self.where, read_fault), _locked_where_possible(Path(path).parent):
                return self._read_or_set_aside(path, problem)

    def _read_or_set_aside(self, path: str, problem: Problem | None) -> Record | None:
        try:
            inode = Path(path).stat().st_ino
            return self._read(path, problem)
        except FileNotFoundError:
            return None
        except CodecError as error:
            reason = str(error)[:200]
        try:
            fate = f"It is now {set_aside(Path(path), inode, self._base / 'quarantine', self._now())}."
        except OSError as error:  # a read-only root: the record stays where it is, and stays a miss
            fate = f"It could not be moved away: {error.strerror}."
        message = f"unreadable record {path}: {reason}. {fate} Its problem counts as not tuned yet."
        warn_once("unreadable", self.where, message)
        return None

    def _put_batch(self, records: Sequence[Record]) -> None:
        contents = [record.to_bytes() for record in records]
        temps: list[Path] = []
        with writing(self.where):
            self._prepare()
            try:
                for content in contents:
                    temps.append(self._base / "tmp" / os.urandom(12).hex())
                    write_file(temps[-1], content, sync=None)
                # Content before names: after a power loss a name must never lead to a file that is not whole.
                self._sync_paths(temps)
                self._sync_paths(self._publish(records, temps))
            finally:
                for temp in temps:
                    with suppress(OSError):
                        temp.unlink()

    def _prepare(self) -> None:
        """Make the directory that a write needs; once per opening, remove the files that dead writers left."""
        self._check_root(for_writing=True)
        if not (self._base / "tmp").is_dir():
            make_directory(self._base / "tmp", self._sync)
        if not self._tidied:
            self._tidied = True
            # All temporary files are in one directory, so that this lists a handful of names. Beside the records they
            # would be found only by listing the whole book: 0.2 s at 100,000 records.
            for path in (self._base / "tmp").iterdir():
                with suppress(OSError):
                    if path.stat().st_mtime < self._now() - _STALE_TEMP_S:
                        path.unlink()

    def _publish(self, records: Sequence[Record], temps: Sequence[Path]) -> list[Path]:
        """Give the written files their names; return the directories that changed."""
        by_directory: dict[Path, list[tuple[Record, Path, str]]] = {}
        for record, temp in zip(records, temps, strict=True):
            path = self._path(record.problem)
            by_directory.setdefault(Path(path).parent, []).append((record, temp, path))
        for directory, entries in by_directory.items():
            if not directory.is_dir():
                make_directory(directory, self._sync)
            with _locked_where_possible(directory):
                for record, temp, path in entries:
                    # A holder that was paused past its lease must not undo the write of a later holder.
                    present = self._read_or_set_aside(path, record.problem)
                    if present is None or present.head.generation <= record.head.generation:
                        temp.rename(path)
        return list(by_directory)

    def _sync_paths(self, paths: Sequence[Path]) -> None:
        if len(paths) >= _BULK_FILES:
            with opened(self._base) as base:
                if self._sync_all(base):
                    return
        for path in paths:
            sync_path(path, self._sync)

    def _directories(self, op: str | None = None) -> Iterator[str]:
        """Yield the directories of records, one per device and operation; with `op`, only directories of that name."""
        if not self._check_root():
            return
        for device in self._names(self._prefix):
            if device not in RESERVED:
                names = self._names(f"{self._prefix}/{device}") if op is None else [path_component(op)]
                yield from (f"{self._prefix}/{device}/{name}" for name in names)

    def _names(self, directory: str) -> list[str]:
        try:
            return os.listdir(directory)  # noqa: PTH208 - names, not objects
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise read_fault(self.where, error) from error


@contextmanager
def _locked_where_possible(directory: Path) -> Iterator[None]:
    """Make "look at the file, then replace it" one step. Where locks do not work, the lease keeps writers apart."""
    with ExitStack() as stack:
        with suppress(OSError):
            descriptor = stack.enter_context(opened(directory))
            stack.enter_context(FileLock(descriptor, _LOCK_TRIES))
        yield


class _RecordFiles(NamedTuple):
    """The records in one directory, for a listing."""

    directory: str

    def facts(self, ids: Iterable[str]) -> Iterator[EntryFacts]:
        from tunebook.stores._listing import EntryFacts  # noqa: PLC0415 - loaded by now

        with suppress(FileNotFoundError), opened(Path(self.directory)) as descriptor:
            for identifier in ids:
                try:
                    # Relative to the directory: 100,000 whole paths take the kernel 0.1 s more to walk.
                    facts = os.stat(f"{identifier}.json", dir_fd=descriptor)
                except FileNotFoundError:
                    continue  # removed since it was listed
                # The size on disk: a file of 900 bytes takes 4096.
                size_bytes = max(facts.st_size, facts.st_blocks * 512)
                yield EntryFacts(identifier, facts.st_mtime, max(facts.st_atime, facts.st_mtime), size_bytes)

    def read(self, identifier: str) -> Record | None:
        path = f"{self.directory}/{identifier}.json"
        try:
            try:
                content = read_file(path, MAX_RECORD_BYTES, _QUIETLY)
            except PermissionError:
                content = read_file(path, MAX_RECORD_BYTES)
            return None if content is None else Record.from_bytes(content)
        except (OSError, CodecError):
            return None  # a `get` of this problem warns and sets the file aside
