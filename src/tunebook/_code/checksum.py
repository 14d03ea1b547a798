"""Digests over code, which change when a kernel is edited.

A kernel is more than its own text. The walk starts at its function and follows every name that the code reads, through
globals, closures, attributes of modules, classes and objects, to functions, classes and constants of the user's own
code. At the edge of that code (the standard library, installed packages) it notes a name, and stops. The versions of
these packages are not code: they are part of the environment of a measurement.

The walk writes down each value that it takes from the running program, as a list of steps. For a new closure or a new
instance of a known class, `_replay` repeats the steps and compares, at 0.2 us each, and the walk is not repeated.
"""

from __future__ import annotations

import ast
import functools
import operator
import sys
import weakref
from collections import ChainMap, deque
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._arrays.describe import is_array
from tunebook._base.config_codec import encode, fingerprint, fingerprint_of
from tunebook._code import replay, source, values
from tunebook._code.replay import CodeFacts, Read, Recipe, SeenValue
from tunebook._code.source import NOTHING, ByIdentity, closure, inner_callable, node_of
from tunebook._code.values import PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

    from tunebook._base.vocabulary import Json

_KEPT: Final = 8  # recipes for one code object: closures with other values
_MOST_STEPS: Final = 4096  # a longer recipe takes more memory than its time is worth


def code_checksum(function: object, *, version: str = "", extra: Iterable[object] = ()) -> str:
    """Return a digest over a function's code and the user's own code and values that it reads, as `read_code` does."""
    return read_code(function, version=version, extra=extra).checksum


def checksum_beside(function: object, values: Iterable[object]) -> str:
    """Return a digest over values that belong to a function; the code of its package counts as in `read_code`."""
    roots = tuple(values)
    return _digest(roots, None, _DigestOptions(len(roots), "", _home(_innermost(function)))).checksum


def read_code(function: object, *, version: str = "", extra: Iterable[object] = ()) -> CodeFacts:
    """Return the facts of a function's code and of the user's own code and values that it reads.

    Comments, docstrings, formatting and the place of the file do not matter. Variables that the code itself changes
    are left out, and arrays count by their description, not by their content. `extra` adds further functions, classes
    or values. An object with `__tunebook_checksum__() -> str` gives its own digest, and with
    `__tunebook_versions__() -> Mapping[str, str]` its versions. Pass a bound method rather than the function of a class
    to have `self.helper()` followed.
    """
    innermost = _innermost(function)
    roots = (function, *extra)
    return _digest(roots, innermost, _DigestOptions(len(roots), version, _home(innermost)))


def read_members(owner: object, names: Callable[[Any, Any], tuple[str, ...]], *, version: str = "") -> CodeFacts:
    """Return the facts of some methods of an object; `names(owner, None)` returns their names."""
    return _digest((owner,), owner, _DigestOptions(1, version, _home(type(owner)), names=names))


def source_digest(function: object) -> str:
    """Return a digest for call keys: as `code_checksum`, but all installed packages are foreign."""
    # Otherwise an activation function from a big framework would drag half the framework into every key.
    return _digest((function,), _innermost(function), _DigestOptions(1, "", "")).checksum


def candidates_checksum(candidates: Iterable[object]) -> str:
    """Return a digest over a set of candidates, in any order."""
    own = getattr(candidates, "fingerprint", None)  # a `Space` has a digest that does not list its configurations
    if own is not None:
        return str(own())
    return fingerprint_of(sorted({fingerprint(candidate) for candidate in candidates}))  # type: ignore[arg-type] # list[str] is Json


def _innermost(function: object) -> object:
    """Return the function inside all wrappers."""
    for _ in range(16):  # a wrapper may claim to wrap itself
        if isinstance(function, functools.partial):
            function = function.func
        elif (inner := inner_callable(function)) is not None:
            function = inner
        else:
            break
    return function


def _home(function: object) -> str:
    """Return the top-level package whose code counts as the user's own even if it is installed."""
    root = str(getattr(function, "__module__", "")).partition(".")[0]
    return "" if root == "__main__" else root


class _DigestOptions(NamedTuple):
    """The arguments of a digest beside the live values."""

    roots: int
    version: str
    home: str
    names: Callable[[Any, Any], tuple[str, ...]] | None = None


# ------------------------------------------------------------------------------------------------- known digests


_RECIPES: Final[ByIdentity[tuple[Recipe, ...]]] = ByIdentity()  # by code object, or by class


def _digest(roots: tuple[object, ...], innermost: Any, options: _DigestOptions) -> CodeFacts:
    anchor = getattr(innermost, "__code__", None) or type(innermost)
    known = _RECIPES.get(anchor) or ()
    for recipe in known:
        if recipe.options == options and replay.replay(recipe.steps, roots):
            return recipe.facts
    facts: set[Any] = set()
    walks: list[_CodeWalk] = []  # they keep alive the objects whose ids are among the facts
    while True:
        walk = _CodeWalk(roots, innermost, options, facts)
        digest = walk.digest()
        walks.append(walk)
        new = walk.found - facts
        if not new or not (walk.asked or any(isinstance(fact, tuple) for fact in new)):
            break
        # The code changes values that were read before that was known, or mentions more attributes.
        facts = walk.found
    read = CodeFacts(digest, walk.versions)
    if walk.replays and len(walk.steps) <= _MOST_STEPS:
        _RECIPES.put(anchor, (Recipe(options, tuple(walk.steps), read), *known[: _KEPT - 1]))
    return read


def _test_for(value: Any) -> tuple[Callable[[Any, Any, list[Any]], bool], Any]:
    """Return a test for a value that does not keep it alive. The parts of an object have steps of their own."""
    kind = type(value)
    if kind in PLAIN or value is NOTHING:
        return replay.is_plain, value
    if kind is FunctionType:
        return replay.has_code, weakref.ref(value.__code__)
    if isinstance(value, (type, ModuleType, BuiltinFunctionType)):
        return replay.is_it, weakref.ref(value)
    return replay.is_instance, weakref.ref(kind)


# -------------------------------------------------------------------------------------------------------- the walk


class _CodeWalk:
    """Lists all reachable objects, each once, in an order that does not depend on addresses or hashes.

    `facts` come from an earlier walk: names of attributes that the code mentions, and the ids of the places that it
    changes. `found` has the facts of this walk too.
    """

    def __init__(self, roots: tuple[object, ...], innermost: Any, options: _DigestOptions, facts: set[Any]) -> None:
        self._options = options
        self.innermost = innermost
        self.found: set[Any] = {*facts}
        self.asked = False  # for the names of attributes
        self.replays = True
        self.values: list[Any] = [roots]
        self.versions: dict[str, str] = {}
        self.steps: list[SeenValue] = []
        self._registers: dict[tuple[int, Read, Hashable], int] = {}
        self._nodes: list[Json] = []
        self._numbers: dict[tuple[int, int], tuple[int, int, int | None]] = {}
        self._pending: deque[tuple[int, int, int | None]] = deque()
        self._alive: list[object] = []  # the id of a freed object may come back

    def digest(self) -> str:
        registers: list[tuple[int, int | None]] = [
            (self.load(0, operator.getitem, i), None) for i in range(self._options.roots)
        ]
        if self._options.names is not None:
            owner = registers[0][0]
            names = self.note(owner, self._options.names)
            routes = [values.route(self.values[owner], name, is_own=True) for name in names]
            registers = [self._hop(owner, *route) for route in routes if route is not None]
        referred: list[Json] = [self.refer(*register) for register in registers]
        while self._pending:
            number, register, bound_to = self._pending.popleft()
            is_function = isinstance(self.values[register], FunctionType)
            self._nodes[number] = self._function(register, bound_to) if is_function else values.parts(self, register)
        return fingerprint_of([self._options.version, referred, self._nodes])

    def load(self, origin: int, read: Read, key: Hashable = None) -> int:
        address = origin, read, key
        if address not in self._registers:
            value = read(self.values[origin], key)
            self._registers[address] = len(self.values)
            self.steps.append(SeenValue(read, origin, key, *_test_for(value)))
            self.values.append(value)
        return self._registers[address]

    def note(self, origin: int, read: Read, key: Hashable = None) -> Any:
        value = read(self.values[origin], key)
        is_same = (
            replay.is_plain
            if type(value) is not tuple
            else replay.are_plain
            if read is values.contents
            else replay.are_names
        )
        self.steps.append(SeenValue(read, origin, key, is_same, value))
        self.values.append(value)
        return value

    def refer(self, register: int, owner: int | None = None) -> Json:
        """Return a plain value itself, and a number for an object with parts, so that cycles end."""
        x = self.values[register]
        if type(x) in PLAIN:
            return {"value": encode(x)}
        if isinstance(x, ModuleType):
            self._note_version(x.__name__)
            return {"module": x.__name__}
        if isinstance(x, MethodType):
            return self.refer(
                self.load(register, values.attribute, "__func__"), self.load(register, values.attribute, "__self__")
            )
        if not isinstance(x, (FunctionType, tuple)) and is_array(x):
            return {"array": self.note(register, values.array_text)}
        key = id(x), 0 if owner is None else id(self.values[owner])
        if key not in self._numbers:
            self._numbers[key] = len(self._nodes), register, owner
            self._nodes.append(None)
            self._pending.append((len(self._nodes) - 1, register, owner))
        number, first, first_owner = self._numbers[key]
        first = self._tie(first, register)
        if owner is not None and first_owner is not None:
            first_owner = self._tie(first_owner, owner)
        self._numbers[key] = number, first, first_owner
        return {"node": number}

    def _tie(self, one: int, other: int) -> int:
        """Let the later of two registers of one object be compared with the earlier; return the earlier."""
        earlier, later = sorted((one, other))
        if earlier != later:
            self.steps[later - 1] = self.steps[later - 1]._replace(is_same=replay.is_shared, expected=earlier)
        return earlier

    # ------------------------------------------------------------------------------------------------------ functions

    def _function(self, register: int, owner: int | None) -> Json:
        f: FunctionType = self.values[register]
        # Not __module__: functools.wraps copies that from the function inside.
        name, is_wrapper, *_ = self.note(register, source.head)
        module = str(name or "")
        wrapped = self.load(register, source.dict_value, "__wrapped__") if is_wrapper else None
        parts: dict[str, Json] = {} if wrapped is None else {"wrapped": self.refer(wrapped)}
        if self._is_foreign(module, f.__code__.co_filename):
            parts |= self.foreign(module, f.__code__.co_qualname)
            if "<" in f.__code__.co_qualname:  # functions made inside another function share a qualified name
                cells: list[Json] = [
                    self.refer(self._variable(register, f, name)) for name, _ in sorted(closure(f).items())
                ]
                parts |= {"code": values.code_form(f.__code__), "closure": cells}
            return parts
        node = node_of(f)
        if node is None and wrapped is not None:
            return parts  # a generated wrapper, like tunebook's own
        uses = source.uses(f.__code__, bound=owner is not None)
        self.found |= uses.attributes
        self._note_changes(f, owner, uses.writes)
        # A default that the code changes, as in `memo[key] = y`, is state.
        state = {path.name for path in uses.writes if path.root == "parameter" and path.steps[0][0] != "."}
        kept = _kept_decorators(node, f)
        # The constants that the decorators were given, as in `@njit(fastmath=FAST)`.
        visible = ChainMap(closure(f), f.__globals__)
        given = sorted({n.id for decorator in kept for n in ast.walk(decorator) if isinstance(n, ast.Name)})
        return {
            **parts,
            "code": values.code_form(f.__code__) if node is None else source.normal_form(node, kept),
            "names": dict(self._names(register, f, owner, uses.reads)),
            "decorators": {
                n: self.refer(self._variable(register, f, n)) for n in given if n in visible and _is_data(visible[n])
            },
            "defaults": {
                name: self.refer(self.load(register, source.default_value, key))
                for name, key in source.default_keys(f)
                if name not in state
            },
        }

    def _variable(self, register: int, f: FunctionType, name: str) -> int:
        if name in f.__code__.co_freevars:
            return self.load(register, source.cell_value, f.__code__.co_freevars.index(name))
        return self.load(register, source.global_value, name)

    def _names(
        self, register: int, f: FunctionType, owner: int | None, reads: Iterable[source.AccessPath]
    ) -> Iterator[tuple[str, Json]]:
        for path in reads:
            if path.root in ("import", "from"):
                yield f"import {path.text()}", self._imported(f, path)
            elif (followed := self._follow(register, f, owner, path)) is not None:
                taken, found, bound_to = followed
                yield path.text(taken), self.refer(found, bound_to)
        if owner is not None and "__class__" in f.__code__.co_freevars:  # it calls super()
            n = 0
            while values.definition(self.values[owner], (f.__name__, n)) is not NOTHING:
                yield f"super {n}", self.refer(self.load(owner, values.definition, (f.__name__, n)), owner)
                n += 1

    def _follow(
        self, register: int, f: FunctionType, owner: int | None, path: source.AccessPath
    ) -> tuple[int, int, int | None] | None:
        """Follow a dotted name; return the number of steps followed, the register of the value, and of its self.

        None if the name is not defined, or is state of the code.
        """
        value, is_state = self._start(f, owner, path)
        routes, value, passes_state = self._routes(value, path.steps)
        is_state |= passes_state or (id(value), "*", "") in self.found
        if is_state and value is not NOTHING and _is_data(value):
            return None
        found = owner if path.root == "self" and owner is not None else self._variable(register, f, path.name)
        return None if (end := self._walk_along(found, routes)) is None else (len(routes), *end)

    def _routes(self, value: Any, steps: Iterable[tuple[str, Any]]) -> tuple[list[tuple[Read, Any]], Any, bool]:
        """Follow steps from a value; return how, the value at the end, and whether the code changes one on the way."""
        routes: list[tuple[Read, Any]] = []
        is_state = False
        for kind, key in steps:
            route = None if value is NOTHING else self._route(value, kind, key)
            if route is None:
                break
            is_state |= self.is_state(value, kind, key)
            routes.append(route)
            value = route[0](value, route[1])
        return routes, value, is_state

    def _walk_along(self, register: int, routes: Iterable[tuple[Read, Any]]) -> tuple[int, int | None] | None:
        bound_to: int | None = None
        for read, key in routes:
            register, bound_to = self._hop(register, read, key)
        return None if self.values[register] is NOTHING else (register, bound_to)

    def _hop(self, register: int, read: Read, key: Any) -> tuple[int, int | None]:
        found = self.load(register, read, key)
        if read not in (values.member, values.quick_member) or not isinstance(self.values[found], FunctionType):
            return found, None
        x = self.values[register]
        bound_to = values.owner_of(x, key)
        if bound_to is None or bound_to is x:
            return found, None if bound_to is None else register
        return found, self.load(register, values.kind_of)

    def _start(self, f: FunctionType, owner: int | None, path: source.AccessPath) -> tuple[Any, bool]:
        """Return the value of a variable, and whether the code changes the variable."""
        if path.root == "self" and owner is not None:
            return self.values[owner], False
        cells = dict(zip(f.__code__.co_freevars, f.__closure__ or (), strict=True))
        if path.name in cells:
            return closure(f).get(path.name, NOTHING), (id(cells[path.name]),) in self.found
        # Builtins are left out: they come with Python, whose version is part of the environment.
        return f.__globals__.get(path.name, NOTHING), (id(f.__globals__), ".", path.name) in self.found

    def _route(self, x: Any, kind: str, key: Any) -> tuple[Read, Any] | None:
        """Return how to read an attribute or item of a value of the user's own; None where the path ends."""
        if kind != ".":
            is_index = type(x) in (list, tuple) and type(key) is int and -len(x) <= key < len(x)
            return (operator.getitem, key) if is_index or (type(x) is dict and key in x) else None
        if isinstance(x, ModuleType):
            if self._is_foreign(x.__name__, str(getattr(x, "__file__", None) or "")):
                return None
            return source.dict_value, key if key in vars(x) or "__getattr__" not in vars(x) else "__getattr__"
        if isinstance(x, FunctionType):
            is_own = not self._is_foreign(str(x.__globals__.get("__name__", "")), x.__code__.co_filename)
            return (source.dict_value, key) if is_own and key in vars(x) else None
        owner = x if isinstance(x, type) else type(x)
        return None if owner.__module__ == "builtins" else values.route(x, key, is_own=self.is_own(owner))

    # ---------------------------------------------------------------------------------------------------------- state

    def _note_changes(self, f: FunctionType, owner: int | None, writes: Iterable[source.AccessPath]) -> None:
        """Note the places that a function changes. A counter must not make a kernel look edited."""
        for path in writes:
            attributes = [key for kind, key in path.steps if kind == "."]
            if path.root == "parameter":
                # Of an object that is not known: the attribute of this name is state of every object.
                self.found |= {(0, ".", name) for name in attributes[-1:]}
            elif path.steps:
                self._note_change(self._start(f, owner, path)[0], path.steps)
            elif path.root == "global":
                self.found.add((id(f.__globals__), ".", path.name))
            elif path.name in f.__code__.co_freevars:
                self.found.add((id((f.__closure__ or ())[f.__code__.co_freevars.index(path.name)]),))

    def _note_change(self, holder: Any, steps: tuple[tuple[str, Any], ...]) -> None:
        routes, holder, _ = self._routes(holder, steps[:-1])
        if holder is NOTHING or len(routes) < len(steps) - 1:
            return
        kind, key = steps[-1]
        self._alive.append(holder)
        if kind == ".":
            self.found.add((id(_namespace(holder)), kind, key))
            return
        # `registry.add(x)` of a class of the user's own is a method with a code of its own.
        is_own = kind == "*" and self.is_own(type(holder))
        has_code = is_own and isinstance(values.member(holder, str(key)), FunctionType)
        if not has_code and not isinstance(holder, (type, ModuleType, FunctionType)):
            self.found.add((id(holder), kind, "" if kind == "*" else key))

    def is_state(self, holder: object, kind: str, key: object) -> bool:
        if kind != ".":
            return (id(holder), kind, key) in self.found or (id(holder), "*", "") in self.found
        if (id(_namespace(holder)), kind, key) in self.found:
            return True
        if isinstance(holder, ModuleType):
            return False
        kinds = holder.__mro__ if isinstance(holder, type) else type(holder).__mro__
        return (0, kind, key) in self.found or any((id(each), kind, key) in self.found for each in kinds)

    def mentioned(self) -> frozenset[str]:
        self.asked = True
        return frozenset(fact for fact in self.found if isinstance(fact, str))

    # ------------------------------------------------------------------------------------- the edge of the user's code

    def _imported(self, f: FunctionType, path: source.AccessPath) -> Json:
        """Describe a name that the code imports while it runs."""
        from tunebook._code.imports import ImportedText, absolute_name, live_value  # noqa: PLC0415 - few kernels do

        module = absolute_name(path.name, f.__globals__)
        module = module if path.root == "from" else module.partition(".")[0]
        # Only to be compared: a module that is loaded again, or for the first time, may have another text.
        self.load(0, live_value, (module, path.steps[:1]))
        text = ImportedText(self._is_foreign)
        described = text.describe(module, path.steps)
        self.versions = {**text.versions(), **self.versions}
        if described is not None:
            return described
        # Made by hand, or without a text: the module itself, if it is there.
        loaded = self.load(0, live_value, (module, ()))
        end = self._walk_along(loaded, self._routes(self.values[loaded], path.steps)[0])
        return {"module": module} if end is None else self.refer(*end)

    def is_own(self, kind: type) -> bool:
        module = sys.modules.get(kind.__module__)
        return not self._is_foreign(kind.__module__, str(getattr(module, "__file__", None) or ""))

    def _is_foreign(self, module: str, filename: str) -> bool:
        root = module.partition(".")[0]
        if root and root == self._options.home:
            return False
        return root == "tunebook" or root in sys.stdlib_module_names or _is_installed(filename)

    def foreign(self, module: str, name: str) -> dict[str, Json]:
        self._note_version(module)
        return {"foreign": f"{module}.{name}"}

    def _note_version(self, module: str) -> None:
        root = module.partition(".")[0]
        # Python's version is noted for every kernel; a release of tunebook must not touch the entries of any.
        if root not in ("tunebook", "__main__", self._options.home) and root not in sys.stdlib_module_names:
            self.versions[root] = str(self.values[self.load(0, values.loaded_version, root)])


@functools.lru_cache(1000)
def _is_installed(filename: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(PurePath(filename).parts)


def _is_data(value: object) -> bool:
    return not (callable(value) or isinstance(value, ModuleType))


def _namespace(x: object) -> object:
    """Return the object whose id names the attributes of a value; a module's globals are its attributes."""
    return vars(x) if isinstance(x, ModuleType) else x


# -------------------------------------------------------------------------------------------------- parts of functions


def _kept_decorators(node: ast.AST | None, f: FunctionType) -> list[ast.expr]:
    """Return the decorators of a function without tunebook's own, which name candidates and not code."""
    names = ChainMap(closure(f), f.__globals__)
    return [item for item in getattr(node, "decorator_list", ()) if not _is_ours(item, names)]


def _is_ours(decorator: ast.expr, names: Mapping[str, Any]) -> bool:
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
