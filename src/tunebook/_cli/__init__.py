"""The command `tunebook`: its verbs, and the exit code of each error."""

from __future__ import annotations

import sys
import warnings
from argparse import Action, ArgumentParser, RawDescriptionHelpFormatter
from importlib import import_module
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, Final, NoReturn

from tunebook._base.environment_variables import check_settings
from tunebook._base.errors import (
    CodecError,
    DefinitionError,
    MissingDependency,
    StoreError,
    TunebookWarning,
    clean_lines,
)
from tunebook._cli._terminal import Terminal, prepare_streams, wrapped
from tunebook._cli._verb import DONE, NO, UNREADABLE, USAGE, NotFound, UsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence

    from tunebook._cli._verb import Verb

# The verbs with their summaries: `tunebook --help` loads no verb.
GROUPS: Final = {
    "try it": {"demo": "tune a small kernel and show how it works"},
    "look into the book": {
        "ls": "list the entries",
        "show": "show one entry with all its candidates",
        "explain": "explain why a kernel gets its configuration",
        "diff": "compare two books, or two entries",
        "report": "write an HTML page with tables and charts",
        "path": "print the path of the book",
        "doctor": "check the book, the settings and this machine",
    },
    "measure": {
        "run": "run a command: tune its Triton kernels, or record any kernel",
        "tune": "tune the calls of a recording, here or on a cluster",
        "ci": "check that a book covers a command or a recording",
        "verify": "measure again to check that choices still hold",
        "fit": "learn a heuristic from tuned entries",
    },
    "choose by hand": {
        "pin": "set the configuration of an entry by hand",
        "unpin": "return to the measured winner",
    },
    "exchange and clean up": {
        "merge": "merge other books into this one",
        "pack": "write tuned entries to ship with a library",
        "export": "write entries to a file, for another machine",
        "import": "read entries from a file",
        "rm": "remove entries that you name",
        "prune": "remove old or unused entries",
    },
    "set up": {"completion": "print a completion script for a shell"},
}
SUMMARIES: Final = {name: summary for verbs in GROUPS.values() for name, summary in verbs.items()}
VERBS: Final = tuple(SUMMARIES)

EXIT_CODES: Final = """\
exit codes:
  0  success
  1  nothing found, a difference, a choice that does not hold, or you said no
  2  invalid command line
  3  a book or a file cannot be read or written"""


def load(name: str) -> Verb:
    """Import the module of a verb, and return the verb."""
    # `import` is a keyword of Python, so its module has another name.
    verb: Verb = import_module(f"tunebook._cli.{'import_' if name == 'import' else name}").VERB
    return verb


class _Once(Action):
    """Stores the value of an option; a second value is an error, because the first would be lost in silence."""

    def __call__(self, parser: ArgumentParser, options: Namespace, value: object, given: str | None = None) -> None:
        seen: list[Action] = vars(options).setdefault("seen", [])
        if self in seen:
            parser.error(f"{given} is given twice; give it once")
        if given is not None:
            seen.append(self)
        setattr(options, self.dest, value)


class _Parser(ArgumentParser):
    """A parser whose help goes the way of all output: a closed output or a full disk gives a line and an exit code."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register("action", None, _Once)

    def print_help(self, _file: object = None) -> None:
        terminal = Terminal()
        terminal.write(self.format_help())
        terminal.flush()

    def error(self, message: str) -> NoReturn:
        Terminal().note(f"{self.format_usage()}{self.prog}: error: {message}{self._hint(message)}")
        sys.exit(USAGE)

    def _hint(self, message: str) -> str:
        """Return the option that an unknown one may be a slip of; empty without one."""
        _, unknown, words = message.partition("unrecognized arguments: ")
        given = next((word.partition("=")[0] for word in words.split() if word.startswith("-")), "")
        if not unknown or not given:
            return ""
        from difflib import get_close_matches  # noqa: PLC0415 - loaded late: 3 ms

        # Without their dashes, which all have in common: --foo is not near to --book.
        options = {name.lstrip("-"): name for action in self._actions for name in action.option_strings}
        near = get_close_matches(given.lstrip("-"), options, n=1)
        return f"; did you mean {options[near[0]]}?" if near else f"; `{self.prog} --help` lists the options"


def parser_of(name: str) -> ArgumentParser:
    """Return the parser of a verb."""
    from tunebook._cli._filters import add_options  # noqa: PLC0415 - `tunebook --help` needs no stores

    verb = load(name)
    about = " ".join((verb.about or SUMMARIES[name]).split())
    parser = _Parser(
        prog=f"tunebook {name}",
        description="\n".join(wrapped(about, get_terminal_size().columns - 2)),
        epilog=f"example:\n  {verb.example}",
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if verb.arguments is not None:
        verb.arguments(parser)
    add_options(parser, verb.shared)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    prepare_streams()
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]  # `tunebook help ls`
    return _guarded(Terminal(), lambda: _answer(words))


def _answer(words: list[str]) -> int:
    terminal = Terminal()
    if not words or words[0] in {"-h", "--help"}:
        terminal.write(overview())
        return DONE
    if words[0] in {"-V", "--version"}:
        from tunebook import __version__  # noqa: PLC0415 - the package imports nothing of the command

        terminal.line(f"tunebook {__version__}")
        return DONE
    if words[0].startswith("-"):
        raise UsageError(f"options stand after the verb: tunebook {_verb_first(words)}")
    if words[0] not in VERBS:
        from difflib import get_close_matches  # noqa: PLC0415 - loaded late: 3 ms

        near = get_close_matches(words[0], VERBS, n=1, cutoff=0.5)
        hint = f"Did you mean `tunebook {near[0]}`?" if near else f"The verbs are: {', '.join(VERBS)}."
        raise UsageError(f"unknown verb {words[0]!r}. {hint}")
    options = parser_of(words[0]).parse_args(words[1:])
    return _run(words[0], options, Terminal(json=getattr(options, "json", False)))


def _verb_first(words: list[str]) -> str:
    """Return a command line with its verb before its options; of one without a verb, an example."""
    from shlex import quote  # noqa: PLC0415 - for a mistake only

    verb = next((word for word in words if word in VERBS), "")
    if not verb:
        return f"ls {words[0]} ..."
    words = [verb, *words]
    del words[words.index(verb, 1)]
    return " ".join(map(quote, words))


def _run(name: str, options: Namespace, terminal: Terminal) -> int:
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
        # A warning of ours is a line for people, without the line of our source.
        if issubclass(category, TunebookWarning):
            _complain(terminal, message)
        else:
            usual(message, category, *rest)

    with warnings.catch_warnings():
        warnings.simplefilter("always", TunebookWarning)
        warnings.showwarning = show  # type: ignore[assignment] # `rest` is passed on
        if name != "doctor":  # which lists all settings
            check_settings()
        return load(name).run(options, terminal)


def _guarded(terminal: Terminal, answer: Callable[[], int]) -> int:
    """Return an exit code; an error of the command line, a book, a file or the output becomes one line."""
    try:
        code = answer()
        terminal.flush()
    except (UsageError, DefinitionError, MissingDependency) as error:
        return _complain(terminal, error, error.code if isinstance(error, UsageError) else USAGE)
    except (StoreError, CodecError) as error:
        if isinstance(error, StoreError) and error.path == "standard output":
            terminal.give_up()
        return _complain(terminal, error, UNREADABLE)
    except NotFound as error:
        return _complain(terminal, error, NO)
    except BrokenPipeError:
        terminal.give_up()  # `tunebook ls | head`: the reader has gone
        return DONE
    except KeyboardInterrupt as error:
        return _complain(terminal, "\n".join(["interrupted", *getattr(error, "__notes__", ())]), 130)
    return code


def _complain(terminal: Terminal, message: object, code: int = DONE) -> int:
    from tunebook.stores._files import for_the_command  # noqa: PLC0415 - `tunebook --help` needs no stores

    terminal.note(f"tunebook: {clean_lines(for_the_command(str(message)))}")
    return code


def overview() -> str:
    """Return the text of `tunebook --help`."""
    lines = ["usage: tunebook VERB [OPTION...]", "", "Inspect and manage a book of tuned kernels."]
    for title, verbs in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:<10}  {summary}" for name, summary in verbs.items())]
    lines += ["", "`tunebook help VERB` explains each verb, with an example.", "", EXIT_CODES, ""]
    return "\n".join(lines)
