"""Run a command on tunebook in all its Python processes, without an edit: it tunes their Triton kernels.

Takes over the kernels of every library that uses triton.autotune, and the operations of ejkernel. Choices go to the
book, where the next run finds them. Kernels that use tunebook on their own (tunable functions, tables, kernels of an
Executor) are not changed: --mode, --book, --record and the summary are for them too, the other options are not. Works
for scripts, modules, console scripts, torchrun, pytest, shell scripts, and the processes that they start; not for
Python processes with the options -E, -I or -S, nor for programs that replace PYTHONPATH. Prints a summary to standard
error at the end. Exits with the exit code of the command, with 128 plus the number of the signal that ended it, or with
127 if there is no such command.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from argparse import REMAINDER
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, get_args

from tunebook._base.environment_variables import Mode, RunOptions, environment_with, settings_under
from tunebook._base.errors import clean
from tunebook._cli._terminal import count_text
from tunebook._cli._verb import ArgumentParser, Namespace, Terminal, UsageError, Verb
from tunebook._report.run_log import LOG, RunEvent, read_log
from tunebook._selection.recording import merge_recordings
from tunebook._tuning.job import parse_budget
from tunebook._tuning.progress import seconds_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

STARTUP: Final = str(Path(__file__).with_name("_startup"))
# Signals that somebody may send to this process and mean for the command.
_PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_ID_DIGITS: Final = 12  # of an id that a person types
_SHOWN: Final = 3  # lines of one kind in the summary
_NOT_EXECUTABLE: Final = 126  # exit codes, as shells have them
_NOT_FOUND: Final = 127
_FROM_KEYS: Final = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGHUP})


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("command", metavar="-- COMMAND", nargs=REMAINDER, help="the command with its arguments")
    text = "how the processes use the book, as TUNEBOOK_MODE; frozen tunes nothing (default: normal)"
    parser.add_argument("--mode", choices=get_args(Mode), help=text)
    text = "time that each process may tune for, e.g. 10m; unknown launches then run with the first configuration"
    parser.add_argument("--budget", metavar="TIME", help=text)
    add_packages(parser, "take over only kernels of these packages, e.g. fla,mylib (default: all)")
    parser.add_argument("--book", metavar="DIRECTORY", help="the book to use, as TUNEBOOK_HOME (default: your own)")
    text = "write the calls of all kernels, Triton's or not, to this file for `tunebook tune`, and tune nothing now"
    parser.add_argument("--record", metavar="FILE", help=text)
    text = "tune in the launches of the program, so that it never stands still (default: tune at the first launch)"
    parser.add_argument("--live", action="store_true", help=text)
    parser.add_argument("--quiet", action="store_true", help="print no summary")


def _run(options: Namespace, terminal: Terminal) -> int:
    command = command_of(options.command, "tunebook run -- python train.py")
    if options.budget is not None and parse_budget(options.budget).seconds is None:
        raise UsageError(f"--budget {options.budget}: write a time, e.g. 30s or 10m")
    if options.live and options.budget is not None:
        raise UsageError("--live takes no --budget: its limit is a slow-down of 2 %; leave one of them out")
    home = None if options.book is None else str(Path(options.book).expanduser().absolute())
    with folder_of_run() as folder:
        recorded = options.record is not None
        asked = RunOptions(str(folder), packages_of(options), options.budget, record=recorded, live=options.live)
        code = execute(command, settings_under(asked, STARTUP, mode=options.mode, home=home))
        if options.record is not None:
            count = merge_recordings(sorted(folder.glob("calls-*.json")), options.record)
            then = f"; next: tunebook tune {quote(options.record)}" if count else ""
            terminal.note(f"tunebook: recorded {count_text(count, 'call', 'calls')} in {options.record}{then}")
        if not options.quiet:
            for number, line in enumerate(summary(read_log(folder / LOG))):
                terminal.note(line if number else f"tunebook: {line}")
    return code


def add_packages(parser: ArgumentParser, text: str) -> None:
    """Add the option --packages."""
    parser.add_argument("--packages", metavar="NAME,NAME", action="append", help=text)


def packages_of(options: Namespace) -> tuple[str, ...] | None:
    """Return the packages whose kernels are taken over, by the option --packages; None is all."""
    return None if options.packages is None else tuple(filter(None, ",".join(options.packages).split(",")))


@contextmanager
def folder_of_run() -> Iterator[Path]:
    """Make a folder with an empty log, and remove it at the end of the block."""
    with TemporaryDirectory(prefix="tunebook-run-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / LOG).touch()
        yield folder


def command_of(words: Sequence[str], example: str) -> list[str]:
    """Return the command to run; `UsageError` with an example if it is missing or not found."""
    command = [*words[1:]] if words[:1] == ["--"] else [*words]
    if not command:
        raise UsageError(f"the command is missing; e.g. {example}")
    if shutil.which(command[0]) is None:
        if command[0] in ("-m", "-c") or command[0].endswith(".py"):
            return [sys.executable, *command]
        raise UsageError(f"{command[0]}: command not found; e.g. {example}", _NOT_FOUND)
    return command


def execute(command: Sequence[str], settings: Mapping[str, str], *, stdout: int | None = None) -> int:
    """Run a command with more variables and return its exit code. Signals to this process are sent to the command."""
    waiting: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: object) -> None:
        if number in _FROM_KEYS and _is_in_foreground():
            return  # the terminal has sent it to the command too
        if process is None:
            waiting.append(number)
        else:
            process.send_signal(number)

    with _handled_by(pass_on):
        try:
            process = subprocess.Popen(command, env=environment_with(settings), stdout=stdout)  # noqa: S603 - the user's own command
        except OSError as error:
            raise UsageError(f"{command[0]}: {error.strerror}", _NOT_EXECUTABLE) from error
        for number in waiting:
            process.send_signal(number)
        code = process.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def _handled_by(handler: Any) -> Iterator[None]:
    with ExitStack() as handled:
        # Python allows handlers in the main thread only. An ignored signal, as under nohup, stays ignored.
        for number in _PASSED_ON if threading.current_thread() is threading.main_thread() else ():
            if signal.getsignal(number) is not signal.SIG_IGN:
                handled.callback(signal.signal, number, signal.signal(number, handler))
        yield


def _is_in_foreground() -> bool:
    """Return whether keys of the terminal send signals to this process group, of which the command is a part."""
    with suppress(OSError):
        descriptor = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
        try:
            return os.tcgetpgrp(descriptor) == os.getpgrp()
        finally:
            os.close(descriptor)
    return False


def summary(events: Iterable[RunEvent]) -> Iterator[str]:
    """Yield the lines for the user: kernels and problems of all processes, and which command shows more.

    >>> for line in summary([RunEvent("tuned", 1, "fla.gla@v0", "1f2e", 2.5, "")]):
    ...     print(line)
    1 kernel ran on tunebook, in 1 process
      tuned    1 problem in 2.5 s; slowest: fla.gla@v0 2.5 s
      more     tunebook explain 1f2e; tunebook ls
    """
    told = list(events)
    by: dict[str, dict[str, RunEvent]] = {}
    for event in told:
        by.setdefault(event.what, {})[event.problem or event.kernel] = event
    kernels = {event.kernel for event in told if event.what != "left"}
    if not told:
        yield "no kernel ran on tunebook; `tunebook run --help` says which programs can be taken over"
        return
    processes = count_text(len({event.process for event in told}), "process", "processes")
    yield f"{count_text(len(kernels), 'kernel', 'kernels')} ran on tunebook, in {processes}"
    tunings = sorted((e for e in told if e.what == "tuned"), key=lambda event: -event.seconds)
    tuned, failed, left = by.get("tuned", {}), by.get("failed", {}), by.get("left", {})
    if tunings:
        spent = seconds_text(sum(e.seconds for e in told))
        slowest = ", ".join(f"{clean(e.kernel)} {seconds_text(e.seconds)}" for e in tunings[:_SHOWN])
        yield f"  tuned    {_problems(tuned)} in {spent}; slowest: {slowest}"
    if found := by.get("found", {}).keys() - tuned:
        rungs = Counter(by["found"][problem].why for problem in found)
        trusted = ", ".join(f"{count} trusted as {rung}" for rung, count in sorted(rungs.items()) if rung)
        yield f"  found    {_problems(found)} in the book{f', {clean(trusted)}' if trusted else ''}"
    if guessed := by.get("guessed", {}).keys() - tuned:
        yield f"  guessed  {_problems(guessed)} ran untuned, with the heuristic or the first candidate"
    for title, those in (("failed", failed), ("left", left)):
        for event in list(those.values())[:_SHOWN]:
            yield f"  {title:<8} {clean(event.kernel)}: {clean(event.why)}"
        if len(those) > _SHOWN:
            yield f"  {title:<8} and {len(those) - _SHOWN} more"
    if tuned or found:
        example = f"tunebook explain {tunings[0].problem[:_ID_DIGITS]}; " if tunings else ""
        yield f"  more     {example}tunebook ls"


def _problems(found: Collection[str]) -> str:
    return count_text(len(found), "problem", "problems")


VERB = Verb("tunebook run -- python train.py", _run, (), _arguments, __doc__)
