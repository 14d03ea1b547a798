"""Names that a function imports while it runs, described by the text of their modules.

A module may be loaded or not when a checksum is asked for, and the checksum must not depend on that. Nothing is
imported here: the statements that define a name are found in the module's file, with the statements that define the
names in them, through all modules of the user's own.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections import deque
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._base.config_codec import fingerprint_of
from tunebook._code import source
from tunebook._code.source import NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tunebook._base.vocabulary import Json


# In a package whose modules all import each other, the nearest definitions count. The first 256 take 0.3 s.
_MOST_DEFINITIONS: Final = 256


class _Module(NamedTuple):
    """The statements at the top of a module, by the names that they define or change."""

    statements: dict[str, list[ast.stmt]]
    stars: list[str]  # modules from which all names are imported
    package: str  # to which relative imports refer


class _Place(NamedTuple):
    filename: str  # empty for a package without an __init__.py
    folders: list[str] | None  # of a package


def absolute_name(name: str, module_globals: dict[str, Any]) -> str:
    """Return the full name of a module that code of another module imports, as in `from ..helpers import f`."""
    package = module_globals.get("__package__") or str(module_globals.get("__name__", "")).rpartition(".")[0]
    return _absolute(name, str(package))


def _absolute(name: str, package: str) -> str:
    level = len(name) - len(name.lstrip("."))
    if level == 0:
        return name
    base = package.rsplit(".", level - 1)[0] if level > 1 else package
    return f"{base}.{name[level:]}".strip(".")


def live_value(_: object, key: tuple[str, tuple[tuple[str, Any], ...]]) -> Any:
    """Return a module, or one of its attributes, if the module is loaded."""
    name, steps = key
    module = sys.modules.get(name, NOTHING)
    if not steps or not isinstance(module, ModuleType):
        return module
    value = vars(module).get(steps[0][1], NOTHING)
    if isinstance(value, FunctionType):
        source.file_with(value.__code__, value.__globals__)  # reads the text again if the module was reloaded
    return value


class ImportedText:
    """Collects the definitions of one imported name."""

    def __init__(self, is_foreign: Callable[[str, str], bool]) -> None:
        self._is_foreign = is_foreign
        self._libraries: set[str] = set()
        self._found: dict[str, Json] = {}
        self._places: dict[str, _Place | None] = {}
        self._modules: dict[str, _Module | None] = {}
        self._definitions = 0
        self._pending: deque[tuple[str, tuple[str, ...]]] = deque()
        self._seen: set[tuple[str, tuple[str, ...]]] = set()

    def describe(self, module: str, steps: tuple[tuple[str, Any], ...]) -> Json:
        """Return the definitions of `module.attribute...`, and of all names in them; None for a module without text."""
        place = self._find(module)
        if place is None or not (place.filename or place.folders):
            return None
        self._pending.append((module, tuple(key for kind, key in steps if kind == ".")))
        while self._pending and self._definitions < _MOST_DEFINITIONS:
            reference = self._pending.popleft()
            if reference not in self._seen:
                self._seen.add(reference)
                self._visit(*reference)
        return {"imported": self._found}

    def versions(self) -> dict[str, str]:
        """Return the versions of the installed packages among the definitions."""
        return {name: _version(name) for name in self._libraries}

    def _find(self, name: str) -> _Place | None:
        if name not in self._places:
            self._places[name] = _find(name)
        return self._places[name]

    def _visit(self, name: str, attributes: tuple[str, ...]) -> None:
        place = self._find(name)
        filename = "" if place is None else place.filename
        if place is None or self._is_foreign(name, filename or "".join(place.folders or ())):
            self._libraries |= {name.partition(".")[0]} - sys.stdlib_module_names - {"tunebook"}
            self._found[name] = ""
            return
        self._found.setdefault(name, "")
        if name not in self._modules:
            tree = source.tree_of(filename) if filename else None
            is_package = place.folders is not None
            self._modules[name] = None if tree is None else _index(tree, name, is_package=is_package)
        module = self._modules[name]
        if not attributes:
            return
        first, *rest = attributes
        if module is not None and first in module.statements:
            self._define(name, module, first, tuple(rest))
        elif place.folders is not None and self._find(f"{name}.{first}") is not None:
            self._pending.append((f"{name}.{first}", tuple(rest)))
        elif module is not None:
            self._pending.extend((star, attributes) for star in module.stars)
            if "__getattr__" in module.statements:
                self._define(name, module, "__getattr__", ())

    def _define(self, name: str, module: _Module, variable: str, attributes: tuple[str, ...]) -> None:
        """Note the statements that define a variable; look for the names in them next."""
        texts: list[ast.stmt] = []
        for statement in module.statements[variable]:
            if not isinstance(statement, (ast.Import, ast.ImportFrom)):
                texts.append(statement)
                continue
            for target, path in _targets(statement, module.package, variable):
                if (target, path) == (name, (variable,)):  # `from . import variable` in a package
                    self._pending.append((f"{name}.{variable}", attributes))
                else:
                    self._pending.append((target, path + attributes))
        address = f"{name}:{variable}"
        if address not in self._found:
            self._definitions += 1
            self._found[address] = [_digest_of(statement) for statement in texts]
            for statement in texts:
                for target, path in _references(statement, module.package):
                    if target:
                        self._pending.append((target, path))
                    elif path[0] in module.statements or module.stars:
                        self._pending.append((name, path))


@functools.lru_cache(4096)
def _digest_of(statement: ast.stmt) -> str:
    return fingerprint_of(source.normal_form(statement))


def _find(name: str) -> _Place | None:
    """Return the file of a module, without importing it."""
    loaded = sys.modules.get(name)
    filename, folders = getattr(loaded, "__file__", None), getattr(loaded, "__path__", None)
    if isinstance(filename, str) and loaded is not None:
        return _Place(filename if filename.endswith(".py") else "", None if folders is None else [*folders])
    parent, _, _ = name.rpartition(".")
    above = _find(parent) if parent else None
    if parent and (above is None or above.folders is None):
        return None
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, None if above is None else above.folders)
        except (AttributeError, ImportError, OSError, ValueError):
            continue  # a finder of an old kind, or of a package that is broken
        if spec is not None:
            origin = spec.origin if spec.has_location and spec.origin is not None else ""
            folders = spec.submodule_search_locations
            return _Place(origin if origin.endswith(".py") else "", None if folders is None else [*folders])
    return None


@functools.lru_cache(64)
def _version(root: str) -> str:
    # Not `__version__`: the library may not be loaded yet.
    from importlib import metadata  # noqa: PLC0415 - 15 ms to import

    try:
        return metadata.version(root)
    except metadata.PackageNotFoundError:
        return "unknown"


@functools.lru_cache(64)
def _index(tree: ast.Module, name: str, *, is_package: bool) -> _Module:
    module = _Module({}, [], name if is_package else name.rpartition(".")[0])
    for statement in tree.body:
        for variable in _defined(statement):
            module.statements.setdefault(variable, []).append(statement)
        if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
            module.stars.append(_absolute("." * statement.level + (statement.module or ""), module.package))
    return module


def _defined(statement: ast.stmt) -> set[str]:
    """Return the variables that a statement may define or change."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    words = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}
    if isinstance(statement, ast.If):
        conditions = {n.id for n in ast.walk(statement.test) if isinstance(n, ast.Name)}
        conditions |= {n.attr for n in ast.walk(statement.test) if isinstance(n, ast.Attribute)}
        if conditions & {"__name__", "TYPE_CHECKING"}:
            return set()  # not run when the module is imported
    inner = (each for each in ast.walk(statement) if isinstance(each, ast.stmt) and each is not statement)
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    return words.union(*(_defined(each) for each in inner if isinstance(each, definitions)))


@functools.lru_cache(4096)
def _references(statement: ast.stmt, package: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return the names that a statement uses: modules that it imports, and "" with a path of names."""
    found: dict[tuple[str, tuple[str, ...]], None] = {}
    inside: set[ast.AST] = set()  # the parts of paths that are noted as a whole
    for node in ast.walk(statement):  # outer nodes first
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update(dict.fromkeys(_targets(node, package, None)))
        if node in inside:
            continue
        path: list[str] = []
        root: ast.AST = node
        while isinstance(root, ast.Attribute):
            path.append(root.attr)
            root = root.value
            inside.add(root)
        if isinstance(root, ast.Name):
            found["", (root.id, *reversed(path))] = None
    return list(found)


def _targets(
    statement: ast.Import | ast.ImportFrom, package: str, variable: str | None
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the modules and names that an import statement gives to a variable, or to all of its variables."""
    for alias in statement.names:
        given = alias.asname or alias.name.partition(".")[0]
        if variable is not None and given != variable:
            continue
        if isinstance(statement, ast.ImportFrom):
            yield _absolute("." * statement.level + (statement.module or ""), package), (alias.name,)
        else:
            yield alias.name if alias.asname else given, ()
