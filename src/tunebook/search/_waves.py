"""Times at other sizes as they would be here, by the waves of blocks that a launch needs.

A GPU runs blocks side by side, so many on each core, and the others follow in waves. With other sizes a configuration
of small blocks may need as many waves as before, and one of large blocks twice as many. The number of blocks is known
before a kernel is compiled.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Times grow with this power of the waves before times at two sizes say otherwise, and this belief counts as much as a
# pair of times whose waves differ by a factor of e. On an H200 the power is 0.5 for a matmul and for attention; kernels
# that wait for memory, with many blocks on each core, need no correction.
_USUAL_POWER: Final = 0.4
_BELIEF: Final = 1.0
# Slowness over which a time counts for less: how the fastest scale is what matters.
_NEAR: Final = 0.2


def waves(blocks: int, cores: int) -> int:
    """Return how many waves of blocks a launch needs, if each core runs one block at a time."""
    return -(-blocks // cores)


def power_of_waves(sources: Sequence[tuple[Mapping[str, float], Mapping[str, int]]]) -> float:
    """Return with which power of the waves times grow: each source has seconds and waves at some sizes, by name."""
    aim, total = _BELIEF * _USUAL_POWER, _BELIEF
    for (seconds, many), (others, other_many) in combinations(sources, 2):
        names = [name for name in seconds if name in many and name in others and name in other_many]
        if not names:
            continue
        best, other_best = (min(each[name] for name in names) for each in (seconds, others))
        weights = [math.exp(-math.log(min(seconds[n] / best, others[n] / other_best)) / _NEAR) for n in names]
        longer = _centred([math.log(seconds[n] / others[n]) for n in names], weights)
        more = _centred([math.log(many[n] / other_many[n]) for n in names], weights)
        aim += math.fsum(w * x * y for w, x, y in zip(weights, more, longer, strict=True))
        total += math.fsum(w * x * x for w, x in zip(weights, more, strict=True))
    return min(max(aim / total, 0.0), 1.0)


def _centred(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    mean = math.fsum(w * x for w, x in zip(weights, values, strict=True)) / math.fsum(weights)
    return [x - mean for x in values]


def seconds_here(
    seconds: Mapping[str, float], there: Mapping[str, int], here: Mapping[str, int], power: float
) -> dict[str, float]:
    """Return seconds by name, as they would be with the waves of here, fastest first."""
    factors = {name: (here[name] / there[name]) ** power for name in seconds if name in here and name in there}
    # Times of unknown waves keep their place among the others.
    usual = math.exp(math.fsum(map(math.log, factors.values())) / len(factors)) if factors else 1.0
    moved = {name: each * factors.get(name, usual) for name, each in seconds.items()}
    return dict(sorted(moved.items(), key=lambda item: item[1]))
