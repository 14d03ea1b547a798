"""`tunebook path`: where the book is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunebook._cli._filters import add_book, add_json, open_book
from tunebook._cli._verb import DONE, Verb

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from tunebook._cli._terminal import Terminal


def _arguments(parser: ArgumentParser) -> None:
    add_book(parser)
    add_json(parser)


def _run(options: Namespace, terminal: Terminal) -> int:
    where = open_book(options.book).where
    if terminal.json:
        terminal.value({"path": where})
    else:
        terminal.line(where)
    return DONE


VERB = Verb(
    "path",
    "print where the book is",
    "du -sh $(tunebook path)",
    _arguments,
    _run,
    "Print where the book is. TUNEBOOK_HOME moves it.",
)
