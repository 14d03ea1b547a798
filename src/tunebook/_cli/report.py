"""Write a report: one HTML page with gains over the defaults, tunings in detail and a table of all entries.

A name that ends in .png gives a picture of the main charts. Exits with 1, and writes nothing, if no entry matches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tunebook._cli._filters import FILTERS, book_to_read, filters_of, size_text
from tunebook._cli._terminal import count_text
from tunebook._cli._verb import DONE, NO, ArgumentParser, Namespace, Terminal, UsageError, Verb
from tunebook._report import report_on
from tunebook.stores._files import writing

_OUTPUT: Final = "tunebook-report.html"


def _arguments(parser: ArgumentParser) -> None:
    text = f"file to write, .html or .png (default: {_OUTPUT})"
    parser.add_argument("-o", "--output", metavar="PATH", default=_OUTPUT, help=text)
    parser.add_argument("--title", metavar="TEXT", help="title of the report")
    parser.add_argument("--open", action="store_true", help="open the report in the browser")


def _run(options: Namespace, terminal: Terminal) -> int:
    path = Path(options.output).expanduser()
    if path.suffix.lower() not in {".html", ".png"}:
        raise UsageError(f"--output {options.output}: the name of a report must end in .html or .png")
    if not path.parent.is_dir():
        raise UsageError(f"--output {options.output}: there is no directory {path.parent}")
    store = book_to_read(options)
    filters = filters_of(options)
    made = report_on(filters.records(store) if filters.any_given else store.items(), store.where, options.title)
    count = len(made.model.entries)
    if not count:
        terminal.note(f"nothing to report on in {store.where}; tune something, or use fewer filters")
        return NO
    with writing(str(path)):
        made.save(path)
    size, entries = path.stat().st_size, count_text(count, "entry", "entries")
    terminal.result({"path": str(path), "entries": count, "bytes": size}, f"{path}: {entries}, {size_text(size)}")
    if options.open:
        import webbrowser  # noqa: PLC0415 - loaded late: 10 ms

        webbrowser.open(path.resolve().as_uri())
    return DONE


VERB = Verb("tunebook report --kernel 'matmul*' --output matmul.html", _run, (*FILTERS, "json"), _arguments, __doc__)
