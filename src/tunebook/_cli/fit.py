"""`tunebook fit`: a heuristic learnt from the book."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from tunebook._cli._filters import add_filters, add_json, book_of, filters_of
from tunebook._cli._verb import DONE, UsageError, Verb

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from tunebook._cli._terminal import Terminal


# So much slower than the best on sizes that it has not seen, a heuristic is worse than most that people write.
_USELESS: Final = 0.5


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("what", metavar="KERNEL", help="a kernel's name, or a glob that means one kernel")
    add_filters(parser)
    parser.add_argument("--name", default="heuristic", help="what the function is called (default heuristic)")
    parser.add_argument("--depth", metavar="N", type=int, default=4, help="questions asked at most (default 4)")
    parser.add_argument("--output", metavar="FILE", help="write the function there, not to the terminal")
    add_json(parser)


def _run(options: Namespace, terminal: Terminal) -> int:
    from tunebook._cli._entries import find  # noqa: PLC0415 - for what is found only
    from tunebook.search._learned_heuristic import fit_book  # noqa: PLC0415 - as above
    from tunebook.stores._files import writing  # noqa: PLC0415 - as above
    from tunebook.stores._listing import Catalogue  # noqa: PLC0415 - as above

    meant = find(Catalogue(book_of(options)), options.what, filters_of(options))
    found = meant.newest(meant.total)
    kernels, devices = {listed.op for listed in found}, {listed.device for listed in found}
    if len(kernels) > 1:
        raise UsageError(f"{options.what!r} means {len(kernels)} kernels: {', '.join(sorted(kernels))}; name one")
    if len(devices) > 1:
        listed = "".join(f"\n  {device}" for device in sorted(devices))
        raise UsageError(f"what is fast on one device is not on another; say which with --device:{listed}")
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
    if learnt.held_out > _USELESS:
        terminal.note(f"too little to learn from: tune more sizes of {kernels.pop()} first")
    terminal.note(
        f"learnt from {learnt.problems} tuned calls: {learnt.regret:.1%} slower than the best on those, "
        f"{learnt.held_out:.1%} on held-out ones"
    )
    return DONE


VERB = Verb(
    "fit",
    "learn a heuristic from what was tuned",
    "tunebook fit scale",
    _arguments,
    _run,
    "Learn a small decision tree over sizes from the tuned calls of one kernel on one device, and write it as a Python "
    "function to ship as the kernel's heuristic=.",
)
