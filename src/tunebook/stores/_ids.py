"""Names for problems: a digest that is unique to a problem, and path components that any file system takes."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from tunebook._base.record_format import blake2b

if TYPE_CHECKING:
    from tunebook._base.vocabulary import Problem

# Long enough to be recognised in a listing; with the digest it stays far below the 255 bytes of any file system.
_SLUG_CHARS: Final = 40
_UNSAFE = re.compile(r"[^a-z0-9._-]+")

# The store's own directories beside the directories of devices. A device may be called "tmp" and then gets a digest.
RESERVED: Final = frozenset({"leases", "outbox", "packs", "quarantine", "tmp"})


def problem_id(problem: Problem) -> str:
    """Return 32 hex digits for a problem.

    Every part goes in behind its length: without it, ("a|b", "c") and ("a", "b|c") would be one problem.
    """
    digest = blake2b(digest_size=16)
    for part in problem:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(encoded))
        digest.update(encoded)
    return digest.hexdigest()


# Every get asks for two components, and a process meets few devices and operations: 0.1 us against 3.
@lru_cache(maxsize=1024)
def path_component(name: str) -> str:
    """Return a readable path component for a device or an operation.

    The name itself where it is harmless; otherwise its readable part, and a digest. Upper case counts as harmful,
    because two names that differ only in case are one file on some file systems.
    """
    slug = _UNSAFE.sub("-", name.lower()).strip(".-")[:_SLUG_CHARS]
    if slug == name and slug and slug not in RESERVED:
        return slug
    return f"{slug or 'x'}-{blake2b(name.encode('utf-8', 'surrogatepass'), digest_size=5).hexdigest()}"
