"""Show one entry with all its candidates, or explain why a call gets its configuration."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from tunebook._api.explain import explain_entry
from tunebook._api.versions import versions_of
from tunebook._base.record_format import canonical_json
from tunebook._base.vocabulary import Problem
from tunebook._cli._entries import config_text, find, find_newest, named, plain
from tunebook._cli._filters import FILTERS, book_of, filters_of, size_text
from tunebook._cli._terminal import TextColumn, clean, wrapped
from tunebook._cli._verb import DONE, NO, ArgumentParser, Namespace, Terminal, UsageError, Verb
from tunebook._keys.call_key import spell_out
from tunebook._selection.selector import Selection
from tunebook._selection.trusted_entries import body_of, measured_for_choice, verdict_of
from tunebook._tuning.progress import seconds_text
from tunebook.stores import problem_id
from tunebook.stores._listing import Catalogue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tunebook._api.explain import Explanation
    from tunebook._base.record_format import Record
    from tunebook._cli._entries import NamedEntries

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
    text = "first digits of an id as printed by `tunebook ls`, or a kernel"
    parser.add_argument("what", metavar="ID_OR_KERNEL", help=text)
    text = f"show N candidates; 0 for all (default: {_SHOWN})"
    parser.add_argument("--limit", metavar="N", type=int, default=_SHOWN, help=text)


def _show(options: Namespace, terminal: Terminal) -> int:
    """Show one entry: its call, its configuration, its origin, and the result of each candidate."""
    listed, record = find_newest(Catalogue(book_of(options)), options, terminal)
    if terminal.json:
        fields = record.to_fields()
        terminal.value({"id": listed.id, "where": listed.where, "head": fields[0], "body": fields[1]})
        return DONE
    head, facts = record.head, dict(body_of(record).provenance)
    terminal.line(clean(head.problem.op), "bold")
    versions = ", ".join(f"{name} {version}" for name, version in versions_of(head.environment).items())
    pairs = [("id", listed.id), ("device", head.problem.device)]
    pairs += [("call" if i == 0 else "", line) for i, line in enumerate(spell_out(head.problem.call_key))]
    pairs += [("config", config_text(head.config)), ("origin", f"{head.origin}{_tuning(facts)}")]
    pairs += [("versions", versions or head.environment or "any"), ("checksum", head.checksum or "any")]
    pairs += [("generation", str(head.generation)), ("size", size_text(listed.size_bytes)), ("in", listed.where)]
    pairs += [(name, str(value)) for name, value in facts.items()]
    terminal.fields(((name, clean(text)) for name, text in pairs), "  ")
    _candidates(record, options.limit, terminal)
    return DONE


def _tuning(facts: dict[str, Any]) -> str:
    """Return when, where and how the decision was made; removes facts that are shown elsewhere."""
    when, host, ran, seconds = (facts.pop(name, None) for name in ("when", "host", "ran", "seconds"))
    for shown_elsewhere in ("winner", "default", "rule", "found", "waiting_s", "values", "band"):
        facts.pop(shown_elsewhere, None)
    if facts.get("objective") == "typical":
        del facts["objective"]
    verified = facts.pop("verified", None)
    again = _day(verified.get("when")) if isinstance(verified, dict) else ""
    on = f" on {host}" if host else ""
    took = f" in {seconds_text(seconds)}" if isinstance(seconds, (int, float)) else ""
    count = f"; {ran} measured{took}" if ran is not None else ""
    return f"{_day(when)}{on}{count}{again and f'; verified{again}'}"


def _day(when: object) -> str:
    return f" {time.strftime('%Y-%m-%d %H:%M', time.localtime(when))}" if isinstance(when, (int, float)) else ""


def _candidates(record: Record, limit: int, terminal: Terminal) -> None:
    rows = list(_rows(record))
    if not rows:
        return
    terminal.line()
    terminal.table(_COLUMNS, rows[: limit or None], "  ")
    if 0 < limit < len(rows):
        terminal.line(f"  and {len(rows) - limit} more; --limit 0 shows all", "dim")
    if others := len(body_of(record).measurements) - len(rows):
        terminal.line(f"  and {others} measured with other code or versions; --json prints them", "dim")


def _rows(record: Record) -> Iterator[tuple[str, ...]]:
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
            said = clean(f"{m.failure.kind}: {m.failure.message}".splitlines()[0])
            yield "", "failed", "", "", config_text(m.config), said


def _explain_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("what", metavar="ID_OR_KERNEL", help="first digits of an id, or a kernel")
    text = "explain the call with this key, in the book or not; `tunebook show --json` prints keys"
    parser.add_argument("--key", metavar="JSON", help=text)


def _explain(options: Namespace, terminal: Terminal) -> int:
    """Explain which configuration a new process would find for a call, and why.

    Shows the tier that answers, the measurements and how certain they are, failed candidates, and similar entries. For
    a live call, use kernel.explain(...) in the program. Exits with 1 if the book has no entry for the call.
    """
    catalogue = Catalogue(book_of(options))
    if options.key is None:
        newest = find_newest(catalogue, options, terminal)[1]
        explanation = explain_entry(catalogue, newest.problem, newest)
    else:
        problem = _problem_with(options.key, find(catalogue, options.what, filters_of(options)))
        explanation = explain_entry(catalogue, problem, catalogue.store.get(problem))
    if terminal.json:
        terminal.value(_as_json(explanation))
    else:
        write(explanation, terminal)
    return NO if explanation.record is None else DONE


def _problem_with(key: str, found: NamedEntries) -> Problem:
    known = {(group.op, group.device) for group in found.groups} | {(e.op, e.device) for e in found.listed}
    if len(known) > 1:
        listed = "".join(f"\n  {op} on {device}" for op, device in sorted(known))
        raise UsageError(f"--key needs one kernel on one device; choose one of these with --device:{listed}")
    ((op, device),) = known
    # A kernel's own key builder may make keys of any form.
    with suppress(ValueError):
        key = canonical_json(json.loads(key))
    return Problem(device, op, key)


def write(explanation: Explanation, terminal: Terminal) -> None:
    """Write an explanation, wrapped to the width of the terminal; drawings are cut."""
    for line in explanation.lines():
        indent = "  " if line.role in ("item", "drawing") else ""
        label, text = clean(line.label), clean(line.text)
        style = {"title": "bold", "answer": "green"}.get(line.role, "")
        room = terminal.width - len(indent) - len(label)
        first, *rest = [text[:room]] if line.role == "drawing" else wrapped(text, room)
        terminal.line(f"{indent}{terminal.styled(label, 'dim')}{terminal.styled(first, style)}")
        # Further lines begin below the text, or near the left edge of a narrow terminal.
        behind = len(indent) + (len(label) or 2)
        hanging = " " * (behind if terminal.width >= 3 * behind else 4)
        if rest:
            terminal.lines(hanging + more for more in wrapped(" ".join(rest), terminal.width - len(hanging)))


def _as_json(explanation: Explanation) -> dict[str, Any]:
    selection, verdict, problem = explanation.selection, explanation.verdict, explanation.problem
    near = explanation.near_misses
    found: dict[str, Any] = {
        **named(problem),
        "call": spell_out(problem.call_key),
        "answer": None if explanation.record is None else plain(explanation.record.head.config),
        "source": selection.source if isinstance(selection, Selection) else None,
        "tried": [{"tier": tier, "said": said} for tier, said in selection.tried],
        "differences": list(explanation.differences),
        "failures": [{"reason": failed.reason, "configs": list(failed.configs)} for failed in explanation.failed],
        "near_misses": [{"id": problem_id(miss.problem), "differences": list(miss.differences)} for miss in near],
    }
    if verdict is not None:
        found["rule"] = verdict.rule
        found["tied"] = [plain(ranked.measurement.config) for ranked in verdict.tied]
        found["ranking"] = []
        for time_s, m in ((ranked.value_s, ranked.measurement) for ranked in verdict.ranking):
            samples = list(m.valid_samples_s)
            found["ranking"].append({"config": plain(m.config), "seconds": time_s, "samples": samples})
    return found


SHOW = Verb("tunebook show matmul", _show, (*FILTERS, "json"), _arguments)
EXPLAIN = Verb("tunebook explain matmul", _explain, (*FILTERS, "json"), _explain_arguments)
