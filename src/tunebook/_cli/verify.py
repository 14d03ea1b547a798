"""`tunebook verify`: whether choices still hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._cli._filters import add_filters, add_json, book_of, filters_of
from tunebook._cli._terminal import Cell, TextColumn, clean
from tunebook._cli._verb import DONE, NO, UsageError, Verb

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator

    from tunebook._base.vocabulary import Problem
    from tunebook._cli._terminal import Terminal
    from tunebook._kernel.kernel import Invocation, Kernel
    from tunebook._selection.selector import ConfigSelectorChain

_COLUMNS: Final = (
    TextColumn("id", style="cyan"),
    TextColumn("kernel", give=2, style="bold", keeps_end=True),
    TextColumn("call", give=2, from_width=70),
    TextColumn("result"),
    TextColumn("", give=2),
)


class _LiveCall(NamedTuple):
    """A call that can be run here, or the reason why not."""

    problem: Problem
    kernel: Kernel[Any, Any] | None = None
    inv: Invocation[Any, Any] | None = None
    reason: str = ""


class _VerifyResult(NamedTuple):
    """What became of it: "holds", "changed", "failed" or "skipped"."""

    problem: Problem
    status: str
    detail: str


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--import",
        dest="modules",
        metavar="MODULE",
        action="append",
        default=[],
        help="import this first: it defines the kernels; may be given several times",
    )
    parser.add_argument(
        "--recording", metavar="FILE", help="the calls that Recording.save wrote, not those of the book"
    )
    parser.add_argument("--budget", metavar="BUDGET", help="for each call, as in 30s or '200 trials'")
    add_filters(parser)
    add_json(parser)


def _run(options: Namespace, terminal: Terminal) -> int:
    from tunebook._cli._modules import import_modules  # noqa: PLC0415 - loads what the user's modules load

    if not options.modules:
        raise UsageError("name the module that defines the kernels, as in --import mykernels")
    import_modules(options.modules)
    calls = list(_recorded(options) if options.recording else _listed(options))
    if not calls:
        terminal.note("nothing that fits")
        return NO
    results = [_verify(call, options.budget) for call in calls]
    _tell(results, terminal)
    return DONE if all(result.status == "holds" for result in results) else NO


def _recorded(options: Namespace) -> Iterator[_LiveCall]:
    from tunebook._kernel.kernel import Invocation  # noqa: PLC0415 - as above
    from tunebook._selection.recording import Recording, concrete  # noqa: PLC0415 - as above

    filters = filters_of(options)
    for call in Recording.load(options.recording):
        problem, kernel = call.problem, call.kernel
        if not filters.takes_kernel(problem.op, problem.device):
            continue
        if kernel is None:
            yield _LiveCall(problem, reason=f"no module defines it; try --import {call.module or 'MODULE'}")
        else:
            args, kwargs = concrete(call.args), concrete(dict(call.kwargs))
            inv: Invocation[Any, Any] = Invocation(
                kernel.op_id, args, kwargs, surroundings=call.surroundings, **call.placement
            )
            yield _LiveCall(problem, kernel, inv)


def _listed(options: Namespace) -> Iterator[_LiveCall]:
    from tunebook._base.errors import TunebookError  # noqa: PLC0415 - as above
    from tunebook._cli._rebuild import rebuilt  # noqa: PLC0415 - as above
    from tunebook._selection.recording import live_kernel  # noqa: PLC0415 - as above
    from tunebook.stores._listing import Catalogue  # noqa: PLC0415 - as above

    store = book_of(options)
    for listed in filters_of(options).pick(Catalogue(store)):
        record = listed.record()
        if record is None:
            continue
        problem, kernel = record.problem, live_kernel(listed.op)
        if kernel is None:
            yield _LiveCall(problem, reason="no module that was imported defines it")
            continue
        kept = _book_of_kernel(kernel)
        if kept != store.where:
            yield _LiveCall(
                problem, reason=f"its kernel keeps what it finds in {kept}; set TUNEBOOK_HOME to {store.where}"
            )
            continue
        try:
            yield _LiveCall(problem, kernel, rebuilt(kernel, problem))
        except TunebookError as error:
            yield _LiveCall(problem, reason=str(error))


def _book_of_kernel(kernel: Kernel[Any, Any]) -> str:
    selector: ConfigSelectorChain[Any] | None = getattr(kernel, "selector", None)
    persistent = None if selector is None else selector.persistent
    return "memory" if persistent is None else persistent.store.where


def _verify(call: _LiveCall, budget: str | None) -> _VerifyResult:
    from tunebook._base.errors import TunebookError  # noqa: PLC0415 - as above

    if call.kernel is None or call.inv is None:
        return _VerifyResult(call.problem, "skipped", call.reason)
    selector: ConfigSelectorChain[Any] | None = getattr(call.kernel, "selector", None)
    if selector is None:
        return _VerifyResult(call.problem, "skipped", "it is run by an Executor of the program's own")
    try:
        verified = selector.verify(call.inv, call.kernel, budget=budget)
    except TunebookError as error:
        return _VerifyResult(call.problem, "failed", str(error))
    status = "holds" if verified.held else "changed"
    return _VerifyResult(call.problem, status, verified.reason)


def _tell(results: list[_VerifyResult], terminal: Terminal) -> None:
    from tunebook._cli._entries import SHORT_ID, key_text  # noqa: PLC0415 - as above
    from tunebook.stores import problem_id  # noqa: PLC0415 - as above

    if terminal.json:
        terminal.value(
            [
                {"id": problem_id(r.problem), "kernel": r.problem.op, "status": r.status, "detail": r.detail}
                for r in results
            ]
        )
        return
    styles = {"holds": "green", "changed": "yellow", "failed": "red", "skipped": "dim"}
    rows = [
        (
            problem_id(r.problem)[:SHORT_ID],
            clean(r.problem.op),
            key_text(r.problem.call_key),
            Cell(r.status, styles[r.status]),
            clean(r.detail.partition("\n")[0]),
        )
        for r in results
    ]
    terminal.table(_COLUMNS, rows)
    counts = {status: sum(r.status == status for r in results) for status in styles}
    terminal.line()
    terminal.line(", ".join(f"{count} {status}" for status, count in counts.items() if count), "dim")


VERB = Verb(
    "verify",
    "measure again whether choices still hold",
    "tunebook verify --import mykernels --kernel 'scale*'",
    _arguments,
    _run,
    "Measure the finalists of entries again, on made-up arrays, and keep each choice that still wins or ties; "
    "where one does not, everything is tuned. Programs do the same by themselves at the first call after an update. "
    "Exits with 1 unless all hold.",
)
