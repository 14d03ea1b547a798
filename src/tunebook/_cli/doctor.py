"""`tunebook doctor`: whether everything is in order here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tunebook._cli._filters import add_book, add_json, open_book
from tunebook._cli._terminal import clean, wrapped
from tunebook._cli._verb import DONE, NO, Verb

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from tunebook._cli._checks import Finding
    from tunebook._cli._terminal import Terminal

_MARKS: Final = {"good": ("✓", "green"), "note": ("·", "dim"), "warning": ("!", "yellow"), "bad": ("✗", "red bold")}
_NAME: Final = 13


def _arguments(parser: ArgumentParser) -> None:
    add_book(parser)
    parser.add_argument("--full", action="store_true", help="read every record too, not only list them")
    add_json(parser)


def _run(options: Namespace, terminal: Terminal) -> int:
    from tunebook._cli._checks import examine  # noqa: PLC0415 - loads everything that can be looked at

    findings = list(examine(open_book(options.book), full=options.full))
    if terminal.json:
        terminal.value([finding._asdict() for finding in findings])
    else:
        for finding in findings:
            _tell(finding, terminal)
    return NO if any(finding.level == "bad" for finding in findings) else DONE


def _tell(finding: Finding, terminal: Terminal) -> None:
    mark, style = _MARKS[finding.level]
    indent = " " * (_NAME + 2)
    room = max(terminal.width - len(indent), 20)
    first, *rest = (line for text in (finding.said, finding.remedy) if text for line in wrapped(clean(text), room))
    terminal.line(f"{terminal.styled(mark, style)} {terminal.styled(f'{finding.what:<{_NAME}}', 'bold')}{first}")
    terminal.lines(indent + line for line in rest)


VERB = Verb(
    "doctor",
    "check the book, the settings and this machine",
    "tunebook doctor",
    _arguments,
    _run,
    "Check that the book can be read and written and is safe to use, what was set aside from it, packs, leases, the "
    "shared book, settings, the accelerator, and what frameworks and devices are here. No framework is imported. Exits "
    "with 1 if something is wrong.",
)
