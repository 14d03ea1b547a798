"""The tables of a page, as the values that its script sorts, filters and formats."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from tunebook._base.vocabulary import INTERRUPTED
from tunebook._report.entry import NONE_WORKED, PINNED
from tunebook.stores import problem_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tunebook._base.vocabulary import Json
    from tunebook._report.comparison import BookComparison
    from tunebook._report.detail import CandidateRow, Detail
    from tunebook._report.entry import ReportEntry
    from tunebook._report.model import ReportModel

ID_DIGITS: Final = 8  # as `tunebook ls` prints them
NO_WINNER: Final = {NONE_WORKED: "no winner", INTERRUPTED: INTERRUPTED}

Kind: TypeAlias = Literal[
    "text", "code", "count", "number", "time", "ratio", "part", "date", "flops", "bytes", "id", "command"
]  # fmt: skip


class TableColumn(NamedTuple):
    """A column. `pick` adds a list to choose from, `wide` more room; a click sorts a `down` column largest first."""

    name: str
    kind: Kind
    values: Sequence[str | float | None]
    hint: str = ""
    pick: bool = False
    wide: bool = False
    down: bool = False
    marks: bool = False

    def to_json(self) -> Json:
        """Return the column for the page's script; repeated text is written once."""
        fields: dict[str, Json] = {"name": self.name, "kind": self.kind}
        fields |= {n: v for n in ("hint", "wide", "down", "marks") if (v := getattr(self, n))}
        distinct = sorted({v for v in self.values if isinstance(v, str)})
        if self.kind in ("text", "code") and (self.pick or 2 * len(distinct) < len(self.values)):
            number = {text: index for index, text in enumerate(distinct)}
            at: list[Json] = [number.get(v) if isinstance(v, str) else None for v in self.values]
            return {**fields, "pick": self.pick, "of": distinct, "at": at}  # type: ignore[dict-item] # strings
        # Four digits are more than any measurement has, and a third of the length of a double.
        return {**fields, "at": [float(f"{v:.4g}") if isinstance(v, float) else v for v in self.values]}


def tables_of(model: ReportModel) -> dict[str, Json]:
    """Return every table by its name, without empty columns. The page's script sorts, filters and formats them."""
    tables = {"entries": _entries(model), "groups": _groups(model), "failures": _failed(model)}
    tables |= {"undecided": _undecided(model), "interrupted": _interrupted(model), "winners": _winners(model)}
    if model.comparison is not None:
        tables["changes"] = _changes(model, model.comparison)
    tables |= {f"detail{number}": _candidates(detail) for number, detail in enumerate(model.details)}
    return {
        name: [c.to_json() for c in columns if c.pick or any(v not in (None, "", 0) for v in c.values)]
        for name, columns in tables.items()
    }


def _entries(model: ReportModel) -> list[TableColumn]:
    entries = model.entries
    configs = [e.config or NO_WINNER.get(e.origin) for e in entries]
    return [
        TableColumn("Id", "id", [problem_id(e.problem)[:ID_DIGITS] for e in entries], "copies a command"),
        TableColumn("Kernel", "text", [e.problem.op for e in entries], pick=True, wide=True),
        *_device_column(model, [e.problem.device for e in entries]),
        TableColumn("Call", "text", [e.call for e in entries], wide=True),
        TableColumn("Configuration", "code", configs, wide=True, marks=True),
        TableColumn("Time", "time", [e.best_s for e in entries], "typical time per run"),
        TableColumn("Gain", "ratio", [e.speedup for e in entries], "times faster than the heuristic", down=True),
        TableColumn("Doubt", "text", [_doubt(e) for e in entries], "why a gain may be wrong or is missing"),
        TableColumn("Operations", "flops", [e.flops_per_s for e in entries], "operations per second", down=True),
        TableColumn("Bytes", "bytes", [e.bytes_per_s for e in entries], "bytes moved per second", down=True),
        TableColumn("Of roof", "part", [e.reached for e in entries], "part of the device's peak", down=True),
        TableColumn("Tried", "count", [e.measured for e in entries], "candidates, failed ones too", down=True),
        TableColumn("Failed", "count", [sum(e.failed.values()) for e in entries], down=True),
        TableColumn("Measured (UTC)", "date", [int(e.when) or None for e in entries], down=True),
        TableColumn("Origin", "text", [e.origin for e in entries], pick=True),
    ]


def _doubt(entry: ReportEntry) -> str:
    if entry.origin == PINNED:
        return "pinned by hand"
    return "drift" if entry.drift else "disturbed" if entry.disturbed else ""


def _device_column(model: ReportModel, devices: Sequence[str], *, pick: bool = True) -> list[TableColumn]:
    """Return the column of devices; none for a report with a single device, which is named at the top."""
    many = len(model.devices) > 1
    return [TableColumn("Device", "text", [model.devices[device] for device in devices], pick=pick)] if many else []


def _undecided(model: ReportModel) -> list[TableColumn]:
    entries = [entry for entry, _ in model.undecided]
    return [
        TableColumn("Kernel", "text", [e.problem.op for e in entries], pick=True),
        *_device_column(model, [e.problem.device for e in entries]),
        TableColumn("Call", "text", [e.call for e in entries], wide=True),
        TableColumn("Tried", "count", [e.measured for e in entries], down=True),
        TableColumn("First failure", "text", [said for _, said in model.undecided], wide=True),
        TableColumn("Id", "id", [problem_id(e.problem)[:ID_DIGITS] for e in entries], "copies a command"),
    ]


def _interrupted(model: ReportModel) -> list[TableColumn]:
    entries = model.interrupted
    return [
        TableColumn("Kernel", "text", [e.problem.op for e in entries], pick=True),
        *_device_column(model, [e.problem.device for e in entries]),
        TableColumn("Call", "text", [e.call for e in entries], wide=True),
        TableColumn("Tried", "count", [e.measured for e in entries], "candidates, failed ones too", down=True),
        TableColumn("Interrupted (UTC)", "date", [int(e.when) or None for e in entries], down=True),
        TableColumn("Id", "id", [problem_id(e.problem)[:ID_DIGITS] for e in entries], "copies a command"),
    ]


def _winners(model: ReportModel) -> list[TableColumn]:
    rows = [(each, letter, config) for each in model.by_size for letter, config in each.winners]
    return [
        TableColumn("Kernel", "text", [each.op for each, _, _ in rows]),
        *_device_column(model, [each.device for each, _, _ in rows], pick=False),
        TableColumn("Letter", "text", [letter for _, letter, _ in rows]),
        TableColumn("Winner", "code", [config for _, _, config in rows], wide=True),
    ]


def _changes(model: ReportModel, comparison: BookComparison) -> list[TableColumn]:
    changes = comparison.changes
    names = {**{c.problem.device: c.problem.device for c in changes}, **model.devices}
    devices = [names[c.problem.device] for c in changes]
    sides = [("Before", [c.before for c in changes]), ("Now", [c.now for c in changes])]
    return [
        TableColumn("Kernel", "text", [c.problem.op for c in changes], pick=True),
        *([TableColumn("Device", "text", devices, pick=True)] if len(set(devices)) > 1 else []),
        TableColumn("Call", "text", [c.call for c in changes], wide=True),
        TableColumn("Change", "text", [c.kind for c in changes], pick=True, marks=True),
        TableColumn("Times faster", "ratio", [c.factor for c in changes], down=True),
        *(TableColumn(f"{name}: time", "time", [side and side.best_s for side in each]) for name, each in sides),
        *(TableColumn(name, "code", [side.config if side else "" for side in each], wide=True) for name, each in sides),
    ]


def _groups(model: ReportModel) -> list[TableColumn]:
    groups = model.groups
    return [
        TableColumn("Kernel", "text", [g.op for g in groups]),
        *_device_column(model, [g.device for g in groups], pick=False),
        TableColumn("Entries", "count", [g.entries for g in groups], down=True),
        TableColumn(
            "Gain", "ratio", [g.typical_speedup for g in groups], "geometric mean over the heuristic", down=True
        ),
        TableColumn("Least", "ratio", [g.speedups[0] if g.speedups else None for g in groups]),
        TableColumn("Most", "ratio", [g.speedups[-1] if g.speedups else None for g in groups], down=True),
        TableColumn("Tried", "count", [g.measured for g in groups], "candidates, failed ones too", down=True),
        TableColumn("Failed", "count", [g.failed for g in groups], down=True),
        TableColumn("Tuning", "time", [g.seconds or None for g in groups], down=True),
        TableColumn("Compilers", "time", [g.compile_s or None for g in groups], "summed over candidates", down=True),
    ]


def _failed(model: ReportModel) -> list[TableColumn]:
    ops, kinds, messages, counts, examples = zip(*model.failures, strict=True) if model.failures else ((),) * 5
    return [
        TableColumn("Kernel", "text", ops, pick=True),
        TableColumn("Kind", "text", kinds, pick=True),
        TableColumn("Message", "text", messages, "the first of messages that differ only in numbers", wide=True),
        TableColumn("Candidates", "count", counts, down=True),
        TableColumn("Example", "code", examples, wide=True),
    ]


def _candidates(detail: Detail) -> list[TableColumn]:
    shown = detail.candidates
    best = next((c.value_s for c in shown if c.value_s), None)
    parameters = []
    for name in dict.fromkeys(name for c in shown for name in c.axes):
        values = [c.axes.get(name) for c in shown]
        numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
        if len(numbers) == len([v for v in values if v is not None]):
            parameters.append(TableColumn(name, "number", [v if isinstance(v, (int, float)) else None for v in values]))
        else:
            parameters.append(TableColumn(name, "text", ["" if v is None else str(v) for v in values]))
    return [
        TableColumn("Role", "text", [c.role for c in shown], marks=True),
        TableColumn("Remark", "text", [c.remark for c in shown], "times of eliminated candidates may not compare"),
        *parameters,
        TableColumn("Time", "time", [c.value_s for c in shown], "typical time per run"),
        TableColumn("Of best", "ratio", [c.value_s / best if c.value_s and best else None for c in shown]),
        TableColumn("Samples", "count", [len(c.samples_s) or None for c in shown], down=True),
        TableColumn("Compiled in", "time", [c.compile_s for c in shown], down=True),
        TableColumn("Failure", "text", [c.failure for c in shown], wide=any(c.failure for c in shown)),
        TableColumn("Pin", "command", [pin_command(detail, c) for c in shown], "copies the command that pins it"),
    ]


def pin_command(detail: Detail, candidate: CandidateRow) -> str | None:
    """Return the command that pins a candidate; None for one that failed, or that no command line can name."""
    if candidate.failure or not candidate.fields:
        return None
    words = [quote(f"{name}={value}") for name, value in candidate.fields.items()]
    return f"tunebook pin {detail.identifier[:ID_DIGITS]} {' '.join(words)}"
