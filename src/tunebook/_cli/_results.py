"""The table of results, and the option --import, of `tunebook tune` and `tunebook verify`."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tunebook._base.errors import clean, text_of
from tunebook._cli._entries import ID, KERNEL, SHORT_ID, key_text
from tunebook._cli._terminal import TextColumn
from tunebook._cli._verb import UsageError
from tunebook._tuning.progress import seconds_text
from tunebook.stores import problem_id

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tunebook._base.vocabulary import Problem
    from tunebook._cli._verb import ArgumentParser, Terminal

STYLES: Final = {
    "tuned": "green",
    "known": "dim",
    "new": "cyan",
    "compiled": "green",
    "holds": "green",
    "changed": "yellow",
    "kept": "yellow",
    "failed": "red",
    "skipped": "yellow",
    "unfinished": "yellow",
}
# Errors of a module's own classes keep their traceback.
_RAISED: Final = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, OSError, RuntimeError,
    SyntaxError, TypeError, ValueError,
)  # fmt: skip
_COLUMNS: Final = (
    ID,
    KERNEL,
    TextColumn("call", give=2, from_width=70),
    TextColumn("result"),
    TextColumn("took", "right", from_width=60),
    TextColumn("", whole=True),
)


def write_table(results: Iterable[tuple[Problem, str, float, str]], summary: str, terminal: Terminal) -> None:
    """Write a table of problems with their status, seconds and detail."""
    rows, told = [], set[str]()
    for problem, status, seconds, detail in results:
        names = problem_id(problem)[:SHORT_ID], clean(problem.op), key_text(problem.call_key)
        took = seconds_text(seconds) if seconds else ""
        said = clean(detail.partition("\n")[0])
        # Many calls may fail for one reason, and it is long.
        again = status == "failed" and said in told
        told.add(said)
        rows.append((*names, (status, STYLES[status]), took, "as above" if again else said))
    terminal.table(_COLUMNS, rows)
    terminal.line(f"\n{summary}", "dim")


def add_import(parser: ArgumentParser, text: str) -> None:
    """Add the option --import."""
    parser.add_argument("--import", dest="modules", metavar="MODULE", action="append", default=[], help=text)


def import_modules(names: Iterable[str]) -> None:
    """Import the modules of --import, whose output goes to standard error; `UsageError` if one is missing or raises."""
    find_modules_here()
    for name in names:
        try:
            with redirect_stdout(sys.stderr):  # the result of the verb alone goes to pipes
                import_module(name)
        except _RAISED as error:
            # The name is wrong only if this module is missing; a module that is missing inside of it has another name.
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing is None or not f"{name}.".startswith(f"{missing}."):
                raise UsageError(f"importing {name} failed: {_said_by(error, name)}") from None
            raise UsageError(f"no module named {name!r} here; write its name as in `import {name}`") from None


def _said_by(error: Exception, name: str) -> str:
    """Return the class and the first line of an error, and the line of the imported module that it came through."""
    kind, text = type(error).__name__, text_of(error).partition("\n")[0]
    place, top = "", name.partition(".")[0]
    passed = error.__traceback__
    while passed is not None:
        if str(passed.tb_frame.f_globals.get("__name__")).partition(".")[0] == top:
            place = f" ({passed.tb_frame.f_code.co_filename}, line {passed.tb_lineno})"
        passed = passed.tb_next
    return (kind if text == kind else f"{kind}: {text}") + place


def find_modules_here() -> None:
    """Add the working directory to the path, as `python -m` does; workers inherit it."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
