"""Writes the tests that hold each promise into docs/promises.md. Tests are marked `@pytest.mark.promise("name")`.

    python tools/promises.py

`tests/house/test_promises.py` fails where the page and the marks differ.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "promises.md"
NONE_YET = "none yet"
_ROW = re.compile(r"^\| (\d+) \| `([a-z0-9-]+)` \| (.+?) \| (.*?) \|$", re.MULTILINE)


class Promise(NamedTuple):
    """A row of the page."""

    number: int
    name: str
    text: str
    tests: str


def promises(page: str) -> list[Promise]:
    """Return the rows of the page."""
    return [Promise(int(number), *rest) for number, *rest in _ROW.findall(page)]


def marked(tests: Path = ROOT / "tests") -> dict[str, list[str]]:
    """Return the tests that are marked with each promise, as `folder/file.py::test`."""
    found = defaultdict(list)
    for path in sorted(tests.rglob("test_*.py")):
        place = path.relative_to(tests).as_posix()
        for name, test in _marks(ast.parse(path.read_text(encoding="utf-8")).body, place):
            found[name].append(test)
    return dict(found)


def _marks(body: Sequence[ast.stmt], place: str) -> Iterator[tuple[str, str]]:
    for node in body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Attribute) and mark.func.attr == "promise":
                yield from ((ast.literal_eval(name), f"{place}::{node.name}") for name in mark.args)
        if isinstance(node, ast.ClassDef):
            yield from _marks(node.body, f"{place}::{node.name}")


def written(page: str, tests: Mapping[str, Sequence[str]]) -> str:
    """Return the page with the tests of each promise in its last column."""

    def row(found: re.Match[str]) -> str:
        number, name, text, _ = found.groups()
        held = ", ".join(f"`{test}`" for test in tests.get(name, ())) or NONE_YET
        return f"| {number} | `{name}` | {text} | {held} |"

    return _ROW.sub(row, page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), marked()), encoding="utf-8")
