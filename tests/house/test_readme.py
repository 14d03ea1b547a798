"""The code of the README runs, as a newcomer would run it."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def test_the_code_of_the_readme_runs_from_top_to_bottom(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 3
    (tmp_path / "readme.py").write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, "-W", "error", "readme.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for shown in ("readme.add_transposed@v0 on cpu", "answer: Config(rows=", "winner", "runner-up"):
        assert shown in done.stdout


# Some need a server, or each section another package: tests of their own run those.
ELSEWHERE = {
    "agreement": "fleet/test_agreement_page.py",
    "frameworks": "adapters/test_frameworks_page.py",
    "metrics": "_report/test_report_docs.py",
    "report": "_report/test_report_docs.py",
    "shared-book": "stores/test_shared_page.py",
}
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.stem not in ELSEWHERE]


@pytest.mark.parametrize(("page", "test"), ELSEWHERE.items())
def test_the_code_of_the_other_pages_is_run_elsewhere(page, test):
    assert f"{page}" in (ROOT / "tests" / test).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_each_page_of_the_docs_runs(page, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    script = tmp_path / f"{page.stem}_page.py"
    script.write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_numbers_match_the_last_bench(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    tables = importlib.import_module("tables")
    _, numbers, _ = tables.split_readme()
    assert numbers == tables.for_readme(tables.read())
    assert (ROOT / "bench" / "results" / "summary.md").read_text() == tables.summary(tables.read())


def test_the_first_example_is_short():
    first = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    assert len(first.strip().splitlines()) <= 21
