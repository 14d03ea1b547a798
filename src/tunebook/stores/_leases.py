"""Lease slips as small files: the `LeaseBoard` of a directory.

<directory>/<shard>/<id>.<generation>

It needs nothing of the file system but O_CREAT | O_EXCL, which holds on network mounts too. Nothing is synced: a lease
matters only while its holder runs, and a crash that loses the slip has ended the holder.
"""

from __future__ import annotations

import os
import re
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, final

from tunebook._base.errors import CodecError, StoreError
from tunebook.stores._files import read_fault, read_file, write_file, writing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# One spelling per number: a stray `k.007` would be listed as 7, and then not be found under that name.
_NAME: Final = re.compile(r"([A-Za-z0-9_-]{1,128})\.([1-9][0-9]{0,18})")
_LIMIT_BYTES: Final = 4096  # a slip has about a hundred


@final
class LeaseFiles:
    """A board in `directory`, which is made with the first slip. Safe to share between threads and processes.

    `where` is what faults name as their place, so that one full disk is one warning for the board and its store.
    A slip that is being made may be read as b"" between its creation and its one write, 10 us later.
    """

    def __init__(self, directory: Path, where: str | None = None) -> None:
        self._directory: Final = directory
        self._where: Final = where or str(directory)

    def create(self, name: str, content: bytes) -> bool:
        """Make the slip, atomically; False if one of this name is there already."""
        path = self._path(name)
        with writing(self._where):
            if not path.parent.is_dir():
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                write_file(path, content, sync=None, mode=0o600)
            except FileExistsError:
                return False
        return True

    def read(self, name: str) -> bytes | None:
        """Return the slip's content, or None if there is none; b"" for what cannot be a slip."""
        with self._reading():
            try:
                return read_file(str(self._path(name)), _LIMIT_BYTES)
            except CodecError:
                return b""

    def rewrite(self, name: str, content: bytes) -> bool:
        """Replace the content of an existing slip; False, without making one, if it is gone."""
        with writing(self._where):
            try:
                descriptor = os.open(self._path(name), os.O_WRONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
            try:
                # In place and in one write: renaming a new file over this one could bring back a slip that its
                # holder, paused past its lease, no longer has.
                os.pwrite(descriptor, content, 0)
                os.ftruncate(descriptor, len(content))
            finally:
                os.close(descriptor)
        return True

    def remove(self, name: str) -> None:
        """Take the slip away; no error if it is gone already."""
        with writing(self._where):
            self._path(name).unlink(missing_ok=True)

    def generations(self, lease_id: str) -> list[int]:
        """Return the generations present for an id, ascending."""
        with self._reading():
            try:
                names = os.listdir(self._shard(lease_id))  # noqa: PTH208 - names, and no objects
            except FileNotFoundError:
                return []
        matches = filter(None, map(_NAME.fullmatch, names))
        return sorted(int(match[2]) for match in matches if match[1] == lease_id)

    def _shard(self, lease_id: str) -> Path:
        # A waiter lists a directory at every look, and killed processes leave slips behind. In 256 directories,
        # 10,000 of them make a listing cost 40 us; in one, 7 ms. Trying k.1, k.2, ... instead of listing would not
        # do: the lowest generation present can be any number.
        return self._directory / f"{zlib.crc32(lease_id.encode()) & 0xFF:02x}"

    def _path(self, name: str) -> Path:
        match = _NAME.fullmatch(name)
        if match is None:
            message = f"{name[:80]!r} cannot be a lease: a name is <letters, digits, - or _>.<generation from 1>."
            raise StoreError("name", self._where, message)
        return self._shard(match[1]) / name

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            raise read_fault(self._where, error) from error
