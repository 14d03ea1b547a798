"""A cold call goes a short way: few frames until the first candidate runs, and few files until the answer is stored."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numpy")

SCRIPT = Path(__file__).parents[2] / "bench" / "cold_path.py"
FRAMES, FILES = 20, 40
if sys.version_info[:2] == (3, 14):
    FILES += 1  # `_base/locks.py` works around a defect of this Python


def test_a_cold_call_crosses_few_frames_and_files():
    # A process of its own: in this one, other tests have loaded other array libraries.
    done = subprocess.run([sys.executable, SCRIPT, "--show"], capture_output=True, text=True, check=True)
    frames, files = map(int, re.findall(r"\d+", done.stdout.splitlines()[-1]))
    assert frames <= FRAMES, done.stdout
    assert files <= FILES, done.stdout
