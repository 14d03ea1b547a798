"""Print the path of the book. Set TUNEBOOK_HOME to move it."""

from __future__ import annotations

from tunebook._cli._filters import open_book
from tunebook._cli._verb import DONE, Namespace, Terminal, Verb


def _run(options: Namespace, terminal: Terminal) -> int:
    where = open_book(options.book).where
    terminal.result({"path": where}, where)
    return DONE


VERB = Verb("du -sh $(tunebook path)", _run, ("book", "json"), about=__doc__)
