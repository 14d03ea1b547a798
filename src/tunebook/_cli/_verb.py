"""What a verb of the command is made of.

A verb is a module `_cli/<name>.py` with one `VERB`, loaded when it is asked for. At its top it imports nothing that is
slow: `tunebook --help` loads them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable

    from tunebook._cli._terminal import Terminal

# What the command ends with. argparse exits with 2 by itself.
DONE: Final = 0
NO: Final = 1
USAGE: Final = 2
UNREADABLE: Final = 3


class Verb(NamedTuple):
    """One verb. `run` returns the exit code: `DONE`, or `NO` if nothing was found, or it differs or does not hold.

    `summary` is a half sentence for the list of verbs, `example` a command line that works on any book; `description`
    is the paragraph that help shows. `run` raises `UsageError` for what argparse could not see, and lets `StoreError`
    out: both become an exit code in one place.
    """

    name: str
    summary: str
    example: str
    arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace, Terminal], int]
    description: str = ""


class UsageError(Exception):
    """The command line asks for something that cannot be; the message says what to type instead."""


class NotFound(Exception):  # noqa: N818 - named after what happened, as in the exceptions of the library
    """Nothing in the book is what was asked for; the message says what is there."""
