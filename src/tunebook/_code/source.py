"""The code of live functions and classes: its exact source text, and the names that it reads."""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import sys
from functools import lru_cache, partial
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from tunebook._base.errors import DefinitionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tunebook._base.vocabulary import Json

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

# `ctx` follows from the place in the tree; the others are comments to type checkers.
_SILENT_FIELDS: Final = frozenset({"ctx", "type_comment", "kind", "type_ignores"})

_MUTATORS: Final = frozenset({
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove",
    "reverse", "setdefault", "sort", "update",
})  # fmt: skip


class _File(NamedTuple):
    """A source text that was parsed and compiled once, with an index of its functions and classes."""

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


def _file(filename: str, module_globals: dict[str, Any]) -> _File | None:
    text = "".join(linecache.getlines(filename, module_globals))
    return _parsed(text, filename) if text else None


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
    return _File(frozenset(_codes(whole)), functions, classes)


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


def mutated_names(node: ast.AST) -> frozenset[str]:
    """Return the names of variables whose content the code changes, as in `calls.append(x)` and `memo[key] = y`."""
    # They are state of the function, not constants: a counter must not make a kernel look edited.
    found: set[str] = set()
    for item in ast.walk(node):
        target: ast.expr | None = None
        if isinstance(item, (ast.Subscript, ast.Attribute)) and isinstance(item.ctx, (ast.Store, ast.Del)):
            target = item.value
        elif isinstance(item, ast.Call) and isinstance(item.func, ast.Attribute) and item.func.attr in _MUTATORS:
            target = item.func.value
        while isinstance(target, (ast.Subscript, ast.Attribute)):
            target = target.value
        if isinstance(target, ast.Name):
            found.add(target.id)
    return frozenset(found)


# ------------------------------------------------------------------------------------------ names that functions read


class Read(NamedTuple):
    """A variable that code reads, with the attributes that it reads from it."""

    name: str
    attributes: tuple[str, ...]
    closed_over: bool


def reads(code: CodeType, first: str | None) -> Iterator[Read]:
    """Yield the globals, closed-over variables and attributes of `first` that the code and its inner functions read."""
    name, attributes, closed_over = "", list[str](), False
    for instruction in _instructions(code):
        operation, value = instruction.opname, instruction.argval
        if name and operation in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.append(value)
            continue
        # Python 3.12 and later load `__class__` and `self` for super(), which is not the same as reading them.
        if name and name != "__class__" and not operation.startswith("LOAD_SUPER"):
            yield Read(name, tuple(attributes), closed_over)
        name, attributes, closed_over = "", [], False
        if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
            name = value
        elif operation in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"):
            name, closed_over = value, True
        # Python 3.13 has instructions that load two variables; the attribute is read from the second.
        elif operation.startswith("LOAD_FAST") and first == (value[-1] if isinstance(value, tuple) else value):
            name, closed_over = str(first), True


def rebound_names(code: CodeType) -> frozenset[str]:
    """Return the names that the code rebinds by `global` and `nonlocal`."""
    return frozenset(i.argval for i in _instructions(code) if i.opname in ("STORE_GLOBAL", "STORE_DEREF"))


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    for inner in _codes(code):
        yield from dis.get_instructions(inner)


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


def kept_decorators(node: ast.AST | None, f: FunctionType) -> list[ast.expr]:
    """Return the decorators of a function without tunebook's own, which name candidates and not code."""
    names = {**f.__globals__, **closure(f)}
    return [item for item in getattr(node, "decorator_list", ()) if not _is_ours(item, names)]


def _is_ours(decorator: ast.expr, names: dict[str, Any]) -> bool:
    node, last = decorator, ""  # `last` is the last name of `a.b.c(...)`, and `root` the first
    while isinstance(node, (ast.Call, ast.Attribute)):
        if isinstance(node, ast.Attribute):
            last = last or node.attr
        node = node.func if isinstance(node, ast.Call) else node.value
    root = node.id if isinstance(node, ast.Name) else ""
    if root not in names:
        return (last or root) == "tunable"  # imported inside a function: only the name is known
    found = names[root]
    module = found.__name__ if isinstance(found, ModuleType) else getattr(found, "__module__", None)
    return str(module).partition(".")[0] == "tunebook"


# ----------------------------------------------------------------------------------- functions that run later

_DEFERRED: Final[dict[str, Callable[[Any], bool]]] = {
    "an async function": inspect.iscoroutinefunction,
    "an async generator": inspect.isasyncgenfunction,
    "a generator": inspect.isgeneratorfunction,
}


def refuse_deferred(function: Any, name: str | None = None) -> None:
    """Raise `DefinitionError` for a function whose call runs nothing yet: async functions and generators."""
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    called_by = inspect.getattr_static(type(inner), "__call__", None)
    for kind, is_kind in _DEFERRED.items():
        if is_kind(inner) or is_kind(called_by):
            called = name or getattr(inner, "__qualname__", None) or type(inner).__qualname__
            raise DefinitionError(
                f"{called!r} is {kind}: a call of it returns before it has run, so that there is no time to measure. "
                "Decorate the plain function (def, with return) that does the work, and call it from the "
                f"{kind.partition(' ')[2]}"
            )
