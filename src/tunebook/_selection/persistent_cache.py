"""The persistent tier: configurations in a store, as the types that kernels use."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
import typing
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, TypeVar
from zipimport import zipimporter

from tunebook._base.config_codec import build, classes_of, decode, encode, fingerprint_of
from tunebook._base.environment_variables import (
    HOME_VARIABLE,
    book_root,
    mode,
    no_home,
    remote_url,
    signing_key,
    warn_of_unknown_settings,
)
from tunebook._base.errors import CodecError, DefinitionError, warn_once, with_article
from tunebook._base.record_format import Body, Head, Record
from tunebook._base.vocabulary import Json, Problem
from tunebook._kernel.kernel import LIVE
from tunebook.stores import (
    LayeredStore,
    MemoryStore,
    is_address,
    open_shared,
    open_store,
    packs_beside,
    shipped_in,
    shipped_with,
)
from tunebook.stores._files import FaultsAreWarnings, state_of
from tunebook.stores._open import FILE_ENGINES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tunebook._kernel.kernel import Kernel
    from tunebook.stores import LeaseBoard, Store

C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")

_open_books: Final[dict[tuple[Path | None, str | None, bytes | None], Store]] = {}


def default_book() -> Store:
    """Return the user's book, in front of the shared book that `TUNEBOOK_REMOTE` names, if it does."""
    return book_before(remote_url())


def book_before(url: str | None) -> Store:
    """Return the user's book in front of the shared book at an address; without an address, the user's book alone.

    It is opened once per process and root; where the user has no home, it is in memory.
    """
    root = book_root()
    if root is None and url is None:
        warn_once("no-home", "book", f"{no_home()}: tuned configurations stay in memory. Set {HOME_VARIABLE}.")
        return _in_memory()
    key = None if url is None else signing_key()
    opened = _open_books.get((root, url, key))
    if opened is not None:
        return opened
    warn_of_unknown_settings()
    front = _in_memory() if root is None else open_store(None, default_root=root, beside=_packs_of)
    if url is not None:
        front = open_shared(front, url, root=root, key=key, may_write=lambda: mode() == "normal")
    # Opening touches nothing, so that it may happen twice: a lock could be held by a thread that a fork did not copy.
    return _open_books.setdefault((root, url, key), front)


def _in_memory() -> Store:
    # With the shipped packs: a container that has no home has kernels all the same.
    return LayeredStore(MemoryStore(), tuple, shipped_with(_packs_of))


def _packs_of(op: str | None) -> Iterable[Store]:
    """Return the packs that were shipped with a kernel of this process; for None, with all of its kernels."""
    kernels = list(LIVE.values()) if op is None else [LIVE.get(op)]
    return dict.fromkeys(pack for kernel in kernels if kernel is not None for pack in _packs_with(kernel))


def _packs_with(kernel: Kernel[Any, Any]) -> Iterable[Store]:
    # The code's own module, which a loader of plugins may keep out of `sys.modules`. A decorator has another.
    found = getattr(getattr(kernel, "function", type(kernel).run), "__globals__", {})
    if found.get("__name__") != kernel.module:
        found = getattr(sys.modules.get(kernel.module), "__dict__", {})
    file, package = found.get("__file__"), found.get("__package__") or ""
    if not isinstance(file, str):  # typed into a prompt or a notebook
        return ()
    loader = getattr(found.get("__spec__"), "loader", None)
    return packs_beside(file, package, loader.archive if isinstance(loader, zipimporter) else None)


def store_at(place: str | os.PathLike[str]) -> Store:
    """Return the store at a path; at the address of a shared book, that with the user's own in front of it."""
    return book_before(str(place)) if is_address(place) else open_store(Path(place))


def _is_path(opname: object) -> bool:
    return not isinstance(opname, str) or "/" in opname or Path(opname).suffix.lower() in FILE_ENGINES


_SHORT: Final = {"dev": "device", "op": "op_id", "key": "call_key"}


def _with_short_names(method: Callable[P, R]) -> Callable[P, R]:
    """Let a method also be called with `dev=`, `op=` and `key=`."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        named: Any = {_SHORT.get(name, name): value for name, value in kwargs.items()}
        return method(*args, **named)

    return call


class PersistentCache(Generic[C]):
    """Configurations that outlive the process.

    `path` is a directory of records, a `.json` file, a `.db` pack (read-only), the address of a shared book (`redis://`,
    `s3://`, ..., with the user's own in front of it), or None for the user's own book.
    `opname` stands in messages. It may also be the path: `PersistentCache("cache.json")`, or
    `PersistentCache("cache.json", loader, dumper)`. A name with a slash, or with the suffix of a store, is a path.
    Neither `get` nor `put` raises because the store is damaged, full, read-only or away: that is one warning and a
    miss. A value that cannot be written is a `CodecError` at `put`.

    `dumper` turns a configuration into plain values and `loader` turns them back; without them the configuration's own
    fields are written, or the result of its `model_dump()`, and `cfg_type` is built from them. With neither, objects
    come back as dicts, and all other values as they were: a tuple as a tuple.
    """

    def __init__(
        self,
        opname: str | os.PathLike[str],
        path: str | os.PathLike[str] | Callable[[Any], C] | None = None,
        loader: Callable[[Any], C] | None = None,
        dumper: Callable[[C], Any] | None = None,
        cfg_type: type[C] | None = None,
    ) -> None:
        if callable(path):  # PersistentCache(path, loader, dumper)
            if not _is_path(opname) or dumper is not None:
                form = "PersistentCache(opname, path, loader, dumper), or PersistentCache(path, loader, dumper)"
                raise DefinitionError(f"invalid path={path!r} after {opname!r}: write {form}")
            path, loader, dumper = None, path, typing.cast("Callable[[C], Any] | None", loader)
        if path is None and _is_path(opname):
            opname, path = Path(opname).stem, opname
        self.opname, self.loader, self.dumper = str(opname), loader, dumper
        self.cfg_type = cfg_type
        self._path = path
        self._given = None if path is None else store_at(path)

    def __repr__(self) -> str:
        return f"<PersistentCache {self.opname} in {self.where}>"

    @property
    def cfg_type(self) -> type[C] | None:
        """The class of the configurations; None if they come back as plain values."""
        return self._cfg_type

    @cfg_type.setter
    def cfg_type(self, kind: type[C] | None) -> None:
        self._cfg_type, self._classes = kind, None if kind is None else classes_of([kind])

    @property
    def path(self) -> str:
        """The place of the records, as it was given; the place of the user's own book if none was."""
        return self.store.where if self._path is None else str(self._path)

    @property
    def store(self) -> Store:
        """The store behind it. The user's own book is found anew each time, because its root can change."""
        return default_book() if self._given is None else self._given

    @_with_short_names
    def get(self, device: str, op_id: str, call_key: str) -> C | None:
        """Return the configuration of a problem, or None."""
        record = self.read(Problem(device, op_id, call_key))
        if record is None or not record.head.decided:
            return None
        try:
            return self.config_of(record)
        except CodecError as error:
            message = f"{self.opname}: the stored configuration of {op_id!r} is not usable here: {error}"
            warn_once("unusable", f"{self.where}:{op_id}", message)
            return None

    @_with_short_names
    def put(self, device: str, op_id: str, call_key: str, cfg: C) -> None:
        """Keep a configuration that was found elsewhere; a selector writes its results with their measurements."""
        problem, config = Problem(device, op_id, call_key), self.encode(cfg)
        earlier = self.read(problem)
        # Under its generation, or the store would take this for a late result of a holder that lost the lease.
        generation = 0 if earlier is None else earlier.head.generation
        head = Head(problem=problem, config=config, checksum="", origin="imported", generation=generation)
        record = Record(head, Body(provenance={"when": time.time()}))
        record.to_bytes()
        self.write(record)

    def encode(self, cfg: C) -> Json:
        """Return a configuration as it is written; `CodecError` if it cannot be, or would not come back equal."""
        if self.dumper is not None:
            return encode(self.dumper(cfg))
        encoded = encode(cfg)
        if self._cfg_type is not None and self.loader is None:
            again = encode(decode(encoded, {**classes_of([cfg]), **(self._classes or {})}))
            if fingerprint_of(again) != fingerprint_of(encoded):
                raise CodecError(f"{cfg!r} would not come back from the book as it went in")
        return encoded

    def config_of(self, record: Record) -> C:
        """Return the configuration in a record; `CodecError` if it is not one of this cache's type."""
        stored = record.head.config
        if self.loader is not None:
            plain = decode(stored)
            try:
                loaded: object = self.loader(plain)
            except Exception as error:  # the user's code over data that others wrote may raise anything; that is a miss
                raise CodecError(f"the loader raised {type(error).__name__}: {error}") from error
        elif self._cfg_type is None:
            loaded = decode(stored)
        else:
            loaded = _shape(decode(stored, self._classes), self._cfg_type)
        if self._cfg_type is not None and not isinstance(loaded, self._cfg_type):
            raise CodecError(
                f"expected {with_article(self._cfg_type.__name__)}, found {with_article(type(loaded).__name__)}"
            )
        return typing.cast("C", loaded)

    def _guard(self) -> FaultsAreWarnings:
        # The edge of the tier: each of the five methods below asks the store inside one, and no other code asks it.
        return FaultsAreWarnings(self.opname, before=f"{self.opname}: ")

    @property
    def where(self) -> str:
        """The place of the records, as a person would name it."""
        with self._guard():
            return self.store.where
        return "a book that cannot be used"

    def read(self, problem: Problem) -> Record | None:
        """Return the record of a problem, or None; a broken store is one warning, and not an error."""
        with self._guard():
            return self.store.get(problem)
        return None

    def shipped_in(self, problem: Problem) -> str:
        """Return the place of the pack that the record of a problem is from; "" if it is not from a pack."""
        with suppress(OSError, ValueError):  # `read` warns
            return shipped_in(self.store, problem)
        return ""

    def state(self, problem: Problem) -> object | None:
        """Return a value that changes whenever the record of a problem changes; None if that cannot be known."""
        with suppress(OSError, ValueError):  # `read` warns
            return state_of(self.store, problem)
        return None

    def write(self, record: Record) -> bool:
        """Keep a record; False, after one warning, if the store cannot."""
        with self._guard():
            self.store.put(record)
            return True
        return False

    def records(self, op: str) -> list[Record]:
        """Return all records of a kernel; a broken store is one warning, and has none."""
        with self._guard():
            return list(self.store.items(op))
        return []

    def leases(self) -> LeaseBoard | None:
        """Return the board for single flight among processes; None without leases, or if it fails (one warning)."""
        with self._guard():
            return self.store.leases()
        return None


def _shape(value: object, hint: Any) -> Any:
    """Make tuples of lists, and objects of dicts, where an annotation says so: other tools' files know only JSON."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, list) and (origin or hint) is tuple:
        inner = parts[:1] * len(value) if len(parts) == 2 and parts[1] is Ellipsis else parts or (Any,) * len(value)
        return tuple(_shape(item, part) for item, part in zip(value, inner, strict=False))
    if not isinstance(value, dict) or not isinstance(hint, type):
        return value
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return _build(hint, {name: _shape(item, hints.get(name, Any)) for name, item in value.items()})
    return value if issubclass(dict, hint) or issubclass(hint, dict) else _build(hint, value)


def _build(kind: type, fields: dict[str, Any]) -> object:
    try:
        return build(kind, fields)
    except (TypeError, ValueError) as error:
        raise CodecError(f"{kind.__name__} cannot be made from {sorted(fields)}: {error}") from error


def open_persistent(op_id: str, store: Any) -> PersistentCache[Any] | None:
    """Return the persistent tier that the option `store=` names; None for False."""
    if store is False or isinstance(store, PersistentCache):
        return store or None
    if store is not None and not isinstance(store, (str, os.PathLike)):
        found = f"the {type(store).__name__} {store!r}"
        raise DefinitionError(f"{op_id!r}: store= takes a path, an address, a PersistentCache or False; found {found}")
    cache: PersistentCache[Any] = PersistentCache("kernel", store)
    cache.opname = op_id  # set here, because the name of a kernel may look like a path
    return cache
