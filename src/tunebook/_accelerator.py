"""The optional accelerator: `_packed.c`, which makes the hot path's key in one step where it has been built."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Final, TypeAlias

Pack: TypeAlias = Callable[..., bytes | None]
"""Makes the key of a call from its arguments; None if one of them is of a kind, or of a size, that it does not know."""

# What is read from an array is where it is in these; it is part of numpy's binary interface, which changes with the
# major version only.
_NUMPY_MAJORS: Final = ("1", "2")


def find_pack(*, layout: bool) -> Pack | None:
    """Return what packs arguments, or None where it was not built; arrays only if numpy has been imported by now."""
    return _pack_for(_ndarray(), layout)


def _ndarray() -> type | None:
    numpy = sys.modules.get("numpy")  # never imported here: a program without arrays must not pay for it
    known = str(getattr(numpy, "__version__", "")).partition(".")[0] in _NUMPY_MAJORS
    return getattr(numpy, "ndarray", None) if known else None


@cache
def _pack_for(ndarray: type | None, layout: bool) -> Pack | None:  # noqa: FBT001 - positional, because it is cached
    try:
        from tunebook._packed import packer  # noqa: PLC0415 - not built everywhere
    except ImportError:  # nor loadable everywhere: an interpreter inside of the interpreter may refuse it
        return None
    try:
        return packer(ndarray, layout)
    except TypeError:
        return None  # something else stands in for numpy
