"""A writable store in front of packs: the entries tuned here, then the entries that were shipped.

Packs lie in the book (`<root>/v1/packs/*.db`), or an installed package announces them. It does so with an entry point
that names its top-level package and the file in it::

    [project.entry-points."tunebook.packs"]
    h200 = "mykernels:tuned.db"              # mykernels/tuned.db
    b200 = "mykernels.packs:b200.db"         # mykernels/packs/b200.db

Nothing of the package is imported to find the file: importing a kernel library takes seconds, and may fail.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final, final

from tunebook._base.errors import warn_once
from tunebook._base.vocabulary import computed_once
from tunebook.stores._files import FaultsAreWarnings, distrust, problem_id, state_of
from tunebook.stores._pack import PackStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from importlib.metadata import EntryPoint
    from importlib.resources.abc import Traversable
    from pathlib import Path

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Problem
    from tunebook.stores._listing import EntryGroup, Wanted
    from tunebook.stores._protocol import LeaseBoard, Store

GROUP: Final = "tunebook.packs"


@final
class LayeredStore:
    """Writes go to `front`; a get that it cannot answer goes on to the shipped stores, in their order.

    `find_shipped` is called once, at the first miss: looking through the installed packages takes milliseconds. A
    record deleted from the front, or without a decision, lets a shipped record of its problem be seen.
    """

    def __init__(self, front: Store, find_shipped: Callable[[], Sequence[Store]]) -> None:
        self._front, self._find_shipped = front, find_shipped
        self.where: Final = front.where

    @computed_once
    def layers(self) -> tuple[Store, ...]:
        """The front, then the shipped stores in their order."""
        return (self._front, *self._find_shipped())

    def get(self, problem: Problem) -> Record | None:
        front = self._front.get(problem)
        if front is not None and front.head.decided:
            return front
        shipped = (store.get(problem) for store in self.layers[1:])
        return next((record for record in shipped if record is not None), front)

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
        for store in self.layers:
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


def packs_in(root: Path) -> tuple[PackStore, ...]:
    """Return the packs of the book at a root, in the order of their names; () if the root is not to be trusted."""
    try:
        if distrust(str(root)) is not None:
            return ()
        return tuple(PackStore(path) for path in sorted((root / "v1" / "packs").iterdir()) if path.suffix == ".db")
    except OSError:  # the root or its packs directory is missing, or may not be listed
        return ()


def find_packs(root: Path) -> tuple[PackStore, ...]:
    """Return the packs of the book at a root, then the packs of the installed packages, found once per process."""
    return (*packs_in(root), *_announced())


@cache
def _announced() -> tuple[PackStore, ...]:
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
