"""Which packs there are: those in the book, and those that installed packages announce.

A package announces a pack with an entry point that names its top-level package and the file in it::

    [project.entry-points."tunebook.packs"]
    h200 = "mykernels:tuned.db"              # mykernels/tuned.db
    b200 = "mykernels.packs:b200.db"         # mykernels/packs/b200.db

Nothing of the package is imported to find the file: importing a kernel library takes seconds, and may fail.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

from tunebook._base.errors import warn_once
from tunebook.stores._pack import PackStore
from tunebook.stores._trust import distrust

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint
    from importlib.resources.abc import Traversable
    from pathlib import Path

GROUP: Final = "tunebook.packs"


def packs_in(root: Path) -> tuple[PackStore, ...]:
    """Return the packs of the book at a root, in the order of their names; none if the root is not to be trusted."""
    try:
        if distrust(str(root)) is not None:
            return ()
        return tuple(PackStore(path) for path in sorted((root / "v1" / "packs").iterdir()) if path.suffix == ".db")
    except OSError:  # no root, no packs directory, or none that we may list
        return ()


def find_packs(root: Path) -> tuple[PackStore, ...]:
    """Return the packs of the book at a root, then those of the installed packages.

    The installed packages are looked through once per process, which takes milliseconds.
    """
    return (*packs_in(root), *_announced())


@cache
def _announced() -> tuple[PackStore, ...]:
    from importlib.metadata import entry_points  # noqa: PLC0415 - 40 ms that only a first miss needs to pay

    found = sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value))
    sources = [source for point in found if (source := _resource(point)) is not None]
    return tuple(map(PackStore, sources))


def _resource(point: EntryPoint) -> Path | Traversable | None:
    """Return the file that an entry point names, or None after a warning."""
    from importlib.resources import files  # noqa: PLC0415 - as above
    from importlib.util import find_spec, module_from_spec  # noqa: PLC0415 - as above

    top, *inner = point.value.partition(":")[0].split(".")
    file_name = point.value.partition(":")[2].strip()
    try:
        spec = find_spec(top)
        if spec is not None and file_name:
            source = files(module_from_spec(spec)).joinpath(*inner, file_name)
            if source.is_file():
                return source
        reason = "there is no such file"
    except (ImportError, ValueError, OSError, TypeError) as error:
        reason = str(error)
    message = f"the pack {point.name!r} that an installed package announces as {point.value!r} is not used: {reason}"
    warn_once("unreadable", f"{GROUP}:{point.value}", f"{message}. It should be 'package:file.db'.")
    return None
