"""The code of docs/frameworks.md runs, each section by itself."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
NEEDED = {"PyTorch": "torch", "OpenCL": "pyopencl", "CuPy": "cupy"}


def sections():
    for text in PAGE.read_text().split("\n## ")[1:]:
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        if blocks:
            yield text.partition("\n")[0], "\n".join(blocks)


def test_every_section_with_code_names_its_package():
    assert {title for title, _ in sections()} == NEEDED.keys()


@pytest.mark.parametrize("title", NEEDED)
def test_the_code_of_a_section_runs(title, tmp_path):
    if importlib.util.find_spec(NEEDED[title]) is None:
        pytest.skip(f"{NEEDED[title]} is not installed")
    if title == "CuPy" and not Path("/proc/driver/nvidia/version").exists():
        pytest.skip("there is no NVIDIA GPU")
    (tmp_path / "page.py").write_text(dict(sections())[title])
    command = [sys.executable, "-W", "error", str(tmp_path / "page.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
