"""Call keys: the facts about a call's arguments that decide a kernel's speed, as a line of JSON; and fast keys.

Equal keys mean one tuning, so a key must tell apart all arguments that a kernel can tell apart, and must be the same in
every process. Plain values stand for themselves; the rest is an object with one `$` tag::

    a         {"$array": ["numpy", "float32", [512, "~1024"], "C", "cpu"]}     ~1024 is a bucket
    causal    true
    window    {"$tuple": [128, 0]}
    dtype     {"$dtype": "bfloat16"}
    score     {"$function": ["alibi", "5be1f7c3..."]}                          its name, and a digest of its source

A fast key is a cheap stand-in, valid in one process: equal for two arguments only if their part of the call key is.
`_KINDS` holds both for each exact class; a new class of arguments is one row there, and a codec if it is to be saved.
"""

from __future__ import annotations

import enum
import functools
import math
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from tunebook._arrays.describe import (
    KEY_FUNCTIONS,
    MAX_DEPTH,
    DeviceOrdinals,
    describe,
    device_of,
    field_names,
    is_array,
    key_function,
)
from tunebook._arrays.library import dtype_name, library_named, library_of, root_module
from tunebook._base.config_codec import type_name
from tunebook._base.errors import DefinitionError, UnkeyableError
from tunebook._base.record_format import blake2b, canonical_json
from tunebook._code.checksum import source_digest
from tunebook._code.source import closure, defaults, inner_callable
from tunebook._keys.key_text import explain_difference as explain_difference  # noqa: PLC0414 - keys have one door
from tunebook._keys.key_text import in_short as in_short  # noqa: PLC0414 - keys have one door
from tunebook._keys.key_text import size_of as size_of  # noqa: PLC0414 - keys have one door
from tunebook._keys.key_text import spell_out as spell_out  # noqa: PLC0414 - keys have one door

if TYPE_CHECKING:
    from tunebook._base.vocabulary import Json
    from tunebook._keys.buckets import Buckets

T = TypeVar("T")

_MAX_TEXT: Final = 256  # a longer string is a document and not a setting; its digest tells it apart as well
_PRINTABLE_INT: Final = 2**63  # Python refuses to print integers of more than 4300 digits; hex has no limit

# Classes of numpy that stand for a family of dtypes.
# fmt: off
_ABSTRACT_DTYPES: Final = frozenset({
    "generic", "number", "integer", "signedinteger", "unsignedinteger", "inexact", "floating", "complexfloating",
    "flexible", "character",
})
# fmt: on


def call_key(arguments: Mapping[str, object], *, buckets: Buckets | None = None, layout: bool = True) -> str:
    """Return the key of a call, given its arguments by name; `UnkeyableError` names an argument without a key.

    `layout=False` leaves the memory layout of arrays out.

    >>> call_key({"n": 3, "causal": True, "window": (128, 0)})
    '{"causal":true,"n":3,"window":{"$tuple":[128,0]}}'
    """
    describer = _Describer(buckets, layout=layout)
    return canonical_json(
        {name: describer.describe(value, _ArgumentPath(name, name)) for name, value in arguments.items()}
    )


def fast_key_of(x: Any, depth: int = 0) -> Hashable:
    """Return a hashable value that is equal for two arguments only if they have the same call key.

    `TypeError` for an argument without a cheap key.
    """
    kind = type(x)
    read = _FAST.get(kind) or _learn_fast(x, kind)
    return kind, read(x, depth)


def is_plain(value: object) -> bool:
    """Return whether a value cannot change: numbers, texts, dtypes, classes, functions and modules."""
    row = _KINDS.get(type(value))
    code = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
    plain = (int, float, complex, str, bytes, enum.Enum, *code)
    return row.plain if row is not None else isinstance(value, plain) or _dtype(value) is not None or is_scalar(value)


def register_key(kind: type[T], describe_value: Callable[[T], object]) -> None:
    """Let objects of a class, and of its subclasses, be part of call keys.

    `describe_value` returns a value with a key that tells two objects apart: a tuple of numbers, say. Call it before
    the first call with an object of the class, because the problem of a call is remembered.
    """
    if not isinstance(kind, type) or not callable(describe_value):
        raise DefinitionError("register_key takes a class and a function of an object: register_key(Mask, tuple)")
    KEY_FUNCTIONS[kind] = describe_value
    _FAST.clear()


class _ArgumentPath(NamedTuple):
    """Where in the arguments a value is; for messages, and to find its bucket."""

    argument: str
    path: str

    def at(self, step: str) -> _ArgumentPath:
        return _ArgumentPath(self.argument, self.path + step)


class _Describer:
    __slots__ = ("_buckets", "_devices", "_layout", "_open")

    def __init__(self, buckets: Buckets | None, *, layout: bool) -> None:
        self._buckets = buckets if buckets is not None and (buckets.whole or buckets.by_dimension) else None
        self._layout = layout
        self._devices = DeviceOrdinals()
        self._open: list[int] = []  # the ids of the containers that are being described, outermost first

    def describe(self, value: Any, place: _ArgumentPath) -> Json:
        row = _KINDS.get(type(value))
        if row is not None and row.is_leaf:
            return row.key(self, value, place)
        if id(value) in self._open and isinstance(value, types.FunctionType):
            return {"$up": len(self._open) - self._open.index(id(value))}  # a function that calls itself
        if id(value) in self._open or len(self._open) > MAX_DEPTH:
            raise UnkeyableError(
                f"argument {place.argument!r} cannot be part of a call key: {place.path[:80]} contains itself, or is "
                f"nested more than {MAX_DEPTH} deep"
            )
        self._open.append(id(value))
        try:
            return self._compound(value, place) if row is None else row.key(self, value, place)
        finally:
            self._open.pop()

    def _compound(self, value: Any, place: _ArgumentPath) -> Json:
        kind = type(value)
        read = key_function(kind)
        if read is not None:
            return {"$custom": [type_name(kind), self.describe(read(value), place)]}
        if isinstance(value, functools.partial):  # of a class of its own, as a bound tunable method is
            return {"$object": [type_name(kind), self.bound_call(value, place)]}
        for attempt in (self._array, self._symbol, self._fields, self._callable, self._subclass):
            described = attempt(value, place)
            if described is not None:
                return described
        raise UnkeyableError(
            f"argument {place.argument!r} cannot be part of a call key: {place.path} is a {type_name(kind)}. Leave it "
            f"out with ignore=({place.argument!r},), name the arguments that matter with key=(...), or say how to tell "
            f"two of them apart: tunebook.register_key({kind.__qualname__}, lambda x: ...)"
        )

    def integer(self, value: int, place: _ArgumentPath) -> Json:
        if self._buckets is None:
            return _plain_int(value)
        bucket = self._buckets.scalar(place.argument, value, top=place.path == place.argument)
        return _plain_int(value) if bucket is None else {"$bucket": _plain_int(bucket)}

    def _array(self, value: Any, place: _ArgumentPath) -> Json:
        if not is_array(value):
            return None
        try:
            spec = describe(value, self._devices)
            shape = [*spec.shape] if self._buckets is None else self._buckets.shape(place.argument, spec.shape)
        except UnkeyableError as error:
            message = f"argument {place.argument!r} cannot be part of a call key: {place.path}: {error}"
            raise UnkeyableError(message) from error
        return {"$array": [spec.family, spec.dtype, [*shape], spec.layout if self._layout else "", spec.platform]}

    def sequence(self, value: list[object], place: _ArgumentPath) -> Json:
        return [self.describe(item, place.at(f"[{i}]")) for i, item in enumerate(value)]

    def fixed_sequence(self, value: tuple[object, ...], place: _ArgumentPath) -> Json:
        return {"$tuple": self.sequence(list(value), place)}

    def unordered(self, value: set[object] | frozenset[object], place: _ArgumentPath) -> Json:
        items = [self.describe(item, place.at("{...}")) for item in value]
        return {f"${type(value).__name__}": sorted(items, key=canonical_json)}

    def dictionary(self, value: dict[Any, Any], place: _ArgumentPath) -> Json:
        # Sorted if they can be: equal dicts must number their devices alike.
        pairs = sorted(value.items()) if all(type(key) is str for key in value) else value.items()
        items = [(key, self.describe(item, place.at(f"[{key!r}]"))) for key, item in pairs]
        if all(type(key) is str and key.isascii() and not key.startswith("$") for key in value):
            return dict(items)
        described: list[Json] = [[self.describe(key, place.at(f" key {key!r}")), item] for key, item in items]
        return {"$dict": sorted(described, key=canonical_json)}

    def ordered(self, value: OrderedDict[object, object], place: _ArgumentPath) -> Json:
        return {"$object": [type_name(type(value)), self.sequence([list(item) for item in value.items()], place)]}

    def bounds(self, value: range | slice, place: _ArgumentPath) -> Json:
        return {f"${type(value).__name__}": self.sequence([value.start, value.stop, value.step], place)}

    def bound_call(self, value: functools.partial[object], place: _ArgumentPath) -> Json:
        arguments = self.sequence(list(value.args), place.at(".args"))
        keywords = self.dictionary(value.keywords, place.at(".keywords"))
        return {"$partial": [self.describe(value.func, place.at(".func")), arguments, keywords]}

    def _symbol(self, value: Any, place: _ArgumentPath) -> Json:
        """Describe an enum, a dtype, a scalar of numpy, a class or a module: a value with a name, or a number."""
        if isinstance(value, enum.Enum):
            named = value.name is not None  # a Flag may have bits that no member names
            return {"$enum": [type_name(type(value)), value.name if named else self.describe(value.value, place)]}
        dtype = _dtype(value)
        if dtype is not None:
            return {"$dtype": dtype}
        if is_scalar(value):
            row = _KINDS.get(type(value.item()))
            # A long double, a date or a record has no Python number that holds it exactly; its text does.
            text = str(value) if row is None or not row.is_leaf else row.key(self, value.item(), place)
            return {"$scalar": [dtype_name(value.dtype), text]}
        if isinstance(value, type):
            return {"$class": type_name(value)}
        return {"$module": value.__name__} if isinstance(value, types.ModuleType) else None

    def _fields(self, value: Any, place: _ArgumentPath) -> Json:
        names = field_names(value)
        if names is None:
            return None
        dataclass_fields: Iterable[Any] = getattr(type(value), "__dataclass_fields__", {}).values()
        ignored = {field.name for field in dataclass_fields if not field.compare}
        names = tuple(name for name in names if name not in ignored)
        fields = {name: self.describe(getattr(value, name), place.at(f".{name}")) for name in names}
        return {"$object": [type_name(type(value)), fields]}

    def _subclass(self, value: Any, place: _ArgumentPath) -> Json:
        """Describe a number, a text or a container with a class of its own."""
        for base in _BASES:
            if isinstance(value, base):
                plain = _PLAIN.get(base, base)(value)
                return {"$object": [type_name(type(value)), self.describe(plain, place)]}
        return None

    def _callable(self, value: Any, place: _ArgumentPath) -> Json:
        if isinstance(value, types.FunctionType):
            return self._function(value, place)
        if isinstance(value, types.MethodType):
            owner = self.describe(value.__self__, place.at(".__self__"))
            return {"$method": [value.__name__, source_digest(value), owner]}
        if isinstance(value, types.BuiltinFunctionType) and not isinstance(value.__self__, types.ModuleType | None):
            return {"$method": [value.__qualname__, "", self.describe(value.__self__, place.at(".__self__"))]}
        inner = inner_callable(value) if callable(value) else None
        if inner is not None:
            return {"$callable": [type_name(type(value)), self.describe(inner, place)]}
        if isinstance(value, types.BuiltinFunctionType):
            return {"$builtin": f"{value.__module__}.{value.__qualname__}"}
        name = _importable_name(value)
        return None if name is None else {"$builtin": name}

    def _function(self, f: types.FunctionType, place: _ArgumentPath) -> Json:
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


def _str(value: str) -> Json:
    if len(value) <= _MAX_TEXT and (value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)):
        return value
    # JSON writes a pair of lone surrogates and the character that they would encode in the same way.
    return {"$str": _long(value.encode("utf-8", "surrogatepass"))}


def _bytes(value: bytes | bytearray) -> Json:
    return {f"${type(value).__name__}": bytes(value).hex() if len(value) <= _MAX_TEXT // 4 else _long(value)}


def _long(value: bytes | bytearray) -> str:
    return f"{len(value)} bytes {blake2b(value, digest_size=16).hexdigest()}"


# ------------------------------------------------------------------------------------------------------------- kinds


class _Kind(NamedTuple):
    """How values of a class are keyed. A value that is not `plain` may change, or hold arrays. A leaf has no parts."""

    key: Callable[[_Describer, Any, _ArgumentPath], Json]
    fast: _Fast
    plain: bool = True
    is_leaf: bool = True


_Fast = Callable[[Any, int], Hashable]


def _value(key: Callable[[Any], Json], fast: _Fast = lambda x, _depth: x) -> _Kind:
    return _Kind(lambda _describer, value, _place: key(value), fast)


def _fast_items(x: Any, depth: int) -> Hashable:
    if depth > MAX_DEPTH:
        raise TypeError(f"containers nested more than {MAX_DEPTH} deep are not memoised")
    return tuple([fast_key_of(item, depth + 1) for item in x])


def _fast_pairs(x: Mapping[Any, Any], depth: int) -> Hashable:
    return _fast_items(x, depth), _fast_items(x.values(), depth)


def _fast_range(x: range | slice, depth: int) -> Hashable:
    return _fast_items((x.start, x.stop, x.step), depth)  # range(0) == range(1, 1), and slice(0) == slice(False)


def _fast_partial(x: functools.partial[Any], depth: int) -> Hashable:
    return fast_key_of(x.func, depth), _fast_items(x.args, depth), _fast_pairs(x.keywords, depth)


def _fast_set(x: Any, depth: int) -> Hashable:
    return frozenset(fast_key_of(item, depth) for item in x)


_KINDS: Final[dict[type, _Kind]] = {
    types.NoneType: _value(lambda _: None),
    bool: _value(bool),
    int: _Kind(_Describer.integer, lambda x, _depth: x),
    float: _value(_float, lambda x, _depth: x.hex()),  # 0.0 == -0.0
    complex: _value(
        lambda x: {"$complex": [_float(x.real), _float(x.imag)]}, lambda x, _depth: (x.real.hex(), x.imag.hex())
    ),
    str: _value(_str),
    bytes: _value(_bytes),
    bytearray: _value(_bytes, lambda x, _depth: bytes(x))._replace(plain=False),
    types.EllipsisType: _value(lambda _: {"$ellipsis": True}),
    range: _Kind(_Describer.bounds, _fast_range, is_leaf=False),
    slice: _Kind(_Describer.bounds, _fast_range, is_leaf=False),
    list: _Kind(_Describer.sequence, _fast_items, plain=False, is_leaf=False),
    tuple: _Kind(_Describer.fixed_sequence, _fast_items, plain=False, is_leaf=False),
    set: _Kind(_Describer.unordered, _fast_set, plain=False, is_leaf=False),
    frozenset: _Kind(_Describer.unordered, _fast_set, plain=False, is_leaf=False),
    dict: _Kind(_Describer.dictionary, _fast_pairs, plain=False, is_leaf=False),
    OrderedDict: _Kind(_Describer.ordered, _fast_pairs, plain=False, is_leaf=False),
    functools.partial: _Kind(_Describer.bound_call, _fast_partial, plain=False, is_leaf=False),
}

# A value of a subclass is keyed by its class and by the value of the base, whatever its `__int__` or `__str__` says.
_BASES: Final[tuple[type, ...]] = (int, float, str, bytes, tuple, list, frozenset, set, Mapping)
_PLAIN: Final[dict[type, Any]] = {int: int.__int__, float: float.__float__, str: str.__str__, Mapping: dict}

_FAST: Final[dict[type, _Fast]] = {}  # how each class that was seen is read; it decides, not the object
_FAST_CLASSES: Final = 1000  # a program that makes ever new classes must not fill the memory


def _learn_fast(x: Any, kind: type) -> _Fast:
    read = _fast_way(x, kind)
    if len(_FAST) >= _FAST_CLASSES:
        _FAST.clear()
    return _FAST.setdefault(kind, read)


def _fast_way(x: Any, kind: type) -> _Fast:  # noqa: PLR0911 - a table of kinds, one return each
    """Return how a fast key reads objects of a class; `TypeError` if their key has to be worked out every time."""
    row = _KINDS.get(kind)
    if row is not None:
        return row.fast
    own = key_function(kind)
    if own is not None:
        return lambda x, depth: fast_key_of(own(x), depth)
    if is_array(x):
        if library_of(x).fast_key is None:
            return lambda x, _depth: (describe(x), device_of(x))
        return lambda x, _depth: library_of(x).fast_key(x)  # type: ignore[misc] # it was seen with one
    if issubclass(kind, (enum.Enum, type)) or _dtype(x) is not None:
        return lambda x, _depth: x  # hashable, and equal only to itself
    if is_scalar(x):
        # Bytes, because 0.0 == -0.0; the dtype, because a date has a unit.
        return lambda x, _depth: (x.dtype, x.tobytes())
    if field_names(x) is not None:
        return lambda x, depth: _fast_items([getattr(x, name) for name in field_names(x) or ()], depth)
    if kind is types.FunctionType:
        return _fast_function
    if issubclass(kind, Mapping) and not callable(x):
        return _fast_pairs
    raise TypeError(f"a {kind.__name__} is not memoised")


def _fast_function(x: Any, _depth: int) -> Hashable:
    if x.__closure__ is not None:
        raise TypeError("a function that closes over values is not memoised")
    return x  # type: ignore[no-any-return]


def is_scalar(value: object) -> bool:
    """Return whether a value is a scalar of numpy's, which has a class of its own."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def _dtype(value: Any) -> str | None:
    """Return the name of a dtype; one name for `numpy.dtype("float32")`, `numpy.float32` and `jax.numpy.float32`."""
    if "dtype" in type(value).__name__:
        named = library_named(root_module(type(value))).dtype_text(value)
        if named is not None:
            return named
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


def _importable_name(value: Any) -> str | None:
    """Return the dotted name under which every process finds this very object, or None."""
    if isinstance(value, (types.MethodDescriptorType, types.WrapperDescriptorType)):
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
