"""Digests over code, which change when a kernel is edited.

A kernel is more than its own text. The walk starts at its function and follows every name that the code reads, through
globals, closures, attributes of modules and of `self`, to functions, classes and constants of the user's own code. At
the edge of that code (the standard library, installed packages) it notes a name and a version, and stops.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections import deque
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final

from tunebook._arrays.describe import describe, is_array
from tunebook._arrays.device_fingerprint import library_version
from tunebook._base.config_codec import encode, fingerprint, fingerprint_of, type_name
from tunebook._base.errors import CodecError, DefinitionError
from tunebook._base.record_format import canonical_json
from tunebook._code import source
from tunebook._code.source import closure, code_form, node_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tunebook._base.vocabulary import Json

_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes)
_NOTHING: Final = object()  # the value of a name that is not defined


def code_checksum(function: object, *, version: str = "", extra: Iterable[object] = ()) -> str:
    """Return a digest over a function's code and the user's own code and values that it reads.

    Comments, docstrings, formatting and the place of the file do not matter. Variables that the code itself changes
    are left out, and arrays count by their description, not by their content. `extra` adds further functions, classes
    or values. An object with `__tunebook_checksum__() -> str` gives its own digest. Pass a bound method rather than
    the function of a class to have `self.helper()` followed.
    """
    return _CodeWalk(home=_home(function), versions=True).digest([function, *extra], version)


def source_digest(function: object) -> str:
    """Return a digest for call keys: as `code_checksum`, but all installed packages are foreign, and unversioned."""
    # Otherwise an activation function from a big framework would drag half the framework into every key.
    return _CodeWalk(home="", versions=False).digest([function], "")


def candidates_checksum(candidates: Iterable[object]) -> str:
    """Return a digest over a set of candidates, in any order."""
    own = getattr(candidates, "fingerprint", None)  # a `Space` has a digest that does not list its configurations
    if own is not None:
        return str(own())
    return fingerprint_of(sorted({fingerprint(candidate) for candidate in candidates}))  # type: ignore[arg-type] # list[str] is Json


def inner_callable(x: object) -> object | None:
    """Return the function inside a wrapper object, or None."""
    wrapped = getattr(x, "__wrapped__", None)
    if callable(wrapped):
        return wrapped  # type: ignore[no-any-return]
    # numba, triton. A Python function or nothing: the attributes of other objects may have these names as well.
    return next((f for name in ("py_func", "fn") if isinstance(f := getattr(x, name, None), FunctionType)), None)


def _home(function: object) -> str:
    """Return the top-level package whose code counts as the user's own even if it is installed."""
    for _ in range(16):  # a wrapper may claim to wrap itself
        inner = function.func if isinstance(function, functools.partial) else inner_callable(function)
        function = function if inner is None else inner
    root = str(getattr(function, "__module__", "")).partition(".")[0]
    return "" if root == "__main__" else root


class _CodeWalk:
    """Lists all reachable objects, each once, in an order that does not depend on addresses or hashes."""

    def __init__(self, *, home: str, versions: bool) -> None:
        self._home = home
        self._versions = versions
        self._nodes: list[Json] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self._alive: list[object] = []  # the id of a freed object may come back
        self._pending: deque[tuple[int, Any]] = deque()

    def digest(self, roots: Iterable[object], version: str) -> str:
        referred: list[Json] = [self.refer(root) for root in roots]
        while self._pending:
            number, x = self._pending.popleft()
            self._nodes[number] = self._parts(x)
        return fingerprint_of([version, referred, self._nodes])

    def refer(self, x: Any) -> Json:
        """Return a plain value itself, and a number for an object with parts, so that cycles end."""
        if type(x) in _PLAIN:
            return {"value": encode(x)}
        if isinstance(x, ModuleType):
            return {"module": x.__name__, "version": self._version(x.__name__)}
        if is_array(x):
            spec = describe(x)
            return {"array": [spec.library, spec.dtype, list(spec.shape), spec.layout]}
        key = (id(x.__func__), id(x.__self__)) if isinstance(x, MethodType) else (id(x),)
        if key not in self._numbers:
            self._numbers[key] = len(self._nodes)
            self._nodes.append(None)
            self._alive.append(x)
            self._pending.append((self._numbers[key], x))
        return {"node": self._numbers[key]}

    def _parts(self, x: Any) -> Json:
        own = None if isinstance(x, type) else getattr(x, "__tunebook_checksum__", None)
        if callable(own):
            digest = own()
            if not isinstance(digest, str):
                name = f"{type_name(type(x))}.__tunebook_checksum__()"
                raise DefinitionError(f"{name} must return a str, not {type(digest).__name__}")
            return {"checksum": digest}
        if isinstance(x, FunctionType):
            return self._function(x, None)
        if isinstance(x, MethodType):
            inner: object = x.__func__
            if isinstance(inner, FunctionType):
                return self._function(inner, x.__self__)
            return {"method": self.refer(inner)}
        if isinstance(x, type):
            return self._class(x)
        return self._container(x) or self._object(x)

    # ------------------------------------------------------------------------------------------------ kinds of things

    def _function(self, f: FunctionType, owner: object | None) -> Json:
        # Not __module__: functools.wraps copies that from the function inside.
        module = str(f.__globals__.get("__name__", ""))
        wrapped = vars(f).get("__wrapped__")
        parts: dict[str, Json] = {} if wrapped is None else {"wrapped": self.refer(wrapped)}
        if self._is_foreign(module, f.__code__.co_filename):
            parts |= self._foreign(module, f.__code__.co_qualname)
            if "<" in f.__code__.co_qualname:  # functions made inside another function share a qualified name
                cells: list[Json] = [self.refer(value) for _, value in sorted(closure(f).items())]
                parts |= {"code": code_form(f.__code__), "closure": cells}
            return parts
        node = node_of(f)
        if node is None and wrapped is not None:
            return parts  # a generated wrapper, like tunebook's own
        state = frozenset[str]() if node is None else source.mutated_names(node)
        kept = source.kept_decorators(node, f)
        # The constants that the decorators were given, as in `@njit(fastmath=FAST)`.
        visible = {**f.__globals__, **closure(f)}
        given = sorted({n.id for decorator in kept for n in ast.walk(decorator) if isinstance(n, ast.Name)})
        return {
            **parts,
            "code": code_form(f.__code__) if node is None else source.normal_form(node, kept),
            "names": dict(self._names(f, owner, state)),
            "decorators": {n: self.refer(visible[n]) for n in given if n in visible and _is_data(visible[n])},
            "defaults": {name: self.refer(value) for name, value in source.defaults(f) if name not in state},
        }

    def _class(self, kind: type) -> Json:
        module = sys.modules.get(kind.__module__)
        if self._is_foreign(kind.__module__, str(getattr(module, "__file__", None) or "")):
            return self._foreign(kind.__module__, kind.__qualname__)
        node = source.class_node_of(kind)
        # If the class has a text, methods without a text were generated from it (dataclasses do that).
        members = ((name, _function_in(member)) for name, member in sorted(vars(kind).items()))
        methods = [(name, f) for name, f in members if f is not None and (node is None or node_of(f) is not None)]
        bases: list[Json] = [self.refer(base) for base in kind.__bases__ if base is not object]
        return {
            "class": kind.__qualname__,
            "code": None if node is None else source.normal_form(node),
            "methods": {name: self.refer(f) for name, f in methods},
            "bases": bases,
        }

    def _container(self, x: Any) -> Json:
        if isinstance(x, functools.partial):
            keywords = {name: self.refer(value) for name, value in sorted(x.keywords.items())}
            return {"partial": [self.refer(x.func), [self.refer(item) for item in x.args], keywords]}
        if isinstance(x, (list, tuple)):
            return {type_name(type(x)): [self.refer(item) for item in x]}
        if isinstance(x, (set, frozenset)):
            return {type_name(type(x)): [self.refer(item) for item in sorted(x, key=_stable_name)]}
        if isinstance(x, dict):
            items = sorted(x.items(), key=lambda item: _stable_name(item[0]))
            return {type_name(type(x)): [[self.refer(key), self.refer(value)] for key, value in items]}
        return None

    def _object(self, x: Any) -> Json:
        if isinstance(x, BuiltinFunctionType):
            return self._foreign(str(x.__module__), x.__qualname__)
        inner = inner_callable(x)
        return {
            "object": self.refer(type(x)),
            "name": str(getattr(x, "__name__", "")),
            "inner": None if inner is None else self.refer(inner),
            # Numba: the same function compiled with fastmath is another one.
            "options": _try_encode(getattr(x, "targetoptions", None)),
            "value": _try_encode(x),
        }

    # --------------------------------------------------------------------------------------------- names that it reads

    def _names(self, f: FunctionType, owner: object | None, state: frozenset[str]) -> Iterator[tuple[str, Json]]:
        first = f.__code__.co_varnames[0] if owner is not None and f.__code__.co_argcount else None
        changed = state | source.rebound_names(f.__code__)
        closed_over = closure(f)
        for read in sorted(set(source.reads(f.__code__, first))):
            if read.name == first and first not in closed_over:
                value = owner
            else:  # builtins are left out: they come with Python, whose version is part of the environment
                value = (closed_over if read.closed_over else f.__globals__).get(read.name, _NOTHING)
            if value is owner and read.attributes and read.name == first:
                path, value = f"{first}.{read.attributes[0]}", _member(owner, read.attributes[0])
            else:
                path, value = self._follow(read, value)
            if value is not _NOTHING and not (read.name in changed and _is_data(value)):
                yield path, self.refer(value)
        if owner is not None and "__class__" in f.__code__.co_freevars:  # it calls super()
            bases = filter(None, map(_function_in, _definitions(f.__name__, owner)))
            for i, base in enumerate(bases):
                yield f"super {i}", self.refer(MethodType(base, owner))

    def _follow(self, read: source.Read, value: Any) -> tuple[str, Any]:
        """Follow a dotted name through modules of the user's own; return the part followed and its value."""
        path = read.name
        for attribute in read.attributes:
            if not isinstance(value, ModuleType):
                break
            if self._is_foreign(value.__name__, str(getattr(value, "__file__", None) or "")):
                break
            path, value = f"{path}.{attribute}", vars(value).get(attribute, _NOTHING)
        return path, value

    # ------------------------------------------------------------------------------------- the edge of the user's code

    def _is_foreign(self, module: str, filename: str) -> bool:
        root = module.partition(".")[0]
        if root and root == self._home:
            return False
        if root == "tunebook" or root in sys.stdlib_module_names:
            return True
        return not {"site-packages", "dist-packages"}.isdisjoint(PurePath(filename).parts)

    def _foreign(self, module: str, name: str) -> dict[str, Json]:
        return {"foreign": f"{module}.{name}", "version": self._version(module)}

    def _version(self, module: str) -> str:
        root = module.partition(".")[0]
        # Python's version is part of the environment; a release of tunebook must not make every kernel look edited.
        if not self._versions or root in ("tunebook", "__main__", self._home) or root in sys.stdlib_module_names:
            return ""
        return library_version(root)


def _is_data(value: object) -> bool:
    return not (callable(value) or isinstance(value, ModuleType))


def _member(owner: object, name: str) -> Any:
    """Return the attribute `owner.name` without running a property or any other code of the owner."""
    for found in _definitions(name, owner):
        function = _function_in(found)
        return found if function is None else MethodType(function, owner)
    return getattr(owner, "__dict__", {}).get(name, _NOTHING)


def _function_in(member: object) -> FunctionType | None:
    inner = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    return inner if isinstance(inner, FunctionType) else None


def _definitions(name: str, owner: object) -> list[Any]:
    """Return the attributes of this name in the classes of an object, the most specific first."""
    kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    return [vars(kind)[name] for kind in kinds if name in vars(kind)]


def _stable_name(x: object) -> str:
    """Return a sort key for members of a set, without hashes and addresses."""
    named = f"{getattr(x, '__module__', '')}.{getattr(x, '__qualname__', '')}"
    content = code_form(x.__code__) if isinstance(x, FunctionType) else _try_encode(x)
    return f"{type_name(type(x))} {named} {canonical_json(content)}"


def _try_encode(x: object) -> Json:
    try:
        return encode(x)
    except CodecError:
        return None  # an object that cannot be encoded counts by its class
