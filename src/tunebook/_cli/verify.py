"""Measure the finalists of entries again, and keep each choice that still wins or ties.

Measures on made-up arguments: of the kernel's inputs= function, or else random ones. If a choice does not hold, all
candidates are tuned again; but a choice that was made on a program's own arguments is kept. Programs verify on their
own, at the first call after an update. Exits with 1 unless all choices hold.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from tunebook._api.function_kernel import FunctionKernel
from tunebook._arrays.describe import arrays_in
from tunebook._arrays.library import ArraySpec
from tunebook._arrays.made_up import materialise
from tunebook._base.errors import TunebookError, TuningFailed, UnkeyableError, clean
from tunebook._base.vocabulary import MADE_UP
from tunebook._cli._entries import find
from tunebook._cli._filters import FILTERS, book_to_read, filters_of
from tunebook._cli._results import STYLES, add_import, import_modules, write_table
from tunebook._cli._verb import DONE, NO, ArgumentParser, Namespace, Terminal, UsageError, Verb
from tunebook._selection.env_pins import fits_kernel
from tunebook._selection.recording import how_to_give_values, live_kernel, make_up, saved_calls, with_inputs
from tunebook.fleet._farm.task import Task, find_task_kernel
from tunebook.stores import problem_id
from tunebook.stores._listing import Catalogue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tunebook._base.vocabulary import Json, Problem
    from tunebook._kernel.kernel import Invocation, Kernel
    from tunebook._selection.recording import SavedCall
    from tunebook.stores import Store
    from tunebook.stores._listing import Listed

    # A problem, and the call that has it here or the reason why it cannot run here.
    _LiveCall: TypeAlias = tuple[Problem, tuple[Kernel[Any, Any], Invocation[Any, Any]] | str]

_NAMED: Final = 3  # modules of a message


def _arguments(parser: ArgumentParser) -> None:
    text = "verify only these entries: first digits of an id, or a kernel; default: all that the options choose"
    parser.add_argument("what", metavar="ID_OR_KERNEL", nargs="*", help=text)
    add_import(parser, "module that defines the kernels; may be given several times")
    parser.add_argument("--recording", metavar="FILE", help="verify calls of a recording; their modules are imported")
    parser.add_argument("--budget", metavar="BUDGET", help="limit for each call, e.g. 30s or '200 trials'")


def _run(options: Namespace, terminal: Terminal) -> int:
    # A wrong name is told before modules are imported.
    store, entries = (None, []) if options.recording else _entries_of_book(options)
    if not options.modules and not options.recording:
        modules = sorted({listed.op.partition("@")[0].rpartition(".")[0] for listed in entries} - {"", "__main__"})
        named = " ".join(f"--import {clean(module)}" for module in modules[:_NAMED] or ["mykernels"])
        why = "verifying imports the module of the kernels, and a book does not choose the code that runs here"
        raise UsageError(f"{why}; name the module, e.g. {named}")
    import_modules(options.modules)
    calls = list(_recorded_calls(options) if store is None else _calls_of_book(store, entries))
    if not calls:
        empty = options.recording and not saved_calls(options.recording)
        terminal.note(f"{options.recording} has no calls" if empty else "no matching call")
        return NO
    results = [(problem, *_verify_call(call, options.budget)) for problem, call in calls]
    if terminal.json:
        rows = [(problem_id(p), p.op, status, detail) for p, status, detail in results]
        terminal.value([dict(zip(("id", "kernel", "status", "detail"), row, strict=True)) for row in rows])
    else:
        counts = Counter(status for _, status, _ in results)
        said = {"holds": "hold"} if counts["holds"] > 1 else {}
        summary = ", ".join(f"{counts[status]} {said.get(status, status)}" for status in STYLES if counts[status])
        write_table(((problem, status, 0.0, detail) for problem, status, detail in results), summary, terminal)
    return DONE if all(status == "holds" for _, status, _ in results) else NO


def _recorded_calls(options: Namespace) -> Iterator[_LiveCall]:
    filters, calls = filters_of(options), saved_calls(options.recording)
    there = [(call.problem.op, call.problem.device) for call in calls]
    names = [word for word in options.what if not any(problem_id(call.problem).startswith(word) for call in calls)]
    filters._replace(kernel=(*filters.kernel, *names)).warn_of_misses(there, options.recording)
    calls = [call for call in calls if not options.what or any(_is_named(call.problem, w) for w in options.what)]
    for call in calls:
        if filters.takes_kernel(call.problem.op, call.problem.device):
            try:
                kernel = find_task_kernel(Task(call))
            except TunebookError as error:
                yield call.problem, str(error)
            else:
                yield call.problem, _made(kernel, partial(_made_up, kernel, call))


def _is_named(problem: Problem, word: str) -> bool:
    return fits_kernel(problem.op, [word]) or problem_id(problem).startswith(word)


def _made_up(kernel: Kernel[Any, Any], call: SavedCall) -> Invocation[Any, Any]:
    return make_up(kernel, call.restored().invocation(kernel))


def _entries_of_book(options: Namespace) -> tuple[Store, list[Listed]]:
    store = book_to_read(options)
    filters, catalogue = filters_of(options), Catalogue(store)
    found = {listed.id: listed for word in options.what for listed in find(catalogue, word, filters).all()}
    return store, list(found.values() if options.what else filters.pick(catalogue))


def _calls_of_book(store: Store, entries: Iterable[Listed]) -> Iterator[_LiveCall]:
    for record in filter(None, (listed.record() for listed in entries)):
        problem, kernel = record.problem, live_kernel(record.problem.op)
        if kernel is None:
            yield problem, "no imported module defines it"
            continue
        persistent = getattr(getattr(kernel, "selector", None), "persistent", None)
        own = "memory" if persistent is None else str(persistent.store.where)
        if own != store.where:
            yield problem, f"its kernel uses the book {own}; set TUNEBOOK_HOME to {store.where}"
        else:
            yield problem, _made(kernel, partial(rebuild_call, kernel, problem))


def _made(
    kernel: Kernel[Any, Any], make: Callable[[], Invocation[Any, Any]]
) -> tuple[Kernel[Any, Any], Invocation[Any, Any]] | str:
    try:
        return kernel, make()
    except TunebookError as error:
        return str(error)


def _verify_call(call: tuple[Kernel[Any, Any], Invocation[Any, Any]] | str, budget: str | None) -> tuple[str, str]:
    """Return "holds", "changed", "kept", "failed" or "skipped", and the reason."""
    if isinstance(call, str):
        return "skipped", call
    kernel, inv = call
    selector = getattr(kernel, "selector", None)
    if selector is None:
        return "skipped", "the program runs it with its own Executor"
    try:
        verified = selector.verify(inv, kernel, budget=budget)
    except TuningFailed as error:
        if not error.on_made_up:
            return "failed", error.summary
        nothing = f"could not be verified on {MADE_UP[inv.values_from]} ({error.summary}); nothing changed"
        return "skipped", f"{nothing}. {how_to_give_values(kernel)}"
    except TunebookError as error:
        return "failed", str(error)
    return "holds" if verified.held else "kept" if verified.kept else "changed", verified.reason


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
    return with_inputs(kernel, replace(inv, values_from="random")) if any(True for _ in arrays_in(inv.args)) else inv


def _value(name: str, value: Json) -> Any:
    match value:
        case {"$array": [str(library), str(dtype), list(shape), str(layout), str(platform)]}:
            sizes = tuple(_size(name, size) for size in shape)
            library, _, variant = library.partition(":")
            return materialise(ArraySpec(library, dtype, sizes, layout or "C", platform, variant=variant))
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


VERB = Verb("tunebook verify scale --import mykernels", _run, (*FILTERS, "json"), _arguments, __doc__)
