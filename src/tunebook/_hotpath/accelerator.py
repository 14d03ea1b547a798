"""The optional accelerator: `_packed.c`, which makes the hot path's key in one step where it has been built."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Final, TypeAlias

from tunebook._arrays.framework import hot_names, jax_has_one_device

Pack: TypeAlias = Callable[..., bytes | None]
"""Makes the key of a call from its arguments; None if one of them is of a kind, or of a size, that it does not know."""

# What is read from an array is where it is in these; it is part of numpy's binary interface, which changes with the
# major version only.
_NUMPY_MAJORS: Final = ("1", "2")


def find_pack(*, layout: bool) -> Pack | None:
    """Return what packs arguments, or None where it was not built; arrays only if their library is there by now."""
    return _pack_for(_ndarray(), layout, _jax_by_avals())


def finder_of(pack: Pack, memo: dict[Any, Any], otherwise: Callable[[bytes], Any]) -> Callable[..., Any]:
    """Return what looks the arguments of a call up by the key that `pack` makes; None if nothing is found.

    In the memo first, and then by `otherwise(key)`.
    """
    from tunebook._hotpath._packed import finder  # noqa: PLC0415 - built, if there is something that packs

    return finder(pack, memo, otherwise)


def _ndarray() -> type | None:
    numpy = sys.modules.get("numpy")  # never imported here: a program without arrays must not pay for it
    known = str(getattr(numpy, "__version__", "")).partition(".")[0] in _NUMPY_MAJORS
    return getattr(numpy, "ndarray", None) if known else None


def _jax_by_avals() -> bool:
    """Whether jax is there, and avals say all about its arrays."""
    return "_tb_jax_array" in hot_names() and jax_has_one_device()


def _jax() -> tuple[object, ...]:
    """Return the classes of jax's arrays, and what else a call with them depends on."""
    names: dict[str, Any] = hot_names()
    classes = names["_tb_jax_array"], names["_tb_jax_tracer"]
    return *classes, "aval", "value", names["_tb_jax_settings"], *names["_tb_jax_packed"]


@cache
def _pack_for(
    ndarray: type | None,
    layout: bool,  # noqa: FBT001 - positional, because it is cached
    jax: bool,  # noqa: FBT001 - as above
) -> Pack | None:
    try:
        from tunebook._hotpath._packed import packer  # noqa: PLC0415 - not built everywhere
    except ImportError:  # nor loadable everywhere: an interpreter inside of the interpreter may refuse it
        return None
    try:
        return packer(ndarray, layout, _jax() if jax else None)
    except TypeError:
        return None  # something else stands in for numpy
