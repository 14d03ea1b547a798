"""Call keys: what a call's arguments have to do with the speed of a kernel, as one line of JSON.

Equal keys mean one tuning, so a key must tell apart whatever a kernel can tell apart, and must be the same in every
process. Plain values stand for themselves; the rest is an object with one `$` tag::

    a         {"$array": ["numpy", "float32", [512, "~1024"], "C", "cpu"]}     ~1024 is a bucket
    causal    true
    window    {"$tuple": [128, 0]}
    dtype     {"$dtype": "bfloat16"}
    score     {"$function": ["alibi", "5be1f7c3..."]}                          its name, and a digest of its source
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import (
    BuiltinFunctionType,
    EllipsisType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

from tunebook._arrays.describe import DeviceOrdinals, describe, dtype_name, is_array, root_module
from tunebook._base.config_codec import type_name
from tunebook._base.errors import DefinitionError, UnkeyableError
from tunebook._base.record_format import blake2b, canonical_json
from tunebook._code.checksum import inner_callable, source_digest
from tunebook._code.source import closure, defaults
from tunebook._keys.buckets import Buckets
from tunebook._keys.key_text import explain_difference as explain_difference  # noqa: PLC0414 - keys have one door
from tunebook._keys.key_text import spell_out as spell_out  # noqa: PLC0414 - as above

if TYPE_CHECKING:
    from tunebook._base.vocabulary import Json

T = TypeVar("T")

_MAX_DEPTH: Final = 64
_MAX_TEXT: Final = 256  # a longer string is a document and not a setting; its digest tells it apart as well
_PRINTABLE_INT: Final = 2**63  # Python refuses to print integers of more than 4300 digits; hex has no limit

# Classes of numpy that stand for a family of dtypes, and for none.
# fmt: off
_ABSTRACT_DTYPES: Final = frozenset({
    "generic", "number", "integer", "signedinteger", "unsignedinteger", "inexact", "floating", "complexfloating",
    "flexible", "character",
})
# fmt: on


def call_key(arguments: Mapping[str, object], *, buckets: Buckets | None = None, layout: bool = True) -> str:
    """Return the key of a call, given its arguments by name; `UnkeyableError` names the one that has no key.

    `layout=False` leaves the memory layout of arrays out.

    >>> call_key({"n": 3, "causal": True, "window": (128, 0)})
    '{"causal":true,"n":3,"window":{"$tuple":[128,0]}}'
    """
    describer = _Describer(buckets or Buckets(), layout=layout)
    return canonical_json(
        {name: describer.describe(value, _ArgumentPath(name, name)) for name, value in arguments.items()},
    )


_registered: Final[dict[type, Callable[[Any], object]]] = {}


def register_key(kind: type[T], describe_value: Callable[[T], object]) -> None:
    """Let objects of a class, and of its subclasses, be part of call keys.

    `describe_value` returns what tells two of them apart, made of things that have keys: a tuple of numbers, say. To be
    called before the first call with such an object, since which problem a call is gets remembered.
    """
    if not isinstance(kind, type) or not callable(describe_value):
        raise DefinitionError("register_key takes a class and a function of one such object: register_key(Mask, tuple)")
    _registered[kind] = describe_value


def _in_order(value: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Return the items of a dict, sorted if they can be: equal dicts must number their devices alike."""
    return sorted(value.items()) if all(type(key) is str for key in value) else list(value.items())


# ------------------------------------------------------------------------------------------------------- describing


class _ArgumentPath(NamedTuple):
    """Where in the arguments a value is; for messages, and to find its bucket."""

    argument: str
    path: str

    def at(self, step: str) -> _ArgumentPath:
        return _ArgumentPath(self.argument, self.path + step)


class _Describer:
    """Describes the values of one call."""

    __slots__ = ("_buckets", "_devices", "_layout", "_open")

    def __init__(self, buckets: Buckets, *, layout: bool) -> None:
        self._buckets = buckets
        self._layout = layout
        self._devices = DeviceOrdinals()
        self._open: list[int] = []  # the ids of what is being described, outermost first

    def describe(self, value: Any, place: _ArgumentPath) -> Json:
        simple = _SIMPLE.get(type(value))
        if simple is not None:
            return simple(value)
        if type(value) is int:
            return self._int(value, place)
        if id(value) in self._open and isinstance(value, FunctionType):
            return {"$up": len(self._open) - self._open.index(id(value))}  # a function that calls itself
        if id(value) in self._open or len(self._open) > _MAX_DEPTH:
            raise UnkeyableError(
                f"argument {place.argument!r} cannot be part of a call key: {place.path[:80]} contains itself, or is "
                f"nested more than {_MAX_DEPTH} deep"
            )
        self._open.append(id(value))
        try:
            return self._compound(value, place)
        finally:
            self._open.pop()

    def _compound(self, value: Any, place: _ArgumentPath) -> Json:
        container = self._CONTAINERS.get(type(value))
        if container is not None:
            return container(self, value, place)
        for kind in type(value).__mro__:
            if kind in _registered:
                return {"$custom": [type_name(type(value)), self.describe(_registered[kind](value), place)]}
        for attempt in (self._array, self._symbol, self._fields, self._callable, self._subclass):
            described = attempt(value, place)
            if described is not None:
                return described
        kind = type(value)
        raise UnkeyableError(
            f"argument {place.argument!r} cannot be part of a call key: {place.path} is a {type_name(kind)}. Leave it "
            f"out with ignore=({place.argument!r},), name the arguments that matter with key=(...), or say what tells "
            f"two of them apart: tunebook.register_key({kind.__qualname__}, lambda x: ...)"
        )

    # ------------------------------------------------------------------------------------------------------ numbers

    def _int(self, value: int, place: _ArgumentPath) -> Json:
        bucket = self._buckets.scalar(place.argument, value, top=place.path == place.argument)
        return _plain_int(value) if bucket is None else {"$bucket": _plain_int(bucket)}

    def _numpy_scalar(self, value: Any, place: _ArgumentPath) -> Json:
        item = value.item()
        if type(item) is int:
            return {"$scalar": [dtype_name(value.dtype), self._int(item, place)]}
        simple = _SIMPLE.get(type(item))
        # A long double, a date or a record has no Python number that holds it exactly; its text does.
        return {"$scalar": [dtype_name(value.dtype), str(value) if simple is None else simple(item)]}

    def _array(self, value: Any, place: _ArgumentPath) -> Json:
        if not is_array(value):
            return None
        try:
            spec = describe(value, self._devices)
            shape = self._buckets.shape(place.argument, spec.shape)
        except UnkeyableError as error:
            raise UnkeyableError(
                f"argument {place.argument!r} cannot be part of a call key: {place.path}: {error}"
            ) from error
        return {"$array": [spec.library, spec.dtype, [*shape], spec.layout if self._layout else "", spec.platform]}

    # --------------------------------------------------------------------------------------------------- containers

    def _list(self, value: list[object], place: _ArgumentPath) -> Json:
        return [self.describe(item, place.at(f"[{i}]")) for i, item in enumerate(value)]

    def _tuple(self, value: tuple[object, ...], place: _ArgumentPath) -> Json:
        return {"$tuple": self._list(list(value), place)}

    def _set(self, value: set[object] | frozenset[object], place: _ArgumentPath) -> Json:
        items = [self.describe(item, place.at("{...}")) for item in value]
        return {f"${type(value).__name__}": sorted(items, key=canonical_json)}

    def _dict(self, value: dict[Any, Any], place: _ArgumentPath) -> Json:
        items = [(key, self.describe(item, place.at(f"[{key!r}]"))) for key, item in _in_order(value)]
        if all(type(key) is str and key.isascii() and not key.startswith("$") for key in value):
            return dict(items)
        pairs: list[Json] = [[self.describe(key, place.at(f" key {key!r}")), item] for key, item in items]
        return {"$dict": sorted(pairs, key=canonical_json)}

    def _ordered(self, value: OrderedDict[object, object], place: _ArgumentPath) -> Json:
        return {"$object": [type_name(type(value)), self._list([list(item) for item in value.items()], place)]}

    def _range(self, value: range | slice, place: _ArgumentPath) -> Json:
        return {f"${type(value).__name__}": self._list([value.start, value.stop, value.step], place)}

    def _partial(self, value: functools.partial[object], place: _ArgumentPath) -> Json:
        arguments = self._list(list(value.args), place.at(".args"))
        keywords = self._dict(value.keywords, place.at(".keywords"))
        return {"$partial": [self.describe(value.func, place.at(".func")), arguments, keywords]}

    _CONTAINERS: Final[dict[type, Callable[[_Describer, Any, _ArgumentPath], Json]]] = {
        list: _list,
        tuple: _tuple,
        set: _set,
        frozenset: _set,
        dict: _dict,
        OrderedDict: _ordered,
        range: _range,
        slice: _range,
        functools.partial: _partial,
    }

    # ------------------------------------------------------------------------------------------------------ objects

    def _symbol(self, value: Any, place: _ArgumentPath) -> Json:
        """Enums, dtypes, scalars of numpy, classes and modules: what has a name or stands for a number."""
        if isinstance(value, enum.Enum):
            named = value.name is not None  # a Flag may have bits that no member names
            return {"$enum": [type_name(type(value)), value.name if named else self.describe(value.value, place)]}
        dtype = _dtype(value)
        if dtype is not None:
            return {"$dtype": dtype}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic):
            return self._numpy_scalar(value, place)
        if isinstance(value, type):
            return {"$class": type_name(value)}
        return {"$module": value.__name__} if isinstance(value, ModuleType) else None

    def _fields(self, value: Any, place: _ArgumentPath) -> Json:
        names = _field_names(value)
        if names is None:
            return None
        fields = {name: self.describe(getattr(value, name), place.at(f".{name}")) for name in names}
        return {"$object": [type_name(type(value)), fields]}

    def _subclass(self, value: Any, place: _ArgumentPath) -> Json:
        """Whatever else is a number, a text or a container, but with a class of its own."""
        for base, plain in _PLAIN_OF:
            if isinstance(value, base):
                return {"$object": [type_name(type(value)), self.describe(plain(value), place)]}
        return None

    # ---------------------------------------------------------------------------------------------------- callables

    def _callable(self, value: Any, place: _ArgumentPath) -> Json:
        if isinstance(value, FunctionType):
            return self._function(value, place)
        if isinstance(value, MethodType):
            owner = self.describe(value.__self__, place.at(".__self__"))
            return {"$method": [value.__name__, source_digest(value), owner]}
        if isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, (ModuleType, type(None))):
            return {"$method": [value.__qualname__, "", self.describe(value.__self__, place.at(".__self__"))]}
        inner = inner_callable(value) if callable(value) else None
        if inner is not None:
            return {"$callable": [type_name(type(value)), self.describe(inner, place)]}
        if isinstance(value, BuiltinFunctionType):
            return {"$builtin": f"{value.__module__}.{value.__qualname__}"}
        name = _importable_name(value)
        return None if name is None else {"$builtin": name}

    def _function(self, f: FunctionType, place: _ArgumentPath) -> Json:
        described: Json = {"$function": [f.__name__, source_digest(f)]}
        if _importable_name(f) is not None:
            return described
        # Made inside another function: the same source may have been made with other values.
        values = {**dict(defaults(f)), **closure(f)}
        fields = {name: self.describe(item, place.at(f" ({name} of it)")) for name, item in sorted(values.items())}
        return {"$closure": [described, fields]} if fields else described


def _plain_int(value: int) -> Json:
    return value if -_PRINTABLE_INT < value < _PRINTABLE_INT else {"$int": hex(value)}


def _float(value: float) -> Json:
    return value if math.isfinite(value) else {"$float": repr(value)}


def _complex(value: complex) -> Json:
    return {"$complex": [_float(value.real), _float(value.imag)]}


def _str(value: str) -> Json:
    if len(value) <= _MAX_TEXT and (value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)):
        return value
    # JSON writes a pair of lone surrogates and the character that they would encode in the same way.
    return {"$str": _long(value.encode("utf-8", "surrogatepass"))}


def _bytes(value: bytes | bytearray) -> Json:
    return {f"${type(value).__name__}": bytes(value).hex() if len(value) <= _MAX_TEXT // 4 else _long(value)}


def _long(value: bytes | bytearray) -> str:
    return f"{len(value)} bytes {blake2b(value, digest_size=16).hexdigest()}"


_SIMPLE: Final[dict[type, Callable[[Any], Json]]] = {
    type(None): lambda _: None,
    bool: lambda value: cast("bool", value),
    float: _float,
    complex: _complex,
    str: _str,
    bytes: _bytes,
    bytearray: _bytes,
    EllipsisType: lambda _: {"$ellipsis": True},
}

_PLAIN_OF: Final[tuple[tuple[type, Callable[[Any], object]], ...]] = (
    (int, int.__int__),
    (float, float.__float__),
    (str, str.__str__),
    (bytes, bytes),
    (tuple, tuple),
    (list, list),
    (frozenset, frozenset),
    (set, set),
    (Mapping, dict),
)


def _dtype(value: Any) -> str | None:
    """Return the name of a dtype, in whichever way a library spells dtypes; None if it is something else.

    `numpy.dtype("float32")`, `numpy.float32` and `jax.numpy.float32` are equal to each other and have one name.
    """
    if root_module(type(value)) == "torch" and type(value).__name__ == "dtype":
        return str(value)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.dtype):
        return dtype_name(value)
    if not isinstance(value, type):
        return None
    if issubclass(value, numpy.generic):
        return None if value.__name__ in _ABSTRACT_DTYPES else dtype_name(numpy.dtype(value))
    made = getattr(value, "dtype", None)  # jax.numpy.float32 is a class of jax's, with the dtype that it makes
    return dtype_name(made) if isinstance(made, numpy.dtype) else None


def _field_names(value: Any) -> tuple[str, ...] | None:
    """Return the fields that make up a dataclass, NamedTuple or pydantic object; None if it is no such thing."""
    kind = type(value)
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind) if field.compare)
    if isinstance(value, tuple):
        return cast("tuple[str, ...] | None", getattr(kind, "_fields", None))
    models = getattr(kind, "model_fields", None)
    return tuple(models) + tuple(value.model_extra or ()) if isinstance(models, dict) else None


def _importable_name(value: Any) -> str | None:
    """Return the dotted name under which every process finds this very object, or None."""
    if isinstance(value, (MethodDescriptorType, WrapperDescriptorType)):
        return f"{type_name(value.__objclass__)}.{value.__name__}"
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    root = root_module(type(value))
    module = getattr(value, "__module__", None)
    if not isinstance(name, str):
        return None
    if not isinstance(module, str) or type(value).__name__ == "ufunc":
        # The ufuncs of numpy and cupy do not know their module; cupy.add calls itself "cupy_add".
        module, name = root, name.removeprefix(f"{root}_")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}.{name}" if found is value else None
