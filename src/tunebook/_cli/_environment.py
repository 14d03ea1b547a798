"""The software that is installed here, told without importing any of it."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from tunebook._arrays.device_fingerprint import environment, nvidia_driver

if TYPE_CHECKING:
    from collections.abc import Mapping


@cache
def installed_version(name: str) -> str | None:
    """Return the version of something that environments name; None if it is not here, or cannot be told."""
    if name == "python":
        return environment()["python"]
    if name == "driver":
        return nvidia_driver().get("driver")
    from importlib import metadata  # noqa: PLC0415 - 15 ms for who compares versions

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def environment_here(there: str) -> str:
    """Return an environment from elsewhere with the versions of this machine, where these can be told.

    What cannot be told (the version of a compiler, say) is left as it is there, and so is no difference.
    """
    from tunebook._api.explain import versions_of  # noqa: PLC0415 - as above
    from tunebook._base.record_format import canonical_json  # noqa: PLC0415 - as above

    versions: Mapping[str, str] = versions_of(there)
    if not versions:
        return there
    return canonical_json({name: installed_version(name) or found for name, found in versions.items()})
