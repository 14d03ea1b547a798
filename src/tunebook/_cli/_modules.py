"""The user's modules, imported because they were named on the command line."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from tunebook._cli._verb import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable


def import_modules(names: Iterable[str]) -> None:
    """Import modules by name, also from the working directory, as `python -m` does."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    for name in names:
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            # Only "there is no such module" is the command line's fault; what is missing inside it must show itself.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise UsageError(f"there is no module {name!r} here; name it as in `import {name}`") from None
