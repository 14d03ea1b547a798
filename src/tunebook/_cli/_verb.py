"""The parts of a verb: each module of `_cli` without an underscore has one, `VERB`."""

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
    """One verb, with an example that works on any book. Help shows `about`.

    `shared` names the options that it shares with other verbs (see `_filters`); `arguments` adds its own.
    """

    example: str
    run: Callable[[Namespace, Terminal], int]
    shared: tuple[str, ...]
    arguments: Callable[[ArgumentParser], None] | None = None
    about: str | None = None


class UsageError(Exception):
    """The command line cannot be carried out; the message says what to type instead."""

    def __init__(self, message: str, code: int = USAGE) -> None:
        super().__init__(message)
        self.code: Final = code


class NotFound(Exception):  # noqa: N818 - named after the event, as the other exceptions of tunebook are
    """No entry matches; the message names similar entries."""
