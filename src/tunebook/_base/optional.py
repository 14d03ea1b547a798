"""Optional packages, imported when a feature first needs them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tunebook._base.errors import MissingDependency


def require(module: str, *, feature: str, extra: str | None = None) -> Any:
    """Return an optional module; `MissingDependency` with the command to type if its package is not installed.

    `extra` is the extra of tunebook that installs the package; None to install the package by its own name.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        # Only "it is not installed" becomes our error. A package that is installed but broken must show its own
        # traceback, or its user reinstalls it for ever.
        if not f"{module}.".startswith(f"{error.name}."):
            raise
    package = module.partition(".")[0]
    command = f"pip install {package}" if extra is None else f"pip install 'tunebook[{extra}]'"
    raise MissingDependency(f"{feature} needs {package!r}, which is not installed. Run: {command}")
