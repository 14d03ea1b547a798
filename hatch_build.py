"""Builds the optional accelerator, `_hotpath/_packed.c`, where there is a C compiler; a pure wheel elsewhere.

pip and other installers call the hook. `python hatch_build.py` does the same in a checkout, without installing.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

ROOT = Path(__file__).parent
SOURCE = ROOT / "src" / "tunebook" / "_hotpath" / "_packed.c"
# The limited API of 3.11: one file, and one wheel, for every CPython from there on.
BUILT = SOURCE.with_name("_packed.abi3.so")
TAG = "cp311-abi3"


class AcceleratorHook(BuildHookInterface):
    """Puts the accelerator into a wheel, or beside the sources that an editable install refers to."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's interface
        """Build it, and say what the wheel is good for."""
        refuse_free_threading()
        reason = build()
        if reason is not None:
            self.app.display_warning(f"tunebook: {reason}; calls will take the pure-Python way")
            return
        build_data.update(pure_python=False, tag=f"{TAG}-{_platform()}")
        build_data["artifacts"].append(f"/{BUILT.relative_to(ROOT)}")  # git ignores it, and so would the wheel


def refuse_free_threading() -> None:
    """End an installation into a Python without a GIL, unless the user asks for the pure package."""
    if sysconfig.get_config_var("Py_GIL_DISABLED") and not _pure_is_wanted():
        raise RuntimeError(
            "tunebook does not support free-threaded Python yet: its tests have not run on one, and tuning while the "
            "program runs relies on the GIL. Use a Python with a GIL; to try it untested: TUNEBOOK_PURE=1 pip install"
        )


def build(output: Path = BUILT) -> str | None:
    """Build the accelerator and return None, or return the reason why there is none now."""
    # What an earlier build left must not pass for this one's.
    output.unlink(missing_ok=True)
    reason = _obstacle()
    if reason is not None:
        return reason
    # Under another name first: a program that starts meanwhile must not load half of it.
    unfinished = output.with_suffix(f".{os.getpid()}")
    try:
        done = subprocess.run(_command(unfinished), capture_output=True, text=True, check=False)  # noqa: S603 - a compiler
        if done.returncode != 0:
            return f"the C compiler failed: {' '.join(done.stderr.split())[:400]}"
        unfinished.replace(output)
    finally:
        unfinished.unlink(missing_ok=True)
    return None


def _obstacle() -> str | None:
    if _pure_is_wanted():
        return "TUNEBOOK_PURE is set"
    if os.name != "posix" or sys.implementation.name != "cpython":
        return "the accelerator is for CPython on POSIX"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python.h is missing (Debian: apt-get install python3-dev)"
    return "there is no C compiler" if _compiler() is None else None


def _pure_is_wanted() -> bool:
    return os.environ.get("TUNEBOOK_PURE", "") not in ("", "0")


def _compiler() -> list[str] | None:
    """Return the first of these commands that exists: the user's, that of this Python's own build, the usual names."""
    named = (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang")
    commands = [shlex.split(command) for command in named if command]
    return next((command for command in commands if shutil.which(command[0])), None)


def _command(output: Path) -> list[str]:
    # Python's own symbols are found when it is loaded. Not this Python's LDSHARED: it may name directories to search
    # for libraries, which would go into the wheel.
    module = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared", "-fPIC"]
    flags = ["-O2", "-std=c11", "-fvisibility=hidden", "-Wall", "-Wextra", f"-I{sysconfig.get_path('include')}"]
    return [*(_compiler() or []), *module, *flags, str(SOURCE), "-o", str(output)]


def _platform() -> str:
    """Return the tag of this machine; a newer one, of many Linuxes, is for builds that were checked to run on them."""
    return next(tag for tag in platform_tags() if not tag.startswith(("manylinux", "musllinux")))


if __name__ == "__main__":
    sys.exit(build())
