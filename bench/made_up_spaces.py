"""Small spaces that are made up: 3 to 5 axes, 500 to 8,000 points, eleven kinds of times over them.

    spaces(4) returns four spaces of every kind; the same number always gives the same spaces.

Axes are drawn from `AXES`: sizes with and without powers of two, counts, switches and methods, some of which are
numbers in an order that says nothing. The kinds differ in what a search can learn: `noise` has nothing to learn, and
`hidden` misleads, because its best points lie away from where times get faster.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import tunebook as tb

if TYPE_CHECKING:
    from collections.abc import Callable

SMALLEST, LARGEST = 500, 8000
# Values, and whether their order says something about times.
AXES: dict[str, tuple[tuple[object, ...], bool]] = {
    "multiple": (tuple(range(32, 1024, 32)), True),
    "power": (tuple(2**i for i in range(4, 11)), True),
    "threads": (tuple(range(16, 257, 16)), True),
    "tile": ((1, *range(2, 21, 2)), True),
    "count": (tuple(range(1, 9)), True),
    "few": ((1, 2, 3, 4), True),
    "vector": ((1, 2, 4, 8), True),
    "switch": ((0, 1), True),
    "method": ((0, 1, 2, 3), False),
    "way": ((0, 1, 2), False),
    "layout": (("row", "column", "tiled"), False),
    "padded": ((False, True), False),
}


class Drawn(NamedTuple):
    """The axes of a space, and the index of every point on each of them."""

    names: list[str]
    at: np.ndarray  # one row per axis
    rng: np.random.Generator

    def places(self, axis: int) -> np.ndarray:
        """Return the points' places on an axis from 0 to 1; on an axis without an order, a random one per value."""
        many = len(AXES[self.names[axis]][0])
        on_line = np.linspace(0, 1, many)
        return (on_line if AXES[self.names[axis]][1] else self.rng.permutation(on_line))[self.at[axis]]

    def all_places(self) -> np.ndarray:
        return np.stack([self.places(axis) for axis in range(len(self.names))])


class Made(NamedTuple):
    """A space with its times; a time of NaN is a failure."""

    kind: str
    number: int
    space: tb.Space
    configs: list[tb.Config]
    times: np.ndarray

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number}"


def spaces(many: int, kinds: tuple[str, ...] = ()) -> list[Made]:
    """Return so many spaces of every kind."""
    return [make(kind, number) for kind in kinds or KINDS for number in range(many)]


def make(kind: str, number: int) -> Made:
    rng = np.random.default_rng([*kind.encode(), number])
    names = draw_axes(rng) if kind != "methods" else ["multiple", "tile", "method", "way"]
    space = tb.Space(**{name: list(AXES[name][0]) for name in names})
    shape = [len(AXES[name][0]) for name in names]
    at = np.stack([each.ravel() for each in np.indices(shape)])
    configs = [tb.Config(**{n: AXES[n][0][i] for n, i in zip(names, column, strict=True)}) for column in at.T]
    logs = KINDS[kind](Drawn(names, at, rng))
    return Made(kind, number, space, configs, np.exp(logs))


def draw_axes(rng: np.random.Generator) -> list[str]:
    while True:
        names = [str(name) for name in rng.choice(list(AXES), size=rng.integers(3, 6), replace=False)]
        if SMALLEST <= math.prod(len(AXES[name][0]) for name in names) <= LARGEST:
            return names


def flattened(drawn: Drawn, logs: np.ndarray, part: float = 0.01, noise: float = 0.005) -> np.ndarray:
    """Return times of which the fastest part is alike but for noise."""
    return np.maximum(logs, np.quantile(logs, part)) + noise * drawn.rng.normal(size=len(logs))


def bowl_at(drawn: Drawn, centre: np.ndarray) -> np.ndarray:
    weights = drawn.rng.lognormal(0, 1, size=len(centre))
    return (weights[:, None] * (drawn.all_places() - centre[:, None]) ** 2).sum(0) / weights.sum()


def bowl(drawn: Drawn) -> np.ndarray:
    """Smooth, with the best anywhere and a flat bottom."""
    return flattened(drawn, 2 * bowl_at(drawn, drawn.rng.uniform(size=len(drawn.names))))


def interior(drawn: Drawn) -> np.ndarray:
    """The best in the middle, and extreme sizes many times slower."""
    return flattened(drawn, 12 * bowl_at(drawn, drawn.rng.uniform(0.3, 0.7, size=len(drawn.names))))


def corner(drawn: Drawn) -> np.ndarray:
    """Monotone on every axis, with the best in a corner."""
    up = drawn.rng.integers(0, 2, size=len(drawn.names))[:, None]
    places = np.abs(up - drawn.all_places())
    slopes = drawn.rng.lognormal(-1, 0.7, size=len(drawn.names))[:, None]
    return flattened(drawn, (slopes * places ** drawn.rng.uniform(0.5, 2, size=up.shape)).sum(0))


def ridge(drawn: Drawn) -> np.ndarray:
    """The sum of two places matters: the best points differ on both, as blocks with the same product do."""
    places = drawn.all_places()
    one, other = drawn.rng.choice(len(places), size=2, replace=False)
    away = places[one] + places[other] - drawn.rng.uniform(0.6, 1.4)
    return flattened(drawn, 2 * away**2 + 0.5 * bowl_at(drawn, drawn.rng.uniform(size=len(places))))


def plateaus(drawn: Drawn) -> np.ndarray:
    """Few levels, and all points of a level alike."""
    logs = bowl_at(drawn, drawn.rng.uniform(size=len(drawn.names)))
    places = drawn.all_places()
    one, other = drawn.rng.choice(len(places), size=2, replace=False)
    logs = logs + 0.2 * np.sin(5 * places[one]) * np.cos(5 * places[other])
    edges = np.quantile(logs, [0.01, 0.04, 0.1, 0.25, 0.5, 0.8])
    return 0.15 * np.searchsorted(edges, logs)


def interactions(drawn: Drawn) -> np.ndarray:
    """Every pair of values on two axes has an effect of its own; neighbours tell nothing."""
    logs = np.zeros(drawn.at.shape[1])
    for one in range(len(drawn.names)):
        for other in range(one):
            table = drawn.rng.normal(size=(drawn.at[one].max() + 1, drawn.at[other].max() + 1))
            logs += table[drawn.at[one], drawn.at[other]]
    return flattened(drawn, 0.2 * logs / logs.std())


def cliffs(drawn: Drawn) -> np.ndarray:
    """Steps of occupancy, faster with more work for each thread until registers run out, and failures beyond."""
    places = drawn.all_places()
    wide, deep = drawn.rng.choice(len(places), size=2, replace=False)
    used = (0.2 + places[wide]) * (0.2 + places[deep])
    resident = np.floor(drawn.rng.uniform(1.2, 2.5) / used)
    others = bowl_at(drawn, drawn.rng.uniform(size=len(places)))
    logs = flattened(drawn, 0.5 * others - 0.4 * places[deep] + 0.3 / np.maximum(resident, 1))
    return np.where(resident < 1, np.nan, np.where(used > np.quantile(used, 0.9), np.nan, logs))


def methods(drawn: Drawn) -> np.ndarray:
    """Two sizes and two methods, where the pair of methods matters most."""
    rng = drawn.rng
    pairs = 0.25 * (rng.normal(size=(4, 3)) + 0.5 * rng.normal(size=(4, 1)) + 0.5 * rng.normal(size=(1, 3)))
    block = 32 * (drawn.at[0] + 1)
    tile = np.array(AXES["tile"][0])[drawn.at[1]]
    registers = 20 + tile * rng.uniform(2, 5)
    busy = np.floor(np.minimum(65536 / (registers * block), 2048 / block)) * block / 2048
    logs = pairs[drawn.at[2], drawn.at[3]] + np.log(1 + rng.uniform(0.3, 1) / tile)
    return flattened(drawn, logs + np.log(1 + 0.4 * np.maximum(0, 0.5 - busy)), 0.004, 0.01)


def hidden(drawn: Drawn) -> np.ndarray:
    """A wide valley, and a small region elsewhere that is faster than all of it."""
    valley, best = drawn.rng.uniform(size=(2, len(drawn.names)))
    wide, narrow = bowl_at(drawn, valley), bowl_at(drawn, best)
    logs = np.where(narrow <= np.quantile(narrow, 0.02), -0.1 + narrow, wide)
    return flattened(drawn, logs)


def noise(drawn: Drawn) -> np.ndarray:
    """Nothing to learn."""
    return 0.2 * drawn.rng.normal(size=drawn.at.shape[1])


def constant(drawn: Drawn) -> np.ndarray:
    """All alike within a percent: a weak bowl under noise of the same size."""
    away = bowl_at(drawn, drawn.rng.uniform(size=len(drawn.names)))
    return 0.002 * away / away.std() + 0.002 * drawn.rng.normal(size=len(away))


KINDS: dict[str, Callable[[Drawn], np.ndarray]] = {
    each.__name__: each
    for each in (bowl, interior, corner, ridge, plateaus, interactions, cliffs, methods, hidden, noise, constant)
}
