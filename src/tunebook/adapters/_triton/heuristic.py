"""The heuristic of a Triton kernel: a configuration, or a function that returns one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from tunebook._base.errors import DefinitionError
from tunebook.adapters._triton.candidate import from_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    import triton

Heuristic: TypeAlias = "triton.Config | Mapping[str, Any] | Callable[..., triton.Config | Mapping[str, Any]]"


def heuristic_config(given: Any, arguments: Mapping[str, Any], names: Sequence[str]) -> triton.Config:
    """Return the configuration of a heuristic for a launch with these arguments.

    A function whose parameters all are parameters of the kernel gets them by name, as a function that `tunebook fit`
    has written; any other function gets all arguments as one dict. Values by name, as a dict, are a configuration too.
    """
    if callable(given):
        taken = inspect.signature(given).parameters.values()
        parameters = [each.name for each in taken if each.kind is not each.VAR_KEYWORD]
        by_name = bool(taken) and all(name in names for name in parameters)
        missing = [name for name in parameters if name not in arguments] if by_name else []
        if missing:
            raise DefinitionError(f"the heuristic asks for {', '.join(missing)}, which this launch does not pass")
        given = given(**{name: arguments[name] for name in parameters}) if by_name else given(arguments)
    return from_values(given) if isinstance(given, Mapping) else given
