"""Counts how far a cold call goes: frames until the first candidate runs, and files crossed until the answer is stored.

    python bench/cold_path.py [--show]

Counts do not depend on the machine. A test holds their limits (tests/house/test_cold_path.py).
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np

import tunebook as tb

_ROOT = f"{Path(tb.__file__).parent}/"


class ColdPath(NamedTuple):
    stack: list[str]
    files: list[str]


def trace():
    """Make one cold call of a numpy kernel with two candidates and a book; return where it went."""
    stack: list[str] = []

    @tb.tunable(space=tb.Space(step=[1, 2]), heuristic={"step": 1}, name="cold_path.total")
    def total(a, b, *, config):
        if not stack:
            frame = inspect.currentframe().f_back
            while frame is not None:
                if ours(frame.f_code.co_filename):
                    stack.append(f"{short(frame)} {frame.f_code.co_qualname}")
                frame = frame.f_back
            stack.reverse()
        return a + b

    files: dict[str, None] = {}

    def profile(frame, event, _arg):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(_ROOT):
            files.setdefault(name.removeprefix(_ROOT))

    a = np.ones((64, 64))
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        total(a, a)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return ColdPath(stack, list(files))


def ours(name):
    return name.startswith((_ROOT, "<tunebook"))


def short(frame):
    return f"{frame.f_code.co_filename.removeprefix(_ROOT)}:{frame.f_code.co_firstlineno}"


def main():
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--show", action="store_true", help="print every frame and every file")
    show = options.parse_args().show
    with tempfile.TemporaryDirectory() as home:
        os.environ["TUNEBOOK_HOME"] = home
        stack, files = trace()
    if show:
        print(*(f"{'  ' * depth}{frame}" for depth, frame in enumerate(stack)), sep="\n")
        print(*sorted(files), sep="\n")
    print(f"frames to the first candidate: {len(stack)}; files crossed: {len(files)}")


if __name__ == "__main__":
    main()
