"""One tuning in detail: every candidate, how the best was found, and which parameters made it fast.

The importance of a parameter is an analysis of variance of the logarithm of time, with one factor at a time: the
variance between the means of its values, minus the variance that as many random groups show (epsilon squared), as a
part of the whole variance. The logarithm, because a parameter that doubles the time does so for fast and slow
candidates alike.

One terrible value takes most of that variance, so a second importance asks which values the better quarter of the
candidates has (as PED-ANOVA does): the Pearson divergence of the quarter's values from the values of all candidates,
minus the divergence of as many random candidates.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import combinations
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from tunebook._base.config_codec import decode
from tunebook._base.errors import CodecError
from tunebook._keys.call_key import spell_out
from tunebook._report.entry import PINNED, MeasuredRecord, config_text, entry_of
from tunebook._selection.env_pins import fields_of, written
from tunebook._selection.recorded_decision import (
    disturbances_of,
    environments_verified,
    is_interrupted,
    names_in,
    tune_again,
    why_undecided,
)
from tunebook.stores import problem_id

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

    from tunebook._base.vocabulary import Json, Measurement
    from tunebook._report.entry import ReportEntry

Axes: TypeAlias = "Mapping[str, object]"
# The values of a parameter in order, grouped with their neighbours if there are too many; and the place of each
# candidate's value among them.
Levels: TypeAlias = tuple[tuple[str, ...], tuple[int, ...]]

TO: Final = "\u2013"  # an en dash, between the ends of a range
# More values are grouped with their neighbours: tiny groups say nothing.
LEVELS: Final = 12
# With fewer candidates than this, chance explains as much as any parameter.
ENOUGH: Final = 8
QUARTER: Final = 4 * ENOUGH // 2  # with fewer candidates, the better quarter is too small to compare
FINALISTS: Final = 8
_FEW: Final = 3  # samples; a single one may be an interrupted run
LATE: Final = 8  # a candidate with so many samples stayed in the race until late
HEAT_MAPS: Final = 6
SAMPLES: Final = 120  # drawn for each candidate; more overlap
CANDIDATES: Final = 500  # listed for each tuning, the fastest first


class CandidateRow(NamedTuple):
    """One candidate. `tried_s` counts from the beginning of the tuning; 0 if it was measured before.

    `fields` are its values as `tunebook pin` takes them. `remark` says if it is pinned, and if it left the race early:
    its few samples are of another moment.
    """

    config: str
    axes: dict[str, object]
    value_s: float | None
    samples_s: tuple[float, ...]
    compile_s: float | None
    tried_s: float
    failure: str
    fields: dict[str, str]
    role: str  # "chosen", "heuristic", "finalist" or ""
    remark: str


class HeatMap(NamedTuple):
    """The best time for each pair of values, over all candidates with both values.

    `cells[row][column]` is a time, `nan` if all candidates failed, or None if no candidate has both values.
    """

    x: str
    y: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    cells: tuple[tuple[float | None, ...], ...]


class Detail(NamedTuple):
    """One tuning. `candidates` has the fastest first and failed candidates last; `left_out` more are not listed.

    `in_quarter` has the importance of each parameter for the better quarter; empty with too few candidates.
    """

    entry: ReportEntry
    call: tuple[str, ...]
    rule: str
    notes: tuple[str, ...]
    candidates: tuple[CandidateRow, ...]
    left_out: int
    importances: tuple[tuple[str, float], ...]
    in_quarter: Mapping[str, float]
    heat_maps: tuple[HeatMap, ...]
    identifier: str

    @property
    def finalists(self) -> list[CandidateRow]:
        """The candidates whose samples are shown: the chosen one, the heuristic's, and the last in the race."""
        shown = [c for c in self.candidates if c.role or len(c.samples_s) >= LATE]
        shown = [c for c in shown if c.samples_s and c.value_s is not None]
        others = [c for c in shown if c.role not in ("chosen", "heuristic")]
        left_out = {id(c) for c in others[FINALISTS - (len(shown) - len(others)) :]}
        return [c for c in shown if id(c) not in left_out]

    @property
    def best_so_far(self) -> list[tuple[float, float]]:
        """The candidates that were faster than all before: when each was tried, and its time."""
        found: list[tuple[float, float]] = []
        for tried_s, value_s in sorted((c.tried_s, c.value_s) for c in self.candidates if c.value_s is not None):
            if not found or value_s < found[-1][1]:
                found.append((tried_s, value_s))
        return found


def detail_of(facts: MeasuredRecord) -> Detail:
    """Return a record in detail."""
    entry = entry_of(facts.record)
    candidates = sorted(
        _candidates(facts, entry), key=lambda c: (c.value_s is None, c.value_s or 0.0, c.failure, c.config)
    )
    valid = [c for c in candidates if c.value_s is not None]
    points, times_s = [c.axes for c in valid], [c.value_s or math.nan for c in valid]
    weights, in_quarter = importances(points, times_s), quarter_importances(points, times_s)
    # The parameters that matter for the better quarter are those to look at first.
    order = sorted((name for name, _ in weights), key=lambda name: -in_quarter.get(name, 0.0))
    maps = heat_maps([c.axes for c in candidates], [c.value_s for c in candidates], order, HEAT_MAPS)
    rule = facts.body.provenance.get("rule")
    return Detail(
        entry=entry,
        call=tuple(spell_out(facts.record.problem.call_key)),
        rule=rule if isinstance(rule, str) else "",
        notes=tuple(_notes(facts)),
        candidates=tuple(candidates[:CANDIDATES]),
        left_out=max(len(candidates) - CANDIDATES, 0),
        importances=tuple(weights),
        in_quarter=in_quarter,
        identifier=problem_id(facts.record.problem),
        heat_maps=tuple(maps),
    )


def _candidates(facts: MeasuredRecord, entry: ReportEntry) -> Iterable[CandidateRow]:
    began, values_s, names = _began(facts, entry), facts.values_s(), names_in(facts.record)
    for m in facts.current:
        failure = "" if m.failure is None else m.failure.said[:300]
        samples = () if failure else m.valid_samples_s
        finalist = "" if m.dropped or failure or not entry.decided else "finalist"
        yield CandidateRow(
            config=config_text(m.config, names),
            axes=axes_of(m.config, names),
            value_s=values_s.get(m.fingerprint),
            samples_s=tuple(samples[:: max(math.ceil(len(samples) / SAMPLES), 1)]),
            compile_s=m.compile_s,
            tried_s=max(m.when - began, 0.0),
            failure=failure,
            fields=_pinnable(m.config, names),
            role={facts.default: "heuristic", facts.chosen: "chosen"}.get(m.fingerprint, finalist),
            remark=", ".join(_remarks(m, facts, pinned=entry.origin == PINNED)),
        )


def _remarks(m: Measurement, facts: MeasuredRecord, *, pinned: bool) -> Iterable[str]:
    if pinned and m.fingerprint == facts.in_use:
        yield "pinned by hand"
    if m.fingerprint == facts.chosen == facts.default:
        yield "heuristic"
    if m.dropped and m.failure is None:
        yield "eliminated"


def _pinnable(config: Json, names: Iterable[str]) -> dict[str, str]:
    """Return the values of a configuration as `tunebook pin` takes them, in the order of the space.

    It is empty if a command line cannot hold them.
    """
    fields = fields_of(config)
    ordered = {name: fields[name] for name in names if name in fields} | fields
    texts = {name: text for name, _, text in (word.partition("=") for word in written(ordered))}
    sane = all(f"{name}{text}".isprintable() and name and text and "=" not in name for name, text in texts.items())
    return texts if sane else {}


def _began(facts: MeasuredRecord, entry: ReportEntry) -> float:
    """Return when the tuning began that made the decision; earlier measurements were known by then."""
    whens = [m.when for m in facts.current]
    ended = entry.when or max(whens, default=0.0)
    return ended - entry.seconds if entry.seconds else min(whens, default=0.0)


def _notes(facts: MeasuredRecord) -> Iterable[str]:
    others = len(facts.body.measurements) - len(facts.current)
    if is_interrupted(facts.record):
        said = why_undecided(facts.record)
        yield f"{said[0].upper()}{said[1:]}."
    elif facts.body.provenance.get("complete") is False and facts.record.head.decided and facts.chosen:
        yield "Unfinished: the budget ended this tuning, and the best candidate until then was chosen."
    if reasons := "; ".join(disturbances_of(facts.body)):
        anew = f"On a quiet machine, measure anew: {tune_again(facts.record.head)}."
        yield f"Disturbed during measuring: {reasons}. {anew}"
    if earlier := environments_verified(facts.body):
        verified = facts.body.provenance["verified"]
        values_from = verified.get("values_from", "call") if isinstance(verified, dict) else "call"
        same = all(environment == facts.record.head.environment for environment in earlier)
        how = "with the same versions" if same else "after a change of versions"
        on = "" if values_from == "call" else ", on made-up arguments"
        yield f"Verified {how}{on}: the finalists were measured again, and the choice still holds."
    if others:
        number, are = ("1 measurement", "is") if others == 1 else (f"{others} measurements", "are")
        yield f"{number} with other code, versions or arguments {are} kept and not shown."
    default = next((m for m in facts.current if m.fingerprint == facts.default), None)
    if default is not None and default.failure is None and len(default.samples_s) < _FEW:
        yield f"The heuristic was measured only {len(default.samples_s)} times, so the gain over it is not certain."
    elif default is not None and default.dropped:
        yield (
            f"The heuristic was eliminated after {len(default.samples_s)} samples, so its time is from the beginning "
            "of the tuning: if the machine became slower or faster meanwhile, the gain is wrong by as much."
        )


def axes_of(encoded: Json, names: Sequence[str] = ()) -> dict[str, object]:
    """Return a configuration's parameters by name, those of `names` first; nested names are joined with dots.

    >>> axes_of({"block": {"m": 64, "n": [1, 2]}, "pack": True})
    {'block.m': 64, 'block.n': '[1, 2]', 'pack': True}
    """
    try:
        plain = decode(encoded)
    except CodecError:
        return {}
    if not isinstance(plain, dict):
        return dict(_flat("config", plain))
    ordered = {name: plain[name] for name in names if name in plain}
    return dict(_flat("", {**ordered, **plain}))


def _flat(name: str, value: object) -> Iterable[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), item)
    else:
        yield name, value if isinstance(value, (bool, int, float, str)) or value is None else repr(value)


def levels(values: Iterable[object]) -> Levels:
    """Return the values of a parameter in order: numbers by size, other values by their text.

    >>> levels([64, 8, 64, "auto"])
    (('8', '64', 'auto'), (1, 0, 1, 2))
    """
    keyed = [(f"{type(value).__name__} {value!r}", value) for value in values]  # 1, True and "1" are three values

    def order(item: tuple[str, object]) -> tuple[int, float, str]:
        value = item[1]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return (0, float(value), "") if is_number else (1, 0.0, str(value))  # type: ignore[arg-type] # is_number says so

    ordered = sorted(dict(keyed).items(), key=order)
    groups = min(LEVELS, len(ordered))
    level = {key: index * groups // len(ordered) for index, (key, _) in enumerate(ordered)}
    members: dict[int, list[str]] = defaultdict(list)
    for key, value in ordered:
        members[level[key]].append(f"{value:g}" if isinstance(value, float) else str(value))
    labels = (names[0] if len(names) == 1 else f"{names[0]}{TO}{names[-1]}" for names in members.values())
    return tuple(labels), tuple(level[key] for key, _ in keyed)


def _varied(points: Sequence[Axes]) -> dict[str, Levels]:
    """Return the parameters that all candidates have and that differ between candidates."""
    common = [name for name in (points[0] if points else ()) if all(name in axes for axes in points)]
    found = {name: levels(axes[name] for axes in points) for name in common}
    return {name: level for name, level in found.items() if len(level[0]) > 1}


def importances(points: Sequence[Axes], times_s: Sequence[float]) -> list[tuple[str, float]]:
    """Return how much of the variance of log time each parameter explains, the most important first."""
    if len(points) < ENOUGH:
        return []
    logs = [math.log(seconds) for seconds in times_s]
    shares = [(name, explained(at, logs)) for name, (_, at) in _varied(points).items()]
    return sorted(shares, key=lambda share: (-share[1], share[0]))


def quarter_importances(points: Sequence[Axes], times_s: Sequence[float]) -> dict[str, float]:
    """Return how much each parameter decides about being in the better quarter; the values sum to 1, or are all 0."""
    if len(points) < QUARTER:
        return {}
    best = set(sorted(range(len(points)), key=times_s.__getitem__)[: len(points) // 4])
    shares = {name: divergence(at, best) for name, (_, at) in _varied(points).items()}
    total = math.fsum(shares.values())
    return {name: share / total if total else 0.0 for name, share in shares.items()}


def divergence(groups: Sequence[Hashable], chosen: Collection[int]) -> float:
    """Return how far the groups of chosen places are from the groups of all, beyond chance; 0 if they are alike.

    >>> divergence(["a"] * 8 + ["b"] * 8, range(8)), divergence(["a", "b"] * 8, range(8))
    (0.93..., 0.0)
    """
    every, picked = Counter(groups), Counter(groups[at] for at in chosen)
    many, few = len(groups), len(chosen)
    found = math.fsum(n / many * (picked[group] / few / (n / many) - 1) ** 2 for group, n in every.items())
    # The same of as many random places: a hypergeometric distribution.
    by_chance = (len(every) - 1) / few * (many - few) / (many - 1)
    return max(found - by_chance, 0.0)


def explained(groups: Sequence[Hashable], values: Sequence[float]) -> float:
    """Return the part of the variance of values that their groups explain beyond chance, from 0 to 1.

    >>> explained(["a", "a", "b", "b"], [1.0, 1.0, 3.0, 3.0])
    1.0
    """
    members: dict[Hashable, list[float]] = defaultdict(list)
    for group, value in zip(groups, values, strict=True):
        members[group].append(value)
    total, within = _squares(values), math.fsum(map(_squares, members.values()))
    spare = len(values) - len(members)
    if total <= 1e-18 * len(values) or spare <= 0:
        return 0.0
    beyond_chance = total - within - (len(members) - 1) * within / spare
    return min(max(beyond_chance / total, 0.0), 1.0)


def _squares(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values)


def heat_maps(
    points: Sequence[Axes], times_s: Sequence[float | None], order: Sequence[str], most: int
) -> list[HeatMap]:
    """Return at most `most` heat maps, the pairs of the most important parameters first.

    `order` names the parameters by importance; None stands for a failed candidate.
    """
    axes = _varied(points)
    names = [name for name in order if name in axes] or list(axes)
    pairs = sorted(combinations(range(len(names)), 2), key=lambda pair: (sum(pair), pair))[:most]
    found = []
    for x, y in pairs:
        (columns, across), (rows, down) = axes[names[x]], axes[names[y]]
        best: dict[tuple[int, int], float] = {}
        for place, seconds in zip(zip(down, across, strict=True), times_s, strict=True):
            known = best.get(place, math.nan)
            best[place] = known if seconds is None else min(seconds, math.inf if math.isnan(known) else known)
        cells = tuple(tuple(best.get((row, column)) for column in range(len(columns))) for row in range(len(rows)))
        found.append(HeatMap(names[x], names[y], columns, rows, cells))
    return found
