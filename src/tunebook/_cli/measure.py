"""Tune the calls of a recording, verify the entries of a book by measuring again, and learn from them."""

from __future__ import annotations

import json
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from tunebook._api.function_kernel import FunctionKernel
from tunebook._arrays.library import ArraySpec, materialise
from tunebook._base.errors import TunebookError, UnkeyableError, Unsupported
from tunebook._cli._entries import ID, KERNEL, SHORT_ID, find, key_text, named
from tunebook._cli._filters import FILTERS, book_of, filters_of, open_book
from tunebook._cli._terminal import TextColumn, clean
from tunebook._cli._verb import DONE, NO, ArgumentParser, Namespace, Terminal, UsageError, Verb
from tunebook._kernel.kernel import Invocation
from tunebook._selection.recording import Recording, concrete, live_kernel
from tunebook._tuning.progress import seconds_text
from tunebook.fleet import tune_recording
from tunebook.search._learned_heuristic import fit_book
from tunebook.stores import problem_id
from tunebook.stores._files import writing
from tunebook.stores._listing import Catalogue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tunebook._base.vocabulary import Json, Problem
    from tunebook._kernel.kernel import Kernel
    from tunebook.fleet import FarmStep

    # A problem, and the call that has it here or the reason why it cannot run here.
    _LiveCall: TypeAlias = tuple[Problem, tuple[Kernel[Any, Any], Invocation[Any, Any]] | str]

_STYLES: Final = {
    "tuned": "green",
    "known": "dim",
    "new": "cyan",
    "holds": "green",
    "changed": "yellow",
    "failed": "red",
    "skipped": "yellow",
}
_COLUMNS: Final = (
    ID,
    KERNEL,
    TextColumn("call", give=2, from_width=70),
    TextColumn("result"),
    TextColumn("took", "right", from_width=60),
    TextColumn("", give=2),
)


def _table(results: Iterable[tuple[Problem, str, float, str]], summary: str, terminal: Terminal) -> None:
    """Write a table of problems with their status, seconds and detail."""
    rows = []
    for problem, status, seconds, detail in results:
        names = problem_id(problem)[:SHORT_ID], clean(problem.op), key_text(problem.call_key)
        took = seconds_text(seconds) if seconds else ""
        rows.append((*names, (status, _STYLES[status]), took, clean(detail.partition("\n")[0])))
    terminal.table(_COLUMNS, rows)
    terminal.line(f"\n{summary}", "dim")


def _add_import(parser: ArgumentParser, text: str) -> None:
    parser.add_argument("--import", dest="modules", metavar="MODULE", action="append", default=[], help=text)


def _find_modules_here() -> None:
    """Add the working directory to the path, as `python -m` does; workers inherit it."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)


def _tune_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("recording", metavar="RECORDING", help="a recording, written by Recording.save")
    text = "local (default: each GPU of this machine, and its processor), or a cluster, e.g. dask://host:port; "
    parser.add_argument("--over", metavar="WHERE", default="local", help=f"{text}docs/fleet-tuning.md lists the kinds")
    parser.add_argument("--budget", metavar="BUDGET", help="limit for all calls together, e.g. 10m or '500 trials'")
    parser.add_argument("--kernel", metavar="GLOB", default="*", help="only calls of matching kernels, e.g. 'matmul*'")
    parser.add_argument("--device", metavar="GLOB", default="*", help="only calls recorded on these devices, e.g. h200")
    _add_import(parser, "module that workers import first; only for kernels whose calls do not name their module")
    text = "problems per device at a time; with 2, one compiles while the other measures (default: 1)"
    parser.add_argument("--at-once", metavar="N", type=int, default=1, help=text)
    parser.add_argument("--watch", action="store_true", help="print progress while tuning")


def _tune(options: Namespace, terminal: Terminal) -> int:
    """Tune the calls of a recording on each device of this machine, or on a cluster.

    Skips calls that are tuned already, takes expensive calls first, and measures on made-up arrays. Workers import the
    modules that the calls name. Results are merged into the book as they arrive, so that an interrupted run continues
    where it stopped. Exits with 1 unless every call is tuned at the end.
    """

    def show(step: FarmStep) -> None:
        if (result := step.latest) is not None:
            call = f"{result.problem.op} {key_text(result.problem.call_key)}"
            took = f", {seconds_text(result.seconds)}" if result.seconds else ""
            said = f"{result.status} {call}{took}{f': {result.detail}' if result.detail else ''}"
            terminal.note(f"[{step.done}/{step.total}] {clean(said.partition(chr(10))[0])}")

    _find_modules_here()
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
            on_step=show if options.watch else None,
        )
    except Unsupported as error:
        raise UsageError(str(error)) from None
    if not report.results:
        terminal.note("no call of the recording matches")
        return NO
    if terminal.json:
        listed = []
        for r in report.results:
            place = {"id": problem_id(r.tuned_as), "device": r.tuned_as.device, "worker": r.worker}
            result = {"status": r.status, "detail": r.detail, "measured": r.ran, "seconds": r.seconds, "tries": r.tries}
            listed.append({**named(r.problem), **place, **result})
        terminal.value(listed)
    else:
        counts = ", ".join(f"{count} {status}" for status, count in report.counts.items())
        results = ((r.problem, r.status, r.seconds, r.detail) for r in report.results)
        _table(results, f"{counts}, in {seconds_text(report.seconds)}", terminal)
    good = {"tuned", "known", "new"} if options.dry_run else {"tuned", "known"}
    return DONE if report.counts.keys() <= good else NO


def _verify_arguments(parser: ArgumentParser) -> None:
    _add_import(parser, "module that defines the kernels; may be given several times")
    parser.add_argument("--recording", metavar="FILE", help="verify the calls of a recording, not of the book")
    parser.add_argument("--budget", metavar="BUDGET", help="limit for each call, e.g. 30s or '200 trials'")


def _verify(options: Namespace, terminal: Terminal) -> int:
    """Measure the finalists of entries again, and keep each choice that still wins or ties.

    Measures on made-up arrays. If a choice does not hold, all candidates are tuned again. Programs do the same on their
    own, at the first call after an update. Exits with 1 unless all choices hold.
    """
    if not options.modules:
        raise UsageError("name the module that defines the kernels, e.g. --import mykernels")
    _find_modules_here()
    for name in options.modules:
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            # The command line is wrong only if this module is missing; a broken import inside it must show itself.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise UsageError(f"no module named {name!r} here; write its name as in `import {name}`") from None
    calls = list(_recorded_calls(options) if options.recording else _calls_of_book(options))
    if not calls:
        terminal.note("no matching call")
        return NO
    results = [(problem, *_verify_call(call, options.budget)) for problem, call in calls]
    if terminal.json:
        rows = [(problem_id(p), p.op, status, detail) for p, status, detail in results]
        terminal.value([dict(zip(("id", "kernel", "status", "detail"), row, strict=True)) for row in rows])
    else:
        counts = Counter(status for _, status, _ in results)
        summary = ", ".join(f"{counts[status]} {status}" for status in _STYLES if counts[status])
        _table(((problem, status, 0.0, detail) for problem, status, detail in results), summary, terminal)
    return DONE if all(status == "holds" for _, status, _ in results) else NO


def _recorded_calls(options: Namespace) -> Iterator[_LiveCall]:
    filters = filters_of(options)
    for call in Recording.load(options.recording):
        problem, kernel = call.problem, call.kernel
        if not filters.takes_kernel(problem.op, problem.device):
            continue
        if kernel is None:
            yield problem, f"no module defines it; try --import {call.module or 'MODULE'}"
        else:
            args, kwargs = concrete(call.args), concrete(dict(call.kwargs))
            inv: Invocation[Any, Any] = Invocation(
                kernel.op_id, args, kwargs, surroundings=call.surroundings, **call.placement
            )
            yield problem, (kernel, inv)


def _calls_of_book(options: Namespace) -> Iterator[_LiveCall]:
    store = book_of(options)
    for record in filters_of(options).records(store):
        problem, kernel = record.problem, live_kernel(record.problem.op)
        if kernel is None:
            yield problem, "no imported module defines it"
            continue
        persistent = getattr(getattr(kernel, "selector", None), "persistent", None)
        own = "memory" if persistent is None else str(persistent.store.where)
        if own != store.where:
            yield problem, f"its kernel uses the book {own}; set TUNEBOOK_HOME to {store.where}"
        else:
            try:
                yield problem, (kernel, rebuild_call(kernel, problem))
            except TunebookError as error:
                yield problem, str(error)


def _verify_call(call: tuple[Kernel[Any, Any], Invocation[Any, Any]] | str, budget: str | None) -> tuple[str, str]:
    """Return "holds", "changed", "failed" or "skipped", and the reason."""
    if isinstance(call, str):
        return "skipped", call
    kernel, inv = call
    selector = getattr(kernel, "selector", None)
    if selector is None:
        return "skipped", "the program runs it with its own Executor"
    try:
        verified = selector.verify(inv, kernel, budget=budget)
    except TunebookError as error:
        return "failed", str(error)
    return "holds" if verified.held else "changed", verified.reason


def rebuild_call(kernel: Kernel[Any, Any], problem: Problem) -> Invocation[Any, Any]:
    """Return a call with exactly this problem; `UnkeyableError` says why it cannot be made from the key."""
    if not isinstance(kernel, FunctionKernel):
        raise UnkeyableError("only calls of tunable functions can be rebuilt from their key; use --recording")
    try:
        arguments = json.loads(problem.call_key)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise UnkeyableError("the kernel's own key builder made its key; use --recording")
    given = {name: _value(name, value) for name, value in arguments.items() if name in kernel.parameters}
    try:
        inv = kernel.call((), given)
    except TypeError as error:
        raise UnkeyableError(f"its key does not have all arguments ({error}); use --recording") from error
    if kernel.problem(inv) != problem:
        raise UnkeyableError("a call rebuilt from its key has another key here; use --recording")
    return inv


def _value(name: str, value: Json) -> Any:
    match value:
        case {"$array": [str(library), str(dtype), list(shape), str(layout), str(platform)]}:
            sizes = tuple(_size(name, size) for size in shape)
            return materialise(ArraySpec(library, dtype, sizes, layout or "C", platform))
        case {"$tuple": list(items)}:
            return tuple(_value(name, item) for item in items)
        case {"$bucket": inner}:
            return _value(name, inner)
        case list():
            return [_value(name, item) for item in value]
        case dict():
            raise UnkeyableError(f"its argument {name!r} cannot be rebuilt from the key; use --recording")
        case _:
            return value


def _size(name: str, size: Json) -> int:
    """Return a dimension. The name of a bucket, "~1024", is one of the sizes in it."""
    if isinstance(size, str) and size[1:].isdigit():
        return int(size[1:])
    if isinstance(size, int):
        return size
    raise UnkeyableError(f"its argument {name!r} has a dimension {size!r} that is not a number; use --recording")


def _fit_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("what", metavar="KERNEL", help="name of a kernel, or a glob that matches one kernel")
    parser.add_argument("--name", default="heuristic", help="name of the function (default: heuristic)")
    parser.add_argument("--depth", metavar="N", type=int, default=4, help="largest depth of the tree (default: 4)")
    parser.add_argument("--output", metavar="FILE", help="write the function to a file, not to the terminal")


def _fit(options: Namespace, terminal: Terminal) -> int:
    """Learn a heuristic from the tuned calls of a kernel on a device.

    The heuristic is a small decision tree over sizes, written as a Python function to use as the kernel's heuristic=.
    """
    named = find(Catalogue(book_of(options)), options.what, filters_of(options))
    found = named.newest(named.total)
    kernels, devices = {listed.op for listed in found}, {listed.device for listed in found}
    if len(kernels) > 1:
        raise UsageError(f"{options.what!r} matches {len(kernels)} kernels: {', '.join(sorted(kernels))}; name one")
    if len(devices) > 1:
        listed = "".join(f"\n  {device}" for device in sorted(devices))
        raise UsageError(f"a heuristic is for one device; choose it with --device:{listed}")
    records = [record for entry in found if (record := entry.record()) is not None]
    learnt = fit_book(records, name=options.name, depth=options.depth)
    if options.output:
        with writing(options.output):
            Path(options.output).expanduser().write_text(learnt.source, encoding="utf-8")
    if terminal.json:
        facts = {"regret": learnt.regret, "held_out": learnt.held_out, "problems": learnt.problems}
        terminal.value({"source": learnt.source, **facts})
        return DONE
    if not options.output:
        terminal.lines(learnt.source.splitlines())
    # Worse than most heuristics that people write, on sizes that it has not seen.
    if learnt.held_out > 0.5:
        terminal.note(f"too little data: tune more sizes of {kernels.pop()} first")
    terminal.note(
        f"learnt from {learnt.problems} tuned calls: {learnt.regret:.1%} slower than the best on these calls, "
        f"{learnt.held_out:.1%} on held-out calls"
    )
    return DONE


FIT = Verb("tunebook fit scale", _fit, (*FILTERS, "json"), _fit_arguments)
TUNE = Verb("tunebook tune calls.json --budget 10m --watch", _tune, ("dry-run", "book", "json"), _tune_arguments)
VERIFY = Verb("tunebook verify --import mykernels --kernel 'scale*'", _verify, (*FILTERS, "json"), _verify_arguments)
