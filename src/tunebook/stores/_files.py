"""Steps on the file system that more than one engine takes: bounded reads, durable writes, locks, faults by name."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from tunebook._base.errors import CodecError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Sync: TypeAlias = Callable[[int], None]

# What the operating system says, what we call it, and what to do about it.
_ELSEWHERE: Final = "choose another place with TUNEBOOK_HOME, or with path= where you gave one"
_FAULTS: Final = {
    errno.ENOSPC: ("full", f"Free some space there, or {_ELSEWHERE}."),
    errno.EDQUOT: ("quota", f"Free some of your quota there, or {_ELSEWHERE}."),
    errno.EFBIG: ("file-size", "Raise the limit on the size of files: ulimit -f unlimited."),
    errno.EROFS: ("read-only", f"Mount it writable, or {_ELSEWHERE}."),
    errno.EACCES: ("permission", f"Make it yours with chown and chmod u+rwX, or {_ELSEWHERE}."),
    errno.EPERM: ("permission", f"Make it yours with chown and chmod u+rwX, or {_ELSEWHERE}."),
    errno.ENOENT: ("missing", f"Make the directory that should hold it, or {_ELSEWHERE}."),
    errno.ENOTDIR: ("not-a-directory", f"Move the file that is in the way, or {_ELSEWHERE}."),
    errno.EEXIST: ("not-a-directory", f"Move the file that is in the way, or {_ELSEWHERE}."),
    errno.ENOLCK: ("no-locks", "Use a directory for the book: it needs no locks."),
    errno.EOPNOTSUPP: ("no-locks", "Use a directory for the book: it needs no locks."),
    errno.ENAMETOOLONG: (
        "name-too-long",
        "Choose a shorter path with TUNEBOOK_HOME, or with path= where you gave one.",
    ),
    errno.EMFILE: ("open-files", "Raise the limit on open files (ulimit -n), or look for what leaves them open."),
}


def read_fault(where: str, error: OSError) -> StoreError:
    """Turn what the system said about reading into our error."""
    kind, remedy = _FAULTS.get(error.errno or 0, ("io", "Check the disk and its mount."))
    found = f"cannot read {where}: {error.strerror or error}. It counts as empty meanwhile."
    return StoreError(kind, where, f"{found} {remedy}")


def write_fault(where: str, error: OSError) -> StoreError:
    """Turn what the system said about writing into our error."""
    kind, remedy = _FAULTS.get(error.errno or 0, ("io", "Check the disk and its mount."))
    found = f"cannot write to {where}: {error.strerror or error}. Results stay in memory, for this process only."
    return StoreError(kind, where, f"{found} {remedy}")


@contextmanager
def writing(where: str) -> Iterator[None]:
    """Let nothing but `StoreError` out of a piece of writing."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise write_fault(where, error) from error


# One read of this size holds nearly every record, so that a hit is open, read, close and nothing else.
_FIRST_READ_BYTES: Final = 16 << 10


def read_file(path: str, limit_bytes: int) -> bytes | None:
    """Return a file's content, or None if there is no such file; `CodecError` if it cannot be one of ours.

    Not blocking, because a named pipe in place of the file would otherwise hang the call that met it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        content = os.read(descriptor, _FIRST_READ_BYTES)
        if len(content) < _FIRST_READ_BYTES:
            return content
        return content + _rest(descriptor, limit_bytes)
    except (IsADirectoryError, BlockingIOError) as error:
        raise CodecError(f"not a regular file: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _rest(descriptor: int, limit_bytes: int) -> bytes:
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_size > limit_bytes:
        raise CodecError(f"{facts.st_size} bytes, over the limit of {limit_bytes}")
    chunks, left = [], limit_bytes
    while left > 0 and (chunk := os.read(descriptor, min(left, 1 << 20))):
        chunks.append(chunk)
        left -= len(chunk)
    return b"".join(chunks)


def write_file(path: str | Path, content: bytes, sync: Sync | None, mode: int = 0o644) -> None:
    """Make a new file with this content, or none at all; on disk when this returns if `sync` is given."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with ExitStack() as undo:
        undo.callback(Path(path).unlink, missing_ok=True)
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(descriptor, view) :]
            if sync is not None:
                sync(descriptor)
        finally:
            os.close(descriptor)  # may itself report a full disk, on network mounts
        undo.pop_all()


def replace_file(
    path: Path, content: bytes, *, sync: Sync | None = None, mode: int = 0o666, temporary: Path | None = None
) -> None:
    """Put a whole file in the place of what is there, whose mode it keeps, or leave that as it is.

    It is on disk when this returns if `sync` is given. `mode` is a new file's, less the umask. `temporary` is for who
    clears away what a killed process leaves; by default it is a name beside the file that no other writer has.
    """
    temp = temporary or path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    write_file(temp, content, sync, mode)
    with ExitStack() as undo:
        undo.callback(temp.unlink, missing_ok=True)
        with suppress(FileNotFoundError):
            temp.chmod(stat.S_IMODE(path.stat().st_mode))
        temp.rename(path)
        undo.pop_all()
    if sync is not None:
        with opened_directory(path.parent) as directory:
            sync(directory)


@contextmanager
def opened_directory(path: Path) -> Iterator[int]:
    """Hold a directory open, to lock it or to sync it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def make_directory(path: Path, sync: Sync) -> None:
    """Make a directory and its parents, durably; one that is there already costs nothing.

    Never writable by others, whatever the umask: the store does not trust a root that is.
    """
    try:
        path.mkdir(0o755)
    except FileExistsError:
        return
    except FileNotFoundError:
        if path.parent == path:
            raise
        make_directory(path.parent, sync)
        path.mkdir(0o755, exist_ok=True)  # another process may have been quicker
    with opened_directory(path.parent) as parent:
        sync(parent)


def take_lock(descriptor: int, tries: int) -> bool:
    """Lock an open file or directory; False if another keeps it over so many tries, 1 ms apart.

    The kernel drops the lock of a killed process at once, but a paused one keeps it: hence an end to the tries.
    Raises OSError on mounts that have no locks.
    """
    for _ in range(tries):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.001)
        else:
            return True
    return False


def drop_lock(descriptor: int) -> None:
    """Give a lock up. Closing alone would not do it if another thread forked meanwhile: its child has the file open."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


@cache
def _syncfs() -> Callable[[int], int] | None:
    import ctypes  # noqa: PLC0415 - 4 ms that only bulk writes need to pay

    try:
        function = ctypes.CDLL(None, use_errno=True).syncfs
    except (AttributeError, OSError):
        return None

    def call(descriptor: int) -> int:
        return 0 if function(descriptor) == 0 else ctypes.get_errno()

    return call


def sync_file_system(descriptor: int) -> bool:
    """Write out everything on the file system of an open file; False where the system cannot do that."""
    function = _syncfs()
    if function is None:
        return False
    if fault := function(descriptor):
        raise OSError(fault, os.strerror(fault))
    return True
