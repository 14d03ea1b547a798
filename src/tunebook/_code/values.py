"""The values that code reads: attributes of live objects, without running any code, and the parts of a value."""

from __future__ import annotations

import ast
import functools
import os
import sys
from enum import Enum, EnumMeta
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType
from typing import TYPE_CHECKING, Any, Final, Protocol

from tunebook._arrays.describe import describe
from tunebook._arrays.device_fingerprint import library_version
from tunebook._base.config_codec import encode, fields_of, has_codec, type_name
from tunebook._base.errors import CodecError, DefinitionError
from tunebook._base.record_format import canonical_json
from tunebook._code import source
from tunebook._code.source import NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from tunebook._base.vocabulary import Json

PLAIN: Final = (type(None), bool, int, float, complex, str, bytes)

# Values of the standard library that have a content. By name, so that nothing is imported for them.
_CONTENTS: Final[dict[str, Callable[[Any], object]]] = {
    "array.array": lambda x: (x.typecode, x.tobytes()),
    "argparse.Namespace": vars,
    "builtins.bytearray": bytes,
    "builtins.mappingproxy": dict,
    "builtins.range": lambda x: (x.start, x.stop, x.step),
    "builtins.slice": lambda x: (x.start, x.stop, x.step),
    "collections.deque": lambda x: (x.maxlen, list(x)),
    "datetime.date": str,
    "datetime.datetime": str,
    "datetime.timedelta": str,
    "decimal.Decimal": str,
    "fractions.Fraction": str,
    "operator.attrgetter": lambda x: x.__reduce__()[1:],
    "operator.itemgetter": lambda x: x.__reduce__()[1:],
    "operator.methodcaller": lambda x: x.__reduce__()[1:],
    "re.Pattern": lambda x: (x.pattern, x.flags),
    "types.SimpleNamespace": vars,
    "uuid.UUID": str,
}


class Walk(Protocol):
    """A walk over values. Each value has a register: its place in the list of values so far."""

    values: list[Any]
    innermost: Any  # the kernel's function
    replays: bool
    versions: dict[str, str]  # of the packages and compilers that the code uses

    def load(self, origin: int, read: Callable[[Any, Any], Any], key: Hashable = None) -> int:
        """Read a part of the value in a register; return the register of the part."""

    def note(self, origin: int, read: Callable[[Any, Any], Any], key: Hashable = None) -> Any:
        """Read a plain value, or a tuple of plain values, from the value in a register, and return it."""

    def refer(self, register: int, owner: int | None = None) -> Json:
        """Return a reference to a value, whose parts are described later."""

    def is_own(self, kind: type) -> bool:
        """Return whether a class is the user's own."""

    def is_state(self, holder: object, kind: str, key: object) -> bool:
        """Return whether the code changes this part of a value."""

    def mentioned(self) -> frozenset[str]:
        """Return the names of all attributes in the code."""

    def foreign(self, module: str, name: str) -> dict[str, Json]:
        """Return the description of an object beyond the user's own code."""


def parts(walk: Walk, register: int) -> Json:
    """Return the description of any value but functions and modules."""
    x = walk.values[register]
    if isinstance(x, type):
        return _class(walk, register, x)
    if _speaks(x):
        walk.versions.update(walk.note(register, _own_versions))
        return {"checksum": walk.note(register, _own_checksum)}
    if isinstance(x, functools.partial):
        fields = (walk.load(register, attribute, name) for name in ("func", "args", "keywords"))
        return {"partial": [walk.refer(field) for field in fields]}
    if isinstance(x, (list, tuple, set, frozenset, dict)):
        return {type_name(type(x)): _container(walk, register, x)}
    return _object(walk, register, x)


# ---------------------------------------------------------------------------------------------- attributes of objects


def member(owner: Any, name: str) -> Any:
    """Return the attribute `owner.name` without running a property or any other code of the owner.

    A method, a property or a cached property is returned as its function.
    """
    found = _definition(owner, name)
    is_instance = not isinstance(owner, type)
    if is_instance and isinstance(owner, tuple) and name in getattr(type(owner), "_fields", ()):
        return tuple.__getitem__(owner, type(owner)._fields.index(name))  # type: ignore[attr-defined] # a NamedTuple
    if is_instance and isinstance(found, MemberDescriptorType):
        try:
            return found.__get__(owner)
        except AttributeError:
            return NOTHING  # a slot without a value
    function = function_in(found)
    if not is_instance or isinstance(found, (property, functools.cached_property)):
        return found if function is None else function
    if found is not NOTHING and hasattr(type(found), "__set__"):
        return NOTHING  # a descriptor computes the value
    return instance_dict(owner).get(name, found if function is None else function)


def route(x: Any, name: str, *, is_own: bool) -> tuple[Callable[[Any, Any], Any], str] | None:
    """Return how to read an attribute of a class or an object; None if its code or another library computes it."""
    if isinstance(x, EnumMeta) and is_own and name in x._member_map_:
        return enum_member, name
    if not isinstance(x, type) and _speaks(x):
        return None
    if isinstance(x, Enum) and name in ("name", "value"):
        return enum_part, name
    found = member(x, name)
    if not (is_own or is_record(x)):
        return (member, name) if type(instance_dict(x).get(name, NOTHING)) in PLAIN else None
    if found is not NOTHING:
        is_plain = type(type(x)) is type and hasattr(x, "__dict__") and quick_member(x, name) is found
        return quick_member if is_plain else member, name
    has_code = not isinstance(x, type) and isinstance(member(x, "__getattr__"), FunctionType)
    return (member, "__getattr__") if has_code else None


def quick_member(x: Any, name: str) -> Any:
    """Return `member(x, name)` in 0.1 us instead of 2; only for methods and values of objects with a `__dict__`."""
    own = x.__dict__
    if name not in own:
        return getattr(type(x), name, NOTHING)
    return member(x, name) if hasattr(type(x), name) else own[name]


def owner_of(owner: Any, name: str) -> Any:
    """Return the object that a method is bound to: the owner, its class, or None for a function without a self."""
    if not isinstance(owner, type) and name in instance_dict(owner):
        return None
    found = _definition(owner, name)
    if isinstance(found, staticmethod) or function_in(found) is None:
        return None
    return type(owner) if isinstance(found, classmethod) and not isinstance(owner, type) else owner


def definition(owner: Any, key: tuple[str, int]) -> Any:
    """Return the function that is the n-th definition of a name in the classes of an object."""
    name, n = key
    found = [f for raw in _definitions(owner, name) if (f := function_in(raw)) is not None]
    return found[n] if n < len(found) else NOTHING


def instance_dict(x: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(x, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def function_in(raw: object) -> FunctionType | None:
    """Return the function inside a member of a class: a method, a property, a cached property; None for a value."""
    if isinstance(raw, property):
        raw = raw.fget
    elif isinstance(raw, functools.cached_property):
        raw = raw.func
    else:
        raw = getattr(raw, "__func__", raw)
    return raw if isinstance(raw, FunctionType) else None


def _definitions(owner: object, name: str) -> list[Any]:
    """Return the attributes of this name in the classes of an object, the most specific first."""
    kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    return [vars(kind)[name] for kind in kinds if name in vars(kind)]


def _definition(owner: object, name: str) -> Any:
    return next(iter(_definitions(owner, name)), NOTHING)


def item(x: Any, key: Any) -> Any:
    """Return one item of a list, a tuple or a dict."""
    base: Any = next(base for base in (dict, list, tuple) if isinstance(x, base))
    return base.__getitem__(x, key)


def array_text(x: Any, _: None = None) -> str:
    """Return the description of an array, without its content."""
    spec = describe(x)
    return canonical_json([spec.library, spec.dtype, list(spec.shape), spec.layout])


def _inner(x: Any, _: None) -> Any:
    return source.inner_callable(x)


def attribute(x: Any, name: Any) -> Any:
    return getattr(x, name)


def _speaks(x: object) -> bool:
    return callable(getattr(x, "__tunebook_checksum__", None))


def _own_checksum(x: Any, _: None) -> str:
    digest = x.__tunebook_checksum__()
    if not isinstance(digest, str):
        name = f"{type_name(type(x))}.__tunebook_checksum__()"
        raise DefinitionError(f"{name} must return a str, not {type(digest).__name__}")
    return digest


def loaded_version(_: object, name: Any) -> str:
    return library_version(name)


def _own_versions(x: Any, _: None) -> tuple[tuple[str, str], ...]:
    own = getattr(x, "__tunebook_versions__", None)
    return tuple(own().items()) if callable(own) else ()


# ---------------------------------------------------------------------------------------------------------- containers


def _container(walk: Walk, register: int, x: Any) -> Json:
    if isinstance(x, dict):
        return _dict(walk, register, x)
    in_order = x if isinstance(x, (list, tuple)) else sorted(x, key=_stable_name)
    if all(type(each) in PLAIN for each in x):
        walk.note(register, contents if in_order is x else _set_text)
        return [{"value": encode(each)} for each in in_order]
    if in_order is x:
        walk.note(register, _length)
        return [walk.refer(walk.load(register, item, i)) for i in range(len(x))]
    walk.replays = False  # the members have no order in which another walk would find them again
    return [walk.refer(walk.load(register, lambda _x, each: each, each)) for each in in_order]


def _dict(walk: Walk, register: int, x: dict[Any, Any]) -> Json:
    keys = sorted((key for key in x if not walk.is_state(x, "[]", key)), key=_stable_name)
    if len(keys) == len(x) and all(type(key) in PLAIN and type(value) in PLAIN for key, value in x.items()):
        walk.note(register, contents)
        return [[{"value": encode(key)}, {"value": encode(x[key])}] for key in keys]
    walk.replays &= all(type(key) in PLAIN for key in x)
    walk.note(register, contents, "keys")
    pairs = ((walk.load(register, lambda _x, key: key, key), walk.load(register, item, key)) for key in keys)
    return [[walk.refer(key), walk.refer(value)] for key, value in pairs]


def contents(x: Any, part: Any) -> tuple[Any, ...]:
    """Return the plain items of a list, a tuple or a dict, or of a dict the plain keys only."""
    if part == "keys":
        return tuple(key if type(key) in PLAIN else None for key in x)
    return (*x, *x.values()) if isinstance(x, dict) else tuple(x)


def _set_text(x: Any, _: None) -> str:
    return canonical_json(encode(frozenset(x)))


def _length(x: Any, _: None) -> int:
    return len(x)


def _stable_name(x: object) -> str:
    """Return a sort key for members of a set, without hashes and addresses."""
    named = f"{getattr(x, '__module__', '')}.{getattr(x, '__qualname__', '')}"
    content = _text_or_code(x) if isinstance(x, FunctionType) else _try_encode(x)
    return f"{type_name(type(x))} {named} {canonical_json(content)}"


def _text_or_code(f: FunctionType) -> Json:
    node = source.node_of(f)
    return code_form(f.__code__) if node is None else source.normal_form(node)


# ------------------------------------------------------------------------------------------------ classes and objects


def _class(walk: Walk, register: int, kind: type) -> Json:
    if not walk.is_own(kind):
        return walk.foreign(kind.__module__, kind.__qualname__)
    node = _class_node_of(kind)
    methods: dict[str, Json] = {}
    for name in walk.note(register, _method_names):
        f = walk.load(register, _own_function, name)
        # If the class has a text, methods without a text were generated from it (dataclasses do that).
        if node is None or source.node_of(walk.values[f]) is not None:
            is_static = isinstance(vars(kind)[name], staticmethod)
            methods[name] = walk.refer(f, None if is_static else register)
    names = walk.note(register, _value_names, walk.mentioned())
    kept = [name for name in names if not walk.is_state(kind, ".", name)]
    bases = [walk.load(register, _base, i) for i, base in enumerate(kind.__bases__) if base is not object]
    return {
        "class": kind.__qualname__,
        "code": None if node is None else source.normal_form(node),
        "methods": methods,
        "values": {name: walk.refer(walk.load(register, _own_value, name)) for name in kept},
        "members": walk.refer(walk.load(register, _enum_values)) if isinstance(kind, EnumMeta) else None,
        "bases": [walk.refer(base) for base in bases],
    }


def _class_node_of(kind: type) -> ast.ClassDef | None:
    """Return the syntax tree of a class; None without a text, or if the text has several classes of that name."""
    # A method leads to the text that was really compiled; a class without methods has only the name of its module.
    methods = (m for m in vars(kind).values() if isinstance(m, FunctionType) and m.__module__ == kind.__module__)
    file = next(filter(None, (source.file_with(m.__code__, m.__globals__) for m in methods)), None)
    module = sys.modules.get(kind.__module__)
    filename = getattr(module, "__file__", None)
    if file is None and filename is not None:
        file = source.file_of(filename, vars(module))
    found = [] if file is None else file.classes.get(kind.__qualname__, [])
    return found[0] if len(found) == 1 else None


def _object(walk: Walk, register: int, x: Any) -> Json:
    if isinstance(x, BuiltinFunctionType):
        return walk.foreign(str(x.__module__), x.__qualname__)
    name = type_name(type(x))
    if isinstance(x, Enum):
        return {"enum": walk.refer(walk.load(register, kind_of)), "name": walk.note(register, enum_part, "name")}
    if is_record(x):
        return {name: _attributes(walk, register, x, None)}
    if name in _CONTENTS:
        return {name: walk.refer(walk.load(register, _content))}
    if isinstance(x, PurePath):
        return {"path": walk.note(register, _path_text, _folder(walk.innermost))}
    inner = walk.load(register, _inner)
    own = walk.is_own(type(x)) and not has_codec(type(x))
    return {
        "object": walk.refer(walk.load(register, kind_of)),
        "name": walk.note(register, _name),
        "inner": walk.refer(inner),
        "content": _attributes(walk, register, x, walk.mentioned()) if own else walk.note(register, _described),
    }


def _attributes(walk: Walk, register: int, x: Any, mentioned: frozenset[str] | None) -> dict[str, Json]:
    names = walk.note(register, _attribute_names, mentioned)
    kept = [(name, walk.load(register, member, name)) for name in names if not walk.is_state(x, ".", name)]
    return {name: walk.refer(value) for name, value in kept if walk.values[value] is not NOTHING}


def is_record(x: object) -> bool:
    """Return whether this is a bare collection of attributes."""
    return type_name(type(x)) in ("argparse.Namespace", "types.SimpleNamespace")


def enum_part(x: Any, name: Any) -> Any:
    return x._name_ if name == "name" else x._value_


def enum_member(kind: Any, name: Any) -> Any:
    return kind._member_map_.get(name, NOTHING)


def _enum_values(kind: Any, _: None) -> dict[str, Any]:
    return {name: each._value_ for name, each in kind._member_map_.items()}


def _name(x: Any, _: None) -> str:
    return str(getattr(x, "__name__", ""))


def kind_of(x: Any, _: None) -> type:
    return type(x)


def _base(kind: type, i: Any) -> Any:
    return kind.__bases__[i]


def _own_value(kind: type, name: Any) -> Any:
    return vars(kind).get(name, NOTHING)


def _own_function(kind: type, name: Any) -> Any:
    return function_in(vars(kind).get(name))


def _method_names(kind: type, _: None) -> tuple[str, ...]:
    functions = ((name, function_in(raw)) for name, raw in vars(kind).items())
    # Enum copies some of its own methods to each class, and each version of Python copies others.
    return tuple(sorted(n for n, f in functions if f is not None and f.__globals__.get("__name__") != "enum"))


def _value_names(kind: type, mentioned: Any) -> tuple[str, ...]:
    if isinstance(kind, EnumMeta):
        return ()
    names = {*mentioned, *getattr(kind, "__dataclass_fields__", ())}
    values = (name for name, raw in vars(kind).items() if name in names and _is_value(raw))
    return tuple(sorted(name for name in values if not name.startswith("__")))


def _is_value(raw: object) -> bool:
    return function_in(raw) is None and not isinstance(raw, (MemberDescriptorType, staticmethod, classmethod, property))


def _attribute_names(x: Any, mentioned: Any) -> tuple[str, ...]:
    """Return the attributes of an object that count: the fields of its class, and the ones that the code mentions."""
    slots = {n for kind in type(x).__mro__ for n, raw in vars(kind).items() if isinstance(raw, MemberDescriptorType)}
    found = {*instance_dict(x), *slots}
    names = found if mentioned is None else (found & mentioned) | {*(fields_of(x) or ())}
    # A cached value follows from the code of its property.
    kept = (n for n in names if not isinstance(_definition(x, n), functools.cached_property))
    return tuple(sorted(n for n in kept if isinstance(n, str) and not n.startswith("__")))


def _content(x: Any, _: None) -> object:
    return _CONTENTS[type_name(type(x))](x)


def _folder(function: Any) -> str:
    """Return the folder of a function's file; empty if it has none."""
    filename = getattr(function, "__globals__", {}).get("__file__") or ""
    return str(Path(filename).absolute().parent) if filename else ""


def _path_text(x: Any, folder: Any) -> str:
    """Return a path as text; relative to the kernel's folder if they share more than the root of the disk."""
    if folder and x.is_absolute():
        shared = os.path.commonpath((x, folder)) if x.drive == PurePath(folder).drive else x.anchor
        return PurePath(os.path.relpath(x, folder) if shared != x.anchor else x).as_posix()
    return str(x.as_posix())


def _described(x: Any, _: None) -> str:
    # Numba: the same function compiled with fastmath is another one.
    options = _try_encode(getattr(x, "targetoptions", None))
    return canonical_json([options, _try_encode(x)])


def _try_encode(x: object) -> Json:
    try:
        return encode(x)
    except CodecError:
        return None  # an object that cannot be encoded counts by its class


# --------------------------------------------------------------------------------------------- functions without a text


def code_form(code: CodeType) -> Json:
    """Return a code object as JSON, for functions without a text; differs between versions of Python."""
    constants: list[Json] = [_constant_form(constant) for constant in code.co_consts]
    names: list[Json] = [list(group) for group in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)]
    counts: list[Json] = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags]
    return [code.co_code.hex(), constants, names, counts, code.co_exceptiontable.hex()]


def _constant_form(constant: object) -> Json:
    if isinstance(constant, CodeType):
        return code_form(constant)
    if isinstance(constant, tuple):
        return [_constant_form(item) for item in constant]
    if isinstance(constant, frozenset):
        return sorted(repr(item) for item in constant)  # type: ignore[return-value] # list[str] is Json, invariantly not
    return [type(constant).__name__, repr(constant)]


def text_of(function: object) -> str:
    """Return the name of a function for a message; for a lambda its text."""
    node = source.node_of(function) if isinstance(function, FunctionType) else None
    if isinstance(node, ast.Lambda):
        return ast.unparse(node)
    return str(getattr(function, "__qualname__", type(function).__qualname__))


# Editing these, or their variants per platform, leaves every measurement valid.
_NOT_MEASURED: Final = (
    "heuristic_cfg", "candidate_cfgs", "prune_cfgs", "cfg_group", "cfg_priority", "enough_s", "objective", "strategy",
    "roofline",
)  # fmt: skip


def measured_names(kernel: object, base: type) -> tuple[str, ...]:
    """Return the operations that a kernel's classes below `base` define, and that a measurement depends on."""
    names: set[str] = set()
    for kind in type(kernel).__mro__:
        if kind is base:
            break
        names.update(name for name, value in vars(kind).items() if name[:2] != "__" and callable(value))
    return tuple(sorted(name for name in names if not name.startswith(_NOT_MEASURED)))
