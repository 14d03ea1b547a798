"""Keeps learnt models of times beside the user's book, because learning takes a second or more.

<root>/models/<state>.json    a learnt model, and the digests of its entries; their state gives the name

Every size that is tuned makes another state. The parts of a model whose entries are nearly the same are used again, and
only how far to believe them is learnt anew: else each new size would cost seconds. A folder that cannot be read or
written costs that time, and never a call.
"""

from __future__ import annotations

import json
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from tunebook._arrays.device_fingerprint import library_version
from tunebook._base.config_codec import classes_of, decode, encode
from tunebook._base.environment_variables import book_root, no_home
from tunebook._base.errors import CodecError
from tunebook._base.record_format import canonical_json
from tunebook.search._part_model import LearntPart
from tunebook.search._size_model import Learnt
from tunebook.search._structures import Block, Structure
from tunebook.stores._files import distrust, make_directory, read_file, replace_file

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tunebook._base.record_format import Record

_LIMIT_BYTES: Final = 1_000_000  # a model of 700 problems takes about 10,000
_MOST: Final = 100  # files: every tuned size makes another state, and the models of earlier states are not needed again
_FORMAT: Final = 6  # of `KeptModel`: models of another one are learnt again
_NEW: Final = 1 / 8  # of the entries: with more of them new or gone, parts are learnt again


class KeptModel(NamedTuple):
    """A learnt model, the digests of its entries, and the digests of the entries that its parts were learnt from."""

    entries: frozenset[str]
    parts_from: frozenset[str]
    learnt: Learnt

    def is_near(self, entries: frozenset[str]) -> bool:
        """Whether its parts serve for other entries: they are nearly those that the parts were learnt from."""
        return len(self.parts_from ^ entries) <= _NEW * len(entries)


_CLASSES: Final = classes_of([KeptModel, Learnt, LearntPart, Structure, Block])


def digests_of(records: Iterable[Record], cores: int) -> frozenset[str]:
    """Return a digest of each entry that a model learns from; all of them change with the version of tunebook."""
    others = canonical_json([cores, _FORMAT, library_version("tunebook")]).encode()
    return frozenset(_digest(others + record.to_bytes()) for record in records)


def kept_model(entries: frozenset[str]) -> KeptModel | None:
    """Return a model of these entries, or else one whose parts serve for them, of any process; None without one."""
    with suppress(OSError):
        folder = _safe_folder()
        own = _read(folder / f"{_state(entries)}.json")
        if own is not None and own.entries == entries:
            return own
        paths = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        return next((found for path in paths if (found := _read(path)) is not None and found.is_near(entries)), None)
    return None


def keep_model(model: KeptModel) -> None:
    """Keep a learnt model, and drop the models that were written the longest time ago."""
    with suppress(OSError, CodecError):
        make_directory(_folder(), lambda _descriptor: None)  # not synced: a lost model is learnt again
        folder, content = _safe_folder(), canonical_json(encode(model)).encode()
        replace_file(folder / f"{_state(model.entries)}.json", _seal(content) + b"\n" + content, mode=0o644)
        for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)[_MOST:]:
            path.unlink()


def _read(path: Path) -> KeptModel | None:
    with suppress(OSError, CodecError, ValueError, RecursionError):
        seal, _, content = (read_file(str(path), _LIMIT_BYTES) or b"").partition(b"\n")
        if seal == _seal(content):  # a damaged bound must not be believed
            return cast("KeptModel", decode(json.loads(content), _CLASSES))
    return None


def _state(entries: frozenset[str]) -> str:
    return _digest("".join(sorted(entries)).encode())


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=8).hexdigest()


def _seal(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).hexdigest().encode()


def _folder() -> Path:
    root = book_root()
    if root is None:
        raise FileNotFoundError(no_home())
    return root / "models"


def _safe_folder() -> Path:
    """Return the folder; `OSError` if it is missing, or if others could write to it."""
    folder = _folder()
    if (unsafe := distrust(str(folder.parent), inside=folder.name)) is not None:
        raise unsafe
    return folder
