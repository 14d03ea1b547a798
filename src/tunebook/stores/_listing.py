"""What is in a book, without reading all of it: 100,000 records are listed by name, and a screenful of them read."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from heapq import nlargest
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from tunebook._base.errors import CodecError
from tunebook._base.record_format import MAX_RECORD_BYTES, Record
from tunebook.stores._directory import DirectoryStore
from tunebook.stores._files import opened_directory, read_fault
from tunebook.stores._ids import problem_id
from tunebook.stores._layered import LayeredStore
from tunebook.stores._pack import PackStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tunebook.stores._protocol import Store

    Wanted: TypeAlias = Callable[[str, str], bool]

# Listing must not count as using: access times say which records are unused (see `collect_garbage`). Only the owner
# of a file may ask for this.
_QUIETLY: Final = getattr(os, "O_NOATIME", 0)
# So many records of a pack are looked at for some of one kernel, and its ids are in no order that has a meaning.
_SCANNED: Final = 20_000
# Of a record's first line, whose fields are in order: 1 us, where parsing takes 5, of 100,000 records. Quotes inside
# strings are escaped, so that these can only be names of fields.
_DEVICE: Final = b',"device":"'
_STRING: Final = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_NAMES: Final = re.compile(
    rb',"device":(%b),"environment":%b,"generation":\d+,"op":(%b),"origin"' % (_STRING, _STRING, _STRING)
)


class Listed(NamedTuple):
    """One entry: what is known without its record.

    `written_s` and `used_s` are the file's in a directory; elsewhere, when the entry was measured, or 0 in a pack.
    """

    id: str
    op: str
    device: str
    written_s: float
    used_s: float
    size_bytes: int
    where: str
    held: Record | str | PackStore

    def record(self) -> Record | None:
        """Return the record, or None if it is gone or unreadable by now, or belongs elsewhere."""
        if isinstance(self.held, Record):
            return self.held
        record = _read(self.held) if isinstance(self.held, str) else self.held.get_by_id(self.id)
        return record if record is not None and problem_id(record.problem) == self.id else None


class EntryGroup(NamedTuple):
    """The entries of one kernel on one device in one place. None of them is newer than `changed_s`."""

    op: str
    device: str
    where: str
    changed_s: float
    ids: Sequence[str]
    source: str | PackStore | Mapping[str, Record]

    def entries(self, ids: Iterable[str] | None = None) -> Iterator[Listed]:
        """Yield all of them, or those with these ids."""
        for identifier in self.ids if ids is None else ids:
            if isinstance(self.source, str):
                with suppress(FileNotFoundError):  # removed since it was listed
                    yield self._file(identifier, f"{self.source}/{identifier}.json")
            elif isinstance(self.source, PackStore):
                yield Listed(identifier, self.op, self.device, 0.0, 0.0, 0, self.where, self.source)
            else:
                record = self.source[identifier]
                when_s, size = measured_s(record), len(record.to_bytes())
                yield Listed(identifier, self.op, self.device, when_s, when_s, size, self.where, record)

    def _file(self, identifier: str, path: str) -> Listed:
        facts = os.stat(path)  # noqa: PTH116 - 100,000 paths as objects take 0.3 s
        # What it takes on disk: a file of 900 bytes takes 4096.
        size = max(facts.st_size, facts.st_blocks * 512)
        used_s = max(facts.st_atime, facts.st_mtime)
        return Listed(identifier, self.op, self.device, facts.st_mtime, used_s, size, self.where, path)

    def times(self) -> Iterable[tuple[float, str]]:
        """Return when each was written, and its id."""
        if isinstance(self.source, str):
            return _file_times(self.source, self.ids)
        if isinstance(self.source, PackStore):
            return [(0.0, identifier) for identifier in self.ids]
        return [(measured_s(self.source[identifier]), identifier) for identifier in self.ids]


class Catalogue:
    """Lists a store. Of a book with packs, each problem is listed once, in the layer that would answer."""

    def __init__(self, store: Store) -> None:
        self.store: Final = store
        self._layers: Final = store.layers if isinstance(store, LayeredStore) else (store,)
        self._packs: Final[dict[PackStore, list[EntryGroup]]] = {}

    def groups(self, wanted: Wanted) -> list[EntryGroup]:
        """Return the kernels and devices that are wanted, with the ids of their entries."""
        found: list[EntryGroup] = []
        seen: set[str] = set()
        for layer in self._layers:
            for group in self._groups_in(layer, wanted):
                ids = [identifier for identifier in group.ids if identifier not in seen] if seen else group.ids
                if ids:
                    found.append(group._replace(ids=ids))
            if layer is not self._layers[-1]:
                seen.update(identifier for group in found for identifier in group.ids)
        return found

    def _groups_in(self, layer: Store, wanted: Wanted) -> Iterable[EntryGroup]:
        if not isinstance(layer, PackStore):
            return _layer_groups(layer, wanted)
        # A pack never changes, and is read whole to know what is in it: 0.7 s for 100,000 records.
        if layer not in self._packs:
            self._packs[layer] = list(_packed(layer, _all))
        return (group for group in self._packs[layer] if wanted(group.op, group.device))

    def entries(self, wanted: Wanted) -> Iterator[Listed]:
        """Yield the entries of the kernels and devices that are wanted."""
        for group in self.groups(wanted):
            yield from group.entries()

    def some(self, op: str, count: int) -> Iterator[Listed]:
        """Yield entries of a kernel, at most so many, from as little of the book as possible."""
        for layer in self._layers:
            if isinstance(layer, PackStore) and layer not in self._packs:
                groups: Iterable[EntryGroup] = _packed(layer, lambda name, _device: name == op, at_most=_SCANNED)
            else:
                groups = self._groups_in(layer, lambda name, _device: name == op)
            for group in groups:
                for listed in islice(group.entries(), count):
                    count -= 1
                    yield listed

    def find(self, prefix: str) -> list[Listed]:
        """Return the entries whose id begins so."""
        found: dict[str, Listed] = {}
        for layer in self._layers:
            for group in _layer_groups(layer, _all, prefix):
                for listed in group.entries():
                    found.setdefault(listed.id, listed)
        return list(found.values())


def newest(groups: Iterable[EntryGroup], count: int) -> list[Listed]:
    """Return the last written entries, the newest first; directories in which nothing changed since are not read."""
    best: list[tuple[float, str, int]] = []
    ordered = sorted(groups, key=lambda group: -group.changed_s)
    for at, group in enumerate(ordered):
        if len(best) >= count and best[-1][0] >= group.changed_s:
            break
        latest = nlargest(count, group.times())
        best = nlargest(count, [*best, *((when_s, identifier, at) for when_s, identifier in latest)])
    found = [listed for _, identifier, at in best for listed in ordered[at].entries([identifier])]
    return sorted(found, key=lambda listed: (-listed.written_s, listed.op, listed.device, listed.id))


def _all(_op: str, _device: str) -> bool:
    return True


def _layer_groups(layer: Store, wanted: Wanted, prefix: str = "") -> Iterator[EntryGroup]:
    if isinstance(layer, DirectoryStore):
        return _directories(layer, wanted, prefix)
    if isinstance(layer, PackStore):
        return _packed(layer, wanted, prefix)
    return _held(layer, wanted, prefix)


# ------------------------------------------------------------------------------------------------------- directories


def _directories(store: DirectoryStore, wanted: Wanted, prefix: str) -> Iterator[EntryGroup]:
    for directory in map(str, store.directories()):
        try:
            changed_s = os.stat(directory).st_mtime  # noqa: PTH116 - a path as text is at hand
            files = os.listdir(directory)  # noqa: PTH208 - names, and no objects
            ids = [name[:-5] for name in files if name.endswith(".json") and name.startswith(prefix)]
            names = _named(directory, ids)
        except (FileNotFoundError, NotADirectoryError):
            continue  # removed since it was listed, or never one of ours
        except OSError as error:
            raise read_fault(store.where, error) from error
        if names is not None and wanted(*names):
            yield EntryGroup(*names, store.where, changed_s, ids, directory)


def _named(directory: str, ids: Iterable[str]) -> tuple[str, str] | None:
    """Return the kernel and the device of a directory, from the first record in it that can be read.

    The directory's own name may be cut short, and holds no upper case.
    """
    for identifier in ids:
        record = _read(f"{directory}/{identifier}.json")
        if record is not None:
            return record.problem.op, record.problem.device
    return None


def _file_times(directory: str, ids: Sequence[str]) -> Iterator[tuple[float, str]]:
    with opened_directory(Path(directory)) as descriptor:
        for identifier in ids:
            with suppress(FileNotFoundError):
                # Relative to the directory: 100,000 whole paths take the kernel 0.1 s more to walk.
                yield os.stat(f"{identifier}.json", dir_fd=descriptor).st_mtime, identifier


def _read(path: str) -> Record | None:
    try:
        return Record.from_bytes(_content(path))
    except (OSError, CodecError):
        return None  # the store itself, asked for this problem, says what is wrong and sets it aside


def _content(path: str) -> bytes:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags | _QUIETLY)
    except PermissionError:
        descriptor = os.open(path, flags)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        return file.read(MAX_RECORD_BYTES + 1) or b""


# ------------------------------------------------------------------------------------------------ packs and the rest


def _packed(pack: PackStore, wanted: Wanted, prefix: str = "", at_most: int | None = None) -> Iterator[EntryGroup]:
    groups: dict[tuple[bytes, bytes], list[str]] = {}
    for identifier, head in islice(pack.heads(prefix), at_most):
        found = _NAMES.match(head, head.rfind(_DEVICE))
        if found is not None:
            groups.setdefault((found[2], found[1]), []).append(identifier)
    for (op, device), ids in groups.items():
        names = json.loads(op), json.loads(device)
        if wanted(*names):
            yield EntryGroup(*names, pack.where, 0.0, ids, pack)


def _held(store: Store, wanted: Wanted, prefix: str) -> Iterator[EntryGroup]:
    groups: dict[tuple[str, str], dict[str, Record]] = {}
    for record in store.items():
        names, identifier = (record.problem.op, record.problem.device), problem_id(record.problem)
        if identifier.startswith(prefix) and wanted(*names):
            groups.setdefault(names, {})[identifier] = record
    for names, records in groups.items():
        latest_s = max(map(measured_s, records.values()))
        yield EntryGroup(*names, store.where, latest_s, list(records), records)


def measured_s(record: Record) -> float:
    """Return when a record's choice was made, as a Unix time; 0 if it does not say."""
    try:
        when = record.body.provenance.get("when")
    except CodecError:
        return 0.0
    return float(when) if isinstance(when, (int, float)) else 0.0
