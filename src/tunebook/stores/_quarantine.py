"""Where unreadable files go: out of the way, but kept for a person to look at."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

# Enough to see what happened; a disk that damages everything must not fill the rest of itself with the remains.
_LIMIT: Final = 256


def set_aside(path: Path, inode: int, quarantine: Path, now_s: float) -> Path:
    """Move a file into the quarantine, drop the oldest there if it is full, and return the new path.

    `inode` is that of the file that was found unreadable. On mounts without locks a writer may have put a good file
    in its place by now, and then that one goes back.
    """
    quarantine.mkdir(mode=0o755, parents=True, exist_ok=True)
    kept = sorted(quarantine.iterdir())  # their names begin with the time
    for oldest in kept[: max(0, len(kept) + 1 - _LIMIT)]:
        with suppress(OSError):
            oldest.unlink()
    target = quarantine / f"{int(now_s * 1000):014d}-{path.name}"
    path.rename(target)
    if target.stat().st_ino != inode:
        with suppress(FileExistsError):
            os.link(target, path)
        target.unlink()
    return target
