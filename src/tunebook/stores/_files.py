"""The file system, as local engines use it: reads, durable writes, locks, trust, quarantine, leases, names."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
import zlib
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, final

from tunebook._base.errors import CodecError, DefinitionError, StoreError, text_of, warn_once
from tunebook._base.record_format import blake2b

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tunebook._base.vocabulary import Problem
    from tunebook.stores._protocol import Store

    Sync: TypeAlias = Callable[[int], None]

# By error number: the kind of our error, and the remedy.
_BY_PATH: Final = ", or with path= where you gave one"
_ELSEWHERE: Final = f"choose another place with TUNEBOOK_HOME{_BY_PATH}"
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
    errno.ENAMETOOLONG: ("name-too-long", f"Shorten the path: {_ELSEWHERE}."),
    errno.EMFILE: ("open-files", "Raise the limit on open files (ulimit -n), or find the code that leaves them open."),
}


def fault_of(error: OSError) -> tuple[str, str]:
    """Return the kind of our error for an error of the file system, and the remedy."""
    return _FAULTS.get(error.errno or 0, ("io", "Check the disk and its mount."))


def _fault(found: str, where: str, error: OSError) -> StoreError:
    kind, remedy = fault_of(error)
    return StoreError(kind, where, f"{found.format(where, error.strerror or error)} {remedy}")


_EMPTY, _IN_MEMORY = " It counts as empty meanwhile.", " Results stay in memory, for this process only."
read_fault: Final = partial(_fault, f"cannot read {{}}: {{}}.{_EMPTY}")
_write_fault: Final = partial(_fault, f"cannot write to {{}}: {{}}.{_IN_MEMORY}")


def for_the_command(text: str) -> str:
    """Return a message without the words that hold for programs: no program goes on here, and no code has a path."""
    return text.replace(_EMPTY, "").replace(_IN_MEMORY, "").replace(_BY_PATH, " or --book")


@contextmanager
def writing(where: str, fault: Callable[[str, OSError], StoreError] = _write_fault) -> Iterator[None]:
    """Turn every `OSError` of the block into a `StoreError`; give `fault=read_fault` for a block that reads."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise fault(where, error) from error


class FaultsAreWarnings:
    """A block in which a fault of a store, a lock or a file is one warning, and the code after the block goes on.

    Everything that a user's call asks of the cache is inside such a block. A `DefinitionError` passes, because only the
    user can fix a wrong setting. The message is the error's, with `before` and `after` around it; `where` is the place
    of an error that does not name one.
    """

    __slots__ = ("_after", "_before", "_where")

    def __init__(self, where: str, *, before: str = "", after: str = "") -> None:
        self._where, self._before, self._after = where, before, after

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, (OSError, ValueError)) or isinstance(error, DefinitionError):
            return False
        kind, place = (error.kind, error.path) if isinstance(error, StoreError) else (type(error).__name__, self._where)
        warn_once(kind, place, f"{self._before}{text_of(error)}{self._after}")
        return True


# One read of this size holds nearly every record, so that a hit is open, two reads, close and nothing else.
_FIRST_READ_BYTES: Final = 16 << 10


def read_file(path: str, limit_bytes: int, flags: int = 0) -> bytes | None:
    """Return a file's content, or None if the file is missing; `CodecError` if it is not a file, or too large."""
    try:
        # Not blocking, because a named pipe in place of the file would otherwise hang the call that met it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    except FileNotFoundError:
        return None
    try:
        content = os.read(descriptor, _FIRST_READ_BYTES)
        while len(content) < _FIRST_READ_BYTES:  # on FUSE and network mounts a read may return less than there is
            more = os.read(descriptor, _FIRST_READ_BYTES - len(content))
            if not more:
                return content
            content += more
        return content + _rest(descriptor, limit_bytes)
    except (IsADirectoryError, BlockingIOError) as error:
        raise CodecError(f"not a regular file: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _rest(descriptor: int, limit_bytes: int) -> bytes:
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_size > limit_bytes:
        raise CodecError(f"{facts.st_size} bytes, over the limit of {limit_bytes}")
    with open(descriptor, "rb", closefd=False) as file:
        return file.read(limit_bytes)


def write_file(path: str | Path, content: bytes, sync: Sync | None, mode: int = 0o644) -> None:
    """Make a new file with this content; on failure the file is removed. With `sync` it is on disk on return."""
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
    """Atomically replace a file and keep its mode; on failure the old file is untouched. With `sync` it is on disk.

    A new file gets `mode`, less the umask. `temporary` is by default a name beside the file that no other writer has.
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
        sync_path(path.parent, sync)


def sync_path(path: Path, sync: Sync) -> None:
    """Write a file or a directory out to the disk."""
    with opened(path, os.O_RDONLY) as descriptor:
        sync(descriptor)


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY | os.O_DIRECTORY) -> Iterator[int]:
    """Hold a directory open, to lock it or to look at the files in it; with other flags, a file."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def make_directory(path: Path, sync: Sync) -> None:
    """Make a directory and its parents, durably; never writable by others, because the store distrusts such a root."""
    try:
        path.mkdir(0o755)
    except FileExistsError:
        return
    except FileNotFoundError:
        if path.parent == path:
            raise
        make_directory(path.parent, sync)
        path.mkdir(0o755, exist_ok=True)  # another process may have been quicker
    sync_path(path.parent, sync)


class FileLock:
    """Locks an open file or directory in a block; False after so many tries, of 1 ms; OSError on mounts without locks.

    The kernel drops the lock of a killed process at once, but a paused one keeps it: hence an end to the tries. Not a
    generator: the descriptor of one that an interrupt left behind may be another file's when it is collected.
    """

    def __init__(self, descriptor: int, tries: int) -> None:
        self._descriptor, self._tries, self._is_ours = descriptor, tries, False

    def __enter__(self) -> bool:
        for _ in range(self._tries):
            with suppress(BlockingIOError):
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._is_ours = True
                return True
            time.sleep(0.001)
        return False

    def __exit__(self, *_: object) -> None:
        if self._is_ours:
            # Closing alone would not do it if another thread forked meanwhile: its child has the file open.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)


# --------------------------------------------------------------------------------------------- trust and quarantine


def distrust(place: str, *, inside: str = "v1") -> StoreError | None:
    """Return why nothing at a place may be used, or None; FileNotFoundError if the place does not exist.

    A stored configuration decides which code runs, so others must not be able to write one. The superuser's files are
    trusted: an administrator, or a container image, hands out a book that way. `inside` is a directory in the place
    that is looked at, too; "" for a file.
    """
    fault = _unsafe_link(Path(place)) or _unsafe(Path(place))
    with suppress(FileNotFoundError):
        fault = fault or (_unsafe(Path(place, inside)) if inside else "")
    return StoreError("unsafe", place, f"the book at {place} is not used, because {fault}") if fault else None


def _unsafe(path: Path) -> str:
    facts = path.stat()
    if facts.st_uid not in {os.geteuid(), 0}:
        found = f"{path} belongs to another user (uid {facts.st_uid})"
        remedy = f"chown -R {os.geteuid()} {path}"
    elif facts.st_mode & 0o022:
        found = f"the mode of {path}, {facts.st_mode & 0o777:o}, lets others write to it"
        remedy = f"chmod go-w {path}"
    else:
        return ""
    return f"{found}; results stay in memory, for this process only. Fix it with: {remedy}"


def _unsafe_link(path: Path) -> str:
    """Return why a link on the way to a path may not be followed: its owner can let it lead elsewhere at any time."""
    ahead, seen = [path.absolute()], set[Path]()
    while ahead:
        way = ahead.pop()
        for part in (way, *way.parents):
            if part in seen:
                break
            seen.add(part)
            with suppress(FileNotFoundError, NotADirectoryError):
                facts = part.lstat()
                if not stat.S_ISLNK(facts.st_mode):
                    continue
                if facts.st_uid not in {os.geteuid(), 0}:
                    found = f"{part} is a link of another user (uid {facts.st_uid}), which may lead elsewhere tomorrow"
                    return f"{found}. Fix it with: chown -h {os.geteuid()} {part}, or give the path that it leads to"
                ahead.append(part.parent / part.readlink())
    return ""


# Enough to see the cause; a disk that damages everything must not fill the rest of itself with the remains.
_QUARANTINED: Final = 256


def set_aside(path: Path, inode: int, quarantine: Path, now_s: float) -> Path:
    """Move an unreadable file into the quarantine, drop the oldest files there if it is full, and return the new path.

    `inode` belongs to the file that was found unreadable. On mounts without locks a writer may have put a good file
    in its place by now; then the good file goes back.
    """
    quarantine.mkdir(mode=0o755, parents=True, exist_ok=True)
    kept = sorted(quarantine.iterdir())  # their names begin with the time
    for oldest in kept[: max(0, len(kept) + 1 - _QUARANTINED)]:
        with suppress(OSError):
            oldest.unlink()
    target = quarantine / f"{int(now_s * 1000):014d}-{path.name}"
    path.rename(target)
    if target.stat().st_ino != inode:
        with suppress(FileExistsError):
            os.link(target, path)
        target.unlink()
    return target


# ------------------------------------------------------------------------------------------------------------ leases

# Nobody takes a lease over so often: a slip above this was planted. A record's generation is a sum of these, and has 63
# bits.
LARGEST_GENERATION: Final = 999_999_999
# One spelling per number: a stray `k.007` would be listed as 7, and then not be found under that name.
_GENERATION: Final = re.compile(r"[1-9][0-9]{0,8}")
_NAME: Final = re.compile(rf"([A-Za-z0-9_-]{{1,128}})\.({_GENERATION.pattern})")


def generations_among(names: Iterable[str]) -> list[int]:
    """Return the generations in a listing of slips, ascending, without other names and numbers that are too large."""
    return sorted(int(name) for name in names if _GENERATION.fullmatch(name))


@final
class LeaseFiles:
    """Lease slips as small files, `<directory>/<shard>/<id>.<generation>`: a `LeaseBoard` for threads and processes.

    It needs nothing of the file system but O_CREAT | O_EXCL, which holds on network mounts too. Nothing is synced: a
    lease matters only while its holder runs, and a crash that loses the slip has ended the holder. The directory is
    made with the first slip. A slip that is being made may be read as b"" between its creation and its one write, 10 us
    later. Faults name `where` as their place, so that one full disk is one warning for the board and its store.
    """

    def __init__(self, directory: Path, where: str | None = None) -> None:
        self._directory: Final = directory
        self._where: Final = where or str(directory)

    def create(self, name: str, content: bytes) -> bool:
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
        """Return the slip's content, or None if it is missing; b"" if the file cannot be a slip."""
        with writing(self._where, read_fault):
            try:
                return read_file(str(self._path(name)), limit_bytes=4096)  # a slip has about a hundred
            except CodecError:
                return b""

    def rewrite(self, name: str, content: bytes) -> bool:
        with writing(self._where):
            try:
                with opened(self._path(name), os.O_WRONLY) as descriptor:
                    # In place and in one write: renaming a new file over this one could bring back a slip that its
                    # holder, paused past its lease, no longer has.
                    os.pwrite(descriptor, content, 0)
                    os.ftruncate(descriptor, len(content))
            except FileNotFoundError:
                return False
        return True

    def remove(self, name: str) -> None:
        with writing(self._where):
            self._path(name).unlink(missing_ok=True)

    def generations(self, lease_id: str) -> list[int]:
        with writing(self._where, read_fault):
            try:
                names = os.listdir(self._shard(lease_id))  # noqa: PTH208 - names, not objects
            except FileNotFoundError:
                return []
        mine = f"{lease_id}."
        return generations_among(name[len(mine) :] for name in names if name.startswith(mine))

    def _shard(self, lease_id: str) -> Path:
        # A waiter lists a directory at every look, and killed processes leave slips behind. In 256 directories,
        # 10,000 of them make a listing cost 40 us; in one, 7 ms. Trying k.1, k.2, ... instead of listing would not
        # do: the lowest generation present can be any number.
        return self._directory / f"{zlib.crc32(lease_id.encode()) & 0xFF:02x}"

    def _path(self, name: str) -> Path:
        match = _NAME.fullmatch(name)
        if match is None:
            message = f"invalid lease name {name[:80]!r}: expected <letters, digits, - or _>.<generation from 1>."
            raise StoreError("name", self._where, message)
        return self._shard(match[1]) / name


def state_of(store: Store, problem: Problem) -> object | None:
    """Return a value that changes whenever the record of a problem changes; None if the store cannot tell.

    A store may have a method `state(problem)` for it, if that takes less time than a `get`.
    """
    state = getattr(store, "state", None)  # not a part of `Store`, because other people's stores need not have it
    return None if state is None else state(problem)


# ------------------------------------------------------------------------------------------------- the maker of a slip

_UNKNOWN_HOST: Final = "unknown"

# One item per fork since this module was imported: a forked child does not hold the locks of its ancestors. Not the
# pid: parent and child can have the same pid, across pid namespaces.
FORKS: Final[list[None]] = []
os.register_at_fork(after_in_child=lambda: FORKS.append(None))


class Maker(NamedTuple):
    """The process that made a slip. With its start time, because pids come back."""

    host: str
    pid: int
    started: str

    def is_gone(self, proc: Path = Path("/proc")) -> bool:
        """Whether this was a process of this host and no longer exists; False if that cannot be known."""
        if self.host != this_process(proc).host or self.host == _UNKNOWN_HOST:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # another user's, and alive; /proc may hide it from us, so that /proc alone proves nothing
        seen = _state_and_start(self.pid, proc)
        # A zombie holds nothing: its parent may never ask how it died.
        return seen is not None and (seen[0] in {"Z", "X"} or seen[1] != self.started)


def this_process(proc: Path = Path("/proc")) -> Maker:
    """Return this process as a maker; its host is "unknown" where /proc cannot be used."""
    return _identify(proc, len(FORKS))


@lru_cache(maxsize=4)
def _identify(proc: Path, _forks: int) -> Maker:
    pid = os.getpid()
    try:
        # Containers on one machine share its boot, but not their process numbers.
        boot = (proc / "sys/kernel/random/boot_id").read_text("utf-8").strip()
        namespace = (proc / "self/ns/pid").readlink()
        seen_as = str((proc / "self").readlink())
    except OSError:
        seen_as = ""
    seen = _state_and_start(pid, proc)
    # A /proc of another namespace shows other processes under our numbers.
    if seen is None or seen_as != str(pid):
        return Maker(host=_UNKNOWN_HOST, pid=pid, started="0")
    return Maker(host=f"{boot}/{namespace}", pid=pid, started=seen[1])


def _state_and_start(pid: int, proc: Path) -> tuple[str, str] | None:
    try:
        stat = (proc / str(pid) / "stat").read_text("utf-8", "replace")
    except OSError:
        return None
    # The second field is the program's name in parentheses, which may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return fields[0], fields[19]


# The content of a slip: host, pid, start time, a number that no other slip has, and the heartbeat's count.
_SLIP: Final = re.compile(rb"(\S+) ([1-9][0-9]{0,8}) ([0-9]+) [0-9a-f]{16} [0-9]{12}\n")


def maker_of(content: bytes) -> Maker | None:
    """Return the maker of a slip, from its content; None if the content has another form."""
    match = _SLIP.fullmatch(content)
    if match is None:
        return None
    return Maker(host=match[1].decode("ascii", "replace"), pid=int(match[2]), started=match[3].decode())


# ----------------------------------------------------------------------------------------------- names for problems

_UNSAFE = re.compile(r"[^a-z0-9._-]+")

# The store's own directories beside the directories of devices. A device may be called "tmp" and then gets a digest.
RESERVED: Final = frozenset({"leases", "outbox", "packs", "quarantine", "tmp"})


def problem_id(problem: Problem) -> str:
    """Return 32 hex digits for a problem."""
    digest = blake2b(digest_size=16)
    # Every part goes in behind its length: without it, ("a|b", "c") and ("a", "b|c") would be one problem.
    for part in problem:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(encoded))
        digest.update(encoded)
    return digest.hexdigest()


# Every get asks for two components, and a process meets few devices and operations: 0.1 us against 3.
@lru_cache(maxsize=1024)
def path_component(name: str) -> str:
    """Return a device or an operation as a path component: the name where it is harmless, else a digest behind it."""
    # Upper case counts as harmful: names that differ only in case are one file on some file systems. 40 characters are
    # recognised in a listing, and stay far below the 255 bytes of any file system with the digest.
    slug = _UNSAFE.sub("-", name.lower()).strip(".-")[:40]
    if slug == name and slug and slug not in RESERVED:
        return slug
    return f"{slug or 'x'}-{blake2b(name.encode('utf-8', 'surrogatepass'), digest_size=5).hexdigest()}"
