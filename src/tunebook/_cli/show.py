"""Show one entry: its call, its configuration, its origin, and the result of each candidate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tunebook._api.versions import versions_of
from tunebook._base.durations import ratio_text
from tunebook._base.errors import clean
from tunebook._base.vocabulary import MADE_UP
from tunebook._cli._entries import config_text, decision_text, entry_json, find_newest, origin_text, parsed, plain
from tunebook._cli._filters import FILTERS, book_to_read, count_of, size_text
from tunebook._cli._terminal import TextColumn, wrapped
from tunebook._cli._verb import DONE, ArgumentParser, Namespace, Terminal, Verb
from tunebook._keys.call_key import spell_out
from tunebook._selection.bucket_tuning import measured_at
from tunebook._selection.recorded_decision import (
    beside_heuristic,
    gain_of,
    heuristic_among,
    measured_for_choice,
    names_in,
    verdict_of,
)
from tunebook._tuning.progress import day_text, seconds_text
from tunebook.stores._listing import Catalogue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tunebook._base.record_format import Record

_SHOWN: Final = 20
EARLY: Final = (
    "An eliminated candidate was clearly slower than the best early in the tuning, and was not timed further. Its time "
    "is from then, so it stands below the candidates that were timed to the end, even if its number is smaller."
)
_OUT: Final = "out"  # in place of a rank
_COLUMNS: Final = (
    TextColumn("#", "right", style="dim"),
    TextColumn("time", "right", style="bold"),
    TextColumn("factor", "right"),
    TextColumn("samples", "right", from_width=60),
    TextColumn("configuration", style="green", whole=True),
    TextColumn(""),
    TextColumn("reason", style="red", whole=True),
)


def _arguments(parser: ArgumentParser) -> None:
    text = "first digits of an id as printed by `tunebook ls`, or a kernel"
    parser.add_argument("what", metavar="ID_OR_KERNEL", help=text)
    text = f"show N candidates; 0 for all (default: {_SHOWN})"
    parser.add_argument("--limit", metavar="N", type=count_of, default=_SHOWN, help=text)


def _run(options: Namespace, terminal: Terminal) -> int:
    listed, record = find_newest(Catalogue(book_to_read(options)), options, terminal)
    if terminal.json:
        terminal.value(entry_json(listed, record) | _rest_as_json(record))
        return DONE
    head, facts = record.head, dict(record.body.provenance)
    terminal.line(clean(head.problem.op), "bold")
    versions = ", ".join(f"{name} {version}" for name, version in versions_of(head.environment).items())
    pairs = [("id", listed.id), ("device", head.problem.device)]
    pairs += [("call" if i == 0 else "", line) for i, line in enumerate(spell_out(head.problem.call_key))]
    failed = any(m.failure is not None for m in measured_for_choice(record.body))
    tuning = _tuning(facts, "tried" if failed else "measured")
    going_on = "; unfinished: the next tuning goes on" if head.decided and record.is_unfinished else ""
    pairs += [("config", decision_text(record)), ("origin", f"{origin_text(record)}{tuning}{going_on}")]
    verdict = verdict_of(record)
    if verdict is not None and (beside := beside_heuristic(record, verdict, measured_for_choice(record.body))):
        pairs += [("heuristic", beside)]
    if (values_from := facts.pop("values_from", None)) is not None:
        pairs += [("measured on", MADE_UP.get(str(values_from), str(values_from)))]
    if (at := measured_at(facts)) is not None:
        del facts["at"]
        pairs += [("measured at", str(at))]
    pairs += [("versions", versions or head.environment[:200] or "any"), ("checksum", head.checksum or "any")]
    pairs += [("generation", str(head.generation)), ("size", size_text(listed.size_bytes)), ("in", listed.where)]
    if isinstance(before := facts.pop("instead_of", None), dict):
        pairs += [("instead of", f"{config_text(before.get('config'), names_in(record))}, {before.get('origin', '')}")]
    if isinstance(measured := facts.pop("measured", None), (int, float)):
        pairs += [("measured", day_text(measured))]
    pairs += [(name, _plain_text(value)) for name, value in facts.items()]
    terminal.fields(((name, clean(text)) for name, text in pairs), "  ")
    _candidates(record, options.limit, terminal)
    return DONE


def _plain_text(value: Any) -> str:
    """Return a fact of a record as people write it; values deep inside it as Python does."""
    if isinstance(value, list):
        return "; ".join(map(_scalar_text, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_scalar_text(item)}" for name, item in value.items()) or "none"
    return _scalar_text(value)


def _scalar_text(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _rest_as_json(record: Record) -> dict[str, Any]:
    """Return the parts of a record that `ls --json` leaves out, as plain JSON."""
    head, body = record.head, record.body
    candidates = []
    for m in body.measurements:
        fields = m._asdict() | {"config": plain(m.config), "environment": parsed(m.environment)}
        fields["failure"] = None if m.failure is None else m.failure._asdict()
        candidates.append(fields | {"chosen": m.config == head.config})
    facts = dict(body.provenance)
    if isinstance(before := facts.get("instead_of"), dict):
        facts["instead_of"] = before | {
            "config": plain(before.get("config")),
            "environment": parsed(str(before.get("environment", ""))),
        }
    heuristic, verdict = heuristic_among(record, measured_for_choice(body)), verdict_of(record)
    return {
        "checksum": head.checksum,
        "generation": head.generation,
        "heuristic": None if heuristic is None else plain(heuristic.config),
        "gain": None if verdict is None else gain_of(record, verdict),
        "candidates": candidates,
        "provenance": facts,
    }


def _tuning(facts: dict[str, Any], done: str) -> str:
    """Return when, where and how the decision was made; removes facts that are shown elsewhere.

    `done` says how many candidates ran: failed ones have no time.
    """
    when, host, ran, seconds = (facts.pop(name, None) for name in ("when", "host", "ran", "seconds"))
    for shown_elsewhere in (
        "winner",
        "default",
        "rule",
        "found",
        "waiting_s",
        "values",
        "band",
        "interrupted",
        "names",
        "complete",
    ):
        facts.pop(shown_elsewhere, None)
    if facts.get("objective") == "typical":
        del facts["objective"]
    verified = facts.pop("verified", None)
    again = f"; verified {day_text(verified.get('when'))}" if isinstance(verified, dict) else ""
    if isinstance(verified, dict) and verified.get("values_from", "call") != "call":
        again += " on made-up arguments"
    on = f" on {host}" if host else ""
    took = f" in {seconds_text(seconds)}" if isinstance(seconds, (int, float)) else ""
    count = f"; {ran} {done}{took}" if ran is not None else ""
    return f"{'' if when is None else f' {day_text(when)}'}{on}{count}{again}"


def _candidates(record: Record, limit: int, terminal: Terminal) -> None:
    rows = list(_rows(record))
    if not rows:
        return
    terminal.line()
    terminal.table(_COLUMNS, rows[: limit or None], "  ")
    if 0 < limit < len(rows):
        terminal.line(f"  and {len(rows) - limit} more; --limit 0 shows all", "dim")
    if others := len(record.body.measurements) - len(rows):
        terminal.line(f"  and {others} measured with other code, versions or arguments; --json prints them", "dim")
    if any(row[0] == _OUT for row in rows[: limit or None]):
        terminal.lines(["", *wrapped(f"{_OUT}: eliminated. {EARLY}", min(terminal.width, 90))])


def _rows(record: Record) -> Iterator[tuple[str, ...]]:
    verdict, names, heuristic = verdict_of(record), names_in(record), record.provenance.get("default")
    ranking = () if verdict is None else verdict.ranking
    for rank, ranked in enumerate(ranking, 1):
        m = ranked.measurement
        in_use = "pinned by hand" if record.head.origin == "pinned" else "chosen"
        notes = [in_use] if m.config == record.head.config else []
        notes += ["heuristic"] if m.fingerprint == heuristic else []
        factor = ratio_text(ranked.value_s / ranking[0].value_s)
        count = str(len(m.valid_samples_s))
        config = config_text(m.config, names)
        place, time = _OUT if m.dropped else str(rank), seconds_text(ranked.value_s)
        yield place, time, factor, count, config, ", ".join(notes), ""
    for m in measured_for_choice(record.body):
        if m.failure is not None:
            said = clean(m.failure.said)
            said += "" if m.values_from == "call" else f" (on {MADE_UP.get(m.values_from, m.values_from)})"
            is_heuristic = "heuristic" if m.fingerprint == heuristic else ""
            yield "", "failed", "", "", config_text(m.config, names), is_heuristic, said


VERB = Verb("tunebook show matmul", _run, (*FILTERS, "json"), _arguments, __doc__)
