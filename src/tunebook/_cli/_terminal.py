"""The one place that writes to the terminal: lines, tables as wide as it is, colour where it helps, JSON, questions."""

from __future__ import annotations

import json
import shutil
import sys
import unicodedata
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TextIO

from tunebook._base.environment_variables import colour_refused

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_STYLES: Final = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}
_NARROWEST: Final = 4  # a column is never cut below this; the table is then wider than the terminal
_GAP: Final = "  "


class TextColumn(NamedTuple):
    """A column of a table. `give` says how readily it gives up width: 0 never; more is sooner.

    On a terminal narrower than `from_width` it is left out. What is cut off is the end, or the beginning if the column
    `keeps_end`: of a dotted name, the last part says most.
    """

    title: str
    align: Literal["left", "right"] = "left"
    give: int = 0
    style: str = ""
    from_width: int = 0
    keeps_end: bool = False


class Cell(NamedTuple):
    """A cell with a style of its own."""

    text: str
    style: str = ""


class Terminal:
    """Where a verb writes. `json` is whether `--json` was given: then nothing but one JSON value goes to `out`."""

    def __init__(
        self,
        *,
        out: TextIO | None = None,
        err: TextIO | None = None,
        source: TextIO | None = None,
        width: int | None = None,
        colour: bool | None = None,
        json: bool = False,
    ) -> None:
        self.out: Final = out or sys.stdout
        self.err: Final = err or sys.stderr
        self._source: Final = source or sys.stdin
        self.json: Final = json
        self.interactive: Final = self._source.isatty() and self.err.isatty()
        self.colour: Final = (self.out.isatty() and not colour_refused()) if colour is None else colour
        # What is read by a program must not be cut to the width of a terminal that is not there.
        self.width: Final = width or (shutil.get_terminal_size().columns if self.out.isatty() else _columns_given())

    def styled(self, text: str, style: str) -> str:
        """Return a text in a style ("bold", "red bold", ...), or as it is where there is no colour."""
        if not self.colour or not style or not text:
            return text
        codes = ";".join(_STYLES[name] for name in style.split())
        return f"\x1b[{codes}m{text}\x1b[0m"

    def line(self, text: str = "", style: str = "") -> None:
        """Write one line."""
        self.out.write(f"{self.styled(text, style)}\n")

    def lines(self, texts: Iterable[str]) -> None:
        """Write many lines."""
        self.out.writelines(f"{text}\n" for text in texts)

    def note(self, text: str) -> None:
        """Write one line beside the output, to stderr: what a person should know and a pipe should not get."""
        self.err.write(f"{text}\n")
        self.err.flush()

    def value(self, value: Any) -> None:
        """Write one JSON value."""
        self.out.write(json.dumps(value, indent=1, ensure_ascii=False) + "\n")

    def values(self, items: Iterable[Any]) -> None:
        """Write a JSON list as its items come, one per line, so that 100,000 of them need no memory."""
        before = "["
        for item in items:
            self.out.write(f"{before}\n{json.dumps(item, ensure_ascii=False)}")
            before = ","
        self.out.write("\n]\n" if before == "," else "[]\n")

    def fields(self, pairs: Iterable[tuple[str, str]], indent: str = "") -> None:
        """Write names and what they are, one per line, aligned and wrapped."""
        listed = list(pairs)
        names = max((text_width(name) for name, _ in listed), default=0)
        for name, text in listed:
            head = f"{indent}{self.styled(_padded(name, names, 'left'), 'dim')}{_GAP}"
            room = max(self.width - len(indent) - names - len(_GAP), 2 * _NARROWEST)
            first, *rest = wrapped(text, room)
            self.line(f"{head}{first}")
            self.lines(f"{indent}{' ' * (names + len(_GAP))}{more}" for more in rest)

    def table(self, columns: Sequence[TextColumn], rows: Iterable[Sequence[str | Cell]], indent: str = "") -> None:
        """Write a table; columns that give way are cut where the terminal is too narrow, and marked by an ellipsis."""
        kept = [i for i, column in enumerate(columns) if column.from_width <= self.width]
        columns = [columns[i] for i in kept]
        listed = [[_cell(row[i], columns[at].style) for at, i in enumerate(kept)] for row in rows]
        room = self.width - len(indent)
        widths = _fitted(columns, listed, room)
        titles = [_padded(_cut(c.title, w), w, c.align) for c, w in zip(columns, widths, strict=True)]
        self.line(indent + self.styled(_GAP.join(titles).rstrip(), "dim"))
        for row in listed:
            self.line((indent + _GAP.join(self._cells(columns, row, widths))).rstrip())

    def _cells(self, columns: Sequence[TextColumn], row: Sequence[Cell], widths: Sequence[int]) -> Iterator[str]:
        for column, cell, width in zip(columns, row, widths, strict=True):
            text = _cut(cell.text[::-1], width)[::-1] if column.keeps_end else _cut(cell.text, width)
            yield self.styled(_padded(text, width, column.align), cell.style)

    def confirm(self, question: str, *, yes: bool) -> bool:
        """Ask before something is taken away; `yes` is `--yes`. Without a person to ask, the answer is no."""
        if yes:
            return True
        if not self.interactive:
            self.note(f"{question} Nobody is here to ask; add --yes to do it, or --dry-run to see what it would do.")
            return False
        self.err.write(f"{question} [y/N] ")
        self.err.flush()
        return self._source.readline().strip().lower() in {"y", "yes"}


def text_width(text: str) -> int:
    """Return how many columns a text takes on a terminal.

    >>> text_width("matmul"), text_width("行列")
    (6, 4)
    """
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def wrapped(text: str, width: int) -> list[str]:
    """Return a text as lines of at most this width, broken at spaces where there are any.

    >>> wrapped("block_m=64, block_n=32", 12)
    ['block_m=64,', 'block_n=32']
    """
    import textwrap  # noqa: PLC0415 - 3 ms with the regular expressions that it compiles

    # Not at hyphens: names of files and devices have some, and are copied from what is shown.
    wrapper = textwrap.TextWrapper(max(width, 1), break_on_hyphens=False)
    return [line for part in text.splitlines() for line in wrapper.wrap(part) or [""]] or [""]


def clean(text: str) -> str:
    r"""Return a text without what could steer a terminal: names and messages in a book were written by anybody.

    >>> clean("matmul\x1b[2J")
    'matmul\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _columns_given() -> int:
    """Return the width that a script asks for with COLUMNS, else one that cuts nothing."""
    return shutil.get_terminal_size((10_000, 24)).columns


def _cell(given: str | Cell, style: str) -> Cell:
    return given if isinstance(given, Cell) else Cell(given, style)


def _fitted(columns: Sequence[TextColumn], rows: Sequence[Sequence[Cell]], room: int) -> list[int]:
    """Return the width of each column: what it needs, less what must be given up to fit."""
    widths = [
        max(text_width(c.title), max((text_width(row[i].text) for row in rows), default=0))
        for i, c in enumerate(columns)
    ]
    over = sum(widths) + len(_GAP) * (len(columns) - 1) - room
    for level in sorted({c.give for c in columns if c.give}, reverse=True):
        giving = [i for i, c in enumerate(columns) if c.give == level]
        while over > 0:
            widest = max(giving, key=lambda i: widths[i])
            if widths[widest] <= _NARROWEST:
                break
            # The widest gives first, down to the next widest: nobody is cut to nothing while another has plenty.
            others = [widths[i] for i in giving if i != widest]
            floor = max(_NARROWEST, min(widths[widest] - 1, max(others, default=0)))
            taken = min(over, widths[widest] - floor)
            widths[widest] -= taken
            over -= taken
    return widths


def _padded(text: str, width: int, align: str) -> str:
    space = " " * max(0, width - text_width(text))
    return space + text if align == "right" else text + space


def _cut(text: str, width: int) -> str:
    if text_width(text) <= width:
        return text
    kept, used = [], 1
    for c in text:
        used += text_width(c)
        if used > width:
            break
        kept.append(c)
    return f"{''.join(kept)}…"
