"""`tunebook tune`: the calls of a recording, on this machine's devices or on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tunebook._cli._filters import add_book, add_json, open_book
from tunebook._cli._terminal import Cell, TextColumn, clean
from tunebook._cli._verb import DONE, NO, UsageError, Verb

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable

    from tunebook._cli._terminal import Terminal
    from tunebook.fleet import FarmReport, FarmResult, FarmStep

_COLUMNS: Final = (
    TextColumn("kernel", give=2, style="bold", keeps_end=True),
    TextColumn("call", give=2, from_width=70),
    TextColumn("result"),
    TextColumn("took", align="right"),
    TextColumn("", give=2),
)
_STYLES: Final = {"tuned": "green", "known": "dim", "new": "cyan", "failed": "red", "skipped": "yellow"}


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("recording", metavar="RECORDING", help="the calls, as Recording.save wrote them")
    parser.add_argument(
        "--over",
        metavar="WHERE",
        default="local",
        help="local (the default: each GPU of this machine, and its processor), dask://host:port, ray://auto, "
        "ray://host:port, or mpi",
    )
    parser.add_argument("--budget", metavar="BUDGET", help="for all calls together, as in 10m or '500 trials'")
    parser.add_argument("--kernel", metavar="GLOB", default="*", help="calls of these kernels, as in 'matmul*'")
    parser.add_argument("--device", metavar="GLOB", default="*", help="calls recorded on such devices, as in h200")
    parser.add_argument(
        "--import",
        dest="modules",
        metavar="MODULE",
        action="append",
        default=[],
        help="workers import this first; only needed for kernels whose calls do not name the module that defines them",
    )
    parser.add_argument(
        "--at-once",
        metavar="N",
        type=int,
        default=1,
        help="problems per device at a time; with 2, one compiles while the other measures",
    )
    parser.add_argument("--watch", action="store_true", help="say what happens, as it does")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be tuned")
    add_book(parser)
    add_json(parser)


def _run(options: Namespace, terminal: Terminal) -> int:
    from tunebook._base.errors import Unsupported  # noqa: PLC0415 - as above
    from tunebook._cli._modules import import_modules  # noqa: PLC0415 - only when it runs
    from tunebook.fleet import tune_recording  # noqa: PLC0415 - as above

    import_modules(())  # none, but the working directory: processes that are started here have this one's path
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
        terminal.note("no call of the recording fits")
        return NO
    _tell(report, terminal)
    good = {"tuned", "known", "new"} if options.dry_run else {"tuned", "known"}
    return DONE if report.counts.keys() <= good else NO


def _watch(terminal: Terminal) -> Callable[[FarmStep], None]:
    from tunebook._cli._entries import key_text  # noqa: PLC0415 - as above
    from tunebook._tuning.progress import seconds_text  # noqa: PLC0415 - as above

    def show(step: FarmStep) -> None:
        result = step.latest
        if result is not None:
            call = f"{result.problem.op} {key_text(result.problem.call_key)}"
            took = seconds_text(result.seconds) if result.seconds else "at once"
            said = f"{result.status} {call}, {took}{f': {result.detail}' if result.detail else ''}"
            terminal.note(f"[{step.done}/{step.total}] {clean(said.partition(chr(10))[0])}")

    return show


def _tell(report: FarmReport, terminal: Terminal) -> None:
    if terminal.json:
        terminal.value([_as_json(result) for result in report.results])
        return
    from tunebook._cli._entries import key_text  # noqa: PLC0415 - as above
    from tunebook._tuning.progress import seconds_text  # noqa: PLC0415 - as above

    rows = [
        (
            clean(result.problem.op),
            key_text(result.problem.call_key),
            Cell(result.status, _STYLES[result.status]),
            seconds_text(result.seconds) if result.seconds else "",
            clean(result.detail.partition("\n")[0]),
        )
        for result in report.results
    ]
    terminal.table(_COLUMNS, rows)
    terminal.line()
    counts = ", ".join(f"{count} {status}" for status, count in report.counts.items())
    terminal.line(f"{counts}, in {seconds_text(report.seconds)}", "dim")


def _as_json(result: FarmResult) -> dict[str, Any]:
    from tunebook.stores import problem_id  # noqa: PLC0415 - as above

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


VERB = Verb(
    "tune",
    "tune the calls of a recording, here or on a cluster",
    "tunebook tune calls.json --budget 10m --watch",
    _arguments,
    _run,
    "Tune the calls of a recording that are not known yet, the most expensive first, on made-up arrays: on each device "
    "of this machine, or on a cluster. Workers import the modules that the calls name. What is found is merged into "
    "the book as it comes, so that a run that was interrupted goes on where it was. Exits with 1 unless every call is "
    "tuned or known then.",
)
