"""Tune the calls of a recording on each device of this machine, or on a cluster.

Skips calls that are tuned already, takes expensive calls first, and measures on made-up arrays. Workers import the
modules that the calls name. Results are merged into the book as they arrive, so that an interrupted run continues where
it stopped. Exits with 1 unless every call is tuned at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tunebook._base.errors import Unsupported
from tunebook._cli._entries import key_text, results_table
from tunebook._cli._filters import add_import, add_options, import_modules, open_book
from tunebook._cli._terminal import clean
from tunebook._cli._verb import DONE, NO, ArgumentParser, Namespace, Terminal, UsageError, Verb
from tunebook._tuning.progress import seconds_text
from tunebook.fleet import tune_recording
from tunebook.stores import problem_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from tunebook.fleet import FarmResult, FarmStep

_STYLES: Final = {"tuned": "green", "known": "dim", "new": "cyan", "failed": "red", "skipped": "yellow"}


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("recording", metavar="RECORDING", help="a recording, written by Recording.save")
    parser.add_argument(
        "--over",
        metavar="WHERE",
        default="local",
        help="local (default: each GPU of this machine, and its processor), or a cluster, e.g. dask://host:port; "
        "docs/fleet-tuning.md lists the kinds",
    )
    parser.add_argument("--budget", metavar="BUDGET", help="limit for all calls together, e.g. 10m or '500 trials'")
    parser.add_argument("--kernel", metavar="GLOB", default="*", help="only calls of matching kernels, e.g. 'matmul*'")
    parser.add_argument("--device", metavar="GLOB", default="*", help="only calls recorded on these devices, e.g. h200")
    add_import(parser, "module that workers import first; only for kernels whose calls do not name their module")
    text = "problems per device at a time; with 2, one compiles while the other measures (default: 1)"
    parser.add_argument("--at-once", metavar="N", type=int, default=1, help=text)
    parser.add_argument("--watch", action="store_true", help="print progress while tuning")
    add_options(parser, "dry-run", "book", "json")


def _run(options: Namespace, terminal: Terminal) -> int:
    import_modules(())  # adds the working directory to the path, which workers inherit
    try:
        report = tune_recording(
            options.recording,
            over=options.over,
            budget=options.budget,
            modules=options.modules,
            kernel=options.kernel,
            device=options.device,
            book=open_book(options.book) if "://" in (options.book or "") else options.book,
            at_once=options.at_once,
            dry_run=options.dry_run,
            on_step=_watch(terminal) if options.watch else None,
        )
    except Unsupported as error:
        raise UsageError(str(error)) from None
    if not report.results:
        terminal.note("no call of the recording matches")
        return NO
    if terminal.json:
        terminal.value([_as_json(result) for result in report.results])
    else:
        results_table(((r.problem, r.status, r.seconds, r.detail) for r in report.results), _STYLES, terminal)
        counts = ", ".join(f"{count} {status}" for status, count in report.counts.items())
        terminal.line(f"{counts}, in {seconds_text(report.seconds)}", "dim")
    good = {"tuned", "known", "new"} if options.dry_run else {"tuned", "known"}
    return DONE if report.counts.keys() <= good else NO


def _watch(terminal: Terminal) -> Callable[[FarmStep], None]:
    def show(step: FarmStep) -> None:
        result = step.latest
        if result is not None:
            call = f"{result.problem.op} {key_text(result.problem.call_key)}"
            took = f", {seconds_text(result.seconds)}" if result.seconds else ""
            said = f"{result.status} {call}{took}{f': {result.detail}' if result.detail else ''}"
            terminal.note(f"[{step.done}/{step.total}] {clean(said.partition(chr(10))[0])}")

    return show


def _as_json(result: FarmResult) -> dict[str, Any]:
    return {
        "id": problem_id(result.tuned_as),
        "kernel": result.problem.op,
        "call_key": result.problem.call_key,
        "device": result.tuned_as.device,
        "status": result.status,
        "detail": result.detail,
        "worker": result.worker,
        "measured": result.ran,
        "seconds": result.seconds,
        "tries": result.tries,
    }


VERB = Verb("tunebook tune calls.json --budget 10m --watch", _arguments, _run, __doc__)
