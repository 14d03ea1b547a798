"""The options that verbs share: the book, the entries, JSON, previews."""

from __future__ import annotations

import re
import time
import warnings
from argparse import ArgumentTypeError
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._base.environment_variables import HOME_VARIABLE, book_root, no_home, signing_key
from tunebook._base.errors import DefinitionError, StoreError, TunebookWarning, clean
from tunebook._cli._verb import ArgumentParser, Namespace, UsageError
from tunebook._selection.env_pins import fits_device, fits_kernel, names_of
from tunebook.stores import JsonStore, LayeredStore, PackStore, file_kinds, is_address, open_remote, open_store
from tunebook.stores._files import distrust
from tunebook.stores._listing import Catalogue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tunebook._base.record_format import Record
    from tunebook.stores import Store
    from tunebook.stores._listing import EntryGroup, Listed

_AGE_S: Final = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0, "y": 365 * 86400.0}
_NAMED: Final = 8  # kernels or devices that a message names
_SIZE_BYTES: Final = {"b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}


class Filters(NamedTuple):
    """Selects entries. An age counts from the time at which the entry was written into its book.

    Of several patterns one must match; without patterns, all kernels or devices do.
    """

    kernel: tuple[str, ...] = ()
    device: tuple[str, ...] = ()
    older_s: float | None = None
    newer_s: float | None = None
    now_s: float = 0.0

    def takes_kernel(self, op: str, device: str) -> bool:
        """Return whether a kernel on a device is selected; the kernel's version and module may be left out."""
        kernel_fits = not self.kernel or fits_kernel(op, self.kernel)
        return kernel_fits and (not self.device or fits_device(device, self.device))

    def warn_of_misses(self, known: Iterable[tuple[str, str]], where: str) -> bool:
        """Warn of each pattern that matches none of the kernels and devices that a book or a file has; False if any."""
        if not (pairs := sorted(known) if self.kernel or self.device else []):
            return True
        kernels = [pattern for pattern in self.kernel if not any(fits_kernel(op, [pattern]) for op, _ in pairs)]
        devices = [pattern for pattern in self.device if not any(fits_device(name, [pattern]) for _, name in pairs)]
        for pattern in kernels:
            _warn_of_miss("kernel", pattern, {op: names_of(op)[::-1] for op, _ in pairs}, where)
        for pattern in devices:
            _warn_of_miss("device", pattern, {device: (device,) for _, device in pairs}, where)
        return not kernels and not devices

    def takes(self, listed: Listed) -> bool:
        """Return whether an entry is selected."""
        return self.takes_age(listed.written_s) and self.takes_kernel(listed.op, listed.device)

    def takes_age(self, written_s: float) -> bool:
        """Return whether an entry that was written at this time is selected."""
        age_s = self.now_s - written_s
        if self.older_s is not None and age_s < self.older_s:
            return False
        return self.newer_s is None or age_s <= self.newer_s

    def pick(self, catalogue: Catalogue) -> Iterator[Listed]:
        """Yield the selected entries; directories of other kernels are not listed."""
        self.check(catalogue)
        return self.among(catalogue)

    def among(self, catalogue: Catalogue) -> Iterator[Listed]:
        """Yield the same, without warnings."""
        return filter(self.takes, catalogue.entries(self.takes_kernel))

    def check(self, catalogue: Catalogue) -> bool:
        """Warn of each pattern that matches no kernel or device of a book; return whether all match."""
        if not self.kernel and not self.device:
            return True
        groups = catalogue.groups(lambda _op, _device: True)
        return self.warn_of_misses(((group.op, group.device) for group in groups), catalogue.store.where)

    def records(self, store: Store) -> Iterator[Record]:
        """Yield the records of the selected entries; unreadable records are left out."""
        return (record for listed in self.pick(Catalogue(store)) if (record := listed.record()) is not None)

    def groups(self, catalogue: Catalogue) -> list[EntryGroup]:
        """Return the selected kernels and devices with the ids of their entries; reads file times only for an age."""
        groups = catalogue.groups(self.takes_kernel)
        if self.older_s is None and self.newer_s is None:
            return groups
        aged = [group._replace(ids=[listed.id for listed in group.entries() if self.takes(listed)]) for group in groups]
        return [group for group in aged if group.ids]

    @property
    def any_given(self) -> bool:
        return self[:4] != Filters()[:4]


def _warn_of_miss(kind: str, pattern: str, names: Mapping[str, tuple[str, ...]], where: str) -> None:
    from difflib import get_close_matches  # noqa: PLC0415 - loaded late: 3 ms

    near = get_close_matches(pattern, [each for some in names.values() for each in some], n=1, cutoff=0.5)
    shown = ", ".join([some[0] for some in names.values()][:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    hint = f"did you mean {near[0]}?" if near else f"there are {shown}"
    warnings.warn(clean(f"no {kind} in {where} matches --{kind} {pattern}; {hint}"), TunebookWarning, stacklevel=2)


def add_options(parser: ArgumentParser, names: Iterable[str]) -> None:
    """Add options that several verbs share, by their names; those that choose entries are a group of their own."""
    chosen = [name for name in names if name in FILTERS]
    group = parser.add_argument_group("the book, and the entries in it") if len(chosen) > 1 else parser
    for name in names:
        (group if name in chosen else parser).add_argument(f"--{name}", **_OPTIONS[name])


def filters_of(options: Namespace) -> Filters:
    """Return the filters from the options `FILTERS`."""
    patterns = tuple(options.kernel), tuple(options.device)
    return Filters(*patterns, options.older_than, options.newer_than, time.time())


def book_of(options: Namespace) -> Store:
    """Open the book of `--book`, to write to it; creates nothing on disk. `StoreError` if others can write to it."""
    return _trusted(open_book(options.book))


def book_to_read(options: Namespace) -> Store:
    """Open the book of `--book`, which must exist; the user's own book may still be empty."""
    return book_of(options) if options.book is None else existing_book(options.book)


def open_book(given: str | None) -> Store:
    """Open a book by its path or URL; None is the user's own book, without the shared book behind it."""
    if given is None:
        root = book_root()
        if root is None:
            raise UsageError(f"{no_home()} to keep a book in; set {HOME_VARIABLE}, or use --book")
        return open_store(None, default_root=root)
    if is_address(given):
        return open_remote(given, key=signing_key())
    return open_store(Path(given).expanduser())


def existing_book(given: str) -> Store:
    """Open a book to read from; a missing book is a `StoreError`."""
    path = Path(given).expanduser()
    if not is_address(given) and not path.exists():
        raise StoreError("io", given, f"no book at {given}")
    try:
        return _trusted(open_book(given))
    except DefinitionError as error:
        if not path.is_file():
            raise
        raise UsageError(f"{error} To read a bundle: tunebook import {given}") from error


def _trusted(store: Store) -> Store:
    # A program takes an unsafe book for empty and warns; here a person asked for it.
    inside = "v1" if isinstance(store, LayeredStore) else "" if isinstance(store, (JsonStore, PackStore)) else None
    with suppress(FileNotFoundError):
        try:
            unsafe = None if inside is None else distrust(store.where, inside=inside)
        except NotADirectoryError as error:
            remedy = f"set {HOME_VARIABLE} to a directory, or use --book"
            raise StoreError(
                "io", store.where, f"no book can be at {store.where}: {error.strerror}; {remedy}"
            ) from error
        if unsafe is not None:
            raise unsafe
    return store


def age_s(text: str) -> float:
    """Return the seconds of an age from the command line.

    >>> age_s("90min"), age_s("2d")
    (5400.0, 172800.0)
    """
    return _amount(text, _AGE_S, f"invalid age {text!r}: write a number and s, min, h, d, w or y, e.g. 30d")


def count_of(text: str) -> int:
    """Return a number of lines from the command line; 0 stands for all.

    >>> count_of("20")
    20
    """
    if not text.isascii() or not text.isdigit():
        raise ArgumentTypeError(f"invalid number {text!r}: write 0 for all, or how many, e.g. 20")
    return int(text)


def size_bytes(text: str) -> int:
    """Return the bytes of a size from the command line.

    >>> size_bytes("64 MB")
    67108864
    """
    return int(_amount(text, _SIZE_BYTES, f"invalid size {text!r}: write a number and B, kB, MB or GB, e.g. 64MB"))


def _amount(text: str, units: Mapping[str, float], error: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]*)", text.strip().lower())
    if found is None or found[2] not in units:
        raise ArgumentTypeError(error)
    return float(found[1]) * units[found[2]]


def age_text(seconds: float) -> str:
    """Return an age as text.

    >>> age_text(30), age_text(5400), age_text(86400 * 40)
    ('30 s', '90 min', '40 d')
    """
    for unit, limit_s in (("s", 120), ("min", 7200), ("h", 172800), ("d", 2 * _AGE_S["y"])):
        if seconds < limit_s:
            return f"{max(0, int(seconds / _AGE_S[unit]))} {unit}"
    return f"{int(seconds / _AGE_S['y'])} y"


def size_text(count: float) -> str:
    """Return a size as text.

    >>> size_text(900), size_text(4096), size_text(3 << 30)
    ('900 B', '4.0 kB', '3.0 GB')
    """
    for unit, size in (("GB", 1 << 30), ("MB", 1 << 20), ("kB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{int(count)} B"


_SEVERAL: Final = {"metavar": "GLOB", "action": "append", "default": []}
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "book": {
        "metavar": "PATH_OR_URL",
        "help": f"a directory, {', '.join(file_kinds())} or the URL of a shared book; default: your own (see "
        "`tunebook path`)",
    },
    "kernel": {**_SEVERAL, "help": "only entries of matching kernels, e.g. 'matmul*'; repeatable"},
    "device": {**_SEVERAL, "help": "only entries of matching devices, e.g. h200; repeatable"},
    "older-than": {"metavar": "AGE", "type": age_s, "help": "only entries older than this: 12h, 30d, 1y"},
    "newer-than": {"metavar": "AGE", "type": age_s, "help": "only entries newer than this"},
    "dry-run": {"action": "store_true", "help": "only print the changes, make none"},
    "json": {"action": "store_true", "help": "print JSON, for programs"},
}
FILTERS: Final = ("book", "kernel", "device", "older-than", "newer-than")
