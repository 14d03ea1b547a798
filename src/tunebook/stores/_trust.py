"""Whether a directory may be believed: a stored configuration decides which code runs."""

from __future__ import annotations

import os
from pathlib import Path

from tunebook._errors import StoreError


def distrust(root: str) -> StoreError | None:
    """Return why nothing under a root may be used, or None; FileNotFoundError if it does not exist.

    Root's own directories are as good as one's own, since root could change either: that is how a machine's
    administrator, or a container image, hands out a book.
    """
    facts = Path(root).stat()
    if facts.st_uid not in (os.geteuid(), 0):
        found = f"it belongs to another user (uid {facts.st_uid})"
        remedy = f"Take it over with: chown -R {os.geteuid()} {root}"
    elif facts.st_mode & 0o022:
        found = f"its mode {facts.st_mode & 0o777:o} lets others write to it"
        remedy = f"Close it with: chmod go-w {root}"
    else:
        return None
    message = (
        f"the book at {root} is not used, because {found}; results stay in memory, for this process only. {remedy}"
    )
    return StoreError("unsafe", root, message)
