"""Compiled code is kept: on disk for every process of the user, and in memory per configuration."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Hashable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, final

from tunebook._base.config_codec import fingerprint
from tunebook._base.environment_variables import HOME_VARIABLE, book_root, no_home
from tunebook._base.errors import StoreError, warn_once
from tunebook._base.locks import InterruptSafeLock
from tunebook._base.record_format import blake2b
from tunebook.stores._directory import SAFE_S
from tunebook.stores._files import distrust, make_directory, replace_file, writing

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# A service that overrides every call makes a new configuration each time, and each entry keeps one alive.
_REMEMBERED: Final = 1024
# At the end of every file, with a digest: loading a truncated library does not fail, it kills the process (SIGBUS). The
# loader ignores bytes after the sections of a library.
_SEAL: Final = b"tunebook"
_DIGEST_BYTES: Final = 16
_SUFFIX: Final = ".so"
# Some 16,000 kernels of the usual 16 kB; beyond it the libraries that were unused the longest are removed.
MAX_BYTES: Final = 256 << 20
_STALE_TEMP_S: Final = 3600


@final
class BuildCache:
    """Libraries by digest. Safe to share between threads and processes: a file is replaced whole, or not at all.

    `directory=None` is `native` in the user's book, looked up each time because its root can change. A directory that
    other users can write to is not used, since its files are executed. Then, and where nothing can be written,
    libraries go to a temporary directory of this process, after one warning.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._given = None if directory is None else directory.absolute()
        self._locks: dict[str, InterruptSafeLock] = {}
        self._not_shared: dict[str, Path] = {}
        self._tidied = False
        self._safe: tuple[Path | None, float] = None, 0.0  # a directory, and until when it counts as safe

    def get(self, digest: str, build: Callable[[Path], None], *, afresh: bool = False) -> Path:
        """Return the library of a digest; `build(path)` makes it if it is missing or truncated, or with `afresh`."""
        with self._locks.setdefault(digest, InterruptSafeLock()):
            shared = self._directory()
            for path in (None if shared is None else shared / f"{digest}{_SUFFIX}", self._not_shared.get(digest)):
                if path is not None and not afresh and _is_whole(path):
                    return path
            content = _build(build)
            shared = self._directory(afresh=True)  # it may have been removed since it was found safe
            if shared is not None:
                try:
                    with writing(str(shared)):
                        if not self._tidied:
                            self._tidied = True
                            _tidy(shared)
                        return _put(shared, digest, content)
                except StoreError as error:
                    _warn_not_kept(error)
            path = self._not_shared[digest] = _put(_own_directory(os.getpid()), digest, content)
            return path

    def _directory(self, *, afresh: bool = False) -> Path | None:
        """Return the directory that outlives this process, or None if it cannot be used; looked at once a second."""
        root = book_root() if self._given is None else self._given
        if root is None:
            message = f"{no_home()}: compiled kernels are not kept for the next process. Set {HOME_VARIABLE}."
            warn_once("no-home", "native", message)
            return None
        directory = root.absolute() / "native" if self._given is None else root
        if not afresh and directory == self._safe[0] and time.monotonic() < self._safe[1]:
            return directory
        try:
            with writing(str(directory)):
                # Not synced: a directory that a power loss removes is made again.
                make_directory(directory, lambda _descriptor: None)
                unsafe = distrust(str(root)) or distrust(str(directory))
            if unsafe is None:
                self._safe = directory, time.monotonic() + SAFE_S
                return directory
        except StoreError as error:
            unsafe = error
        _warn_not_kept(unsafe)
        return None


def _warn_not_kept(error: StoreError) -> None:
    warn_once(error.kind, error.path, f"compiled kernels are not kept for the next process: {error}")


@cache
def _own_directory(pid: int) -> Path:
    """Return this process's own directory, removed when it ends; a forked child has another `pid`."""
    path = Path(tempfile.mkdtemp(prefix="tunebook-native-"))

    def remove() -> None:
        if os.getpid() == pid:
            shutil.rmtree(path, ignore_errors=True)

    atexit.register(remove)
    return path


def _build(build: Callable[[Path], None]) -> bytes:
    # In a directory of our own, so that the compiler does not fail because the cache is full.
    path = _own_directory(os.getpid()) / f"build-{secrets.token_hex(8)}{_SUFFIX}"
    try:
        build(path)
        content = path.read_bytes()
    finally:
        path.unlink(missing_ok=True)
    return content + _SEAL + blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _put(directory: Path, digest: str, content: bytes) -> Path:
    path = directory / f"{digest}{_SUFFIX}"
    # Not synced: a file that a power loss cuts short has no seal, and is built again.
    replace_file(path, content, mode=0o644, temporary=directory / f"tmp-{secrets.token_hex(8)}")
    return path


def _is_whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False  # missing or not readable: it is built
    end = len(content) - _DIGEST_BYTES - len(_SEAL)
    seal = _SEAL + blake2b(content[: max(end, 0)], digest_size=_DIGEST_BYTES).digest()
    return end > 0 and content[end:] == seal


def _tidy(directory: Path) -> None:
    """Remove the temporary files of killed processes, and the longest unused libraries beyond the limit."""
    libraries: list[tuple[float, int, str]] = []
    now = time.time()
    with os.scandir(directory) as entries:
        for entry in entries:
            with suppress(OSError):  # another process is tidying as well
                facts = entry.stat(follow_symlinks=False)
                if entry.name.startswith("tmp-") and facts.st_mtime < now - _STALE_TEMP_S:
                    Path(entry.path).unlink()
                elif entry.name.endswith(_SUFFIX):
                    libraries.append((max(facts.st_atime, facts.st_mtime), facts.st_size, entry.path))
    excess = sum(size for _, size, _ in libraries) - MAX_BYTES
    for _, size, path in sorted(libraries):
        if excess <= 0:
            return
        with suppress(OSError):
            Path(path).unlink()
        excess -= size


@final
class PerConfig(Generic[T]):
    """Calls `make` once per configuration, also under threads; an error is raised and not remembered.

    `key` tells configurations apart, and is called only for new objects: a tuned call always passes the same object,
    which is found again in 0.1 us. A lookup by the configuration's own hash would take twice as long and be wrong,
    because `Config(n=1) == Config(n=1.0)`, and C divides by them differently.
    """

    __slots__ = ("__wrapped__", "_by_identity", "_by_value", "_key", "_locks")

    def __init__(self, make: Callable[[Any], T], key: Callable[[Any], Hashable] = fingerprint) -> None:
        self.__wrapped__ = make  # the name under which a checksum looks for the code of an object
        self._key = key
        self._by_identity: dict[int, tuple[object, T]] = {}
        self._by_value: dict[Hashable, T] = {}
        self._locks: dict[Hashable, InterruptSafeLock] = {}

    def __repr__(self) -> str:
        made = getattr(self.__wrapped__, "__qualname__", repr(self.__wrapped__))
        return f"<{made}, made for {len(self._by_value)} configurations so far>"

    def __call__(self, config: Any) -> T:
        found = self._by_identity.get(id(config))
        if found is not None:
            return found[1]
        key = self._key(config)
        with self._locks.setdefault(key, InterruptSafeLock()):
            if key not in self._by_value:
                self._by_value[key] = self.__wrapped__(config)
        if isinstance(config, Hashable) and type(config).__hash__ is not object.__hash__:
            # Hashed by value, so its value does not change.
            if len(self._by_identity) >= _REMEMBERED:
                self._by_identity.clear()
            # With the configuration itself: if it were freed, another object could get its identity.
            self._by_identity[id(config)] = config, self._by_value[key]
        return self._by_value[key]
