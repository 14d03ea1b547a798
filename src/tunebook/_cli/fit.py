"""Learn a heuristic from the tuned calls of a kernel on a device.

The heuristic is a small decision tree over sizes, written as a Python function to use as the kernel's heuristic=.
Exits with 1 if the book has too few tuned calls.
"""

from __future__ import annotations

import math
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING

from tunebook._base.errors import DefinitionError
from tunebook._cli._entries import find
from tunebook._cli._filters import FILTERS, book_to_read, filters_of
from tunebook._cli._terminal import writing_output
from tunebook._cli._verb import DONE, ArgumentParser, Namespace, NotFound, Terminal, UsageError, Verb
from tunebook.search._learned_heuristic import fit_book
from tunebook.stores._listing import Catalogue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tunebook.search._learned_heuristic import Fit


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("what", metavar="KERNEL", help="name of a kernel, or a glob that matches one kernel")
    parser.add_argument("--name", default="heuristic", help="name of the function (default: heuristic)")
    parser.add_argument("--depth", metavar="N", type=int, default=4, help="largest depth of the tree (default: 4)")
    parser.add_argument("--output", metavar="FILE", help="write the function to a file, not to the terminal")


def _run(options: Namespace, terminal: Terminal) -> int:
    named = find(Catalogue(book_to_read(options)), options.what, filters_of(options))
    found = named.newest(named.total)
    kernels, devices = {listed.op for listed in found}, {listed.device for listed in found}
    if len(kernels) > 1:
        raise UsageError(f"{options.what!r} matches {len(kernels)} kernels: {', '.join(sorted(kernels))}; name one")
    if len(devices) > 1:
        listed = "".join(f"\n  {device}" for device in sorted(devices))
        raise UsageError(f"a heuristic is for one device; choose it with --device:{listed}")
    records = [record for entry in found if (record := entry.record()) is not None]
    try:
        learnt = fit_book(records, name=options.name, depth=options.depth)
    except DefinitionError as error:
        if not options.name.isidentifier() or iskeyword(options.name):
            raise
        raise NotFound(str(error)) from None  # the command line is right, and the book has too little
    path = Path(options.output or "").expanduser()
    if options.output:
        with writing_output(path):
            path.write_text(learnt.source, encoding="utf-8")
    if terminal.json:
        facts: dict[str, float | None] = {
            "regret": learnt.regret,
            "held_out": learnt.held_out,
            "problems": learnt.problems,
        }
        facts |= {"constant": learnt.constant, "bound": learnt.bound if math.isfinite(learnt.bound) else None}
        terminal.value({"source": learnt.source, **facts})
        return DONE
    if not options.output:
        terminal.lines(learnt.source.splitlines())
    else:
        # A name with a dot or a hyphen cannot be imported.
        use = f"from {path.stem} import {options.name}, and " if path.stem.isidentifier() else ""
        terminal.note(f"wrote {path}; to use it: {use}give the kernel heuristic={options.name}")
    # Worse than most heuristics that people write, on sizes that it has not seen.
    if learnt.held_out > 0.5 and options.depth:
        terminal.note(f"too little data: tune more sizes of {kernels.pop()} first")
    for line in _quality(learnt, options.depth):
        terminal.note(line)
    return DONE


def _quality(learnt: Fit, depth: int) -> Iterator[str]:
    bound = f" (at most {learnt.bound:.1%} on 95% of them)" if math.isfinite(learnt.bound) else ""
    yield f"learnt from {learnt.problems} tuned calls; mean slowdown against the best configuration of each call:"
    yield f"{learnt.regret:>8.1%}  on these calls"
    yield f"{learnt.held_out:>8.1%}  on calls that it was not learnt from{bound}"
    if not depth:
        yield "--depth 0 allows one configuration only; leave it out for a tree"
    elif isinstance(learnt.tree, str):
        yield "no tree is better than this one configuration"
    else:
        yield f"{learnt.constant:>8.1%}  on the same calls, with the best single configuration"


VERB = Verb("tunebook fit scale", _run, (*FILTERS, "json"), _arguments, __doc__)
