"""A model of times over sizes: a configuration for sizes that were never tuned, and a bound of its regret.

Each configuration has a model of its own, of the logarithm of its time. Its first part is a sum of products that times
are made of (launches, waves of blocks, steps of a loop, whole blocks and the rest, bytes), with weights that are not
negative. Which axis, or product of two axes, is the block of which size, and which size is a window that moves along
another, is found by trying. A Gaussian process then learns how times differ from this sum. Predictions for problems
that are left out of the data are exact, and need no further fit of the process. The bound is the 95 % quantile of the
regrets there (conformal prediction), so it holds for that part of problems like them, no matter how good the model is.
"""

from __future__ import annotations

import math
from itertools import combinations, permutations
from itertools import product as product_of
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._base.errors import require
from tunebook.search._learned_heuristic import quantile
from tunebook.search._small_products import inverse, product

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tunebook.search._learned_heuristic import Example

FEWEST: Final = 8  # configurations worth trying, and problems to learn a structure from
MOST: Final = 16
_NEAR: Final = 0.15  # slowness over which a time counts for less: the fastest must be told apart
_LEAST_WEIGHT: Final = 0.02
_SIZES: Final = 4  # at most, and axes: what is tried grows with their product
_AXES: Final = 6
_NO_BLOCKS: Final = frozenset({"num_warps", "num_stages", "num_ctas"})  # Triton's options are never sizes of blocks
_COMPARED: Final = 100  # problems at most by which structures are compared: the cost grows with the cube
_STUDIED: Final = 14  # configurations that the structure and the scales are found from
_SHARED_STEPS: Final = 200  # of fitting the sum that all configurations start from
_OWN_STEPS: Final = 60
_AVERAGED: Final = 4  # structures at most: which is the right one is seldom sure
_ALIKE: Final = 1.1  # if their errors are at most so many times the smallest
_WORTH: Final = 0.985  # a change of the structure must lower the error to this part
_MISSING: Final = 1e6  # the variance of a time that was not taken
_FOLDS: Final = 8
_COMPARING_FOLDS: Final = 4
# The roles of blocks of one axis, and of two: threads of a block times the work of each, lanes times vectors.
_ROLES: Final = {1: ("launch", "loop", "split"), 2: ("launch", "split")}
_VECTOR: Final = 8  # numbers of 32 bits in a vector of most processors
_DRAWS: Final = 256
_LEAST_SCALE: Final = 1e-3  # regrets below this are noise
# How much similarity falls with a difference in each kind of input, the noise beside a variance of 1, and roughness;
# the first two are adjusted to the data.
_SCALES: Final = {"wave": 0.3, "full": 0.5, "steps": 0.2, "waste": 0.2, "size": 0.05, "noise": 0.04}


class Block(NamedTuple):
    """One or two axes whose product divides a size into blocks.

    Blocks are launched side by side ("launch"), are the steps of a loop ("loop"), or are computed one after the other,
    and the rest of the size in another way ("split"), as C programs for a processor do it.
    """

    axes: tuple[str, ...]
    size: int
    role: str


class Structure(NamedTuple):
    """What an author means by axes and sizes: blocks, and sizes of which each unit is launched by itself.

    `windows` has pairs of a size and the window that moves along it: the work follows the number of the window's
    places, not the size.
    """

    blocks: tuple[Block, ...] = ()
    launched: frozenset[int] = frozenset()
    windows: frozenset[tuple[int, int]] = frozenset()

    def counted(self, np: Any, sizes: Any) -> Any:
        """Return sizes by problem; of a size along which a window moves, the number of the window's places."""
        found = sizes.copy()
        for size, window in self.windows:
            found[:, size] = np.maximum(sizes[:, size] - sizes[:, window] + 1, 1)
        return found


class Predicted(NamedTuple):
    """The keys of configurations worth trying, the fastest first; the regret expected of the first, and its bound.

    The bound is infinite if there is none; `outside` is not empty if that is because a size is beyond all tuned ones.
    """

    keys: list[str]
    regret: float
    bound: float
    outside: str = ""


class Learnt(NamedTuple):
    """The part of a model that takes long to learn: structures with their scales, and how far to believe them.

    `left_out` has the regrets on problems that a model was not learnt from.
    """

    structures: tuple[Structure, ...]
    scales: tuple[Mapping[str, float], ...]
    variance: float
    usual: float = 1.0
    factor: float = math.inf
    gap: float = math.inf
    left_out: tuple[float, ...] = ()


class SizeModel:
    """Predicts how fast configurations are at sizes, from problems where they were measured.

    `configs` has the values of each configuration, by the keys of the examples' `seconds`. `cores` is the number of
    blocks that the device runs side by side, or 1 if that is unknown. `learnt` is known from another model of the same
    data.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        configs: Mapping[str, Mapping[str, Any]],
        *,
        cores: int = 1,
        learnt: Learnt | None = None,
    ) -> None:
        self._np = np = require("numpy", feature="a prediction for sizes that were never tuned")
        # A configuration is predicted only if half of the problems measured it.
        many = {key: sum(key in example.seconds for example in examples) for key in configs}
        self.keys: Final = [key for key in configs if 2 * many[key] >= len(examples) and many[key]]
        self.problems: Final = len(examples)
        self._names = _varying(examples)
        named = [name for name in examples[0].sizes if all(name in e.sizes for e in examples)]
        self._tuned = {
            name: (min(e.sizes[name] for e in examples), max(e.sizes[name] for e in examples)) for name in named
        }
        sizes = np.array([[e.sizes[name] for name in self._names] for e in examples]).reshape(len(examples), -1)
        times = np.array([[e.seconds.get(key, np.nan) for e in examples] for key in self.keys])
        slower = np.log(times / np.nanmin(times, 0))
        weights = np.where(np.isnan(slower), 0.0, np.exp(-slower / _NEAR) + _LEAST_WEIGHT)
        axes = _powers_of_two(np, [configs[key] for key in self.keys])
        self._data = data = Measured(
            np, axes, max(1, cores), sizes, np.where(np.isnan(times), np.nanmean(times), times), weights
        )
        if learnt is None:
            self._parts = [_StructureModel(data, each) for each in _best_structures(data, len(self._names))]
            self.learnt = self._learn(np.where(np.isnan(slower), np.inf, slower))
        else:
            known = zip(learnt.structures, learnt.scales, strict=True)
            self._parts = [_StructureModel(data, structure, scales) for structure, scales in known]
            self.learnt = learnt

    def predict(self, sizes: Mapping[str, float], candidates: Iterable[str] | None = None) -> Predicted:
        """Return a choice for these sizes among the candidates, and the ones to try if it is not sure enough."""
        np = self._np
        asked = np.array([[sizes[name] for name in self._names]])
        logs, variances = _average(np, [part.predict(asked) for part in self._parts])
        if candidates is not None:
            allowed = frozenset(candidates)
            logs[[key not in allowed for key in self.keys]] = np.inf
        if not np.isfinite(logs).any():
            return Predicted([], math.inf, math.inf)
        logs, scale, top = self._ranked(logs[:, 0], variances[:, 0], self.learnt.variance)
        worth = [int(c) for rank, c in enumerate(top) if rank < FEWEST or logs[c] - logs[top[0]] <= self.learnt.gap]
        outside = self._outside(sizes)
        bound = math.inf if outside else self.learnt.factor * scale
        return Predicted([self.keys[c] for c in worth], self.learnt.usual * scale, bound, outside)

    def _outside(self, sizes: Mapping[str, float]) -> str:
        """Return which size is beyond the tuned ones: the regrets of problems between them say nothing about it."""
        for name, (low, high) in self._tuned.items():
            if not low <= sizes.get(name, low) <= high:
                return f"{name} is {sizes[name]:.10g}, and was tuned from {low:.10g} to {high:.10g}"
        return ""

    def _ranked(self, logs: Any, variances: Any, variance: float) -> tuple[Any, float, Any]:
        """Return logarithms of times, the regret that the model believes in, and the fastest in order."""
        np = self._np
        top = [c for c in np.argsort(logs, kind="stable")[:MOST] if np.isfinite(logs[c])]
        draws = np.random.default_rng(0).standard_normal((_DRAWS, len(top)))
        drawn = logs[top] + draws * np.sqrt(variance * variances[top])
        return logs, float((drawn[:, 0] - drawn.min(1)).mean()) + _LEAST_SCALE, top

    def _believed(self) -> float:
        """Return the variance of errors, beside the variance that the processes state."""
        np, weights = self._np, self._data.weights
        missed, spreads = (
            np.mean([part.missed for part in self._parts], 0),
            np.mean([p.spreads for p in self._parts], 0),
        )
        apart = missed - _shared(np, missed, weights)
        return float((weights * apart**2 / spreads).sum() / weights.sum())

    def _learn(self, slower: Any) -> Learnt:
        """Learn from problems that are left out how large regrets are, beside how large they seem."""
        np, parts = self._np, self._parts
        learnt = Learnt(tuple(p.structure for p in parts), tuple(p.scales for p in parts), self._believed())
        if self.problems < FEWEST:
            return learnt
        left_out: list[float] = []
        scales, gaps = [], []
        for fold in range(_FOLDS):
            held_out = np.arange(fold, self.problems, _FOLDS)
            logs, variances = _average(np, [part.without(held_out) for part in parts])
            logs = np.where(np.isfinite(slower[:, held_out]), logs, np.inf)  # regrets elsewhere are not known
            for place, problem in enumerate(held_out):
                column, scale, top = self._ranked(logs[:, place], variances[:, place], learnt.variance)
                scales.append(scale)
                left_out.append(math.expm1(slower[top[0], problem]))
                gaps.append(float(column[slower[:, problem].argmin()] - column[top[0]]))
        return learnt._replace(
            usual=sum(left_out) / sum(scales),
            factor=quantile([regret / scale for regret, scale in zip(left_out, scales, strict=True)]),
            gap=quantile(gaps),
            left_out=tuple(left_out),
        )


class Measured(NamedTuple):
    """The data: sizes by problem; times and their weights by configuration and problem; axes by configuration."""

    np: Any
    axes: Mapping[str, Any]
    cores: int
    sizes: Any
    times: Any
    weights: Any

    def some(self, configs: Any, problems: Any) -> Measured:
        """Return a part of the data."""
        view = self.np.ix_(configs, problems)
        axes = {name: values[configs] for name, values in self.axes.items()}
        return self._replace(axes=axes, sizes=self.sizes[problems], times=self.times[view], weights=self.weights[view])

    def studied(self) -> Any:
        """Return the configurations that are fast most often."""
        return self.np.argsort(-self.weights.sum(1), kind="stable")[:_STUDIED]

    def counted(self, structure: Structure, sizes: Any) -> tuple[Any, Any]:
        """Return how many blocks are launched at sizes, and how many steps each loops."""
        np = self.np
        blocks, steps = np.ones((2, len(self.times), len(sizes)))
        for block in structure.blocks:
            count = np.ceil(sizes[None, :, block.size] / self._length(block))
            blocks = blocks * count if block.role == "launch" else blocks
            steps = steps * count if block.role == "loop" else steps
        for size in structure.launched:
            blocks = blocks * sizes[None, :, size]
        return blocks, steps

    def _length(self, block: Block) -> Any:
        return self.np.prod([self.axes[axis] for axis in block.axes], 0)[:, None]

    def products(self, structure: Structure, sizes: Any) -> Any:
        """Return the parts that a time may be made of: an array by configuration, problem and product."""
        np = self.np
        blocks, steps = self.counted(structure, sizes)
        waves = np.ceil(blocks / self.cores)
        one = np.ones_like(blocks)
        plain = [one * size for size in sizes.T]
        found = [one, waves, steps, waves * steps, blocks, blocks * steps, *plain]
        found += [factor * size for factor in (waves, blocks) for size in plain]
        found += [a * b for a, b in combinations(plain, 2)]
        found += [np.prod(plain, 0)] if len(plain) > 2 else []
        return np.stack([*found, *self._split(structure, plain)], 2)

    def _split(self, structure: Structure, plain: Sequence[Any]) -> Iterator[Any]:
        """Yield the products of parts of sizes where blocks split one: whole blocks, the rest, whether there is one.

        The rest has two parts, because compilers make vectors of its loop too.
        """
        split = {block.size: self._length(block) for block in structure.blocks if block.role == "split"}
        parts = [[size**0, size] for size in plain]
        for place, length in split.items():
            whole, rest = plain[place] // length, plain[place] % length
            parts[place] = [rest**0, whole, rest // _VECTOR, rest % _VECTOR, (rest > 0).astype(float)]
        for factors in product_of(*parts) if split else ():
            yield self.np.prod(factors, 0)

    def inputs(self, structure: Structure, sizes: Any) -> tuple[Any, list[str]]:
        """Return the inputs of the process, an array by configuration, problem and input; and the kind of each."""
        np = self.np
        blocks, _ = self.counted(structure, sizes)
        waves = np.ceil(blocks / self.cores)
        found = [("wave", waves), ("full", waves * self.cores / blocks)]
        for block in structure.blocks:
            length, size = self._length(block), sizes[None, :, block.size]
            count = np.ceil(size / length)
            found += [("steps", count)] if block.role == "loop" else []
            found.append(("waste", 1 + size % length / size if block.role == "split" else count * length / size))
        found += [("size", np.broadcast_to(size, blocks.shape)) for size in sizes.T]
        return np.log2(np.stack([values for _, values in found], 2)), [kind for kind, _ in found]


class _StructureModel:
    """The model of one structure: sums, and a Gaussian process for each configuration."""

    def __init__(self, data: Measured, structure: Structure, scales: Mapping[str, float] | None = None) -> None:
        np = data.np
        self._data = data = data._replace(sizes=structure.counted(np, data.sizes))
        self.structure = structure
        products = data.products(structure, data.sizes)
        self._sums = _fit_sums(np, products, data.times, data.weights > 0)
        targets = np.log(data.times / _total(np, products, self._sums))
        self._spread = float(np.sqrt((targets[data.weights > 0] ** 2).mean())) + 1e-9
        self._inputs, self._kinds = data.inputs(structure, data.sizes)
        self.scales = scales or self._adjusted(targets / self._spread)
        self._inverse = self._inverted(slice(None), self.scales)
        self._solved = np.einsum("cij,cj->ci", self._inverse, targets / self._spread)
        missed, self.spreads = _left_out(np, self._inverse, targets / self._spread)
        self.missed = self._spread * missed

    def without(self, problems: Any) -> tuple[Any, Any]:
        """Return the predictions for some problems if they are left out of the data, in the form of `predict`.

        The sums are fitted anew. The process is not: a part of its inverse is enough for an exact answer.
        """
        np, data = self._data.np, self._data
        products = data.products(self.structure, data.sizes)
        kept = data.weights > 0
        kept[:, problems] = False
        targets = np.log(data.times / _total(np, products, _fit_sums(np, products, data.times, kept)))
        among = np.linalg.inv(self._inverse[:, problems[:, None], problems])
        missed = (among @ (self._inverse[:, problems] @ targets[:, :, None]))[:, :, 0]
        known = kept.any(1)[:, None]
        return np.where(known, np.log(data.times[:, problems]) - missed, np.inf), np.einsum("cii->ci", among)

    def predict(self, sizes: Any) -> tuple[Any, Any]:
        """Return the logarithms of the times of all configurations at sizes, and their variances."""
        np, data = self._data.np, self._data
        sizes = self.structure.counted(np, sizes)
        mean = np.log(_total(np, data.products(self.structure, sizes), self._sums))
        inputs, kinds = data.inputs(self.structure, sizes)
        near = _similar(np, inputs, self._inputs, kinds, self.scales)
        left = 1 + self.scales["noise"] - ((near @ self._inverse) * near).sum(2)
        logs = mean + self._spread * (near @ self._solved[:, :, None])[:, :, 0]
        known = (data.weights > 0).any(1)[:, None]
        return np.where(known, logs, np.inf), np.maximum(left, 0.0)

    def _adjusted(self, targets: Any) -> Mapping[str, float]:
        """Return the scales with the smallest errors in problems that are left out."""
        np, chosen = self._data.np, self._data.studied()
        targets, weights = targets[chosen], self._data.weights[chosen]

        def error(scales: Mapping[str, float]) -> float:
            return _relative_error(np, _left_out(np, self._inverted(chosen, scales), targets)[0], weights)

        best = dict(_SCALES)
        if len(self._data.sizes) < FEWEST:
            return best
        lowest = error(best)
        for name in (*_SCALES, *_SCALES):
            for factor in (0.25, 4.0):
                scales = {**best, name: best[name] * factor}
                if (found := error(scales)) < lowest:
                    lowest, best = found, scales
        return best

    def _inverted(self, chosen: Any, scales: Mapping[str, float]) -> Any:
        """Return the inverses of the covariances of the times of each configuration."""
        np, inputs = self._data.np, self._inputs[chosen]
        noise = np.where(self._data.weights[chosen] > 0, scales["noise"], _MISSING)
        similar = _similar(np, inputs, inputs, self._kinds, scales)
        return inverse(np, similar + noise[:, :, None] * np.eye(inputs.shape[1]))


def _best_structures(data: Measured, sizes: int) -> list[Structure]:
    """Return the structures with the smallest errors in problems that are left out, found by one change at a time."""
    if len(data.sizes) < FEWEST:
        return [Structure()]
    np = data.np
    some = data.some(data.studied(), np.arange(0, len(data.sizes), -(-len(data.sizes) // _COMPARED)))
    errors: dict[Structure, float] = {}

    def error(structure: Structure) -> float:
        if structure not in errors:
            errors[structure] = _relative_error(np, _missed_by(some, structure), some.weights)
        return errors[structure]

    pairs = [(a, b) for a, b in permutations(range(sizes), 2) if (data.sizes[:, a] > data.sizes[:, b]).all()]
    # A window and the block that splits its places make each other worth while: half of the searches begin with one.
    starts = {frozenset(pair for pair in pairs if pair[1] == window) for window in (None, *range(sizes))}
    for windows in sorted(starts, key=sorted):
        structure, changed = None, Structure(windows=windows)
        while structure is None or error(changed) < _WORTH * error(structure):
            structure = changed
            changed = min(_changes(structure, list(data.axes), range(sizes), pairs), key=error, default=structure)
    ranked = sorted(errors, key=errors.__getitem__)[:_AVERAGED]
    return [each for each in ranked if errors[each] <= _ALIKE * errors[ranked[0]]]


def _missed_by(data: Measured, structure: Structure) -> Any:
    """Return the errors of a structure's model in problems that are left out of its sums too."""
    # In the problems that they were fitted to, sums of more products have smaller errors in any case.
    np, model = data.np, _StructureModel(data, structure, _SCALES)
    missed = np.empty_like(data.times)
    for fold in range(_COMPARING_FOLDS):
        left_out = np.arange(fold, len(data.sizes), _COMPARING_FOLDS)
        missed[:, left_out] = np.log(data.times[:, left_out]) - model.without(left_out)[0]
    return missed


def _changes(
    structure: Structure, axes: Sequence[str], sizes: Sequence[int], windows: Sequence[tuple[int, int]]
) -> Iterator[Structure]:
    for names, roles in _ROLES.items():
        for together in combinations(axes, names):
            others = tuple(block for block in structure.blocks if not set(together) & set(block.axes))
            yield structure._replace(blocks=others)
            for size, role in product_of(sizes, roles):
                yield structure._replace(blocks=tuple(sorted((*others, Block(together, size, role)))))
    for size in sizes:
        yield structure._replace(launched=structure.launched ^ {size})
    for pair in windows:
        yield structure._replace(windows=structure.windows ^ {pair})
    if not structure.blocks:  # neither side of a grid tells much without the other
        for one, other in permutations(sizes, 2):
            for axis in axes:
                yield structure._replace(blocks=(Block((axis,), one, "launch"),), launched=frozenset({other}))
            for a, b in combinations(axes, 2):
                both = (Block((a,), one, "launch"), Block((b,), other, "launch"))
                yield structure._replace(blocks=tuple(sorted(both)), launched=frozenset())


def _varying(examples: Sequence[Example]) -> list[str]:
    """Return the names of sizes that differ between problems."""
    columns: dict[str, list[float]] = {}
    for name in [name for name in examples[0].sizes if all(e.sizes.get(name, 0) > 0 for e in examples)]:
        values = [e.sizes[name] for e in examples]
        if len(set(values)) > 1 and values not in columns.values():  # two arguments often share a size
            columns[name] = values
    return list(columns)[:_SIZES]


def _powers_of_two(np: Any, configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the axes whose values may be sizes of blocks, as numbers by configuration."""
    found = {}
    for name in dict.fromkeys(name for config in configs for name in config):
        values = [config.get(name) for config in configs]
        if name in _NO_BLOCKS:
            continue
        if len(set(map(str, values))) > 1 and all(type(v) is int and v > 0 and v & (v - 1) == 0 for v in values):
            found[name] = np.array(values, float)
    return dict(list(found.items())[:_AXES])


def _fit_sums(np: Any, products: Any, times: Any, measured: Any) -> Any:
    """Return weights of products, not negative, whose sums have the smallest relative errors."""
    parts = np.where(measured[:, :, None], products / times[:, :, None], 0.0)
    usual = parts.mean(1, keepdims=True) + 1e-30
    parts = parts / usual
    squares, aims = parts.transpose(0, 2, 1) @ parts, parts.sum(1)
    # The part that all configurations share is learnt first: few steps from there are better than many from nothing.
    shared = _fewer_errors(squares.sum(0)[None], aims.sum(0)[None], np.full((1, aims.shape[1]), 1.0), _SHARED_STEPS)
    weights = _fewer_errors(squares, aims, np.maximum(shared, 1e-6) + np.zeros_like(aims), _OWN_STEPS)
    return weights / usual[:, 0]


def _fewer_errors(squares: Any, aims: Any, weights: Any, steps: int) -> Any:
    """Return weights after so many steps, each of which lowers the squared errors and keeps every sign."""
    for _ in range(steps):
        weights = weights * aims / ((squares @ weights[:, :, None])[:, :, 0] + 1e-12)
    return weights


def _total(np: Any, products: Any, weights: Any) -> Any:
    return np.maximum((products @ weights[:, :, None])[:, :, 0], 1e-300)


def _average(np: Any, predictions: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return the mean of the logarithms of times by several models, and of their variances."""
    logs, variances = zip(*predictions, strict=True)
    return np.mean(logs, 0), np.mean(variances, 0)


def _similar(np: Any, one: Any, other: Any, kinds: list[str], scales: Mapping[str, float]) -> Any:
    """Return how similar problems are for each configuration (Matern 3/2)."""
    root = np.sqrt(np.array([scales[kind] for kind in kinds]))
    one, other = one * root, other * root
    squares = (one**2).sum(2)[:, :, None] + (other**2).sum(2)[:, None, :]
    squares -= 2 * product(np, one, other.transpose(0, 2, 1))
    apart = np.sqrt(3 * np.maximum(squares, 0.0))
    return (1 + apart) * np.exp(-apart)


def _left_out(np: Any, inverted: Any, targets: Any) -> tuple[Any, Any]:
    """Return the errors at problems when each is left out of the data, and their variances."""
    diagonal = np.einsum("cii->ci", inverted)
    return np.einsum("cij,cj->ci", inverted, targets) / diagonal, 1 / diagonal


def _relative_error(np: Any, errors: Any, weights: Any) -> float:
    """Return the size of errors, less the part that all configurations share at a problem: it changes no choice."""
    return float(np.sqrt((weights * (errors - _shared(np, errors, weights)) ** 2).sum() / weights.sum()))


def _shared(np: Any, errors: Any, weights: Any) -> Any:
    return (weights * errors).sum(0) / np.maximum(weights.sum(0), 1e-9)
