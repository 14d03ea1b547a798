"""The code of docs/report.md and docs/metrics.md runs, and the pictures that they show are there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG_S

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("report", "metrics")


@pytest.mark.parametrize("name", PAGES)
def test_the_code_of_a_page_runs_from_top_to_bottom(name, tmp_path):
    for needed in ("numpy", "matplotlib", "opentelemetry"):
        pytest.importorskip(needed)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{name}.md").read_text(), re.DOTALL)
    (tmp_path / "page.py").write_text("\n".join(blocks))
    command = [sys.executable, "-W", "error", str(tmp_path / "page.py")]
    environment = {**os.environ, "TUNEBOOK_HOME": str(tmp_path / "book")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", PAGES)
def test_every_picture_of_a_page_is_there_and_is_described(name):
    for told, path in re.findall(r"!\[(.*?)\]\((.*?)\)", (DOCS / f"{name}.md").read_text(), re.DOTALL):
        assert (DOCS / path).read_bytes().startswith(b"\x89PNG"), path
        assert len(told) > 10


@pytest.mark.slow
def test_the_script_makes_every_picture(tmp_path):
    if not all(map(shutil.which, ("chromium", "chromedriver", "cc"))):
        pytest.skip("chromium, chromium-driver or a C compiler is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    subprocess.run([sys.executable, str(DOCS / "screenshots.py"), "--into", str(tmp_path)], check=True, timeout=HANG_S)
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {path.name for path in (DOCS / "images").iterdir()}
