"""`tunebook explain`: why a kernel gets the configuration that it gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebook._cli._filters import add_filters, add_json, book_of, filters_of
from tunebook._cli._terminal import clean, wrapped
from tunebook._cli._verb import DONE, NO, UsageError, Verb

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from tunebook._api.explain import Explanation
    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Problem
    from tunebook._cli._terminal import Terminal
    from tunebook.stores._listing import Catalogue


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("what", metavar="ID_OR_KERNEL", help="the beginning of an id, or a kernel's name")
    parser.add_argument(
        "--key", metavar="JSON", help="explain this call of the kernel, known or not; `tunebook show --json` has keys"
    )
    add_filters(parser)
    add_json(parser)


def _run(options: Namespace, terminal: Terminal) -> int:
    from tunebook._api.explain import explain_entry  # noqa: PLC0415 - as above
    from tunebook._cli._environment import environment_here  # noqa: PLC0415 - for what is found only
    from tunebook.stores._listing import Catalogue  # noqa: PLC0415 - as above

    catalogue = Catalogue(book_of(options))
    problem, record = _asked(options, catalogue, terminal)
    explanation = explain_entry(catalogue, problem, record, environment_here)
    if terminal.json:
        terminal.value(_as_json(explanation))
    else:
        write(explanation, terminal)
    return NO if explanation.record is None else DONE


def _asked(options: Namespace, catalogue: Catalogue, terminal: Terminal) -> tuple[Problem, Record | None]:
    from tunebook._base.vocabulary import Problem  # noqa: PLC0415 - as above
    from tunebook._cli._entries import find, find_newest  # noqa: PLC0415 - as above

    filters = filters_of(options)
    if options.key is None:
        record = find_newest(catalogue, options.what, filters, terminal)[1]
        return record.problem, record
    found = find(catalogue, options.what, filters)
    known = {(group.op, group.device) for group in found.groups} | {(e.op, e.device) for e in found.listed}
    if len(known) > 1:
        listed = "".join(f"\n  {op} on {device}" for op, device in sorted(known))
        raise UsageError(f"--key needs one kernel on one device; these fit, so say which with --device:{listed}")
    ((op, device),) = known
    problem = Problem(device, op, _canonical(options.key))
    return problem, catalogue.store.get(problem)


def _canonical(key: str) -> str:
    import json  # noqa: PLC0415 - loaded by then

    from tunebook._base.record_format import canonical_json  # noqa: PLC0415 - as above

    try:
        return canonical_json(json.loads(key))
    except ValueError:
        return key  # a kernel's own key builder may make keys of any form


def write(explanation: Explanation, terminal: Terminal) -> None:
    """Write an explanation, as wide as the terminal is."""
    for number, line in enumerate(str(explanation).splitlines()):
        text = clean(line)
        style = "bold" if number == 0 else "green" if text.startswith("answer: ") else ""
        first, *rest = _fitting(text, terminal.width)
        terminal.line(_named(first, terminal) if text.startswith("  ") else terminal.styled(first, style))
        terminal.lines(rest)


def _fitting(line: str, width: int) -> list[str]:
    """Return a line, or several where the terminal is narrower; of a drawing, what fits."""
    if len(line) <= width or any(c in line for c in "▁█·"):
        return [line[:width]]
    lead = len(line) - len(line.lstrip())
    name, gap, rest_of_it = line.strip().partition("  ")
    behind = len(line) - len(rest_of_it.lstrip()) if gap and len(name) < 12 else lead + 2
    indent = " " * (behind if width >= 3 * behind else 4)
    head, *rest = wrapped(line.strip(), width - lead)
    more = wrapped(" ".join(rest), width - len(indent)) if rest else []
    return [" " * lead + head, *(indent + part for part in more)]


def _named(line: str, terminal: Terminal) -> str:
    """Dim the name at the beginning of a line, which is set apart by two spaces; a line that goes on has none."""
    name, gap, rest = line[2:].partition("  ")
    return f"  {terminal.styled(name, 'dim')}{gap}{rest}" if name.strip() and gap else line


def _as_json(explanation: Explanation) -> dict[str, Any]:
    from tunebook._cli._entries import plain  # noqa: PLC0415 - as above
    from tunebook._keys.call_key import spell_out  # noqa: PLC0415 - as above
    from tunebook._selection.selector import Selection  # noqa: PLC0415 - as above
    from tunebook.stores import problem_id  # noqa: PLC0415 - as above

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
        found["ranking"] = [
            {
                "config": plain(r.measurement.config),
                "seconds": r.value_s,
                "samples": list(r.measurement.valid_samples_s),
            }
            for r in verdict.ranking
        ]
    return found


VERB = Verb(
    "explain",
    "say why a kernel gets its configuration",
    "tunebook explain matmul",
    _arguments,
    _run,
    "Say what a new process would find for a call: which tier answers, what was measured and how sure that is, what "
    "failed, and what nearly fits. For a live call, use kernel.explain(...) in the program. Exits with 1 if there is "
    "no entry.",
)
