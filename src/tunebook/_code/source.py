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
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tunebook._base.vocabulary import Json

V = TypeVar("V")
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
    file = _file_with(code, function.__globals__)
    if file is None:
        return None
    found = file.functions.get((code.co_firstlineno, code.co_name), [])
    if code.co_name == "<lambda>" and len(found) > 1:
        return _innermost(found, code)
    return found[0] if len(found) == 1 else None


def text_of(function: object) -> str:
    """Return the name of a function for a message; for a lambda its text."""
    node = node_of(function) if isinstance(function, FunctionType) else None
    if isinstance(node, ast.Lambda):
        return ast.unparse(node)
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def inner_callable(x: object) -> Any:
    """Return the function inside a wrapper object, or None."""
    wrapped = getattr(x, "__wrapped__", None)
    if callable(wrapped):
        return wrapped
    # numba, triton. A Python function or nothing: the attributes of other objects may have these names as well.
    return next((f for name in ("py_func", "fn") if isinstance(f := getattr(x, name, None), FunctionType)), None)


def class_node_of(kind: type) -> ast.ClassDef | None:
    """Return the syntax tree of a class; None without a text, or if the text has several classes of that name."""
    # A method leads to the text that was really compiled; a class without methods has only the name of its module.
    methods = (m for m in vars(kind).values() if isinstance(m, FunctionType) and m.__module__ == kind.__module__)
    file = next(filter(None, (_file_with(m.__code__, m.__globals__) for m in methods)), None)
    module = sys.modules.get(kind.__module__)
    filename = getattr(module, "__file__", None)
    if file is None and filename is not None:
        file = _file(filename, vars(module))
    found = [] if file is None else file.classes.get(kind.__qualname__, [])
    return found[0] if len(found) == 1 else None


def _file_with(code: CodeType, module_globals: dict[str, Any]) -> _File | None:
    file = _file(code.co_filename, module_globals)
    if file is None or code not in file.codes:
        linecache.checkcache(code.co_filename)  # the text may have been kept since before a reload
        file = _file(code.co_filename, module_globals)
    return file if file is not None and code in file.codes else None


def _file(filename: str, module_globals: dict[str, Any] | None) -> _File | None:
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
    file = _file(filename, None)
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


def _innermost(lambdas: list[FunctionNode], code: CodeType) -> FunctionNode | None:
    """Return the smallest lambda whose body holds every instruction of the code."""
    spans = [(p[0], p[2], p[1], p[3]) for p in code.co_positions() if all(part is not None for part in p)]
    # The prologue has column 0 and no width; it is not part of an expression.
    spans = [span for span in spans if (span[0], span[1]) != (span[2], span[3])]
    if not spans:
        return None  # a constant, which Python 3.12 gives no place, or python -X no_debug_ranges
    start = min((line, column) for line, column, _, _ in spans)
    end = max((line, column) for _, _, line, column in spans)
    bodies = [(node, node.body) for node in lambdas if isinstance(node, ast.Lambda)]
    places = [(node, (b.lineno, b.col_offset), (b.end_lineno or 0, b.end_col_offset or 0)) for node, b in bodies]
    around = [place for place in places if place[1] <= start and end <= place[2]]
    # Lambdas that hold the same code are nested: the innermost starts last, and of equal starts ends first.
    return max(around, key=lambda place: (place[1], -place[2][0], -place[2][1]), default=(None,))[0]


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


# ---------------------------------------------------------------------------------------- names that code reads and changes


class Path(NamedTuple):
    """A variable, and the attributes and items that code takes from it: `helpers.TABLE["a"]`.

    The root is "global", "closure", "self" (the first parameter of a method), "import" or "from" (a module that the
    code imports), "parameter", or "local" (a variable with a value that is not known). A step is `(".", "TABLE")`,
    `("[]", "a")`, or `("*", method)` for a change of any part of a container.
    """

    root: str
    name: str
    steps: tuple[tuple[str, Any], ...] = ()

    def then(self, kind: str, key: object) -> Path:
        return Path(self.root, self.name, (*self.steps, (kind, key)))

    def text(self, steps: int | None = None) -> str:
        parts = (f".{key}" if kind == "." else f"[{key!r}]" for kind, key in self.steps[:steps])
        return self.name + "".join(parts)


class Uses(NamedTuple):
    """The places that code reads and changes, and the names of all attributes that it mentions."""

    reads: tuple[Path, ...]
    writes: tuple[Path, ...]
    attributes: frozenset[str]


def uses(code: CodeType, *, bound: bool) -> Uses:
    """Return the places that code and its inner functions use; `bound` says that its first parameter is "self"."""
    known = _USES.get(code) or {}
    if bound not in known:
        reads, writes, attributes = set[Path](), set[Path](), set[str]()
        pending = [(code, {name: {Path("closure", name)} for name in code.co_freevars}, bound)]
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


def _in_order(paths: Iterable[Path]) -> tuple[Path, ...]:
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
_Value: TypeAlias = "frozenset[Path] | _Constant"  # an item on the stack: the places that it may come from
_UNKNOWN: Final = frozenset[Path]()
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

    def __init__(self, code: CodeType, cells: dict[str, set[Path]], *, has_self: bool) -> None:
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + (code.co_flags & 12).bit_count()]
        self._variables = {name: {Path("parameter", name)} for name in parameters}
        self._self = Path("self", parameters[0]) if has_self and parameters else None
        if self._self is not None:
            self._variables[self._self.name] = {self._self}
        self._makes_self = code.co_name in _CONSTRUCTORS
        self._closure_names = {*code.co_cellvars, *code.co_freevars}
        self.cells = {**cells, **{name: self._variables.get(name, set()) for name in code.co_cellvars}}
        instructions = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
        for _ in range(2):  # the first pass learns the values of variables, also of those that a loop sets at its end
            self.reads, self.writes, self.attributes = set[Path](), set[Path](), set[str]()
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
            known = _INSTRUCTIONS.get("BINARY_SUBSCR" if i.argrepr == "[]" else i.opname)
            if known is None or not known(self, i):
                self._any(i)
        if i.opname.startswith(_ENDS):
            self._forget()

    def _variable(self, name: str) -> frozenset[Path]:
        return frozenset(self._variables.get(name) or (Path("local", name),))

    def _pop(self) -> _Value:
        return self._stack.pop() if self._stack else _UNKNOWN

    def _read(self, value: _Value) -> None:
        if not isinstance(value, _Constant):
            self.reads |= {path for path in value if path.root != "parameter"}

    def _forget(self) -> None:
        for value in self._stack:
            self._read(value)
        self._stack.clear()

    def _bind(self, variables: dict[str, set[Path]], name: str) -> None:
        value = self._pop()
        known = variables.setdefault(name, set())
        if not isinstance(value, _Constant) and len(known) < _MANY:
            known |= {path for path in value if path.root != "local" and len(path.steps) < _MANY}

    def _change(self, value: _Value, kind: str, key: object) -> None:
        if isinstance(value, _Constant):
            return
        # An expression, like `type(self)`: any object may be the one that changes.
        for path in value or ({Path("parameter", "")} if kind == "." else ()):
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
            self._stack.append(_UNKNOWN)  # the place of a method's self; Python 3.13 has it on top, and then no attribute
        self._stack.append(frozenset({Path("global", i.argval)}))
        return True

    def _deref(self, i: dis.Instruction) -> bool:
        if i.opname == "LOAD_FROM_DICT_OR_DEREF":
            self._pop()
        found = self.cells.get(i.argval) or (Path("local", i.argval),)
        self._stack.append(_UNKNOWN if i.argval == "__class__" else frozenset(found))
        return True

    def _store(self, i: dis.Instruction) -> bool:
        if i.opname == "STORE_DEREF":
            if {*self.cells.get(i.argval, ())} == {Path("closure", i.argval)}:
                self.writes.add(Path("closure", i.argval))
                return False
            self._bind(self.cells, i.argval)
            return True
        self.writes.add(Path("global", i.argval))
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
        self._stack.append(frozenset({Path(root, dots + i.argval)}))
        return True


_INSTRUCTIONS: Final[dict[str, Callable[[_Tracker, dis.Instruction], bool]]] = {
    **dict.fromkeys(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"), _Tracker._global),
    **dict.fromkeys(("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"), _Tracker._deref),
    **dict.fromkeys(("STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL"), _Tracker._store),
    **dict.fromkeys(("LOAD_CONST", "LOAD_SMALL_INT"), _Tracker._constant),
    **dict.fromkeys(("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"), _Tracker._attribute),
    **dict.fromkeys(("LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD"), _Tracker._super),
    "BINARY_SUBSCR": _Tracker._item,
    **dict.fromkeys(("STORE_ATTR", "DELETE_ATTR"), _Tracker._change_attribute),
    **dict.fromkeys(("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"), _Tracker._change_item),
    **dict.fromkeys(("COPY", "SWAP"), _Tracker._copy),
    "IMPORT_NAME": _Tracker._import,
}


def closure(f: FunctionType) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue  # a variable of the enclosing function that has no value yet
    return found


def defaults(f: FunctionType) -> Iterator[tuple[str, object]]:
    values = f.__defaults__ or ()
    positional = f.__code__.co_varnames[: f.__code__.co_argcount]
    yield from zip(positional[len(positional) - len(values) :], values, strict=True)
    yield from sorted((f.__kwdefaults__ or {}).items())
