"""Gaussian processes over the problems of a kernel, one for each configuration, that use the nearest problems alone.

The covariance of all problems grows with their square, and its inverse takes a time that grows with their cube: 72
configurations at 665 problems would need a gigabyte. The nearest problems tell as much: on the times of three Triton
kernels on an H200, errors with the nearest 48 were at most 2 % larger than with all 250 or 350. Configurations with the
same inputs share one covariance: for example, if only their numbers of warps differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tunebook.search._small_products import inverse, product

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_NEAREST: Final = 64
_MISSING: Final = 1e6  # the variance of a time that was not taken
# How much similarity falls with a difference in each kind of input, and the noise beside a variance of 1; before they
# are adjusted to the data.
_SCALES: Final = {
    "wave": 0.3,
    "full": 0.5,
    "round": 0.3,
    "filled": 0.3,
    "steps": 0.2,
    "waste": 0.2,
    "size": 0.05,
    "aligned": 0.0,
    "cache": 0.0,
    "noise": 0.04,
}
_BEGUN: Final = {"aligned": 0.05, "cache": 0.3}  # the first scales that are tried of inputs that may not matter
_FACTOR: Final = 4.0  # from one scale that is tried to the next
_FARTHEST: Final = 64.0  # from the first scale: farther ones fit few problems too closely
_ALONE: Final = 40  # problems from which on each input has a scale of its own, not each kind of inputs
_ROUNDS: Final = 3
_BETTER: Final = 0.9995  # a change of a scale must lower the error to this part,
_ENOUGH: Final = 0.995  # and a round of changes to this part, or it is the last one


def first_scales(names: Iterable[str]) -> dict[str, float]:
    """Return the scales of inputs, by name, that are not adjusted to data."""
    return {name: _SCALES[name.partition(" ")[0]] for name in (*names, "noise")}


class LocalProcess:
    """Predicts targets of all configurations at a problem, from the problems that are nearest to it.

    `inputs` are arrays by configuration and problem; `measured` says which of the targets are known.
    """

    def __init__(self, np: Any, inputs: Mapping[str, Any], measured: Any, scales: Mapping[str, float]) -> None:
        self._np = np
        self._roots = {name: scale**0.5 for name, scale in scales.items() if name in inputs and scale}
        places = self._scaled(inputs)
        self._first, self._group = alike(np, places, measured)
        self._places = places[self._first]
        self._noise = scales["noise"]
        self._noises = np.where(measured[self._first], self._noise, _MISSING)

    def _scaled(self, inputs: Mapping[str, Any]) -> Any:
        np, (configs, problems) = self._np, next(iter(inputs.values())).shape
        scaled = [inputs[name] * root for name, root in self._roots.items()]
        return np.stack(scaled, 2) if scaled else np.zeros((configs, problems, 1))

    def predict(self, inputs: Mapping[str, Any], targets: Any, left_out: Any = ()) -> tuple[Any, Any]:
        """Return predictions and their variances by configuration at one problem, as if some were not known."""
        np = self._np
        asked = self._scaled(inputs)[self._first]
        apart = ((self._places - asked) ** 2).sum(2)
        apart[:, left_out] = np.inf
        many = min(_NEAREST, apart.shape[1] - len(left_out))
        nearest = np.argpartition(apart, many - 1, axis=1)[:, :many]
        places = np.take_along_axis(self._places, nearest[:, :, None], 1)
        near = _similar(np, np.take_along_axis(apart, nearest, 1))
        noises = np.take_along_axis(self._noises, nearest, 1)
        among = _similar(np, _squares(np, places)) + noises[:, :, None] * np.eye(many)
        weights = np.linalg.solve(among, near[:, :, None])[:, :, 0]
        variances = 1 + self._noise - (weights * near).sum(1)
        group = self._group
        known = targets[np.arange(len(targets))[:, None], nearest[group]]
        return (known * weights[group]).sum(1), np.maximum(variances, 0.0)[group]


class LeftOutError:
    """The size of errors in problems that are left out, one at a time, by the scales of the inputs."""

    def __init__(self, np: Any, inputs: Mapping[str, Any], targets: Any, weights: Any) -> None:
        self._np, self._targets, self._weights = np, targets, weights
        first, self._group = alike(np, np.stack(list(inputs.values()), 2), weights > 0)
        self._apart = {name: (each[first][:, :, None] - each[first][:, None, :]) ** 2 for name, each in inputs.items()}
        self._missing = np.where(weights[first] > 0, 0.0, _MISSING)

    def __call__(self, scales: Mapping[str, float]) -> float:
        np, targets = self._np, self._targets
        noises = (scales["noise"] + self._missing)[:, :, None] * np.eye(targets.shape[1])
        squares = sum((scales[name] * each for name, each in self._apart.items() if scales[name]), np.zeros(()))
        inverted = inverse(np, _similar(np, squares) + noises)[self._group]
        missed = np.einsum("cij,cj->ci", inverted, targets) / np.einsum("cii->ci", inverted)
        return relative_error(np, missed, self._weights)


def adjusted(scales: Mapping[str, float], error: LeftOutError, problems: int) -> tuple[Mapping[str, float], float]:
    """Return scales with a smaller error, found by one change at a time, and this error."""
    best, lowest = scales, error(scales)
    kinds: dict[str, list[str]] = {}
    for name in scales:
        kinds.setdefault(name.partition(" ")[0], []).append(name)
    for together in [list(kinds.values())] + [[[name] for name in scales]] * (problems >= _ALONE):
        for _ in range(_ROUNDS):
            before = lowest
            for names in together:
                for tried in _others(best[names[0]], names[0]):
                    changed = {**best, **dict.fromkeys(names, tried)}
                    if (found := error(changed)) < _BETTER * lowest:
                        lowest, best = found, changed
            if lowest > _ENOUGH * before:
                break
    return best, lowest


def _others(scale: float, name: str) -> list[float]:
    kind = name.partition(" ")[0]
    if not scale:
        return [_BEGUN.get(kind, _SCALES[kind])]
    begun = _BEGUN.get(kind, _SCALES[kind])
    found = [each for each in (scale / _FACTOR, scale * _FACTOR) if begun / _FARTHEST <= each <= begun * _FARTHEST]
    return found if kind == "noise" else [*found, 0.0]


def left_out_predictions(np: Any, inputs: Mapping[str, Any], measured: Any, folds: Iterable[tuple[Any, Any]]) -> Any:
    """Return predictions for problems that are left out, with the first scales, from the covariance of all problems.

    Each of `folds` has the problems that it leaves out, and the targets.
    """
    scales = first_scales(inputs)
    places = np.stack([values * scales[name] ** 0.5 for name, values in inputs.items() if scales[name]], 2)
    first, group = alike(np, places, measured)
    noises = np.where(measured[first], scales["noise"], _MISSING)[:, :, None] * np.eye(places.shape[1])
    inverted = inverse(np, _similar(np, _squares(np, places[first])) + noises)
    found = np.empty(measured.shape)
    for problems, targets in folds:
        # A part of the inverse is enough for an exact answer without these problems.
        among = np.linalg.inv(inverted[:, problems[:, None], problems])[group]
        missed = among @ (inverted[:, problems][group] @ targets[:, :, None])
        found[:, problems] = targets[:, problems] - missed[:, :, 0]
    return found


def relative_error(np: Any, errors: Any, weights: Any) -> float:
    """Return the size of errors, less the part that all configurations share at a problem: it changes no choice."""
    return float(np.sqrt((weights * (errors - shared(np, errors, weights)) ** 2).sum() / weights.sum()))


def shared(np: Any, errors: Any, weights: Any) -> Any:
    """Return the part of errors that all configurations share at a problem."""
    return (weights * errors).sum(0) / np.maximum(weights.sum(0), 1e-9)


def alike(np: Any, places: Any, measured: Any) -> tuple[Any, Any]:
    """Return the first of each group of configurations with the same inputs and known targets, and all their groups."""
    groups: dict[bytes, int] = {}
    group = [groups.setdefault(a.tobytes() + b.tobytes(), len(groups)) for a, b in zip(places, measured, strict=True)]
    return np.array([group.index(each) for each in range(len(groups))], int), np.array(group, int)


def _squares(np: Any, places: Any) -> Any:
    """Return the squares of the distances between problems."""
    lengths = (places**2).sum(2)
    return lengths[:, :, None] + lengths[:, None, :] - 2 * product(np, places, places.transpose(0, 2, 1))


def _similar(np: Any, squares: Any) -> Any:
    """Return the similarities of problems by the squares of their distances (Matern 3/2)."""
    apart = np.sqrt(3 * np.maximum(squares, 0.0))
    return (1 + apart) * np.exp(-apart)
