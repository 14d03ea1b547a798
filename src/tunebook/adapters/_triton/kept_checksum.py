"""Keeps the checksums of kernels' code in Triton's own cache, because working one out takes 15 ms in each process.

Triton has a key for the code of a kernel, with all functions that it calls, and works it out before the first launch in
any case. It changes with every edit of the file above the kernel, so it cannot stand for the code in a book. But code
with an equal key is equal, and so is its checksum.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from triton.runtime.cache import get_cache_manager

from tunebook._arrays.device_fingerprint import library_version
from tunebook._code.replay import CodeFacts

if TYPE_CHECKING:
    from collections.abc import Callable

_FILE: Final = "tunebook.checksum"
_FORM: Final = re.compile(r"([0-9a-f]{32})((?: \w+)*)")  # the checksum, and the names of packages


def kept_facts(jitted: Any, version: str, work_out: Callable[[], CodeFacts]) -> CodeFacts:
    """Return the facts of a jitted function that were kept for the same code; work out and keep new ones if needed."""
    code = jitted.cache_key
    # After the key: Triton finds the globals while it works the key out. It does not have the value of each in it.
    values = sorted(f"{name}={value!r}" for (name, _), (value, _) in jitted.used_global_vals.items())
    facts = [code, *values, version, *map(library_version, ("tunebook", "triton")), sys.version]
    with suppress(OSError):  # a cache that cannot be read or written costs time, and never a launch
        cache = get_cache_manager(sha256("\0".join(facts).encode()).hexdigest())
        path = cache.get_file(_FILE)
        text = "" if path is None else Path(path).read_text(errors="replace")
        if (known := _FORM.fullmatch(text)) is not None:
            return CodeFacts(known[1], {name: library_version(name) for name in known[2].split()})
        found = work_out()
        cache.put(" ".join([found.checksum, *sorted(found.versions)]), _FILE, binary=False)
        return found
    return work_out()
