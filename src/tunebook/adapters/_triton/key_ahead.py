"""Works out the part of Triton's cache keys that stands for Triton itself, in a thread, before it is needed.

Triton reads and digests its own files, 0.3 s in each process, when it compiles or loads the first program. Meanwhile
this process may import modules, or look configurations up: the digest is worked out in C, without the interpreter's
lock. Triton keeps the result.
"""

from __future__ import annotations

import threading
from typing import Final

from triton.runtime.cache import triton_key

_begun: Final[list[threading.Thread]] = []


def begin() -> None:
    """Start to work the key out, unless it is known, or was begun before."""
    if not _begun and not triton_key.cache_info().currsize:
        _begun.append(threading.Thread(target=triton_key, name="tunebook-triton-key", daemon=True))
        _begun[0].start()


def finish() -> None:
    """Wait until the key is known, if it was begun: Triton would work it out a second time."""
    if _begun and _begun[0].is_alive():
        _begun[0].join()
