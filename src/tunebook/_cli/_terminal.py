"""All output of the command: lines, tables that fit the terminal, colour, JSON, and questions."""

from __future__ import annotations

import codecs
import json
import os
import shutil
import sys
import unicodedata
from collections import Counter
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TextIO, TypeAlias

from tunebook._base.environment_variables import colour_refused
from tunebook._base.errors import CodecError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

_STYLES: Final = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}
_NARROWEST: Final = 4  # a column is never cut below this; the table is then wider than the terminal
_USEFUL: Final = 12  # a column that is cut to less than this says little
_GAP: Final = "  "
_Row: TypeAlias = "Sequence[tuple[str, str]]"
# One character for each that an ASCII or Latin-1 stream cannot show, so that tables stay aligned.
_PLAINER: Final = {"✓": "+", "✗": "x", "…": "~", "→": ">", "µ": "u", "━": "=", "·": "."}
_PLAINER_NAME: Final = "tunebook-plainer"


def _plainer(error: UnicodeError) -> tuple[str, int]:
    """Return a replacement for text that a stream cannot encode: a similar sign, a bar as #, or an escape."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    shown = (
        _PLAINER.get(c) or ("#" if "▁" <= c <= "█" else c.encode("ascii", "backslashreplace").decode()) for c in text
    )
    return "".join(shown), error.end


def prepare_streams() -> None:
    """Let standard output and standard error write any text, in whatever encoding the user's terminal has."""
    codecs.register_error(_PLAINER_NAME, _plainer)
    for stream in (sys.stdout, sys.stderr):
        if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
            reconfigure(errors=_PLAINER_NAME)


class TextColumn(NamedTuple):
    """A column of a table. Columns with the largest `give` lose width first; a column with `give=0` never does.

    Terminals narrower than `from_width` do not show it. `keeps_end`: the last part of a dotted name says most, and
    stands alone in a table that would be too wide. A `whole` column is never cut: if it leaves too little room for the
    others, its texts stand below their rows; of several, the last one goes first.
    """

    title: str
    align: Literal["left", "right"] = "left"
    give: int = 0
    style: str = ""
    from_width: int = 0
    keeps_end: bool = False
    whole: bool = False


class Terminal:
    """The output of a verb. With `--json`, `json` is True and `out` gets exactly one JSON value."""

    def __init__(
        self, *, out: TextIO | None = None, width: int | None = None, colour: bool | None = None, json: bool = False
    ) -> None:
        self.out: Final[TextIO | None] = out or sys.stdout  # Python has None for a closed one: `tunebook ls >&-`
        self.json: Final = json
        on_screen = self.out is not None and self.out.isatty()
        self.colour: Final = (on_screen and not colour_refused()) if colour is None else colour
        self.width: Final = width or _width_of(self.out)

    def styled(self, text: str, style: str) -> str:
        """Return a text in a style ("bold", "red bold", ...); unchanged without colour."""
        if not self.colour or not style or not text:
            return text
        codes = ";".join(_STYLES[name] for name in style.split())
        return f"\x1b[{codes}m{text}\x1b[0m"

    def write(self, text: str) -> None:
        """Write text to the output; `StoreError` if the output is closed or its disk is full."""
        if self.out is None:
            raise StoreError("io", "standard output", "cannot write to standard output: it is closed")
        with self._writing():
            self.out.write(text)

    def flush(self) -> None:
        """Write the buffered output; a failure is a `StoreError`, as in `write`."""
        if self.out is not None:
            with self._writing():
                self.out.flush()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            reason = f"cannot write to standard output: {error.strerror or error}"
            raise StoreError("io", "standard output", reason) from error

    def give_up(self) -> None:
        """Discard the rest of the output: Python writes its buffer at exit, and would complain again."""
        if self.out is not None:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.out.fileno())

    def line(self, text: str = "", style: str = "") -> None:
        self.write(f"{self.styled(text, style)}\n")

    def lines(self, texts: Iterable[str]) -> None:
        self.write("".join(f"{text}\n" for text in texts))

    def note(self, text: str) -> None:
        """Write lines to stderr, if it is open: for people, not for pipes. Wraps them, but none that is indented."""
        if sys.stderr is not None:
            with suppress(OSError):
                width = _width_of(sys.stderr)
                for line in text.splitlines():
                    # People copy commands, which are indented.
                    whole = line.startswith(" ") or len(line) <= width
                    sys.stderr.write("\n".join([line] if whole else wrapped(line, width)) + "\n")
                sys.stderr.flush()

    def value(self, value: Any) -> None:
        self.write(json_text(value, indent=1) + "\n")

    def result(self, value: Any, *lines: str) -> None:
        """Write a JSON value with `--json`, else lines: the first as it is, further lines dimmed."""
        if self.json:
            self.value(value)
            return
        for number, text in enumerate(lines):
            for line in [text] if len(text) <= self.width else wrapped(text, self.width, hanging="    "):
                self.line(line, "dim" if number else "")

    def values(self, items: Iterable[Any]) -> None:
        """Write a JSON list item by item, one per line, so that 100,000 items need no memory."""
        before = "["
        for item in items:
            self.write(f"{before}\n{json_text(item)}")
            before = ","
        self.write("\n]\n" if before == "," else "[]\n")

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
        cells = [[(c, s) if isinstance(c, str) else c for c, s in zip(row, styles, strict=True)] for row in rows]
        kept = [i for i, c in enumerate(columns) if c.from_width <= self.width and any(row[i][0] for row in cells)]
        room = self.width - len(indent)
        if sum(_natural([columns[i] for i in kept], [[row[i] for i in kept] for row in cells])) - len(_GAP) > room:
            cells = _without_modules(columns, cells)
        below: list[int] = []
        for i in [i for i in reversed(kept) if columns[i].whole]:
            if not _fits([columns[k] for k in kept], cells, kept, room):
                below, kept = [i, *below], [k for k in kept if k != i]
        shown, listed = [columns[i] for i in kept], [[row[i] for i in kept] for row in cells]
        widths = _widths(shown, listed, room)
        titles = [_fit(c.title, w, c._replace(keeps_end=False)) for c, w in zip(shown, widths, strict=True)]
        self.line(indent + self.styled(_GAP.join(titles).rstrip(), "dim"))
        hanging = f"{indent}{2 * _GAP}"
        for row, all_cells in zip(listed, cells, strict=True):
            triples = zip(shown, row, widths, strict=True)
            texts = (self.styled(_fit(text, width, column), style) for column, (text, style), width in triples)
            self.line((indent + _GAP.join(texts)).rstrip())
            for text, style in (all_cells[i] for i in below):
                lines = wrapped(text, self.width - len(hanging)) if text else []
                self.lines(hanging + self.styled(line, style) for line in lines)

    def confirm(self, question: str, *, yes: bool) -> bool:
        """Ask before entries are removed, unless `--yes` was given. Returns False if nobody can answer."""
        if yes:
            return True
        if not all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr)):
            self.note(f"{question} Nobody can answer here: add --yes to do it, or --dry-run to preview it.")
            return False
        sys.stderr.write(f"{question} [y/N] ")
        sys.stderr.flush()
        return sys.stdin.readline().strip().lower() in {"y", "yes"}


def _width_of(stream: TextIO | None) -> int:
    """Return the width for a stream: a pipe gets whole lines, unless the variable COLUMNS asks for a width."""
    fallback = (80 if stream is not None and stream.isatty() else 10_000, 24)
    return shutil.get_terminal_size(fallback).columns


@contextmanager
def writing_output(path: Path) -> Iterator[None]:
    """Turn an `OSError` of the block, which writes the file of --output, into a `StoreError` that says why."""
    try:
        yield
    except OSError as error:
        missing = not path.parent.is_dir()
        why = f"the directory {path.parent} does not exist" if missing else error.strerror or error
        raise StoreError("io", str(path), f"--output {path}: {why}") from error


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


def wrapped(text: str, width: int, *, hanging: str = "") -> list[str]:
    """Return a text as lines of at most this width, broken at spaces where possible; `hanging` begins further lines.

    >>> wrapped("block_m=64, block_n=32", 12)
    ['block_m=64,', 'block_n=32']
    """
    import textwrap  # noqa: PLC0415 - loaded late: 3 ms

    # Not at hyphens, as people copy names of files and devices from the output; unless a word is cut anyhow.
    cut = any(len(word) > width for word in text.split())
    wrapper = textwrap.TextWrapper(max(width, len(hanging) + 1), break_on_hyphens=cut, subsequent_indent=hanging)
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


def _without_modules(columns: Sequence[TextColumn], rows: Sequence[_Row]) -> list[list[tuple[str, str]]]:
    """Return the rows with dotted names without their modules, except names that would then be the same."""
    shown: list[dict[str, str]] = []
    for i, column in enumerate(columns):
        parts = [text.partition("@") for text in {row[i][0] for row in rows}] if column.keeps_end else []
        short = {"".join(part): f"{part[0].rpartition('.')[2]}{part[1]}{part[2]}" for part in parts}
        count = Counter(short.values())
        shown.append({whole: name for whole, name in short.items() if count[name] == 1})
    return [[(names.get(text, text), style) for names, (text, style) in zip(shown, row, strict=True)] for row in rows]


def _natural(columns: Sequence[TextColumn], rows: Sequence[_Row]) -> list[int]:
    """Return the width that each column needs, its distance to the next column included."""
    texts = ([column.title, *(row[i][0] for row in rows)] for i, column in enumerate(columns))
    return [max(map(text_width, each)) + len(_GAP) for each in texts]


def _widths(columns: Sequence[TextColumn], rows: Sequence[_Row], room: int) -> list[int]:
    """Return the width of each column, reduced where the table is wider than `room`."""
    widths = [width - len(_GAP) for width in _natural(columns, rows)]
    over = sum(widths) + len(_GAP) * (len(columns) - 1) - room
    for level in sorted({c.give for c in columns if c.give}, reverse=True):
        giving = [i for i, c in enumerate(columns) if c.give == level]
        # The widest column shrinks first, so that no column is cut to nothing while another has plenty.
        while over > 0 and widths[widest := max(giving, key=widths.__getitem__)] > _NARROWEST:
            widths[widest] -= 1
            over -= 1
    return widths


def _fits(columns: Sequence[TextColumn], rows: Sequence[_Row], at: Sequence[int], room: int) -> bool:
    """Return whether a table fits with its `whole` columns, and the other columns still tell its rows apart."""
    picked = [[row[i] for i in at] for row in rows]
    natural, widths = _widths(columns, picked, 1 << 20), _widths(columns, picked, room)
    if sum(widths) + len(_GAP) * (len(widths) - 1) > room:
        return False
    for i, (column, width, wide) in enumerate(zip(columns, widths, natural, strict=True)):
        texts = {row[i][0] for row in picked} if width < wide else set()
        if width < min(wide, _USEFUL) or len({_fit(text, width, column) for text in texts}) < len(texts):
            return False
    return True


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
