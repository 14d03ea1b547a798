"""A cheap stand-in for a call key: equal for two arguments only if their part of the key is."""

from __future__ import annotations

import dataclasses
import enum
from operator import attrgetter
from types import EllipsisType, FunctionType, NoneType
from typing import TYPE_CHECKING, Any, Final

from tunebook._arrays.describe import describe, device_of, is_array, root_module
from tunebook._arrays.framework import framework_for

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

_BY_VALUE: Final = frozenset({bool, NoneType, int, str, bytes, complex, range, slice, EllipsisType})
_DTYPES_OF: Final = frozenset({"numpy", "torch", "ml_dtypes"})
# All that a call key takes from values of these classes. Describing an array in the way of any library takes 10 us,
# this takes 0.5.
_FACTS: Final[dict[tuple[str, str], Callable[[Any], Hashable]]] = {
    ("builtins", "float"): float.hex,  # 0.0 == -0.0
    ("numpy", "ndarray"): attrgetter("shape", "dtype", "strides"),
    ("cupy", "ndarray"): attrgetter("shape", "dtype", "strides", "device.id"),  # its devices have no hash
    ("pyopencl.array", "Array"): attrgetter("shape", "dtype", "strides", "queue.device"),
}


def register_fast_key(kind: type, read: Callable[[Any], Hashable]) -> None:
    """Say what a call key takes from arrays of a class, and a call from its surroundings, to find both out faster."""
    _FACTS[kind.__module__, kind.__name__] = read


def fast_key_of(x: Any) -> Hashable:  # noqa: PLR0911 - a table of kinds, one return each
    """Return a hashable value that is equal for two arguments only if they have the same call key.

    `TypeError` where that cannot be said cheaply: such calls are looked up by their call key every time.
    """
    kind = type(x)
    if kind in _BY_VALUE:
        return kind, x
    read = _FACTS.get((kind.__module__, kind.__name__))
    if read is not None:
        return kind, read(x)
    if is_array(x):
        framework = framework_for(root_module(kind))
        return (kind, describe(x), device_of(x)) if framework is None else framework.leaf(x)
    if kind in (tuple, list):
        return (kind, *map(fast_key_of, x))
    if kind is dict:
        return (kind, *((fast_key_of(key), fast_key_of(value)) for key, value in x.items()))
    if dataclasses.is_dataclass(kind):
        return (kind, *(fast_key_of(getattr(x, field.name)) for field in dataclasses.fields(x)))
    if isinstance(x, (enum.Enum, type)) or (root_module(kind) in _DTYPES_OF and "dtype" in kind.__name__.lower()):
        return kind, x
    if root_module(kind) == "numpy":
        return kind, x.tobytes()  # a numpy scalar: bytes, because 0.0 == -0.0
    if kind is FunctionType and x.__closure__ is None:
        return kind, x
    raise TypeError(f"a {kind.__name__} is not memoised")
