"""What makes one candidate better than another: a number made from its samples."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from tunebook._base.errors import DefinitionError
from tunebook._code.checksum import code_checksum
from tunebook._statistics.race import typical_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tunebook._statistics.race import Objective


def median_s(samples: Iterable[float]) -> float:
    """Return the middle sample, or the mean of the two in the middle.

    `statistics` has this too, for a tenth of the time of `import tunebook`.

    >>> median_s([3.0, 1.0, 2.0]), median_s([1.0, 2.0])
    (2.0, 1.5)
    """
    ordered = sorted(samples)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def p95_s(samples: Sequence[float]) -> float:
    """Return the sample that 95 of 100 do not exceed.

    >>> p95_s([float(n) for n in range(1, 101)])
    95.0
    """
    return sorted(samples)[math.ceil(0.95 * len(samples)) - 1]


def mean_s(samples: Sequence[float]) -> float:
    """Return the mean.

    >>> mean_s([1.0, 3.0])
    2.0
    """
    return math.fsum(samples) / len(samples)


OBJECTIVES: Final[dict[str, Objective]] = {
    "typical": typical_s, "median": median_s, "mean": mean_s, "p95": p95_s,
}  # fmt: skip


def objective_for(asked: str | Callable[[Sequence[float]], float]) -> Objective:
    """Return the function behind a name; a function stands for itself, and its NaN for the worst there is."""
    if callable(asked):
        return _Checked(asked)
    if asked not in OBJECTIVES:
        raise DefinitionError(
            f"objective={asked!r}: choose one of {', '.join(map(repr, OBJECTIVES))}, or give a function of samples"
        )
    return OBJECTIVES[asked]


def objective_name(asked: str | Callable[[Sequence[float]], float]) -> str:
    """Return the name of an objective; of the author's own function, the checksum of its code."""
    if isinstance(asked, str):
        return asked
    names = (name for name, function in OBJECTIVES.items() if function is asked)
    return next(names, None) or code_checksum(asked.function if isinstance(asked, _Checked) else asked)


class _Checked:
    """The author's own function of samples."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[[Sequence[float]], float]) -> None:
        self.function = function

    def __call__(self, samples: Sequence[float]) -> float:
        value = float(self.function(samples))
        return math.inf if math.isnan(value) else value
