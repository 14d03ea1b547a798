"""The names and the types of the options of `@tunable`, checked where they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, Final, NamedTuple

from tunebook._base.errors import DefinitionError, did_you_mean, with_article


class _Rule(NamedTuple):
    """Whether a value fits an option, and how to write one that does."""

    fits: Callable[[Any], bool]
    write: str


def _is_function(value: object) -> bool:
    return value is None or callable(value)


def _is_amount(value: object) -> bool:
    return _is_function(value) or (isinstance(value, Real) and not isinstance(value, bool))


def _are_names(value: object) -> bool:
    return value is None or isinstance(value, str) or (isinstance(value, Iterable) and not isinstance(value, Mapping))


_FUNCTION: Final = _Rule(_is_function, "a function")
_AMOUNT: Final = _Rule(_is_amount, "a number, or a function of the arguments")
_NAMES: Final = _Rule(_are_names, "a tuple of names")
_RULES: Final[Mapping[str, _Rule]] = {
    "name": _Rule(lambda value: value is None or (isinstance(value, str) and bool(value)), "a text that is not empty"),
    "version": _Rule(lambda value: isinstance(value, str), 'a text, as version="2"'),
    "key": _NAMES,
    "ignore": _NAMES,
    "mutates": _NAMES,
    "layout": _Rule(lambda value: isinstance(value, bool), "True or False"),
    "reference": _FUNCTION,
    "inputs": _FUNCTION,
    "compile": _FUNCTION,
    "prune": _FUNCTION,
    "cost": _FUNCTION,
    "flops": _AMOUNT,
    "bytes": _AMOUNT,
    "keep": _Rule(lambda value: value is None or isinstance(value, Real), "a number of candidates, or a part: 0.25"),
    "on_event": _Rule(_is_function, "a function on_event(event, **data)"),
}


def check_function(function: object) -> None:
    """Raise `DefinitionError` if `tunable` got anything but a function, most often its space."""
    if not callable(function):
        kind = with_article(type(function).__name__)
        raise DefinitionError(f"tunable() takes a function first, not {kind}; write tunable(space=Space(...))")


def check_options(options: Mapping[str, Any], valid: Iterable[str], function: str = "tunable") -> None:
    """Raise `DefinitionError` for an unknown option, or for one with a value of the wrong type."""
    names = tuple(valid)
    for option, value in options.items():
        if option not in names:
            raise DefinitionError(f"{function}(): {did_you_mean('option', option, names)}")
        rule = _RULES.get(option)
        if rule is not None and not rule.fits(value):
            raise DefinitionError(f"{function}(): {option}={value!r}: give {rule.write}")
