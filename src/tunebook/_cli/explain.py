"""Explain which configuration a new process would find for a call, and why.

Shows the tier that answers, the measurements and how certain they are, failed candidates, and similar entries. For a
live call, use kernel.explain(...) in the program. Exits with 1 if the book has no entry for the call.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from tunebook._api.explain import explain_entry
from tunebook._base.record_format import canonical_json
from tunebook._base.vocabulary import Problem
from tunebook._cli._entries import add_entry, find, find_newest, plain
from tunebook._cli._filters import add_options, book_of, filters_of
from tunebook._cli._terminal import clean, wrapped
from tunebook._cli._verb import DONE, NO, ArgumentParser, Namespace, Terminal, UsageError, Verb
from tunebook._keys.call_key import spell_out
from tunebook._selection.selector import Selection
from tunebook.stores import problem_id
from tunebook.stores._listing import Catalogue

if TYPE_CHECKING:
    from tunebook._api.explain import Explanation
    from tunebook._base.record_format import Record

_STYLES: Final = {"title": "bold", "answer": "green"}


def _arguments(parser: ArgumentParser) -> None:
    add_entry(parser, "first digits of an id, or a kernel")
    text = "explain the call with this key, in the book or not; `tunebook show --json` prints keys"
    parser.add_argument("--key", metavar="JSON", help=text)
    add_options(parser, "json")


def _run(options: Namespace, terminal: Terminal) -> int:
    catalogue = Catalogue(book_of(options))
    explanation = explain_entry(catalogue, *_problem_of(options, catalogue, terminal))
    if terminal.json:
        terminal.value(_as_json(explanation))
    else:
        write(explanation, terminal)
    return NO if explanation.record is None else DONE


def _problem_of(options: Namespace, catalogue: Catalogue, terminal: Terminal) -> tuple[Problem, Record | None]:
    if options.key is None:
        record = find_newest(catalogue, options, terminal)[1]
        return record.problem, record
    found = find(catalogue, options.what, filters_of(options))
    known = {(group.op, group.device) for group in found.groups} | {(e.op, e.device) for e in found.listed}
    if len(known) > 1:
        listed = "".join(f"\n  {op} on {device}" for op, device in sorted(known))
        raise UsageError(f"--key needs one kernel on one device; choose one of these with --device:{listed}")
    ((op, device),) = known
    try:
        key = canonical_json(json.loads(options.key))
    except ValueError:
        key = options.key  # a kernel's own key builder may make keys of any form
    problem = Problem(device, op, key)
    return problem, catalogue.store.get(problem)


def write(explanation: Explanation, terminal: Terminal) -> None:
    """Write an explanation, wrapped to the width of the terminal; drawings are cut."""
    for line in explanation.lines():
        indent = "  " if line.role in ("item", "drawing") else ""
        label, text, style = clean(line.label), clean(line.text), _STYLES.get(line.role, "")
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
    found: dict[str, Any] = {
        "id": problem_id(problem),
        "kernel": problem.op,
        "device": problem.device,
        "call_key": problem.call_key,
        "call": spell_out(problem.call_key),
        "answer": None if explanation.record is None else plain(explanation.record.head.config),
        "source": selection.source if isinstance(selection, Selection) else None,
        "tried": [{"tier": tier, "said": said} for tier, said in selection.tried],
        "differences": list(explanation.differences),
        "failures": [{"reason": failed.reason, "configs": list(failed.configs)} for failed in explanation.failed],
        "near_misses": [
            {"id": problem_id(miss.problem), "differences": list(miss.differences)} for miss in explanation.near_misses
        ],
    }
    if verdict is not None:
        found["rule"] = verdict.rule
        found["tied"] = [plain(ranked.measurement.config) for ranked in verdict.tied]
        measured = [(ranked.value_s, ranked.measurement) for ranked in verdict.ranking]
        found["ranking"] = [
            {"config": plain(m.config), "seconds": time_s, "samples": list(m.valid_samples_s)} for time_s, m in measured
        ]
    return found


VERB = Verb("tunebook explain matmul", _arguments, _run, __doc__)
