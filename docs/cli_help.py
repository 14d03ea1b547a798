"""Writes what each verb's `--help` says into docs/cli.md, between its marks.

Run it after a change: python docs/cli_help.py. A test compares the page with what this would write, so that it cannot
get old.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

PAGE = Path(__file__).with_name("cli.md")
_BLOCK = re.compile(r"(<!-- help: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """Return the page with the help of each verb that it has a mark for."""
    # argparse makes its lines as long as the terminal is wide.
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"
    try:
        return _BLOCK.sub(lambda found: f"{found[1]}```text\n{_help(found[2])}```\n{found[3]}", text)
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


def _help(name: str) -> str:
    from tunebook._cli import overview, parser_of  # noqa: PLC0415 - after the width is set

    return overview() if name == "tunebook" else parser_of(name).format_help()


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
