"""The values that a walk read from the running program, and whether they are still the same."""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Read: TypeAlias = "Callable[[Any, Any], Any]"


class SeenValue(NamedTuple):
    """One value that a walk read: `read(values[source], key)`, and how to tell whether it is still the same."""

    read: Read
    source: int
    key: Any
    is_same: Callable[[Any, Any, list[Any]], bool]
    expected: Any


class CodeFacts(NamedTuple):
    """The digest over code, and the versions of the installed packages and compilers that the code uses, by name."""

    checksum: str
    versions: Mapping[str, str] = {}


class Recipe(NamedTuple):
    """The steps of a walk, and its result. It holds plain values, and weak references to all others."""

    options: object
    steps: tuple[SeenValue, ...]
    facts: CodeFacts


def replay(steps: tuple[SeenValue, ...], roots: tuple[object, ...]) -> bool:
    """Return whether the running program has the same values as when the steps were written."""
    found: list[Any] = [roots]
    try:
        for read, origin, key, is_same, expected in steps:
            value = read(found[origin], key)
            if not is_same(value, expected, found):
                return False
            found.append(value)
    except (AttributeError, LookupError, TypeError, ValueError):
        return False  # a value of another kind
    return True


def is_plain(value: Any, expected: Any, _: object = None) -> bool:
    if value is expected:
        return True
    if type(value) is not type(expected):
        return False
    return repr(value) == repr(expected) if type(value) in (float, complex) else bool(value == expected)  # -0.0 and nan


def are_plain(value: Any, expected: Any, _: object) -> bool:
    return len(value) == len(expected) and all(map(is_plain, value, expected))


def are_names(value: Any, expected: Any, _: object) -> bool:
    return bool(value == expected)


def has_code(value: Any, expected: Any, _: object) -> bool:
    return type(value) is FunctionType and value.__code__ is expected()


def is_it(value: Any, expected: Any, _: object) -> bool:
    return value is expected()


def is_instance(value: Any, expected: Any, _: object) -> bool:
    return type(value) is expected()


def is_shared(value: Any, expected: Any, found: list[Any]) -> bool:
    return value is found[expected]
