"""Every promise of the documentation is on one page, with the tests that hold it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("promises")


def test_promises_are_numbered_and_named_once(tool):
    rows = tool.promises(tool.PAGE.read_text())
    assert [row.number for row in rows] == [*range(1, len(rows) + 1)]
    assert len({row.name for row in rows}) == len(rows) > 40


def test_every_promise_has_a_test_and_every_mark_is_a_promise(tool):
    names, tests = {row.name for row in tool.promises(tool.PAGE.read_text())}, tool.marked()
    assert {*tests} - names == set(), "add a row to docs/promises.md, or correct the mark"
    assert names - {*tests} == set(), "mark a test that holds the promise"


def test_the_page_names_the_tests_that_are_marked(tool):
    page = tool.PAGE.read_text()
    assert page == tool.written(page, tool.marked()), "run: python tools/promises.py"


def test_marks_are_found_on_functions_methods_and_classes(tool, tmp_path):
    (tmp_path / "test_x.py").write_text(
        "import pytest\n"
        '@pytest.mark.promise("a")\ndef test_one(): ...\n'
        '@pytest.mark.promise("b")\nclass TestAll:\n'
        '    @pytest.mark.slow\n    @pytest.mark.promise("a", "b")\n    def test_two(self): ...\n'
        "@pytest.mark.slow\ndef test_three(): ...\n"
    )
    one, two, both = "test_x.py::test_one", "test_x.py::TestAll::test_two", "test_x.py::TestAll"
    assert tool.marked(tmp_path) == {"a": [one, two], "b": [both, two]}
    page = "| 1 | `a` | yes | old |\n| 2 | `c` | no | old |\n"
    assert tool.written(page, {"a": [one]}) == f"| 1 | `a` | yes | `{one}` |\n| 2 | `c` | no | none yet |\n"
