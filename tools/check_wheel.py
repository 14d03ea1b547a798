"""Check an installed wheel: `python tools/check_wheel.py` in an environment that has the wheel and numpy, and no more.

The accelerator must be in use, unless this Python has no GIL; types must be declared; a call must be tuned.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from importlib import metadata, resources

import numpy as np

import tunebook as tb
from tunebook._hotpath.codegen import find_pack


def faults() -> list[str]:
    """Return everything that is wrong with the wheel on this Python."""
    has_gil = not sysconfig.get_config_var("Py_GIL_DISABLED")  # the accelerator needs one

    @tb.tunable(space=[{"n": 1}, {"n": 2}], heuristic={"n": 1})
    def halves(x: np.ndarray, *, config: tb.Config = tb.CHOSEN) -> list[np.ndarray]:
        return np.array_split(x, config.n)

    halves(np.zeros(64))
    checks = {
        "the accelerator is not in use": (find_pack(layout=True) is not None) == has_gil,
        "py.typed is missing": resources.files("tunebook").joinpath("py.typed").is_file(),
        "a call was not tuned": tb.tune(halves, np.zeros(64)).config.n in (1, 2),
    }
    return [fault for fault, is_right in checks.items() if not is_right]


def main() -> None:
    """Print a line about this Python, or exit with the faults."""
    with tempfile.TemporaryDirectory() as book:
        os.environ["TUNEBOOK_HOME"] = book
        found = faults()
    tags = [line for line in metadata.distribution("tunebook").read_text("WHEEL").splitlines() if "Tag:" in line]
    about = f"Python {sys.version.split()[0]}: {', '.join(tags)}"
    if found:
        sys.exit(f"{about}: {'; '.join(found)}")
    print(f"{about}: right")


if __name__ == "__main__":
    main()
