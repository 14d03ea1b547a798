"""A directory of records: one small file per problem, replaced whole, needing nothing but atomic rename.

<root>/v1/<device>/<op>/<id>.json     a record (see `_record`)
<root>/v1/tmp/                        records being written
<root>/v1/quarantine/                 what could not be read
<root>/v1/leases/  packs/             see `_leases` and `_pack`

A release that writes records of another form makes a `v2` beside it, and neither touches the other's.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, final

from tunebook._base.errors import CodecError, warn_once
from tunebook._base.record_format import MAX_RECORD_BYTES, Record
from tunebook.stores._files import (
    drop_lock,
    make_directory,
    opened_directory,
    read_fault,
    read_file,
    sync_file_system,
    take_lock,
    write_file,
    writing,
)
from tunebook.stores._ids import RESERVED, path_component, problem_id
from tunebook.stores._leases import LeaseFiles
from tunebook.stores._quarantine import set_aside
from tunebook.stores._trust import distrust

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tunebook._base.vocabulary import Problem
    from tunebook.stores._files import Sync

# Fewer files than this are synced one by one: syncing the file system also waits for what others wrote to it.
_BULK_FILES: Final = 16
# How many records of a bulk write wait in `tmp/` for one sync: 1000 small files are 4 MB there.
_BATCH_RECORDS: Final = 1000
# A put takes milliseconds; what is still in `tmp/` after this was left by a process that died.
_STALE_TEMP_S: Final = 3600
# A lock here is held for microseconds. After these tries, of 1 ms, its holder is paused, and nobody should wait for it.
_LOCK_TRIES: Final = 50


class Removed(NamedTuple):
    """A record that garbage collection took away."""

    path: Path
    size_bytes: int
    last_used: float


@final
class DirectoryStore:
    """Records as files under a root. Nothing is made on disk before the first write, and nothing is scanned to open.

    Safe to share between threads and processes, and between hosts on a shared mount. A root that others can write to
    is not used: gets are None after one warning, and puts raise.
    """

    def __init__(
        self,
        root: Path,
        *,
        sync: Sync = os.fsync,
        sync_all: Callable[[int], bool] = sync_file_system,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._root = str(root.absolute())
        self._base = Path(self._root, "v1")
        self._prefix = str(self._base)
        self._sync = sync
        self._sync_all = sync_all
        self._now = now
        self._safe = False
        self._tidied = False

    @property
    def where(self) -> str:
        """The root."""
        return self._root

    def get(self, problem: Problem) -> Record | None:
        """Return the record of a problem, or None."""
        if not (self._safe or self._check_root()):
            return None
        path = self._path(problem)
        try:
            return self._read(path, problem)
        except CodecError:
            return self._settle(path, problem)

    def put(self, record: Record) -> None:
        """Keep a record, durably, for two syncs; the first in a new directory costs one more per directory made."""
        self._put_batch((record,))

    def put_many(self, records: Iterable[Record]) -> None:
        """Keep many records, sharing syncs. If it raises, some may have been kept, each of them whole."""
        remaining = iter(records)
        while batch := tuple(islice(remaining, _BATCH_RECORDS)):
            self._put_batch(batch)

    def delete(self, problem: Problem) -> bool:
        """Remove a record, durably; False if there was none."""
        with writing(self._root):
            if not (self._safe or self._check_root(for_writing=True)):
                return False
            path = Path(self._path(problem))
            try:
                path.unlink()
            except FileNotFoundError:
                return False
            self._sync_paths([path.parent])
            return True

    def items(self, op: str | None = None) -> Iterator[Record]:
        """Yield every readable record, or one operation's; what is written meanwhile may or may not be among them."""
        for path in map(str, self._record_paths(op)):
            try:
                record = self._read(path, None)
            except CodecError:
                record = self._settle(path, None)
            # A directory's name holds a digest of 5 bytes: two operations could share one.
            if record is not None and op in {None, record.problem.op}:
                yield record

    def leases(self) -> LeaseFiles | None:
        """Return the board for single flight among processes; None if the root is not used.

        Makes the root, because a board is asked for by whoever is about to write: left to the board, it would get the
        mode that the umask gives, and with the 002 of many systems that is one that we do not trust.
        """
        if not (self._safe or self._check_root()):
            if not Path(self._root).exists():
                with suppress(OSError):  # the board's first slip will fail in the same way, and say so
                    make_directory(self._base, self._sync)
            # Looked at again, because another process may have made it meanwhile: taken for an unsafe one, a new
            # book would be tuned into without leases (1 of 60 had a problem tuned twice).
            if Path(self._root).exists() and not self._check_root():
                return None
        return LeaseFiles(self._base / "leases", self._root)

    def collect_garbage(self, max_bytes: int | None = None, max_age_s: float | None = None) -> tuple[Removed, ...]:
        """Remove records not used for `max_age_s`, then the longest unused until `max_bytes` on disk are left.

        A record counts as used when it was written or read, as far as the mount keeps access times.
        """
        if not (self._safe or self._check_root(for_writing=True)):
            return ()
        found = sorted(filter(None, map(_facts, self._record_paths())), key=lambda facts: facts.last_used)
        total_bytes = sum(facts.size_bytes for facts in found)
        removed = []
        for facts in found:
            too_old = max_age_s is not None and facts.last_used < self._now() - max_age_s
            if not too_old and (max_bytes is None or total_bytes <= max_bytes):
                break
            with writing(self._root):
                if _remove_unchanged(facts):
                    removed.append(facts)
            total_bytes -= facts.size_bytes
        return tuple(removed)

    def _path(self, problem: Problem) -> str:
        # A string, because every get makes one: with `pathlib` a miss takes three times as long.
        device, op = path_component(problem.device), path_component(problem.op)
        return f"{self._prefix}/{device}/{op}/{problem_id(problem)}.json"

    def _check_root(self, *, for_writing: bool = False) -> bool:
        """Look at the root once it exists; a root that was found safe is not looked at again.

        An unsafe one is, at 8 us per call, so that what its warning says to do takes effect at once.
        """
        try:
            unsafe = distrust(self._root)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise read_fault(self._root, error) from error
        if unsafe is None:
            self._safe = True
        elif for_writing:
            raise unsafe
        else:
            warn_once(unsafe.kind, unsafe.path, unsafe.message)
        return self._safe

    def _read(self, path: str, problem: Problem | None) -> Record | None:
        """Read a record; `CodecError` if it is not whole, or not the one that belongs there."""
        try:
            content = read_file(path, MAX_RECORD_BYTES)
        except OSError as error:
            raise read_fault(self._root, error) from error
        if content is None:
            return None
        record = Record.from_bytes(content)
        belongs = self._path(record.problem) == path if problem is None else record.problem == problem
        if not belongs:
            raise CodecError(f"it holds a record of {record.problem.op[:80]!r} that belongs elsewhere")
        return record

    def _settle(self, path: str, problem: Problem | None) -> Record | None:
        """Read once more, with writers kept out; what is unreadable then goes to quarantine."""
        with _others_kept_out(Path(path).parent):
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
        warn_once("unreadable", self._root, message)
        return None

    def _put_batch(self, records: Sequence[Record]) -> None:
        contents = [record.to_bytes() for record in records]
        temps: list[Path] = []
        with writing(self._root):
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
        """Make what a write needs, and once per opening clear away what dead writers left."""
        if not self._safe:
            self._check_root(for_writing=True)
        if not (self._base / "tmp").is_dir():
            make_directory(self._base / "tmp", self._sync)
        if not self._tidied:
            self._tidied = True
            self._remove_stale_temps()

    def _remove_stale_temps(self) -> None:
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
            with _others_kept_out(directory):
                for record, temp, path in entries:
                    # A lease holder that was paused past its lease must not undo what a later one wrote.
                    present = self._read_or_set_aside(path, record.problem)
                    if present is None or present.head.generation <= record.head.generation:
                        temp.rename(path)
        return list(by_directory)

    def _sync_paths(self, paths: Sequence[Path]) -> None:
        if len(paths) >= _BULK_FILES:
            with opened_directory(self._base) as base:
                if self._sync_all(base):
                    return
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._sync(descriptor)
            finally:
                os.close(descriptor)

    def directories(self, op: str | None = None) -> Iterator[Path]:
        """Yield the directories that hold records, one per device and kernel; with `op`, those that may hold its."""
        if not (self._safe or self._check_root()):
            return
        for device in self._inside(self._base):
            if device.name not in RESERVED:
                yield from self._inside(device) if op is None else [device / path_component(op)]

    def _record_paths(self, op: str | None = None) -> Iterator[Path]:
        for directory in self.directories(op):
            yield from (path for path in self._inside(directory) if path.suffix == ".json")

    def _inside(self, directory: Path) -> list[Path]:
        try:
            return list(directory.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise read_fault(self._root, error) from error


@contextmanager
def _others_kept_out(directory: Path) -> Iterator[None]:
    """Lock a directory where that works, to make "look at what is there, then replace it" one step.

    Where it does not work (network mounts), the lease of the problem keeps writers apart, as it does anyway.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            descriptor = stack.enter_context(opened_directory(directory))
            if take_lock(descriptor, _LOCK_TRIES):
                stack.callback(drop_lock, descriptor)
        yield


def _facts(path: Path) -> Removed | None:
    try:
        facts = path.stat()
    except FileNotFoundError:
        return None
    return Removed(path, max(facts.st_size, facts.st_blocks * 512), max(facts.st_atime, facts.st_mtime))


def _remove_unchanged(facts: Removed) -> bool:
    """Remove a record unless it was written or read since its facts were taken."""
    try:
        with _others_kept_out(facts.path.parent):
            if _facts(facts.path) != facts:
                return False
            facts.path.unlink()
    except FileNotFoundError:
        return False
    return True
