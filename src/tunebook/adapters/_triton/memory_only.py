"""Asks Triton for a compiled program that is in its memory, and for no other."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from triton import knobs

from tunebook._base.locks import InterruptSafeLock

if TYPE_CHECKING:
    from collections.abc import Iterator

_asking: Final = InterruptSafeLock()  # Triton has one hook for all threads


@contextmanager
def compiling_nothing() -> Iterator[None]:
    """Let Triton compile nothing for this thread inside the block: it returns None for a program not in its memory."""
    asker = threading.get_ident()
    with _asking:
        theirs = knobs.runtime.jit_cache_hook

        def hook(**facts: Any) -> Any:
            if threading.get_ident() == asker:
                return True  # "it is compiled elsewhere"
            return None if theirs is None else theirs(**facts)

        knobs.runtime.jit_cache_hook = hook
        try:
            yield
        finally:
            knobs.runtime.jit_cache_hook = theirs
