"""Write a pack of tuned entries, to ship with the code of their kernels.

In a folder `__tunebook__` beside the code, a pack answers calls that the user's own book does not. It gets the entries
of the book itself, each with its measurements and origin, but not entries in which every candidate failed, unfinished
tunings, and entries of other code than the kernel has here (--import) or had in its newest entry. Signed if
TUNEBOOK_SIGNING_KEY is set. Exits with 1, and writes nothing, if a --kernel or --device matches no entry or there is
nothing to pack; also if --check finds an outdated pack.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._base.environment_variables import signing_key
from tunebook._base.errors import clean
from tunebook._cli._entries import KERNEL, SHORT_ID, key_text
from tunebook._cli._filters import FILTERS, book_to_read, filters_of, size_text
from tunebook._cli._results import add_import, import_modules
from tunebook._cli._terminal import TextColumn, count_text
from tunebook._cli._verb import DONE, NO, ArgumentParser, Namespace, Terminal, UsageError, Verb
from tunebook._selection.recorded_decision import why_undecided
from tunebook._selection.recording import live_kernel
from tunebook._tuning.progress import day_text
from tunebook.stores import PackStore, problem_id, write_pack
from tunebook.stores._listing import Catalogue, measured_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tunebook._base.record_format import Record
    from tunebook.stores._listing import Listed

_NAMED: Final = 8  # entries that are left out for one reason
_COLUMNS: Final = (
    KERNEL,
    TextColumn("device", give=3),
    TextColumn("problems", "right"),
    TextColumn("tuned until", from_width=60),
)


class _Packed(NamedTuple):
    """The records of a pack, and the entries that are left out, by reason."""

    records: list[Record]
    left_out: dict[str, list[Listed]]

    def lines(self) -> Iterator[str]:
        """Yield the lines for people about the entries that are left out."""
        for why, entries in sorted(self.left_out.items(), key=lambda item: -len(item[1])):
            yield f"left out {count_text(len(entries), 'entry', 'entries')}: {why}"
            for entry in entries[:_NAMED]:
                record = entry.record()
                call = "" if record is None else f"  {key_text(record.problem.call_key)}"
                yield f"  {entry.id[:SHORT_ID]}  {clean(entry.op)}{call}  on {clean(entry.device)}"
            if len(entries) > _NAMED:
                yield f"  and {len(entries) - _NAMED:,} more; --json lists all"


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="pack to write, e.g. mylib/__tunebook__/h200.db")
    parser.add_argument("--check", action="store_true", help="write nothing; say whether FILE is outdated")
    parser.add_argument("--unfinished", action="store_true", help="pack tunings that a budget ended too")
    parser.add_argument("--unsigned", action="store_true", help="do not sign the pack, even if a key is set")
    add_import(parser, "module that defines the kernels; entries of other code than its kernels have are left out")


def _run(options: Namespace, terminal: Terminal) -> int:
    path = Path(options.file).expanduser()
    if path.suffix != ".db":
        raise UsageError(f"{path} cannot be a pack: its name must end in .db, e.g. __tunebook__/h200.db")
    import_modules(options.modules)
    catalogue = Catalogue(book_to_read(options))
    all_match = filters_of(options).check(catalogue)
    packed = _choose(catalogue, options)
    if packed.records and not all_match:
        terminal.note("nothing to pack: each --kernel and --device must match an entry")
        return NO
    if options.check:
        return _check(path, packed, options, terminal)
    if not packed.records:
        terminal.note("\n".join(["nothing to pack", *packed.lines()]))
        return NO
    key = None if options.unsigned else signing_key()
    write_pack(path, packed.records, key=key)
    covered = _covered(packed.records)
    if terminal.json:
        kernels = [dict(zip(("kernel", "device", "problems", "tuned_until"), row, strict=True)) for row in covered]
        about = {"file": str(path), "entries": len(packed.records), "signed": key is not None}
        left_out = [{"id": e.id, "kernel": e.op, "why": why} for why, each in packed.left_out.items() for e in each]
        terminal.value({**about, "kernels": kernels, "left_out": left_out})
        return DONE
    size = size_text(path.stat().st_size)
    entries = count_text(len(packed.records), "entry", "entries")
    terminal.line(f"wrote {entries} to {path} ({size}{', signed' if key else ''})")
    rows = ((clean(op), clean(device), f"{count:,}", day_text(until)) for op, device, count, until in covered)
    terminal.table(_COLUMNS, rows, indent="  ")
    for line in packed.lines():
        terminal.line(line, "yellow")
    return DONE


def _choose(catalogue: Catalogue, options: Namespace) -> _Packed:
    """Return the selected entries of the book itself; a pack that it is read with has a library of its own."""
    where = catalogue.store.where
    own = (listed for listed in filters_of(options).among(catalogue) if listed.where == where)
    found = [(listed, listed.record()) for listed in sorted(own, key=lambda listed: listed.id)]
    code = _code_of(record for _, record in found if record is not None)
    packed = _Packed([], {})
    for listed, record in found:
        why = "unreadable" if record is None else _why_not(record, code, unfinished=options.unfinished)
        if why or record is None:
            packed.left_out.setdefault(why, []).append(listed)
        else:
            packed.records.append(record)
    return packed


def _code_of(records: Iterable[Record]) -> dict[str, tuple[str, str]]:
    """Return the code of each kernel, and how it is known: of its definition, or else of its newest entry."""
    code: dict[str, tuple[str, str]] = {}
    for record in sorted(records, key=measured_s):
        op, checksum = record.problem.op, record.head.checksum
        if checksum and record.head.decided:
            code[op] = checksum.partition("-")[0], "made by other code than the newest entry of the kernel"
    for op in code:
        if (kernel := live_kernel(op)) is not None:
            code[op] = kernel.code_checksum, "made by other code than the kernel has now"
    return code


def _why_not(record: Record, code: dict[str, tuple[str, str]], *, unfinished: bool) -> str:
    """Return why a record is not packed; "" if it is."""
    head = record.head
    if not head.decided:
        return why_undecided(record)
    current, other = code.get(head.problem.op, ("", ""))
    # An entry without a checksum is from another tool or from hand: the owner of the book vouches for it.
    if head.checksum and head.checksum.partition("-")[0] != current:
        return other
    if not unfinished and record.is_unfinished:
        return "the budget ended the tuning; --unfinished packs it too"
    return ""


def _covered(records: Iterable[Record]) -> list[tuple[str, str, int, float]]:
    """Return the kernels and devices with the number of their problems, and when the last of them was tuned."""
    groups: dict[tuple[str, str], list[float]] = {}
    for record in records:
        groups.setdefault((record.problem.op, record.problem.device), []).append(measured_s(record))
    return [(op, device, len(times), max(times)) for (op, device), times in sorted(groups.items())]


def _check(path: Path, packed: _Packed, options: Namespace, terminal: Terminal) -> int:
    if not path.exists():
        raise UsageError(f"no pack at {path}; write it first, without --check")
    takes, shipped = filters_of(options).takes_kernel, PackStore(path, vouched=True).items()
    shipped = (record for record in shipped if takes(record.problem.op, record.problem.device))
    there, here = ({problem_id(r.problem): _content(r) for r in records} for records in (shipped, packed.records))
    counts = {
        "new": len(here.keys() - there.keys()),
        "changed": sum(there[name] != here[name] for name in there.keys() & here.keys()),
        "gone": len(there.keys() - here.keys()),
    }
    outdated = any(counts.values())
    said = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    verdict = f"outdated: {said}" if outdated else f"up to date: {count_text(len(there), 'entry', 'entries')}"
    terminal.result({"file": str(path), "outdated": outdated, **counts}, f"{path} is {verdict}", *packed.lines())
    return NO if outdated else DONE


def _content(record: Record) -> tuple[Any, ...]:
    head = record.head
    return head.config, head.checksum, head.environment, head.origin


VERB = Verb("tunebook pack __tunebook__/tuned.db --kernel 'mat*'", _run, (*FILTERS, "json"), _arguments, __doc__)
