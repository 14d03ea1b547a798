"""Which store a path means."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tunebook._base.errors import DefinitionError
from tunebook.stores._directory import DirectoryStore
from tunebook.stores._discovery import find_packs, packs_in
from tunebook.stores._json import JsonStore
from tunebook.stores._layered import LayeredStore
from tunebook.stores._pack import PackStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tunebook.stores._protocol import Store
    from tunebook.stores._remote import RemoteStore
    from tunebook.stores._shared import SharedStore

REDIS_SCHEMES: Final = ("redis", "rediss", "valkey", "valkeys")
OBJECT_SCHEMES: Final = ("s3", "gs", "az")


def is_address(path: object) -> bool:
    """Whether a place for a book is an address on another machine, rather than a path; the scheme may be a wrong one.

    Ours are known by one slash: in `Path("s3://bucket")` the other is lost, and a directory called "s3:" is not what
    was meant.
    """
    scheme, found, rest = str(path).partition(":/")
    if scheme.lower() in (*REDIS_SCHEMES, *OBJECT_SCHEMES):
        return bool(found)
    return rest.startswith("/") and scheme.isascii() and scheme.replace("+", "").isalnum()


def open_store(path: Path | str | None, *, default_root: Path | None = None) -> Store:
    """Open the store at a path; touches nothing on disk, and asks only what the path itself is.

    A directory, or a name that does not exist yet, is a directory of records, read together with the packs in it; a
    `.json` file is one file for all; a `.db` file is a pack. None is the user's own book at `default_root`, read
    together with the packs that installed packages announce too. The address of a shared book (`redis://`, `s3://` and
    so on) opens that book itself, with nothing in front of it: it raises `StoreError` when it does not answer.
    """
    if path is not None and is_address(path):
        return open_remote(str(path))
    path = None if path is None else Path(path)
    if path is None:
        if default_root is None:
            raise DefinitionError("open_store(None) needs default_root=, the directory of the user's own book")
        return LayeredStore(DirectoryStore(default_root), lambda: find_packs(default_root))
    mode = _mode(path)
    suffix = path.suffix.lower()
    if stat.S_ISDIR(mode) or (not mode and suffix not in {".json", ".db"}):
        return LayeredStore(DirectoryStore(path), lambda: packs_in(path))
    if suffix == ".json":
        return JsonStore(path)
    if suffix == ".db":
        return PackStore(path)
    raise DefinitionError(
        f"{path} is a file, but neither a .json file nor a .db pack. "
        "Give a directory for a book, or a path that ends in .json or .db."
    )


def open_remote(url: str, *, timeout_s: float = 5.0, key: bytes | None = None) -> RemoteStore:
    """Open a shared book by its address, without connecting; an address that cannot be right is an error here."""
    from tunebook.stores._remote import open_remote as opened  # noqa: PLC0415 - only who shares a book needs it

    return opened(url, timeout_s=timeout_s, key=key)


def open_shared(
    front: Store, url: str, *, root: Path | None, key: bytes | None, may_write: Callable[[], bool] = lambda: True
) -> SharedStore:
    """Put a local book in front of a shared one; `root` is where the local one is, None if that is in memory."""
    from tunebook.stores._outbox import Outbox  # noqa: PLC0415 - as above
    from tunebook.stores._shared import PATIENT_S, SharedStore  # noqa: PLC0415 - as above

    remote = open_remote(url, timeout_s=PATIENT_S, key=key)
    return SharedStore(front, remote, outbox=Outbox.beside(root, remote.where), may_write=may_write)


def _mode(path: Path) -> int:
    """Return what kind of file a path is; 0 where there is none, or none that we may see."""
    try:
        return path.stat().st_mode
    except OSError:
        return 0
    except ValueError as error:
        raise DefinitionError(f"{str(path)!r} cannot be a path: {error}") from error
