"""Which parameters matter: how much of the differences in time each parameter explains, and which value is best.

The measure is an analysis of variance of the logarithm of time, with one factor at a time: the variance between the
means of a parameter's values, minus the variance that as many random groups show (epsilon squared), as a part of the
whole variance. The logarithm, because a parameter that doubles the time does so for fast and slow candidates alike.
"""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import combinations
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from tunebook._base.config_codec import decode
from tunebook._base.errors import CodecError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from tunebook._base.vocabulary import Json

Axes: TypeAlias = "Mapping[str, object]"

TO: Final = "\u2013"  # an en dash, between the ends of a range
# More values are grouped with their neighbours: tiny groups say nothing.
LEVELS: Final = 12
# With fewer candidates than this, chance explains as much as any parameter.
ENOUGH: Final = 8


class Importance(NamedTuple):
    """The part of the variance of log time that one parameter explains alone."""

    axis: str
    share: float


class HeatMap(NamedTuple):
    """The best time for each pair of values, over all candidates with both values.

    `cells[row][column]` is a time, `nan` if all candidates failed, or None if no candidate has both values.
    """

    x: str
    y: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    cells: tuple[tuple[float | None, ...], ...]


def axes_of(encoded: Json) -> dict[str, object]:
    """Return a configuration's parameters by name; nested names are joined with dots.

    >>> axes_of({"block": {"m": 64, "n": [1, 2]}, "pack": True})
    {'block.m': 64, 'block.n': '[1, 2]', 'pack': True}
    """
    try:
        plain = decode(encoded)
    except CodecError:
        return {}
    return dict(_flat("", plain)) if isinstance(plain, dict) else {"config": _leaf(plain)}


def _flat(name: str, value: object) -> Iterable[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), item)
    else:
        yield name, _leaf(value)


def _leaf(value: object) -> object:
    return value if isinstance(value, (bool, int, float, str)) or value is None else repr(value)


class ParameterLevels(NamedTuple):
    """The values of a parameter in order, grouped with their neighbours if there are too many."""

    labels: tuple[str, ...]
    at: tuple[int, ...]  # the place of each candidate's value among the labels


def levels(values: Iterable[object]) -> ParameterLevels:
    """Return the values of a parameter in order: numbers by size, other values by their text.

    >>> levels([64, 8, 64, "auto"])
    ParameterLevels(labels=('8', '64', 'auto'), at=(1, 0, 1, 2))
    """
    keyed = [(f"{type(value).__name__} {value!r}", value) for value in values]  # 1, True and "1" are three values
    ordered = sorted(dict(keyed).items(), key=lambda item: _order(item[1]))
    groups = min(LEVELS, len(ordered))
    level = {key: index * groups // len(ordered) for index, (key, _) in enumerate(ordered)}
    members: dict[int, list[str]] = defaultdict(list)
    for key, value in ordered:
        members[level[key]].append(f"{value:g}" if isinstance(value, float) else str(value))
    labels = (names[0] if len(names) == 1 else f"{names[0]}{TO}{names[-1]}" for names in members.values())
    return ParameterLevels(tuple(labels), tuple(level[key] for key, _ in keyed))


def _order(value: object) -> tuple[int, float, str]:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return (0, float(value), "") if is_number else (1, 0.0, str(value))  # type: ignore[arg-type] # is_number says so


def _varied(points: Sequence[Axes]) -> dict[str, ParameterLevels]:
    """Return the parameters that all candidates have and that differ between candidates."""
    common = [name for name in (points[0] if points else ()) if all(name in axes for axes in points)]
    found = {name: levels(axes[name] for axes in points) for name in common}
    return {name: level for name, level in found.items() if len(level.labels) > 1}


def importances(points: Sequence[Axes], times_s: Sequence[float]) -> list[Importance]:
    """Return how much of the variance of log time each parameter explains, the most important first."""
    if len(points) < ENOUGH:
        return []
    logs = [math.log(seconds) for seconds in times_s]
    shares = [Importance(name, explained(level.at, logs)) for name, level in _varied(points).items()]
    return sorted(shares, key=lambda each: (-each.share, each.axis))


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
    return [_heat_map(times_s, names[x], names[y], axes[names[x]], axes[names[y]]) for x, y in pairs]


def _heat_map(
    times_s: Sequence[float | None], x: str, y: str, across: ParameterLevels, down: ParameterLevels
) -> HeatMap:
    best: dict[tuple[int, int], float] = {}
    for place, seconds in zip(zip(down.at, across.at, strict=True), times_s, strict=True):
        known = best.get(place, math.nan)
        best[place] = known if seconds is None else min(seconds, math.inf if math.isnan(known) else known)
    rows, columns = range(len(down.labels)), range(len(across.labels))
    cells = tuple(tuple(best.get((row, column)) for column in columns) for row in rows)
    return HeatMap(x, y, across.labels, down.labels, cells)
