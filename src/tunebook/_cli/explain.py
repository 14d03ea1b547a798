"""Explain which configuration a new process would find for a call, and why.

Shows the tier that answers, the measurements and how certain they are, failed candidates, and similar entries. It reads
the book alone: a program whose code has changed since tunes anew. For a live call, use kernel.explain(...) in the
program. Exits with 1 if the book has no entry for the call.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

from tunebook._api.explain import Explanation, explain_entry
from tunebook._base.record_format import canonical_json
from tunebook._base.vocabulary import Problem
from tunebook._cli._entries import (
    SHORT_ID,
    NamedEntries,
    config_text,
    find,
    find_newest,
    named,
    parsed,
    plain,
    record_of,
)
from tunebook._cli._filters import FILTERS, book_to_read, filters_of
from tunebook._cli._verb import DONE, NO, ArgumentParser, Namespace, Terminal, UsageError, Verb
from tunebook._keys.call_key import spell_out
from tunebook._selection.env_pins import fits, parse_values, reason_against, values_in
from tunebook._selection.recorded_decision import measured_for_choice, names_in
from tunebook._selection.selector import NoSelection, Selection
from tunebook.stores import problem_id, shipped_in
from tunebook.stores._listing import Catalogue


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("what", metavar="ID_OR_KERNEL", help="first digits of an id, or a kernel")
    text = "explain the call with this key, in the book or not; `tunebook show --json` prints keys"
    parser.add_argument("--key", metavar="JSON", help=text)


def _run(options: Namespace, terminal: Terminal) -> int:
    catalogue = Catalogue(book_to_read(options))
    if options.key is None:
        listed, newest = find_newest(catalogue, options, terminal)
        shipped = "" if listed.where == catalogue.store.where else listed.where
        explanation = explain_entry(catalogue, newest.problem, newest, shipped)
    else:
        problem = _problem_with(options.key, find(catalogue, options.what, filters_of(options)))
        record = catalogue.store.get(problem)
        explanation = explain_entry(catalogue, problem, record, shipped_in(catalogue.store, problem))
    explanation = replace(explanation, selection=_with_checked_pin(explanation))
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
    try:
        key = canonical_json(json.loads(key))
    except ValueError as error:
        # A kernel's own key builder may make keys of any form.
        (newest,) = found.newest(1)
        if isinstance(parsed(record_of(newest).problem.call_key), dict):
            like = f"`tunebook show {newest.id[:SHORT_ID]} --json` prints one"
            raise UsageError(f"--key {key}: the keys of {op} are JSON, and this is not: {error}; {like}") from None
    return Problem(device, op, key)


def _with_checked_pin(explanation: Explanation) -> Selection[Any] | NoSelection:
    """Return the selection; a pin of TUNEBOOK_PIN is compared with the measured candidates, as a program does it."""
    selection, record = explanation.selection, explanation.record
    measured = () if record is None else measured_for_choice(record.body)
    if record is None or not measured or not isinstance(selection, Selection) or selection.source != "pinned":
        return selection
    wanted, configs = dict(parse_values(selection.config)), {m.fingerprint: m.config for m in measured}
    fitting = [config for config in configs.values() if fits(config, wanted)]
    if len(fitting) == 1:
        return selection._replace(config=config_text(fitting[0], names_in(record)))
    if fitting:
        said = f"{selection.config} fits {len(fitting)} candidates: a program stops with an error; name one exactly"
        return NoSelection(selection.problem, (*selection.tried, ("pinned", said)))
    against = reason_against(wanted, values_in(configs.values()))
    said = f"{against}; a program stops with an error if it has no such candidate"
    return selection._replace(tried=(*selection.tried, ("pinned", said)))


def write(explanation: Explanation, terminal: Terminal) -> None:
    """Write an explanation, wrapped to the width of the terminal; drawings are cut."""
    for line in explanation.lines():
        style = {"title": "bold", "answer": "green"}.get(line.role, "")
        first, *rest = line.wrapped(terminal.width)
        label, text = first[: len(line.prefix)], first[len(line.prefix) :]
        terminal.line(f"{terminal.styled(label, 'dim')}{terminal.styled(text, style)}")
        terminal.lines(rest)


def _as_json(explanation: Explanation) -> dict[str, Any]:
    selection, verdict, problem = explanation.selection, explanation.verdict, explanation.problem
    near = explanation.near_misses
    found: dict[str, Any] = {
        **named(problem),
        "call": spell_out(problem.call_key),
        "answer": None if explanation.record is None else plain(explanation.record.head.config),
        "source": selection.source if isinstance(selection, Selection) else None,
        "shipped_in": explanation.shipped_in or None,
        "tried": [{"tier": tier, "said": said} for tier, said in selection.tried],
        "differences": list(explanation.differences),
        "failures": [{"reason": failed.reason, "configs": list(failed.configs)} for failed in explanation.failed],
        "near_misses": [{"id": problem_id(miss.problem), "differences": list(miss.differences)} for miss in near],
    }
    if verdict is not None:
        found["rule"] = verdict.rule
        found["heuristic"] = None if (model := explanation.heuristic) is None else plain(model.config)
        found["gain"] = explanation.gain
        found["tied"] = [plain(ranked.measurement.config) for ranked in verdict.tied]
        found["ranking"] = []
        for time_s, m in ((ranked.value_s, ranked.measurement) for ranked in verdict.ranking):
            seconds, samples = time_s if math.isfinite(time_s) else None, list(m.valid_samples_s)
            found["ranking"].append({"config": plain(m.config), "seconds": seconds, "samples": samples})
    return found


VERB = Verb("tunebook explain matmul", _run, (*FILTERS, "json"), _arguments, __doc__)
