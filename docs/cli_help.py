"""Writes what each verb's `--help` says into docs/cli.md, and the variables into docs/environment.md, between marks.

Run it after a change: python docs/cli_help.py. A test compares the pages with what this would write, so that they never
get old.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tunebook._base.environment_variables import SETTINGS

PAGES = [Path(__file__).with_name(name) for name in ("cli.md", "environment.md")]
_TABLE = re.compile(r"(<!-- settings -->\n).*?(<!-- end -->)", re.DOTALL)
_BLOCK = re.compile(r"(<!-- help: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """Return a page with the help of each verb, and the table of variables, if it has marks for them."""
    text = _TABLE.sub(lambda found: f"{found[1]}\n{_settings()}\n\n{found[2]}", text)
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


def _settings() -> str:
    rows = [f"| `{s.name}` | {s.values} | {s.default} | {s.meaning} |" for s in SETTINGS]
    return "\n".join(["| variable | values | without it | what it does |", "| --- | --- | --- | --- |", *rows])


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
