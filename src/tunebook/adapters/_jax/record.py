"""Which tunable calls a jax program makes, found from shapes alone."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

import jax

from tunebook._memo.context_stack import Scope
from tunebook._selection.recording import Recording
from tunebook._selection.recording import record as recording_all

if TYPE_CHECKING:
    from collections.abc import Callable

_runs: Final = itertools.count()


class _RecordMark:
    """Marks a recording."""

    def __init__(self) -> None:
        self._number = next(_runs)

    def content(self) -> list[Any]:
        """Return what no trace has been made under: what jit remembers would not be traced, and its calls not seen."""
        return ["recording", self._number]


def record(function: Callable[..., Any], /, *specs: Any, **named: Any) -> Recording:
    """Return every tunable call that a program makes, through jit, scan, vmap, remat, shard_map and grad.

    Nothing runs and nothing is tuned: arguments are arrays or `jax.ShapeDtypeStruct`s, and are looked at for their
    shapes only. `tunebook.tune_all` tunes what was found; programs that were traced before use it after `refresh()`.
    Seconds in it are those of tracing.
    """
    with recording_all() as found, Scope(_RecordMark()):
        jax.eval_shape(function, *specs, **named)
    return found
