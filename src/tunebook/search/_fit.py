"""A heuristic from the book: a small decision tree over sizes, written as Python that can be read and shipped."""

from __future__ import annotations

import json
import keyword
import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from tunebook._codec import decode
from tunebook._errors import CodecError, DefinitionError
from tunebook.search._elsewhere import times_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tunebook._record import Record

# A split must have so many problems on each side, and win so much of the mean regret: else it learns noise.
_FEWEST: Final = 2
_WORTH: Final = 0.002
_FOLDS: Final = 10
# What a configuration that was not measured on a problem is taken to cost there: more than any that was.
_UNMEASURED: Final = math.log(8.0)


class Example(NamedTuple):
    """One problem: its sizes by how they are written in Python, and seconds by configuration, as a key of `configs`."""

    sizes: Mapping[str, float]
    seconds: Mapping[str, float]


class Leaf(NamedTuple):
    """The configuration that is best on the whole for the problems that come here."""

    config: str


class Split(NamedTuple):
    """Problems whose size is at most `limit` go to `below`, the others to `above`."""

    size: str
    limit: float
    below: Tree
    above: Tree


Tree: TypeAlias = "Leaf | Split"


class Fit(NamedTuple):
    """A learnt heuristic. `regret` is how much slower than the best measured it is on the mean; 0.1 is 10 %.

    `held_out` is the same on problems that it was not learnt from, and what counts. `source` is the Python of it.
    """

    tree: Tree
    source: str
    regret: float
    held_out: float
    problems: int


def fit(
    examples: Sequence[Example], configs: Mapping[str, Mapping[str, Any]], *, name: str = "heuristic", depth: int = 4
) -> Fit:
    """Learn a heuristic of sizes from measured problems, and write it as a Python function.

    `held_out` is found by learning ten times, each time without a tenth of the problems.
    """
    if len(examples) < 2 * _FEWEST:
        raise DefinitionError(f"a heuristic needs at least {2 * _FEWEST} tuned problems; there are {len(examples)}")
    tree = _grown(examples, depth)
    folds = min(_FOLDS, len(examples))
    missed = []
    for fold in range(folds):
        others = [example for i, example in enumerate(examples) if i % folds != fold]
        without = _grown(others, depth)
        missed += [regret_of(without, example) for i, example in enumerate(examples) if i % folds == fold]
    own = [regret_of(tree, example) for example in examples]
    held_out, regret = _mean(missed), _mean(own)
    source = _python(tree, examples, configs, name, held_out)
    return Fit(tree, source, regret, held_out, len(examples))


def fit_book(records: Iterable[Record], *, name: str = "heuristic", depth: int = 4) -> Fit:
    """Learn a heuristic from the records of one kernel on one device."""
    examples: list[Example] = []
    configs: dict[str, Mapping[str, Any]] = {}
    devices: set[str] = set()
    for record in records:
        try:
            times, sizes = times_of(record), dict(_sizes(json.loads(record.problem.call_key)))
        except (CodecError, ValueError, RecursionError):
            continue  # not whole, or not a key of ours
        seconds = {fp: s for fp, s in times.seconds.items() if math.isfinite(s)}
        if seconds and sizes:
            devices.add(record.problem.device)
            examples.append(Example(sizes, seconds))
            configs |= {fp: _plain(times.configs[fp]) for fp in seconds}
    if len(devices) > 1:
        raise DefinitionError(
            f"these records are of {len(devices)} devices: {', '.join(sorted(devices))}. What is fast on one is not on "
            "another; pass the records of one, as in [r for r in store.items(op) if r.problem.device == device]"
        )
    return fit(examples, configs, name=name, depth=depth)


def _plain(encoded: Any) -> Mapping[str, Any]:
    decoded = decode(encoded)
    return decoded if isinstance(decoded, dict) else {"config": decoded}


def _sizes(arguments: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a call key as they are written in the kernel's own body."""
    for argument, value in arguments.items() if isinstance(arguments, dict) else ():
        parts = value.get("$array") if isinstance(value, dict) else None
        if isinstance(parts, list) and len(parts) > 2 and isinstance(parts[2], list):
            for at, size in enumerate(parts[2]):
                number = int(size[1:]) if isinstance(size, str) and size[1:].isdigit() else size
                if type(number) is int:
                    yield f"{argument}.shape[{at}]", float(number)
        elif type(value) in (int, float):
            yield argument, float(value)


# ---------------------------------------------------------------------------------------------------------- learning


def choose(tree: Tree, sizes: Mapping[str, float]) -> str:
    """Return the configuration that a tree gives to a problem."""
    while isinstance(tree, Split):
        tree = tree.below if sizes[tree.size] <= tree.limit else tree.above
    return tree.config


def regret_of(tree: Tree, example: Example) -> float:
    """Return how much slower than the best measured a tree's choice is on one problem; 0 if it is the best."""
    return math.expm1(_loss(choose(tree, example.sizes), example))


def _loss(config: str, example: Example) -> float:
    best = min(example.seconds.values())
    return math.log(example.seconds[config] / best) if config in example.seconds else _UNMEASURED


def _grown(examples: Sequence[Example], depth: int) -> Tree:
    leaf, total = _leaf(examples)
    if depth == 0 or len(examples) < 2 * _FEWEST:
        return leaf
    best: tuple[float, str, float] | None = None
    for size, limit in _cuts(examples):
        below = [e for e in examples if e.sizes[size] <= limit]
        above = [e for e in examples if e.sizes[size] > limit]
        if min(len(below), len(above)) >= _FEWEST:
            cost = _leaf(below)[1] + _leaf(above)[1]
            if best is None or cost < best[0]:
                best = (cost, size, limit)
    if best is None or total - best[0] < _WORTH * len(examples):
        return leaf
    _, size, limit = best
    low = _grown([e for e in examples if e.sizes[size] <= limit], depth - 1)
    high = _grown([e for e in examples if e.sizes[size] > limit], depth - 1)
    return low if low == high else Split(size, limit, low, high)


def _leaf(examples: Sequence[Example]) -> tuple[Leaf, float]:
    """Return the configuration with the least loss over all, and that."""
    costs: dict[str, float] = {}
    for example in examples:
        best = min(example.seconds.values())
        for config, seconds in example.seconds.items():
            # Relative to what it would cost unmeasured, so that those which were measured everywhere come out first.
            costs[config] = costs.get(config, 0.0) + math.log(seconds / best) - _UNMEASURED
    chosen = min(sorted(costs), key=lambda config: costs[config])
    return Leaf(chosen), math.fsum(_loss(chosen, example) for example in examples)


def _cuts(examples: Sequence[Example]) -> Iterator[tuple[str, float]]:
    names = [name for name in examples[0].sizes if all(name in e.sizes for e in examples)]
    for name in names:
        values = sorted({e.sizes[name] for e in examples})
        for low, high in pairwise(values):
            # Between two sizes that were seen, where a ratio lies in the middle.
            yield name, _round((low + high) / 2 if low <= 0 else math.sqrt(low * high))


def _round(limit: float) -> float:
    return float(round(limit)) if limit >= 2 else limit


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# ----------------------------------------------------------------------------------------------------------- writing


def _python(
    tree: Tree, examples: Sequence[Example], configs: Mapping[str, Mapping[str, Any]], name: str, held_out: float
) -> str:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise DefinitionError(f"{name!r} is no name for a function")
    arguments = dict.fromkeys(size.partition(".")[0] for size in examples[0].sizes)
    lines = [
        f"def {name}({', '.join(arguments)}):",
        f'    """Learnt from {len(examples)} tuned problems; {held_out:.1%} slower than the best on held-out ones."""',
        *_branches(tree, configs, "    "),
    ]
    return "\n".join(lines) + "\n"


def _branches(tree: Tree, configs: Mapping[str, Mapping[str, Any]], indent: str) -> Iterator[str]:
    if isinstance(tree, Leaf):
        yield f"{indent}return {dict(configs[tree.config])!r}"
        return
    limit = int(tree.limit) if tree.limit == int(tree.limit) else tree.limit
    yield f"{indent}if {tree.size} <= {limit}:"
    yield from _branches(tree.below, configs, indent + "    ")
    yield from _branches(tree.above, configs, indent)
