"""docs/shared-book.md: its code runs, and every row of its fault table names a test that exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG_S
from servers import redis_server

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "shared-book.md").read_text()


def test_the_code_of_the_page_runs(tmp_path):
    pytest.importorskip("redis")
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with redis_server(tmp_path / "redis") as server:
        patience = f"from tunebook.stores import _shared\n_shared.HOT_S = {HANG_S}"  # of a call, on a busy machine
        page = "\n".join([patience, *blocks]).replace("redis://books.example:6379/0", server.url)
        (tmp_path / "page.py").write_text(page)
        command = [sys.executable, "-W", "error", str(tmp_path / "page.py")]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r".*double\S* .*block.*\n", done.stdout), "the record that the first block tuned is listed"


def rows():
    table = PAGE.partition("## Faults")[2].partition("\n## ")[0]
    return [line for line in table.splitlines() if line.startswith("| ")][2:]


def test_every_fault_names_a_test_that_exists():
    named = [re.search(r"`(test_\w+)` \|$", row) for row in rows()]
    assert len(named) > 15
    assert None not in named
    there = "\n".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    assert [match[1] for match in named if f"def {match[1]}(" not in there] == []
