"""Which store a path means."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from tunebook._errors import DefinitionError
from tunebook.stores._directory import DirectoryStore
from tunebook.stores._discovery import find_packs, packs_in
from tunebook.stores._json import JsonStore
from tunebook.stores._layered import LayeredStore
from tunebook.stores._pack import PackStore

if TYPE_CHECKING:
    from pathlib import Path

    from tunebook.stores._protocol import Store


def open_store(path: Path | None, *, default_root: Path | None = None) -> Store:
    """Open the store at a path; touches nothing on disk, and asks only what the path itself is.

    A directory, or a name that does not exist yet, is a directory of records, read together with the packs in it; a
    `.json` file is one file for all; a `.db` file is a pack. None is the user's own book at `default_root`, read
    together with the packs that installed packages announce too.
    """
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


def _mode(path: Path) -> int:
    """Return what kind of file a path is; 0 where there is none, or none that we may see."""
    try:
        return path.stat().st_mode
    except OSError:
        return 0
    except ValueError as error:
        raise DefinitionError(f"{str(path)!r} cannot be a path: {error}") from error
