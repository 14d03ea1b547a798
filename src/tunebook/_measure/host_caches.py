"""Emptying the caches of the host's processors, so that the next run finds none of its arguments in them."""

from __future__ import annotations

import os
from functools import cache
from typing import Final

# A machine that does not tell the size of its caches has this; a virtual machine may tell the size of a cache that it
# shares with a hundred others, and to read a gigabyte takes longer than most kernels.
_USUAL: Final = 64 << 20
_MOST: Final = 256 << 20


def cache_bytes(told: int) -> int:
    """Return how many bytes to read: twice the size of the caches that the machine told, within limits.

    >>> cache_bytes(16 << 20) >> 20, cache_bytes(0) >> 20, cache_bytes(1 << 30) >> 20
    (32, 128, 256)
    """
    return min(2 * (told if told > 0 else _USUAL), _MOST)


@cache
def _filler() -> bytes:
    told = sum(
        os.sysconf(name) for name in ("SC_LEVEL2_CACHE_SIZE", "SC_LEVEL3_CACHE_SIZE") if name in os.sysconf_names
    )
    return b"\1" * cache_bytes(told)  # not zeros: untouched zeros are all one page of memory


def empty_caches() -> None:
    """Fill the caches of this processor with other data."""
    # By memchr, which reads every byte at the speed of the memory; a copy may go past the caches.
    if b"\0" in _filler():
        raise AssertionError
