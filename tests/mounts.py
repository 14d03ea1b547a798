"""File systems of their own for a process: full ones, and read-only ones."""

from __future__ import annotations

import subprocess
import tempfile

import pytest


def can_mount():
    with tempfile.TemporaryDirectory() as directory:
        line = ["unshare", "-m", "mount", "-t", "tmpfs", "none", directory]
        try:
            return subprocess.run(line, capture_output=True, check=False).returncode == 0
        except FileNotFoundError:
            return False


needs_mounts = pytest.mark.skipif(not can_mount(), reason="needs the right to mount: unshare -m mount -t tmpfs")
