"""Keeps what models of times have learnt, beside the user's book, because learning takes a second or more.

<root>/models/<state>.json    what a model has learnt from entries in this state

A folder that cannot be read or written costs that time, and never a call.
"""

from __future__ import annotations

import json
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, cast

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
_FORMAT: Final = 4  # of `Learnt`: models of another one are learnt again
_CLASSES: Final = classes_of([Learnt, LearntPart, Structure, Block])


def state_of_entries(records: Iterable[Record], cores: int) -> str:
    """Return a name for all that a model learns from: it changes with every entry, and with the version of tunebook."""
    entries: list[Json] = [*sorted(canonical_json([*r.problem, r.head.generation, r.head.config]) for r in records)]
    # By their heads: to read all measurements at every miss would take longer than the prediction.
    return _seal(canonical_json([entries, cores, _FORMAT, library_version("tunebook")]).encode()).decode()


def kept_model(state: str) -> Learnt | None:
    """Return what a model has learnt from entries in this state, in any process; None if that is not known."""
    with suppress(OSError, CodecError, ValueError, RecursionError):
        content = read_file(str(_safe_folder() / f"{state}.json"), _LIMIT_BYTES)
        seal, _, learnt = (content or b"").partition(b"\n")
        if seal == _seal(learnt):  # a damaged bound must not be believed
            return cast("Learnt", decode(json.loads(learnt), _CLASSES))
    return None


def keep_model(state: str, learnt: Learnt) -> None:
    """Keep what a model has learnt, and drop the models that were written the longest time ago."""
    with suppress(OSError, CodecError):
        make_directory(_folder(), lambda _descriptor: None)  # not synced: a lost model is learnt again
        folder, content = _safe_folder(), canonical_json(encode(learnt)).encode()
        replace_file(folder / f"{state}.json", _seal(content) + b"\n" + content, mode=0o644)
        for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)[_MOST:]:
            path.unlink()


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
