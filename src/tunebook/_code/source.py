"""The code of live functions and classes: its exact source text, and the names that it reads."""

from __future__ import annotations

import ast
import dis
import linecache
import re
import sys
import weakref
from functools import lru_cache
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NamedTuple, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tunebook._base.vocabulary import Json

V = TypeVar("V")
NOTHING: Final = object()  # the value of a name that is not defined
FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

# `ctx` follows from the place in the tree; the others are comments to type checkers.
_SILENT_FIELDS: Final = frozenset({"ctx", "type_comment", "kind", "type_ignores"})

_MUTATORS: Final = frozenset({
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove",
    "reverse", "setdefault", "sort", "update",
})  # fmt: skip


class _File(NamedTuple):
    """A source text that was parsed and compiled once, with an index of its functions and classes."""

    tree: ast.Module
    codes: frozenset[CodeType]
    functions: dict[tuple[int, str], list[FunctionNode]]  # by first line and name
    classes: dict[str, list[ast.ClassDef]]  # by qualified name


def node_of(function: FunctionType) -> FunctionNode | None:
    """Return the syntax tree of a function, or None if the text that it was compiled from is not available.

    The text must compile to the very code that the function runs: a file that was edited after its import describes
    another function. The columns of the code tell two lambdas on one line apart.
    """
    code = function.__code__
    file = file_with(code, function.__globals__)
    if file is None:
        return None
    found = file.functions.get((code.co_firstlineno, code.co_name), [])
    if code.co_name == "<lambda>" and len(found) > 1:
        from tunebook._code.lambdas import innermost  # noqa: PLC0415 - loaded late: few lambdas share a line

        return innermost(found, code)
    return found[0] if len(found) == 1 else None


def inner_callable(x: object) -> Any:
    """Return the function inside a wrapper object, or None."""
    wrapped = getattr(x, "__wrapped__", None)
    if callable(wrapped):
        return wrapped
    # numba, triton. A Python function or nothing: the attributes of other objects may have these names as well.
    return next((f for name in ("py_func", "fn") if isinstance(f := getattr(x, name, None), FunctionType)), None)


def file_with(code: CodeType, module_globals: dict[str, Any]) -> _File | None:
    file = file_of(code.co_filename, module_globals)
    if file is None or code not in file.codes:
        linecache.checkcache(code.co_filename)  # the text may have been kept since before a reload
        file = file_of(code.co_filename, module_globals)
    return file if file is not None and code in file.codes else None


def file_of(filename: str, module_globals: dict[str, Any] | None) -> _File | None:
    text = "".join(linecache.getlines(filename, module_globals))
    for _ in range(3 if text else 0):
        try:
            return _parsed(text, filename)
        except SystemError:
            # CPython 3.11 fails so if a finaliser runs inside the parser and parses a text of its own.
            continue
    return None


def tree_of(filename: str) -> ast.Module | None:
    """Return the syntax tree of a file, or None if it is not a readable Python text."""
    file = file_of(filename, None)
    return None if file is None else file.tree


@lru_cache(maxsize=64)
def _parsed(text: str, filename: str) -> _File | None:
    try:
        tree = ast.parse(text)
        whole = compile(text, filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return None  # not Python, or edited into something broken
    functions: dict[tuple[int, str], list[FunctionNode]] = {}
    classes: dict[str, list[ast.ClassDef]] = {}
    pending: list[tuple[str, ast.AST]] = [("", tree)]
    while pending:
        prefix, node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            first = next(iter(getattr(node, "decorator_list", ())), node)
            name = getattr(node, "name", "<lambda>")
            functions.setdefault((first.lineno, name), []).append(node)
            prefix = f"{prefix}{name}.<locals>."
        elif isinstance(node, ast.ClassDef):
            classes.setdefault(prefix + node.name, []).append(node)
            prefix = f"{prefix}{node.name}."
        pending.extend((prefix, child) for child in ast.iter_child_nodes(node))
    return _File(tree, frozenset(_codes(whole)), functions, classes)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


# ------------------------------------------------------------------------------------------------------ normalising


def normal_form(node: ast.AST, decorators: list[ast.expr] | None = None) -> Json:
    """Return the tree as a list of words without positions, comments and docstrings, the same for every Python version.

    `decorators` replace the decorators of the node. Not `ast.dump`: new versions of Python add fields to it, and every
    kernel would look edited. Not by recursion: a sum of 400 terms is a tree 400 levels deep.
    """
    words: list[Json] = []
    pending: list[object] = [node]
    while pending:
        item = pending.pop()
        if isinstance(item, _Word):
            words.append(str(item))
        elif isinstance(item, ast.AST):
            fields = _fields(item, decorators if item is node else None)
            parts = [part for name, value in fields for part in (_Word(f".{name}"), value)]
            pending.extend(reversed([_Word(type(item).__name__), *parts, _Word(")")]))
        elif isinstance(item, list):
            pending.extend(reversed([_Word("["), *item, _Word("]")]))
        else:  # a name, an operator's level, or a literal
            words.append(f"{type(item).__name__} {item!r}")
    return words


class _Word(str):
    __slots__ = ()


def _fields(node: ast.AST, decorators: list[ast.expr] | None) -> Iterator[tuple[str, object]]:
    for name, value in ast.iter_fields(node):
        kept = value
        if name == "decorator_list" and decorators is not None:
            kept = decorators
        elif name == "body" and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            kept = value[1:] if ast.get_docstring(node, clean=False) is not None else value
        elif isinstance(node, ast.JoinedStr):
            # Python 3.12.1 ends f"{x:>{n}}" with an empty piece of text.
            kept = [part for part in value if not (isinstance(part, ast.Constant) and part.value == "")]
        if name not in _SILENT_FIELDS and kept is not None and kept != []:
            yield name, kept


# ----------------------------------------------------------------------------------- names that code reads and changes


class AccessPath(NamedTuple):
    """A variable, and the attributes and items that code takes from it: `helpers.TABLE["a"]`.

    The root is "global", "closure", "self" (the first parameter of a method), "import" or "from" (a module that the
    code imports), "parameter", or "local" (a variable with a value that is not known). A step is `(".", "TABLE")`,
    `("[]", "a")`, or `("*", method)` for a change of any part of a container.
    """

    root: str
    name: str
    steps: tuple[tuple[str, Any], ...] = ()

    def then(self, kind: str, key: object) -> AccessPath:
        return AccessPath(self.root, self.name, (*self.steps, (kind, key)))

    def text(self, steps: int | None = None) -> str:
        parts = (f".{key}" if kind == "." else f"[{key!r}]" for kind, key in self.steps[:steps])
        return self.name + "".join(parts)


class Uses(NamedTuple):
    """The places that code reads and changes, and the names of all attributes that it mentions."""

    reads: tuple[AccessPath, ...]
    writes: tuple[AccessPath, ...]
    attributes: frozenset[str]


def uses(code: CodeType, *, bound: bool) -> Uses:
    """Return the places that code and its inner functions use; `bound` says that its first parameter is "self"."""
    known = _USES.get(code) or {}
    if bound not in known:
        reads, writes, attributes = set[AccessPath](), set[AccessPath](), set[str]()
        pending = [(code, {name: {AccessPath("closure", name)} for name in code.co_freevars}, bound)]
        while pending:
            inner, cells, has_self = pending.pop()
            tracker = _Tracker(inner, cells, has_self=has_self)
            reads |= tracker.reads
            writes |= tracker.writes
            attributes |= tracker.attributes
            pending += [(c, tracker.cells, False) for c in inner.co_consts if isinstance(c, CodeType)]
        found = Uses(_in_order(reads), _in_order(writes), frozenset(attributes))
        _USES.put(code, known := {**known, bound: found})
    return known[bound]


def _in_order(paths: Iterable[AccessPath]) -> tuple[AccessPath, ...]:
    known = (path for path in paths if path.root != "local")
    return tuple(sorted(known, key=lambda path: (path.name, path.text(), path.root, repr(path.steps))))


class ByIdentity(Generic[V]):
    """Values by object, as long as the object lives. Not by equality: equal code may come from two texts."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], V]] = {}

    def get(self, x: object) -> V | None:
        entry = self._entries.get(id(x))
        return entry[1] if entry is not None and entry[0]() is x else None

    def put(self, x: object, value: V) -> None:
        number = id(x)
        entries = self._entries

        def forget(gone: weakref.ref[Any]) -> None:
            # A new object at the same address may have an entry already.
            if (entry := entries.get(number)) is not None and entry[0] is gone:
                entries.pop(number, None)

        entries[number] = (weakref.ref(x, forget), value)


_USES: Final[ByIdentity[dict[bool, Uses]]] = ByIdentity()
_Value: TypeAlias = "frozenset[AccessPath] | _Constant"  # an item on the stack: the places that it may come from
_UNKNOWN: Final = frozenset[AccessPath]()
_MANY: Final = 8  # more values for a variable, or longer paths, are not followed
_PLAIN_KEYS: Final = (str, int, bool, bytes, type(None))
# Instructions that leave the item below those they pop as it is.
_ONLY_POP: Final = (
    "CACHE", "COPY_FREE", "DELETE_", "EXTENDED", "JUMP", "KW_NAMES", "MAKE_CELL", "NOP", "NOT_TAKEN", "POP_", "PRECALL",
    "RESUME", "STORE_",
)  # fmt: skip
_ENDS: Final = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD")
_CONSTRUCTORS: Final = ("__init__", "__new__", "__post_init__")


class _Constant(NamedTuple):
    value: object


class _Tracker:
    """Follows values through the instructions of one code object, in their order.

    It forgets the stack where jumps meet. A value that it loses sight of counts as read, so only precision is lost.
    """

    def __init__(self, code: CodeType, cells: dict[str, set[AccessPath]], *, has_self: bool) -> None:
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + (code.co_flags & 12).bit_count()]
        self._variables = {name: {AccessPath("parameter", name)} for name in parameters}
        self._self = AccessPath("self", parameters[0]) if has_self and parameters else None
        if self._self is not None:
            self._variables[self._self.name] = {self._self}
        self._makes_self = code.co_name in _CONSTRUCTORS
        self._closure_names = {*code.co_cellvars, *code.co_freevars}
        self.cells = {**cells, **{name: self._variables.get(name, set()) for name in code.co_cellvars}}
        instructions = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
        for _ in range(2):  # the first pass learns the values of variables, also of those that a loop sets at its end
            self.reads, self.writes, self.attributes = set[AccessPath](), set[AccessPath](), set[str]()
            self._stack: list[_Value] = []
            for instruction in instructions:
                self._run(instruction)
            self._forget()

    def _run(self, i: dis.Instruction) -> None:
        if i.is_jump_target or i.opname == "PUSH_EXC_INFO":
            self._forget()
        fast = re.findall("(LOAD|STORE)_FAST", i.opname)  # Python 3.13 has instructions for two variables at once
        for kind, name in zip(fast, i.argval if isinstance(i.argval, tuple) else (i.argval,), strict=False):
            if kind == "STORE":
                self._bind(self._variables, name)
            else:  # Python 3.13 loads a cell, to make a closure, like a variable
                self._stack.append(_UNKNOWN if name in self._closure_names else self._variable(name))
        if not fast:
            known = self._INSTRUCTIONS.get("BINARY_SUBSCR" if i.argrepr == "[]" else i.opname)
            if known is None or not known(self, i):
                self._any(i)
        if i.opname.startswith(_ENDS):
            self._forget()

    def _variable(self, name: str) -> frozenset[AccessPath]:
        return frozenset(self._variables.get(name) or (AccessPath("local", name),))

    def _pop(self) -> _Value:
        return self._stack.pop() if self._stack else _UNKNOWN

    def _read(self, value: _Value) -> None:
        if not isinstance(value, _Constant):
            self.reads |= {path for path in value if path.root != "parameter"}

    def _forget(self) -> None:
        for value in self._stack:
            self._read(value)
        self._stack.clear()

    def _bind(self, variables: dict[str, set[AccessPath]], name: str) -> None:
        value = self._pop()
        known = variables.setdefault(name, set())
        if not isinstance(value, _Constant) and len(known) < _MANY:
            known |= {path for path in value if path.root != "local" and len(path.steps) < _MANY}

    def _change(self, value: _Value, kind: str, key: object) -> None:
        if isinstance(value, _Constant):
            return
        # An expression, like `type(self)`: any object may be the one that changes.
        for path in value or ({AccessPath("parameter", "")} if kind == "." else ()):
            if not (self._makes_self and path == self._self):
                self.writes.add(path.then(kind, key))

    def _any(self, i: dis.Instruction) -> None:
        effect = dis.stack_effect(i.opcode, i.arg, jump=False)
        for _ in range(-effect):
            self._read(self._pop())
        if effect <= 0 and not i.opname.startswith(_ONLY_POP):
            self._read(self._pop())
            effect = 1
        self._stack += [_UNKNOWN] * effect

    # ------------------------------------------------------------------ instructions; False leaves the rest to `_any`

    def _global(self, i: dis.Instruction) -> bool:
        if i.opname == "LOAD_FROM_DICT_OR_GLOBALS":
            self._pop()
        if i.opname == "LOAD_GLOBAL" and (i.arg or 0) & 1:
            self._stack.append(
                _UNKNOWN
            )  # the place of a method's self; Python 3.13 has it on top, and then no attribute
        self._stack.append(frozenset({AccessPath("global", i.argval)}))
        return True

    def _deref(self, i: dis.Instruction) -> bool:
        if i.opname == "LOAD_FROM_DICT_OR_DEREF":
            self._pop()
        found = self.cells.get(i.argval) or (AccessPath("local", i.argval),)
        self._stack.append(_UNKNOWN if i.argval == "__class__" else frozenset(found))
        return True

    def _store(self, i: dis.Instruction) -> bool:
        if i.opname == "STORE_DEREF":
            if {*self.cells.get(i.argval, ())} == {AccessPath("closure", i.argval)}:
                self.writes.add(AccessPath("closure", i.argval))
                return False
            self._bind(self.cells, i.argval)
            return True
        self.writes.add(AccessPath("global", i.argval))
        return False

    def _constant(self, i: dis.Instruction) -> bool:
        self._stack.append(_Constant(i.argval))
        return True

    def _attribute(self, i: dis.Instruction) -> bool:
        value = self._stack[-1] if i.opname == "IMPORT_FROM" and self._stack else self._pop()
        self.attributes.add(i.argval)
        if i.argval in _MUTATORS:
            self._change(value, "*", i.argval)
        paths = _UNKNOWN if isinstance(value, _Constant) else frozenset(path.then(".", i.argval) for path in value)
        self._stack.append(paths)
        is_method = i.opname == "LOAD_METHOD" or (sys.version_info >= (3, 12) and bool((i.arg or 0) & 1))
        self._stack += [_UNKNOWN] * (is_method and i.opname != "IMPORT_FROM")
        return True

    def _super(self, i: dis.Instruction) -> bool:
        # Python 3.12 and later load `__class__` and `self` for super(), which is not the same as reading them.
        self._stack[-3:] = [_UNKNOWN] * (1 + bool((i.arg or 0) & 1))
        return True

    def _item(self, _: dis.Instruction) -> bool:
        key, value = self._pop(), self._pop()
        self._read(key)
        paths = _UNKNOWN
        if isinstance(key, _Constant) and type(key.value) in _PLAIN_KEYS and not isinstance(value, _Constant):
            paths = frozenset(path.then("[]", key.value) for path in value)
        else:
            self._read(value)
        self._stack.append(paths)
        return True

    def _change_attribute(self, i: dis.Instruction) -> bool:
        self._change(self._pop(), ".", i.argval)
        if i.opname == "STORE_ATTR":
            self._read(self._pop())
        return True

    def _change_item(self, i: dis.Instruction) -> bool:
        keys = [self._pop() for _ in range(2 if i.opname == "STORE_SLICE" else 1)]
        value, key = self._pop(), keys[0]
        plain = len(keys) == 1 and isinstance(key, _Constant) and type(key.value) in _PLAIN_KEYS
        self._change(value, *(("[]", key.value) if plain and isinstance(key, _Constant) else ("*", "")))
        for read in (*keys, *([] if i.opname == "DELETE_SUBSCR" else [self._pop()])):
            self._read(read)
        return True

    def _copy(self, i: dis.Instruction) -> bool:
        depth = i.arg or 0
        known = len(self._stack) >= depth
        if i.opname == "COPY":
            self._stack.append(self._stack[-depth] if known else _UNKNOWN)
        elif known:
            self._stack[-1], self._stack[-depth] = self._stack[-depth], self._stack[-1]
        else:
            self._forget()
        return True

    def _import(self, i: dis.Instruction) -> bool:
        names, level = self._pop(), self._pop()
        dots = "." * level.value if isinstance(level, _Constant) and isinstance(level.value, int) else ""
        root = "from" if isinstance(names, _Constant) and names.value else "import"
        self._stack.append(frozenset({AccessPath(root, dots + i.argval)}))
        return True

    _INSTRUCTIONS: ClassVar[dict[str, Callable[[Any, dis.Instruction], bool]]] = {
        **dict.fromkeys(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"), _global),
        **dict.fromkeys(("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"), _deref),
        **dict.fromkeys(("STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL"), _store),
        **dict.fromkeys(("LOAD_CONST", "LOAD_SMALL_INT"), _constant),
        **dict.fromkeys(("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"), _attribute),
        **dict.fromkeys(("LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD"), _super),
        "BINARY_SUBSCR": _item,
        **dict.fromkeys(("STORE_ATTR", "DELETE_ATTR"), _change_attribute),
        **dict.fromkeys(("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"), _change_item),
        **dict.fromkeys(("COPY", "SWAP"), _copy),
        "IMPORT_NAME": _import,
    }


# --------------------------------------------------------------------------------------------------- parts of functions


def closure(f: FunctionType) -> dict[str, Any]:
    """Return the variables of enclosing functions that have a value."""
    found = {name: cell_value(f, i) for i, name in enumerate(f.__code__.co_freevars)}
    return {name: value for name, value in found.items() if value is not NOTHING}


def cell_value(f: FunctionType, i: int) -> Any:
    try:
        return (f.__closure__ or ())[i].cell_contents
    except ValueError:
        return NOTHING  # a variable of the enclosing function that has no value yet


def global_value(f: FunctionType, name: str) -> Any:
    return f.__globals__.get(name, NOTHING)


def dict_value(x: object, name: str) -> Any:
    return vars(x).get(name, NOTHING)


def head(f: FunctionType, _: None) -> tuple[Any, ...]:
    """Return the module of a function, whether it wraps another, and which parameters have a default."""
    keywords = f.__kwdefaults__
    names = sorted(keywords) if keywords else ()
    return f.__globals__.get("__name__"), "__wrapped__" in f.__dict__, len(f.__defaults__ or ()), *names


def defaults(f: FunctionType) -> Iterator[tuple[str, object]]:
    return ((name, default_value(f, key)) for name, key in default_keys(f))


def default_keys(f: FunctionType) -> Iterator[tuple[str, str | int]]:
    """Yield the parameters that have a default, each with a key for `default_value`."""
    count = len(f.__defaults__ or ())
    positional = f.__code__.co_varnames[: f.__code__.co_argcount]
    yield from zip(positional[len(positional) - count :], range(count), strict=True)
    yield from ((name, name) for name in sorted(f.__kwdefaults__ or ()))


def default_value(f: FunctionType, key: str | int) -> Any:
    return (f.__kwdefaults__ or {})[key] if isinstance(key, str) else (f.__defaults__ or ())[key]
