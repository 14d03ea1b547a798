"""The tables of a page: columns of values, which the page sorts, filters and writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tunebook._base.vocabulary import Json
    from tunebook._report.detail import Detail
    from tunebook._report.model import ReportModel

Kind: TypeAlias = Literal["text", "code", "count", "time", "ratio", "part", "date"]


class TableColumn(NamedTuple):
    """A column. `pick` gives it a list to choose from, `wide` room; `down` sorts it from the largest at first."""

    name: str
    kind: Kind
    values: Sequence[str | float | None]
    pick: bool = False
    wide: bool = False
    down: bool = False
    told: str = ""
    marks: bool = False

    def to_json(self) -> Json:
        """Return it as the page reads it: text that repeats is written once."""
        fields: dict[str, Json] = {"name": self.name, "kind": self.kind}
        fields |= {n: v for n, v in (("wide", self.wide), ("down", self.down), ("marks", self.marks)) if v}
        if self.told:
            fields["told"] = self.told
        distinct = list(dict.fromkeys(v for v in self.values if isinstance(v, str)))
        if self.kind in ("text", "code") and (self.pick or 2 * len(distinct) < len(self.values)):
            number = {text: index for index, text in enumerate(sorted(distinct))}
            at: list[Json] = [number.get(v) if isinstance(v, str) else None for v in self.values]
            return {**fields, "pick": self.pick, "of": sorted(distinct), "at": at}  # type: ignore[dict-item] # strings
        return {**fields, "at": [_short(value) for value in self.values]}


def _short(value: str | float | None) -> Json:
    # Four digits are more than any measurement has, and a third of what a double is written with.
    return float(f"{value:.4g}") if isinstance(value, float) else value


def tables_of(model: ReportModel) -> dict[str, Json]:
    """Return every table of a page by its name."""
    tables = {"entries": _entries(model), "groups": _groups(model), "failures": _failures(model)}
    tables |= {f"detail{number}": _candidates(detail) for number, detail in enumerate(model.details)}
    return {name: [column.to_json() for column in columns] for name, columns in tables.items()}


def _entries(model: ReportModel) -> list[TableColumn]:
    entries = model.entries
    columns = [
        TableColumn("Kernel", "text", [e.problem.op for e in entries], pick=True),
        TableColumn("Device", "text", [e.problem.device for e in entries], pick=True),
        TableColumn("Call", "text", [e.call for e in entries], wide=True),
        TableColumn("Configuration", "code", [e.config for e in entries], wide=True),
        TableColumn(
            "Time", "time", [e.best_s for e in entries], told="typical time of one run with this configuration"
        ),
        TableColumn("Gain", "ratio", [e.speedup for e in entries], down=True, told="times faster than the default"),
        TableColumn("Of roof", "part", [e.reached for e in entries], down=True, told="part of what the device can do"),
        TableColumn(
            "Tried", "count", [e.measured for e in entries], down=True, told="candidates, failed ones included"
        ),
        TableColumn("Failed", "count", [sum(e.failed.values()) for e in entries], down=True),
        TableColumn("Measured (UTC)", "date", [int(e.when) or None for e in entries], down=True),
        TableColumn("Origin", "text", [e.origin for e in entries], pick=True),
    ]
    return list(_with_something(columns))


def _groups(model: ReportModel) -> list[TableColumn]:
    groups = model.groups
    columns = [
        TableColumn("Kernel", "text", [g.op for g in groups]),
        TableColumn("Device", "text", [g.device for g in groups]),
        TableColumn("Entries", "count", [g.entries for g in groups], down=True),
        TableColumn(
            "Gain", "ratio", [g.typical_speedup for g in groups], down=True, told="geometric mean over the default"
        ),
        TableColumn("Least", "ratio", [g.speedups[0] if g.speedups else None for g in groups]),
        TableColumn("Most", "ratio", [g.speedups[-1] if g.speedups else None for g in groups], down=True),
        TableColumn("Tried", "count", [g.measured for g in groups], down=True, told="candidates, failed ones included"),
        TableColumn("Failed", "count", [g.failed for g in groups], down=True),
        TableColumn("Tuning", "time", [g.seconds or None for g in groups], down=True),
        TableColumn(
            "Compilers", "time", [g.compile_s or None for g in groups], down=True, told="summed over candidates"
        ),
    ]
    return list(_with_something(columns))


def _failures(model: ReportModel) -> list[TableColumn]:
    failures = model.failures
    return [
        TableColumn("Kernel", "text", [f.op for f in failures], pick=True),
        TableColumn("Kind", "text", [f.kind for f in failures], pick=True),
        TableColumn("What was said", "text", [f.message for f in failures], wide=True),
        TableColumn("Candidates", "count", [f.candidates for f in failures], down=True),
        TableColumn("For example", "code", [f.example for f in failures], wide=True),
    ]


def _candidates(detail: Detail) -> list[TableColumn]:
    shown = detail.candidates
    best = next((c.value_s for c in shown if c.value_s), None)
    names = dict.fromkeys(name for c in shown for name in c.axes)
    columns = [
        TableColumn("Role", "text", [c.role for c in shown], marks=True),
        *(TableColumn(name, *_axis([c.axes.get(name) for c in shown])) for name in names),
        TableColumn("Time", "time", [c.value_s for c in shown], told="typical time of one run"),
        TableColumn("Of best", "ratio", [c.value_s / best if c.value_s and best else None for c in shown]),
        TableColumn("Samples", "count", [len(c.samples_s) or None for c in shown], down=True),
        TableColumn("Compiled in", "time", [c.compile_s for c in shown], down=True),
        TableColumn("Failure", "text", [c.failure for c in shown], wide=any(c.failure for c in shown)),
    ]
    return list(_with_something(columns))


def _axis(values: Sequence[object]) -> tuple[Kind, list[str | float | None]]:
    if all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values if v is not None):
        return "count", [v if isinstance(v, (int, float)) else None for v in values]
    return "text", ["" if v is None else str(v) for v in values]


def _with_something(columns: Iterable[TableColumn]) -> Iterable[TableColumn]:
    """Leave out the columns in which nothing stands."""
    return (column for column in columns if column.pick or any(v not in (None, "", 0) for v in column.values))
