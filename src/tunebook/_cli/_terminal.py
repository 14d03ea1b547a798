"""All output of the command: lines, tables that fit the terminal, colour, JSON, and questions."""

from __future__ import annotations

import json
import shutil
import sys
import unicodedata
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TextIO

from tunebook._base.environment_variables import colour_refused
from tunebook._base.errors import CodecError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_STYLES: Final = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}
_NARROWEST: Final = 4  # a column is never cut below this; the table is then wider than the terminal
_GAP: Final = "  "


class TextColumn(NamedTuple):
    """A column of a table. Columns with the largest `give` lose width first; a column with `give=0` never does.

    Terminals narrower than `from_width` do not show it. `keeps_end`: the last part of a dotted name says most.
    """

    title: str
    align: Literal["left", "right"] = "left"
    give: int = 0
    style: str = ""
    from_width: int = 0
    keeps_end: bool = False


class Terminal:
    """The output of a verb. With `--json`, `json` is True and `out` gets exactly one JSON value."""

    def __init__(
        self, *, out: TextIO | None = None, width: int | None = None, colour: bool | None = None, json: bool = False
    ) -> None:
        self.out: Final = out or sys.stdout
        self.json: Final = json
        self.colour: Final = (self.out.isatty() and not colour_refused()) if colour is None else colour
        # A pipe gets whole lines, unless the variable COLUMNS asks for a width.
        fallback = (80 if self.out.isatty() else 10_000, 24)
        self.width: Final = width or (shutil.get_terminal_size(fallback).columns)

    def styled(self, text: str, style: str) -> str:
        """Return a text in a style ("bold", "red bold", ...); unchanged without colour."""
        if not self.colour or not style or not text:
            return text
        codes = ";".join(_STYLES[name] for name in style.split())
        return f"\x1b[{codes}m{text}\x1b[0m"

    def line(self, text: str = "", style: str = "") -> None:
        self.out.write(f"{self.styled(text, style)}\n")

    def lines(self, texts: Iterable[str]) -> None:
        self.out.writelines(f"{text}\n" for text in texts)

    def note(self, text: str) -> None:
        """Write a line to stderr: for people, not for pipes."""
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def value(self, value: Any) -> None:
        self.out.write(json_text(value, indent=1) + "\n")

    def result(self, value: Any, *lines: str) -> None:
        """Write a JSON value with `--json`, else lines: the first as it is, further lines dimmed."""
        if self.json:
            self.value(value)
            return
        for number, text in enumerate(lines):
            self.line(text, "dim" if number else "")

    def values(self, items: Iterable[Any]) -> None:
        """Write a JSON list item by item, one per line, so that 100,000 items need no memory."""
        before = "["
        for item in items:
            self.out.write(f"{before}\n{json_text(item)}")
            before = ","
        self.out.write("\n]\n" if before == "," else "[]\n")

    def fields(self, pairs: Iterable[tuple[str, str]], indent: str = "") -> None:
        """Write names and texts, one pair per line, aligned and wrapped."""
        listed = list(pairs)
        wide = max((len(name) for name, _ in listed), default=0) + len(_GAP)
        for name, text in listed:
            first, *rest = wrapped(text, max(self.width - len(indent) - wide, 2 * _NARROWEST))
            self.line(f"{indent}{self.styled(f'{name:<{wide}}', 'dim')}{first}")
            self.lines(f"{indent}{' ' * wide}{more}" for more in rest)

    def table(
        self, columns: Sequence[TextColumn], rows: Iterable[Sequence[str | tuple[str, str]]], indent: str = ""
    ) -> None:
        """Write a table of texts, or (text, style), without empty columns; cuts columns on a narrow terminal."""
        styles = [column.style for column in columns]
        whole = [[(c, s) if isinstance(c, str) else c for c, s in zip(row, styles, strict=True)] for row in rows]
        kept = [i for i, c in enumerate(columns) if c.from_width <= self.width and any(row[i][0] for row in whole)]
        columns, listed = [columns[i] for i in kept], [[row[i] for i in kept] for row in whole]
        widths = _widths(columns, listed, self.width - len(indent))
        titles = [_fit(c.title, w, c._replace(keeps_end=False)) for c, w in zip(columns, widths, strict=True)]
        self.line(indent + self.styled(_GAP.join(titles).rstrip(), "dim"))
        for row in listed:
            cells = zip(columns, row, widths, strict=True)
            texts = (self.styled(_fit(text, width, column), style) for column, (text, style), width in cells)
            self.line((indent + _GAP.join(texts)).rstrip())

    def confirm(self, question: str, *, yes: bool) -> bool:
        """Ask before entries are removed, unless `--yes` was given. Returns False if nobody can answer."""
        if yes:
            return True
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            self.note(f"{question} Nobody can answer here: add --yes to do it, or --dry-run to preview it.")
            return False
        sys.stderr.write(f"{question} [y/N] ")
        sys.stderr.flush()
        return sys.stdin.readline().strip().lower() in {"y", "yes"}


def count_text(count: int, one: str, many: str) -> str:
    """Return a number with its noun.

    >>> count_text(1, "entry", "entries"), count_text(6000, "entry", "entries")
    ('1 entry', '6,000 entries')
    """
    return f"{count:,} {one if count == 1 else many}"


def text_width(text: str) -> int:
    """Return how many columns a text takes on a terminal.

    >>> text_width("matmul"), text_width("行列")
    (6, 4)
    """
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def wrapped(text: str, width: int) -> list[str]:
    """Return a text as lines of at most this width, broken at spaces where possible.

    >>> wrapped("block_m=64, block_n=32", 12)
    ['block_m=64,', 'block_n=32']
    """
    import textwrap  # noqa: PLC0415 - loaded late: 3 ms

    # Not at hyphens: people copy names of files and devices from the output.
    wrapper = textwrap.TextWrapper(max(width, 1), break_on_hyphens=False)
    return [line for part in text.splitlines() for line in wrapper.wrap(part) or [""]] or [""]


def json_text(value: Any, indent: int | None = None) -> str:
    r"""Return a JSON value as text that is safe to print: readable in any language, without control characters.

    >>> json_text({"kernel": "行列\x9b2J"})
    '{"kernel": "行列\\u009b2J"}'
    """
    try:
        text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"an entry cannot be printed as JSON: {error}") from error
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def _widths(columns: Sequence[TextColumn], rows: Sequence[Sequence[tuple[str, str]]], room: int) -> list[int]:
    """Return the width of each column, reduced where the table is wider than `room`."""
    widths = [
        max(text_width(c.title), max((text_width(row[i][0]) for row in rows), default=0)) for i, c in enumerate(columns)
    ]
    over = sum(widths) + len(_GAP) * (len(columns) - 1) - room
    for level in sorted({c.give for c in columns if c.give}, reverse=True):
        giving = [i for i, c in enumerate(columns) if c.give == level]
        # The widest column shrinks first, so that no column is cut to nothing while another has plenty.
        while over > 0 and widths[widest := max(giving, key=widths.__getitem__)] > _NARROWEST:
            widths[widest] -= 1
            over -= 1
    return widths


def _fit(text: str, width: int, column: TextColumn) -> str:
    """Return a text cut or padded to a width."""
    if text_width(text) > width:
        kept, used = [], 1
        for c in reversed(text) if column.keeps_end else text:
            used += text_width(c)
            if used > width:
                break
            kept.append(c)
        text = f"…{''.join(reversed(kept))}" if column.keeps_end else f"{''.join(kept)}…"
    space = " " * max(0, width - text_width(text))
    return space + text if column.align == "right" else text + space
