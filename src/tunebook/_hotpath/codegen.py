"""The source of a kernel's hot path, and how each kind of argument is read in it."""

from __future__ import annotations

import inspect
import keyword
from types import FunctionType, NoneType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._arrays.framework import jax_has_one_device

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class ArgumentReader(NamedTuple):
    """How one argument is read, as expressions over `{0}`.

    `guard` must hold for `fast` to tell calls apart; `exact` tells them apart by itself.
    """

    guard: str
    fast: str
    exact: str


# {1} stands for the class that the argument had when the code was generated.
_VALUE: Final = ArgumentReader("{0}.__class__ is {1}", "{0}", "{0}.__class__, {0}")
_LEAVES: Final = {
    bool: ArgumentReader("({0} is True or {0} is False)", "{0}", "{0}.__class__, {0}"),
    NoneType: ArgumentReader("{0} is None", "", "{0}"),
    int: _VALUE,
    str: _VALUE,
    bytes: _VALUE,
    # 0.0 == -0.0, so the exact key is the generic one, and `fast_key` refuses a zero.
    float: ArgumentReader("{0}.__class__ is {1}", "{0}", "_tb_leaf({0})"),
}
_NUMPY: Final = ArgumentReader("{0}.__class__ is {1}", "{0}.shape, {0}.dtype", "{0}.__class__, {0}.shape, {0}.dtype")
# Reading `strides` for every array would cost half of the whole lookup; asking whether they are C-contiguous costs a
# third, and the other layouts take the longer way.
_NUMPY_LAYOUT: Final = ArgumentReader(
    "{0}.__class__ is {1} and {0}.flags.c_contiguous",
    "{0}.shape, {0}.dtype",
    "{0}.__class__, {0}.shape, {0}.dtype, {0}.strides",
)
# Avals are interned, so that three of them cost what one numpy array does. Which device an array is on they do not say.
_JAX_ONE_DEVICE: Final = ArgumentReader(
    "(_tb_type({0}) is _tb_jax_array or _tb_type({0}) is _tb_jax_tracer)", "{0}.aval", "_tb_leaf({0})"
)
_JAX: Final = ArgumentReader("_tb_type({0}) is _tb_jax_array", "{0}.aval, {0}.sharding", "_tb_leaf({0})")
_JAX_TRACED: Final = ArgumentReader("_tb_type({0}) is _tb_jax_tracer", "{0}.aval", "_tb_leaf({0})")
# A number stands for the settings until a thread has some of its own: see `adapters/adapters/_jax/settings.py`.
_JAX_SETTINGS: Final = "_tb_jax_settings[0] or _tb_jax_read(), "
# The number of a device is read faster than the device; a tensor without data has that of the host, and nothing about
# it is ever memoised. A sparse tensor has no strides, and raises a RuntimeError.
_TORCH: Final = ArgumentReader(
    "({0}.__class__ is _tb_torch_tensor or {0}.__class__ is _tb_torch_parameter)",
    "{0}.shape, {0}.dtype, {0}.get_device(), {0}.requires_grad",
    "_tb_leaf({0})",
)
_TORCH_LAYOUT: Final = _TORCH._replace(fast=f"{_TORCH.fast}, {{0}}.is_contiguous() or {{0}}.stride()")
_ANY_TORCH: Final = frozenset({_TORCH, _TORCH_LAYOUT})
# What a call of jax's depends on beside its arguments, once per call; the names are from `adapters.jax`. There is no
# mesh of one device.
_SETTINGS: Final = {
    _JAX_ONE_DEVICE: _JAX_SETTINGS,
    _JAX: f"{_JAX_SETTINGS}_tb_jax_mesh(), ",
    _JAX_TRACED: f"{_JAX_SETTINGS}_tb_jax_mesh(), ",
    # The same of torch's; the names are from `adapters.torch`.
    **dict.fromkeys(
        _ANY_TORCH,
        "_tb_torch_grad(), _tb_torch_autocast() and _tb_torch_autocast_dtypes(), _tb_torch_precision(), ",
    ),
}
# Seen with arguments of several kinds, or of a kind without a shorter way.
ANY: Final = ArgumentReader("", "_tb_leaf({0})", "_tb_leaf({0})")
_MAY_BE_TORCH: Final = _ANY_TORCH | {ANY}


def keyed_by_value(kind: type) -> None:
    """Read arguments of a class as they are: they are hashable, and equal only if calls with them are the same."""
    _LEAVES[kind] = _VALUE


def leaf_for(value: object, *, layout: bool) -> ArgumentReader:
    """Return how to read an argument that has been seen with this value."""
    kind = type(value)
    if kind in _LEAVES:
        return _LEAVES[kind]
    if kind.__name__ == "ndarray" and kind.__module__ == "numpy":
        return _NUMPY_LAYOUT if layout else _NUMPY
    if (kind.__module__, kind.__name__) in _JAX_CLASSES:
        return _JAX_ONE_DEVICE if jax_has_one_device() else _JAX_CLASSES[kind.__module__, kind.__name__]
    if (kind.__module__, kind.__name__) in _TORCH_CLASSES:
        return _TORCH_LAYOUT if layout else _TORCH
    return ANY


_TORCH_CLASSES: Final = frozenset({("torch", "Tensor"), ("torch.nn.parameter", "Parameter")})
# Tracers of other classes hide more than their aval says: what a vmap batches, for one.
_JAX_CLASSES: Final = {
    ("jaxlib._jax", "ArrayImpl"): _JAX,
    ("jax._src.interpreters.partial_eval", "DynamicJaxprTracer"): _JAX_TRACED,
}


_STARS: Final[dict[object, str]] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


class Signature:
    """The author's parameters, and the source of the functions generated from them."""

    def __init__(self, implementation: Callable[..., Any]) -> None:
        self.name = implementation.__name__ if implementation.__name__.isidentifier() else "kernel"
        self.name = f"{self.name}_" if keyword.iskeyword(self.name) else self.name
        self.parameters = [p for p in inspect.signature(implementation).parameters.values() if p.name != "config"]
        self.names = tuple(p.name for p in self.parameters)
        self.defaults = {f"_tb_default_{p.name}": p.default for p in self.parameters if p.default is not p.empty}
        self.positional_twin = _positional_twin(implementation)

    def source(
        self, leaves: Mapping[str, ArgumentReader], names: frozenset[str], *, packed: bool, compiled: bool
    ) -> str:
        """Return the module that defines `call`, `run`, `exact_key` and `fast_key`.

        With `packed`, the fast key is made by the accelerator; with `compiled`, torch's compiler may come along. The
        module's own names start with `_tb_`, because an
        author's parameter may well be called `key` or `found`.
        """
        used = {p.name: leaves.get(p.name, ANY) for p in self.parameters if p.name in names}
        arguments = ", ".join(self.names)
        run = f"return _tb_impl({self._forwarded('_tb_found')})"
        exact = "".join(f"{leaf.exact.format(n)}, " for n, leaf in used.items())
        lookup, fast_key = _packed_lookup(used, run) if packed else _plain_lookup(used, run)
        if used and not leaves:
            lookup = []  # before the first call there is nothing to find, and torch's compiler need not read it
        elif compiled and not _MAY_BE_TORCH.isdisjoint(used.values()):
            # 20 ns. Torch's compiler could not read the lookup, and makes the choice a constant instead.
            lookup = ["if _tb_torch_compiling():", f" return _tb_miss({arguments})", *lookup]
        return "\n".join(
            [
                f"def call({self._declaration()}):",
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
            star = _STARS.get(p.kind, "")
            default = "" if p.default is p.empty else f"=_tb_default_{p.name}"
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


def _plain_lookup(used: Mapping[str, ArgumentReader], run: str) -> tuple[list[str], str]:
    """Return the lines that look an answer up by a tuple, and the expression for that tuple."""
    guard = " and ".join(leaf.guard.format(n, f"_tb_class_{n}") for n, leaf in used.items() if leaf.guard) or "True"
    fast = "".join(f"{leaf.fast.format(n)}, " for n, leaf in used.items() if leaf.fast)
    fast += "".join(dict.fromkeys(_SETTINGS[leaf] for leaf in used.values() if leaf in _SETTINGS))
    # NaN too: no two are equal, and every call with a new one would add an entry that is never found.
    floats = [f"{n} == 0.0 or {n} != {n}" for n, leaf in used.items() if leaf is _LEAVES[float]]
    refused = f"({' or '.join(floats)})" if floats else "False"
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
    return lookup, f"({fast}) if {guard} and not {refused} else None"


def _packed_lookup(used: Mapping[str, ArgumentReader], run: str) -> tuple[list[str], str]:
    """Return the lines that look an answer up by the accelerator's bytes, and the expression for those bytes.

    They need no guards: they are exact by themselves.
    """
    lookup = [
        f"_tb_found = _tb_find({', '.join(used)})",
        "if _tb_found is not None:",
        f" {run}",
    ]
    return lookup, f"_tb_pack({', '.join(used)})"


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
