"""The command `tunebook`: which verbs there are, and what their errors become."""

from __future__ import annotations

import os
import sys
import warnings
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from importlib import import_module
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, Final

from tunebook._base.errors import CodecError, DefinitionError, MissingDependency, StoreError, TunebookWarning
from tunebook._cli._terminal import Terminal, clean, wrapped
from tunebook._cli._verb import DONE, NO, UNREADABLE, USAGE, NotFound, UsageError, Verb

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence

GROUPS: Final = (
    ("try it", ("demo",)),
    ("look into the book", ("ls", "show", "explain", "diff", "report", "path", "doctor")),
    ("measure", ("tune", "verify", "fit")),
    ("decide by hand", ("pin", "unpin")),
    ("carry about and tidy up", ("merge", "export", "import", "prune")),
    ("set up", ("completion",)),
)
VERBS: Final = tuple(name for _, names in GROUPS for name in names)

EXIT_CODES: Final = """\
exit codes:
  0  done, or yes
  1  no: nothing was found, it differs, it does not hold, or you said no
  2  the command line is wrong
  3  the book, or a file, could not be read or written"""


def load(name: str) -> Verb:
    """Return a verb; its module is imported now."""
    # `import` is no name for a module that one may want to import.
    verb = import_module(f"tunebook._cli.{'import_' if name == 'import' else name}").VERB
    if not isinstance(verb, Verb):
        raise TypeError(f"tunebook._cli.{name}.VERB is a {type(verb).__name__}")
    return verb


def parser_of(verb: Verb) -> ArgumentParser:
    """Return the parser of one verb."""
    about = verb.description or f"{verb.summary[0].upper()}{verb.summary[1:]}."
    parser = ArgumentParser(
        prog=f"tunebook {verb.name}",
        description="\n".join(wrapped(about, get_terminal_size().columns - 2)),
        epilog=f"example:\n  {verb.example}\n\n{EXIT_CODES}",
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verb.arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in {"-h", "--help", "help"}:
        sys.stdout.write(overview())
        return 0
    if words[0] in {"-V", "--version"}:
        from tunebook import __version__  # noqa: PLC0415 - the package imports nothing of the command

        sys.stdout.write(f"tunebook {__version__}\n")
        return 0
    if words[0] not in VERBS:
        sys.stderr.write(_unknown(words[0]))
        return USAGE
    verb = load(words[0])
    options = parser_of(verb).parse_args(words[1:])
    terminal = Terminal(json=getattr(options, "json", False))
    with warnings.catch_warnings():
        warnings.simplefilter("always", TunebookWarning)
        warnings.showwarning = _shown(terminal)
        return _run(verb, options, terminal)


def _run(verb: Verb, options: Namespace, terminal: Terminal) -> int:
    try:
        code = verb.run(options, terminal)
        terminal.out.flush()
    except (UsageError, DefinitionError, MissingDependency) as error:
        return _failed(terminal, error, USAGE)
    except (StoreError, CodecError) as error:
        return _failed(terminal, error, UNREADABLE)
    except NotFound as error:
        return _failed(terminal, error, NO)
    except BrokenPipeError:
        # `tunebook ls | head`: the reader has seen enough. What is left must go nowhere, or Python complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), terminal.out.fileno())
        return DONE
    except KeyboardInterrupt:
        return _failed(terminal, "stopped", 130)
    return code


def _failed(terminal: Terminal, reason: object, code: int) -> int:
    terminal.note(f"tunebook: {clean_lines(str(reason))}")
    return code


def clean_lines(text: str) -> str:
    """Return a text of several lines without what could steer a terminal."""
    return "\n".join(map(clean, text.splitlines()))


def _shown(terminal: Terminal) -> Callable[..., None]:
    """Return what shows a warning of ours as a line for people, instead of a line of our source."""
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
        if issubclass(category, TunebookWarning):
            terminal.note(f"tunebook: {clean_lines(str(message))}")
        else:
            usual(message, category, *rest)

    return show


def overview() -> str:
    """Return what `tunebook --help` says."""
    lines = ["usage: tunebook VERB [OPTION...]", "", "Looks into the book of tuned kernels, and looks after it."]
    for title, names in GROUPS:
        lines += ["", f"{title}:", *(f"  {name:<10}  {load(name).summary}" for name in names)]
    lines += ["", "`tunebook VERB --help` says more about each, with an example.", "", EXIT_CODES, ""]
    return "\n".join(lines)


def _unknown(word: str) -> str:
    from difflib import get_close_matches  # noqa: PLC0415 - 3 ms for a mistake only

    near = get_close_matches(word, VERBS, n=1, cutoff=0.5)
    hint = f"Did you mean `tunebook {near[0]}`?" if near else f"There are: {', '.join(VERBS)}."
    return f"tunebook: there is no verb {word!r}. {hint}\n"
