"""The tables of a page: columns of values. The page's script sorts, filters and formats them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tunebook._base.vocabulary import Json
    from tunebook._report.detail import Detail
    from tunebook._report.model import ReportModel

Kind: TypeAlias = Literal["text", "code", "count", "time", "ratio", "part", "date"]


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
    """Return every table of a page by its name, without the columns that are empty."""
    tables = {"entries": _entries(model), "groups": _groups(model), "failures": _failures(model)}
    tables |= {f"detail{number}": _candidates(detail) for number, detail in enumerate(model.details)}
    return {
        name: [c.to_json() for c in columns if c.pick or any(v not in (None, "", 0) for v in c.values)]
        for name, columns in tables.items()
    }


def _entries(model: ReportModel) -> list[TableColumn]:
    entries = model.entries
    return [
        TableColumn("Kernel", "text", [e.problem.op for e in entries], pick=True),
        TableColumn("Device", "text", [e.problem.device for e in entries], pick=True),
        TableColumn("Call", "text", [e.call for e in entries], wide=True),
        TableColumn("Configuration", "code", [e.config for e in entries], wide=True),
        TableColumn("Time", "time", [e.best_s for e in entries], "typical time per run"),
        TableColumn("Gain", "ratio", [e.speedup for e in entries], "times faster than the default", down=True),
        TableColumn("Of roof", "part", [e.reached for e in entries], "part of the device's peak", down=True),
        TableColumn("Tried", "count", [e.measured for e in entries], "candidates, failed ones too", down=True),
        TableColumn("Failed", "count", [sum(e.failed.values()) for e in entries], down=True),
        TableColumn("Measured (UTC)", "date", [int(e.when) or None for e in entries], down=True),
        TableColumn("Origin", "text", [e.origin for e in entries], pick=True),
    ]


def _groups(model: ReportModel) -> list[TableColumn]:
    groups = model.groups
    return [
        TableColumn("Kernel", "text", [g.op for g in groups]),
        TableColumn("Device", "text", [g.device for g in groups]),
        TableColumn("Entries", "count", [g.entries for g in groups], down=True),
        TableColumn("Gain", "ratio", [g.typical_speedup for g in groups], "geometric mean over the default", down=True),
        TableColumn("Least", "ratio", [g.speedups[0] if g.speedups else None for g in groups]),
        TableColumn("Most", "ratio", [g.speedups[-1] if g.speedups else None for g in groups], down=True),
        TableColumn("Tried", "count", [g.measured for g in groups], "candidates, failed ones too", down=True),
        TableColumn("Failed", "count", [g.failed for g in groups], down=True),
        TableColumn("Tuning", "time", [g.seconds or None for g in groups], down=True),
        TableColumn("Compilers", "time", [g.compile_s or None for g in groups], "summed over candidates", down=True),
    ]


def _failures(model: ReportModel) -> list[TableColumn]:
    failures = model.failures
    return [
        TableColumn("Kernel", "text", [f.op for f in failures], pick=True),
        TableColumn("Kind", "text", [f.kind for f in failures], pick=True),
        TableColumn("Message", "text", [f.message for f in failures], wide=True),
        TableColumn("Candidates", "count", [f.candidates for f in failures], down=True),
        TableColumn("Example", "code", [f.example for f in failures], wide=True),
    ]


def _candidates(detail: Detail) -> list[TableColumn]:
    shown = detail.candidates
    best = next((c.value_s for c in shown if c.value_s), None)
    names = dict.fromkeys(name for c in shown for name in c.axes)
    return [
        TableColumn("Role", "text", [c.role for c in shown], marks=True),
        *(_parameter(name, [c.axes.get(name) for c in shown]) for name in names),
        TableColumn("Time", "time", [c.value_s for c in shown], "typical time per run"),
        TableColumn("Of best", "ratio", [c.value_s / best if c.value_s and best else None for c in shown]),
        TableColumn("Samples", "count", [len(c.samples_s) or None for c in shown], down=True),
        TableColumn("Compiled in", "time", [c.compile_s for c in shown], down=True),
        TableColumn("Failure", "text", [c.failure for c in shown], wide=any(c.failure for c in shown)),
    ]


def _parameter(name: str, values: Sequence[object]) -> TableColumn:
    if all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values if v is not None):
        return TableColumn(name, "count", [v if isinstance(v, (int, float)) else None for v in values])
    return TableColumn(name, "text", ["" if v is None else str(v) for v in values])
