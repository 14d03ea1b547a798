"""A call made up again from its key, where the key says all that there is to know."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tunebook._api.function_kernel import FunctionKernel
from tunebook._arrays.describe import ArraySpec, materialise
from tunebook._base.errors import UnkeyableError

if TYPE_CHECKING:
    from tunebook._base.vocabulary import Json, Problem
    from tunebook._kernel.kernel import Invocation, Kernel


def rebuilt(kernel: Kernel[Any, Any], problem: Problem) -> Invocation[Any, Any]:
    """Return a call that has this very problem; `UnkeyableError` says why there is none."""
    if not isinstance(kernel, FunctionKernel):
        raise UnkeyableError("only calls of tunable functions can be made up from their key; use --recording")
    try:
        arguments = json.loads(problem.call_key)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise UnkeyableError("its key was made by the kernel's own key builder; use --recording")
    given = {name: _value(name, value) for name, value in arguments.items() if name in kernel.parameters}
    try:
        inv = kernel.invocation(kernel.arguments((), given))
    except TypeError as error:
        raise UnkeyableError(f"its key does not have all arguments ({error}); use --recording") from error
    if kernel.problem(inv) != problem:
        raise UnkeyableError("a call made up from its key has another key here; use --recording")
    return inv


def _value(name: str, value: Json) -> Any:
    match value:
        case {"$array": [str(library), str(dtype), list(shape), str(layout), str(platform)]}:
            sizes = tuple(_size(name, size) for size in shape)
            return materialise(ArraySpec(library, dtype, sizes, layout or "C", platform))
        case {"$tuple": list(items)}:
            return tuple(_value(name, item) for item in items)
        case {"$bucket": inner}:
            return _value(name, inner)
        case list():
            return [_value(name, item) for item in value]
        case dict():
            raise UnkeyableError(f"its argument {name!r} cannot be made up from the key; use --recording")
        case _:
            return value


def _size(name: str, size: Json) -> int:
    """Return a dimension; of a bucket, written "~1024", its name is one of the sizes in it."""
    if isinstance(size, str) and size[1:].isdigit():
        return int(size[1:])
    if isinstance(size, int):
        return size
    raise UnkeyableError(f"its argument {name!r} has a dimension {size!r} that is not a number; use --recording")
