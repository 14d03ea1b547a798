"""Check that a book covers the kernels of a command, or the calls of a recording, and tune nothing.

Runs the command as `tunebook run` does, in the mode frozen, with its standard output on standard error if --json is
given. A recording is checked without its program, and without its device: the book must have an entry for each call,
made with the versions that are installed here. Exits with the exit code of the command if that fails, and with 1 if a
call is missing in the book, if its entry is further away than --trust allows, or if no kernel ran.
"""

from __future__ import annotations

from argparse import REMAINDER
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args

from tunebook._api.versions import environment_here, versions_differ
from tunebook._arrays.device_families import family_of
from tunebook._base.environment_variables import RunOptions, settings_under
from tunebook._base.errors import clean
from tunebook._base.vocabulary import Trust
from tunebook._cli._entries import SHORT_ID, key_text
from tunebook._cli._filters import existing_book, open_book
from tunebook._cli._terminal import count_text
from tunebook._cli._verb import DONE, NO, ArgumentParser, Namespace, Terminal, UsageError, Verb
from tunebook._cli.run import STARTUP, add_packages, command_of, execute, folder_of_run, packages_of, summary
from tunebook._report.run_log import LOG, RunEvent, read_log, shortfalls
from tunebook._selection.recording import saved_calls
from tunebook._tuning.progress import seconds_text
from tunebook.stores import open_store, problem_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tunebook._base.vocabulary import Problem
    from tunebook.stores import Store

_EXAMPLE: Final = "tunebook ci -- pytest tests/"
_SHOWN: Final = 20  # problems that are named
_STDERR: Final = 2


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("command", metavar="-- COMMAND", nargs=REMAINDER, help="the command with its arguments")
    text = "check the calls of a recording instead, written by `tunebook run --record` or Recording.save"
    parser.add_argument("--recording", metavar="FILE", help=text)
    text = "how far an entry may be from its call, as TUNEBOOK_TRUST (default: exact)"
    parser.add_argument("--trust", choices=get_args(Trust), default="exact", help=text)
    add_packages(parser, "as of `tunebook run`")


def _run(options: Namespace, terminal: Terminal) -> int:
    if options.recording and options.command:
        raise UsageError("give a command or --recording, not both")
    if not options.recording and not options.command:
        raise UsageError(f"give a command, e.g. {_EXAMPLE}, or a recording: tunebook ci --recording calls.json")
    if options.recording:
        code, events = DONE, list(_events_of_recording(options))
        lines = [f"{options.recording}: {count_text(len(events), 'call', 'calls')}"]
    else:
        code, events = _events_of_command(options, to_stderr=terminal.json)
        lines = list(summary(events))
    short = shortfalls(events, options.trust)
    checked = any(event.problem for event in events)
    if terminal.json:
        once = {(event.what, event.problem): event for event in events if event.problem}.values()
        lists = {"problems": [*map(_as_json, once)], "not_covered": [*map(_as_json, short)]}
        terminal.value({"covered": checked and not short, "exit_code": code, **lists})
    else:
        verdict = "the book covers all of them" if checked and not short else "nothing was checked"
        if short:
            verdict = f"the book does not cover {count_text(len(short), 'problem', 'problems')}:"
        lines = [f"tunebook: {lines[0]}", *lines[1:], f"tunebook: {verdict}", *shortfall_lines(short)]
        for line in lines:
            terminal.note(line)
    return code or (DONE if checked and not short else NO)


def _events_of_command(options: Namespace, *, to_stderr: bool) -> tuple[int, list[RunEvent]]:
    """Run the command, and return its exit code and the events of its processes."""
    command = command_of(options.command, _EXAMPLE)
    with folder_of_run() as folder:
        asked = RunOptions(str(folder), packages_of(options))
        # The mode frozen trusts entries up to the same family; without an answer, a kernel may have no configuration.
        trust = options.trust if options.trust in ("near", "any") else None
        home = None if options.book is None else _home(options.book, folder)
        settings = settings_under(asked, STARTUP, mode="frozen", home=home, trust=trust)
        return execute(command, settings, stdout=_STDERR if to_stderr else None), read_log(folder / LOG)


def _home(book: str, folder: Path) -> str:
    """Return a directory for TUNEBOOK_HOME with the entries of a book: its own, or a copy of a pack or a file."""
    store, place = existing_book(book), Path(book).expanduser()
    if place.is_dir():
        return str(place.absolute())
    copy = folder / "book"
    open_store(copy).put_many(list(store.items()))
    return str(copy)


def _events_of_recording(options: Namespace) -> Iterator[RunEvent]:
    """Yield whether a book has an entry for each call of a recording, as events of a process that makes the calls."""
    if options.trust in ("near", "any"):
        raise UsageError(f"--trust {options.trust} needs the program: run it, {_EXAMPLE}")
    store = open_book(None) if options.book is None else existing_book(options.book)
    relatives: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for call in saved_calls(options.recording):
        problem = call.problem
        if problem.op not in relatives:
            decided = (record.problem for record in store.items(problem.op) if record.head.decided)
            relatives[problem.op] = {(there.call_key, family_of(there.device)) for there in decided}
        rung = _rung(store, problem, relatives[problem.op])
        what, why = ("missing", problem.call_key) if rung is None else ("found", rung)
        yield RunEvent(what, 0, problem.op, problem_id(problem), 0.0, why)


def _rung(store: Store, problem: Problem, relatives: set[tuple[str, str]]) -> str | None:
    """Return the rung of trust of the entry for a problem: empty if it is exact; None without an entry."""
    record = store.get(problem)
    if record is not None and record.head.decided:
        there = record.head.environment
        return "versions" if versions_differ(there, environment_here(there)) else ""
    return "family" if (problem.call_key, family_of(problem.device)) in relatives else None


def shortfall_lines(short: Sequence[RunEvent]) -> Iterator[str]:
    """Yield a line for each problem that the book does not cover, up to twenty."""
    for event in short[:_SHOWN]:
        call = f"{clean(event.kernel)} {event.problem[:SHORT_ID]}"
        if event.what in ("guessed", "missing"):
            yield f"  {event.what:<8} {call}: {key_text(event.why)}"
        elif event.what == "found":
            yield f"  found    {call}: its entry is trusted as {clean(event.why)} only"
        else:
            yield f"  {event.what:<8} {call}: {clean(event.why) or seconds_text(event.seconds)}"
    if len(short) > _SHOWN:
        yield f"  and {len(short) - _SHOWN} more"


def _as_json(event: RunEvent) -> dict[str, object]:
    known = {"status": event.what, "kernel": event.kernel, "id": event.problem, "seconds": event.seconds}
    return known | ({"trust": event.why or "exact"} if event.what == "found" else {"detail": event.why})


VERB = Verb(_EXAMPLE, _run, ("book", "json"), _arguments, __doc__)
