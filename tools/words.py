"""Counts phrases that make our sentences hard to read; `make lint` fails where a folder has too many.

    python tools/words.py [--show FOLDER]

Three habits are counted in docstrings, messages, comments and pages: "what" or "who" in the place of a noun, pronouns
far from their noun, and "is no" in the place of "invalid" or "missing". equinox and optuna score about 1.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
LIMIT = 3.0  # per 1000 words
HABITS = re.compile(
    r"\b(?:what|whoever|who)\b"
    r"|\b(?:those|such a|such|the ones?|of one|as one)\b"
    r"|\b(?:is|are|was|be) (?:no|none)\b",
    re.IGNORECASE,
)
MESSAGE_WORDS = 4  # a string of fewer words is a name or a key


class Text(NamedTuple):
    """A piece of prose; `folder` is where it counts."""

    folder: str
    path: Path
    line: int
    words: str


def prose() -> Iterator[Text]:
    """Yield every docstring, message and comment of the source, and every paragraph of the pages."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        folder = str(path.parent.relative_to(ROOT / "src"))
        for line, words in (*strings_of(path), *comments_of(path)):
            yield Text(folder, path, line, words)
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md")]):
        for line, words in paragraphs_of(page):
            yield Text(str(page.parent.relative_to(ROOT)), page, line, words)


def strings_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the strings of a module that are sentences: docstrings, messages, help texts."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) >= MESSAGE_WORDS:
            yield node.lineno, node.value


def comments_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments of a module."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def paragraphs_of(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page that are not code."""
    code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code:
            yield number, re.sub(r"`[^`]*`", "code", line)


def main() -> int:
    """Print the rate of each folder, and return 1 if one is over the limit."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--show", metavar="FOLDER", help="print each sentence that is counted in a folder")
    show = options.parse_args().show
    words: dict[str, int] = defaultdict(int)
    hits: dict[str, int] = defaultdict(int)
    for text in prose():
        words[text.folder] += len(text.words.split())
        found = HABITS.findall(text.words)
        hits[text.folder] += len(found)
        if found and text.folder == show:
            print(f"{text.path.relative_to(ROOT)}:{text.line}: {', '.join(found)}: {' '.join(text.words.split())}")
    rates = {folder: 1000 * hits[folder] / words[folder] for folder in words if words[folder]}
    too_many = [folder for folder, rate in rates.items() if rate > LIMIT]
    for folder in rates if show is None else ():
        print(f"{folder:32s} {words[folder]:7d} words {rates[folder]:5.1f} per 1000")
    for folder in too_many:
        print(f"{folder}: over {LIMIT} per 1000; see them with: python tools/words.py --show {folder}", file=sys.stderr)
    return 1 if too_many else 0


if __name__ == "__main__":
    sys.exit(main())
