"""The code and the commands that a page of the docs shows, for tests that run them as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))


class Fence(NamedTuple):
    language: str
    title: str  # the file that the page says it is, or ""
    text: str


def fences(page: Path) -> list[Fence]:
    """Return the blocks of code and output of a page, in order."""
    found = re.findall(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', page.read_text(), re.DOTALL | re.MULTILINE)
    return [Fence(language, title or _named_in_comment(text), text) for language, title, text in found]


def _named_in_comment(text: str) -> str:
    """Return the path that a first line such as `# mykernels/ops.py` names."""
    first = re.match(r"# (\S+/\S+\.py)\n", text)
    return first[1] if first else ""


def commands(page: Path) -> list[str]:
    """Return the commands that a page shows; one that goes on over several lines is one command."""
    lines: list[str] = []
    for fence in fences(page):
        text = fence.text.replace("\\\n", "")
        if fence.language in {"sh", "bash"}:
            lines += [line for line in text.splitlines() if line and not line.startswith("#")]
        elif fence.language in {"console", "text"}:
            lines += [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]
    return lines


def script_of(page: Path) -> str:
    """Return the name of the script with the code that a page puts in no file."""
    return f"{page.stem.replace('-', '_')}_page.py"


def write_files(page: Path, into: Path) -> None:
    """Write the files that a page shows, and its script."""
    for fence in fences(page):
        if fence.language == "python":
            path = into / (fence.title or script_of(page))
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(f"{fence.text}\n")


def run(line: str, cwd: Path, tools: Path) -> subprocess.CompletedProcess[str]:
    """Run shell commands in a folder, with this Python and this tunebook, which another folder makes into commands."""
    for name, start in (("python", ""), ("tunebook", "-m tunebook"), ("pytest", "-m pytest")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {start} "$@"\n')
        (tools / name).chmod(0o755)
    path = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path),
        "COLUMNS": "120",
    }
    return subprocess.run(
        ["bash", "-ec", line],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
