"""Configurations as tagged JSON: lossless, readable, and safe to read back.

Plain JSON values stand for themselves. Everything else is an object with a `$` tag::

    (64, 32)                  {"$": "tuple", "v": [64, 32]}
    Mode.FAST                 {"$": "enum", "t": "kernels.Mode", "v": "FAST"}
    Tiles(m=64, n=32)         {"$": "object", "t": "kernels.Tiles", "v": {"m": 64, "n": 32}}
    numpy.dtype("bfloat16")   {"$": "dtype", "v": "bfloat16"}

Decoding never imports, calls or looks up a name that comes from the data: a class is used only if the caller passed it
in. Hence no pickle, and a poisoned book can at worst be a miss.
"""

from __future__ import annotations

import binascii
import dataclasses
import enum
import functools
import inspect
import math
import operator
import sys
import types
import typing
from typing import TYPE_CHECKING, Any, Final

from tunebook._base.errors import CodecError
from tunebook._base.record_format import blake2b, canonical_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tunebook._base.vocabulary import Json

TAG: Final = "$"
_MAX_DEPTH: Final = 64
_EXACT_INT: Final = 2**53  # beyond this, readers in other languages turn a JSON number into a rounded float

# The names under which a dtype may come back. A closed list: `numpy.dtype` itself would parse any string.
_DTYPES: Final = frozenset({
    "bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint2", "uint4", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128", "bfloat16", "float4_e2m1fn", "float6_e2m3fn",
    "float6_e3m2fn", "float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz",
    "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
})  # fmt: skip


def type_name(kind: type) -> str:
    """Return the name that a class has in the book."""
    return f"{kind.__module__}.{kind.__qualname__}"


# --------------------------------------------------------------------------------------------------------- encoding


def encode(value: object) -> Json:
    """Return the tagged JSON of a value; `CodecError` names the part that cannot be written."""
    return _encode(value, "value", 0)


def fingerprint(value: object) -> str:
    """Return a digest that is equal exactly when the encodings are: `True`, `1` and `1.0` are three values."""
    return fingerprint_of(encode(value))


def fingerprint_of(encoded: Json) -> str:
    """Return the fingerprint of a value that is encoded already."""
    return blake2b(canonical_json(encoded).encode("ascii"), digest_size=16).hexdigest()


def _encode(value: object, where: str, depth: int) -> Json:
    if depth > _MAX_DEPTH:
        raise CodecError(f"{where} is nested more than {_MAX_DEPTH} deep (or contains itself)")
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value, where, depth + 1)
    if isinstance(value, enum.Enum):
        named: Json = value.name
        if isinstance(value, enum.Flag):
            # A combination has no name that its class would know again; its parts do.
            named = [part.name for part in value]
            if _union(type(value), named) != value:
                raise CodecError(f"cannot store {where}: {value!r} has bits without a name")
        return {TAG: "enum", "t": type_name(type(value)), "v": named}
    fields = _written(value)
    if fields is not None:
        return {TAG: "object", "t": type_name(type(value)), "v": _encode(fields, where, depth)}
    found = _of_library(value, where, depth + 1)
    if found is None:
        raise CodecError(
            f"cannot store {where}, a {type_name(type(value))}. Use numbers, strings, tuples, enums, dtypes or "
            "dataclasses in configurations, or call tunebook.register_codec for this class."
        )
    return found


def _str(value: str, _where: str, _depth: int) -> Json:
    if value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value):
        return value
    # JSON writes a pair of lone surrogates and the character that they would encode in the same way.
    return {TAG: "str", "v": value.encode("utf-8", "surrogatepass").hex()}


def _list(value: Iterable[object], where: str, depth: int) -> Json:
    return [_encode(item, f"{where}[{i}]", depth) for i, item in enumerate(value)]


def _set(value: set[object] | frozenset[object], where: str, depth: int) -> Json:
    items = sorted((_encode(item, f"an item of {where}", depth) for item in value), key=canonical_json)
    return {TAG: type(value).__name__, "v": items}


def _dict(value: dict[object, object], where: str, depth: int) -> Json:
    if all(type(key) is str and not key.startswith(TAG) for key in value):
        return _fields(typing.cast("dict[str, object]", value), where, depth)
    pairs: list[Json] = [
        [_encode(k, f"a key of {where}", depth), _encode(v, f"{where}[{k!r}]", depth)] for k, v in value.items()
    ]
    return {TAG: "map", "v": sorted(pairs, key=canonical_json)}


def _fields(value: Mapping[str, object], where: str, depth: int) -> dict[str, Json]:
    return {name: _encode(item, f"{where}.{name}", depth) for name, item in value.items()}


_ENCODERS: Final[dict[type, Callable[[Any, str, int], Json]]] = {
    type(None): lambda value, _where, _depth: value,
    bool: lambda value, _where, _depth: value,
    str: _str,
    # hex: Python refuses to print or parse decimal integers of more than 4300 digits.
    int: lambda value, _where, _depth: value if abs(value) < _EXACT_INT else {TAG: "int", "v": hex(value)},
    float: lambda value, _where, _depth: value if math.isfinite(value) else {TAG: "float", "v": repr(value)},
    complex: lambda value, where, depth: {TAG: "complex", "v": _list((value.real, value.imag), where, depth)},
    list: _list,
    tuple: lambda value, where, depth: {TAG: "tuple", "v": _list(value, where, depth)},
    set: _set,
    frozenset: _set,
    bytes: lambda value, _where, _depth: {TAG: "bytes", "v": binascii.b2a_base64(value, newline=False).decode("ascii")},
    dict: _dict,
}

_HOOKS: Final[dict[type, tuple[Callable[[Any], object], Callable[[Any], object]]]] = {}


def register_codec(kind: type[Any], to_plain: Callable[[Any], object], from_plain: Callable[[Any], object]) -> None:
    """Teach the codec a class: `from_plain(to_plain(x))` must equal `x`, and `to_plain` must give a storable value."""
    _HOOKS[kind] = (to_plain, from_plain)
    _ENCODERS[kind] = lambda value, where, depth: {
        TAG: "custom", "t": type_name(kind), "v": _encode(to_plain(value), where, depth)
    }  # fmt: skip


def has_codec(kind: type) -> bool:
    """Return whether `register_codec` was called for a class."""
    return kind in _HOOKS


def _union(kind: type[enum.Flag], names: list[Any]) -> enum.Flag:
    return functools.reduce(operator.or_, (kind[name] for name in names), kind(0))


def _of_library(value: Any, where: str, depth: int) -> Json:  # noqa: PLR0911 - one return for each kind of value
    """Return the encoding of a dtype or scalar of an array library, which is loaded if it made the value; or None."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.dtype):
        return {TAG: "torch-dtype", "v": str(value).removeprefix("torch.")}
    if numpy is None:
        return None
    if isinstance(value, numpy.dtype):
        return {TAG: "dtype", "v": _dtype_name(value, where)}
    if isinstance(value, numpy.generic):
        # The extension floats (bfloat16, ...) have an item() that returns themselves.
        item = value.item() if value.dtype.kind in "biufc" else float(value)
        return {TAG: "scalar", "d": _dtype_name(value.dtype, where), "v": _encode(item, where, depth)}
    if isinstance(value, type) and issubclass(value, numpy.generic):
        return {TAG: "scalar-type", "v": _dtype_name(numpy.dtype(value), where)}
    # jax.numpy.float32 is not a numpy class, but an object with the dtype that it makes.
    is_jax = type(value).__module__.partition(".")[0] == "jax" and getattr(value, "shape", None) is None
    if is_jax and isinstance(getattr(value, "dtype", None), numpy.dtype):
        return {TAG: "jax-scalar-type", "v": _dtype_name(value.dtype, where)}
    return None


def _dtype_name(dtype: Any, where: str) -> str:
    if dtype.name not in _DTYPES:
        raise CodecError(f"cannot store {where}: dtype {dtype!r} is not a plain number type")
    return str(dtype.name)


def fields_of(value: object) -> dict[str, object] | None:
    """Return the fields from which the class of a value can build it again; None for a class without fields."""
    names = _field_names(type(value))
    try:
        return None if names is None else {name: getattr(value, name) for name in names}
    except AttributeError:
        return None  # a plain class that does not keep its constructor's arguments


def _written(value: Any) -> Any:
    """Return the plain value that is written for an object: its fields, or the result of `model_dump`; or None."""
    if dumps_itself(type(value)):
        return value.model_dump()
    fields = fields_of(value)
    if fields is not None:
        fields |= {name: getattr(value, name) for name in _computed(type(value)) if hasattr(value, name)}
    return fields


def dumps_itself(kind: type) -> bool:
    """Whether `model_dump` of a class returns other content than its fields, so that its result is written."""
    dump = getattr(kind, "model_dump", None)
    if not inspect.isfunction(dump):
        return False
    if dump.__module__.partition(".")[0] != "pydantic":
        return True
    rules: Any = getattr(kind, "__pydantic_decorators__", None)
    fields: Any = getattr(kind, "model_fields", {})
    annotated = (type(rule).__name__ for declared in fields.values() for rule in declared.metadata)
    return bool(
        rules.field_serializers
        or rules.model_serializers
        or rules.computed_fields
        or any(name in {"PlainSerializer", "WrapSerializer"} for name in annotated)
    )


def _computed(kind: type) -> tuple[str, ...]:
    """Return the fields of a dataclass that its constructor does not take; an ignored one is not part of its value."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return tuple(field.name for field in fields if not field.init and field.compare)


def build(kind: type, fields: Mapping[str, Any]) -> Any:
    """Return an object with these fields. Fields that its constructor does not take are set afterwards."""
    later = {name: fields[name] for name in _computed(kind) if name in fields}
    made = kind(**{name: value for name, value in fields.items() if name not in later})
    for name, value in later.items():
        object.__setattr__(made, name, value)  # also of a frozen dataclass
    return made


def _field_names(kind: type) -> tuple[str, ...] | None:
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind) if field.init)
    for attribute in ("model_fields", "__struct_fields__", "_fields"):  # pydantic, msgspec, NamedTuple
        names = getattr(kind, attribute, None)
        if names is not None:
            return tuple(names)
    constructor = getattr(kind, "__init__", None)
    if kind.__module__ == "builtins" or not isinstance(constructor, types.FunctionType):
        return None
    # A class like triton.Config: a constructor written in Python whose arguments are kept under their own names.
    parameters = list(inspect.signature(constructor).parameters.values())[1:]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(p.name for p in parameters) if all(p.kind in named for p in parameters) else None


def readable(encoded: Json, names: Sequence[str] = ()) -> str:
    """Return an encoded configuration as people write it, in the order of `names` if it has just these.

    >>> from tunebook import Config
    >>> readable(encode(Config(block=(64, 32), order="ij")))
    "block=(64, 32), order='ij'"
    """
    plain = decode(encoded)
    if isinstance(plain, dict) and all(isinstance(name, str) for name in plain):
        ordered = names if plain.keys() == set(names) else plain
        return ", ".join(f"{name}={plain[name]!r}" for name in ordered)
    return repr(plain)


# --------------------------------------------------------------------------------------------------------- decoding


def decode(encoded: Json, classes: Mapping[str, type] | None = None) -> Any:
    """Return the value; tagged classes must be among `classes` (see `classes_of`).

    With `classes=None` nothing is declared, and objects come back as dicts of their fields, enums as their names.
    """
    try:
        return _decode(encoded, classes, 0)
    except (TypeError, ValueError, KeyError, AttributeError, binascii.Error, OverflowError) as error:
        # A constructor of the caller refuses altered data in any of these ways: the entry is not usable.
        if isinstance(error, CodecError):
            raise
        raise CodecError(f"not a configuration: {type(error).__name__}: {error}") from error


def _decode(x: Json, classes: Mapping[str, type] | None, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise CodecError(f"nested more than {_MAX_DEPTH} deep")
    if isinstance(x, list):
        return [_decode(item, classes, depth + 1) for item in x]
    if not isinstance(x, dict):
        return x
    if TAG not in x:
        return {name: _decode(item, classes, depth + 1) for name, item in x.items()}
    tag, value = x[TAG], x.get("v")
    if tag in ("enum", "object", "custom"):
        return _decode_class(x, classes, depth + 1)
    decoder = _DECODERS.get(tag) if isinstance(tag, str) else None
    if decoder is None:
        raise CodecError(f"unknown tag {str(tag)[:20]!r}")
    if tag in _NESTED:
        value = [_decode(item, classes, depth + 1) for item in typing.cast("list[Json]", value)]
    if tag == "scalar":
        return _numpy_dtype(x["d"]).type(_decode(value, classes, depth + 1))
    return decoder(value)


def _decode_class(x: dict[str, Json], classes: Mapping[str, type] | None, depth: int) -> Any:
    tag, name, value = x[TAG], x.get("t"), x.get("v")
    if classes is None:
        return _decode(value, None, depth)
    kind = classes.get(name) if isinstance(name, str) else None
    if kind is None:
        raise CodecError(f"{str(name)[:80]!r} is not among the classes that this kernel's configurations use")
    if tag == "enum" and issubclass(kind, enum.Enum):
        return _union(kind, value) if isinstance(value, list) and issubclass(kind, enum.Flag) else kind[str(value)]
    if tag == "custom" and kind in _HOOKS:
        return _HOOKS[kind][1](_decode(value, classes, depth))
    if tag == "object" and isinstance(value, dict):
        unknown = set(value) - {*(_field_names(kind) or ()), *_computed(kind)}
        if unknown and not dumps_itself(kind):
            raise CodecError(f"{name} has no fields {sorted(unknown)[:4]}")
        return build(kind, {field: _decode(item, classes, depth) for field, item in value.items()})
    raise CodecError(f"{name} cannot be read from a {tag!r}")


def _numpy_dtype(name: object) -> Any:
    if name not in _DTYPES:
        raise CodecError(f"unknown dtype {str(name)[:40]!r}")
    import numpy as np  # noqa: PLC0415 - optional, and 100 ms

    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # noqa: PLC0415 - numpy knows these names only after this import

        return np.dtype(getattr(ml_dtypes, str(name)))


def _jax_numpy_scalar_type(name: object) -> Any:
    jnp = sys.modules.get("jax.numpy")
    if jnp is None or name not in _DTYPES:
        raise CodecError(f"jax.numpy.{str(name)[:40]} needs jax to be imported first")
    return getattr(jnp, "bool_" if name == "bool" else str(name))


def _torch_dtype_named(name: object) -> Any:
    torch = sys.modules.get("torch")
    found = getattr(torch, str(name), None)
    if torch is None or not isinstance(found, torch.dtype):
        raise CodecError(f"unknown dtype torch.{str(name)[:40]}; import torch first")
    return found


# Tags whose value is a list of encoded items, decoded before the tag's own function sees it.
_NESTED: Final = frozenset({"tuple", "set", "frozenset", "map", "complex"})

_DECODERS: Final[dict[str, Callable[[Any], Any]]] = {
    "str": lambda v: bytes.fromhex(v).decode("utf-8", "surrogatepass"),
    "int": lambda v: int(v, 16),
    "float": float,
    "complex": lambda v: complex(*v),
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "map": dict,
    "bytes": lambda v: binascii.a2b_base64(v, strict_mode=True),
    "dtype": _numpy_dtype,
    "scalar-type": lambda v: _numpy_dtype(v).type,
    "jax-scalar-type": _jax_numpy_scalar_type,
    "scalar": _numpy_dtype,
    "torch-dtype": _torch_dtype_named,
}


def classes_of(roots: Iterable[object]) -> dict[str, type]:
    """Return the classes that may be built on reading: the classes of the roots, of their parts and annotations."""
    found: dict[str, type] = {}
    pending = list(roots)
    seen: set[int] = set()
    made: list[object] = []  # kept, because another object could get the identity of one that is freed
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, type):
            storable = issubclass(item, enum.Enum) or item in _HOOKS or _field_names(item) is not None
            storable = storable or dumps_itself(item)
            if item.__module__ != "builtins" and storable:
                found[type_name(item)] = item
                pending.extend(annotations_of(item).values())
        elif typing.get_origin(item) is not None:
            pending.extend(typing.get_args(item))
        else:
            pending.append(type(item))
            if isinstance(item, dict):
                pending += [*item, *item.values()]
            elif isinstance(item, (list, tuple, set, frozenset)):
                pending += item
            elif type(item) in _HOOKS:
                pending.append(_HOOKS[type(item)][0](item))
            else:
                fields = _written(item)
                made.append(fields)
                pending += fields.values() if isinstance(fields, dict) else [fields]
    return found


def annotations_of(annotated: type | Callable[..., Any]) -> dict[str, object]:
    """Return the annotations of a class or function; empty if one of them cannot be resolved."""
    try:
        return typing.get_type_hints(annotated)
    except (NameError, TypeError, AttributeError):
        return {}


def is_same_config(config: object, other: object) -> bool:
    """Whether two configurations are written alike; those that cannot be written, whether they are one object."""
    try:
        return fingerprint_of(encode(config)) == fingerprint_of(encode(other))
    except CodecError:
        return config is other
