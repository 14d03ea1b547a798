"""`tunebook show`: all that one entry says."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from tunebook._cli._filters import add_filters, add_json, book_of, filters_of, size_text
from tunebook._cli._terminal import TextColumn, clean
from tunebook._cli._verb import DONE, Verb

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Measurement
    from tunebook._cli._terminal import Terminal
    from tunebook.stores._listing import Listed

_SHOWN: Final = 20
_COLUMNS: Final = (
    TextColumn("#", "right", style="dim"),
    TextColumn("time", "right", style="bold"),
    TextColumn("factor", "right"),
    TextColumn("samples", "right", from_width=60),
    TextColumn("configuration", give=2, style="green"),
    TextColumn("", give=1),
)


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("what", metavar="ID_OR_KERNEL", help="the beginning of an id, as `tunebook ls` shows it")
    add_filters(parser)
    parser.add_argument("--limit", metavar="N", type=int, default=_SHOWN, help="show so many candidates; 0 for all")
    add_json(parser)


def _run(options: Namespace, terminal: Terminal) -> int:
    from tunebook._cli._entries import find_newest  # noqa: PLC0415 - loads the codec, for what is found only
    from tunebook.stores._listing import Catalogue  # noqa: PLC0415 - as above

    listed, record = find_newest(Catalogue(book_of(options)), options.what, filters_of(options), terminal)
    if terminal.json:
        head, body = record.to_fields()
        terminal.value({"id": listed.id, "where": listed.where, "head": head, "body": body})
        return DONE
    _head(listed, record, terminal)
    _candidates(record, options.limit, terminal)
    return DONE


def _head(listed: Listed, record: Record, terminal: Terminal) -> None:
    from tunebook._api.explain import versions_of  # noqa: PLC0415 - as above
    from tunebook._cli._entries import config_text  # noqa: PLC0415 - as above
    from tunebook._keys.call_key import spell_out  # noqa: PLC0415 - as above
    from tunebook._selection.trusted_entries import body_of  # noqa: PLC0415 - as above

    head, facts = record.head, dict(body_of(record).provenance)
    terminal.line(clean(head.problem.op), "bold")
    versions = ", ".join(f"{name} {version}" for name, version in versions_of(head.environment).items())
    pairs = [("id", listed.id), ("device", head.problem.device)]
    pairs += [("call" if i == 0 else "", line) for i, line in enumerate(spell_out(head.problem.call_key))]
    pairs += [("config", config_text(head.config)), ("origin", f"{head.origin}{_made(facts)}")]
    pairs += [("versions", versions or head.environment or "any"), ("checksum", head.checksum or "any")]
    pairs += [("generation", str(head.generation)), ("size", size_text(listed.size_bytes)), ("in", listed.where)]
    pairs += [(name, str(value)) for name, value in facts.items()]
    terminal.fields(((name, clean(text)) for name, text in pairs), "  ")


def _made(facts: dict[str, Any]) -> str:
    """Say when, where and how a choice was made; what that uses is taken out of the facts."""
    from tunebook._tuning.progress import seconds_text  # noqa: PLC0415 - as above

    when, host, ran, seconds = (facts.pop(name, None) for name in ("when", "host", "ran", "seconds"))
    for said_elsewhere in ("winner", "default", "rule", "found", "waiting_s", "values", "band"):
        facts.pop(said_elsewhere, None)
    if facts.get("objective") == "typical":
        del facts["objective"]
    verified = facts.pop("verified", None)
    again = _day(verified.get("when")) if isinstance(verified, dict) else ""
    at = _day(when)
    on = f" on {host}" if host else ""
    took = f" in {seconds_text(seconds)}" if isinstance(seconds, (int, float)) else ""
    return f"{at}{on}" + (f"; {ran} measured{took}" if ran is not None else "") + (again and f"; verified{again}")


def _day(when: object) -> str:
    return f" {time.strftime('%Y-%m-%d %H:%M', time.localtime(when))}" if isinstance(when, (int, float)) else ""


def _candidates(record: Record, limit: int, terminal: Terminal) -> None:
    from tunebook._selection.trusted_entries import body_of  # noqa: PLC0415 - as above

    rows = list(_rows(record))
    if not rows:
        return
    terminal.line()
    shown = rows if limit == 0 else rows[:limit]
    terminal.table(_COLUMNS, shown, "  ")
    hidden = len(rows) - len(shown)
    if hidden:
        terminal.line(f"  and {hidden} more; --limit 0 shows all", "dim")
    others = len(body_of(record).measurements) - len(rows)
    if others:
        terminal.line(f"  and {others} measured under other code or versions; --json has them", "dim")


def _rows(record: Record) -> Iterator[tuple[str, ...]]:
    from tunebook._cli._entries import config_text  # noqa: PLC0415 - loaded by then
    from tunebook._selection.trusted_entries import body_of, measured_for_choice, verdict_of  # noqa: PLC0415 - loaded by then
    from tunebook._tuning.progress import seconds_text  # noqa: PLC0415 - as above

    verdict = verdict_of(record)
    ranking = () if verdict is None else verdict.ranking
    for rank, ranked in enumerate(ranking, 1):
        m = ranked.measurement
        notes = ["chosen"] if m.config == record.head.config else []
        notes += ["dropped early"] if m.dropped else []
        factor = ranked.value_s / ranking[0].value_s
        count = str(len(m.valid_samples_s))
        yield str(rank), seconds_text(ranked.value_s), f"{factor:.2f} x", count, config_text(m.config), ", ".join(notes)
    for m in measured_for_choice(body_of(record)):
        if m.failure is not None:
            yield "", "failed", "", "", config_text(m.config), _failure(m)


def _failure(m: Measurement) -> str:
    failure = m.failure
    return "" if failure is None else clean(f"{failure.kind}: {failure.message}".splitlines()[0])


VERB = Verb(
    "show",
    "show one entry with all its candidates",
    "tunebook show matmul",
    _arguments,
    _run,
    "Show one entry: its key, its configuration, where it comes from, and how each candidate did.",
)
