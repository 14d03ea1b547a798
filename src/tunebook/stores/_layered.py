"""A writable store in front of packs: the entries tuned here, then the entries that were shipped.

Packs lie in the book (`<root>/v1/packs/*.db`), beside the code of a kernel (`mykernels/__tunebook__/*.db`), or an
installed package announces them. It does so with an entry point that names its top-level package and the file in it::

    [project.entry-points."tunebook.packs"]
    h200 = "mykernels:tuned.db"              # mykernels/tuned.db
    b200 = "mykernels.packs:b200.db"         # mykernels/packs/b200.db

Nothing of the package is imported to find the file: importing a kernel library takes seconds, and may fail.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from tunebook._base.errors import warn_once
from tunebook._base.vocabulary import ShownByPlace, computed_once
from tunebook.stores._files import FaultsAreWarnings, distrust, problem_id, state_of
from tunebook.stores._pack import PackStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from importlib.metadata import EntryPoint
    from importlib.resources.abc import Traversable
    from typing import TypeAlias

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Problem
    from tunebook.stores._listing import EntryGroup, Wanted
    from tunebook.stores._protocol import LeaseBoard, Store

    Shipped: TypeAlias = Callable[[str | None], Iterable[Store]]  # of an operation; None for all that are known

GROUP: Final = "tunebook.packs"
FOLDER: Final = "__tunebook__"


@final
class LayeredStore(ShownByPlace):
    """Writes go to `front`; a get that it cannot answer goes on to packs: of the book, then the shipped ones.

    `find_packs` is called once, at the first miss; `shipped` at each miss, as far as its packs are asked: looking
    through the installed packages takes milliseconds. A record deleted from the front, or without a decision, lets a
    shipped record of its problem be seen.
    """

    def __init__(
        self, front: Store, find_packs: Callable[[], Sequence[Store]], shipped: Shipped = lambda _op: ()
    ) -> None:
        self._front, self._find_packs, self._shipped = front, find_packs, shipped
        self.where: Final = front.where

    @computed_once
    def _packs(self) -> tuple[Store, ...]:
        return tuple(self._find_packs())

    @property
    def layers(self) -> tuple[Store, ...]:
        """The front, then the packs in their order."""
        return (self._front, *self._behind(None))

    def _behind(self, op: str | None) -> Iterator[Store]:
        yield from self._packs
        yield from self._shipped(op)

    def get(self, problem: Problem) -> Record | None:
        return self._find(problem)[0]

    def _find(self, problem: Problem) -> tuple[Record | None, str]:
        """Return the record of a problem, or None, and the pack that it was shipped in; "" if it is the front's."""
        front = self._front.get(problem)
        if front is not None and front.head.decided:
            return front, ""
        for store in self._behind(problem.op):
            if (record := store.get(problem)) is not None:
                return record, store.where
        return front, ""

    def shipped_in(self, problem: Problem) -> str:
        """Return the place of the pack that the record of a problem is from; "" if it is the front's, or missing."""
        return self._find(problem)[1]

    def state(self, problem: Problem) -> object | None:
        """Return the state of the front's record, because shipped records do not change; None if it is unknown."""
        return state_of(self._front, problem)

    def put(self, record: Record) -> None:
        self._front.put(record)

    def put_many(self, records: Iterable[Record]) -> None:
        self._front.put_many(records)

    def delete(self, problem: Problem) -> bool:
        return self._front.delete(problem)

    def items(self, op: str | None = None) -> Iterator[Record]:
        """Yield the records once per problem: the record that `get` returns."""
        seen: set[str] = set()
        for store in (self._front, *self._behind(op)):
            for record in store.items(op):
                identifier = problem_id(record.problem)
                if identifier not in seen:
                    seen.add(identifier)
                    yield record if record.head.decided else self.get(record.problem) or record

    def groups(self, wanted: Wanted, prefix: str = "", at_most: int | None = None) -> Iterator[EntryGroup]:
        """Yield the wanted kernels and devices of each layer, without the ids that an earlier layer has."""
        from tunebook.stores._listing import groups_of  # noqa: PLC0415 - loaded late: only listings need it

        seen: set[str] = set()
        for layer in self.layers:
            found: list[str] = []
            for group in groups_of(layer, wanted, prefix, at_most):
                ids = [identifier for identifier in group.ids if identifier not in seen] if seen else group.ids
                found += ids
                if ids:
                    yield group._replace(ids=ids)
            seen.update(found)

    def leases(self) -> LeaseBoard | None:
        return self._front.leases()


def shipped_in(store: Store, problem: Problem) -> str:
    """Return the place of the pack that a store has the record of a problem from; "" if it is not from a pack."""
    find = getattr(store, "shipped_in", None)  # not a part of `Store`: most stores have no packs behind them
    return "" if find is None else str(find(problem))


def packs_in(root: Path) -> tuple[PackStore, ...]:
    """Return the packs of the book at a root, in the order of their names; () if the root is not to be trusted."""
    try:
        if distrust(str(root)) is not None:
            return ()
        return tuple(PackStore(path) for path in sorted((root / "v1" / "packs").iterdir()) if path.suffix == ".db")
    except OSError:  # the root or its packs directory is missing, or may not be listed
        return ()


def shipped_with(beside: Shipped = lambda _op: ()) -> Shipped:
    """Return a function that yields the packs beside a kernel, then the packs of the installed packages."""

    def shipped(op: str | None) -> Iterator[Store]:
        yield from beside(op)
        yield from announced()  # last: finding them takes 40 ms

    return shipped


@cache
def packs_beside(file: str, package: str, archive: str | None = None) -> tuple[PackStore, ...]:
    """Return the packs that were shipped with a module: beside its file, then in its parent packages.

    `archive` is the zip file that the module was imported from. Each folder is listed once per process.
    """
    folder = Path(file).parent
    folders = [folder, *folder.parents][: package.count(".") + 1]  # a plain script has no parent packages
    return tuple(pack for each in folders for pack in _packs_of_folder(each / FOLDER, archive))


@cache
def _packs_of_folder(folder: Path, archive: str | None) -> tuple[PackStore, ...]:
    with FaultsAreWarnings(str(folder), before=f"the packs in {folder} are not used: "):
        if archive is not None:
            return _packs_in_zip(folder, archive)
        try:
            names = sorted(os.listdir(folder))  # noqa: PTH208 - names, not objects
        except (FileNotFoundError, NotADirectoryError):  # nothing is shipped, as with nearly every module
            return ()
        code = folder.parent.stat()
        if not _is_like(folder, code) and (unsafe := distrust(str(folder), inside="")) is not None:
            warn_once(unsafe.kind, unsafe.path, unsafe.message)
            return ()
        paths = map(folder.joinpath, filter(_is_pack, names))
        return tuple(PackStore(path, vouched=_is_like(path, code)) for path in paths)
    return ()


def _is_pack(name: str) -> bool:
    return name.endswith(".db") and not name.startswith(".")  # macOS puts `._h200.db` beside h200.db on other disks


def _is_like(path: Path, code: os.stat_result) -> bool:
    """Whether a file is to be trusted like the code in a folder: the same user, and no other, can write to both."""
    try:
        facts = path.stat()
    except OSError:  # a link that leads nowhere; opening it says so
        return False
    return facts.st_uid == code.st_uid and not facts.st_mode & ~code.st_mode & 0o022


def _packs_in_zip(folder: Path, archive: str) -> tuple[PackStore, ...]:
    import zipfile  # noqa: PLC0415 - milliseconds that only packages inside zip files pay

    try:
        inside = zipfile.Path(archive, f"{folder.relative_to(archive).as_posix()}/")
        names = sorted(found.name for found in inside.iterdir()) if inside.exists() else []
    except zipfile.BadZipFile as error:
        raise OSError(str(error)) from error
    return tuple(PackStore(inside / name, vouched=True) for name in filter(_is_pack, names))


@cache
def announced() -> tuple[PackStore, ...]:
    """Return the packs that installed packages announce, found once per process."""
    from importlib.metadata import entry_points  # noqa: PLC0415 - 40 ms that only a first miss pays

    # The whole search: one package with unreadable metadata must not cost the user the own book too.
    with FaultsAreWarnings(GROUP, before="the packs of installed packages are not used: "):
        found = sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value))
        # Trusted like the package's code, whoever installed it.
        return tuple(PackStore(source, vouched=True) for point in found if (source := _resource(point)) is not None)
    return ()


def _resource(point: EntryPoint) -> Path | Traversable | None:
    """Return the file that an entry point names, or None after a warning."""
    from importlib.resources import files  # noqa: PLC0415 - loaded late: a part of the 40 ms
    from importlib.util import find_spec, module_from_spec  # noqa: PLC0415 - loaded late: the same

    top, *inner = point.value.partition(":")[0].split(".")
    file_name = point.value.partition(":")[2].strip()
    try:
        spec = find_spec(top)
        if spec is not None and file_name:
            source = files(module_from_spec(spec)).joinpath(*inner, file_name)
            if source.is_file():
                return source
        reason = "the file is missing"
    except (ImportError, ValueError, OSError, TypeError) as error:
        reason = str(error)
    message = f"the pack {point.name!r} that an installed package announces as {point.value!r} is not used: {reason}"
    warn_once("unreadable", f"{GROUP}:{point.value}", f"{message}. It should be 'package:file.db'.")
    return None
