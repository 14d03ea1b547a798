"""Configurations that shadow memory and disk for the length of a block."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tunebook._base.errors import DefinitionError
from tunebook._memo.context_stack import Scope, scoped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tunebook._base.vocabulary import Problem


class _Overlay(NamedTuple):
    """Either configurations by problem, or one for every problem of an operation."""

    entries: Mapping[tuple[str, str, str], object]
    op: str | None = None
    config: object = None

    def content(self) -> object:
        """Return what is equal for overlays that do the same."""
        return sorted(self.entries.items(), key=lambda item: item[0]), self.op, self.config

    def find(self, problem: Problem) -> object | None:
        return self.config if problem.op == self.op else self.entries.get(problem)


def overlay_cache(mapping: Mapping[tuple[str, str, str], object]) -> Scope:
    """Shadow memory and disk with `{(device, op_id, call_key): config}` inside a with-block.

    Blocks nest, the innermost wins, and other threads and tasks see nothing of it. The mapping is copied here:
    changing it later changes nothing.
    """
    for key in mapping:
        if not (isinstance(key, tuple) and len(key) == 3 and all(isinstance(part, str) for part in key)):
            raise DefinitionError(f"an overlay's keys are (device, op_id, call_key), three strings; found {key!r}")
    return Scope(_Overlay(dict(mapping)))


def overlay_op(op: str, config: object) -> Scope:
    """Give one configuration to every call of an operation inside a with-block."""
    return Scope(_Overlay({}, op, config))


def find_overlay(problem: Problem) -> object | None:
    """Return what the overlays of this thread or task say about a problem, or None."""
    answers = (overlay.find(problem) for overlay in scoped(_Overlay))
    return next((config for config in answers if config is not None), None)
