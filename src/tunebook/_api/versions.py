"""Versions of the software that entries were measured with, and of the software installed here."""

from __future__ import annotations

import json
from functools import cache

from tunebook._arrays.device_fingerprint import environment, gpu_driver
from tunebook._base.record_format import canonical_json


def versions_of(there: str) -> dict[str, str]:
    """Return the names and versions of an environment; empty if it is not written as we write it."""
    try:
        return {name: str(version) for name, version in json.loads(there).items()}
    except (ValueError, AttributeError, RecursionError):
        return {}


def versions_differ(there: str, here: str) -> tuple[str, ...]:
    """Return the differences of two environments, in the words of `explain_difference`.

    >>> versions_differ('{"driver":"570.86"}', '{"driver":"580.12"}')
    ('driver: 570.86 there, 580.12 here',)
    """
    old, new = versions_of(there), versions_of(here)
    if not old or not new:
        return ()
    return tuple(
        f"{name}: {old.get(name, 'none')} there, {new.get(name, 'none')} here"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    )


def environment_here(there: str) -> str:
    """Return an environment with the versions that are installed here, without importing any package.

    A version that cannot be found (of a compiler, for example) stays as it is, so that it is not a difference.
    """
    versions = versions_of(there)
    if not versions:
        return there
    return canonical_json({name: installed_version(name) or found for name, found in versions.items()})


@cache
def installed_version(name: str) -> str | None:
    """Return the version of a name in environments; None if it is not installed or cannot be found."""
    if name == "python":
        return environment()["python"]
    if name == "driver":
        return gpu_driver().get("driver")
    from importlib import metadata  # noqa: PLC0415 - loaded late: 15 ms

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
