"""Functions whose calls run nothing yet."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tunebook._base.errors import DefinitionError

if TYPE_CHECKING:
    from collections.abc import Callable

_DEFERRED: Final[dict[str, Callable[[Any], bool]]] = {
    "an async function": inspect.iscoroutinefunction,
    "an async generator": inspect.isasyncgenfunction,
    "a generator": inspect.isgeneratorfunction,
}


def refuse_deferred(function: Any, name: str | None = None) -> None:
    """Raise `DefinitionError` for a function whose call runs nothing yet: async functions and generators."""
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    called_by = inspect.getattr_static(type(inner), "__call__", None)
    for kind, is_kind in _DEFERRED.items():
        if is_kind(inner) or is_kind(called_by):
            called = name or getattr(inner, "__qualname__", None) or type(inner).__qualname__
            raise DefinitionError(
                f"{called!r} is {kind}: a call of it returns before it has run, so its time cannot be measured. "
                "Decorate the plain function (def, with return) that does the work, and call it from the "
                f"{kind.partition(' ')[2]}"
            )
