"""Which book, and which of its entries: the options that verbs share."""

from __future__ import annotations

import re
import time
from argparse import ArgumentTypeError
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final, NamedTuple

from tunebook._base.errors import DefinitionError
from tunebook._cli._verb import UsageError
from tunebook.stores import file_kinds

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator

    from tunebook.stores import Store
    from tunebook.stores._listing import Catalogue, EntryGroup, Listed

_AGE_S: Final = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0, "y": 365 * 86400.0}
_SIZE_BYTES: Final = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}


class Filters(NamedTuple):
    """Which entries are meant; ages are counted from when the entry was written into its book."""

    kernel: str | None = None
    device: str | None = None
    older_s: float | None = None
    newer_s: float | None = None
    now_s: float = 0.0

    def takes_kernel(self, op: str, device: str) -> bool:
        """Return whether a kernel on a device is meant; a kernel also goes by its name without version and module."""
        from tunebook._selection.env_pins import names_of  # noqa: PLC0415 - loaded by then

        kernel_fits = self.kernel is None or any(fnmatchcase(name, self.kernel) for name in names_of(op))
        return kernel_fits and (self.device is None or fnmatchcase(device.lower(), f"*{self.device.lower()}*"))

    def takes(self, listed: Listed) -> bool:
        """Return whether an entry is meant."""
        return self.takes_age(listed.written_s) and self.takes_kernel(listed.op, listed.device)

    def takes_age(self, written_s: float) -> bool:
        """Return whether what was written then is meant."""
        age_s = self.now_s - written_s
        if self.older_s is not None and age_s < self.older_s:
            return False
        return self.newer_s is None or age_s <= self.newer_s

    def pick(self, catalogue: Catalogue) -> Iterator[Listed]:
        """Yield the entries that are meant; directories of other kernels are not even listed."""
        return filter(self.takes, catalogue.entries(self.takes_kernel))

    def groups(self, catalogue: Catalogue) -> list[EntryGroup]:
        """Return the kernels and devices with such entries, and their ids; files are looked at for an age only."""
        groups = catalogue.groups(self.takes_kernel)
        if self.older_s is None and self.newer_s is None:
            return groups
        aged = [group._replace(ids=[listed.id for listed in group.entries() if self.takes(listed)]) for group in groups]
        return [group for group in aged if group.ids]

    @property
    def any_given(self) -> bool:
        """Whether anything was asked for at all."""
        return any(part is not None for part in (self.kernel, self.device, self.older_s, self.newer_s))


def add_book(parser: ArgumentParser) -> None:
    """Give a verb the option that says which book."""
    kinds = ", ".join(("a directory", *file_kinds()))
    parser.add_argument(
        "--book",
        metavar="PATH_OR_URL",
        help=f"{kinds} or the address of a shared book; by default your own (see `tunebook path`)",
    )


def add_filters(parser: ArgumentParser) -> None:
    """Give a verb the options that say which book and which entries."""
    add_book(parser)
    parser.add_argument("--kernel", metavar="GLOB", help="entries of these kernels, as in 'matmul*'")
    parser.add_argument("--device", metavar="GLOB", help="entries of devices with this in their name, as in h200")
    parser.add_argument("--older-than", metavar="AGE", type=age_s, help="written longer ago than this: 12h, 30d, 1y")
    parser.add_argument("--newer-than", metavar="AGE", type=age_s, help="written less long ago than this")


def add_json(parser: ArgumentParser) -> None:
    """Give a verb the option that makes its output one JSON value."""
    parser.add_argument("--json", action="store_true", help="write JSON, for programs")


def add_destructive(parser: ArgumentParser) -> None:
    """Give a verb that takes something away the options to look first, and not to be asked."""
    parser.add_argument("--dry-run", action="store_true", help="only say what it would do")
    parser.add_argument("--yes", action="store_true", help="do it without asking")


def filters_of(options: Namespace) -> Filters:
    """Return what the options of `add_filters` say."""
    return Filters(options.kernel, options.device, options.older_than, options.newer_than, time.time())


def book_of(options: Namespace) -> Store:
    """Open the book that `--book` means; nothing is made on disk. `StoreError` if it is not to be trusted."""
    return _trusted(open_book(options.book))


def open_book(given: str | None) -> Store:
    """Open a book by what was typed: a path, an address, or None for the user's own.

    The user's own alone: what a shared one behind it has is looked at with `--book $TUNEBOOK_REMOTE`.
    """
    from pathlib import Path  # noqa: PLC0415 - loaded by then anyway

    from tunebook._base.environment_variables import HOME_VARIABLE, book_root, signing_key  # noqa: PLC0415 - as above
    from tunebook.stores import is_address, open_remote, open_store  # noqa: PLC0415 - loaded when a book is opened

    if given is None:
        root = book_root()
        if root is None:
            raise UsageError(f"there is no home directory to keep a book in; set {HOME_VARIABLE}, or use --book")
        return open_store(None, default_root=root)
    if is_address(given):
        return open_remote(given, key=signing_key())
    return open_store(Path(given).expanduser())


def existing_book(given: str) -> Store:
    """Open a book that is read from; a path at which there is nothing is a mistake in what was typed."""
    from pathlib import Path  # noqa: PLC0415 - as above

    from tunebook.stores import is_address  # noqa: PLC0415 - as above

    path = Path(given).expanduser()
    if not is_address(given) and not path.exists():
        raise UsageError(f"there is no book at {given}")
    try:
        return _trusted(open_book(given))
    except DefinitionError as error:
        if not path.is_file():
            raise
        raise UsageError(f"{error} What a bundle holds is taken with: tunebook import {given}") from error


def _trusted(store: Store) -> Store:
    """Refuse what a program would take for empty, with a warning: here somebody asked for it."""
    from tunebook.stores import LayeredStore  # noqa: PLC0415 - as above
    from tunebook.stores._files import distrust  # noqa: PLC0415 - as above

    if isinstance(store, LayeredStore):
        with suppress(FileNotFoundError):
            unsafe = distrust(store.where)
            if unsafe is not None:
                raise unsafe
    return store


def age_s(text: str) -> float:
    """Return the seconds of an age as it is typed.

    >>> age_s("90min"), age_s("2d")
    (5400.0, 172800.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|h|d|w|y)", text.strip().lower())
    if found is None:
        raise ArgumentTypeError(f"{text!r} is not an age; write a number and s, min, h, d, w or y, as in 30d")
    return float(found[1]) * _AGE_S[found[2]]


def size_bytes(text: str) -> int:
    """Return the bytes of a size as it is typed.

    >>> size_bytes("64 MB")
    67108864
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(|b|kb|mb|gb)", text.strip().lower())
    if found is None:
        raise ArgumentTypeError(f"{text!r} is not a size; write a number and kB, MB or GB, as in 64MB")
    return int(float(found[1]) * _SIZE_BYTES[found[2]])


def age_text(seconds: float) -> str:
    """Return an age as people say it.

    >>> age_text(30), age_text(5400), age_text(86400 * 40)
    ('30 s', '90 min', '40 d')
    """
    for unit, limit_s in (("s", 120), ("min", 7200), ("h", 172800), ("d", 2 * _AGE_S["y"])):
        if seconds < limit_s:
            return f"{max(0, int(seconds / _AGE_S[unit]))} {unit}"
    return f"{int(seconds / _AGE_S['y'])} y"


def size_text(count: float) -> str:
    """Return a size as people say it.

    >>> size_text(900), size_text(4096), size_text(3 << 30)
    ('900 B', '4.0 kB', '3.0 GB')
    """
    for unit, size in (("GB", 1 << 30), ("MB", 1 << 20), ("kB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{int(count)} B"
