"""Kernels in Python: on numpy arrays, and compiled by Numba.

`@tunable` needs no adapter for these. To choose among whole functions, plain or jitted, keep them in a dict; the
functions, and the functions that they call, count as the kernel's code::

    ways = {"einsum": by_einsum, "loops": numba.njit(by_loops)}

    @tunable(space=Space(way=list(ways)), reference=by_einsum)
    def contract(a, b, *, config):
        return ways[config.way](a, b)

`specialised` is for functions that are made from a configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from tunebook.adapters._source.per_config import PerConfig

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F")


def specialised(factory: Callable[[Any], F]) -> PerConfig[F]:
    """Call a factory once per configuration, also under threads; equal configurations share the result.

    For factories that compile: Numba turns the variables that a function closes over into constants. The result is
    found again in 0.1 us. Pass the returned object to `@tunable(compile=...)`, and compiling happens ahead and is timed
    apart.

    >>> @specialised
    ... def repeat(config):
    ...     return lambda text: text * config["times"]
    >>> repeat({"times": 2})("ab"), repeat({"times": 2}) is repeat({"times": 2})
    ('abab', True)
    """
    return PerConfig(factory)
