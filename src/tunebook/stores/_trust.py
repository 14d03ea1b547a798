"""Whether a directory may be believed: a stored configuration decides which code runs."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from tunebook._base.errors import StoreError


def distrust(root: str) -> StoreError | None:
    """Return why nothing under a root may be used, or None; FileNotFoundError if it does not exist.

    The superuser's directories are as good as one's own, since the superuser could change either: that is how a
    machine's administrator, or a container image, hands out a book.
    """
    fault = _fault(Path(root))
    with suppress(FileNotFoundError):
        fault = fault or _fault(Path(root, "v1"))
    if not fault:
        return None
    return StoreError("unsafe", root, f"the book at {root} is not used, because {fault}")


def _fault(directory: Path) -> str:
    facts = directory.stat()
    if facts.st_uid not in {os.geteuid(), 0}:
        found = f"{directory} belongs to another user (uid {facts.st_uid})"
        remedy = f"chown -R {os.geteuid()} {directory}"
    elif facts.st_mode & 0o022:
        found = f"the mode of {directory}, {facts.st_mode & 0o777:o}, lets others write to it"
        remedy = f"chmod go-w {directory}"
    else:
        return ""
    return f"{found}; results stay in memory, for this process only. Mend it with: {remedy}"
