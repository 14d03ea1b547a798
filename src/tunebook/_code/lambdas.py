"""Tells several lambdas on one line apart."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from types import CodeType

N = TypeVar("N", bound=ast.AST)


def innermost(lambdas: list[N], code: CodeType) -> N | None:
    """Return the smallest lambda whose body holds every instruction of the code."""
    spans = [(p[0], p[2], p[1], p[3]) for p in code.co_positions() if all(part is not None for part in p)]
    # The prologue has column 0 and no width; it is not part of an expression.
    spans = [span for span in spans if (span[0], span[1]) != (span[2], span[3])]
    if not spans:
        return None  # a constant, which Python 3.12 gives no place, or python -X no_debug_ranges
    start = min((line, column) for line, column, _, _ in spans)
    end = max((line, column) for _, _, line, column in spans)
    bodies = [(node, node.body) for node in lambdas if isinstance(node, ast.Lambda)]
    places = [(node, (b.lineno, b.col_offset), (b.end_lineno or 0, b.end_col_offset or 0)) for node, b in bodies]
    around = [place for place in places if place[1] <= start and end <= place[2]]
    # Lambdas that hold the same code are nested: the innermost starts last, and of equal starts ends first.
    return max(around, key=lambda place: (place[1], -place[2][0], -place[2][1]), default=(None,))[0]
