"""The tables of a page: columns of values, which the page sorts, filters and writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tunebook._base.vocabulary import Json
    from tunebook._report.detail import Detail
    from tunebook._report.model import Model

Kind: TypeAlias = Literal["text", "code", "count", "time", "ratio", "part", "date"]


class Column(NamedTuple):
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


def tables_of(model: Model) -> dict[str, Json]:
    """Return every table of a page by its name."""
    tables = {"entries": _entries(model), "groups": _groups(model), "failures": _failures(model)}
    tables |= {f"detail{number}": _candidates(detail) for number, detail in enumerate(model.details)}
    return {name: [column.to_json() for column in columns] for name, columns in tables.items()}


def _entries(model: Model) -> list[Column]:
    entries = model.entries
    columns = [
        Column("Kernel", "text", [e.problem.op for e in entries], pick=True),
        Column("Device", "text", [e.problem.device for e in entries], pick=True),
        Column("Call", "text", [e.call for e in entries], wide=True),
        Column("Configuration", "code", [e.config for e in entries], wide=True),
        Column("Time", "time", [e.best_s for e in entries], told="typical time of one run with this configuration"),
        Column("Gain", "ratio", [e.speedup for e in entries], down=True, told="times faster than the default"),
        Column("Of roof", "part", [e.reached for e in entries], down=True, told="part of what the device can do"),
        Column("Tried", "count", [e.measured for e in entries], down=True, told="candidates, failed ones included"),
        Column("Failed", "count", [sum(e.failed.values()) for e in entries], down=True),
        Column("Measured (UTC)", "date", [int(e.when) or None for e in entries], down=True),
        Column("Origin", "text", [e.origin for e in entries], pick=True),
    ]
    return list(_with_something(columns))


def _groups(model: Model) -> list[Column]:
    groups = model.groups
    columns = [
        Column("Kernel", "text", [g.op for g in groups]),
        Column("Device", "text", [g.device for g in groups]),
        Column("Entries", "count", [g.entries for g in groups], down=True),
        Column("Gain", "ratio", [g.typical_speedup for g in groups], down=True, told="geometric mean over the default"),
        Column("Least", "ratio", [g.speedups[0] if g.speedups else None for g in groups]),
        Column("Most", "ratio", [g.speedups[-1] if g.speedups else None for g in groups], down=True),
        Column("Tried", "count", [g.measured for g in groups], down=True, told="candidates, failed ones included"),
        Column("Failed", "count", [g.failed for g in groups], down=True),
        Column("Tuning", "time", [g.seconds or None for g in groups], down=True),
        Column("Compilers", "time", [g.compile_s or None for g in groups], down=True, told="summed over candidates"),
    ]
    return list(_with_something(columns))


def _failures(model: Model) -> list[Column]:
    failures = model.failures
    return [
        Column("Kernel", "text", [f.op for f in failures], pick=True),
        Column("Kind", "text", [f.kind for f in failures], pick=True),
        Column("What was said", "text", [f.message for f in failures], wide=True),
        Column("Candidates", "count", [f.candidates for f in failures], down=True),
        Column("For example", "code", [f.example for f in failures], wide=True),
    ]


def _candidates(detail: Detail) -> list[Column]:
    shown = detail.candidates
    best = next((c.value_s for c in shown if c.value_s), None)
    names = dict.fromkeys(name for c in shown for name in c.axes)
    columns = [
        Column("Role", "text", [c.role for c in shown], marks=True),
        *(Column(name, *_axis([c.axes.get(name) for c in shown])) for name in names),
        Column("Time", "time", [c.value_s for c in shown], told="typical time of one run"),
        Column("Of best", "ratio", [c.value_s / best if c.value_s and best else None for c in shown]),
        Column("Samples", "count", [len(c.samples_s) or None for c in shown], down=True),
        Column("Compiled in", "time", [c.compile_s for c in shown], down=True),
        Column("Failure", "text", [c.failure for c in shown], wide=any(c.failure for c in shown)),
    ]
    return list(_with_something(columns))


def _axis(values: Sequence[object]) -> tuple[Kind, list[str | float | None]]:
    if all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values if v is not None):
        return "count", [v if isinstance(v, (int, float)) else None for v in values]
    return "text", ["" if v is None else str(v) for v in values]


def _with_something(columns: Iterable[Column]) -> Iterable[Column]:
    """Leave out the columns in which nothing stands."""
    return (column for column in columns if column.pick or any(v not in (None, "", 0) for v in column.values))
