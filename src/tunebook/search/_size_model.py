"""A model of times over sizes: a configuration for sizes that were never tuned, and a bound of its regret.

Each configuration has a model of its own, of the logarithm of its time. Its first part is a sum of products that times
are made of (launches, waves of blocks, steps of a loop, whole blocks and the rest, bytes), with weights that are not
negative. Which axis, or product of two axes, is the block of which size, and which size is a window that moves along
another, is found by trying; and so is how many blocks a core runs at once, and where a cache ends. A Gaussian process
then learns from the nearest problems how times differ from this sum. The bound is the 95 % quantile of the regrets at
problems that were left out of the data, as in conformal prediction. That is no guarantee: structures, scales and parts
are chosen by the same problems. `bench/predict.py` measures for how many other problems the bound holds.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._base.errors import DefinitionError, require
from tunebook.search._learned_heuristic import quantile
from tunebook.search._local_process import shared
from tunebook.search._part_model import LearntPart, PartModel, blocks_at_once, learn_part
from tunebook.search._structure_search import best_structures
from tunebook.search._structures import Measured, Structure
from tunebook.search._tuned_sizes import TunedSizes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tunebook.search._learned_heuristic import Example

FEWEST: Final = 8  # configurations worth trying, and problems to learn a structure from
MOST: Final = 16
_NEAR: Final = 0.15  # slowness over which a time counts for less: the fastest must be told apart
_LEAST_WEIGHT: Final = 0.02
_SIZES: Final = 4  # at most, and axes: what is tried grows with their product
_AXES: Final = 6
_NO_BLOCKS: Final = frozenset({"num_warps", "num_stages", "num_ctas"})  # Triton's options are never sizes of blocks
_STRUCTURES: Final = 5  # that parts are learnt from: which one is the right one is seldom sure
_AVERAGED: Final = 4  # parts at most
# Fewer problems cannot tell which parts choose best: with 20 sizes of a matmul, bounds held for 89 % instead of 96 %,
# because the parts were chosen by the same problems as the bound.
_CHOSEN_FROM: Final = 40
# Parts are chosen by the regret at problems that are left out, and each configuration counts by how near its prediction
# is to the fastest one: by the regret of the first choice alone, few problems would decide.
_NEAR_CHOICES: Final = 0.04
_FAR: Final = 0.3  # a larger regret counts as this one
_NEVER: Final = 1e3  # the logarithm of a time that is never chosen
_FOLDS: Final = 8
_LEFT_OUT: Final = 32  # problems of each fold, at most
_DRAWS: Final = 256
_LEAST_SCALE: Final = 1e-3  # regrets below this are noise
# Structures, scales and parts are chosen by the same problems as the bound, so regrets there are too small: the bound
# is two problems above the quantile. Where the model is surest, it believes in far too small regrets: a part of the
# usual regret is added everywhere. Without both, bounds by 40 to 160 sizes held for 92 to 95 % of calls (four Triton
# kernels, twelve draws of sizes each); with both, on other draws, for 94 to 97 %.
_HIGHER: Final = 2
_NEVER_SURER: Final = 0.25
_OF_FEW: Final = 1.5  # of so few problems that the quantile is the largest, the bound is so many times higher
BOUNDED_FROM: Final = next(many for many in count() if math.isfinite(quantile(range(many))))  # problems


class Predicted(NamedTuple):
    """The keys of configurations worth trying, the fastest first; the regret expected of the first, and its bound.

    The bound is infinite if there is none; `outside` is not empty if that is because a size is beyond all tuned ones.
    """

    keys: list[str]
    regret: float
    bound: float
    outside: str = ""


class Learnt(NamedTuple):
    """The part of a model that takes long to learn: its parts, and how far to believe them.

    `names` and `keys` are the sizes and the configurations that it is about. `left_out` has the regrets on problems
    that a model was not learnt from. The bound is `factor` times the regret that the model believes in and `least`.
    """

    names: tuple[str, ...]
    keys: tuple[str, ...]
    parts: tuple[LearntPart, ...]
    variance: float = 1.0
    usual: float = 1.0
    factor: float = math.inf
    least: float = 0.0
    gap: float = math.inf
    left_out: tuple[float, ...] = ()


class SizeModel:
    """Predicts how fast configurations are at sizes, from problems where they were measured.

    `configs` has the values of each configuration, by the keys of the examples' `seconds`. `cores` is the number of
    blocks that the device runs side by side, or 1 if that is unknown. `learnt` is known from another model of the same
    data; the parts of `parts_of` are of nearly the same data, and how far to believe them is learnt again. Models of
    other sizes or configurations are not used.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        configs: Mapping[str, Mapping[str, Any]],
        *,
        cores: int = 1,
        learnt: Learnt | None = None,
        parts_of: Learnt | None = None,
    ) -> None:
        self._np = np = require("numpy", feature="a prediction for sizes that were never tuned")
        self.keys: Final = modelled(examples, configs)
        examples = [example for example in examples if not example.seconds.keys().isdisjoint(self.keys)]
        if not examples:
            raise DefinitionError(
                "no configuration was measured at half of the problems: there is nothing to learn from"
            )
        self.problems: Final = len(examples)
        self._names = _varying(examples)
        self._tuned: Final = TunedSizes(np, [example.sizes for example in examples])
        self._whole = np.array([example.whole for example in examples])
        sizes = np.array([[e.sizes[name] for name in self._names] for e in examples]).reshape(len(examples), -1)
        times = np.array([[e.seconds.get(key, np.nan) for e in examples] for key in self.keys])
        # Than the best of all measured configurations: the model cannot choose some of them.
        slower = np.log(times / np.array([min(e.seconds.values()) for e in examples]))
        weights = np.where(np.isnan(slower), 0.0, np.exp(-slower / _NEAR) + _LEAST_WEIGHT)
        axes = _powers_of_two(np, [configs[key] for key in self.keys])
        self._data = data = Measured(
            np, axes, max(1, cores), sizes, np.where(np.isnan(times), np.nanmean(times), times), weights
        )
        about = (tuple(self._names), tuple(self.keys))
        known = [each for each in (learnt, parts_of) if each is not None and (each.names, each.keys) == about]
        parts = known[0].parts if known else _learn_parts(data)
        self._parts = [PartModel(data, part) for part in parts]
        if known and known[0] is learnt:
            self.learnt = learnt
        else:
            self.learnt = self._learn(np.where(np.isnan(slower), np.inf, slower), Learnt(*about, parts))

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
        scale, top = self._ranked(logs, variances, self.learnt.variance)
        worth = [int(c) for rank, c in enumerate(top) if rank < FEWEST or logs[c] - logs[top[0]] <= self.learnt.gap]
        outside = self._tuned.outside(sizes)
        bound = math.inf if outside else self.learnt.factor * (scale + self.learnt.least)
        return Predicted([self.keys[c] for c in worth], self.learnt.usual * scale, bound, outside)

    def _ranked(self, logs: Any, variances: Any, variance: float) -> tuple[float, Any]:
        """Return the regret that the model believes in, and the fastest configurations in order."""
        np = self._np
        top = [c for c in np.argsort(logs, kind="stable")[:MOST] if np.isfinite(logs[c])]
        draws = np.random.default_rng(0).standard_normal((_DRAWS, len(top)))
        drawn = logs[top] + draws * np.sqrt(variance * variances[top])
        return float((drawn[:, 0] - drawn.min(1)).mean()) + _LEAST_SCALE, top

    def _learn(self, slower: Any, begun: Learnt) -> Learnt:
        """Choose the parts, and learn from problems that are left out how large regrets are beside those expected."""
        np, weights, times = self._np, self._data.weights, self._np.log(self._data.times)
        whole = np.flatnonzero(self._whole)
        if len(whole) < FEWEST:
            return begun
        apart = max(_FOLDS, -(-len(whole) // _LEFT_OUT))
        folds = [whole[fold::apart] for fold in range(min(_FOLDS, len(whole)))]
        problems = np.concatenate(folds)
        weights, slower = weights[:, problems], slower[:, problems]
        found = [_beside(np, [part.left_out(fold) for fold in folds]) for part in self._parts]
        enough = len(whole) >= _CHOSEN_FROM
        chosen = best_average(np, [logs for logs, _ in found], slower) if enough else range(len(found))[:_AVERAGED]
        self._parts = [self._parts[each] for each in chosen]
        logs, variances = _average(np, [found[each] for each in chosen])
        missed = np.where(np.isfinite(logs), logs - times[:, problems], 0.0)
        variance = float((weights * (missed - shared(np, missed, weights)) ** 2 / variances).sum() / weights.sum())
        left_out: list[float] = []
        scales, gaps = [], []
        for place in range(len(problems)):
            column = logs[:, place]
            scale, top = self._ranked(column, variances[:, place], variance)
            if not np.isfinite(slower[top[0], place]):
                continue  # the choice was not measured there, so its regret is not known
            scales.append(scale)
            left_out.append(math.expm1(slower[top[0], place]))
            gaps.append(float(column[slower[:, place].argmin()] - column[top[0]]))
        if not left_out:
            return begun
        least = _NEVER_SURER * sum(left_out) / len(left_out)
        times_as_much = [regret / (scale + least) for regret, scale in zip(left_out, scales, strict=True)]
        return begun._replace(
            parts=tuple(each.part for each in self._parts),
            variance=variance,
            usual=sum(left_out) / sum(scales),
            factor=min(quantile(times_as_much, higher=_HIGHER), _OF_FEW * quantile(times_as_much)),
            least=least,
            gap=quantile(gaps),
            left_out=tuple(left_out),
        )


def modelled(examples: Sequence[Example], configs: Iterable[str]) -> list[str]:
    """Return the configurations that can be predicted: measured at half of the problems, or at few and the best at one.

    Tunings that trust a model measure few configurations: one that is the best at rare sizes must not be forgotten.
    """
    many = Counter(key for example in examples for key in example.seconds)
    best = {min(example.seconds, key=example.seconds.__getitem__) for example in examples}
    half = len(examples) / 2
    return [key for key in configs if many[key] >= (min(half, FEWEST) if key in best else max(half, 1))]


def _learn_parts(data: Measured) -> tuple[LearntPart, ...]:
    """Return parts that a model may be made of; cores run several blocks at once in every second one."""
    found = best_structures(data, _STRUCTURES) if len(data.sizes) >= FEWEST else [Structure()]
    residents = [blocks_at_once(data, structure) if place % 2 else () for place, structure in enumerate(found)]
    return tuple(learn_part(data, *each, place) for place, each in enumerate(zip(found, residents, strict=True)))


def best_average(np: Any, predictions: Sequence[Any], slower: Any) -> list[int]:
    """Return which predictions to average: they are added one at a time, as long as that lowers the regret."""
    chosen, lowest, total = list[int](), math.inf, 0.0
    while len(chosen) < _AVERAGED:
        left = [each for each in range(len(predictions)) if each not in chosen]
        errors = {each: _regret(np, (total + predictions[each]) / (len(chosen) + 1), slower) for each in left}
        best = min(left, key=errors.__getitem__, default=None)
        if best is None or (chosen and errors[best] >= lowest):
            break
        lowest, total = errors[best], total + predictions[best]
        chosen.append(best)
    return chosen


def _regret(np: Any, logs: Any, slower: Any) -> float:
    """Return the mean regret of choices near the fastest prediction; `slower` has logarithms of true slownesses."""
    measured = np.isfinite(slower)
    logs = np.where(measured & np.isfinite(logs), logs, _NEVER)
    chances = np.exp((logs.min(0) - logs) / _NEAR_CHOICES)
    regrets = np.expm1(np.where(measured, slower, 0.0))
    return float(np.minimum((chances * regrets).sum(0) / chances.sum(0), _FAR).mean())


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


def _beside(np: Any, predictions: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return predictions for several groups of problems as one, by configuration and problem."""
    logs, variances = zip(*predictions, strict=True)
    return np.concatenate(logs, 1), np.concatenate(variances, 1)


def _average(np: Any, predictions: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return the mean of the logarithms of times by several models, and of their variances."""
    logs, variances = zip(*predictions, strict=True)
    return np.mean(logs, 0), np.mean(variances, 0)
