"""Finds which axis of a configuration is the block of which size, by the errors of models in problems left out."""

from __future__ import annotations

from itertools import combinations, permutations
from itertools import product as product_of
from typing import TYPE_CHECKING, Any, Final

from tunebook.search._local_process import left_out_predictions, relative_error
from tunebook.search._structures import QUICK, Block, Measured, Structure, fit_sums, total

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_COMPARED: Final = 100  # problems at most by which structures are compared: the cost grows with the cube
_ALIKE: Final = 1.1  # structures are averaged if their errors are at most so many times the smallest
_WORTH: Final = 0.985  # a change of the structure must lower the error to this part
_FOLDS: Final = 4
# The roles of blocks of one axis, and of two: threads of a block times the work of each, lanes times vectors.
_ROLES: Final = {1: ("launch", "loop", "split"), 2: ("launch", "split")}


def best_structures(data: Measured, many: int) -> list[Structure]:
    """Return at most so many structures with the smallest errors, found by one change at a time."""
    np, sizes = data.np, data.sizes.shape[1]
    some = data.some(data.studied(), np.arange(0, len(data.sizes), -(-len(data.sizes) // _COMPARED)))
    errors: dict[Structure, float] = {}

    def error(structure: Structure) -> float:
        if structure not in errors:
            errors[structure] = relative_error(np, _missed_by(some, structure), some.weights)
        return errors[structure]

    pairs = [(a, b) for a, b in permutations(range(sizes), 2) if (data.sizes[:, a] > data.sizes[:, b]).all()]
    # A window and the block that splits its places make each other worth while: half of the searches begin with one.
    starts = {frozenset(pair for pair in pairs if pair[1] == window) for window in (None, *range(sizes))}
    for windows in sorted(starts, key=sorted):
        structure, changed = None, Structure(windows=windows)
        while structure is None or error(changed) < _WORTH * error(structure):
            structure = changed
            changed = min(_changes(structure, list(data.axes), range(sizes), pairs), key=error, default=structure)
    ranked = sorted(errors, key=errors.__getitem__)[:many]
    return [each for each in ranked if errors[each] <= _ALIKE * errors[ranked[0]]]


def _missed_by(data: Measured, structure: Structure) -> Any:
    """Return the errors of a structure's model in problems that are left out of its sums too."""
    # In the problems that they were fitted to, sums of more products have smaller errors in any case.
    np, sizes = data.np, structure.counted(data.np, data.sizes)
    products, times = data.products(structure, sizes), np.log(data.times)
    folds, sums = [], np.empty_like(times)
    for fold in range(min(_FOLDS, len(sizes))):
        left_out, kept = np.arange(fold, len(sizes), _FOLDS), data.weights > 0
        kept[:, left_out] = False
        logs = np.log(total(np, products, fit_sums(np, products, data.times, kept, QUICK)))
        folds.append((left_out, times - logs))
        sums[:, left_out] = logs[:, left_out]
    inputs = data.inputs(structure, sizes)
    return times - sums - left_out_predictions(np, inputs, data.weights > 0, folds)


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
