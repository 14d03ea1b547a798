"""Counts the files of a directory that a format reads without loss, and prints the reasons for the others.

    python tools/count_tables.py vllm ~/vllm/vllm/model_executor/layers/fused_moe/configs

A file is read without loss if its records, written again, make a file of the same name and content.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tunebook import TunebookError, formats


def loss(name: str, file: Path) -> str:
    """Return why a file is not read without loss; "" if it is."""
    with TemporaryDirectory() as place:
        try:
            target = Path(place, file.name)
            formats.write(name, formats.read(name, file), target)
            files = [found for found in target.parent.rglob("*") if found.is_file()]
        except TunebookError as error:
            return str(error).replace(str(file), "it")
        written = [found for found in files if found.name == file.name]
        if not written:
            return f"written under another name: {', '.join(found.name for found in files) or 'nothing'}"
        return "" if _content(written[0]) == _content(file) else "written with another content"


def _content(file: Path) -> Any:
    """Return the values of a file, without its layout: the order of names, spaces, empty tables, the last digits."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".csv":
        return sorted(line.rstrip() for line in text.splitlines())
    return _plain(json.loads(text))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items() if item != {}}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def main(name: str, directory: str) -> str:
    """Return the count and the reasons, as text."""
    files = sorted(file for file in Path(directory).rglob("*") if file.suffix in (".json", ".csv") and file.is_file())
    reasons: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        if reason := loss(name, file):
            reasons[reason].append(file)
    left = sum(map(len, reasons.values()))
    lines = [f"{name}: {len(files) - left} of {len(files)} files are read without loss"]
    for reason, found in sorted(reasons.items(), key=lambda item: -len(item[1])):
        lines.append(f"  {len(found)}  {reason[:300]}\n       first: {found[0].relative_to(directory)}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
