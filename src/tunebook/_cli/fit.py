"""Learn a heuristic from the tuned calls of a kernel on a device.

The heuristic is a small decision tree over sizes, written as a Python function to use as the kernel's heuristic=.
"""

from __future__ import annotations

import math
from pathlib import Path

from tunebook._cli._entries import find
from tunebook._cli._filters import FILTERS, book_to_read, filters_of
from tunebook._cli._verb import DONE, ArgumentParser, Namespace, Terminal, UsageError, Verb
from tunebook.search._learned_heuristic import fit_book
from tunebook.stores._files import writing
from tunebook.stores._listing import Catalogue


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
    learnt = fit_book(records, name=options.name, depth=options.depth)
    if options.output:
        with writing(options.output):
            Path(options.output).expanduser().write_text(learnt.source, encoding="utf-8")
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
    # Worse than most heuristics that people write, on sizes that it has not seen.
    if learnt.held_out > 0.5:
        terminal.note(f"too little data: tune more sizes of {kernels.pop()} first")
    if isinstance(learnt.tree, str):
        beside = "no tree is better than this one configuration"
    else:
        beside = f"the best single configuration is {learnt.constant:.1%} slower there"
    bound = f" (at most {learnt.bound:.1%} on 95% of them)" if math.isfinite(learnt.bound) else ""
    terminal.note(
        f"learnt from {learnt.problems} tuned calls: {learnt.regret:.1%} slower than the best on these calls, "
        f"{learnt.held_out:.1%} on held-out calls{bound}; {beside}"
    )
    return DONE


VERB = Verb("tunebook fit scale", _run, (*FILTERS, "json"), _arguments, __doc__)
