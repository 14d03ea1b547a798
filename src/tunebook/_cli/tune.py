"""Tune the calls of a recording on each device of this machine, or on a cluster.

Skips calls that are tuned already, unless --again is given; takes expensive calls first, and measures on made-up
arguments: of the kernel's inputs= function, or else recorded integers and random floats. A choice that was made on a
program's own arguments stays: tunebook.tune(..., again=True) in the program replaces it. Workers import the modules
that the calls name. Results are merged into the book as they arrive, so that an interrupted run continues where it
stopped; a tuning that the budget ended is "unfinished", and goes on then. Exits with 1 unless every call is tuned at
the end.

The candidates of all Triton kernels are compiled first, on all cores. With --target this is all that happens, and it
needs no GPU: it fills Triton's cache for a machine with one.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from tunebook._base.errors import DefinitionError, Unsupported, clean
from tunebook._cli._entries import key_text, named
from tunebook._cli._filters import Filters, open_book
from tunebook._cli._results import add_import, find_modules_here, write_table
from tunebook._cli._verb import DONE, NO, ArgumentParser, Namespace, Terminal, UsageError, Verb
from tunebook._selection.recorded_decision import is_interrupted
from tunebook._selection.recording import saved_calls
from tunebook._tuning.progress import seconds_text
from tunebook.fleet import FarmReport, FarmResult, FarmStep, compile_recording, tune_recording
from tunebook.stores import problem_id

if TYPE_CHECKING:
    from tunebook.stores import Store


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("recording", metavar="RECORDING", help="a recording, written by Recording.save")
    text = "local (default: each GPU of this machine, and its processor), or a cluster, e.g. dask://host:port; "
    parser.add_argument("--over", metavar="WHERE", default="local", help=f"{text}docs/fleet-tuning.md lists the kinds")
    parser.add_argument("--budget", metavar="BUDGET", help="limit for all calls together, e.g. 10m or '500 trials'")
    text = "only calls of matching kernels, e.g. 'matmul*'; repeatable"
    parser.add_argument("--kernel", metavar="GLOB", action="append", default=[], help=text)
    text = "only calls recorded on these devices, e.g. h200; repeatable"
    parser.add_argument("--device", metavar="GLOB", action="append", default=[], help=text)
    add_import(parser, "module that workers import first; only for kernels whose calls do not name their module")
    text = "problems per device at a time; with 2, one compiles while the other measures (default: 1)"
    parser.add_argument("--at-once", metavar="N", type=int, default=1, help=text)
    text = "only compile the candidates of Triton kernels, for e.g. cuda:90 (H100, H200) or hip:gfx942; needs no GPU"
    parser.add_argument("--target", metavar="TARGET", help=text)
    text = "tune known calls too: measure all their candidates anew"
    parser.add_argument("--again", action="store_true", help=text)
    parser.add_argument("--watch", action="store_true", help="print progress while tuning")


def _compile(options: Namespace) -> FarmReport:
    given = (
        ("--over", "--budget", "--dry-run", "--again"),
        (options.over != "local", options.budget, options.dry_run, options.again),
    )
    if unused := [name for name, value in zip(*given, strict=True) if value]:
        raise UsageError(f"--target measures nothing, and takes no {', '.join(unused)}")
    names = {"modules": options.modules, "kernel": options.kernel or "*", "device": options.device or "*"}
    return compile_recording(options.recording, options.target, **names)


def _write(report: FarmReport, options: Namespace, terminal: Terminal) -> None:
    if terminal.json:
        listed = []
        for r in report.results:
            place = {"id": problem_id(r.tuned_as), "device": r.tuned_as.device, "worker": r.worker}
            result = {"status": r.status, "detail": r.detail, "measured": r.ran, "seconds": r.seconds, "tries": r.tries}
            listed.append({**named(r.problem), **place, **result, "complete": r.complete})
        terminal.value(listed)
    else:
        # The seconds of a dry run are those of a look, not of a tuning.
        results = [(r.problem, _status(r), 0.0 if options.dry_run else r.seconds, r.detail) for r in report.results]
        counts = ", ".join(f"{count} {status}" for status, count in Counter(each[1] for each in results).items())
        programs, seconds = report.compilation.programs, report.compilation.seconds
        compiled = f"; {programs} programs compiled in {seconds_text(seconds)} of it" if programs else ""
        if options.target:
            compiled = f"; {programs} programs for {options.target} are in Triton's cache, and nothing was measured"
        write_table(results, f"{counts}, in {seconds_text(report.seconds)}{compiled}", terminal)


def _run(options: Namespace, terminal: Terminal) -> int:
    done: list[FarmResult] = []

    def show(step: FarmStep) -> None:
        if (result := step.latest) is None:
            return
        done.append(result)
        if options.watch:
            call = f"{result.problem.op} {key_text(result.problem.call_key)}"
            took = f", {seconds_text(result.seconds)}" if result.seconds else ""
            said = f"{_status(result)} {call}{took}{f': {result.detail}' if result.detail else ''}"
            terminal.note(f"[{step.done}/{step.total}] {clean(said.partition(chr(10))[0])}")

    began_s = time.monotonic()
    find_modules_here()
    if options.kernel or options.device:
        there = [(call.problem.op, call.problem.device) for call in saved_calls(options.recording)]
        Filters(tuple(options.kernel), tuple(options.device)).warn_of_misses(there, options.recording)
    try:
        report = (
            _compile(options)
            if options.target
            else tune_recording(
                options.recording,
                over=options.over,
                budget=options.budget,
                modules=options.modules,
                kernel=options.kernel or "*",
                device=options.device or "*",
                book=open_book(options.book) if "://" in (options.book or "") else options.book,
                at_once=options.at_once,
                dry_run=options.dry_run,
                again=options.again,
                on_step=show,
            )
        )
    except (DefinitionError, Unsupported) as error:
        raise UsageError(str(error)) from None
    except KeyboardInterrupt:
        if done:
            _write(FarmReport(tuple(done), time.monotonic() - began_s), options, terminal)
        raise
    if options.dry_run:
        report = _with_begun(report, open_book(options.book))
    if not report.results:
        empty = not saved_calls(options.recording)
        terminal.note(f"{options.recording} has no calls" if empty else "no call of the recording matches")
        return NO
    _write(report, options, terminal)
    good = {"tuned", "known", "new", "unfinished"} if options.dry_run else {"tuned", "known", "compiled"}
    return DONE if {_status(result) for result in report.results} <= good else NO


def _status(result: FarmResult) -> str:
    return result.status if result.complete else "unfinished"


def _with_begun(report: FarmReport, store: Store) -> FarmReport:
    """Return the report of a dry run, in which a new problem is not complete if the book has a part of its tuning."""
    marked = []
    for result in report.results:
        record = store.get(result.tuned_as) if result.status == "new" else None
        begun = record is not None and (record.is_unfinished or is_interrupted(record))
        marked.append(result._replace(complete=not begun))
    return report._replace(results=tuple(marked))


VERB = Verb("tunebook tune calls.json --budget 10m --watch", _run, ("dry-run", "book", "json"), _arguments, __doc__)
