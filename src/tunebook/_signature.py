"""The source of a kernel's hot path, and how each kind of argument is read in it."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import keyword
from types import FunctionType, NoneType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._arrays import describe, device_of, is_array, root_module

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping


class Leaf(NamedTuple):
    """How one argument is read, as expressions over `{0}`.

    `guard` must hold for `fast` to tell calls apart; `exact` tells them apart by itself.
    """

    guard: str
    fast: str
    exact: str


# `_class_k` stands for the class that the argument had when the code was generated.
_VALUE: Final = Leaf("{0}.__class__ is {1}", "{0}", "{0}.__class__, {0}")
_LEAVES: Final = {
    bool: Leaf("({0} is True or {0} is False)", "{0}", "{0}.__class__, {0}"),
    NoneType: Leaf("{0} is None", "", "{0}"),
    int: _VALUE,
    str: _VALUE,
    bytes: _VALUE,
    # 0.0 == -0.0, so the exact key is the generic one, and `fast_key` refuses a zero.
    float: Leaf("{0}.__class__ is {1}", "{0}", "_leaf({0})"),
}
_NUMPY: Final = Leaf("{0}.__class__ is {1}", "{0}.shape, {0}.dtype", "{0}.__class__, {0}.shape, {0}.dtype")
# Reading `strides` for every array would cost half of the whole lookup; asking whether they are C-contiguous costs a
# third, and the other layouts take the longer way.
_NUMPY_LAYOUT: Final = Leaf(
    "{0}.__class__ is {1} and {0}.flags.c_contiguous",
    "{0}.shape, {0}.dtype",
    "{0}.__class__, {0}.shape, {0}.dtype, {0}.strides",
)
# Seen with arguments of several kinds, or of a kind without a shorter way.
ANY: Final = Leaf("", "_leaf({0})", "_leaf({0})")


def leaf_for(value: object, *, layout: bool) -> Leaf:
    """Return how to read an argument that has been seen with this value."""
    kind = type(value)
    if kind in _LEAVES:
        return _LEAVES[kind]
    if kind.__name__ == "ndarray" and kind.__module__ == "numpy":
        return _NUMPY_LAYOUT if layout else _NUMPY
    return ANY


_DTYPES_OF: Final = frozenset({"numpy", "torch", "ml_dtypes"})
_BY_VALUE: Final = frozenset({bool, NoneType, int, str, bytes, complex, range, slice, type(Ellipsis)})


def exact_leaf(x: Any) -> Hashable:  # noqa: PLR0911 - a table of kinds, one return each
    """Return a hashable value that is equal for two arguments only if they have the same call key.

    `TypeError` where that cannot be said cheaply: such calls are looked up by their call key every time.
    """
    kind = type(x)
    if kind in _BY_VALUE:
        return kind, x
    if kind is float:
        return kind, x.hex()
    if is_array(x):
        return kind, describe(x), device_of(x)
    if kind in (tuple, list):
        return (kind, *map(exact_leaf, x))
    if kind is dict:
        return (kind, *((exact_leaf(key), exact_leaf(value)) for key, value in x.items()))
    if dataclasses.is_dataclass(kind):
        return (kind, *(exact_leaf(getattr(x, field.name)) for field in dataclasses.fields(x)))
    if isinstance(x, (enum.Enum, type)) or (root_module(kind) in _DTYPES_OF and "dtype" in kind.__name__.lower()):
        return kind, x
    if root_module(kind) == "numpy":
        return kind, x.tobytes()  # a numpy scalar: bytes, because 0.0 == -0.0
    if kind is FunctionType and x.__closure__ is None:
        return kind, x
    raise TypeError(f"a {kind.__name__} is not memoised")


_STARS: Final[dict[object, str]] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


class Signature:
    """The author's parameters, and the source of the functions generated from them."""

    def __init__(self, implementation: Callable[..., Any]) -> None:
        self.name = implementation.__name__ if implementation.__name__.isidentifier() else "kernel"
        self.name = f"{self.name}_" if keyword.iskeyword(self.name) else self.name
        self.parameters = [p for p in inspect.signature(implementation).parameters.values() if p.name != "config"]
        self.names = tuple(p.name for p in self.parameters)
        self.defaults = {f"_default_{p.name}": p.default for p in self.parameters if p.default is not p.empty}
        self.positional_twin = _positional_twin(implementation)

    def source(self, leaves: Mapping[str, Leaf], names: frozenset[str]) -> str:
        """Return the module that defines `call`, `run`, `exact_key` and `fast_key`."""
        used = {p.name: leaves.get(p.name, ANY) for p in self.parameters if p.name in names}
        guards = [leaf.guard.format(n, f"_class_{n}") for n, leaf in used.items() if leaf.guard]
        guard = " and ".join(guards) or "True"
        fast = "".join(f"{leaf.fast.format(n)}, " for n, leaf in used.items() if leaf.fast)
        exact = "".join(f"{leaf.exact.format(n)}, " for n, leaf in used.items())
        zeros = [f"{n} == 0.0" for n, leaf in used.items() if leaf is _LEAVES[float]]
        refused = f"({' or '.join(zeros)})" if zeros else "False"
        arguments = ", ".join(self.names)
        return "\n".join(
            [
                f"def call({self._declaration()}):",
                " if config is None:",
                f"  if {guard}:",
                "   try:",
                f"    found = _fast[({fast})]",
                "   except (KeyError, TypeError, AttributeError):",
                "    pass",
                "   else:",
                f"    return _impl({self._forwarded('found')})",
                f"  return _miss({arguments})",
                f" return _override({', '.join(['config', *self.names])})",
                f"def run({', '.join([*self.names, 'found'])}):",
                f" return _impl({self._forwarded('found')})",
                f"def exact_key({arguments}):",
                f" return ({exact})",
                f"def fast_key({arguments}):",
                f" return ({fast}) if {guard} and not {refused} else None",
            ]
        )

    def _declaration(self) -> str:
        parts, starred = [], False
        for before, p in zip([None, *self.parameters], self.parameters, strict=False):
            if before is not None and before.kind is p.POSITIONAL_ONLY is not p.kind:
                parts.append("/")
            if p.kind is p.KEYWORD_ONLY and not starred:
                parts.append("*")
            starred = starred or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
            star = _STARS.get(p.kind, "")
            default = "" if p.default is p.empty else f"=_default_{p.name}"
            parts.append(f"{star}{p.name}{default}")
        if self.parameters and self.parameters[-1].kind is inspect.Parameter.POSITIONAL_ONLY:
            parts.append("/")
        tail = [] if starred else ["*"]
        position = len(parts) - 1 if parts and parts[-1].startswith("**") else len(parts)
        return ", ".join([*parts[:position], *tail, "config=None", *parts[position:]])

    def _forwarded(self, config: str) -> str:
        if self.positional_twin is not None:
            return ", ".join([*self.names, config])
        parts = []
        for p in self.parameters:
            named = f"{p.name}=" if p.kind is p.KEYWORD_ONLY else ""
            parts.append(f"{_STARS.get(p.kind, '')}{named}{p.name}")
        return ", ".join([*parts, f"config={config}"])


def _positional_twin(implementation: Callable[..., Any]) -> FunctionType | None:
    """Return the author's function with its keyword-only parameters made positional, if it is a plain one.

    A call by position is 10 ns faster than one with a keyword, which is 2 % of a whole tuned call.
    """
    if type(implementation) is not FunctionType:
        return None
    code = implementation.__code__
    starred = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    kinds = inspect.signature(implementation).parameters.values()
    if starred or [p.name for p in kinds][-1:] != ["config"]:
        return None
    return FunctionType(
        code.replace(co_argcount=code.co_argcount + code.co_kwonlyargcount, co_kwonlyargcount=0, co_posonlyargcount=0),
        implementation.__globals__,
        implementation.__name__,
        None,
        implementation.__closure__,
    )
