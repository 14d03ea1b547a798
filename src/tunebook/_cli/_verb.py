"""The parts of a verb. A verb is a module `_cli/<name>.py` with one `VERB`; its docstring is the text of its help."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Final, NamedTuple

from tunebook._cli._terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "DONE", "NO", "UNREADABLE", "USAGE", "ArgumentParser", "Namespace", "NotFound", "Terminal", "UsageError", "Verb",
]  # fmt: skip

# Exit codes. argparse exits with 2 on its own.
DONE: Final = 0
NO: Final = 1
USAGE: Final = 2
UNREADABLE: Final = 3


class Verb(NamedTuple):
    """One verb. `run` returns `DONE`, or `NO` if nothing was found, the books differ or a choice does not hold.

    `example` is a command line that works on any book, `about` the paragraph that help shows. `run` raises `UsageError`
    for mistakes that argparse cannot see. `main` turns `UsageError` and `StoreError` into exit codes.
    """

    example: str
    arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace, Terminal], int]
    about: str | None


class UsageError(Exception):
    """The command line cannot be carried out; the message says what to type instead."""


class NotFound(Exception):  # noqa: N818 - named after the event, as the other exceptions of tunebook are
    """No entry matches; the message names similar entries."""
