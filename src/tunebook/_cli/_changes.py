"""The table of differences between two books, of `tunebook diff` and of the preview of `tunebook merge`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from tunebook._base.errors import clean
from tunebook._cli._entries import ID, KERNEL, SHORT_ID, decision_text, key_text
from tunebook._cli._terminal import TextColumn
from tunebook.stores import problem_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Problem
    from tunebook._cli._terminal import Terminal

# A kind of `MARKS`, the problem, and its record before and after, of which one may be missing.
EntryChange: TypeAlias = "tuple[str, Problem, tuple[Record | None, Record | None]]"
MARKS: Final = {"removed": "-", "added": "+", "changed": "~"}
_COLUMNS: Final = (
    TextColumn("", style="bold"),
    ID,
    KERNEL,
    TextColumn("device", give=4, from_width=90),
    TextColumn("call", give=4, from_width=70),
    TextColumn("configuration", style="green", whole=True),
)


def write_changes(changes: Sequence[EntryChange], terminal: Terminal) -> None:
    """Write a line for each change, with the configuration before and after."""
    devices = {problem.device for _, problem, _ in changes}
    rows = []
    for kind, problem, records in changes:
        device = clean(problem.device) if len(devices) > 1 else ""
        names = problem_id(problem)[:SHORT_ID], clean(problem.op), device, key_text(problem.call_key)
        configs = list(dict.fromkeys(decision_text(record) for record in records if record is not None))
        alike = kind == "changed" and len(configs) == 1
        rows.append((MARKS[kind], *names, " → ".join(configs) + (", with other measurements" if alike else "")))
    terminal.table(_COLUMNS, rows)
