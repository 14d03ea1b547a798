"""`tunebook demo`: a kernel is tuned before your eyes, and a second process finds the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunebook._cli._verb import DONE, Verb

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from tunebook._cli._terminal import Terminal


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--keep", metavar="DIRECTORY", help="keep the book here; by default it is thrown away")


def _run(options: Namespace, terminal: Terminal) -> int:
    from tunebook._cli._demonstration import demonstrate  # noqa: PLC0415 - it tunes

    demonstrate(options.keep, terminal)
    return DONE


VERB = Verb(
    "demo",
    "tune a small kernel now, and show how",
    "tunebook demo",
    _arguments,
    _run,
    "Tune a sieve of Eratosthenes in plain Python, show what was tried and why one was chosen, and let a second "
    "process find the answer. Takes a few seconds, needs nothing installed, and leaves your own book alone.",
)
