"""Take the outputs that the README and the docs show again, on this machine.

    python docs/outputs.py [PAGE ...]

A block of output whose title is a command of its page is replaced by the output of that command. All code before it on
the page runs first, in a new folder with a book of its own. Run it on a quiet machine.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from doc_pages import PAGES, README, commands, fences, run, write_files  # noqa: E402 - after the path to it


def main() -> None:
    """Take the outputs of the given pages, or of all."""
    given = {Path(name).resolve() for name in sys.argv[1:]}
    for page in (README, *PAGES):
        if page in given or not given:
            take(page)


def take(page: Path) -> None:
    """Replace the outputs of a page."""
    shown = {fence.title: fence.text for fence in fences(page) if fence.language == "text" and fence.title}
    if not shown:
        return
    with tempfile.TemporaryDirectory(prefix="tunebook-outputs-") as folder, tempfile.TemporaryDirectory() as tools:
        os.environ["TUNEBOOK_HOME"] = f"{folder}/tunebook"
        write_files(page, Path(folder))
        text = page.read_text()
        for line in commands(page):
            command = line.partition("  #")[0].rstrip()
            if command.startswith(("pip ", "python3 -m venv")):
                continue
            done = run(command, Path(folder), Path(tools))
            if command in shown:
                done.check_returncode()
                printed = done.stdout.replace(folder, "~/.cache").rstrip("\n") + "\n"
                text = text.replace(shown.pop(command), printed)
                print(f"{page.name}: {command}\n{printed}")
            if not shown:
                break
    page.write_text(text)
    if shown:
        sys.exit(f"{page}: no command of the page is {', '.join(shown)}")


if __name__ == "__main__":
    main()
