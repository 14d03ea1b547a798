"""Finds the tunable calls that a jax program makes, from shapes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from tunebook._memo.context_stack import Scope
from tunebook._selection.recording import Recording
from tunebook._selection.recording import record as record_calls
from tunebook.adapters._jax.context import FreshTraces

if TYPE_CHECKING:
    from collections.abc import Callable


def record(function: Callable[..., Any], /, *specs: Any, **named: Any) -> Recording:
    """Return every tunable call that a program makes, through jit, scan, vmap, remat, shard_map and grad.

    Nothing runs and nothing is tuned. Arguments are arrays or `jax.ShapeDtypeStruct`s, of which only the shapes are
    read. `tunebook.tune_all` tunes the calls; programs that were traced before use the results after `refresh()`. The
    seconds in the recording are times of tracing.
    """
    with record_calls() as found, Scope(FreshTraces()):
        jax.eval_shape(function, *specs, **named)
    return found
