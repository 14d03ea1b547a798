"""One part of a model of times: a structure, its sums, and a process that learns how times differ from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook.search._local_process import LeftOutError, LocalProcess, adjusted, first_scales, shared
from tunebook.search._structures import Measured, Structure, fit_sums, total, touched

if TYPE_CHECKING:
    from collections.abc import Mapping

_ADJUSTED: Final = 128  # problems at most by which scales are adjusted: the cost grows with the cube
FEWEST: Final = 8  # problems to learn a structure or scales from
_RESIDENT: Final = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)  # blocks on a core
_RESIDENT_WORTH: Final = 0.98  # another number than one must lower the errors of sums to this part
_CACHES: Final = 9  # sizes of a cache that are tried
_CACHE_WORTH: Final = 0.985
_CACHE_SCALE: Final = 0.3


class LearntPart(NamedTuple):
    """A structure, and all that takes long to learn about it.

    `resident` has the number of blocks that a core runs at once, by configuration; it is empty if that is not modelled.
    `cache` is the number of elements beyond which times change, because a cache has no room for more; 0 if none is
    seen.
    """

    structure: Structure
    scales: Mapping[str, float]
    resident: tuple[int, ...] = ()
    cache: float = 0.0


def learn_part(data: Measured, structure: Structure, resident: tuple[int, ...], place: int) -> LearntPart:
    """Return the part of a model; parts with different places are learnt from different problems."""
    np, count = data.np, len(data.sizes)
    part = LearntPart(structure, {}, resident)
    problems = np.sort(np.random.default_rng(place).permutation(count)[:_ADJUSTED])
    studied = data.studied()
    some = data.some(studied, problems)
    sizes = structure.counted(np, some.sizes)

    def inputs(cache: float) -> Mapping[str, Any]:
        return some.inputs(structure, sizes, _numbers(np, resident, studied), cache)

    part = part._replace(scales=first_scales(inputs(0.0)))
    if count < FEWEST:
        return part
    targets = PartModel(data, part).targets[np.ix_(studied, problems)]
    scales, lowest = adjusted(part.scales, LeftOutError(np, inputs(0.0), targets, some.weights), count)
    part = part._replace(scales=scales)
    begun = {**scales, "cache": _CACHE_SCALE}
    positions = np.quantile(touched(sizes), np.arange(1, _CACHES + 1) / (_CACHES + 1)) if sizes.shape[1] else ()
    errors = {at: LeftOutError(np, inputs(at), targets, some.weights) for at in sorted({*map(float, positions)})}
    found = {at: error(begun) for at, error in errors.items()}
    if found and min(found.values()) <= _CACHE_WORTH * lowest:
        cache = min(found, key=found.__getitem__)
        part = part._replace(scales=adjusted(begun, errors[cache], count)[0], cache=cache)
    return part


def blocks_at_once(data: Measured, structure: Structure) -> tuple[int, ...]:
    """Return how many blocks a core runs at once, by configuration: the number with the smallest errors of sums.

    It is empty if one at a time explains the times of all configurations as well.
    """
    if data.cores == 1:
        return ()
    np, count = data.np, len(data.times)
    some = data.some(np.arange(count), np.arange(0, len(data.sizes), -(-len(data.sizes) // (2 * _ADJUSTED))))
    sizes, times, weights = structure.counted(np, some.sizes), some.times, some.weights
    errors = []
    for resident in _RESIDENT:
        products = some.products(structure, sizes, np.full(count, resident))
        missed = np.log(times / total(np, products, fit_sums(np, products, times, weights > 0)))
        errors.append((weights * np.abs(missed)).sum(1) / np.maximum(weights.sum(1), 1e-9))
    best = np.argmin(errors, 0)
    best[np.min(errors, 0) > _RESIDENT_WORTH * errors[0]] = 0
    return tuple(_RESIDENT[each] for each in best) if best.any() else ()


def _numbers(np: Any, resident: tuple[int, ...], configs: Any = slice(None)) -> Any:
    return np.array(resident)[configs] if resident else None


class PartModel:
    """The model of one part: sums, and a process for each configuration."""

    def __init__(self, data: Measured, part: LearntPart) -> None:
        np = data.np
        self._data = data = data._replace(sizes=part.structure.counted(np, data.sizes))
        self.part = part
        self._resident = _numbers(np, part.resident)
        self._products = data.products(part.structure, data.sizes, self._resident)
        self._sums, self._means, self.targets = self._fitted(data.weights)
        self._inputs = self._inputs_at(data.sizes)
        self._process = LocalProcess(np, self._inputs, data.weights > 0, part.scales)

    def _inputs_at(self, sizes: Any) -> Mapping[str, Any]:
        return self._data.inputs(self.part.structure, sizes, self._resident, self.part.cache)

    def _fitted(self, weights: Any) -> tuple[Any, Any, Any]:
        """Return sums of products, the means of the differences from them, and these differences from their mean."""
        np, times = self._data.np, self._data.times
        sums = fit_sums(np, self._products, times, weights > 0)
        targets = np.log(times / total(np, self._products, sums))
        targets = targets - shared(np, targets, self._data.weights)  # it changes no choice
        measured = weights > 0
        means = (targets * measured).sum(1) / np.maximum(measured.sum(1), 1)
        return sums, means, targets - means[:, None]

    def predict(self, sizes: Any) -> tuple[Any, Any]:
        """Return the logarithms of times of all configurations at sizes, less a shared number, and their variances."""
        np, data = self._data.np, self._data
        sizes = self.part.structure.counted(np, sizes)
        sums = np.log(total(np, data.products(self.part.structure, sizes, self._resident), self._sums))
        apart, variances = self._process.predict(self._inputs_at(sizes), self.targets)
        logs = sums[:, 0] + self._means + apart
        return np.where((data.weights > 0).any(1), logs, np.inf), variances

    def left_out(self, problems: Any) -> tuple[Any, Any]:
        """Return the same for some of the problems, by configuration and problem, if all of them are left out."""
        np, weights = self._data.np, self._data.weights.copy()
        weights[:, problems] = 0.0
        sums, means, targets = self._fitted(weights)
        found = []
        for problem in problems:
            inputs = {name: values[:, problem, None] for name, values in self._inputs.items()}
            found.append(self._process.predict(inputs, targets, problems))
        logs = np.log(total(np, self._products[:, problems], sums)) + means[:, None]
        apart, variances = (np.stack(each, 1) for each in zip(*found, strict=True))
        return np.where((weights > 0).any(1)[:, None], logs + apart, np.inf), variances
