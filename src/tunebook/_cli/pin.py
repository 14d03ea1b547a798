"""`tunebook pin`: choose by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunebook._cli._filters import add_filters, add_json, book_of, filters_of
from tunebook._cli._verb import DONE, UsageError, Verb

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json
    from tunebook._cli._terminal import Terminal


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("what", metavar="ID_OR_KERNEL", help="the beginning of an id, or a kernel with one entry")
    parser.add_argument("values", metavar="NAME=VALUE", nargs="+", help="the configuration, as in block_m=64")
    add_filters(parser)
    parser.add_argument("--force", action="store_true", help="also if no such candidate was ever measured")
    parser.add_argument("--dry-run", action="store_true", help="only say what it would do")
    add_json(parser)


def _run(options: Namespace, terminal: Terminal) -> int:
    from tunebook._cli._entries import SHORT_ID, config_text, find_one, plain  # noqa: PLC0415 - for what is found
    from tunebook._cli._pinning import chosen, held, pinned  # noqa: PLC0415 - as above
    from tunebook.stores._listing import Catalogue  # noqa: PLC0415 - as above

    store = book_of(options)
    listed, record = find_one(Catalogue(store), options.what, filters_of(options))
    wanted = _values(options.values)
    config = chosen(record, wanted, force=options.force)
    if not options.dry_run:
        with held(store, record.problem) as earlier:
            store.put(pinned(earlier or record, config))
    if terminal.json:
        terminal.value({"id": listed.id, "pinned": plain(config), "was": plain(record.head.config)})
        return DONE
    does = "would pin" if options.dry_run else "pinned"
    terminal.line(f"{does} {listed.op} {listed.id[:SHORT_ID]} to {config_text(config)}")
    terminal.line(f"  it was {config_text(record.head.config)}, {record.head.origin}{_cost(record, config)}", "dim")
    terminal.line(f"  back to it: tunebook unpin {listed.id[:SHORT_ID]}", "dim")
    return DONE


def _values(words: list[str]) -> dict[str, str]:
    wanted: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise UsageError(f"{word!r} is no value; write NAME=VALUE, as in block_m=64")
        wanted[name.strip()] = value.strip()
    return wanted


def _cost(record: Record, config: Json) -> str:
    """Say how much slower than the winner the pinned configuration was measured to be."""
    from tunebook._selection.trusted_entries import verdict_of  # noqa: PLC0415 - as above

    verdict = verdict_of(record)
    ranking = () if verdict is None else verdict.ranking
    for ranked in ranking:
        if ranked.measurement.config == config and verdict is not None:
            return f"; the pinned one was measured at {ranked.value_s / verdict.winner.value_s:.2f} x of it"
    return ""


VERB = Verb(
    "pin",
    "give an entry a configuration by hand",
    "tunebook pin matmul block=64 --dry-run",
    _arguments,
    _run,
    "Give an entry one of its candidates by hand. Tuning, verifying and merging leave it alone until it is unpinned; "
    "what was measured is kept. For one run only, set TUNEBOOK_PIN instead.",
)
