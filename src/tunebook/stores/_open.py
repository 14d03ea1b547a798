"""The table of engines, by suffix and by scheme; opens the store that a path or an address means."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tunebook._base.errors import DefinitionError, require
from tunebook.stores._directory import DirectoryStore
from tunebook.stores._json import JsonStore
from tunebook.stores._layered import LayeredStore, packs_in, shipped_with
from tunebook.stores._pack import PackStore, write_pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tunebook._base.record_format import Record
    from tunebook.stores._layered import Shipped
    from tunebook.stores._protocol import Store
    from tunebook.stores._remote import RemoteStore
    from tunebook.stores._shared import SharedStore


class FileEngine(NamedTuple):
    """An engine that keeps a book in one file."""

    name: str  # its format in `tunebook export --format`
    kind: str
    open: Callable[..., Store]  # takes a path; with `vouched=True`, the caller vouches for the file
    create: Callable[[Path, Iterable[Record]], object]  # writes a file of these records alone
    writable: bool = True  # it takes more records later


FILE_ENGINES: Final = {
    ".db": FileEngine("pack", "a .db pack", PackStore, write_pack, writable=False),
    ".json": FileEngine("json", "a .json file", JsonStore, lambda path, records: JsonStore(path).create(records)),
}


# By scheme, for books on other machines: the package that the engine needs, and the extra of tunebook that installs it.
_REMOTE_ENGINES: Final = {
    **dict.fromkeys(("redis", "rediss", "valkey", "valkeys"), ("redis", "redis")),
    **dict.fromkeys(("s3", "gs", "az"), ("obstore", "object")),
}


def is_address(path: object) -> bool:
    """Return whether a place for a book is an address on another machine, not a path; its scheme may be unknown."""
    # A known scheme needs one slash only: `Path("s3://bucket")` drops the other, and does not mean a directory "s3:".
    scheme, found, rest = str(path).partition(":/")
    if scheme.lower() in _REMOTE_ENGINES:
        return bool(found)
    return rest.startswith("/") and scheme.isascii() and scheme.replace("+", "").isalnum()


def open_store(path: Path | str | None, *, default_root: Path | None = None, beside: Shipped = lambda _op: ()) -> Store:
    """Open the store at a path; touches nothing on disk, and looks only at the path itself.

    A directory, or a name that does not exist yet, is a directory of records, read together with the packs in it. None
    is the user's own book at `default_root`, read together with the packs `beside` a kernel, and the packs that
    installed packages announce too. The address of a shared book opens that book itself: it raises `StoreError` when
    it does not answer.
    """
    if path is None:
        if default_root is None:
            raise DefinitionError("open_store(None) needs default_root=, the directory of the user's own book")
        return LayeredStore(DirectoryStore(default_root), lambda: packs_in(default_root), shipped_with(beside))
    if is_address(path):
        return open_remote(str(path))
    place = Path(path)
    try:
        mode = place.stat().st_mode
    except OSError:  # missing, or invisible to us
        mode = 0
    except ValueError as error:
        raise DefinitionError(f"{str(place)!r} cannot be a path: {error}") from error
    engine = FILE_ENGINES.get(place.suffix.lower())
    if stat.S_ISDIR(mode) or (not mode and engine is None):
        return LayeredStore(DirectoryStore(place), lambda: packs_in(place))
    if engine is None:
        kinds, suffixes = (" or ".join(names) for names in (file_kinds(), FILE_ENGINES))
        raise DefinitionError(
            f"{place} is a file, but not {kinds}. Give a directory for a book, or a path that ends in {suffixes}."
        )
    return engine.open(place)


def file_kinds() -> list[str]:
    """Return the kinds of files that can be a book, as messages and help name them."""
    return [engine.kind for engine in FILE_ENGINES.values()]


def open_remote(url: str, *, timeout_s: float = 5.0, key: bytes | None = None) -> RemoteStore:
    """Open a shared book by its address, without connecting; `timeout_s` bounds each exchange with the server."""
    from tunebook.stores._remote import without_secrets  # noqa: PLC0415 - loaded late: for shared books only

    scheme, separator, _ = url.partition("://")
    if not separator:
        remedy = "pass the address as text, not as a Path"
        raise DefinitionError(f"{without_secrets(url)!r} has lost a slash (pathlib drops it): {remedy}")
    if scheme.lower() not in _REMOTE_ENGINES:
        known = ", ".join(f"{name}://" for name in _REMOTE_ENGINES)
        raise DefinitionError(f"unknown scheme in {without_secrets(url)!r}: a shared book begins with one of {known}")
    package, extra = _REMOTE_ENGINES[scheme.lower()]
    require(package, extra=extra, feature=f"a shared book at {scheme.lower()}://")
    if package == "redis":
        from tunebook.stores._redis import RedisStore  # noqa: PLC0415 - loaded late: redis takes 0.2 s

        return RedisStore(url, timeout_s=timeout_s, key=key)
    from tunebook.stores._object import ObjectStore  # noqa: PLC0415 - loaded late: it needs obstore

    return ObjectStore(url, timeout_s=timeout_s, key=key)


def open_shared(
    front: Store, url: str, *, root: Path | None, key: bytes | None, may_write: Callable[[], bool] = lambda: True
) -> SharedStore:
    """Put a local book in front of a shared book; `root` is the local book's directory, None if it is in memory."""
    from tunebook.stores._shared import PATIENT_S, Outbox, SharedStore  # noqa: PLC0415 - for shared books only

    remote = open_remote(url, timeout_s=PATIENT_S, key=key)
    return SharedStore(front, remote, outbox=Outbox(root, remote.where), may_write=may_write)
