"""Learns a heuristic from the book: a small decision tree over sizes, written as readable Python."""

from __future__ import annotations

import json
import keyword
import math
import re
from itertools import combinations, pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from tunebook._base.config_codec import TAG, decode
from tunebook._base.errors import CodecError, DefinitionError
from tunebook.search._key_numbers import numbers_in
from tunebook.search._warm_start import times_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json

# A split must have this many problems on each side, and lower the mean regret this much: else it learns noise.
_FEWEST: Final = 2
_WORTH: Final = 0.002
_FOLDS: Final = 10
# The assumed regret of a configuration on a problem where it was not measured: it takes eight times the best.
_UNMEASURED: Final = 7.0
# Products and ratios are made of at most this many sizes: there are twice as many of them as pairs.
_PAIRED: Final = 8
COVERED: Final = 0.95  # the part of problems in which a regret is within its bound


class Example(NamedTuple):
    """One problem: its sizes by their Python expression, and seconds by configuration, as a key of `configs`.

    It is `whole` if no configuration that may be the best is missing: then regrets there can be known.
    """

    sizes: Mapping[str, float]
    seconds: Mapping[str, float]
    whole: bool = True


class Split(NamedTuple):
    """Problems whose size, product or ratio of sizes is at most `limit` go to `below`, the others to `above`."""

    size: str
    limit: float
    below: Tree
    above: Tree


# A leaf is the key of the configuration with the lowest mean regret for its problems.
Tree: TypeAlias = "str | Split"


class Fit(NamedTuple):
    """A learnt heuristic. `regret` is its mean slowdown against the best measured configuration; 0.1 is 10 %.

    `held_out` is the regret on problems that it was not learnt from: judge by this. `constant` is the same for the best
    single configuration, which is the heuristic if no tree is better. `bound` is the regret that 95 % of such problems
    stay within; infinite if there are too few to say. `source` is its Python code.
    """

    tree: Tree
    source: str
    regret: float
    held_out: float
    problems: int
    constant: float
    bound: float


def fit(
    examples: Sequence[Example], configs: Mapping[str, Mapping[str, Any]], *, name: str = "heuristic", depth: int = 4
) -> Fit:
    """Learn a heuristic of sizes from measured problems, and write it as a Python function.

    `held_out` comes from learning ten times, each time without a tenth of the problems.
    """
    if len(examples) < 2 * _FEWEST:
        there = "is only 1" if len(examples) == 1 else f"are {len(examples)}"
        raise DefinitionError(f"a heuristic needs at least {2 * _FEWEST} tuned problems; there {there}")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise DefinitionError(f"{name!r} is not a valid name for a function")
    tried = sorted({config for example in examples for config in example.seconds})
    # Far behind is far behind: one strange time must not outweigh all other problems.
    behind = [[min(_regret(config, example), _UNMEASURED) for config in tried] for example in examples]
    table = _Table(_questions(examples), tried, behind)
    every = range(len(examples))
    missed, by_one = (_held_out(table, examples, levels) for levels in (depth, 0))
    # Of noise, the best constant is all there is to learn. One strange time decides nothing: twice the best is far.
    grown = fmean(min(regret, 1.0) for regret in missed) < fmean(min(regret, 1.0) for regret in by_one)
    tree = _grow(table, every, depth if grown else 0)
    held_out, constant, bound = fmean(missed if grown else by_one), fmean(by_one), quantile(missed if grown else by_one)
    regret = fmean(regret_of(tree, example) for example in examples)
    branches = [*_branches(tree, configs, "    ")]
    # A launch may leave others at their defaults.
    asked = dict.fromkeys(size.partition(".")[0] for size in examples[0].sizes)
    arguments = [name for name in asked if any(re.search(rf"\b{name}\b", line) for line in branches if "if " in line)]
    rest = next(name for name in ("_", "__", "_rest") if name not in asked)
    lines = [
        # By name: a key does not know the order of its arguments, nor all arguments of the kernel.
        f"def {name}(*, {', '.join([*arguments, f'**{rest}'])}):" if arguments else f"def {name}(**{rest}):",
        f'    """Learnt from {len(examples)} tuned problems; {held_out:.1%} slower than the best on held-out ones."""',
        f"    # {_bound_text(constant, bound, has_tree=not isinstance(tree, str))}",
        *branches,
    ]
    return Fit(tree, "\n".join(lines) + "\n", regret, held_out, len(examples), constant, bound)


def _bound_text(constant: float, bound: float, *, has_tree: bool) -> str:
    known = (
        f"At most {bound:.1%} slower on 95% of held-out calls."
        if math.isfinite(bound)
        else "Too few calls to give a bound."
    )
    if has_tree:
        return f"{known} One configuration for all calls would be {constant:.1%} slower on average."
    return f"{known} No tree was better than one configuration."


def quantile(values: Sequence[float], *, higher: int = 0) -> float:
    """Return the value that a further one is at most in 95 % of cases; infinite if there are too few to say.

    `higher` takes the value that is so many places further up, or the largest one; it must be a higher one.

    >>> quantile(range(1, 60)), quantile(range(1, 60), higher=2), quantile(range(1, 40), higher=2), quantile(range(18))
    (57, 59, 39, inf)
    """
    place = math.ceil(COVERED * (len(values) + 1))
    needed = place + (higher > 0)
    return sorted(values)[min(place + higher, len(values)) - 1] if needed <= len(values) else math.inf


def _held_out(table: _Table, examples: Sequence[Example], depth: int) -> list[float]:
    """Return the regrets of trees on problems that they were not learnt from."""
    every, folds, missed = range(len(examples)), min(_FOLDS, len(examples)), list[float]()
    for fold in range(folds):
        without = _grow(table, [row for row in every if row % folds != fold], depth)
        missed += [regret_of(without, examples[row]) for row in every if row % folds == fold]
    return missed


def fit_book(records: Iterable[Record], *, name: str = "heuristic", depth: int = 4) -> Fit:
    """Learn a heuristic from the records of a kernel on one device."""
    examples: list[Example] = []
    configs: dict[str, Mapping[str, Any]] = {}
    devices: set[str] = set()
    unfinished = 0
    for record in records:
        if record.is_unfinished:
            unfinished += 1
            continue  # its best may be far from the best
        try:
            times, numbers = times_of(record), numbers_in(json.loads(record.problem.call_key))
        except (CodecError, ValueError, RecursionError):
            continue  # damaged, or the key of a key_builder
        seconds = {fp: s for fp, s in times.seconds.items() if math.isfinite(s)}
        # A heuristic is called by names, and knows nothing of the containers that they stand for.
        sizes = {name: number for name, number in numbers.items() if name.partition(".")[0].isidentifier()}
        if seconds and sizes:
            devices.add(record.problem.device)
            examples.append(Example(sizes, seconds))
            configs |= {fp: _in_order(values_in(times.configs[fp]), record) for fp in seconds}
    if len(devices) > 1:
        raise DefinitionError(
            f"these records are of {len(devices)} devices: {', '.join(sorted(devices))}. Each device has its own best "
            "configurations; pass its records, as in [r for r in store.items(op) if r.problem.device == device]"
        )
    if unfinished and len(examples) < 2 * _FEWEST:
        raise DefinitionError(
            f"a heuristic needs at least {2 * _FEWEST} problems whose tuning was finished; there are {len(examples)}, "
            f"and {unfinished} whose tuning a budget ended: tune them again, with a larger budget"
        )
    return fit(examples, configs, name=name, depth=depth)


def _in_order(values: Mapping[str, Any], record: Record) -> Mapping[str, Any]:
    """Return the values of a configuration in the order of its space, if the record knows it."""
    names = record.provenance.get("names")
    ordered = [str(name) for name in names] if isinstance(names, list) else []
    return {**{name: values[name] for name in ordered if name in values}, **values}


def values_in(encoded: Json) -> Mapping[str, Any]:
    """Return the values of a configuration by name; its class need not be known here."""
    inside = encoded.get("v") if isinstance(encoded, dict) and encoded.get(TAG) == "custom" else None
    found = decode(encoded if inside is None else inside)
    return found if isinstance(found, dict) else {"config": found}


class _Table(NamedTuple):
    """Problems as rows: their values for each question, and the regret of each configuration."""

    questions: Mapping[str, Sequence[float]]
    configs: Sequence[str]
    behind: Sequence[Sequence[float]]


def _questions(examples: Sequence[Example]) -> dict[str, list[float]]:
    """Return the questions of splits by their Python expression: sizes, and products and ratios of two sizes."""
    # The number of tiles depends on a product, and their shape on a ratio: without these, a tree over the sizes of a
    # matmul was 13 % behind on unseen shapes, and with them 4 %.
    plain: dict[str, list[float]] = {}
    for name in [name for name in examples[0].sizes if all(name in e.sizes for e in examples)]:
        values = [e.sizes[name] for e in examples]
        if len(set(values)) > 1 and values not in plain.values():  # two arguments often share a size
            plain[name] = values
    asked = dict(plain)
    positive = [name for name, values in plain.items() if min(values) > 0]
    for one, other in combinations(positive[:_PAIRED], 2):
        both = list(zip(plain[one], plain[other], strict=True))
        asked[f"{one} * {other}"] = [a * b for a, b in both]
        asked[f"{one} / {other}"] = [a / b for a, b in both]
    return asked


def regret_of(tree: Tree, example: Example) -> float:
    """Return how much slower a tree's choice is on a problem than the best measured; 0 if it is the best."""
    while isinstance(tree, Split):
        one, sign, other = tree.size.partition(" * " if " * " in tree.size else " / ")
        value = example.sizes[one]
        if sign:
            value = value * example.sizes[other] if sign == " * " else value / example.sizes[other]
        tree = tree.below if value <= tree.limit else tree.above
    return _regret(tree, example)


def _regret(config: str, example: Example) -> float:
    return example.seconds[config] / min(example.seconds.values()) - 1 if config in example.seconds else _UNMEASURED


def _grow(table: _Table, rows: Sequence[int], depth: int) -> Tree:
    """Return a tree that splits greedily by the question that lowers the mean regret most."""
    sums = [math.fsum(column) for column in zip(*(table.behind[row] for row in rows), strict=True)]
    leaf, total = table.configs[sums.index(min(sums))], min(sums)
    if depth == 0 or len(rows) < 2 * _FEWEST:
        return leaf
    cuts = (_best_cut(table, rows, sums, question) for question in table.questions)
    best = min((cut for cut in cuts if cut is not None), default=None, key=lambda cut: cut[0])
    if best is None or total - best[0] < _WORTH * len(rows):
        return leaf
    _, question, limit = best
    values = table.questions[question]
    low = _grow(table, [row for row in rows if values[row] <= limit], depth - 1)
    high = _grow(table, [row for row in rows if values[row] > limit], depth - 1)
    return low if low == high else Split(question, limit, low, high)


def _best_cut(
    table: _Table, rows: Sequence[int], sums: Sequence[float], question: str
) -> tuple[float, str, float] | None:
    """Return the remaining regret after the best cut of a question, the question, and the limit of the cut."""
    values = table.questions[question]
    ordered = sorted(rows, key=values.__getitem__)
    below = [0.0] * len(sums)
    best: tuple[float, str, float] | None = None
    for taken, (row, following) in enumerate(pairwise(ordered), start=1):
        below = [a + b for a, b in zip(below, table.behind[row], strict=True)]
        if values[row] == values[following] or min(taken, len(rows) - taken) < _FEWEST:
            continue
        left = min(below) + min(a - b for a, b in zip(sums, below, strict=True))
        if best is None or left < best[0]:
            best = (left, question, _round_between(values[row], values[following]))
    return best


def _round_between(low: float, high: float) -> float:
    """Return a number with few digits near the geometric mean of two values."""
    middle = (low + high) / 2 if low <= 0 else math.sqrt(low * high)
    for digits in range(2, 17):
        rounded = float(f"{middle:.{digits}g}")
        if low < rounded < high:
            return rounded
    return middle if low < middle < high else low


def _branches(tree: Tree, configs: Mapping[str, Mapping[str, Any]], indent: str) -> Iterator[str]:
    """Yield the lines of a tree as Python."""
    if isinstance(tree, str):
        yield f"{indent}return {dict(configs[tree])!r}"
        return
    limit = int(tree.limit) if tree.limit == int(tree.limit) else tree.limit
    above, ratio, below = tree.size.partition(" / ")
    # Not as a quotient: a call may have an empty array.
    yield f"{indent}if {above} <= {limit} * {below}:" if ratio else f"{indent}if {tree.size} <= {limit}:"
    yield from _branches(tree.below, configs, indent + "    ")
    yield from _branches(tree.above, configs, indent)
