"""The source of a kernel's hot path, how each kind of argument is read in it, and the optional accelerator.

The accelerator is `_packed.c`. Where it has been built, it makes the hot path's key in one step.
"""

from __future__ import annotations

import inspect
import keyword
import sys
from collections.abc import Callable
from functools import cache
from types import FunctionType, NoneType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from tunebook._arrays.describe import is_array
from tunebook._arrays.library import ArgumentReader, library_named, library_of, loaded_libraries
from tunebook._memo.context_stack import INNERMOST

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tunebook._memo.answer_memo import Answers

_VALUE: Final = ArgumentReader("{0}.__class__ is {1}", "{0}", "{0}.__class__, {0}")
_READERS: Final = {
    bool: ArgumentReader("({0} is True or {0} is False)", "{0}", "{0}.__class__, {0}"),
    NoneType: ArgumentReader("{0} is None", "", "{0}"),
    int: _VALUE,
    str: _VALUE,
    bytes: _VALUE,
    # 0.0 == -0.0, so the exact key is the generic one. A NaN is never found again: each would add an entry.
    float: ArgumentReader("{0}.__class__ is {1}", "{0}", refused="{0} == 0.0 or {0} != {0}"),
}
# For an argument seen with several classes, or with one that has no shorter way.
ANY: Final = ArgumentReader("", "_tb_leaf({0})", traced=True)


def keyed_by_value(kind: type) -> None:
    """Read arguments of a class as they are: they are hashable, and equal only if calls with them are the same."""
    _READERS[kind] = _VALUE


def reader_for(value: object, *, layout: bool) -> ArgumentReader:
    """Return how to read an argument that has been seen with this value."""
    kind = type(value)
    if kind in _READERS:
        return _READERS[kind]
    return (library_of(value).reader(kind, layout) if is_array(value) else None) or ANY


_STARS: Final[dict[object, str]] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


class Signature:
    """The author's parameters, and the source of the functions generated from them."""

    def __init__(self, implementation: Callable[..., Any], *, returns_config: bool = False) -> None:
        """`returns_config`: calls return the configuration. Missing and unknown names then come to `_tb_refuse`."""
        self._returns_config = returns_config
        name = implementation.__name__ if implementation.__name__.isidentifier() else "kernel"
        self.name = f"{name}_" if keyword.iskeyword(name) else name
        self.parameters = [p for p in inspect.signature(implementation).parameters.values() if p.name != "config"]
        self.names = tuple(p.name for p in self.parameters)
        self.defaults = {f"_tb_default_{p.name}": p.default for p in self.parameters if p.default is not p.empty}
        self.positional_twin = _positional_twin(implementation)

    def source(
        self, readers: Mapping[str, ArgumentReader], names: frozenset[str], *, packed: bool, compiled: bool
    ) -> str:
        """Return the module that defines `call`, `run`, `exact_key` and `fast_key`.

        With `packed`, the fast key is made by the accelerator; with `compiled`, torch's compiler may come along. The
        module's own names start with `_tb_`, because an author's parameter may well be called `key` or `found`.
        """
        used = {p.name: readers.get(p.name, ANY) for p in self.parameters if p.name in names}
        arguments = ", ".join(self.names)
        run = "return _tb_found" if self._returns_config else f"return _tb_impl({self._forwarded('_tb_found')})"
        exact = "".join(f"{reader.exact.format(n)}, " for n, reader in used.items())
        if packed:  # the accelerator's bytes are exact, and need no guards
            lookup = [f"_tb_found = _tb_find({', '.join(used)})", "if _tb_found is not None:", f" {run}"]
            fast_key = f"_tb_pack({', '.join(used)})"
        else:
            lookup, fast_key = _plain_lookup(used, run)
        if used and not readers:
            lookup = []  # before the first call there is nothing to find, and torch's compiler need not read it
        elif compiled and (self._returns_config or any(reader.traced for reader in used.values())):
            # 20 ns. Torch's compiler could not read the lookup, and makes the choice a constant instead.
            lookup = ["if _tb_compiling():", f" return _tb_miss({arguments})", *lookup]
        return "\n".join(
            [
                f"def call({self._declaration()}):",
                *([" if _tb_unknown:", "  _tb_refuse(_tb_unknown)"] if self._returns_config else []),
                " if config is None:",
                *(f"  {line}" for line in lookup),
                f"  return _tb_miss({arguments})",
                f" return _tb_override({', '.join(['config', *self.names])})",
                f"def run({', '.join([*self.names, '_tb_found'])}):",
                f" {run}",
                f"def exact_key({arguments}):",
                f" return ({exact})",
                f"def fast_key({arguments}):",
                f" return {fast_key}",
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
            default = "=_tb_missing" if self._returns_config else ""
            default = default if p.default is p.empty else f"=_tb_default_{p.name}"
            parts.append(f"{_STARS.get(p.kind, '')}{p.name}{default}")
        if self.parameters and self.parameters[-1].kind is inspect.Parameter.POSITIONAL_ONLY:
            parts.append("/")
        tail = [] if starred else ["*"]
        position = len(parts) - 1 if parts and parts[-1].startswith("**") else len(parts)
        tail = [*tail, "config=None", *(["**_tb_unknown"] if self._returns_config else [])]
        return ", ".join([*parts[:position], *tail, *parts[position:]])

    def _forwarded(self, config: str) -> str:
        if self.positional_twin is not None:
            return ", ".join([*self.names, config])
        parts = []
        for p in self.parameters:
            named = f"{p.name}=" if p.kind is p.KEYWORD_ONLY else ""
            parts.append(f"{_STARS.get(p.kind, '')}{named}{p.name}")
        return ", ".join([*parts, f"config={config}"])


def _plain_lookup(used: Mapping[str, ArgumentReader], run: str) -> tuple[list[str], str]:
    """Return the lines that look an answer up by a tuple, and the expression for that tuple."""
    guard = " and ".join(reader.guard.format(n, f"_tb_class_{n}") for n, reader in used.items() if reader.guard)
    guard = guard or "True"
    fast = "".join(f"{reader.fast.format(n)}, " for n, reader in used.items() if reader.fast)
    fast += "".join(dict.fromkeys(reader.settings for reader in used.values()))
    refused = " or ".join(reader.refused.format(n) for n, reader in used.items() if reader.refused)
    lookup = [
        f"if {guard}:",
        " try:",
        f"  _tb_key = ({fast})",
        "  _tb_found = _tb_fast[_tb_key]",
        " except KeyError:",
        "  _tb_found = _tb_known(_tb_key)",
        " except (TypeError, AttributeError, RuntimeError):",
        "  _tb_found = None",
        " else:",
        f"  {run}",
        # Outside of the handler, or the author's own errors would all claim to come from a KeyError.
        " if _tb_found is not None:",
        f"  {run}",
    ]
    return lookup, f"({fast}) if {guard} and not ({refused or False}) else None"


def _positional_twin(implementation: Callable[..., Any]) -> FunctionType | None:
    """Return the author's function with its keyword-only parameters made positional, 10 ns faster, if it is plain."""
    if type(implementation) is not FunctionType:
        return None
    code = implementation.__code__
    starred = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    kinds = inspect.signature(implementation).parameters.values()
    if starred or [p.name for p in kinds][-1:] != ["config"]:
        return None
    count = code.co_argcount + code.co_kwonlyargcount
    code = code.replace(co_argcount=count, co_kwonlyargcount=0, co_posonlyargcount=0)
    f = implementation
    return FunctionType(code, f.__globals__, f.__name__, None, f.__closure__)


# --------------------------------------------------------------------------------------------------- the accelerator

Pack: TypeAlias = Callable[..., bytes | None]
"""Makes the key of a call from its arguments; None if it does not know the class, or the size, of an argument."""


def find_pack(*, layout: bool) -> Pack | None:
    """Return the function that packs arguments, or None where it was not built.

    It packs arrays only of libraries that are loaded by now: a program without arrays must not pay for numpy.
    """
    if "numpy" in sys.modules:
        library_named("numpy")
    packed = {library.name: parts[0] for library in loaded_libraries() if (parts := library.packed()) is not None}
    return _pack_for(layout, tuple(sorted(packed.items())))


def finder_of(pack: Pack, answers: Answers, otherwise: Callable[[bytes], Any]) -> Callable[..., Any]:
    """Return the function that looks arguments up by the key that `pack` makes; else it asks `otherwise`.

    It tells listeners by itself, where nothing is scoped: through `otherwise`, a call would take a fifth longer.
    """
    from tunebook._hotpath._packed import finder  # noqa: PLC0415 - built, because there is a `pack`

    return finder(pack, answers.fast, otherwise, answers.told, INNERMOST.get)


@cache
def _pack_for(layout: bool, packed: tuple[tuple[str, Any], ...]) -> Pack | None:  # noqa: FBT001 - cached by position
    try:
        from tunebook._hotpath._packed import packer  # noqa: PLC0415 - not built everywhere
    except ImportError:  # nor loadable everywhere: a sub-interpreter may refuse it
        return None
    classes = dict(packed)
    # numpy's record names the class whose structs are read; any other one, how to read interned descriptions.
    ndarray = classes.pop("numpy", None)
    interned = next((library_named(name).packed() for name in classes), None)
    try:
        return packer(ndarray, layout, interned)
    except TypeError:
        return None  # another module stands in for numpy
