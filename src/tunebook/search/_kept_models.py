"""Keeps learnt models of times beside the user's book, because learning takes a second or more.

<root>/models/<state>.json    a learnt model, and the digests of its entries; their state gives the name

Every size that is tuned makes another state. A model whose entries are nearly the same is used again, with the times of
all present entries: else each new size would cost seconds. A folder that cannot be read or written costs that time, and
never a call.
"""

from __future__ import annotations

import json
import math
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
    from tunebook._base.vocabulary import Json

_LIMIT_BYTES: Final = 1_000_000  # a model of 700 problems takes about 10,000
_MOST: Final = 100  # files: every tuned size makes another state, and the models of earlier states are not needed again
_FORMAT: Final = 5  # of `KeptModel`: models of another one are learnt again
_NEW: Final = 1 / 8  # of the entries: with more of them new or gone, a model is learnt again


class KeptModel(NamedTuple):
    """A learnt model, and the digests of the entries that it was learnt from."""

    entries: frozenset[str]
    learnt: Learnt

    def is_near(self, entries: frozenset[str]) -> bool:
        """Whether it may be used for other entries: they are nearly the same, and it has a bound."""
        return len(self.entries ^ entries) <= _NEW * len(entries) and math.isfinite(self.learnt.factor)


_CLASSES: Final = classes_of([KeptModel, Learnt, LearntPart, Structure, Block])


def digests_of(records: Iterable[Record], cores: int) -> frozenset[str]:
    """Return a digest of each entry that a model learns from; all of them change with the version of tunebook."""
    # Of their heads: to read all measurements at every miss would take longer than the prediction.
    others: list[Json] = [cores, _FORMAT, library_version("tunebook")]
    return frozenset(_digest([*r.problem, r.head.generation, r.head.config, others]) for r in records)


def kept_model(entries: frozenset[str]) -> KeptModel | None:
    """Return a model that was learnt from these entries, or from nearly the same, in any process; None without one."""
    with suppress(OSError):
        folder = _safe_folder()
        paths = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        own = folder / f"{_state(entries)}.json"
        for path in [own, *paths]:
            found = _read(path)
            if found is not None and (found.entries == entries or found.is_near(entries)):
                return found
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
    return _digest([*sorted(entries)])


def _digest(value: Json) -> str:
    return blake2b(canonical_json(value).encode(), digest_size=8).hexdigest()


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
