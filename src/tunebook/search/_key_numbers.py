"""The numbers in a call key, from which models and heuristics learn, and the key without them."""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeAlias

from tunebook._base.record_format import canonical_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tunebook._base.vocabulary import Json

Number: TypeAlias = "Callable[[str, float], Json]"
# A call of a new size asks for the keys of all entries of its kernel: to read 1500 of them took 80 ms.
_REMEMBERED: Final = 16_384
_THROUGH: Final = frozenset({"$tuple", "$bucket"})  # marks in a key that have no name in Python


def numbers_in(arguments: Json) -> dict[str, float]:
    """Return the numbers of a call key, by the expression for them in the kernel's body.

    >>> numbers_in({"x": {"$array": ["numpy", "int8", [512, "~64"], "C", "cpu"]}, "sizes": {"$tuple": [3, {"k": 5}]}})
    {'x.shape[0]': 512.0, 'x.shape[1]': 64.0, 'sizes[0]': 3.0, "sizes[1]['k']": 5.0}
    """
    found: dict[str, float] = {}

    def note(name: str, number: float) -> Json:
        found[name] = float(number)
        return number

    _with_numbers(arguments, note)
    return found


@lru_cache(maxsize=_REMEMBERED)
def kind_and_sizes(call_key: str) -> tuple[str, Mapping[str, float]]:
    """Return a call key without its sizes, and the sizes: its whole numbers above 0, by their expression.

    Calls of one kind differ in their sizes alone. The key of a key_builder, which may have any form, has no sizes.
    """
    sizes: dict[str, float] = {}

    def take(name: str, number: float) -> Json:
        if type(number) is not int or number <= 0:
            return number
        sizes[name] = float(number)
        return {"$size": name}

    try:
        kind = canonical_json(_with_numbers(json.loads(call_key), take))
    except (ValueError, RecursionError):
        return call_key, {}
    return sys.intern(kind), sizes


def bucket_in(value: Json) -> int | None:
    """Return the size of a bucket, which is written with a mark before it; None for any other value."""
    return int(value[1:]) if isinstance(value, str) and value[:1] == "~" and value[1:].isdigit() else None


def _with_numbers(arguments: Json, number: Number) -> Json:
    """Return the arguments of a call key; `number` returns the value to put in the place of a number."""
    named = arguments.items() if isinstance(arguments, dict) else None
    return arguments if named is None else {name: _inside(value, name, number) for name, value in named}


def _inside(value: Json, name: str, number: Number) -> Json:
    match value:
        case list():
            return [_inside(item, f"{name}[{at}]", number) for at, item in enumerate(value)]
        case {"$array": [family, dtype, [*shape], *rest]}:
            sizes = [_size(each, f"{name}.shape[{at}]", number) for at, each in enumerate(shape)]
            return {"$array": [family, dtype, sizes, *rest]}
        case {"$scalar": [dtype, content]}:
            return {"$scalar": [dtype, _inside(content, name, number)]}
        case dict() if all(key in _THROUGH or not key.startswith("$") for key in value):
            named = {key: name if key in _THROUGH else f"{name}[{key!r}]" for key in value}
            return {key: _inside(item, named[key], number) for key, item in value.items()}
    return number(name, value) if isinstance(value, int | float) and type(value) is not bool else value


def _size(value: Json, name: str, number: Number) -> Json:
    bucket = bucket_in(value)
    return _inside(value, name, number) if bucket is None else ["~", number(name, bucket)]
