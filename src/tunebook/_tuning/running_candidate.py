"""The candidate that runs when a process dies: the next tuning of the same problem names and skips it."""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self

from tunebook._base.environment_variables import lock_root
from tunebook._base.locks import InterruptSafeLock
from tunebook.stores._files import Maker, this_process

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

_SIZE: Final = 512
_NAME: Final = 64  # bytes of a fingerprint
_open: Final[set[RunningCandidate]] = set()


class RunningCandidate:
    """The note of one tuning: the candidate that runs right now, in a file that outlives the process.

    It is written and not mapped: a map of a file that another thread or process cuts short ends the process. It is
    removed when a tuning ends in any way that Python sees. `died` is the fingerprint of the candidate that ran
    when the last one died, or None.
    """

    def __init__(self, name: str) -> None:
        self._path: Final[Path] = lock_root() / f"running-{name}"
        self._descriptor: int | None = None
        self._lock = InterruptSafeLock()  # a descriptor that is closed may be another file's a moment later
        self._maker: Maker | None = None
        self.died: str | None = None

    def __enter__(self) -> Self:
        # Without a place for the note nothing is lost but the name of a candidate that kills the process.
        with suppress(OSError, ValueError):
            known = _read(self._path)
            if known is not None and known[0] != this_process() and not known[0].is_gone():
                return self  # another process tunes the same, without a book
            self.died = None if known is None or known[0] == this_process() else known[1]
            self._open()
        return self

    def _open(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        maker = self._maker = this_process()
        head = f"{maker.host} {maker.pid} {maker.started}\n".encode()
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.pwrite(self._descriptor, bytes(_NAME) + head.ljust(_SIZE - _NAME), 0)
        if not _open:
            atexit.register(forget_all)
        _open.add(self)

    def note(self, fingerprint: str) -> None:
        """Note the candidate that runs from now on."""
        name = fingerprint.encode("ascii", "replace")[:_NAME].ljust(_NAME)
        with self._lock, suppress(OSError):
            if self._descriptor is not None:
                os.pwrite(self._descriptor, name, 0)

    def __exit__(self, *_: object) -> None:
        self.forget()

    def forget(self) -> None:
        """Remove the note: the process did not die of the candidate. In a forked child it is the parent's."""
        _open.discard(self)
        if self._descriptor is None or self._maker != this_process():
            return
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)
                self._path.unlink()


def forget_all() -> None:
    """Remove the notes of tunings that a process leaves in its other threads when it ends."""
    for note in list(_open):
        note.forget()


def forget_notes_of(pids: Collection[int]) -> None:
    """Remove the notes of other processes of this host, which were ended on purpose: no candidate is to blame."""
    for path in lock_root().glob("running-*"):
        with suppress(OSError, ValueError):  # it cannot be read, or is being written
            known = _read(path)
            if known is not None and known[0].host == this_process().host and known[0].pid in pids:
                path.unlink(missing_ok=True)


def _read(path: Path) -> tuple[Maker, str | None] | None:
    """Return the process that made a note, and the candidate in it; None without a note."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    name, head = content[:_NAME].strip(b"\0 ").decode("ascii", "replace"), content[_NAME:].decode("ascii", "replace")
    host, pid, started = head.split()
    return Maker(host, int(pid), started), name or None
