"""Which parameters matter: how much of the differences in time each of them explains, and which value is best.

The measure is that of an analysis of variance of the logarithm of time, with one factor at a time: the variance between
the means of a parameter's values, less what as many groups of a pure chance would show (epsilon squared), as a part of
the whole variance. The logarithm, because a parameter that doubles the time does so for fast and slow candidates alike.
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
# Of more values than this, neighbours are taken together: groups of one or two tell nothing.
LEVELS: Final = 12
# With fewer candidates than this, chance explains as much as any parameter.
ENOUGH: Final = 8


class Importance(NamedTuple):
    """The part of the variance of log time that one parameter explains alone."""

    axis: str
    share: float


class HeatMap(NamedTuple):
    """The best time for each pair of values, over all that was measured with them.

    `cells[row][column]` is a time, `nan` where all candidates failed, or None where there was none.
    """

    x: str
    y: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    cells: tuple[tuple[float | None, ...], ...]


def axes_of(encoded: Json) -> dict[str, object]:
    """Return a configuration's parameters by name, those of nested ones with dots.

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
    """The values of one parameter in their order, neighbours taken together where there are too many."""

    labels: tuple[str, ...]
    of: Mapping[str, int]  # by the text of a value: 1, True and "1" are three


def levels(values: Iterable[object]) -> ParameterLevels:
    """Order the values of one parameter: numbers by size, others by their text.

    >>> levels([64, 8, 64, "auto"]).labels
    ('8', '64', 'auto')
    """
    ordered = sorted({_key(value): value for value in values}.items(), key=lambda item: _order(item[1]))
    groups = min(LEVELS, len(ordered))
    of = {key: index * groups // max(len(ordered), 1) for index, (key, _) in enumerate(ordered)}
    members: dict[int, list[str]] = defaultdict(list)
    for key, value in ordered:
        members[of[key]].append(_label(value))
    return ParameterLevels(
        tuple(names[0] if len(names) == 1 else f"{names[0]}{TO}{names[-1]}" for names in members.values()), of
    )


def _key(value: object) -> str:
    return f"{type(value).__name__} {value!r}"


def _order(value: object) -> tuple[int, float, str]:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return (0, float(value), "") if is_number else (1, 0.0, str(value))  # type: ignore[arg-type] # a number, as said


def _label(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def varied(points: Sequence[Axes]) -> dict[str, ParameterLevels]:
    """Return the parameters that all candidates have and that differ among them."""
    common = [name for name in (points[0] if points else ()) if all(name in axes for axes in points)]
    found = {name: levels(axes[name] for axes in points) for name in common}
    return {name: level for name, level in found.items() if len(level.labels) > 1}


def importances(points: Sequence[Axes], times_s: Sequence[float]) -> list[Importance]:
    """Return how much of the variance of log time each parameter explains, the most important first."""
    if len(points) < ENOUGH:
        return []
    logs = [math.log(seconds) for seconds in times_s]
    axes = varied(points)
    shares = [Importance(name, explained([_level(axes, p, name) for p in points], logs)) for name in axes]
    return sorted(shares, key=lambda each: (-each.share, each.axis))


def _level(axes: Mapping[str, ParameterLevels], point: Axes, name: str) -> int:
    return axes[name].of[_key(point[name])]


def explained(groups: Sequence[Hashable], values: Sequence[float]) -> float:
    """Return the part of the variance of values that their groups explain beyond chance, from 0 to 1.

    >>> explained(["a", "a", "b", "b"], [1.0, 1.0, 3.0, 3.0])
    1.0
    """
    mean = math.fsum(values) / len(values)
    total = math.fsum((value - mean) ** 2 for value in values)
    members: dict[Hashable, list[float]] = defaultdict(list)
    for group, value in zip(groups, values, strict=True):
        members[group].append(value)
    spare = len(values) - len(members)
    if total <= 1e-18 * len(values) or spare <= 0:
        return 0.0
    means = {group: math.fsum(each) / len(each) for group, each in members.items()}
    within = math.fsum((value - means[group]) ** 2 for group, each in members.items() for value in each)
    between = total - within
    return min(max((between - (len(members) - 1) * within / spare) / total, 0.0), 1.0)


def heat_maps(
    points: Sequence[Axes], times_s: Sequence[float | None], order: Sequence[str], most: int
) -> list[HeatMap]:
    """Return the best time for each pair of values, of the pairs of the most important parameters first.

    `order` names the parameters by importance; a time of None is that of a candidate that failed.
    """
    axes = varied(points)
    names = [name for name in order if name in axes] or list(axes)
    pairs = sorted(combinations(range(len(names)), 2), key=lambda pair: (sum(pair), pair))[:most]
    return [_heat_map(points, times_s, axes, names[x], names[y]) for x, y in pairs]


def _heat_map(
    points: Sequence[Axes], times_s: Sequence[float | None], axes: Mapping[str, ParameterLevels], x: str, y: str
) -> HeatMap:
    best: dict[tuple[int, int], float] = {}
    for point, seconds in zip(points, times_s, strict=True):
        place = _level(axes, point, y), _level(axes, point, x)
        known = best.get(place, math.nan)
        best[place] = known if seconds is None else min(seconds, math.inf if math.isnan(known) else known)
    columns, rows = axes[x].labels, axes[y].labels
    cells = tuple(tuple(best.get((row, column)) for column in range(len(columns))) for row in range(len(rows)))
    return HeatMap(x, y, columns, rows, cells)
